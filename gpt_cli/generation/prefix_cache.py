"""Prefix cache: texts that begin with the same tokens are computed from where they differ.

The keys and values of a token depend only on the tokens up to it. So what texts have in common at
their beginning, such as a template, is computed once, and each text starts from a copy. Where what
else is in a pass does not change results (`Ops.batch_invariant`), they keep their bits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpt_cli.gpt2.checkpoint import memory
from gpt_cli.gpt2.kv_cache import KVCache
from gpt_cli.gpt2.model import GPT2, PASS, hidden_states, right_pad
from gpt_cli.ops import Array

SHORTEST = 16  # tokens of a prefix
_LEAST = 128  # tokens that a group of texts must save: a prefix takes a pass of its own
_BYTES = 128e6  # of the keys and values of texts side by side; or a share of the weights
_SHARE = 0.25
_MOST = 64  # prefixes that are kept: each is compared with each text


@dataclass(frozen=True)
class Prefix:
    """Tokens, with their keys and values in a cache of one row, and their states (n, C)."""

    ids: list[int]
    cache: KVCache
    states: Array

    @property
    def bytes(self) -> int:
        """Return the memory that it takes."""
        return int(self.cache.keys.nbytes + self.cache.values.nbytes + self.states.nbytes)


class PrefixCache:
    """Computes prefixes, and keeps the last one for later texts, or several.

    Attributes:
        keeps: False without `Ops.batch_invariant`: results would depend on earlier texts.
    """

    def __init__(self, model: GPT2, most_bytes: float = 0):
        """Keep prefixes of up to `most_bytes` in all, and at least the last one."""
        self._model, self._most_bytes = model, most_bytes
        self._kept: list[Prefix] = []  # those that were used last at the end
        self.keeps = model.ops.batch_invariant

    def groups(self, texts: Sequence[list[int]]) -> list[tuple[int, list[int]]]:
        """Group texts that begin alike: return the number of common tokens, and their places.

        The number is 0 for those that have too little in common with others.
        """
        if self.keeps or not texts:
            return _groups(texts)
        return [(0, list(range(len(texts))))]

    def prefix(self, ids: list[int]) -> Prefix:
        """Compute a prefix, apart from the tokens that the last one began with, too.

        Its cache is not to be written.
        """
        config, xp = self._model.config, self._model.ops.xp
        found, known = self.find(ids)
        if found and found.ids == ids:
            return found
        cache = KVCache(config, self._model.ops, 1, len(ids))
        states = [xp.empty((0, config.n_embd), "f4")]
        if found:
            cache.begin(0, found.cache, 0, known)
            states.append(found.states[:known])
        for start in range(known, len(ids), PASS):
            some = xp.asarray([ids[start : start + PASS]])
            states.append(hidden_states(self._model, some, cache)[0])
        made = Prefix(ids, cache, xp.concatenate(states))
        self.keep(made)
        return made

    def find(self, ids: Sequence[int]) -> tuple[Prefix | None, int]:
        """Return the prefix that has most tokens in common with a text, and their number."""
        lengths = [common_length(each.ids, ids) for each in self._kept]
        longest = max(lengths, default=0)
        if not longest:
            return None, 0
        found = self._kept.pop(lengths.index(longest))
        self._kept.append(found)
        return found, longest

    def keep(self, prefix: Prefix) -> None:
        """Keep a prefix, in place of those that it begins with and those not used for longest."""
        if not self.keeps or not prefix.ids:
            return
        others = [each for each in self._kept if prefix.ids[: len(each.ids)] != each.ids]
        self._kept = [*others, prefix][-_MOST:]
        while len(self._kept) > 1 and sum(each.bytes for each in self._kept) > self._most_bytes:
            del self._kept[0]

    def release(self) -> None:
        """Give back the memory of all prefixes."""
        self._kept = []


class Slots:
    """Rows of a cache that begin with a prefix, each for one text after the other.

    Attributes:
        rows: how many texts they take at a time, as many as memory allows.
        cache: the keys and values of the texts at this time.
    """

    def __init__(self, model: GPT2, prefix: Prefix, texts: int, longest: int):
        """Make slots for up to `texts` texts of up to `longest` tokens after the prefix."""
        begun = len(prefix.ids)
        capacity = begun + longest
        bytes_per_row = prefix.cache.token_bytes * capacity
        self._model, self._prefix = model, prefix
        most = room(model) / max(1, bytes_per_row)
        self.rows = max(1, min(texts, PASS, int(most)))
        self._all = self.cache = KVCache(model.config, model.ops, self.rows, capacity)
        for row in range(self.rows):
            self._all.begin(row, prefix.cache, 0, begun)

    def start(self, texts: int) -> None:
        """Begin other texts, up to `rows`: each has the prefix."""
        self.cache = self._all.first(texts)

    def append(self, texts: Sequence[list[int]]) -> list[Array]:
        """Append tokens to the texts; return the states (t, C) of each text's t new tokens."""
        ids, lengths = right_pad(texts)
        if not ids.size:
            return [self._prefix.states[:0] for _ in texts]
        x = hidden_states(self._model, self._model.ops.xp.asarray(ids), self.cache, lengths)
        return [x[row, : len(each)] for row, each in enumerate(texts)]


def room(model: GPT2) -> float:
    """Return the bytes that keys and values may take beside the weights."""
    return max(_BYTES, _SHARE * memory(model.config, model.ops.dtype)["weights_bytes"])


def _groups(texts: Sequence[list[int]]) -> list[tuple[int, list[int]]]:
    """Group texts where that saves tokens: see `PrefixCache.groups`."""
    found: list[tuple[int, list[int]]] = []
    # Neighbours in lexicographic order have the most in common.
    for place in sorted(range(len(texts)), key=texts.__getitem__):
        if found:
            length, places = found[-1]
            common = common_length(texts[places[0]][:length], texts[place])
            saves_more = common * len(places) > length * (len(places) - 1)  # than without it
            if saves_more and common >= SHORTEST:
                found[-1] = common, [*places, place]
                continue
        found.append((len(texts[place]), [place]))
    shared = [(n, places) for n, places in found if n * (len(places) - 1) >= _LEAST]
    grouped = {place for _, places in shared for place in places}
    apart = [place for place in range(len(texts)) if place not in grouped]
    return [*shared, (0, apart)] if apart else shared


def states_after(
    model: GPT2, prefix: Prefix, rests: Sequence[list[int]]
) -> Iterator[tuple[list[int], list[Array]]]:
    """Compute what follows a prefix in several texts, a pass at a time.

    Yield the places of texts, and the states (t, C) of their t tokens after the prefix.
    """
    slots = Slots(model, prefix, len(rests), max(map(len, rests))) if prefix.ids else None
    for places in passes(list(map(len, rests)), slots.rows if slots else len(rests)):
        texts = [rests[place] for place in places]
        if slots:
            slots.start(len(texts))
            yield places, slots.append(texts)
        else:  # no token attends to the padding, which is on the right
            x = hidden_states(model, model.ops.xp.asarray(right_pad(texts)[0]))
            yield places, [x[row, : len(text)] for row, text in enumerate(texts)]


def passes(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield the places of the texts of each pass: up to `most` of similar length, PASS tokens."""
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    while order:
        rows = min(most, max(1, PASS // max(1, lengths[order[0]])))
        yield order[:rows]
        order = order[rows:]


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of ids that two texts have in common at their beginning."""
    known, most = 0, min(len(one), len(other))
    while known < most:  # halving: slices are compared in C
        middle = (known + most + 1) // 2
        if one[known:middle] == other[known:middle]:
            known = middle
        else:
            most = middle - 1
    return known
