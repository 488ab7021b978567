"""Activations: the values at hook points of many texts, whole or pooled."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, tee
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from gpt_cli.errors import brief, counted
from gpt_cli.gpt2.hooks import has_key_axis
from gpt_cli.gpt2.model import GPT2
from gpt_cli.gpt2.weights import check_finite
from gpt_cli.ops import Array, Ops
from gpt_cli.options.declare import OptionError
from gpt_cli.texts.loaded import LoadedModel
from gpt_cli.texts.result import Arrays, Result
from gpt_cli.texts.states import states, value_bytes
from gpt_cli.texts.text import Text, Word
from gpt_cli.texts.words import split_words

Values: TypeAlias = dict[str, NDArray[np.float32]]  # by the names of hook points
# The ranges of positions of a text that are averaged.
Spans: TypeAlias = Callable[[Text], Sequence[tuple[int, int]]]
Pool: TypeAlias = Literal["last", "mean", "word"]

_MAX_BYTES = 32_000_000  # of the values of texts side by side
_GROUP_TOKENS = 4096  # of texts that are sorted by length


@dataclass(frozen=True, repr=False)
class TextActivations(Result):
    """The values of a text: (n, ...) for its n tokens, for its n words, or for n = 1 pooled."""

    ids: list[int]  # with the start token, if any
    values: Values  # only those with keys, which are never pooled, are (H, T, T)
    words: list[Word] | None = None

    def _facts(self) -> str:
        return f"{counted(len(self.ids), 'token')}, {Arrays(self.values)!r}"

    @property
    def token_columns(self) -> dict[str, NDArray[Any]]:
        """The positions and the ids of the tokens, each (n,)."""
        return {"position": np.arange(len(self.ids)), "token": np.array(self.ids)}

    @property
    def word_columns(self) -> dict[str, NDArray[Any]]:
        """The words, and where they begin and end in bytes of the text, each (n,)."""
        if not self.words:
            return {}
        return {
            "word": np.array([word.text for word in self.words]),
            "start": np.array([word.start for word in self.words]),
            "end": np.array([word.end for word in self.words]),
        }


def check_pool(pool: str | None, names: Iterable[str]) -> None:
    """Raise OptionError if it is not a pool, or if values cannot be pooled."""
    if pool is not None and pool not in get_args(Pool):
        raise OptionError("pool", f"must be one of {', '.join(get_args(Pool))}, not {brief(pool)}")
    wide = [name for name in names if has_key_axis(name)]
    if pool and wide:
        problem = f"must not be set for {wide[0]}, which has a number per key: leave it out"
        raise OptionError("pool", problem)


def text_activations(
    loaded: LoadedModel, texts: Iterable[Text], names: Sequence[str], pool: Pool | None
) -> Iterator[TextActivations]:
    """Yield the values of texts that are not empty.

    The tokens before a text are among its tokens, but no part of its mean and of its words.
    """

    def spans(text: Text) -> list[tuple[int, int]]:
        end = len(text.ids)
        if pool == "word":
            sizes = [word.tokens for word in split_words(loaded.tokenizer, text)]
            return list(pairwise(accumulate(sizes, initial=text.first)))
        return [(text.first if pool == "mean" else end - 1, end)]

    texts, inputs = tee(texts)
    rows = activations(loaded.model, inputs, names, spans if pool else None)
    for text, values in zip(texts, rows, strict=True):
        words = split_words(loaded.tokenizer, text) if pool == "word" else None
        yield TextActivations(text.ids, values, words)


def activations(
    model: GPT2, texts: Iterable[Text], names: Sequence[str], spans: Spans | None = None
) -> Iterator[Values]:
    """Yield the values at hook points of texts, in order, on the host.

    Their bits do not depend on the other texts, as for logits (`Ops.batch_invariant`).

    Args:
        model: the weights.
        texts: any number, each of 1 to n_positions ids.
        names: of hook points; the values have the shapes of `hook_shapes`.
        spans: the ranges of positions to average, such as those of words: a value is then (ranges,
            ...). Attention scores and patterns cannot be averaged.
    """
    for group in _groups(model, texts, names, whole=spans is None):
        values: dict[int, Values] = {}
        for computed in states(model, group, names, max_bytes=_MAX_BYTES):
            for row in computed.rows:
                text = group[row.text_index]
                check_finite(model, row.states, computed.hook)
                arrays = {name: _on_host(model.ops.to_host(row.values[name])) for name in names}
                if spans:
                    ranges = spans(text)
                    arrays = {name: _means(array, ranges) for name, array in arrays.items()}
                values[row.text_index] = arrays
            del computed, row  # the values of a pass take as much memory as the next one
        yield from (values.pop(index) for index in range(len(group)))


def _groups(
    model: GPT2, texts: Iterable[Text], names: Sequence[str], *, whole: bool
) -> Iterator[list[Text]]:
    """Yield consecutive texts: about _GROUP_TOKENS, or _MAX_BYTES of whole values."""
    group: list[Text] = []
    share = 0.0  # of a group
    for text in texts:
        group.append(text)
        share += len(text.ids) / _GROUP_TOKENS
        if whole:
            share += value_bytes(model, names, len(text.ids)) / _MAX_BYTES
        if share >= 1:
            yield group
            group = []
            share = 0.0
    if group:
        yield group


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
