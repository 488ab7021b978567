"""Drafts: guesses at the next tokens of a text, for `gpt_cli.generation.speculate` to verify."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np

from gpt_cli.errors import CheckpointError
from gpt_cli.generation.row import Chooser, Place, Row
from gpt_cli.gpt2.checkpoint import memory
from gpt_cli.gpt2.kv_cache import KVCache
from gpt_cli.gpt2.model import GPT2, Block, hidden_states, unembed
from gpt_cli.ops import Linear

_NGRAM = 3  # tokens
_FADING = 0.9  # of what was learned, with each result
_MIN_BYTES = 64e6  # of the weights: smaller ones stay in the processor's cache
_STALE = 0.2  # of what was learned, before a new trial


class NGrams:
    """Drafts what followed the last tokens when they were in the text before (prompt lookup)."""

    def __init__(self) -> None:
        # Of each row: n-gram -> its end, and the number of tokens that were looked at.
        self._ends: WeakKeyDictionary[Row, dict[tuple[int, ...], int]] = WeakKeyDictionary()
        self._known: WeakKeyDictionary[Row, int] = WeakKeyDictionary()

    def draft(self, row: Row, count: int) -> list[int]:
        """Return `count` drafts, or none."""
        ids, ends = row.ids, self._ends.setdefault(row, {})
        for end in range(self._known.get(row, _NGRAM), len(ids)):
            ends[tuple(ids[end - _NGRAM : end])] = end
        self._known[row] = max(_NGRAM, len(ids))
        start = ends.get(tuple(ids[-_NGRAM:]))
        if start is None:
            return []
        return [ids[start + n % (len(ids) - start)] for n in range(count)]  # a loop goes on


class Twin:
    """Drafts what a model chooses that is like the verifying one, but faster.

    Its cache has half of the bytes, in float16: for the text a copy of the verifying model's keys
    and values, and for drafts its own, until the text goes on.
    """

    def __init__(self, model: GPT2, chooser: Chooser):
        self._model, self._chooser = model, chooser
        self._room: KVCache | None = None
        self._followed: Callable[[], KVCache | None] = lambda: None

    def follow(self, cache: KVCache) -> None:
        """Copy what is new in the verifying model's cache, or all of another one."""
        rows, room = len(cache.lengths), self._room
        if room is None or rows > len(room.lengths) or cache.capacity != room.capacity:
            rounded = 2 ** (rows - 1).bit_length()  # since rows may join
            room = KVCache(self._model.config, self._model.ops, rounded, cache.capacity)
            self._room, self._followed = room, lambda: None
        if self._followed() is not cache:
            self._cache = room.first(rows)
            self._followed = weakref.ref(cache)
        self._cache.follow(cache)

    def draft(self, rows: Sequence[Row], count: int) -> list[list[int]]:
        """Return up to `count` drafts for each row; the last token of each is not in the cache."""
        found = self._in_one_call(rows, count)
        return self._by_steps(rows, count) if found is None else found

    def _in_one_call(self, rows: Sequence[Row], count: int) -> list[list[int]] | None:
        """Draft by `Ops.draft`, or return None if that does not know the rows' options."""
        model, params, banned = self._model, rows[0].sampling, self._chooser.banned(rows[0])
        alike = len({(row.sampling, row.options.ignore_eos) for row in rows}) == 1
        constrained = any(row.matcher for row in rows)
        if model.ops.draft is None or not alike or params.changes_logits or constrained:
            return None
        last, draws = np.array([row.ids[-1] for row in rows]), np.zeros((count, len(rows)))
        filters = 1.0, 1, 1.0, 0.0  # of the likeliest tokens, a draw of 0 takes the first
        if params.temperature:
            draws[:] = [[row.draw(len(row.generated) + n) for row in rows] for n in range(count)]
            filters = params.temperature, params.top_k, params.top_p, params.min_p
        found = model.ops.draft(model, self._cache, last, draws, banned, *filters)
        return None if found is None else found.T.tolist()

    def _by_steps(self, rows: Sequence[Row], count: int) -> list[list[int]]:
        model, cache, past = self._model, self._cache, self._cache.lengths
        drafts: list[list[int]] = [[] for _ in rows]
        places = [Place(row, each) for row, each in zip(rows, drafts, strict=True)]
        last = [row.ids[-1] for row in rows]
        with suppress(CheckpointError):  # results that are not finite
            for _ in range(count):
                ids = model.ops.xp.asarray(last)[:, None]
                logits = unembed(model, hidden_states(model, ids, cache)[:, -1])
                last = self._chooser.choose(logits, places).tolist()
                for each, id in zip(drafts, last, strict=True):
                    each.append(id)
        cache.lengths = past
        return drafts


def make_twin(model: GPT2) -> GPT2 | None:
    """Return a model with its matrices in int8; the other weights are shared.

    None if memory is short, or the operations have no twin.
    """
    ops, free = model.ops.draft_ops(), model.ops.free_memory()
    if ops is None or (free is not None and 2 * _twin_bytes(model) > free):
        return None

    def linear(w: Linear) -> Linear:
        return replace(w, weight=ops.quantize(w.weight))

    def block(b: Block) -> Block:
        attn = replace(b.attn, c_attn=linear(b.attn.c_attn), c_proj=linear(b.attn.c_proj))
        mlp = replace(b.mlp, c_fc=linear(b.mlp.c_fc), c_proj=linear(b.mlp.c_proj))
        return replace(b, attn=attn, mlp=mlp)

    with suppress(MemoryError):
        return replace(model, ops=ops, h=tuple(map(block, model.h)), lm_head=linear(model.lm_head))
    return None


def _twin_bytes(model: GPT2) -> int:
    return int(memory(model.config, "int8")["weights_bytes"])


class Speculator:
    """A model, and its twin once that is needed."""

    def __init__(self, model: GPT2):
        self.model = model
        self.may_have_twin = model.ops.draft_ops() is not None
        self.has_twin = False

    @property
    def pays(self) -> bool:
        """Return whether drafts can save time, and leave the texts as they are."""
        ops = self.model.ops
        weights = memory(self.model.config, ops.dtype)["weights_bytes"]
        return ops.batch_invariant and weights >= _MIN_BYTES

    @property
    def needed_bytes(self) -> int:
        """Return the memory that making the twin takes; 0 if it is there, or cannot be made."""
        return _twin_bytes(self.model) if self.may_have_twin and not self.has_twin else 0

    @cached_property
    def twin(self) -> GPT2 | None:
        """The model with int8 weights; None if there are no operations or no memory for it."""
        twin = make_twin(self.model)
        self.has_twin = self.may_have_twin = twin is not None
        return twin

    def release(self) -> None:
        """Give back the memory of the twin."""
        if vars(self).pop("twin", None) is not None:
            self.has_twin = False


class Record:
    """How often the drafts of a source were right, and what they cost."""

    def __init__(self, right: float, wrong: float):
        self._right, self._wrong = right, wrong  # numbers of drafts; at first a guess
        self.seconds = 0.0  # per draft

    def expected(self, count: int) -> float:
        """Return the expected number of tokens from a pass with `count` drafts of a row."""
        chance = self._right / (self._right + self._wrong)
        return sum(chance**n for n in range(count + 1))

    def learn(self, drafts: Sequence[int], ids: Sequence[int]) -> None:
        """Compare drafts with the tokens that came; older results count less."""
        if drafts:
            kept = agreed(drafts, ids)
            self._right = _FADING * self._right + kept
            self._wrong = _FADING * self._wrong + (kept < min(len(drafts), len(ids)))

    def fade(self) -> None:
        """Let the next result count more than all before."""
        self._right, self._wrong = _STALE * self._right, _STALE * self._wrong


def agreed(drafts: Sequence[int], ids: Sequence[int]) -> int:
    """Return the number of drafts before the first that is not the model's token."""
    pairs = enumerate(zip(drafts, ids, strict=False))
    wrong = (n for n, (draft, id) in pairs if draft != id)
    return next(wrong, min(len(drafts), len(ids)))
