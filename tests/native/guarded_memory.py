"""A pytest plugin that lets the address sanitizer see both ends of all memory passed to C code.

The package reuses large buffers, and over-allocates to align arrays on cache lines. Both would hide
accesses beyond the end of an array.
"""

import ctypes
import math
import weakref

import numpy as np

from gpt_cli.folder import tensors
from gpt_cli.ops import memory, native_ops

_CACHE_LINE = 64  # bytes
_libc = ctypes.CDLL(None)  # resolves to the sanitizer's functions
_libc.free.argtypes = [ctypes.c_void_p]
_libc.posix_memalign.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]


def guarded_empty(shape, dtype, before=0):
    """Return an uninitialized array in memory of its size, `before` bytes after a cache line."""
    size, start = math.prod(shape) * dtype.itemsize, ctypes.c_void_p()
    if _libc.posix_memalign(ctypes.byref(start), _CACHE_LINE, before + size):
        raise MemoryError(f"{size} bytes")
    room = (ctypes.c_char * size).from_address(start.value + before)
    weakref.finalize(room, _libc.free, start.value).atexit = False
    return np.ndarray(shape, dtype, room)


class GuardedWorkspace(memory.Workspace):
    """A workspace that frees memory at once and aligns it to 16 bytes only."""

    def empty(self, shape, dtype, *, waste=1):
        """Return an uninitialized array."""
        return guarded_empty(shape, dtype, before=16)


class GuardedArena:
    """An arena that allocates arrays separately."""

    def zeros(self, shape, dtype):
        """Return an array of zeros."""
        array = guarded_empty(shape, dtype)
        array[...] = 0
        return array


assert hasattr(_libc, "__asan_init"), "the address sanitizer must be preloaded"
native_ops.Workspace = GuardedWorkspace
native_ops.Arena = GuardedArena
tensors.aligned_empty = guarded_empty
