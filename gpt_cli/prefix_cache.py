"""Prefix cache: texts that begin with the same tokens are computed from where they differ.

The keys and values of a token depend only on the tokens up to it. So what texts have in common at
their beginning, such as a template, is computed once, and each text starts from a copy. Where what
else is in a pass does not change results (`Ops.batch_invariant`), they keep their bits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpt_cli.checkpoint import memory
from gpt_cli.kv_cache import KVCache
from gpt_cli.model import GPT2, PASS, hidden_states, right_pad
from gpt_cli.ops import Array

_SHORTEST = 16  # tokens of a prefix
_LEAST = 128  # tokens that a group of texts must save: a prefix takes a pass of its own
_BYTES = 128e6  # of the keys and values of texts side by side; or a share of the weights
_SHARE = 0.25


@dataclass(frozen=True)
class Prefix:
    """Tokens, with their keys and values in a cache of one row, and their states (n, C)."""

    ids: list[int]
    cache: KVCache
    states: Array


class PrefixCache:
    """Computes prefixes, and keeps the last one for later texts.

    Without `Ops.batch_invariant`, results would depend on earlier texts; then it keeps nothing.
    """

    def __init__(self, model: GPT2):
        self._model = model
        self._last: Prefix | None = None
        self._keeps = model.ops.batch_invariant

    def groups(self, texts: Sequence[list[int]]) -> list[tuple[int, list[int]]]:
        """Group texts that begin alike: return the number of common tokens, and their places.

        The number is 0 for those that have too little in common with others.
        """
        if self._keeps or not texts:
            return _groups(texts)
        return [(0, list(range(len(texts))))]

    def prefix(self, ids: list[int]) -> Prefix:
        """Compute a prefix, apart from the tokens that the last one began with, too.

        Its cache is not to be written.
        """
        config, xp, last = self._model.config, self._model.ops.xp, self._last
        if last and last.ids == ids:
            return last
        cache, known = KVCache(config, self._model.ops, 1, len(ids)), 0
        states = [xp.empty((0, config.n_embd), "f4")]
        if last:
            known = common_length(last.ids, ids)
            cache.begin(0, last.cache, 0, known)
            states.append(last.states[:known])
        for start in range(known, len(ids), PASS):
            some = xp.asarray([ids[start : start + PASS]])
            states.append(hidden_states(self._model, some, cache)[0])
        made = Prefix(ids, cache, xp.concatenate(states))
        if ids and self._keeps:
            self._last = made
        return made

    def release(self) -> None:
        """Give back the memory of the last prefix."""
        self._last = None


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
        weights = memory(model.config, model.ops.dtype)["weights_bytes"]
        most = max(_BYTES, _SHARE * weights) / max(1, bytes_per_row)
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


def _groups(texts: Sequence[list[int]]) -> list[tuple[int, list[int]]]:
    """Group texts where that saves tokens: see `PrefixCache.groups`."""
    found: list[tuple[int, list[int]]] = []
    # Neighbours in lexicographic order have the most in common.
    for place in sorted(range(len(texts)), key=texts.__getitem__):
        if found:
            length, places = found[-1]
            common = common_length(texts[places[0]][:length], texts[place])
            saves_more = common * len(places) > length * (len(places) - 1)  # than without it
            if saves_more and common >= _SHORTEST:
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
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))
