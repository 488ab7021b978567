"""Vectors that point from the activations of some texts to those of others, to steer with."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpt_cli.errors import InputError
from gpt_cli.gpt2.hooks import hook_shapes
from gpt_cli.gpt2.model import GPT2
from gpt_cli.options.declare import OptionError
from gpt_cli.scoring.activations import activations

VectorPool: TypeAlias = Literal["last", "mean"]
_FOLD = 5  # every fifth line of both files tests the direction


@dataclass(frozen=True)
class Direction:
    """A vector at a hook point, and how well it separates texts."""

    hook: str
    vector: NDArray[np.float32]  # (C,), or (H, D) of heads
    accuracy: float | None  # of the sign of the projection, on texts that its fit had left out
    tested: int  # number of these texts


def direction(
    model: GPT2,
    positive: Sequence[Sequence[int]],
    negative: Sequence[Sequence[int]],
    hook: str,
    *,
    pool: VectorPool = "mean",
    pca: bool = False,
) -> Direction:
    """Return the difference of the means of two sets of texts, as ids, at a hook point.

    With `pca`, return the first principal component of all texts, of length 1, in the direction of
    `positive`. InputError for fewer than two texts in a set, and for scores or a pattern.
    """
    if hook_shapes(model.config)[hook][-1] == "T":
        raise OptionError("hook", f"cannot be {hook}: a vector has no tokens")
    if min(len(positive), len(negative)) < 2:
        raise InputError("both files need at least 2 texts")

    def spans(ids: Sequence[int]) -> list[tuple[int, int]]:
        return [(len(ids) - 1 if pool == "last" else 0, len(ids))]

    values = activations(model, [*positive, *negative], [hook], spans)
    rows = np.array([value[hook][0] for value in values], np.float64)
    flat = rows.reshape(len(rows), -1)
    groups = flat[: len(positive)], flat[len(positive) :]
    kept = [np.arange(len(group)) % _FOLD < _FOLD - 1 for group in groups]
    fit = [group[mask] for group, mask in zip(groups, kept, strict=True)]
    vector, middle = _fit(*fit, pca=pca), (fit[0].mean(axis=0) + fit[1].mean(axis=0)) / 2
    left_out = [group[~mask] for group, mask in zip(groups, kept, strict=True)]
    right = [
        ((x - middle) @ vector * sign > 0).sum() for x, sign in zip(left_out, (1, -1), strict=True)
    ]
    tested = sum(map(len, left_out))
    whole = _fit(*groups, pca=pca).reshape(rows.shape[1:]).astype(np.float32)
    return Direction(hook, whole, sum(right) / tested if tested else None, tested)


def _fit(
    positive: NDArray[np.float64], negative: NDArray[np.float64], *, pca: bool
) -> NDArray[np.float64]:
    """Return a vector (n,) from the rows of two arrays (texts, n)."""
    difference: NDArray[np.float64] = positive.mean(axis=0) - negative.mean(axis=0)
    if not pca:
        return difference
    rows = np.concatenate([positive, negative])
    _, _, components = np.linalg.svd(rows - rows.mean(axis=0), full_matrices=False)
    return components[0] * (-1 if components[0] @ difference < 0 else 1)
