"""The states of texts, and their values at hook points: every pass over whole texts is here.

The tokens that texts share at their beginning are computed once, unless a text has edits or values
at hook points are requested. The results are the same.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from gpt_cli.gpt2.edits import editor
from gpt_cli.gpt2.hooks import Recorder, hook_shapes, rows_of
from gpt_cli.gpt2.kv_cache import KVCache
from gpt_cli.gpt2.memory import FLOAT, cache_bytes
from gpt_cli.gpt2.model import GPT2
from gpt_cli.gpt2.prefill import row_states
from gpt_cli.ops import Array
from gpt_cli.texts.prefix_cache import Prefix, PrefixCache, cache_budget
from gpt_cli.texts.text import Text


@dataclass(frozen=True)
class States:
    """What a pass has computed for a text, or for one of its continuations."""

    text: int  # its index
    states: Array  # (t, C): at the tokens after the prefix; or those that predict a continuation
    values: dict[str, Array] = field(default_factory=dict)  # by hook point, as in `hook_shapes`
    continuation: int | None = None  # its index
    edited: bool = False  # whether the text has edits


@dataclass(frozen=True)
class Computed:
    """What a pass has computed: texts side by side, after a prefix of all, which may be empty."""

    prefix: Prefix
    rows: list[States]

    @property
    def edited(self) -> bool:
        """Return whether a text has edits."""
        return any(row.edited for row in self.rows)


def states(
    model: GPT2,
    texts: Sequence[Text],
    names: Sequence[str] = (),
    *,
    prefixes: PrefixCache | None = None,
    most_bytes: int | None = None,
) -> Iterator[Computed]:
    """Compute texts, a pass at a time; each text is in one pass, and its continuations follow.

    Args:
        model: the weights.
        texts: any number, each of 1 to n_positions ids; without ids if they are the prefix.
        names: of hook points whose values are needed.
        prefixes: the beginnings of earlier texts, and of these.
        most_bytes: of the values at hook points in a pass; by default any number.
    """
    for n, group in _groups(texts, None if names else prefixes):
        members = list(group.values())
        longest = max(len(text.ids) for text in members) - n
        most_continuations = max(len(text.continuations) for text in members)
        side_by_side = min(len(members), model.ops.pass_tokens // max(1, longest))
        # Continuations take turns in the row of their text; if they are many, each has a row.
        if side_by_side < most_continuations and prefixes and not members[0].edits:
            for index, text in group.items():
                yield from _continuations_after(model, prefixes.prefix(text.ids), index, text)
        else:
            shared = members[0].ids[:n]
            prefix = prefixes.prefix(shared) if prefixes and shared else Prefix.none(model)
            yield from _texts_after(model, prefix, group, names, most_bytes)


def _groups(
    texts: Sequence[Text], prefixes: PrefixCache | None
) -> Iterator[tuple[int, dict[int, Text]]]:
    """Yield texts that are computed together, by index, after the number of tokens they share.

    All texts of a group have edits, or none has.
    """
    alone = {index: text for index, text in enumerate(texts) if text.edits or not prefixes}
    if alone:
        yield 0, alone
    if prefixes:
        plain = [index for index in range(len(texts)) if index not in alone]
        for n, numbers in prefixes.groups([texts[index].ids for index in plain]):
            yield n, {plain[number]: texts[plain[number]] for number in numbers}


def _texts_after(
    model: GPT2,
    prefix: Prefix,
    group: Mapping[int, Text],
    names: Sequence[str],
    most_bytes: int | None,
) -> Iterator[Computed]:
    """Yield passes over texts from the end of a prefix on, and over their continuations in turn."""
    n = len(prefix.ids)
    indices = list(group)
    lengths = [len(text.ids) - n for text in group.values()]
    # The last token of a continuation is only predicted.
    after = [max([1, *map(len, text.continuations)]) - 1 for text in group.values()]
    longest = [max(pair) for pair in zip(lengths, after, strict=True)]
    most_rows = len(indices)
    memory = None
    if n or any(text.continuations for text in group.values()):
        capacity = max(sum(pair) for pair in zip(lengths, after, strict=True))
        memory = _rows_after(model, prefix, most_rows, capacity)
        most_rows = len(memory.lengths)
    if most_bytes:
        fitting = most_bytes // value_bytes(model, names, max(lengths))
        most_rows = min(most_rows, max(1, fitting))
    for numbers in passes(longest, most_rows, model.ops.pass_tokens):
        texts = [group[indices[number]] for number in numbers]
        cache = memory.view(len(texts)) if memory else None
        hook = Recorder(names, editor([text.edits for text in texts], model.ops))
        x = row_states(model, [text.ids[n:] for text in texts], cache, hook)
        values = rows_of(hook.values, [len(row) for row in x])
        rows = []
        for row, number in enumerate(numbers):
            edited = bool(texts[row].edits)
            rows.append(States(indices[number], x[row], values[row], edited=edited))
        computed = Computed(prefix, rows)
        yield computed
        if cache:
            yield from _turns(model, computed, texts, cache, hook)


def _turns(
    model: GPT2, computed: Computed, texts: Sequence[Text], cache: KVCache, hook: Recorder
) -> Iterator[Computed]:
    """Yield a pass over the first continuation of each computed text, then the second, ..."""
    begun = cache.lengths
    turns = zip_longest(*(text.continuations for text in texts), fillvalue=[])
    for number, turn in enumerate(turns):
        cache.rewind(begun)
        after = row_states(model, [ids[:-1] for ids in turn], cache, hook)
        rows = []
        for row, ids, x in zip(computed.rows, turn, after, strict=True):
            if ids:
                before = row.states if len(row.states) else computed.prefix.states
                predicting = model.ops.xp.concatenate([before[-1:], x])
                rows.append(replace(row, states=predicting, continuation=number))
        yield Computed(computed.prefix, rows)


def _continuations_after(model: GPT2, prefix: Prefix, index: int, text: Text) -> Iterator[Computed]:
    """Yield passes over the continuations of one text, which is the prefix, side by side."""
    yield Computed(prefix, [States(index, prefix.states[:0])])
    if not text.continuations:
        return
    rests = [ids[:-1] for ids in text.continuations]
    lengths = list(map(len, rests))
    memory = _rows_after(model, prefix, len(rests), max(lengths))
    for numbers in passes(lengths, len(memory.lengths), model.ops.pass_tokens):
        group = [rests[number] for number in numbers]
        after = row_states(model, group, memory.view(len(group)))
        rows = []
        for number, x in zip(numbers, after, strict=True):
            predicting = model.ops.xp.concatenate([prefix.states[-1:], x])
            rows.append(States(index, predicting, continuation=number))
        yield Computed(prefix, rows)


def _rows_after(model: GPT2, prefix: Prefix, texts: int, longest: int) -> KVCache:
    """Return a cache of rows that begin with a prefix, for up to `longest` tokens after it.

    Texts use a view of it in turn. It has up to `texts` rows, as many as memory allows.
    """
    begun = len(prefix.ids)
    capacity = begun + longest
    row_bytes = cache_bytes(model.config, capacity, model.ops.cache_type.itemsize)
    fitting = (cache_budget(model) - prefix.bytes) / max(1, row_bytes)
    rows = max(1, min(texts, model.ops.pass_tokens, int(fitting)))
    cache = KVCache(model.config, model.ops, rows, capacity)
    for row in range(rows):
        cache.copy_row(row, prefix.cache, 0, begun)
    return cache


def passes(lengths: Sequence[int], most_rows: int, most_tokens: int) -> Iterator[list[int]]:
    """Yield the indices of the texts of a pass, which are of similar length."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    while order:
        rows = min(most_rows, max(1, most_tokens // max(1, lengths[order[0]])))
        yield order[:rows]
        order = order[rows:]


def value_bytes(model: GPT2, names: Sequence[str], tokens: int) -> int:
    """Return the bytes of the values at hook points of a text of so many tokens."""
    shapes = hook_shapes(model.config)
    numbers = 0
    for name in names:
        numbers += math.prod(tokens if axis == "T" else int(axis) for axis in shapes[name])
    return FLOAT * numbers
