"""Rounding to 16 bits by arithmetic in float64, in which every step here is exact but `rint`."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.checkpoints import Stored, store

# Bits of the fraction, the smallest exponent of a normal number, and the largest number.
_TYPES = {"float16": (10, -14, 65504.0), "bfloat16": (7, -126, 255 * 2.0**120)}


def nearest(values: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
    """Return the numbers of a 16-bit type that are nearest to float32 numbers."""
    fraction, smallest, largest = _TYPES[dtype]
    wide: NDArray[Any] = values.astype(np.float64)
    with np.errstate(invalid="ignore"):
        exponents = np.maximum(np.frexp(wide)[1] - 1, smallest)
        steps = np.ldexp(1.0, exponents - fraction)
        rounded = np.rint(wide / steps) * steps  # half to even, as the fractions are
    rounded[np.abs(rounded) > largest] *= np.inf
    return rounded.astype(np.float32)


def store_nearest(array: NDArray[np.float32], dtype: str) -> Stored:
    """Encode an array as a checkpoint that is saved in a 16-bit type."""
    return store(nearest(array, dtype), {"float16": "F16", "bfloat16": "BF16"}[dtype])
