"""Prefill, decode, stop: from prompts to an iterator of steps, and from steps to completions."""

import itertools
import operator
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal, TypeAlias, get_args

import numpy as np

from gpt_cli.config import GPT2Config
from gpt_cli.errors import ContextError
from gpt_cli.kv_cache import KVCache
from gpt_cli.machine import check_room
from gpt_cli.model import GPT2, PASS, Counts, forward, hidden_states, unembed
from gpt_cli.ops import Array, Ops
from gpt_cli.sampling import (
    GROUP,
    SamplingParams,
    check,
    likeliest,
    sample,
    uniforms,
)
from gpt_cli.tokenizer import StreamDecoder, Tokenizer

FinishReason: TypeAlias = Literal["stop", "length", "eos", "context", "interrupted"]
Overflow: TypeAlias = Literal["error", "truncate", "shift"]


def _draw_seed() -> int:
    return int.from_bytes(os.urandom(4), "little")


@dataclass(frozen=True, kw_only=True)
class Options(SamplingParams):
    """How to continue prompts.

    Raises:
        InputError: a value is outside its range.
    """

    max_tokens: int = 128  # how many new tokens a row gets at most
    seed: int = field(default_factory=_draw_seed)  # below 2**64; else drawn
    stop: Sequence[str] = ()  # strings that end a row and are not part of its text
    use_cache: bool = True  # False computes the whole text again for each token
    ignore_eos: bool = False  # never choose the end token
    special: bool = False  # names such as <|endoftext|> in a prompt stand for the special tokens
    overflow: Overflow = "error"  # what to do with a text beyond the context; see `fit`
    top_logprobs: int = 0  # how many of the likeliest tokens each step lists

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.stop, str):
            raise TypeError("stop must be a list of strings, not one string")
        check(self.max_tokens >= 1, "max-tokens must be 1 or more")
        check(0 <= operator.index(self.seed) < 2**64, "seed must be from 0 to 2**64 - 1")
        check("" not in self.stop, "a stop string must not be empty")
        check(self.top_logprobs >= 0, "top-logprobs must be 0 or more")
        choices = get_args(Overflow)
        check(self.overflow in choices, f"overflow must be one of {', '.join(choices)}")

    @property
    def sampling(self) -> SamplingParams:
        """The part that says how to choose a token."""
        return SamplingParams(**{f.name: getattr(self, f.name) for f in fields(SamplingParams)})


@dataclass(frozen=True)
class Request:
    """One row of a batch: a prompt, and how to continue it."""

    prompt: list[int]  # ids, at least one and fewer than n_positions
    options: Options
    index: int = 0  # with the seed, the key of the row's draws


@dataclass(frozen=True)
class Step:
    """One new token of one row."""

    row: int  # which request
    id: int
    logprob: float  # natural logarithm of the probability that the model gave it, unfiltered
    top_logprobs: list[tuple[int, float]]  # the likeliest ids with theirs, if they were asked for
    text: str  # the characters now certain; the token's own may come with a later step
    finish_reason: FinishReason | None  # set on the row's last step
    seconds: float  # since the first pass began
    model_seconds: float  # of this step's forward pass, which all rows share


@dataclass
class Completion:
    """What followed one prompt."""

    prompt_tokens: int
    seed: int
    text: str = ""  # without the prompt, the stop string and the end token
    ids: list[int] = field(default_factory=list)  # all new tokens, the end or a stop included
    logprobs: list[float] = field(default_factory=list)  # of each of ids
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)  # for each of ids
    seconds: list[float] = field(default_factory=list)  # when each of ids was there
    finish_reason: FinishReason = "interrupted"  # until the row has ended

    def add(self, step: Step) -> None:
        """Append the next step of this row."""
        self.text += step.text
        self.ids.append(step.id)
        self.logprobs.append(step.logprob)
        self.top_logprobs.append(step.top_logprobs)
        self.seconds.append(step.seconds)
        if step.finish_reason is not None:
            self.finish_reason = step.finish_reason


class StopStrings:
    """Text passed on up to the first stop string, also where tokens cut the string in pieces.

    Text that may turn out to be the beginning of a stop string is held back until that is decided.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = stops
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Take text; return what is certain to be before any stop string."""
        self._held += text
        places = [
            (place + len(stop), place)
            for stop in self._stops
            if (place := self._held.find(stop)) >= 0
        ]
        if places:
            self.found = True
            _, first = min(places)  # the first to be complete, however the text came in pieces
            passed, self._held = self._held[:first], ""
            return passed
        keep = max((self._undecided(stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        passed, self._held = self._held[:cut], self._held[cut:]
        return passed

    def flush(self) -> str:
        """Return what was held back: the text has ended and no stop string can follow."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, stop: str) -> int:
        """Return the length of the longest beginning of `stop` that the held text ends with."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)


class _Row:
    """One request and what has come of it."""

    def __init__(self, place: int, request: Request, tokenizer: Tokenizer, config: GPT2Config):
        options = request.options
        self.place = place
        self.options = options
        self.sampling = options.sampling
        self.key = options.seed, request.index
        self.ids = list(request.prompt)  # of the whole text
        self.window = list(request.prompt)  # what of them the model sees: the end
        self.shift = options.overflow == "shift"
        self.remaining = options.max_tokens
        self._config = config
        self._decoder = StreamDecoder(tokenizer)
        self._stops = StopStrings(options.stop)

    @property
    def growth(self) -> int:
        """How many tokens the window can still get."""
        return min(self.remaining, self._config.n_positions - len(self.window))

    def push(self, id: int) -> tuple[str, FinishReason | None]:
        """Take a token; return the text that is now certain, and why the row ends if it does."""
        self.ids.append(id)
        self.window.append(id)
        self.remaining -= 1
        passed = ""
        finish: FinishReason | None = None
        if id in self._config.eos_token_id:
            finish = "eos"
        else:
            passed = self._stops.push(self._decoder.push(id))
        if self._stops.found:
            return passed, "stop"
        if finish is None and self.remaining == 0:
            finish = "length"
        elif finish is None and self.growth == 0 and not self.shift:
            finish = "context"
        if finish is not None:
            passed += self._stops.push(self._decoder.flush()) + self._stops.flush()
        return passed, finish


def fit(prompt: list[int], n_positions: int, options: Options) -> list[int]:
    """Return the part of a prompt (ids) that leaves room for new tokens in the context.

    `options.overflow` says how:
    - "error" refuses a prompt that leaves no room for a single token;
    - "truncate" drops the oldest tokens until all that may follow fit, but never keeps more than
      half of the context free for them;
    - "shift" keeps the newest half of the context of a prompt that fills it; `generate` does the
      same whenever the text does.

    Raises:
        ContextError: the prompt is refused.
    """
    if options.overflow == "truncate":
        return prompt[-max(n_positions - options.max_tokens, n_positions // 2) :]
    if len(prompt) < n_positions:
        return prompt
    if options.overflow == "shift":
        return prompt[-(n_positions // 2) :]
    raise ContextError(
        f"the prompt has {len(prompt)} tokens and leaves no room in the model's context of "
        f"{n_positions}; shorten it, or choose --overflow truncate or shift"
    )


def right_pad(rows: Sequence[Sequence[int]]) -> tuple[Array, Counts]:
    """Make rows equally long: ids (B, T), zeros behind shorter rows, and their lengths (B,)."""
    lengths = np.array([len(row) for row in rows])
    ids = np.zeros((len(rows), lengths.max()), np.int64)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = row
    return ids, lengths


class _Batch:
    """Rows computed side by side, with the cache that they share."""

    def __init__(self, model: GPT2, rows: list[_Row], use_cache: bool):
        self.rows = rows
        self._model = model
        self._use_cache = use_cache
        self._cache: KVCache | None = None

    def next_logits(self) -> Array:
        """Compute the logits (B, V) of each row's next token."""
        model, xp = self._model, self._model.ops.xp
        if self._cache is not None:
            new = xp.asarray([row.window[-1:] for row in self.rows])
            return forward(model, new, self._cache)[:, -1]
        ids, lengths = right_pad([row.window for row in self.rows])
        width = ids.shape[1]
        if self._use_cache:
            capacity = max(len(row.window) + row.growth for row in self.rows)
            self._cache = KVCache(model.config, model.ops, len(self.rows), capacity)
            width = max(1, PASS // len(self.rows))
        last: dict[int, Array] = {}  # of each row, the state (C,) at its last token
        for start in range(0, ids.shape[1], width):
            some = ids[:, start : start + width]
            left = lengths - start
            new = np.clip(left, 0, some.shape[1])
            x = hidden_states(model, xp.asarray(some), self._cache, new)
            for row in np.flatnonzero((left > 0) & (left <= some.shape[1])).tolist():
                last[row] = x[row, left[row] - 1].copy()  # not a view, which would keep all of x
        return unembed(model, xp.stack([last[row] for row in range(len(self.rows))]))

    def keep(self, places: list[int]) -> None:
        """Go on with these rows only."""
        if len(places) == len(self.rows):
            return
        self.rows = [self.rows[place] for place in places]
        if self._cache is not None:
            self._cache.keep(places)

    def shift(self) -> None:
        """Let rows that fill the context go on with their newest half, computed again.

        Positions are learned, so what the cache holds cannot be moved to other positions.
        """
        for row in self.rows:
            if row.growth == 0:
                row.window = row.window[-(self._model.config.n_positions // 2) :]
                self._cache = None


def working_set(config: GPT2Config, requests: Sequence[Request]) -> int:
    """Estimate the bytes that continuing these side by side takes beside the weights."""
    rows = len(requests)
    prompt = max((len(row.prompt) for row in requests), default=0)
    room = [config.n_positions - len(row.prompt) for row in requests]
    new = [min(row.options.max_tokens, left) for row, left in zip(requests, room, strict=True)]
    length = prompt + max(new, default=0)
    cached = all(row.options.use_cache for row in requests)
    # Keys and values; and one of them once more, while rows leave.
    cache = 3 * config.n_layer * rows * length * config.n_embd if cached else 0
    tokens = min(rows * prompt, max(rows, PASS)) if cached else rows * length
    widths = 6 * config.n_embd + 3 * config.inner_size
    layer = tokens * (widths + config.n_head * length)  # with the scores of the attention
    # As `sampling.likely_columns` does where k is large.
    among_all = any(not 0 < row.options.top_k <= config.vocab_size // GROUP for row in requests)
    # Logits, and what sampling makes of them, or of the few that top-k leaves.
    vocabulary = (12 if among_all else 7) * rows * config.vocab_size
    return 4 * (cache + max(layer, vocabulary))


def generate(model: GPT2, tokenizer: Tokenizer, requests: Sequence[Request]) -> Iterator[Step]:
    """Continue prompts side by side, a token of each row at a time.

    Args:
        model: the weights.
        tokenizer: gives the text of the steps, and the ids that stand for nothing.
        requests: the rows. The cache is used where all of them want it.

    Returns:
        An iterator of a step for each token of each row, until all have finished. It raises
        CheckpointError where the weights are damaged.

    Raises:
        ResourceError: there is not enough memory.
    """
    check_room(
        f"{len(requests)} texts side by side need about",
        working_set(model.config, requests),
        model.ops.free_memory(),
        "have fewer at a time, or shorter ones",
    )
    return _steps(model, tokenizer, requests)


def _steps(model: GPT2, tokenizer: Tokenizer, requests: Sequence[Request]) -> Iterator[Step]:
    config, ops, xp = model.config, model.ops, model.ops.xp
    eos = {id for id in config.eos_token_id if id < config.vocab_size}
    missing = set(tokenizer.missing_ids(config.vocab_size)) - eos
    ends, never = (xp.asarray(sorted(ids), dtype=xp.int64) for ids in (eos, missing))
    rows = [_Row(place, row, tokenizer, config) for place, row in enumerate(requests)]
    batch = _Batch(model, rows, all(row.options.use_cache for row in rows))
    start = time.perf_counter()

    for step in itertools.count():
        if not batch.rows:
            return
        began = time.perf_counter()
        logits = batch.next_logits()
        model_seconds = time.perf_counter() - began
        normalizer = ops.log_normalizer(logits)  # of all, also of what may not be chosen
        top = _top_logprobs(ops, logits, [row.options.top_logprobs for row in batch.rows])
        logits[:, never] = -xp.inf
        for place, row in enumerate(batch.rows):
            if row.options.ignore_eos:
                logits[place, ends] = -xp.inf
        chosen = _choose(ops, logits, batch.rows, step)
        logprobs = ops.to_host(logits[xp.arange(len(chosen)), chosen] - normalizer).tolist()
        ids = ops.to_host(chosen).tolist()
        seconds = time.perf_counter() - start

        unfinished = []
        for place, row in enumerate(batch.rows):
            text, finish = row.push(ids[place])
            logprob = logprobs[place]
            yield Step(
                row.place, ids[place], logprob, top[place], text, finish, seconds, model_seconds
            )
            if finish is None:
                unfinished.append(place)
        batch.keep(unfinished)
        batch.shift()


def _choose(ops: Ops, logits: Array, rows: Sequence[_Row], step: int) -> Array:
    """Sample the next token of each row (B,), rows of equal parameters together."""
    xp = ops.xp
    alike: dict[SamplingParams, list[int]] = {}
    for place, row in enumerate(rows):
        alike.setdefault(row.sampling, []).append(place)
    chosen = xp.empty(len(rows), xp.int64)
    for params, places in alike.items():
        seen = [rows[place].ids for place in places]
        some = places if len(alike) > 1 else slice(None)  # a list would make a copy
        # The likeliest token needs no draw.
        keys = [rows[place].key for place in places] if params.temperature else []
        draws = xp.asarray(uniforms(keys, step))
        chosen[some] = sample(ops, logits[some], draws, params, seen)
    return chosen


def _top_logprobs(ops: Ops, logits: Array, counts: Sequence[int]) -> list[list[tuple[int, float]]]:
    """The likeliest tokens of each row, as many as it asks for, with their logarithms."""
    if not any(counts):
        return [[] for _ in counts]
    ids, logprobs = (ops.to_host(array).tolist() for array in likeliest(ops, logits, max(counts)))
    return [
        list(zip(ids[place], logprobs[place], strict=True))[:count]
        for place, count in enumerate(counts)
    ]
