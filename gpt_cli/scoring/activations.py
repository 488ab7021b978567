"""Activations: the values at hook points of many texts, whole or pooled."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, tee
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from gpt_cli.folder.config import GPT2Config
from gpt_cli.generation.loaded import LoadedModel
from gpt_cli.generation.prefix_cache import passes
from gpt_cli.gpt2.edits import Bound, editor
from gpt_cli.gpt2.hooks import Recorder, has_keys, hook_shapes, rows_of
from gpt_cli.gpt2.memory import FLOAT
from gpt_cli.gpt2.model import GPT2, hidden_states
from gpt_cli.gpt2.prefill import right_pad
from gpt_cli.gpt2.weights import check_finite
from gpt_cli.ops import Array, Ops
from gpt_cli.options.declare import OptionError
from gpt_cli.scoring.words import Word, split_words

Values: TypeAlias = dict[str, NDArray[np.float32]]  # by the names of hook points
Text: TypeAlias = tuple[Sequence[int], Sequence[Bound]]  # ids and edits
# The ranges of positions of a text that are averaged.
Spans: TypeAlias = Callable[[Sequence[int]], Sequence[tuple[int, int]]]
Pool: TypeAlias = Literal["last", "mean", "word"]

_BYTES = 32e6  # of the values of texts side by side
_TOKENS = 4096  # of texts that are sorted by length


@dataclass(frozen=True)
class TextActivations:
    """The values of a text: (n, ...) for its n tokens, for its n words, or for n = 1 pooled."""

    ids: list[int]  # with the start token, if any
    values: Values  # only those with keys, which are never pooled, are (H, T, T)
    words: list[Word] | None = None

    @property
    def token_columns(self) -> dict[str, NDArray[Any]]:
        """The positions and the ids of the tokens, each (n,)."""
        return {"position": np.arange(len(self.ids)), "token": np.array(self.ids)}

    @property
    def word_columns(self) -> dict[str, NDArray[Any]]:
        """The words, and where they begin and end in bytes of the text, each (n,)."""
        places = zip(*((word.text, word.start, word.end) for word in self.words or []), strict=True)
        return dict(zip(("word", "start", "end"), map(np.array, places), strict=False))


def check_pool(pool: str | None, names: Iterable[str]) -> None:
    """Raise OptionError if it is not a pool, or if values cannot be pooled."""
    if pool is not None and pool not in get_args(Pool):
        raise OptionError("pool", f"must be one of {', '.join(get_args(Pool))}, not {pool!r:.40}")
    if pool and (wide := [name for name in names if has_keys(name)]):
        why = f"{wide[0]}, which has a number per key"
        raise OptionError("pool", f"must not be set for {why}: leave it out")


def text_activations(
    loaded: LoadedModel,
    texts: Iterable[tuple[list[int], list[Bound]]],
    names: Sequence[str],
    pool: Pool | None,
    start: Sequence[int],
) -> Iterator[TextActivations]:
    """Yield the values of texts with edits, as ids that are not empty and follow `start`.

    The start token is the first of the tokens of a text, but no part of its mean and of its words.
    """

    def words(ids: Sequence[int]) -> list[Word]:
        return split_words(loaded.tokenizer, ids[len(start) :])

    def ranges(ids: Sequence[int]) -> list[tuple[int, int]]:
        if pool == "word":
            sizes = (word.tokens for word in words(ids))
            return list(pairwise(accumulate(sizes, initial=len(start))))
        return [(len(start) if pool == "mean" else len(ids) - 1, len(ids))]

    ids_of, inputs = tee(([*start, *ids], edits) for ids, edits in texts)
    rows = edited_activations(loaded.model, inputs, names, ranges if pool else None)
    for (ids, _), values in zip(ids_of, rows, strict=True):
        yield TextActivations(ids, values, words(ids) if pool == "word" else None)


def value_bytes(config: GPT2Config, names: Iterable[str], tokens: int) -> int:
    """Return the bytes of values of a text."""
    shapes = hook_shapes(config)
    sizes = ([tokens if axis == "T" else int(axis) for axis in shapes[name]] for name in names)
    return FLOAT * sum(map(math.prod, sizes))


def activations(
    model: GPT2, texts: Iterable[Sequence[int]], names: Sequence[str], spans: Spans | None = None
) -> Iterator[Values]:
    """Yield the values at hook points of texts, in order, on the host.

    Their bits do not depend on the other texts, as for logits (`Ops.batch_invariant`).

    Args:
        model: the weights.
        texts: any number, each of 1 to n_positions ids.
        names: of hook points; the values have the shapes of `hook_shapes`.
        spans: the ranges of positions to average, such as those of words: a value is then (ranges,
            ...). Scores and patterns cannot be averaged.
    """
    return edited_activations(model, ((ids, ()) for ids in texts), names, spans)


def edited_activations(
    model: GPT2, texts: Iterable[Text], names: Sequence[str], spans: Spans | None = None
) -> Iterator[Values]:
    """Yield what `activations` does for texts with edits."""
    for group in _groups(model.config, texts, names, whole=spans is None):
        lengths = [len(ids) for ids, _ in group]
        longest_bytes = value_bytes(model.config, names, max(lengths))
        values: dict[int, Values] = {}
        for indices in passes(lengths, max(1, int(_BYTES // longest_bytes)), model.ops.pass_tokens):
            rows = _pass(model, [group[index] for index in indices], names, spans)
            values |= zip(indices, rows, strict=True)
        yield from (values.pop(index) for index in range(len(group)))


def _groups(
    config: GPT2Config, texts: Iterable[Text], names: Sequence[str], *, whole: bool
) -> Iterator[list[Text]]:
    """Yield consecutive texts: about _TOKENS of them, and with whole values, about _BYTES."""
    group: list[Text] = []
    share = 0.0  # of a group
    for ids, edits in texts:
        group.append((ids, edits))
        share += len(ids) / _TOKENS
        share += value_bytes(config, names, len(ids)) / _BYTES if whole else 0
        if share >= 1:
            yield group
            group, share = [], 0.0
    if group:
        yield group


def _pass(
    model: GPT2, texts: Sequence[Text], names: Sequence[str], spans: Spans | None
) -> list[Values]:
    """Return the values of texts that are computed side by side."""
    ops = model.ops
    ids, lengths = right_pad([ids for ids, _ in texts])
    recorder = Recorder(frozenset(names), editor([edits for _, edits in texts], ops))
    x = hidden_states(model, ops.xp.asarray(ids), None, lengths, recorder)
    values: list[Values] = []
    for number, row in enumerate(rows_of(recorder.values, lengths.tolist())):
        check_finite(model, x[number, : lengths[number]], edited=recorder.edits)
        arrays = {name: _on_host(ops.to_host(row[name])) for name in names}
        if spans:
            ranges = spans(texts[number][0])
            arrays = {name: _means(array, ranges) for name, array in arrays.items()}
        values.append(arrays)
    return values


def _on_host(array: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a copy in float32 that is contiguous, so that means have the same bits."""
    return np.array(array, np.float32, order="C")


def mean(ops: Ops, value: Array, first: int) -> NDArray[np.float32]:
    """Return the mean (...) over positions from `first` on, as `activations`: value (T, ...)."""
    return _means(_on_host(ops.to_host(value)), [(first, len(value))])[0]


def _means(array: NDArray[np.float32], ranges: Sequence[tuple[int, int]]) -> NDArray[np.float32]:
    """Return the means over ranges of positions: array (T, ...) -> (ranges, ...)."""
    means = np.empty((len(ranges), *array.shape[1:]), np.float32)
    for mean, (start, end) in zip(means, ranges, strict=True):
        # A word may have no token: one with bytes of several words belongs to the first of them.
        mean[...] = array[start:end].mean(axis=0, dtype=np.float64) if end > start else np.nan
    return means
