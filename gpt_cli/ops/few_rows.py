"""Products of a matrix with few rows, as a decode step of a small batch has them.

For every product OpenBLAS copies the matrix into an order that its kernels like. With many rows
that is soon paid back; with 2 to 16, it is most of the work. For AVX-512 it also has kernels that
take small matrices as they are. So a matrix that is often multiplied with few rows is kept once
more, cut in blocks of columns that are small enough for these.
"""

import ctypes
import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np

from gpt_cli.machine import free_memory
from gpt_cli.ops import Array

MOST_ROWS = 16
COLUMNS = 32
_SMALL = 1_000_000  # rows * columns * n_in: the largest product of those kernels
_OFTEN = 16  # products: cutting a matrix takes as long as this many save


class FewRows:
    """A matrix (n_in, n_out) that is multiplied with few rows at a time."""

    def __init__(self, weight: Array):
        self._weight = weight
        self._products = 0
        self._blocks: Array | None = None  # (n_out // COLUMNS, n_in, COLUMNS)

    def product(self, x: Array) -> Array:
        """x (B, n_in) @ weight -> (B, n_out), for a B from 2 to MOST_ROWS."""
        self._products += 1
        n_in, n_out = self._weight.shape
        if not direct_kernels() or len(x) * COLUMNS * n_in > _SMALL:
            return x @ self._weight
        if self._blocks is None:
            if self._products < _OFTEN or not _room_for(self._weight):
                return x @ self._weight
            self._blocks = self._cut()
        count = len(self._blocks)
        parts = np.empty((count, len(x), COLUMNS), np.float32)
        bounds = [count * part // threads() for part in range(threads() + 1)]
        # Each of these products runs in the thread that asks for it.
        others = [
            _pool().submit(np.matmul, x, self._blocks[start:end], parts[start:end])
            for start, end in itertools.pairwise(bounds[1:])
        ]
        np.matmul(x, self._blocks[: bounds[1]], parts[: bounds[1]])
        for other in others:
            other.result()
        y = np.empty((len(x), n_out), np.float32)
        cut = count * COLUMNS
        y[:, :cut].reshape(len(x), count, COLUMNS)[:] = parts.swapaxes(0, 1)
        y[:, cut:] = x @ self._weight[:, cut:]
        return y

    def _cut(self) -> Array:
        n_in, n_out = self._weight.shape
        blocks = np.empty((n_out // COLUMNS, n_in, COLUMNS), np.float32)
        for number, block in enumerate(blocks):
            block[:] = self._weight[:, number * COLUMNS : (number + 1) * COLUMNS]
        return blocks


@cache
def direct_kernels() -> bool:
    """Whether NumPy's OpenBLAS computes with those kernels here."""
    try:
        library = ctypes.CDLL(np._core._multiarray_umath.__file__)  # type: ignore[attr-defined]
        core = library.scipy_openblas_get_corename64_
    except (AttributeError, OSError):  # another library, or one of another name
        return False
    core.restype = ctypes.c_char_p
    return core() in (b"SkylakeX", b"Cooperlake", b"SapphireRapids")


def _room_for(weight: Array) -> bool:
    """Whether memory is so plentiful that a copy of this matrix is nothing beside it."""
    free = free_memory()
    return free is None or free > 8 * weight.nbytes


@cache
def threads() -> int:
    """How many threads OpenBLAS has been given."""
    given = os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS") or ""
    return int(given) if given.isdecimal() and int(given) else os.cpu_count() or 1


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads() - 1)
