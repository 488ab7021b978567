"""Drafts: guesses at the next tokens of a text, for `gpt_cli.generation.speculate` to verify."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from gpt_cli.errors import CheckpointError
from gpt_cli.generation.row import BatchRow, Position, Sampler
from gpt_cli.gpt2.kv_cache import KVCache
from gpt_cli.gpt2.model import GPT2, hidden_states, unembed
from gpt_cli.texts.prefix_cache import common_length

_NGRAM = 3  # tokens
_FADING = 0.9  # of earlier results, with every new one
_STALE = 0.2  # of earlier results, before a new trial


def ngram_drafts(row: BatchRow, count: int) -> list[int]:
    """Return `count` tokens that followed the last n-gram earlier (prompt lookup), or none."""
    ids = row.ids
    for end in range(max(_NGRAM, row.indexed), len(ids)):
        row.ngrams[tuple(ids[end - _NGRAM : end])] = end
    row.indexed = len(ids)
    start = row.ngrams.get(tuple(ids[-_NGRAM:]))
    if start is None:
        return []
    return [ids[start + n % (len(ids) - start)] for n in range(count)]  # a loop goes on


class DraftModel:
    """Drafts with a model that usually gives the tokens of the verifying model, but is faster.

    Its cache is in float16. It has a copy of the verifying model's keys and values for the text,
    and other keys and values for drafts, until the text goes on.
    """

    def __init__(self, model: GPT2, sampler: Sampler):
        self._model = model
        self._sampler = sampler
        self._memory: KVCache | None = None
        self._synced: Callable[[], KVCache | None] = lambda: None

    def sync(self, cache: KVCache) -> None:
        """Copy the new tokens of the verifying model's cache, or all of another cache."""
        rows = len(cache.lengths)
        memory = self._memory
        if memory is None or rows > len(memory.lengths) or cache.capacity != memory.capacity:
            rounded = 2 ** (rows - 1).bit_length()  # since rows may join
            memory = KVCache(self._model.config, self._model.ops, rounded, cache.capacity)
            self._memory = memory
            self._synced = lambda: None
        if self._synced() is not cache:
            self._cache = memory.view(rows)
            self._synced = weakref.ref(cache)
        self._cache.sync(cache)

    def draft(self, rows: Sequence[BatchRow], count: int) -> list[list[int]]:
        """Return up to `count` drafts per row, whose last token is not in the cache."""
        drafts = self._in_one_call(rows, count)
        return self._by_steps(rows, count) if drafts is None else drafts

    def _in_one_call(self, rows: Sequence[BatchRow], count: int) -> list[list[int]] | None:
        """Draft by `Ops.draft`; return None if that cannot."""
        model = self._model
        if model.ops.draft is None:
            return None
        sampling = self._sampler.shared_sampling(rows, count)
        if sampling is None:
            return None
        last = np.array([row.ids[-1] for row in rows])
        drafts = model.ops.draft(model, self._cache, last, *sampling)
        return None if drafts is None else drafts.T.tolist()

    def _by_steps(self, rows: Sequence[BatchRow], count: int) -> list[list[int]]:
        model = self._model
        cache = self._cache
        past = cache.lengths
        drafts: list[list[int]] = [[] for _ in rows]
        positions = [Position(row, ids) for row, ids in zip(rows, drafts, strict=True)]
        last = [row.ids[-1] for row in rows]
        with suppress(CheckpointError):  # results that are not finite
            for _ in range(count):
                ids = model.ops.xp.asarray(last)[:, None]
                logits = unembed(model, hidden_states(model, ids, cache)[:, -1])
                last = self._sampler.sample_at(logits, positions).tolist()
                for row_drafts, id in zip(drafts, last, strict=True):
                    row_drafts.append(id)
        cache.rewind(past)
        return drafts


class DraftHistory:
    """The numbers of accepted and rejected drafts of a source, and their time."""

    def __init__(self, accepted: float, rejected: float):
        self._accepted = accepted  # numbers of drafts; at first a guess
        self._rejected = rejected
        self.seconds = 0.0  # per draft

    def expected(self, count: int) -> float:
        """Return the expected number of tokens from a pass with `count` drafts of a row."""
        chance = self._accepted / (self._accepted + self._rejected)
        return sum(chance**n for n in range(count + 1))

    def learn(self, drafts: list[int], ids: list[int]) -> None:
        """Compare drafts with the model's tokens; older results count less."""
        if drafts:
            accepted = common_length(drafts, ids)
            rejected = accepted < min(len(drafts), len(ids))
            self._accepted = _FADING * self._accepted + accepted
            self._rejected = _FADING * self._rejected + rejected

    def fade(self) -> None:
        """Let the next result count more than all before."""
        self._accepted *= _STALE
        self._rejected *= _STALE
