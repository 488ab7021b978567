"""Vectors that point from the activations of some texts to those of others, to steer with."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpt_cli.errors import InputError
from gpt_cli.options.edit import Vector
from gpt_cli.texts.result import Result

VectorPool: TypeAlias = Literal["last", "mean"]
_FOLD = 5  # every fifth text of both sets tests the vector


@dataclass(frozen=True, repr=False)
class Direction(Result, Vector):
    """A vector at a hook point, and how well it separates texts; `2.5 * direction` is an edit."""

    hook: str  # name of the hook point
    vector: NDArray[np.float32]  # (C,), or (H, D) of heads
    accuracy: float | None  # of the sign of the projection, on texts that its fit had left out
    tested: int  # number of these texts

    def _facts(self) -> str:
        length = float(np.linalg.norm(self.vector))
        tested = (
            "" if self.accuracy is None else f", right for {self.accuracy:.0%} of {self.tested}"
        )
        return f"{self.hook}, {self.vector.shape}, length {length:.4g}{tested}"


def direction(
    hook: str, positive: NDArray[np.float32], negative: NDArray[np.float32], *, pca: bool
) -> Direction:
    """Return the difference of the means of two sets of activations (texts, ...) at a hook point.

    With `pca`, return the first principal component of all texts, of length 1, in the direction of
    `positive`. InputError for fewer than two texts in a set, or equal means.
    """
    if min(len(positive), len(negative)) < 2:
        raise InputError("positive and negative need at least 2 texts each")
    sets = [array.reshape(len(array), -1).astype(np.float64) for array in (positive, negative)]
    if np.array_equal(sets[0].mean(axis=0), sets[1].mean(axis=0)):
        raise InputError("positive and negative have the same mean: no vector tells them apart")
    left_out = slice(_FOLD - 1, None, _FOLD)
    fitted = [np.delete(rows, left_out, axis=0) for rows in sets]
    middle = (fitted[0].mean(axis=0) + fitted[1].mean(axis=0)) / 2
    vector = _fit(fitted, pca=pca)
    above, below = ((rows[left_out] - middle) @ vector for rows in sets)
    right = (above > 0).sum() + (below < 0).sum()
    tested = len(above) + len(below)
    whole = _fit(sets, pca=pca).reshape(positive.shape[1:]).astype(np.float32)
    return Direction(hook, whole, right / tested if tested else None, tested)


def _fit(sets: list[NDArray[np.float64]], *, pca: bool) -> NDArray[np.float64]:
    """Return a vector (n,) from two sets of rows (texts, n), in the direction of the first."""
    difference: NDArray[np.float64] = sets[0].mean(axis=0) - sets[1].mean(axis=0)
    if not pca:
        return difference
    rows = np.concatenate(sets)
    _, _, components = np.linalg.svd(rows - rows.mean(axis=0), full_matrices=False)
    return components[0] * (-1 if components[0] @ difference < 0 else 1)
