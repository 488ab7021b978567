"""Rows of a batch: requests, their texts so far, and the sampling of their next tokens."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpt_cli.errors import ContextError, InputError, counted
from gpt_cli.generation import matcher
from gpt_cli.generation.bad_words import BadWords, bad_words
from gpt_cli.generation.matcher import End, Matcher
from gpt_cli.generation.sampling import sample, uniforms
from gpt_cli.ops import Array
from gpt_cli.options.declare import OptionError
from gpt_cli.options.request import Options, SamplingParams
from gpt_cli.texts.loaded import LoadedModel
from gpt_cli.texts.measures import TopLogprobs
from gpt_cli.texts.text import Text

_DRAWS_AT_ONCE = 128  # the generator takes longer to set up than to run

SAMPLE = 1 << 48  # to the index of a row, each further sample of it adds this

FinishReason: TypeAlias = Literal["stop", "length", "eos", "context", "interrupted"] | End


@dataclass(frozen=True)
class Request:
    """A prompt with its options: one row of a batch, or in a beam search one row per beam."""

    text: Text  # the prompt: at least one token, and fewer than n_positions
    options: Options  # a seed is drawn if they have none
    index: int = 0  # with the seed, the key of its draws; see `SAMPLE`

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", self.options.with_seed())

    @classmethod
    def of_prompt(cls, loaded: LoadedModel, prompt: str, options: Options, index: int) -> "Request":
        """Return the request to continue a prompt; raise InputError if that is not possible."""
        ids = loaded.prompt_ids(prompt, special=options.special)
        options = loaded.with_token_ids(options)
        loaded.config.check_ids(options.stop_token_ids)
        check_limits(loaded, options)
        n_positions = loaded.config.n_positions
        ids = fit(ids, n_positions, options)
        final_length = min(len(ids) + options.max_tokens, n_positions)
        text = Text(ids, edits=loaded.bound_edits(options.edits, len(ids), final_length))
        if text.edits and options.overflow == "shift":
            raise OptionError("overflow", "cannot be shift with edits, which name positions")
        return cls(text, options, index)

    @classmethod
    def of_row(
        cls, loaded: LoadedModel, row: str | Mapping[str, Any], defaults: Options, index: int
    ) -> "Request":
        """Return the request of a prompt, or of a mapping with a "prompt" and options."""
        fields = dict(row) if isinstance(row, Mapping) else {"prompt": row}
        prompt = fields.pop("prompt", None)
        options = defaults.with_row(fields)
        if not isinstance(prompt, str):
            raise InputError('a row needs a string "prompt"')
        if fields.get("seed") is not None:
            index //= SAMPLE  # the row equals a run of it alone, with as many samples
        return cls.of_prompt(loaded, prompt, options, index)

    @property
    def prompt(self) -> list[int]:
        """Return the ids of the prompt."""
        return self.text.ids

    @property
    def rows(self) -> int:
        """Return the number of rows that it takes in a batch."""
        return self.options.beams or 1

    @property
    def seed(self) -> int:
        """Return the seed of the draws."""
        assert self.options.seed is not None  # noqa: S101 (narrows the type)
        return self.options.seed


class NextToken(NamedTuple):
    """A token that follows a text; a `Step` has the same fields."""

    id: int
    logprob: float  # natural logarithm of its probability before any sampling option
    top_logprobs: TopLogprobs  # the likeliest ids with theirs, if requested


class Step(NamedTuple):  # created in a third of the time of a frozen dataclass
    """One new token of one request."""

    row: int  # the number of the request, counted from 0
    id: int  # of the token
    logprob: float  # natural logarithm of its probability before any sampling option
    top_logprobs: TopLogprobs  # the likeliest ids with theirs, if requested
    text: str  # the characters that are now certain; those of the token may come later
    finish_reason: FinishReason | None  # set on the last step
    # Since the first pass began. Tokens of passes in one call share its time evenly.
    seconds: float
    # Of what all rows share: a pass and drafting for it, or passes in one call. It is 0 in further
    # steps of these.
    model_seconds: float = 0.0
    drafted: int = 0  # tokens that the pass verified; 0 in further steps of a pass, too
    accepted: bool = False  # whether this token was drafted and accepted
    hypothesis: int = 0  # of a beam search, from 0, the best
    score: float | None = None  # of the hypothesis up to this token
    stop_reason: str | int | None = None  # the stop string or the token of `stop_token_ids`


class StopStrings:
    """Pass text on up to the first stop string, or with `include` up to its end.

    Text that may begin a stop string is held back until that is decided: it may span tokens.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False):
        self._stops = stops
        self._include = include
        self._begins = {stop[0] for stop in stops}
        self._held = ""
        self.stop: str | None = None  # the stop string that ended the text

    def push(self, text: str) -> str:
        """Take text; return the text that is certain to be before any stop string."""
        if not self._stops:
            return text
        self._held += text
        held = self._held
        spans = []  # of stop strings: end, start, text
        for stop in self._stops:
            start = held.find(stop)
            if start >= 0:
                spans.append((start + len(stop), start, stop))
        if spans:
            # The first complete one, wherever the text was cut.
            end, start, self.stop = min(spans)
            self._held = ""
            return held[: end if self._include else start]
        for cut, character in enumerate(held):
            if character in self._begins and any(s.startswith(held[cut:]) for s in self._stops):
                self._held = held[cut:]
                return held[:cut]
        self._held = ""
        return held

    def flush(self) -> str:
        """Return the text that was held back: no more text follows."""
        held = self._held
        self._held = ""
        return held


class BatchRow:
    """A row of a batch: the text so far of a request, or of one of its beams."""

    def __init__(self, request_number: int, request: Request, loaded: LoadedModel):
        self.request_number = request_number  # in steps
        self.prompt = request.text
        self.options = options = request.options
        self.sampling = options.sampling
        self._key = (request.seed, request.index)
        self._draws_from = -1  # the first step of the random numbers in `_draws`
        self.ids = list(request.prompt)  # of the whole text
        self.generated: list[int] = []
        self.window = list(request.prompt)  # the end of the text, which the model sees
        self.drafts: list[int] = []  # tokens that may follow: see `gpt_cli.generation.speculate`
        self.ngrams: dict[tuple[int, ...], int] = {}  # in `ids`, by `drafts`: where each ends
        self.indexed = 0  # number of ids whose n-grams are known
        self.ended = False  # then it leaves the batch
        self.stop_reason: str | int | None = None  # what ended it: see `Step`
        self._config = loaded.config
        self._decoder = loaded.tokenizer.stream(request.prompt)
        self._stops = StopStrings(options.stop, include=options.include_stop)
        self.matcher: Matcher | None = None
        if options.constraint:
            self.matcher = Matcher(loaded.tokenizer, loaded.config, options.constraint)
        self.bad_words: BadWords | None = None
        self._end = b""  # of the new text: see `BadWords.end`
        if options.bad_words:
            self.bad_words = bad_words(loaded.tokenizer, loaded.config, options.bad_words)

    @property
    def tokens_left(self) -> int:
        """Return the number of tokens until the row has `max_tokens`, or its window is full."""
        left = self.options.max_tokens - len(self.generated)
        return min(left, self._config.n_positions - len(self.window))

    def allowed(self, drafts: Sequence[int] = ()) -> NDArray[np.bool_] | None:
        """Return which tokens may follow the text and drafts (V,), or None for all."""
        allowed = self.matcher.allowed(drafts) if self.matcher else None
        if self.bad_words:
            words = self.bad_words.allowed(self.bad_words.end(self._end, drafts))
            allowed = words if allowed is None else words & allowed
            if self.must_go_on(len(drafts)):
                allowed[[id for id in self._config.eos_token_id if id < len(allowed)]] = False
        return allowed

    def can_go_on(self) -> bool:
        """Return whether a token may follow, perhaps an end token."""
        allowed = self.allowed()
        return allowed is None or bool(allowed.any())

    def must_go_on(self, new: int = 0) -> bool:
        """Return whether no end token may follow the text and `new` further tokens."""
        return self.options.ignore_eos or len(self.generated) + new < self.options.min_tokens

    def fork(self) -> Self:
        """Return a copy, to which other tokens may be appended."""
        row = copy(self)
        row.ids = self.ids[:]
        row.generated = self.generated[:]
        row.window = self.window[:]
        row._decoder = self._decoder.fork()
        row._stops = copy(self._stops)
        row.matcher = self.matcher and self.matcher.fork()
        return row

    def draw(self, step: int) -> float:
        """Return the random number of a step, in [0, 1)."""
        return float(self.draws(step, 1)[0])

    def draws(self, step: int, count: int) -> Array:
        """Return the random numbers of steps: (count,) float64, on the host."""
        first = step - step % _DRAWS_AT_ONCE
        if self._draws_from != first:
            self._draws = uniforms(self._key, first, _DRAWS_AT_ONCE)
            self._draws_from = first
        draws = self._draws[step - first : step - first + count]
        known = len(draws)
        if known < count:
            draws = np.concatenate([draws, self.draws(step + known, count - known)])
        return draws

    def push(self, id: int) -> tuple[str, FinishReason | None]:
        """Append a token; return the text that is now certain, and a reason if the row ends."""
        self.ids.append(id)
        self.generated.append(id)
        self.window.append(id)
        ended = id in self._config.eos_token_id
        if id in self.options.stop_token_ids and not ended:
            return self._stop_at(id), "stop"
        passed = "" if ended else self._decoder.push(id)
        if len(self.generated) > self.options.min_tokens:
            passed = self._stops.push(passed)
        if self._stops.stop is not None:
            self.stop_reason = self._stops.stop
            return passed, "stop"
        if self.matcher:
            self.matcher.push(id)
        if self.bad_words:
            self._end = self.bad_words.end(self._end, [id])
        finish: FinishReason
        if ended:
            finish = "eos"
        elif self.matcher and self.matcher.end:
            finish = self.matcher.end
        elif not self.can_go_on():
            finish = "stuck"
        elif len(self.generated) == self.options.max_tokens:
            finish = "length"
        elif len(self.window) == self._config.n_positions and self.options.overflow != "shift":
            finish = "context"
        else:
            return passed, None
        return passed + self._rest(), finish

    def _stop_at(self, id: int) -> str:
        """End the text at a token of `stop_token_ids`; return the text that is now certain."""
        self.stop_reason = id
        passed = self._stops.push(self._decoder.push(id)) if self.options.include_stop else ""
        return passed + self._rest()

    def _rest(self) -> str:
        """Return the text that was held back: no more text follows."""
        return self._stops.push(self._decoder.flush()) + self._stops.flush()


def check_limits(loaded: LoadedModel, options: Options) -> None:
    """Raise InputError if a constraint is not valid, or no token may be the first of a text.

    ResourceError if llguidance is not installed.
    """
    matcher.check(loaded.tokenizer, loaded.config, options.constraint)
    if options.bad_words:
        row = BatchRow(0, Request(Text([0]), options), loaded)
        if not row.can_go_on():
            raise OptionError("bad_words", "must leave a token to begin with, and leave none")


def fit(prompt: list[int], n_positions: int, options: Options) -> list[int]:
    """Return the part of a prompt (ids) that leaves space for new tokens in the context.

    "error" raises ContextError if no token fits after the prompt. "truncate" drops the oldest
    tokens until all new tokens fit, but reserves at most half of the context for these. "shift"
    keeps the newest half of a prompt that fills the context, as `generate` does with a text.
    """
    if options.overflow == "truncate":
        return prompt[-max(n_positions - options.max_tokens, n_positions // 2) :]
    if len(prompt) < n_positions:
        return prompt
    if options.overflow == "shift":
        return prompt[-(n_positions // 2) :]
    raise ContextError(
        f"the prompt has {counted(len(prompt), 'token')} and leaves no room in the model's context "
        f"of {n_positions:,}; shorten it, or choose overflow truncate or shift"
    )


class Position(NamedTuple):
    """A position in a text: after a row's last token, or after drafts that follow it."""

    row: BatchRow
    drafts: Sequence[int] = ()


class SharedSampling(NamedTuple):
    """Random numbers and options to sample the next tokens of rows with the same options."""

    uniforms: Array  # (steps, B) random numbers, on the host
    banned: Array  # the ids that are never chosen
    params: SamplingParams  # with a temperature above 0


class Sampler:
    """Samples tokens for one model and tokenizer."""

    def __init__(self, loaded: LoadedModel):
        self._ops = loaded.model.ops
        size = loaded.config.vocab_size
        ends = {id for id in loaded.config.eos_token_id if id < size}
        missing = [id for id in loaded.missing_ids if id not in ends]
        as_ids = partial(self._ops.xp.asarray, dtype="int64")
        self._missing = as_ids(missing)
        self._missing_and_ends = as_ids(missing + list(ends))

    def shared_sampling(self, rows: Sequence[BatchRow], steps: int) -> SharedSampling | None:
        """Return what `Ops.draft` and `Ops.decode` need to sample the next `steps` tokens of rows.

        Return None if they cannot: the options of the rows differ, or need a bias, a penalty,
        typical-p, a matcher, bad words or a text that is not yet long enough to end.
        """
        params = rows[0].sampling
        ignore_eos = rows[0].options.ignore_eos
        alike = all(
            row.sampling == params
            and row.options.ignore_eos == row.must_go_on() == ignore_eos
            and not (row.matcher or row.bad_words)
            for row in rows
        )
        if not alike or params.changes_logits or not params.kernels_filter:
            return None
        draws = np.zeros((steps, len(rows)))
        if params.temperature:
            for index, row in enumerate(rows):
                draws[:, index] = row.draws(len(row.generated), steps)
        else:  # of the likeliest tokens, a draw of 0 takes the first
            params = SamplingParams(temperature=1, top_k=1, top_p=1)
        banned = self._missing_and_ends if ignore_eos else self._missing
        return SharedSampling(draws, banned, params)

    def ban(self, logits: Array, positions: Sequence[Position]) -> None:
        """Set the logits (P, V) of tokens that may not be chosen at positions to -inf."""
        xp = self._ops.xp
        logits[:, self._missing] = -xp.inf
        for index, (row, drafts) in enumerate(positions):
            if row.must_go_on(len(drafts)):
                logits[index, self._missing_and_ends] = -xp.inf
            allowed = row.allowed(drafts)
            # If there is none, the drafts end the row, and this token is dropped.
            if allowed is not None and allowed.any():
                logits[index, ~xp.asarray(allowed)] = -xp.inf

    def sample_at(self, logits: Array, positions: Sequence[Position]) -> Array:
        """Sample the next token at every position: logits (P, V) -> ids (P,).

        A draw is keyed by the row and the number of its token. Positions of rows with equal
        parameters are sampled together. The logits of tokens that may not be chosen become -inf.
        """
        xp = self._ops.xp
        self.ban(logits, positions)
        by_params: dict[SamplingParams, list[int]] = {}  # indices of positions
        for index, (row, _) in enumerate(positions):
            by_params.setdefault(row.sampling, []).append(index)
        ids = xp.empty(len(positions), xp.int64)
        for params, indices in by_params.items():
            group = [positions[index] for index in indices]
            part = indices if len(by_params) > 1 else slice(None)  # a list would make a copy
            draws = []
            seen = []
            generated = []
            if params.changes_logits:
                seen = [[*row.ids, *drafts] for row, drafts in group]
                generated = [[*row.generated, *drafts] for row, drafts in group]
            if params.temperature:
                draws = [row.draw(len(row.generated) + len(drafts)) for row, drafts in group]
            ids[part] = sample(self._ops, logits[part], xp.asarray(draws), params, seen, generated)
        return ids
