"""Prefix cache: texts that begin with the same tokens are computed from where they differ.

The keys and values of a token depend only on the tokens up to it. So the beginning that several
texts share, such as a template, is computed once, and all texts start from a copy. The results
keep their bits if they do not depend on what else is in a pass (`Ops.batch_invariant`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from gpt_cli.gpt2.kv_cache import KVCache
from gpt_cli.gpt2.memory import prefix_bytes, weights_bytes
from gpt_cli.gpt2.model import GPT2
from gpt_cli.gpt2.prefill import prefill
from gpt_cli.ops import Array

MIN_PREFIX_TOKENS = 16
_MIN_SAVED_TOKENS = 128  # by a group of texts: a prefix takes one more pass
# The bytes of prefixes, and of keys and values of texts side by side: see `cache_budget`.
_MIN_BUDGET = 128e6
_BUDGET_SHARE = 0.25  # of the weights
_MAX_PREFIXES = 64  # that are kept: all are compared with every text


@dataclass(frozen=True)
class Prefix:
    """Tokens, with their keys and values in a cache of one row, and their states (n, C)."""

    ids: list[int]
    cache: KVCache
    states: Array

    @classmethod
    def none(cls, model: GPT2) -> "Prefix":
        """Return a prefix without tokens."""
        states = model.ops.xp.empty((0, model.config.n_embd), "f4")
        return cls([], KVCache(model.config, model.ops, 1, 0), states)

    @property
    def bytes(self) -> int:
        """Return the memory that it takes."""
        return int(self.cache.keys.nbytes + self.cache.values.nbytes + self.states.nbytes)


class PrefixCache:
    """Computes prefixes, and keeps the last one for later texts, or several."""

    def __init__(self, model: GPT2, max_bytes: float = 0):
        """Keep prefixes of up to `max_bytes` in all, and at least the last one."""
        self._model = model
        self._max_bytes = max_bytes
        self._kept: list[Prefix] = []  # the last used comes last
        self.keeps = model.ops.batch_invariant  # else results would depend on earlier texts

    def groups(self, texts: Sequence[list[int]]) -> list[tuple[int, list[int]]]:
        """Group texts where that saves tokens: return the lengths of their prefixes, and indices.

        Texts that have too little in common with others are one group, whose prefix is empty.

        In lexicographic order, texts that begin alike are neighbours. Groups are nested: those with
        more in common lie within those with less. A group stays apart from the one around it if it
        saves more tokens so, or else joins it.
        """
        if texts and not self.keeps:
            return [(0, list(range(len(texts))))]
        shared: list[tuple[int, list[int]]] = []
        nested: list[tuple[int, list[int]]] = []  # open groups, within those before them
        order = sorted(range(len(texts)), key=texts.__getitem__)
        for index, neighbour in zip_longest(order, order[1:]):
            nested.append((len(texts[index]), [index]))
            common = 0 if neighbour is None else common_length(texts[index], texts[neighbour])
            common = common if common >= MIN_PREFIX_TOKENS else 0
            while nested[-1][0] > common:  # the neighbour is not in this group
                length, group = nested.pop()
                around = max(common, nested[-1][0] if nested else 0)
                if length * (len(group) - 1) >= max(_MIN_SAVED_TOKENS, around * len(group)):
                    shared.append((length, group))
                    group = []
                if not nested or nested[-1][0] < around:
                    nested.append((around, []))
                nested[-1][1].extend(group)
        apart = sorted(index for _, group in nested for index in group)
        return [*shared, (0, apart)] if apart else shared

    def new_bytes(self, texts: Sequence[list[int]]) -> int:
        """Return the memory that the prefixes of texts take: while one is computed, one is kept."""
        groups = self.groups(texts)
        kept = [prefix.ids for prefix in self._kept]
        new = [n for n, indices in groups if n and texts[indices[0]][:n] not in kept]
        return prefix_bytes(self._model.config, self._model.ops, sum(sorted(new)[-2:]))

    def prefix(self, ids: list[int]) -> Prefix:
        """Compute a prefix, from where it differs from a kept one; its cache is read-only."""
        config = self._model.config
        xp = self._model.ops.xp
        nearest, known = self.find(ids)
        if nearest and nearest.ids == ids:
            return nearest
        cache = KVCache(config, self._model.ops, 1, len(ids))
        states = [xp.empty((0, config.n_embd), "f4")]
        if nearest:
            cache.copy_row(0, nearest.cache, 0, known)
            states.append(nearest.states[:known])
        states += [x for (x,) in prefill(self._model, [ids[known:]], cache)]
        prefix = Prefix(ids, cache, xp.concatenate(states))
        self.keep(prefix)
        return prefix

    def find(self, ids: list[int]) -> tuple[Prefix | None, int]:
        """Return the prefix that has most tokens in common with a text, and their number."""
        lengths = [common_length(prefix.ids, ids) for prefix in self._kept]
        longest = max(lengths, default=0)
        if not longest:
            return None, 0
        prefix = self._kept.pop(lengths.index(longest))
        self._kept.append(prefix)
        return prefix, longest

    def keep(self, prefix: Prefix) -> None:
        """Keep a prefix; drop those that it begins with, and the least recently used."""
        if not self.keeps or not prefix.ids:
            return
        others = [other for other in self._kept if prefix.ids[: len(other.ids)] != other.ids]
        self._kept = [*others, prefix][-_MAX_PREFIXES:]
        while len(self._kept) > 1 and sum(kept.bytes for kept in self._kept) > self._max_bytes:
            del self._kept[0]

    def release(self) -> None:
        """Give back the memory of all prefixes."""
        self._kept = []


def cache_budget(model: GPT2) -> float:
    """Return the bytes that prefixes, keys and values may take beside the weights."""
    return max(_MIN_BUDGET, _BUDGET_SHARE * weights_bytes(model.config, model.ops.dtype))


def common_length(one: list[int], other: list[int]) -> int:
    """Return the number of ids that two texts have in common at their beginning."""
    least = 0
    most = min(len(one), len(other))
    while least < most:  # binary search: slices are compared in C
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least
