"""Memory for arrays: an arena, a workspace, and addresses."""

import ctypes
import math
import mmap
import os
import sys
import threading
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

_CACHE_LINE = 64  # bytes
_PIECE = 4 << 20  # bytes, at least; pages that are not written take no memory
_LARGEST_PIECE = 256 << 20
_MIN_KEPT = 128 * 1024  # bytes; smaller arrays come from C's allocator without page faults
_MOST_FREE = 128 << 20  # bytes that are kept for later long-lived arrays

# Offset of the data pointer in an array object (`PyArrayObject_fields` in NumPy's headers).
_DATA_OFFSET = object.__basicsize__
_read_pointer = ctypes.c_void_p.from_address


def _address(array: NDArray[Any]) -> int:
    """Return the address of the first element in 0.14 us; `array.ctypes.data` takes 1.0 us."""
    return _read_pointer(id(array) + _DATA_OFFSET).value or 0


_probe = np.zeros(1)
# Other builds of Python may have another object layout.
_is_known = _address(_probe) == _probe.ctypes.data
address = _address if _is_known else lambda array: array.ctypes.data


# On Windows, memory without a name is private.
_PRIVATE: dict[str, int] = (
    {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
)


def _anonymous(size: int) -> mmap.mmap:
    """Map private memory of the system: a fork gets a copy."""
    try:
        memory = mmap.mmap(-1, size, **_PRIVATE)
    except OSError as error:
        raise MemoryError(f"{size} bytes: {error.strerror}") from error
    with suppress(AttributeError, OSError):  # only on Linux, and not with every kernel
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


_lock = threading.Lock()


def _renew_lock() -> None:
    """Replace the lock in the child of a fork: a thread of the parent may have held it."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


class Arena:
    """Memory for long-lived arrays, in few large pieces.

    The system can back these with huge pages (2 MB). With pages of 4 kB, page faults would take
    most of the time of loading a model.
    """

    def __init__(self) -> None:
        self._pieces: list[tuple[mmap.mmap, int]] = []  # with the bytes used

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an array of zeros that starts on a cache line, in the first piece that fits it."""
        size = math.prod(shape) * dtype.itemsize
        with _lock:
            fits = (n for n, (piece, used) in enumerate(self._pieces) if used + size <= len(piece))
            index = next(fits, len(self._pieces))
            if index == len(self._pieces):
                # Doubling up to a limit: few pieces, and little waste for a small model.
                total = sum(len(piece) for piece, _ in self._pieces)
                self._pieces.append((_anonymous(max(size, min(total, _LARGEST_PIECE), _PIECE)), 0))
            piece, used = self._pieces[index]
            self._pieces[index] = piece, -(-(used + size) // _CACHE_LINE) * _CACHE_LINE
        return np.ndarray(shape, dtype, piece, used)


class Workspace:
    """Memory for the results of operations, which is reused.

    Fresh memory costs a page fault per 4 kB: a fifth of the time of a pass over many tokens.
    The memory of an array returns to the workspace when the array is garbage collected.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []  # sorted by size
        # Weak references to arrays in use, with their memory, by the identity of the reference.
        self._used: dict[int, tuple[weakref.ref[Any], mmap.mmap]] = {}
        self._returned: list[weakref.ref[Any]] = []  # to arrays that were garbage collected

    def free_bytes(self) -> int:
        """Return the bytes that are kept and not in use."""
        with _lock:
            self._take_back()
            return sum(map(len, self._free))

    def empty(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], *, waste: float = math.inf
    ) -> NDArray[Any]:
        """Return an uninitialized array; a large one starts on a page.

        Its memory has up to `waste` times its size. An array that lives long should waste little.
        """
        size = math.prod(shape) * dtype.itemsize
        if size < _MIN_KEPT:
            return np.empty(shape, dtype)
        with _lock:
            self._take_back()
            fitting = (free for free in self._free if size <= len(free) <= waste * size)
            memory = next(fitting, None)
            kept = 0 if waste == math.inf else _MOST_FREE
            if memory is not None:
                self._free.remove(memory)
            elif sum(map(len, self._free)) > kept:
                del self._free[-1]  # the largest: the workspace must not grow without bound
        if memory is None:
            memory = _anonymous(size)
        # A view refers to this array and keeps it alive, because no other array owns the memory.
        array: NDArray[Any] = np.ndarray(shape, dtype, memory)
        # The callback is no Python code: there, an interrupt would be lost.
        reference = weakref.ref(array, self._returned.append)
        self._used[id(reference)] = reference, memory
        return array

    def _take_back(self) -> None:
        """Take back the memory of arrays that were garbage collected."""
        while self._returned:
            _, memory = self._used.pop(id(self._returned.pop()))
            self._free.append(memory)
            self._free.sort(key=len)
