"""Prefill, decode, stop: from prompts to an iterator of steps, and from steps to completions."""

import operator
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import numpy as np

from gpt_cli.errors import InputError
from gpt_cli.kv_cache import KVCache
from gpt_cli.model import GPT2, checked_forward
from gpt_cli.ops import Array
from gpt_cli.sampling import SamplingParams, check, log_probabilities, sample, uniforms
from gpt_cli.tokenizer import StreamDecoder, Tokenizer

FinishReason: TypeAlias = Literal["stop", "length", "eos", "context", "interrupted"]
Overflow: TypeAlias = Literal["error", "truncate", "shift"]


@dataclass(frozen=True, kw_only=True)
class Options(SamplingParams):
    """How to continue prompts.

    Raises:
        InputError: a value is outside its range.
    """

    max_tokens: int = 128  # how many new tokens a row gets at most
    seed: int = field(default_factory=lambda: secrets.randbits(32))  # below 2**64; else drawn
    stop: Sequence[str] = ()  # strings that end a row and are not part of its text
    use_cache: bool = True  # False computes the whole text again for each token
    ignore_eos: bool = False  # never choose the end token
    special: bool = False  # names such as <|endoftext|> in a prompt stand for the special tokens
    overflow: Overflow = "error"  # what to do with a text beyond the context; see `fit`

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.stop, str):
            raise TypeError("stop must be a list of strings, not one string")
        check(self.max_tokens >= 1, "max-tokens must be 1 or more")
        check(0 <= operator.index(self.seed) < 2**64, "seed must be from 0 to 2**64 - 1")
        check("" not in self.stop, "a stop string must not be empty")
        choices = get_args(Overflow)
        check(self.overflow in choices, f"overflow must be one of {', '.join(choices)}")


@dataclass(frozen=True)
class Step:
    """One new token of one row."""

    row: int  # which prompt
    id: int
    logprob: float  # natural logarithm of the probability that the model gave it, unfiltered
    text: str  # the characters now certain; the token's own may come with a later step
    finish_reason: FinishReason | None  # set on the row's last step
    seconds: float  # since the first pass began


@dataclass
class Completion:
    """What followed one prompt."""

    prompt_tokens: int
    seed: int
    text: str = ""  # without the prompt, the stop string and the end token
    ids: list[int] = field(default_factory=list)  # all new tokens, the end or a stop included
    logprobs: list[float] = field(default_factory=list)  # of each of ids
    seconds: list[float] = field(default_factory=list)  # when each of ids was there
    finish_reason: FinishReason = "interrupted"  # until the row has ended

    def add(self, step: Step) -> None:
        """Append the next step of this row."""
        self.text += step.text
        self.ids.append(step.id)
        self.logprobs.append(step.logprob)
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
    """One prompt and what has come after it."""

    def __init__(
        self, index: int, prompt: Sequence[int], tokenizer: Tokenizer, stop: Sequence[str]
    ):
        self.index = index
        self.ids = list(prompt)  # of the whole text
        self.window = list(prompt)  # what of them the model sees: the end
        self._decoder = StreamDecoder(tokenizer)
        self._stops = StopStrings(stop)

    def push(self, id: int, finish: FinishReason | None) -> tuple[str, FinishReason | None]:
        """Take a token, which may end the row; return the text now certain, and why it ends."""
        self.ids.append(id)
        self.window.append(id)
        passed = "" if finish == "eos" else self._stops.push(self._decoder.push(id))
        if self._stops.found:
            return passed, "stop"
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
        InputError: the prompt is refused.
    """
    if options.overflow == "truncate":
        return prompt[-max(n_positions - options.max_tokens, n_positions // 2) :]
    if len(prompt) < n_positions:
        return prompt
    if options.overflow == "shift":
        return prompt[-(n_positions // 2) :]
    raise InputError(
        f"the prompt has {len(prompt)} tokens and leaves no room in the model's context of "
        f"{n_positions}; shorten it, or choose --overflow truncate or shift"
    )


def left_pad(rows: Sequence[Sequence[int]]) -> tuple[Array, Array | None]:
    """Make rows equally long: ids (B, T), and the padding (B,) on their left, None if none."""
    longest = max(map(len, rows))
    padding = np.array([longest - len(row) for row in rows])
    ids = np.zeros((len(rows), longest), np.int64)
    for place, row in enumerate(rows):
        ids[place, padding[place] :] = row
    return ids, padding if padding.any() else None


class _Batch:
    """Rows computed side by side, with the cache that they share."""

    def __init__(self, model: GPT2, rows: list[_Row], use_cache: bool):
        self.rows = rows
        self._model = model
        self._use_cache = use_cache
        self._cache: KVCache | None = None
        self._padding: Array | None = None

    def next_logits(self, max_tokens: int) -> Array:
        """Compute the logits (B, V) of each row's next token; `max_tokens` more are to come."""
        model, xp = self._model, self._model.ops.xp
        if self._cache is None:  # the first pass, and without a cache every pass
            ids, padding = left_pad([row.window for row in self.rows])
            self._padding = None if padding is None else xp.asarray(padding)
            if self._use_cache:
                room = model.config.n_positions - min(len(row.window) for row in self.rows)
                capacity = ids.shape[1] + min(max_tokens, room)
                self._cache = KVCache(model.config, model.ops, len(self.rows), capacity)
        else:
            ids = np.array([row.window[-1:] for row in self.rows])
        return checked_forward(
            model, xp.asarray(ids), self._cache, padding=self._padding, last_only=True
        )[:, -1]

    def keep(self, places: list[int]) -> None:
        """Go on with these rows only."""
        if len(places) == len(self.rows):
            return
        self.rows = [self.rows[place] for place in places]
        if self._cache is not None:
            self._cache.keep(places)
        if self._padding is not None:
            self._padding = self._padding[places]

    def shift(self) -> None:
        """Let rows that fill the context go on with their newest half, computed again.

        Positions are learned, so what the cache holds cannot be moved to other positions.
        """
        n_positions = self._model.config.n_positions
        for row in self.rows:
            if len(row.window) == n_positions:
                row.window = row.window[-(n_positions // 2) :]
                self._cache = None


def generate(
    model: GPT2, tokenizer: Tokenizer, prompts: Sequence[list[int]], options: Options
) -> Iterator[Step]:
    """Continue prompts side by side, a token of each row at a time.

    Args:
        model: the weights.
        tokenizer: gives the text of the steps, and the ids that stand for nothing.
        prompts: the ids of each row, at least one and fewer than n_positions.
        options: how. The key of every draw is the seed, the row's number and the step's.

    Yields:
        A step for each token of each row that has not finished.

    Raises:
        CheckpointError: the logits are not finite, so the weights are damaged.
    """
    config, ops, xp = model.config, model.ops, model.ops.xp
    ends = {id for id in config.eos_token_id if id < config.vocab_size}
    never = set(tokenizer.missing_ids(config.vocab_size)) - ends
    banned = xp.asarray(sorted(never | ends if options.ignore_eos else never), dtype=xp.int64)
    rows = [_Row(index, prompt, tokenizer, options.stop) for index, prompt in enumerate(prompts)]
    batch = _Batch(model, rows, options.use_cache)
    shift = options.overflow == "shift"
    start = time.perf_counter()

    for step in range(options.max_tokens):
        if not batch.rows:
            return
        logits = batch.next_logits(options.max_tokens - step)
        allowed = logits.copy()
        allowed[:, banned] = -xp.inf
        draws = xp.asarray(uniforms(options.seed, [row.index for row in batch.rows], step))
        chosen = sample(xp, allowed, draws, options, [row.ids for row in batch.rows])
        logprobs = ops.to_host(log_probabilities(xp, logits, chosen)).tolist()
        ids = ops.to_host(chosen).tolist()
        seconds = time.perf_counter() - start

        unfinished = []
        for place, row in enumerate(batch.rows):
            finish: FinishReason | None = None
            if ids[place] in ends:
                finish = "eos"
            elif step + 1 == options.max_tokens:
                finish = "length"
            elif len(row.window) + 1 == config.n_positions and not shift:
                finish = "context"
            text, finish = row.push(ids[place], finish)
            yield Step(row.index, ids[place], logprobs[place], text, finish, seconds)
            if finish is None:
                unfinished.append(place)
        batch.keep(unfinished)
        if shift:
            batch.shift()
