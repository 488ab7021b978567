"""Speculative decoding: draft the next tokens cheaply, then verify them in one pass of the model.

A pass over one token takes as long as reading every weight. A pass over twelve takes little longer,
so it can also check guesses at what follows. One cycle, for a text that ends with `c`:

    draft   D E F        the draft model, in int8, reads c, D and E: a quarter of the bytes
    verify  c D E F      one pass of the model gives the logits after c, D, E and F
    sample  D E g .      the model's token at every position, with the random draw of that position
    keep    D E g        the accepted drafts, and the model's token instead of the first other one

Every token is the model's, and its results do not depend on what else is in the pass
(`Ops.batch_invariant`). So drafts decide how soon a text is ready, and never what it says: in
Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2022, texts keep
their distribution; here the draw depends on the position alone, and they stay the same texts.
"""

import time
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from gpt_cli.folder.dtypes import WEIGHT_TYPES
from gpt_cli.generation.drafts import DraftHistory, DraftModel, ngram_drafts
from gpt_cli.generation.row import BatchRow, Sampler
from gpt_cli.gpt2.kv_cache import KVCache
from gpt_cli.texts.speculator import Speculator

MAX_ROW_DRAFTS = 11  # drafts of a row: with its last token, one tile of the products
MAX_DRAFTS = 24  # of all rows of a batch
_COUNTS = (1, 2, 3, 5, 7, 9, MAX_ROW_DRAFTS)
_MIN_TOKENS = 64  # still to come; to make a draft model takes as long as 5 to 10 tokens
_PATIENCE = 16  # passes without the draft model before it is tried again, doubled each time
_DRAFT_COST = 0.3  # seconds of a draft / seconds of a pass: a guess that measurements correct
# If constraints force so many tokens per row, only these are drafted: they cost nothing.
_MIN_FORCED = 2
MIN_SPEEDUP = 1.05  # that drafts must promise, since estimates are uncertain
_OLDER = 0.7  # weight of earlier measurements

# `WeightType.pass_cost` on a GPU, beside one of the passes that `Ops.decode` computes in one call
# (measured: 2.1 to 2.6 for 2 tokens, 2.6 to 4 for 8, 3.5 to 5.6 for 16, by the dtype).
_PASS_GPU = (14, 7)


class _Plan(NamedTuple):
    """A way to draft: the most drafts of a row, and whether the draft model makes them."""

    drafts: int
    by_model: bool


class DraftPolicy:
    """Drafts as many tokens for rows as save time, by n-grams or by the draft model."""

    def __init__(self, speculator: Speculator, sampler: Sampler):
        self._speculator = speculator
        self._sampler = sampler
        self._guesses: list[list[int]] = []  # from n-grams, by row
        self._model_drafted = False  # the last drafts
        self._drafted_at: float | None = None
        self._known: set[int] = set()  # numbers of the rows when the records below began
        self._begin_records()

    def _begin_records(self) -> None:
        self._ngram_history = DraftHistory(1, 1)
        self._model_history = DraftHistory(1, 0.3)
        self._pass_seconds = 0.0  # of a pass over one token
        self._idle = 0
        self._patience = _PATIENCE

    def _forget_ended(self, rows: Sequence[BatchRow]) -> None:
        """Begin new records once no row is left from their beginning.

        How drafts paid for many sampled texts says nothing about one greedy text after them.
        """
        numbers = {row.request_number for row in rows}
        if self._known.isdisjoint(numbers):
            self._known = numbers
            self._begin_records()

    def draft(self, rows: Sequence[BatchRow], cache: KVCache | None) -> None:
        """Set the drafts of rows, if there is a cache; it keeps its tokens."""
        self._drafted_at = None
        if cache is None:
            return
        self._forget_ended(rows)
        free_slots = cache.capacity - max(len(row.window) for row in rows)
        max_drafts = min(MAX_ROW_DRAFTS, MAX_DRAFTS // len(rows), free_slots)
        if max_drafts < 1:
            return
        sizes = [min(max_drafts, row.tokens_left - 1) for row in rows]
        if _force(rows, sizes):
            return
        self._guesses = [ngram_drafts(row, size) for row, size in zip(rows, sizes, strict=True)]
        count, by_model = self._plan(rows, sizes)
        drafts = [guess[:count] for guess in self._guesses]
        model = self._draft_model if by_model else None
        self._model_drafted = model is not None
        if model:
            model.sync(cache)
            began = time.perf_counter()
            drafts = model.draft(rows, count)
            seconds = (time.perf_counter() - began) / count
            self._model_history.seconds = _mean(self._model_history.seconds, seconds)
        for row, ids, size in zip(rows, drafts, sizes, strict=True):
            row.drafts = row.matcher.fitting(ids[:size]) if row.matcher else ids[:size]
        self._drafted_at = time.perf_counter()

    @cached_property
    def _draft_model(self) -> DraftModel | None:
        model = self._speculator.ensure_draft_model()
        return DraftModel(model, self._sampler) if model else None

    def learn(self, rows: Sequence[BatchRow], new: Sequence[list[int]], passes: int = 1) -> None:
        """Learn from the new tokens of the rows, and from the time of the passes since `draft`."""
        if self._drafted_at is None:
            return
        seconds = (time.perf_counter() - self._drafted_at) / passes
        tokens = sum(len(row.drafts) + 1 for row in rows)
        self._pass_seconds = _mean(self._pass_seconds, seconds / self._times(tokens))
        self._model_history.seconds = (
            self._model_history.seconds or _DRAFT_COST * self._pass_seconds
        )
        for row, guess, ids in zip(rows, self._guesses, new, strict=True):
            self._ngram_history.learn(guess, ids)  # also those that were not used
            if self._model_drafted:
                self._model_history.learn(row.drafts, ids)

    def _plan(self, rows: Sequence[BatchRow], sizes: Sequence[int]) -> _Plan:
        """Choose the plan of the best rate.

        Rows have at most `sizes` drafts. If the model has made none for long, try it again.
        """
        if not self._pass_seconds or not any(sizes):
            return _Plan(0, by_model=False)
        counts = [n for n in _COUNTS if n <= max(sizes)]
        lengths = list(map(len, self._guesses))
        no_drafts = _Plan(0, by_model=False)
        rates = {no_drafts: MIN_SPEEDUP * self._rate(self._ngram_history, 0, lengths)}
        for n in counts:
            rates[_Plan(n, by_model=False)] = self._rate(self._ngram_history, n, lengths)
        speculator = self._speculator
        is_worth = speculator.draft_model or sum(row.tokens_left for row in rows) >= _MIN_TOKENS
        if is_worth and speculator.may_have_draft_model:
            for n in counts:
                rates[_Plan(n, by_model=True)] = self._rate(self._model_history, n, sizes)
        best = max(rates, key=rates.__getitem__)
        if best.by_model:
            self._idle = 0
            self._patience = _PATIENCE
        else:
            self._idle += 1
        trial = _Plan(1, by_model=True)
        if self._idle < self._patience or trial not in rates:
            return best
        self._idle = 0
        self._patience = 2 * self._patience
        self._model_history.fade()  # what it drafted long ago says little
        return trial

    def _rate(self, history: DraftHistory, count: int, sizes: Sequence[int]) -> float:
        """Return the expected tokens per second of all rows, with `count` drafts or `sizes`."""
        drafts = [min(count, size) for size in sizes]
        passing = self._pass_seconds * self._times(sum(drafts) + len(drafts))
        return sum(map(history.expected, drafts)) / (count * history.seconds + passing)

    def _times(self, tokens: int) -> float:
        """Return the time of a pass over tokens / the time of a pass over one."""
        ops = self._speculator.model.ops
        a, b = _PASS_GPU if ops.decode else WEIGHT_TYPES[ops.dtype].pass_cost
        return max(1.1, (tokens + a) / b) if tokens > 1 else 1.0


def _force(rows: Sequence[BatchRow], sizes: Sequence[int]) -> bool:
    """Set the drafts of rows to the tokens that their constraints force, if these are enough."""
    forced = [row.matcher.forced() if row.matcher else [] for row in rows]
    drafts = [ids[:size] for ids, size in zip(forced, sizes, strict=True)]
    if sum(map(len, drafts)) < _MIN_FORCED * len(rows):
        return False
    for row, ids in zip(rows, drafts, strict=True):
        row.drafts = ids
    return True


def _mean(old: float, new: float) -> float:
    """Return a running mean, which begins with the first number."""
    return _OLDER * old + (1 - _OLDER) * new if old else new
