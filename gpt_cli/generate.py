"""Prefill, decode, stop: continue prompts step by step, and collect steps in completions."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

import numpy as np

from gpt_cli.config import GPT2Config
from gpt_cli.drafts import Speculator, agreed
from gpt_cli.errors import CheckpointError
from gpt_cli.kv_cache import KVCache
from gpt_cli.machine import check_room
from gpt_cli.model import GPT2, PASS, hidden_states, right_pad, unembed
from gpt_cli.ops import Array, Ops
from gpt_cli.prefix_cache import PrefixCache
from gpt_cli.rows import Chooser, FinishReason, Place, Request, Row
from gpt_cli.sampling import GROUP, likeliest
from gpt_cli.speculate import DRAFTS, Drafting
from gpt_cli.tokenizer import Tokenizer

TopLogprobs: TypeAlias = list[tuple[int, float]]  # ids with their log-probabilities


@dataclass(frozen=True)
class Step:
    """One new token of one row."""

    row: int  # which request
    id: int
    logprob: float  # natural logarithm of its probability before any sampling option
    top_logprobs: TopLogprobs  # the likeliest ids with theirs, if requested
    text: str  # the characters that are now certain; the token's own may come in a later step
    finish_reason: FinishReason | None  # set on the row's last step
    seconds: float  # since the first pass began
    model_seconds: float  # of the pass that all rows share and of drafting for it
    drafted: int = 0  # tokens that the pass verified; these two are 0 in further steps of a pass
    accepted: bool = False  # whether this token was drafted


@dataclass
class Completion:
    """The continuation of one prompt."""

    prompt_tokens: int
    seed: int
    text: str = ""  # without the prompt and the end token
    ids: list[int] = field(default_factory=list)  # new tokens, with the end token or stop string
    logprobs: list[float] = field(default_factory=list)  # one for each id
    top_logprobs: list[TopLogprobs] = field(default_factory=list)  # one for each id
    seconds: list[float] = field(default_factory=list)  # from the start to each id
    finish_reason: FinishReason = "interrupted"  # until the row has ended
    drafted: int = 0  # tokens
    accepted: int = 0  # drafted tokens that are in `ids`

    def add(self, step: Step) -> None:
        """Append the next step of this row."""
        self.text += step.text
        self.ids.append(step.id)
        self.logprobs.append(step.logprob)
        self.top_logprobs.append(step.top_logprobs)
        self.seconds.append(step.seconds)
        self.drafted += step.drafted
        self.accepted += step.accepted
        if step.finish_reason is not None:
            self.finish_reason = step.finish_reason


class _Batch:
    """Rows that are computed side by side, with their cache."""

    def __init__(self, model: GPT2, rows: list[Row], use_cache: bool, prefixes: PrefixCache):
        self._model, self.rows, self._use_cache = model, rows, use_cache
        self._prefixes = prefixes
        self.cache: KVCache | None = None

    def verify(self) -> Array:
        """Return `next_logits`, and without drafts if results after one are not finite.

        Weights that only a wrong draft uses are no reason to end the text.
        """
        try:
            return self.next_logits()
        except CheckpointError:
            if not any(row.drafts for row in self.rows):
                raise
            self.drop_drafts()
            return self.next_logits()

    def next_logits(self) -> Array:
        """Compute the logits (P, V) after the text of each row, and after each of its drafts."""
        model, xp = self._model, self._model.ops.xp
        if self.cache is not None:
            ids, lengths = right_pad([row.window[-1:] + row.drafts for row in self.rows])
            x = hidden_states(model, xp.asarray(ids), self.cache, lengths)
            states = [x[row, :length] for row, length in enumerate(lengths.tolist())]
            return unembed(model, xp.concatenate(states))
        if self._use_cache:
            self.cache = self._begin()
            known = self.cache.lengths.tolist()
            windows = [row.window[n:] for row, n in zip(self.rows, known, strict=True)]
            width = max(1, PASS // len(self.rows))
        else:
            windows = [row.window for row in self.rows]
            width = max(map(len, windows))
        ids, lengths = right_pad(windows)
        last: dict[int, Array] = {}  # of each row, the state (C,) at its last token
        for start in range(0, ids.shape[1], width):
            some = ids[:, start : start + width]
            left = lengths - start
            new = np.clip(left, 0, some.shape[1])
            x = hidden_states(model, xp.asarray(some), self.cache, new)
            for row in np.flatnonzero((left > 0) & (left <= some.shape[1])).tolist():
                last[row] = x[row, left[row] - 1].copy()  # not a view, which would keep all of x
        return unembed(model, xp.stack([last[row] for row in range(len(self.rows))]))

    def _begin(self) -> KVCache:
        """Return a cache for the rows, with the beginnings that several have in common."""
        capacity = max(len(row.window) + row.growth for row in self.rows)
        cache = KVCache(self._model.config, self._model.ops, len(self.rows), capacity)
        windows = [row.window[:-1] for row in self.rows]  # the last token is to be computed
        for n, places in self._prefixes.groups(windows):
            prefix = self._prefixes.prefix(windows[places[0]][:n])
            for place in places:
                cache.begin(place, prefix.cache, 0, n)
        return cache

    def drop_drafts(self) -> None:
        """Drop what the cache holds of drafts that are not in the texts."""
        if self.cache is not None:
            self.cache.lengths = np.array([len(row.window) - 1 for row in self.rows])
        for row in self.rows:
            row.drafts = []

    def keep(self, places: list[int]) -> None:
        """Drop all rows but these."""
        if len(places) == len(self.rows):
            return
        self.rows = [self.rows[place] for place in places]
        if self.cache is not None:
            self.cache = self.cache.select(places, self.cache.capacity)

    def shift(self) -> None:
        """Drop the oldest half of the rows that fill the context, and compute the rest again.

        Positions are learned, so cached keys and values cannot be moved to other positions.
        """
        for row in self.rows:
            if row.growth == 0:
                row.window = row.window[-(self._model.config.n_positions // 2) :]
                self.cache = None


def working_set(config: GPT2Config, requests: Sequence[Request], drafts: int = 0) -> int:
    """Estimate the bytes to continue requests side by side, with some drafts in all of a pass.

    The weights, and those of a twin, are not included.
    """
    rows = len(requests)
    prompt = max((len(row.prompt) for row in requests), default=0)
    new = [min(r.options.max_tokens, config.n_positions - len(r.prompt)) for r in requests]
    length = prompt + max(new, default=0)
    cached = all(row.options.use_cache for row in requests)
    # Keys and values, a copy of one of them while rows leave the batch, and the twin's in float16.
    copies = 4 if drafts else 3
    cache = copies * config.n_layer * rows * length * config.n_embd if cached else 0
    tokens = min(rows * prompt, max(rows, PASS)) if cached else rows * length
    widths = 6 * config.n_embd + 3 * config.inner_size
    layer = tokens * (widths + config.n_head * length)  # with the scores of the attention
    # `sampling.likely_columns` returns all columns if k is large.
    among_all = any(not 0 < row.options.top_k <= config.vocab_size // GROUP for row in requests)
    # Logits and the arrays of sampling, which are small where top-k leaves few columns.
    vocabulary = (12 if among_all else 5) * (rows + drafts) * config.vocab_size
    return 4 * (cache + max(layer, vocabulary))


def generate(
    model: GPT2,
    tokenizer: Tokenizer,
    requests: Sequence[Request],
    speculator: Speculator | None = None,
    prefixes: PrefixCache | None = None,
) -> Iterator[Step]:
    """Return an iterator that continues prompts side by side, a token of each row at a time.

    The cache is used if all rows have `use_cache`; then drafts of the speculator save passes, and
    a row may have several tokens in turn. The iterator raises CheckpointError if the weights are
    damaged.

    Raises:
        ResourceError: there is not enough memory.
    """
    needed, free = working_set(model.config, requests), model.ops.free_memory()
    prefixes = prefixes or PrefixCache(model)
    if free is not None and needed > free:
        prefixes.release()
        if speculator:
            speculator.release()
        free = model.ops.free_memory()
    check_room(
        f"a batch of {len(requests)} needs about",
        needed,
        free,
        "generate fewer at a time, or shorter texts",
    )
    if speculator and free is not None:
        needed = working_set(model.config, requests, DRAFTS) + speculator.needed_bytes
        speculator = speculator if needed <= free else None
    return _steps(model, tokenizer, requests, speculator, prefixes)


def _steps(
    model: GPT2,
    tokenizer: Tokenizer,
    requests: Sequence[Request],
    speculator: Speculator | None,
    prefixes: PrefixCache,
) -> Iterator[Step]:
    chooser = Chooser(model.ops, tokenizer, model.config)
    drafting = Drafting(speculator, chooser) if speculator else None
    rows = [Row(place, row, tokenizer, model.config) for place, row in enumerate(requests)]
    batch = _Batch(model, rows, all(row.options.use_cache for row in rows), prefixes)
    start = time.perf_counter()

    while batch.rows:
        began = time.perf_counter()
        if drafting:
            drafting.draft(batch.rows, batch.cache)
        logits = batch.verify()
        model_seconds = time.perf_counter() - began
        tokens = _choose(model.ops, chooser, logits, batch.rows)
        seconds = time.perf_counter() - start
        if drafting:
            drafting.learn(batch.rows, [[id for id, *_ in each] for each in tokens])

        unfinished = []
        for place, row in enumerate(batch.rows):
            finish, shared = None, (model_seconds, len(row.drafts))
            for number, (id, logprob, top) in enumerate(tokens[place], 1):
                text, finish = row.push(id)
                details = logprob, top, text, finish, seconds
                accepted = number < len(tokens[place])
                yield Step(row.place, id, *details, *shared, accepted)
                shared = 0.0, 0
                if finish is not None:
                    break
            if finish is None:
                unfinished.append(place)
        batch.drop_drafts()
        batch.keep(unfinished)
        batch.shift()


def _choose(
    ops: Ops, chooser: Chooser, logits: Array, rows: Sequence[Row]
) -> list[list[tuple[int, float, TopLogprobs]]]:
    """Return the next tokens of each row: the drafts that are right, and the one after them.

    A token has its log-probability, and the likeliest tokens in its place. logits (P, V) are those
    of `_Batch.next_logits`.
    """
    places = [
        Place(row, row.drafts[:count]) for row in rows for count in range(len(row.drafts) + 1)
    ]
    normalizer = ops.log_normalizer(logits)  # includes tokens that may not be chosen
    top = _top_logprobs(ops, logits, [place.row.options.top_logprobs for place in places])
    chosen = chooser.choose(logits, places)
    logprobs = ops.to_host(logits[ops.xp.arange(len(chosen)), chosen] - normalizer).tolist()
    found = zip(ops.to_host(chosen).tolist(), logprobs, top, strict=True)
    every = [list(islice(found, len(row.drafts) + 1)) for row in rows]
    return [
        tokens[: agreed(row.drafts, [id for id, *_ in tokens]) + 1]
        for row, tokens in zip(rows, every, strict=True)
    ]


def _top_logprobs(ops: Ops, logits: Array, counts: Sequence[int]) -> list[TopLogprobs]:
    """Return the likeliest tokens of each row, as many as it asks for, with log-probabilities."""
    if not any(counts):
        return [[] for _ in counts]
    ids, logprobs = (ops.to_host(array).tolist() for array in likeliest(ops, logits, max(counts)))
    rows = zip(ids, logprobs, counts, strict=True)
    return [list(zip(*row, strict=True))[:count] for *row, count in rows]
