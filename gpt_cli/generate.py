"""Prefill, decode, stop: continue prompts step by step, and collect steps in completions."""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from gpt_cli.config import GPT2Config
from gpt_cli.errors import ContextError
from gpt_cli.kv_cache import KVCache
from gpt_cli.machine import check_room
from gpt_cli.model import GPT2, PASS, Counts, forward, hidden_states, unembed
from gpt_cli.ops import Array, Ops
from gpt_cli.options import Options
from gpt_cli.sampling import GROUP, SamplingParams, likeliest, sample, uniforms
from gpt_cli.tokenizer import StreamDecoder, Tokenizer

FinishReason: TypeAlias = Literal["stop", "length", "eos", "context", "interrupted"]


@dataclass(frozen=True)
class Request:
    """One row of a batch: a prompt with its options."""

    prompt: list[int]  # ids, at least one and fewer than n_positions
    options: Options  # a seed is drawn if they have none
    index: int = 0  # with the seed, the key of the row's draws

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", self.options.with_seed())

    @property
    def seed(self) -> int:
        """Return the seed of the row's draws."""
        assert self.options.seed is not None  # noqa: S101 (narrows the type)
        return self.options.seed


@dataclass(frozen=True)
class Step:
    """One new token of one row."""

    row: int  # which request
    id: int
    logprob: float  # natural logarithm of its probability before any sampling option
    top_logprobs: list[tuple[int, float]]  # the likeliest ids with theirs, if requested
    text: str  # the characters that are now certain; the token's own may come in a later step
    finish_reason: FinishReason | None  # set on the row's last step
    seconds: float  # since the first pass began
    model_seconds: float  # of this step's forward pass, which all rows share


@dataclass
class Completion:
    """The continuation of one prompt."""

    prompt_tokens: int
    seed: int
    text: str = ""  # without the prompt and the end token
    ids: list[int] = field(default_factory=list)  # new tokens, with the end token or stop string
    logprobs: list[float] = field(default_factory=list)  # one for each id
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)  # one for each id
    seconds: list[float] = field(default_factory=list)  # from the start to each id
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
    """Pass text on up to the first stop string, or with `include` up to its end.

    Text that may be the beginning of a stop string is held back until that is decided, since a
    string may span several tokens.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False):
        self._stops, self._include = stops, include
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Take text; return the text that is certain to be before any stop string."""
        self._held += text
        held = self._held
        places = [(at + len(stop), at) for stop in self._stops if (at := held.find(stop)) >= 0]
        if places:
            self.found = True
            end, start = min(places)  # the first complete one, wherever the text was cut
            self._held = ""
            return held[: end if self._include else start]
        cut = len(held) - max((self._undecided(stop) for stop in self._stops), default=0)
        self._held = held[cut:]
        return held[:cut]

    def flush(self) -> str:
        """Return the text that was held back: no more text follows."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, stop: str) -> int:
        """Return the length of the longest beginning of `stop` that the held text ends with."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)


class _Row:
    """The state of one request."""

    def __init__(self, place: int, request: Request, tokenizer: Tokenizer, config: GPT2Config):
        options = request.options
        self.place = place
        self.options = options
        self.sampling = options.sampling
        self.key = request.seed, request.index
        self.ids = list(request.prompt)  # of the whole text
        self.generated: list[int] = []
        self.window = list(request.prompt)  # the end of the text, which the model sees
        self._config = config
        self._decoder = StreamDecoder(tokenizer)
        self._stops = StopStrings(options.stop, include=options.include_stop)

    @property
    def growth(self) -> int:
        """Return the number of tokens that the window has room for."""
        left = self.options.max_tokens - len(self.generated)
        return min(left, self._config.n_positions - len(self.window))

    def push(self, id: int) -> tuple[str, FinishReason | None]:
        """Take a token; return the text that is now certain, and a reason if the row ends."""
        for ids in (self.ids, self.generated, self.window):
            ids.append(id)
        ended = id in self._config.eos_token_id
        passed = "" if ended else self._stops.push(self._decoder.push(id))
        if self._stops.found:
            return passed, "stop"
        finish: FinishReason
        if ended:
            finish = "eos"
        elif len(self.generated) == self.options.max_tokens:
            finish = "length"
        elif self.growth == 0 and self.options.overflow != "shift":
            finish = "context"
        else:
            return passed, None
        return passed + self._stops.push(self._decoder.flush()) + self._stops.flush(), finish


def fit(prompt: list[int], n_positions: int, options: Options) -> list[int]:
    """Return the part of a prompt (ids) that leaves room for new tokens in the context.

    It depends on `options.overflow`:
    - "error" refuses a prompt that leaves no room for a token;
    - "truncate" drops the oldest tokens until all new tokens fit, but reserves at most half of the
      context for new tokens;
    - "shift" keeps the newest half of a prompt that fills the context; `generate` does the same
      whenever the text fills it.

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
    """Pad rows with zeros on the right: return ids (B, T) and the lengths of the rows (B,)."""
    lengths = np.array([len(row) for row in rows])
    ids = np.zeros((len(rows), lengths.max()), np.int64)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = row
    return ids, lengths


class _Batch:
    """Rows that are computed side by side, with their cache."""

    def __init__(self, model: GPT2, rows: list[_Row], use_cache: bool):
        self._model, self.rows, self._use_cache = model, rows, use_cache
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
        """Drop all rows but these."""
        if len(places) == len(self.rows):
            return
        self.rows = [self.rows[place] for place in places]
        if self._cache is not None:
            self._cache.keep(places)

    def shift(self) -> None:
        """Drop the oldest half of the rows that fill the context, and compute the rest again.

        Positions are learned, so cached keys and values cannot be moved to other positions.
        """
        for row in self.rows:
            if row.growth == 0:
                row.window = row.window[-(self._model.config.n_positions // 2) :]
                self._cache = None


def working_set(config: GPT2Config, requests: Sequence[Request]) -> int:
    """Estimate the bytes needed to continue requests side by side, besides the weights."""
    rows = len(requests)
    prompt = max((len(row.prompt) for row in requests), default=0)
    new = [min(r.options.max_tokens, config.n_positions - len(r.prompt)) for r in requests]
    length = prompt + max(new, default=0)
    cached = all(row.options.use_cache for row in requests)
    # Keys and values, and a copy of one of them while rows leave the batch.
    cache = 3 * config.n_layer * rows * length * config.n_embd if cached else 0
    tokens = min(rows * prompt, max(rows, PASS)) if cached else rows * length
    widths = 6 * config.n_embd + 3 * config.inner_size
    layer = tokens * (widths + config.n_head * length)  # with the scores of the attention
    # `sampling.likely_columns` returns all columns if k is large.
    among_all = any(not 0 < row.options.top_k <= config.vocab_size // GROUP for row in requests)
    # Logits and the arrays of sampling, which are small where top-k leaves few columns.
    vocabulary = (12 if among_all else 7) * rows * config.vocab_size
    return 4 * (cache + max(layer, vocabulary))


def generate(model: GPT2, tokenizer: Tokenizer, requests: Sequence[Request]) -> Iterator[Step]:
    """Return an iterator that continues prompts side by side, a token of each row at a time.

    The cache is used if all rows have `use_cache`. The iterator raises CheckpointError if the
    weights are damaged.

    Raises:
        ResourceError: there is not enough memory.
    """
    check_room(
        f"a batch of {len(requests)} needs about",
        working_set(model.config, requests),
        model.ops.free_memory(),
        "generate fewer at a time, or shorter texts",
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
        normalizer = ops.log_normalizer(logits)  # includes tokens that may not be chosen
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
        for place, (row, id) in enumerate(zip(batch.rows, ids, strict=True)):
            text, finish = row.push(id)
            details = logprobs[place], top[place], text, finish
            yield Step(row.place, id, *details, seconds, model_seconds)
            if finish is None:
                unfinished.append(place)
        batch.keep(unfinished)
        batch.shift()


def _choose(ops: Ops, logits: Array, rows: Sequence[_Row], step: int) -> Array:
    """Sample the next token of each row (B,); rows with equal parameters are sampled together."""
    xp = ops.xp
    alike: dict[SamplingParams, list[int]] = {}
    for place, row in enumerate(rows):
        alike.setdefault(row.sampling, []).append(place)
    chosen = xp.empty(len(rows), xp.int64)
    for params, places in alike.items():
        group = [rows[place] for place in places]
        seen, generated = [row.ids for row in group], [row.generated for row in group]
        some = places if len(alike) > 1 else slice(None)  # a list would make a copy
        keys = [row.key for row in group if params.temperature]  # the likeliest needs no draw
        draws = xp.asarray(uniforms(keys, step))
        chosen[some] = sample(ops, logits[some], draws, params, seen, generated)
    return chosen


def _top_logprobs(ops: Ops, logits: Array, counts: Sequence[int]) -> list[list[tuple[int, float]]]:
    """Return the likeliest tokens of each row, as many as it asks for, with log-probabilities."""
    if not any(counts):
        return [[] for _ in counts]
    ids, logprobs = (ops.to_host(array).tolist() for array in likeliest(ops, logits, max(counts)))
    rows = zip(ids, logprobs, counts, strict=True)
    return [list(zip(*row, strict=True))[:count] for *row, count in rows]
