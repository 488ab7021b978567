"""Where arrays lie: aligned, reused from pass to pass, and at which address."""

import ctypes
import math
import mmap
import os
import threading
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

_CACHE_LINE = 64  # bytes
_PIECE, _LARGEST_PIECE = 4 << 20, 256 << 20  # bytes; what is not written takes no memory
_KEPT = 128 * 1024  # bytes; memory for less comes from C's allocator without page faults

# Where an array object has the address of its data (`PyArrayObject_fields` in NumPy's headers).
_HEAD = object.__basicsize__
_read_pointer = ctypes.c_void_p.from_address


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an uninitialized array that starts on a cache line, as vector instructions like it."""
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + _CACHE_LINE, np.uint8)
    start = -buffer.ctypes.data % _CACHE_LINE
    return buffer[start : start + size].view(dtype).reshape(shape)


def _address(array: NDArray[Any]) -> int:
    """Return the address of the first number: 0.14 us, and 1.0 us by `array.ctypes.data`."""
    return _read_pointer(id(array) + _HEAD).value or 0


def _address_by_ctypes(array: NDArray[Any]) -> int:
    return array.ctypes.data


_probe = np.zeros(1)
# Other builds of Python may have another head.
address = _address if _address(_probe) == _probe.ctypes.data else _address_by_ctypes


def _anonymous(size: int) -> mmap.mmap:
    """Take memory from the system, of this process alone: a fork has a copy."""
    try:
        if not hasattr(mmap, "MAP_PRIVATE"):  # Windows, which has no forks
            return mmap.mmap(-1, size)
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes: {error.strerror}") from error
    with suppress(AttributeError, OSError):  # only Linux has it, and not every kernel
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


_with_locks: "weakref.WeakSet[Arena | Workspace]" = weakref.WeakSet()


def _renew_locks() -> None:
    """Open in the child of a fork what another thread of the parent may have held."""
    for each in _with_locks:
        each._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)


class Arena:
    """Memory for arrays that stay, side by side in few large pieces.

    The system can use pages of 2 MB for them. In pages of 4 kB, taking the memory would be most of
    the time of loading a model.
    """

    def __init__(self) -> None:
        self._pieces: list[tuple[mmap.mmap, int]] = []  # with how many bytes are used
        self._lock = threading.RLock()
        _with_locks.add(self)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an array of zeros that starts on a cache line, in the first piece with room."""
        size = math.prod(shape) * dtype.itemsize
        with self._lock:
            for place, (piece, used) in enumerate(self._pieces):  # noqa: B007
                if used + size <= len(piece):
                    break
            else:
                # As large as all before, up to a limit: so the pieces are few, and fit the model.
                taken = sum(len(piece) for piece, _ in self._pieces)
                piece = _anonymous(max(size, min(taken, _LARGEST_PIECE), _PIECE))
                place, used = len(self._pieces), 0
                self._pieces.append((piece, used))
            self._pieces[place] = piece, -(-(used + size) // _CACHE_LINE) * _CACHE_LINE
        return np.ndarray(shape, dtype, piece, used)


class Workspace:
    """Memory for the results of operations, taken from the system once and used again.

    Fresh memory costs a page fault for each 4 kB; in a pass over many tokens that is a fifth of
    the time. An array that is no longer used gives its memory back by itself.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []  # by size
        self._lock = threading.RLock()  # a garbage collection may give back while this is held
        _with_locks.add(self)

    def free_bytes(self) -> int:
        """Bytes that are kept and not in use."""
        return sum(map(len, self._free))

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an uninitialized array; a large one begins a page."""
        size = math.prod(shape) * dtype.itemsize
        if size < _KEPT:
            return np.empty(shape, dtype)
        with self._lock:
            fits = next((place for place, free in enumerate(self._free) if len(free) >= size), -1)
            # Of memory that does not fit, the largest gives way to the new one.
            memory = self._free.pop(fits) if self._free else None
        if memory is None or len(memory) < size:
            memory = _anonymous(size)
        # All views of this array keep it alive, as its memory is that of no other array.
        array: NDArray[Any] = np.ndarray(shape, dtype, memory)
        weakref.finalize(array, self._give_back, memory).atexit = False
        return array

    def _give_back(self, memory: mmap.mmap) -> None:
        with self._lock:
            self._free.append(memory)
            self._free.sort(key=len)
