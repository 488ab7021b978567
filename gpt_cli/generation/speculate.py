"""Speculative decoding: draft the next tokens cheaply, then verify them in one pass of the model.

A pass over one token takes as long as reading every weight. A pass over twelve takes little longer,
so it can also check guesses at what follows. One cycle, for a text that ends with `c`:

    draft   D E F        the int8 twin reads c, then D, then E: a quarter of the bytes each time
    verify  c D E F      one pass of the model gives the logits after c, D, E and F
    choose  D E g .      the model's own token at each place, with the random draw of that place
    keep    D E g        the right drafts, and the model's token in place of the first wrong one

The model chooses every token, and its results do not depend on what else is in the pass
(`Ops.batch_invariant`). So drafts decide how soon a text is ready, and never what it says: in
Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2022, texts keep
their distribution; here every place has its own draw, and they stay the same texts.
"""

import time
from collections.abc import Sequence
from functools import cached_property

from gpt_cli.generation.drafts import NGrams, Record, Speculator, Twin
from gpt_cli.generation.row import Chooser, Row
from gpt_cli.gpt2.kv_cache import KVCache

MOST = 11  # drafts of a row: with its last token, one tile of the products
DRAFTS = 24  # of all rows of a batch
_COUNTS = (1, 2, 3, 5, 7, 9, MOST)
_MIN_TOKENS = 64  # still to come, for making a twin, which takes as long as 5 to 10 tokens
_PATIENCE = 16  # passes without the twin before it is tried again, doubled each time
_TWIN = 0.3  # seconds of a draft / seconds of a pass, a guess that measurements correct
_FORCED = 2  # tokens per row that constraints force, to draft only these: they cost nothing
_GAIN = 1.05  # that drafts must promise, since estimates are uncertain
_OLDER = 0.7  # of a measured time, with the next

# A pass over n > 1 places takes max(1.1, (n + a) / b) times as long as a pass over one: measured.
_PASS = {"float32": (4, 14.2), "bfloat16": (3, 7), "float16": (3, 7), "int8": (4.5, 5.8)}


class Drafting:
    """Chooses the drafts for the rows of a batch: as many as pay, from n-grams or the twin."""

    def __init__(self, speculator: Speculator, chooser: Chooser):
        self._speculator, self._chooser = speculator, chooser
        self._ngrams, self._ngram_record = NGrams(), Record(1, 1)
        self._twin_record = Record(1, 0.3)
        self._guesses: list[list[int]] = []  # from n-grams, for each row
        self._pass_seconds = 0.0  # of a pass over one place
        self._asked = False  # the twin, for the last drafts
        self._drafted_at: float | None = None
        self._idle, self._patience = 0, _PATIENCE

    def draft(self, rows: Sequence[Row], cache: KVCache | None) -> None:
        """Set the drafts of each row, if there is a cache; it keeps its tokens."""
        self._drafted_at = None
        if cache is None:
            return
        rooms = [row.growth - 1 for row in rows]
        space = cache.capacity - max(len(row.window) for row in rows)
        room = min(MOST, DRAFTS // len(rows), max(rooms), space)
        limits = [min(room, own) for own in rooms]
        if _force(rows, limits):
            return
        self._guesses = [
            self._ngrams.draft(row, limit) for row, limit in zip(rows, limits, strict=True)
        ]
        count, by_twin = self._plan(rows, room)
        drafts = [guess[:count] for guess in self._guesses]
        twin = self._twin if by_twin else None
        self._asked = twin is not None
        if twin:
            twin.follow(cache)
            began = time.perf_counter()
            drafts = twin.draft(rows, count)
            seconds = (time.perf_counter() - began) / count
            self._twin_record.seconds = _mean(self._twin_record.seconds, seconds)
        for row, each, own in zip(rows, drafts, rooms, strict=True):
            row.drafts = row.matcher.fitting(each[:own]) if row.matcher else each[:own]
        self._drafted_at = time.perf_counter()

    @cached_property
    def _twin(self) -> Twin | None:
        model = self._speculator.twin
        return Twin(model, self._chooser) if model else None

    def learn(self, rows: Sequence[Row], new: Sequence[Sequence[int]]) -> None:
        """Learn from the new tokens of each row, and from the time since `draft`."""
        if self._drafted_at is None:
            return
        seconds = time.perf_counter() - self._drafted_at
        places = sum(len(row.drafts) + 1 for row in rows)
        self._pass_seconds = _mean(self._pass_seconds, seconds / self._times(places))
        self._twin_record.seconds = self._twin_record.seconds or _TWIN * self._pass_seconds
        for row, guess, ids in zip(rows, self._guesses, new, strict=True):
            self._ngram_record.learn(guess, ids)  # also those that were not used
            if self._asked:
                self._twin_record.learn(row.drafts, ids)

    def _plan(self, rows: Sequence[Row], room: int) -> tuple[int, bool]:
        """Choose the number of drafts of the best rate, and whether the twin makes them.

        If the twin has made none for long, try it again.
        """
        if not self._pass_seconds or not room:
            return 0, False
        sizes = [len(guess) for guess in self._guesses]
        counts = [count for count in _COUNTS if count <= room]
        ngrams, twin = self._ngram_record, self._twin_record
        plans = {
            (n, False): self._rate(ngrams, n, [min(n, size) for size in sizes])
            for n in (0, *counts)
        }
        if self._twin_is_near(rows):
            rooms = [row.growth - 1 for row in rows]
            plans |= {
                (n, True): self._rate(twin, n, [min(n, own) for own in rooms]) for n in counts
            }
        plans[0, False] *= _GAIN
        best = max(plans, key=plans.__getitem__)
        self._idle, self._patience = (0, _PATIENCE) if best[1] else (self._idle + 1, self._patience)
        if self._idle < self._patience or (1, True) not in plans:
            return best
        self._idle, self._patience = 0, 2 * self._patience
        twin.fade()  # what it drafted long ago says little
        return 1, True

    def _twin_is_near(self, rows: Sequence[Row]) -> bool:
        """Return whether the twin is in memory, or is worth making."""
        speculator = self._speculator
        worth = speculator.has_twin or sum(row.growth for row in rows) >= _MIN_TOKENS
        return worth and speculator.may_have_twin

    def _rate(self, record: Record, count: int, sizes: Sequence[int]) -> float:
        """Return the expected tokens per second of all rows, with these numbers of drafts."""
        passing = self._pass_seconds * self._times(sum(sizes) + len(sizes))
        return sum(map(record.expected, sizes)) / (count * record.seconds + passing)

    def _times(self, places: int) -> float:
        """Return the time of a pass over some places / the time of a pass over one."""
        a, b = _PASS[self._speculator.model.ops.dtype]
        return max(1.1, (places + a) / b) if places > 1 else 1.0


def _force(rows: Sequence[Row], limits: Sequence[int]) -> bool:
    """Set the drafts of rows to the tokens that their constraints force, if these are enough."""
    forced = [row.matcher.forced() if row.matcher else [] for row in rows]
    drafts = [each[:limit] for each, limit in zip(forced, limits, strict=True)]
    if sum(map(len, drafts)) < _FORCED * len(rows):
        return False
    for row, each in zip(rows, drafts, strict=True):
        row.drafts = each
    return True


def _mean(old: float, new: float) -> float:
    """Return a running mean, which begins with the first number."""
    return _OLDER * old + (1 - _OLDER) * new if old else new
