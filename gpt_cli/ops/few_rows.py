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
from weakref import WeakKeyDictionary

import numpy as np

from gpt_cli.machine import free_memory
from gpt_cli.ops import Array, Linear

MOST_ROWS = 16
COLUMNS = 32
AVX512_KERNELS = ("SkylakeX", "Cooperlake", "SapphireRapids")  # of OpenBLAS
_SMALL = 1_000_000  # rows * n_in * columns: the largest product of those kernels
_OFTEN = 16  # products: cutting a matrix takes as long as this many save


class FewRows:
    """Multiplies matrices with few rows, and keeps the blocks of those that it often meets.

    All blocks together take a quarter at most of the memory that is free when the first is cut.
    """

    def __init__(self) -> None:
        self._met: WeakKeyDictionary[Linear, int] = WeakKeyDictionary()
        self._blocks: WeakKeyDictionary[Linear, Array] = WeakKeyDictionary()
        self._room: float | None = None  # bytes left for blocks; None before the first is cut

    def product(self, x: Array, w: Linear) -> Array:
        """x (B, n_in) @ weight -> (B, n_out), for a B from 2 to MOST_ROWS."""
        n_in, n_out = w.weight.shape
        in_blocks = len(x) * n_in * COLUMNS <= _SMALL < len(x) * n_in * n_out
        if in_blocks and _openblas() is not None and self._has_blocks(w):
            return _product_in_blocks(x, w.weight, self._blocks[w])
        product: Array = x @ w.weight
        return product

    def _has_blocks(self, w: Linear) -> bool:
        """Return whether the matrix is cut; cut it if it has been met often, and there is room."""
        if w in self._blocks:
            return True
        self._met[w] = self._met.get(w, 0) + 1
        if self._met[w] < _OFTEN:
            return False
        if self._room is None:
            self._room = (free_memory() or 0) / 4
        if w.weight.nbytes > self._room:
            return False
        self._room -= w.weight.nbytes
        self._blocks[w] = _cut(w.weight)
        return True


def _cut(weight: Array) -> Array:
    """(n_in, n_out) -> (n_out // COLUMNS, n_in, COLUMNS), without what is left over at the end."""
    n_in, n_out = weight.shape
    blocks = np.empty((n_out // COLUMNS, n_in, COLUMNS), np.float32)
    for number, block in enumerate(blocks):
        block[:] = weight[:, number * COLUMNS : (number + 1) * COLUMNS]
    return blocks


def _product_in_blocks(x: Array, weight: Array, blocks: Array) -> Array:
    parts = np.empty((len(blocks), len(x), COLUMNS), np.float32)
    n_threads = _threads()
    bounds = [len(blocks) * thread // n_threads for thread in range(n_threads + 1)]
    # OpenBLAS computes each of these small products in the thread that asks for it.
    others = [
        _pool().submit(np.matmul, x, blocks[start:end], parts[start:end])
        for start, end in itertools.pairwise(bounds[1:])
    ]
    np.matmul(x, blocks[: bounds[1]], parts[: bounds[1]])
    for other in others:
        other.result()
    y = np.empty((len(x), weight.shape[1]), np.float32)
    cut = len(blocks) * COLUMNS
    y[:, :cut].reshape(len(x), len(blocks), COLUMNS)[:] = parts.swapaxes(0, 1)
    y[:, cut:] = x @ weight[:, cut:]
    return y


@cache
def _openblas() -> ctypes.CDLL | None:
    """NumPy's OpenBLAS, if it has those kernels for this processor."""
    return _library() if openblas_kernel() in AVX512_KERNELS else None


@cache
def openblas_kernel() -> str | None:
    """Which processor's kernels NumPy's OpenBLAS uses; None where it has another library."""
    library = _library()
    if library is None:
        return None
    core = library.scipy_openblas_get_corename64_
    core.restype = ctypes.c_char_p
    return str(core().decode())


@cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(np._core._multiarray_umath.__file__)  # type: ignore[attr-defined]
        return library if library.scipy_openblas_get_corename64_ else None
    except (AttributeError, OSError):  # another library, or one of another name
        return None


@cache
def _threads() -> int:
    """How many threads OpenBLAS computes with."""
    library = _openblas()
    return 1 if library is None else int(library.scipy_openblas_get_num_threads64_())


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_threads() - 1)


if hasattr(os, "register_at_fork"):  # threads do not survive it
    os.register_at_fork(after_in_child=_pool.cache_clear)
