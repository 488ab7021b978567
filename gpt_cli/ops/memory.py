"""Where arrays lie."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

_CACHE_LINE = 64  # bytes


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an uninitialized array that starts on a cache line, as vector instructions like it."""
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + _CACHE_LINE, np.uint8)
    start = -buffer.ctypes.data % _CACHE_LINE
    return buffer[start : start + size].view(dtype).reshape(shape)
