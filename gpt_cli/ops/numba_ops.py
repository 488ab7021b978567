"""The operations on the CPU, compiled: what NumPy does in several passes is one, on all cores.

With weights in float32, or in int8: then what is multiplied with them is rounded to 16 bits, for
which processors have instructions, and sums over a block of weights are exact.

The loops are in `kernels`; here is what they work on. `numpy_ops` is the reference.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numba
import numpy as np

from gpt_cli.errors import ResourceError
from gpt_cli.machine import blas_threads, cores, free_memory
from gpt_cli.ops import Array, LayerNorm, Linear, Recorder, Rows
from gpt_cli.ops.int8 import BLOCK, Int8Rows, quantize
from gpt_cli.ops.memory import aligned_empty
from gpt_cli.ops.numpy_ops import ACTIVATIONS

# How often a thread of OpenMP that has nothing to do looks for work before it sleeps. By default it
# looks for milliseconds, and keeps others, among them the thread that it waits for, from a core.
# The library reads this when it is loaded; it is not for others.
_SPIN = "GOMP_SPINCOUNT"
_set_by_user = _SPIN in os.environ
os.environ.setdefault(_SPIN, "2000")


@contextmanager
def _as_import_error() -> Iterator[None]:
    """Turn an error of numba, which has no folder or no room for what it compiles, into one."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise ImportError(f"{error}; set NUMBA_CACHE_DIR to a writable folder") from error


try:
    with _as_import_error():
        from gpt_cli.ops import kernels
finally:
    if not _set_by_user:
        del os.environ[_SPIN]

# Rows lie this many floats further apart than they are long. Where they were a power of two apart,
# the processor's cache would have to keep all rows of a tile in the same few places.
_GAP = 16
_PIECE = 256 * 1024  # numbers that are read and packed at a time: 1 MB, which stays in a cache
_NO_BIAS = np.empty(0, np.float32)
_ALL = np.empty((0, 1, 1, 0), np.bool_)  # is visible
_PARTS = 4  # of an operation that is recorded, for each thread: one may be slower than another

# The process that has OpenMP's threads: they are not there in a fork of it, which must not wait for
# them.
_process: int | None = None


@dataclass(frozen=True, eq=False)
class Packed:
    """A matrix (n_in, n_out) in panels of columns that lie side by side: see `kernels.pack_...`."""

    panels: Array
    n_out: int


def _side_by_side(array: Array) -> Array:
    """Return the array, or a copy where the numbers of its rows do not lie side by side."""
    return array if array.strides[-1] == array.itemsize else np.ascontiguousarray(array)


def _as_compiled(cached: Array) -> Array:
    """Return keys or values as numba takes them, which does not know float16."""
    return cached.view(np.uint16) if cached.dtype == np.float16 else cached


def _claim_threads() -> None:
    """Note that this process has OpenMP's threads.

    Raises:
        ResourceError: it is a fork of one that has them.
    """
    global _process
    _process = _process or os.getpid()
    if _process != os.getpid():
        raise ResourceError(
            "compiled operations cannot be used in a fork of a process that has used them: start "
            "it by multiprocessing's 'spawn', or set GPT_CLI_OPS=numpy"
        )


class NumbaOps:
    """The operations of `gpt_cli.ops.Ops` on the CPU."""

    name = "numba"
    dtype = "float32"
    cache_dtype: type[np.floating[Any]] = np.float32
    xp: ModuleType = np
    _pack_rows, _pack_columns = staticmethod(kernels.pack_rows), staticmethod(kernels.pack_columns)
    _embed = staticmethod(kernels.embed)
    _linear = staticmethod(kernels.linear)

    def __init__(self) -> None:
        _claim_threads()
        with _as_import_error():
            kernels.prepare(
                self.cache_dtype,
                *(self._pack_rows, self._pack_columns, self._embed, self._linear),
                *(kernels.layer_norm, kernels.store, kernels.attend_one, kernels.attend_many),
                *(kernels.log_normalizer, kernels.repeat),
            )
        most: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
        self.threads = min(cores(), blas_threads(), most)

    def free_memory(self) -> int | None:
        """Bytes of this machine's memory that can be taken."""
        return free_memory()

    def place(self, array: Array) -> Array:
        """Return the array itself: it is where it belongs."""
        return array

    def place_matrix(self, rows: Rows, *, transposed: bool = False) -> Packed:
        """Cut a matrix (n_in, n_out) into panels, some rows at a time while they are in cache."""
        n_rows, length = rows.shape
        n_in, n_out = (length, n_rows) if transposed else (n_rows, length)
        panels = self._empty_panels(-(-n_out // kernels.COLUMNS), n_in)
        panels[-1] = 0  # its last columns may be none of the matrix
        step = max(1, _PIECE // length // self._rows_together) * self._rows_together
        for start in range(0, n_rows, step):
            self._pack(rows, slice(start, start + step), transposed, panels)
        return Packed(panels, n_out)

    _rows_together = 1  # that are packed

    def _empty_panels(self, count: int, n_in: int) -> Array:
        return aligned_empty((count, n_in, kernels.COLUMNS), np.dtype(np.float32))

    def _pack(self, rows: Rows, part: slice, transposed: bool, panels: Array) -> None:
        pack = self._pack_columns if transposed else self._pack_rows
        pack(np.ascontiguousarray(rows[part]), panels, part.start)

    def to_host(self, array: Array) -> Array:
        """Return the array itself."""
        return array

    def embed(self, wte: Packed, wpe: Array, ids: Array, positions: Array) -> Array:
        """Columns of wte and rows of wpe, added: (B, T, C). Every pass begins with it.

        Raises:
            IndexError: an id or a position is out of range.
            ResourceError: this is a fork of a process that has used compiled operations.
        """
        _claim_threads()
        numba.set_num_threads(self.threads)  # of this Python thread
        columns = ids.astype(np.int64).ravel()
        rows = np.broadcast_to(positions, ids.shape).astype(np.int64).ravel()
        x = np.empty((*ids.shape, wpe.shape[1]), np.float32)
        y = x.reshape(-1, x.shape[-1])
        if not self._embed(wte.panels, wpe, columns, rows, wte.n_out, y):
            raise IndexError(f"an id or a position is out of range: {wte.n_out}, {len(wpe)}")
        return x

    def layer_norm(self, x: Array, ln: LayerNorm) -> Array:
        """(x - mean) / sqrt(variance + epsilon) * weight + bias, over the last axis."""
        C = x.shape[-1]
        rows = np.ascontiguousarray(x).reshape(-1, C)
        y = np.empty((len(rows), C + _GAP), np.float32)
        kernels.layer_norm(rows, ln.weight, ln.bias, ln.epsilon, y)
        return y[:, :C].reshape(x.shape)

    def linear(self, x: Array, w: Linear, activation: str | None = None) -> Array:
        """activation(x @ weight + bias), each panel of the weight read once for all rows."""
        packed: Packed = w.weight
        rows = _side_by_side(x.reshape(-1, x.shape[-1]))
        y = np.empty((len(rows), len(packed.panels) * kernels.COLUMNS + _GAP), np.float32)
        gelu = activation == "gelu_new"
        self._linear(rows, packed.panels, w.bias if w.bias is not None else _NO_BIAS, gelu, y)
        y = y[:, : packed.n_out]
        if activation is not None and not gelu:
            y = ACTIVATIONS[activation](y)
        return y.reshape(*x.shape[:-1], packed.n_out)

    def store(self, x: Array, place: Array) -> None:
        """Copy keys or values to their place, rounded to its type."""
        kernels.store(_side_by_side(x), _as_compiled(place))

    def attend(
        self, q: Array, keys: Array, values: Array, scale: float, visible: Array | None
    ) -> Array:
        """softmax(scale * q keysT) values, with nothing taken from keys that are not visible."""
        B, H, T, D = q.shape
        y = np.empty((B, T, H * D + _GAP), np.float32)
        visible = _ALL if visible is None else np.ascontiguousarray(visible)
        attend = kernels.attend_one if T == 1 else kernels.attend_many
        if keys.dtype != self.cache_dtype:  # there is no cache: they are as they were computed
            kept = np.empty((2, *keys.shape), self.cache_dtype)
            for x, place in zip((keys, values), kept, strict=True):
                self.store(x, place)
            keys, values = kept
        q, keys, values = map(_side_by_side, (q, keys, values))
        attend(q, _as_compiled(keys), _as_compiled(values), scale, visible, y)
        return y[:, :, : H * D].reshape(B, T, H, D).swapaxes(1, 2)

    def add(self, x: Array, y: Array) -> Array:
        """x + y."""
        return x + y

    def recorder(self, past: int, activation: str) -> Recorder | None:
        """A recorder, if the activation is compiled, too."""
        return StepRecorder(self, past) if activation == "gelu_new" else None

    def log_normalizer(self, logits: Array) -> Array:
        """The logarithm of the sum of exp(logits), over the last axis, in float64."""
        normalizer = np.empty(len(logits))
        kernels.log_normalizer(_side_by_side(logits), normalizer)
        return normalizer


class Int8NumbaOps(NumbaOps):
    """The same with weights in int8, of which a quarter of the bytes is read."""

    dtype = "int8"
    cache_dtype = np.float16
    _pack_rows = staticmethod(kernels.pack_int8_rows)
    _pack_columns = staticmethod(kernels.pack_int8_columns)
    _embed = staticmethod(kernels.embed_int8)
    _linear = staticmethod(kernels.linear_int8)
    _rows_together = BLOCK

    def _empty_panels(self, count: int, n_in: int) -> Array:
        return aligned_empty((count, -(-n_in // BLOCK), kernels.BLOCK_BYTES), np.dtype(np.uint8))

    def _pack(self, rows: Rows, part: slice, transposed: bool, panels: Array) -> None:
        if isinstance(rows, Int8Rows):
            weight, scale = rows.parts(part)
        else:
            weight, scale = quantize(rows[part], transposed=transposed).parts(slice(None))
        pack = self._pack_columns if transposed else self._pack_rows
        pack(np.ascontiguousarray(weight), np.ascontiguousarray(scale), panels, part.start)


class StepRecorder(NumbaOps):
    """A decode step as a list of what to do: recorded once, then done in one call for each token.

    A token is a hundred operations. For each, Python and waking the threads take as long as a small
    matrix takes to be read. So the model is run once with these operations, which compute nothing,
    but note what to compute and where. `kernels.repeat` does it then. What a step is stands in
    model.py and nowhere else. It is recorded for one new token of one text after a cache.

    The arrays that they return stay where they are; what is in them changes with each `step`.
    """

    def __init__(self, ops: NumbaOps, past: int):
        self._ops = ops
        self.dtype, self.cache_dtype, self.threads = ops.dtype, ops.cache_dtype, ops.threads
        self._past = past  # tokens, when it is recorded
        self._rows: list[list[int]] = []
        self._numbers: list[float] = []
        self._board = np.empty(kernels.BOARD, np.int64)
        self._nothing_kept = _as_compiled(np.empty(0, self.cache_dtype))
        self._kept: list[Array] = []  # the arrays whose addresses the rows have

    def finish(self, result: Array) -> None:
        """Take what the model has returned: the recording is at its end."""
        self._result = result
        self._program = np.zeros((len(self._rows), max(map(len, self._rows))), np.int64)
        for row, recorded in zip(self._program, self._rows, strict=True):
            row[: len(recorded)] = recorded
        self._epsilons_and_scales = np.array(self._numbers, np.float32)

    def step(self, ids: Array, past: int) -> Array:
        """Compute for a token ids (1, 1) after `past` others what was recorded; return the result.

        It is the same array each time.

        Raises:
            IndexError: the id is none of the model's, or the cache is full.
        """
        if past >= self._capacity:
            raise IndexError(f"the cache has room for {self._capacity} tokens")
        self._x[:] = self._ops.embed(self._wte, self._wpe, ids, np.array([[past]]))
        program = self._program, self._epsilons_and_scales
        kernels.repeat(*program, past, self._nothing_kept, self._board, self.threads)
        return self._result

    def embed(self, wte: Packed, wpe: Array, ids: Array, positions: Array) -> Array:
        """Note the tables: a step begins with them."""
        self._wte, self._wpe = wte, wpe
        self._x = np.empty((1, 1, wpe.shape[1]), np.float32)
        return self._x

    def layer_norm(self, x: Array, ln: LayerNorm) -> Array:
        """Record it."""
        y = np.empty_like(x)
        self._note(kernels.LAYER_NORM, x, y, x.size, ln.weight, ln.bias, number=ln.epsilon)
        return y

    def linear(self, x: Array, w: Linear, activation: str | None = None) -> Array:
        """Record it."""
        panels = w.weight.panels
        y = np.empty((1, 1, len(panels) * kernels.COLUMNS), np.float32)
        bias = _NO_BIAS if w.bias is None else w.bias
        given = x, y, x.size, panels, bias, len(panels), len(bias), activation == "gelu_new"
        if panels.dtype == np.float32:
            self._note(kernels.LINEAR, *given, parts=len(panels))
        else:
            blocks = panels.shape[1]
            digits = np.zeros((blocks, 2, BLOCK), np.int8)
            rounded = digits, np.empty(blocks, np.int32), np.empty(1, np.float32)
            self._note(kernels.LINEAR_INT8, *given, *rounded, parts=len(panels))
        return y[..., : w.weight.n_out]

    def add(self, x: Array, y: Array) -> Array:
        """Record it."""
        total = np.empty_like(x)
        self._note(kernels.ADD, x, total, x.size, y)
        return total

    def store(self, x: Array, place: Array) -> None:
        """Record it, of a place that moves on with each token."""
        _, H, _, D = x.shape
        self._kept.append(place)
        self._capacity = _capacity(place)
        first = place.ctypes.data - self._past * place.strides[2]
        self._note(kernels.STORE, x, first, D, H, self._capacity)

    def attend(
        self, q: Array, keys: Array, values: Array, scale: float, visible: Array | None
    ) -> Array:
        """Record it, of keys and values that become more with each token."""
        _, H, _, D = q.shape
        y = np.empty((1, H, 1, D), np.float32)
        sizes = H, _capacity(keys)
        self._note(kernels.ATTEND, q, y, D, keys, values, *sizes, number=scale, parts=H)
        return y

    def _note(self, what: int, *arguments: Array | int, number: float = 0, parts: int = 0) -> None:
        """Add a row to the program, with the addresses of arrays; threads share its parts."""
        self._kept += (x for x in arguments if isinstance(x, np.ndarray))
        places = (x.ctypes.data if isinstance(x, np.ndarray) else int(x) for x in arguments)
        self._rows.append([what, min(parts, _PARTS * self.threads), *places])
        self._numbers.append(number)


def _capacity(cached: Array) -> int:
    """Return for how many tokens the cache has room that these keys or values are a view of."""
    return int(cached.strides[1] // cached.strides[2])
