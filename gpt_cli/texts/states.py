"""Run the model over texts: their states, and their values at hook points.

Every pass over whole texts is here. The tokens that plain texts share at their beginning are
computed once, unless values at hook points are requested. The results are the same.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from gpt_cli.gpt2.hooks import Hook, Recorder, hook_shapes, rows_of
from gpt_cli.gpt2.kv_cache import KVCache
from gpt_cli.gpt2.memory import FLOAT, cache_bytes
from gpt_cli.gpt2.model import GPT2
from gpt_cli.gpt2.prefill import row_states
from gpt_cli.ops import Array
from gpt_cli.texts.prefix_cache import Prefix, PrefixCache, cache_budget
from gpt_cli.texts.progress import expect_texts
from gpt_cli.texts.text import Text, editing_hook


@dataclass(frozen=True)
class TextStates:
    """The results of a pass for a text, or for one of its continuations.

    Attributes:
        text_index: of the text.
        states: (t, C). Of a text: the states at its t tokens after the prefix. Of a continuation:
            those that predict its t tokens, at the tokens before them.
        values: at hook points, by name, with the shapes of `hook_shapes`.
        continuation_index: None for a text.
    """

    text_index: int
    states: Array
    values: dict[str, Array] = field(default_factory=dict)
    continuation_index: int | None = None


@dataclass(frozen=True)
class Computed:
    """The results of a pass over texts side by side.

    Attributes:
        prefix: the tokens before them, the same for all; it may be empty.
        rows: the results of the texts.
        hook: the editing hook of the texts, for `unembed`.
    """

    prefix: Prefix
    rows: list[TextStates]
    hook: Hook


def states(
    model: GPT2,
    texts: Sequence[Text],
    names: Sequence[str] = (),
    *,
    prefixes: PrefixCache | None = None,
    max_bytes: int | None = None,
) -> Iterator[Computed]:
    """Return an iterator over passes of the model over texts; their continuations come after them.

    Each text is in one pass. A text that is all prefix has no states: see `Computed.prefix`.

    Args:
        model: the weights.
        texts: any number, each of 1 to n_positions ids.
        names: of hook points whose values are needed. Then no text has continuations.
        prefixes: the beginnings of earlier texts, and of these; None if nothing is shared.
        max_bytes: limit of the values at hook points in a pass; by default none.
    """
    if names:
        prefixes = None
        if any(text.continuations for text in texts):
            raise ValueError("values at hook points of continuations are not computed")
    computed = _all_passes(model, texts, names, prefixes, max_bytes)
    advance = expect_texts(len(texts) + sum(len(text.continuations) for text in texts))
    if advance is None:
        return computed

    def counted(computed: Computed) -> Computed:
        advance(len(computed.rows))
        return computed

    return map(counted, computed)  # which keeps no pass, as a loop would


def _all_passes(
    model: GPT2,
    texts: Sequence[Text],
    names: Sequence[str],
    prefixes: PrefixCache | None,
    max_bytes: int | None,
) -> Iterator[Computed]:
    """Yield the passes of `states`."""
    for n, group in _groups(texts, prefixes):
        members = list(group.values())
        longest = max(len(text.ids) for text in members) - n
        side_by_side = min(len(members), model.ops.pass_tokens // max(1, longest))
        # A pass is one turn of texts side by side, the i-th continuation of each, or it is all the
        # continuations of one text. Choose what takes fewer passes.
        if side_by_side < max(len(text.continuations) for text in members):
            for index, text in group.items():
                prefix = _as_prefix(model, text, prefixes)
                yield from _continuations_after(model, prefix, index, text)
        else:
            shared = members[0].ids[:n]
            prefix = prefixes.prefix(shared) if prefixes and shared else Prefix.none(model)
            yield from _texts_after(model, prefix, group, names, max_bytes)


def _groups(
    texts: Sequence[Text], prefixes: PrefixCache | None
) -> Iterator[tuple[int, dict[int, Text]]]:
    """Yield texts that are computed together, by index, after the number of tokens they share.

    Without prefixes, no tokens are shared. With them, plain texts are grouped by shared tokens.
    """
    shared = [index for index, text in enumerate(texts) if prefixes and text.is_plain]
    alone = {index: text for index, text in enumerate(texts) if not (prefixes and text.is_plain)}
    if alone:
        yield 0, alone
    if prefixes:
        for n, members in prefixes.groups([texts[index].ids for index in shared]):
            yield n, {shared[member]: texts[shared[member]] for member in members}


def _as_prefix(model: GPT2, text: Text, prefixes: PrefixCache | None) -> Prefix:
    """Return a whole text as a prefix, which is only shared if the text is plain."""
    if prefixes and text.is_plain:
        return prefixes.prefix(text.ids)
    cache = KVCache(model.config, model.ops, 1, len(text.ids))
    (x,) = row_states(model, [text.ids], cache, editing_hook([text], model.ops))
    return Prefix(text.ids, cache, x)


def _texts_after(
    model: GPT2,
    prefix: Prefix,
    group: Mapping[int, Text],
    names: Sequence[str],
    max_bytes: int | None,
) -> Iterator[Computed]:
    """Yield passes over texts from the end of a prefix on, and over their continuations in turn."""
    n = len(prefix.ids)
    lengths = [len(text.ids) - n for text in group.values()]
    continuation_lengths = [_computed_length(text.continuations) for text in group.values()]
    pairs = list(zip(lengths, continuation_lengths, strict=True))
    max_rows = len(group)
    whole_cache = None
    if n or any(text.continuations for text in group.values()):
        max_new = max(length + further for length, further in pairs)
        whole_cache = _rows_after(model, prefix, max_rows, max_new)
        max_rows = len(whole_cache.lengths)
    if max_bytes and names:
        fitting = max_bytes // value_bytes(model, names, max(lengths))
        max_rows = min(max_rows, max(1, fitting))
    indices = list(group)
    for members in passes([max(pair) for pair in pairs], max_rows, model.ops.pass_tokens):
        part = {indices[member]: group[indices[member]] for member in members}
        if whole_cache is None:
            # Without a name, so that its memory is free in the next pass.
            yield _computed(model, prefix, part, None, names)
        else:
            cache = whole_cache.view(len(part))
            computed = _computed(model, prefix, part, cache, names)
            yield computed
            yield from _turns(model, computed, list(part.values()), cache)


def _computed_length(continuations: Sequence[list[int]]) -> int:
    """Return the most tokens of a continuation that need a state: the last is only predicted."""
    return max([1, *map(len, continuations)]) - 1


def _computed(
    model: GPT2,
    prefix: Prefix,
    part: Mapping[int, Text],
    cache: KVCache | None,
    names: Sequence[str],
) -> Computed:
    """Run one pass over texts, whose rows of a cache begin with the prefix."""
    texts = list(part.values())
    hook = editing_hook(texts, model.ops)
    recorder = Recorder(names, hook)
    x = row_states(model, [text.ids[len(prefix.ids) :] for text in texts], cache, recorder)
    values = rows_of(recorder.values, [len(row) for row in x])
    rows = [TextStates(index, x[row], values[row]) for row, index in enumerate(part)]
    return Computed(prefix, rows, hook)


def _turns(
    model: GPT2, computed: Computed, texts: Sequence[Text], cache: KVCache
) -> Iterator[Computed]:
    """Yield a pass over the first continuation of each computed text, then the second, ..."""
    text_lengths = cache.lengths
    turns = zip_longest(*(text.continuations for text in texts), fillvalue=[])
    for number, turn in enumerate(turns):
        cache.rewind(text_lengths)
        states_after = row_states(model, [ids[:-1] for ids in turn], cache, computed.hook)
        rows = []
        for row, ids, x in zip(computed.rows, turn, states_after, strict=True):
            if ids:
                # The text may end with the prefix.
                before = row.states if len(row.states) else computed.prefix.states
                predicting = model.ops.xp.concatenate([before[-1:], x])
                rows.append(replace(row, states=predicting, continuation_index=number))
        yield Computed(computed.prefix, rows, computed.hook)


def _continuations_after(model: GPT2, prefix: Prefix, index: int, text: Text) -> Iterator[Computed]:
    """Yield passes over the continuations of one text, which is the prefix, side by side."""
    whole = TextStates(index, prefix.states[:0])
    yield Computed(prefix, [whole], editing_hook([text], model.ops))
    if not text.continuations:
        return
    rests = [ids[:-1] for ids in text.continuations]
    lengths = list(map(len, rests))
    whole_cache = _rows_after(model, prefix, len(rests), max(lengths))
    for numbers in passes(lengths, len(whole_cache.lengths), model.ops.pass_tokens):
        cache = whole_cache.view(len(numbers))
        hook = editing_hook([text] * len(numbers), model.ops)
        states_after = row_states(model, [rests[number] for number in numbers], cache, hook)
        rows = []
        for number, x in zip(numbers, states_after, strict=True):
            predicting = model.ops.xp.concatenate([prefix.states[-1:], x])
            rows.append(replace(whole, states=predicting, continuation_index=number))
        yield Computed(prefix, rows, hook)


def _rows_after(model: GPT2, prefix: Prefix, max_rows: int, max_new: int) -> KVCache:
    """Return a cache of rows that begin with a prefix, for up to `max_new` tokens after it.

    Texts use a view of it in turn. It has up to `max_rows` rows, as many as memory allows.
    """
    shared = len(prefix.ids)
    capacity = shared + max_new
    row_bytes = cache_bytes(model.config, capacity, model.ops.cache_type.itemsize)
    fitting = (cache_budget(model) - prefix.bytes) / max(1, row_bytes)
    rows = max(1, min(max_rows, model.ops.pass_tokens, int(fitting)))
    cache = KVCache(model.config, model.ops, rows, capacity)
    for row in range(rows):
        cache.copy_row(row, prefix.cache, 0, shared)
    return cache


def passes(lengths: Sequence[int], max_rows: int, max_tokens: int) -> Iterator[list[int]]:
    """Yield the indices of the texts of a pass: longest first, so that a pass has similar ones."""
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    while order:
        rows = min(max_rows, max(1, max_tokens // max(1, lengths[order[0]])))
        yield order[:rows]
        order = order[rows:]


def value_bytes(model: GPT2, names: Sequence[str], tokens: int) -> int:
    """Return the bytes of the values at hook points of a text of so many tokens."""
    shapes = hook_shapes(model.config)
    numbers = 0
    for name in names:
        numbers += math.prod(tokens if axis == "T" else int(axis) for axis in shapes[name])
    return FLOAT * numbers
