"""Decode: the next tokens of rows side by side, a pass at a time."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

import numpy as np

from gpt_cli.errors import CheckpointError
from gpt_cli.folder.tokenizer import Tokenizer
from gpt_cli.generation.drafts import Speculator, agreed
from gpt_cli.generation.row import Chooser, FinishReason, Place, Row
from gpt_cli.generation.sampling import likeliest
from gpt_cli.generation.speculate import Drafting
from gpt_cli.gpt2.kv_cache import KVCache
from gpt_cli.gpt2.model import GPT2, hidden_states, right_pad, unembed
from gpt_cli.ops import Array, Ops

TopLogprobs: TypeAlias = list[tuple[int, float]]  # ids with their log-probabilities

_SMALLEST = 128  # tokens that a cache has room for


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


class Batch:
    """Rows that are continued side by side; they may join and leave between passes.

    Attributes:
        rows: those that have not ended.
        cache: the keys and values of all tokens of each row but the last; or None.
    """

    def __init__(
        self,
        model: GPT2,
        tokenizer: Tokenizer,
        speculator: Speculator | None = None,
        most: int = 1,
    ):
        """Make an empty batch, to which up to `most` rows will be added."""
        self._model, self._most = model, most
        self._chooser = Chooser(model.ops, tokenizer, model.config)
        self._drafting = Drafting(speculator, self._chooser) if speculator else None
        self._start = time.perf_counter()
        self.begin([])

    def begin(self, rows: list[Row], cache: KVCache | None = None) -> None:
        """Replace all rows, and the cache, whose memory is given back."""
        self.rows, self.cache, self._room = rows, cache, cache

    def add(self, row: Row, cache: KVCache | None, place: int) -> None:
        """Add a row. All its tokens but the last are in a place of a cache; None if it has one."""
        room = self._reserve(len(row.window) + row.growth)
        if cache:
            room.begin(len(self.rows), cache, place, len(row.window) - 1)
        self._room = room  # only now, as memory may have been too short
        self.rows.append(row)
        self.cache = room.first(len(self.rows))
        self._set_lengths()

    def _reserve(self, capacity: int) -> KVCache:
        """Return a cache with the rows, and room for more; what is not written takes no memory."""
        old, config = self._room, self._model.config
        if old and capacity <= old.capacity:
            return old
        capacity = max(_SMALLEST, 2 ** (capacity - 1).bit_length())  # seldom a larger one
        capacity = min(capacity, config.n_positions)
        made = KVCache(config, self._model.ops, self._most, capacity)
        for place, row in enumerate(self.rows):
            assert old  # noqa: S101 (narrows the type)
            made.begin(place, old, place, len(row.window) - 1)
        return made

    def drop(self, rows: Sequence[Row]) -> None:
        """Drop rows; the last ones take their places in the cache."""
        room = self._room
        for place in reversed(range(len(self.rows))):
            if self.rows[place] in rows:
                last = self.rows.pop()
                if place < len(self.rows):
                    self.rows[place] = last
                    if room:
                        room.begin(place, room, len(self.rows), len(last.window) - 1)
        if not self.rows:
            self.cache = None  # its memory serves the next rows
        elif rows and room:
            self.cache = room.first(len(self.rows))
            self._set_lengths()

    def step(self, first_logits: Callable[[], Array] | None = None) -> list[Step]:
        """Choose the next tokens of each row, at least one, and drop the rows that end.

        Args:
            first_logits: computes the logits (B, V) of the next tokens, if there is no cache yet.
        """
        began = time.perf_counter()
        if self._drafting:
            is_new = any(not row.generated for row in self.rows)  # a first token shall come soon
            try:
                self._drafting.draft(self.rows, None if is_new else self.cache)
            except MemoryError:  # none is needed
                self._drafting = None
        logits = first_logits() if first_logits else self._verify()
        model_seconds = time.perf_counter() - began
        tokens = choose(self._model.ops, self._chooser, logits, self.rows)
        seconds = time.perf_counter() - self._start
        if self._drafting:
            self._drafting.learn(self.rows, [[id for id, *_ in each] for each in tokens])
        steps, ended = [], []
        for row, found in zip(self.rows, tokens, strict=True):
            shared = model_seconds, len(row.drafts)
            for number, (id, logprob, top) in enumerate(found, 1):
                text, finish = row.push(id)
                details = logprob, top, text, finish, seconds
                steps.append(Step(row.place, id, *details, *shared, number < len(found)))
                shared = 0.0, 0
                if finish is not None:
                    ended.append(row)
                    break
        self._set_lengths()
        self.drop(ended)
        return steps

    def _verify(self) -> Array:
        """Return `_next_logits`, and without drafts if results after one are not finite.

        Weights that only a wrong draft uses are no reason to end the text.
        """
        try:
            return self._next_logits()
        except CheckpointError:
            if not any(row.drafts for row in self.rows):
                raise
            self._set_lengths()
            return self._next_logits()

    def _next_logits(self) -> Array:
        """Compute the logits (P, V) after the last token of each row and each of its drafts."""
        model, xp = self._model, self._model.ops.xp
        ids, lengths = right_pad([row.window[-1:] + row.drafts for row in self.rows])
        x = hidden_states(model, xp.asarray(ids), self.cache, lengths)
        states = [x[row, :length] for row, length in enumerate(lengths.tolist())]
        return unembed(model, xp.concatenate(states))

    def _set_lengths(self) -> None:
        """Drop the drafts, and what the cache holds of them."""
        if self.cache is not None:
            self.cache.lengths = np.array([len(row.window) - 1 for row in self.rows])
        for row in self.rows:
            row.drafts = []


def choose(
    ops: Ops, chooser: Chooser, logits: Array, rows: Sequence[Row]
) -> list[list[tuple[int, float, TopLogprobs]]]:
    """Return the next tokens of each row: the drafts that are right, and the one after them.

    A token has its log-probability, and the likeliest tokens in its place. logits (P, V) are those
    of `Batch.step`.
    """
    places = [
        Place(row, row.drafts[:count]) for row in rows for count in range(len(row.drafts) + 1)
    ]
    normalizer = ops.log_normalizer(logits)  # includes tokens that may not be chosen
    top = top_logprobs(ops, logits, [place.row.options.top_logprobs for place in places])
    chosen = chooser.choose(logits, places)
    logprobs = ops.to_host(logits[ops.xp.arange(len(chosen)), chosen] - normalizer).tolist()
    found = zip(ops.to_host(chosen).tolist(), logprobs, top, strict=True)
    every = [list(islice(found, len(row.drafts) + 1)) for row in rows]
    return [
        tokens[: agreed(row.drafts, [id for id, *_ in tokens]) + 1]
        for row, tokens in zip(rows, every, strict=True)
    ]


def top_logprobs(ops: Ops, logits: Array, counts: Sequence[int]) -> list[TopLogprobs]:
    """Return the likeliest tokens of each row, as many as it asks for, with log-probabilities."""
    if not any(counts):
        return [[] for _ in counts]
    ids, logprobs = (ops.to_host(array).tolist() for array in likeliest(ops, logits, max(counts)))
    rows = zip(ids, logprobs, counts, strict=True)
    return [list(zip(*row, strict=True))[:count] for *row, count in rows]
