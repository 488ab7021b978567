"""The operations on an NVIDIA GPU, with CuPy: products by cuBLAS, the rest by `kernels.cu`.

Weights, activations, keys and values are float32 or float16. Sums, layer norms, softmax, logits and
the residual stream are always float32. Products of float32 do not use TF32.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from types import ModuleType
from typing import Any

import cupy
import cupyx
import numpy as np
from cupy.cuda import runtime
from cupy_backends.cuda.libs import cublas

from gpt_cli.folder.config import ACTIVATIONS
from gpt_cli.ops import Array, LayerNorm, Linear, Ops, Rows

_PIECE = 4 * 1024 * 1024  # numbers that are read, rounded and copied at a time
_THREADS = 256  # per CUDA block
_SHARED = 48 * 1024 - 256  # bytes of dynamic shared memory of a CUDA block; the sums take the rest
_ACTIVATIONS = (None, *ACTIVATIONS)  # in the order of kernels.cu
_TYPES = {"float32": runtime.CUDA_R_32F, "float16": runtime.CUDA_R_16F}  # for cuBLAS
_ONE, _ZERO = np.ones(1, np.float32), np.zeros(1, np.float32)


@dataclass(frozen=True, eq=False)
class Placed:
    """A matrix (n_in, n_out) on the device, row-major as it was stored.

    A `transposed` matrix is (n_out, n_in), padded with rows of zeros. Its rows are the vocabulary,
    and its products are logits, for which float16 would be too coarse.
    """

    array: Array
    transposed: bool
    n_out: int

    def is_finite(self) -> bool:
        return bool(cupy.isfinite(self.array).all())


class CuPyOps(Ops):
    """The operations on a GPU, in float32 or float16, which halves the bytes to read."""

    name = "cupy"
    threads = 1
    xp: ModuleType = cupy

    def __init__(self, dtype: str = "float32"):
        self.dtype, self.cache_type = dtype, np.dtype(dtype)
        try:
            options = ("-DHALF",) if dtype == "float16" else ()
            source = files(__package__).joinpath("kernels.cu").read_text(encoding="utf-8")
            module = cupy.RawModule(code=source, options=("--std=c++17", *options))
            self._kernels = {name: module.get_function(name) for name in _KERNELS}
            cupy.cuda.device.get_cublas_handle()
        except Exception as error:  # CuPy raises many types for missing libraries
            raise ImportError(f"{type(error).__name__}: {error}") from error

    def free_memory(self) -> int:
        return int(runtime.memGetInfo()[0] + cupy.get_default_memory_pool().free_bytes())

    def to_host(self, array: Array) -> Array:
        return cupy.asnumpy(array)

    def place_matrix(self, rows: Rows, *, transposed: bool = False) -> Placed:
        n_rows, length = rows.shape
        # cuBLAS is fastest if the rows of its result start at multiples of 16 bytes.
        array = cupy.zeros((-(-n_rows // 8) * 8 if transposed else n_rows, length), self.dtype)
        step = max(1, _PIECE // length)  # rows that are copied at a time
        pinned = cupyx.empty_pinned((min(step, n_rows), length), self.dtype)
        for start in range(0, n_rows, step):
            part = rows[start : start + step]
            with np.errstate(over="ignore"):  # infinities in float16 are detected in the results
                pinned[: len(part)] = part
            array[start : start + len(part)].set(pinned[: len(part)])
            cupy.cuda.get_current_stream().synchronize()  # before `pinned` is overwritten or freed
        return Placed(array, transposed, n_rows if transposed else length)

    def embed(self, wte: Placed, wpe: Array, ids: Array, positions: Array) -> Array:
        ids = cupy.ascontiguousarray(ids, np.int64)
        positions = _on_device(np.broadcast_to(positions, ids.shape))
        C = wpe.shape[1]
        x = cupy.empty((*ids.shape, C), np.float32)
        self._run("embed", ids.size, wte.array, wpe, ids, positions, wte.n_out, len(wpe), C, x)
        return x

    def layer_norm(self, x: Array, ln: LayerNorm) -> Array:
        x = cupy.ascontiguousarray(x, np.float32)
        y = cupy.empty(x.shape, self.dtype)
        C = x.shape[-1]
        self._run("layer_norm", x.size // C, x, ln.weight, ln.bias, ln.epsilon, C, y)
        return y

    def linear(self, x: Array, w: Linear, activation: str | None = None) -> Array:
        placed: Placed = w.weight
        n_in = x.shape[-1]
        rows = cupy.ascontiguousarray(x.reshape(-1, n_in), self.dtype)
        width = placed.array.shape[0 if placed.transposed else 1]
        logits = placed.transposed and w.bias is None and activation is None
        y = cupy.empty((len(rows), width), np.float32 if logits else self.dtype)
        self._multiply(rows, placed.array, placed.transposed, y)
        if w.bias is not None or activation is not None:
            bias = w.bias
            if bias is None or len(bias) < width:
                bias = cupy.zeros(width, np.float32)
                bias[: placed.n_out] = 0 if w.bias is None else w.bias
            self._finish(y, bias, activation)
        return y[:, : placed.n_out].reshape(*x.shape[:-1], placed.n_out)

    def activate(self, x: Array, activation: str) -> Array:
        y = cupy.array(x, self.dtype, order="C")
        self._finish(y, cupy.zeros(y.shape[-1], np.float32), activation)
        return y

    def store(
        self, k: Array, v: Array, keys: Array, values: Array, past: Array, lengths: Array
    ) -> None:
        B, H, T, D = k.shape
        k, v = self._readable(k, v)
        new = k, v, *_strides(k)[:3], _on_device(past), _on_device(lengths)
        self._run("store", B * T, *new, H, T, D, _capacity(keys, values), keys, values)

    def attend(self, q: Array, keys: Array, values: Array, scale: float, visible: Array) -> Array:
        B, H, T, D = q.shape
        capacity, seen = _capacity(keys, values), _on_device(visible)
        S = int(visible.max())
        y = cupy.empty((B, H, T, D), self.dtype)
        shared = 4 * (S + max(_THREADS, D))
        if T == 1 and shared <= _SHARED:
            (q,) = self._readable(q)
            arguments = q, *_strides(q)[:2], keys, values, capacity, seen, scale, H, D, y
            self._run("attend_one", B * H, *arguments, shared=shared)
            return y
        q = cupy.ascontiguousarray(q, self.dtype)
        scores = cupy.empty((B, H, T, S), np.float32)
        weights = cupy.empty((B, H, T, S), self.dtype)
        self._multiply(q, keys[:, :, :S], True, scores)
        self._run("softmax", B * H * T, scores, seen, scale, H, T, S, weights)
        self._multiply(weights, values[:, :, :S], False, y)
        return y

    def log_normalizer(self, logits: Array) -> Array:
        peaks = logits.max(axis=-1, keepdims=True)
        sums = cupy.exp(logits - peaks).sum(axis=-1, dtype=np.float64)
        return peaks[:, 0] + cupy.log(sums)

    def _finish(self, y: Array, bias: Array, activation: str | None) -> None:
        """Add a bias (width,) to y (..., width), then apply an activation, in y."""
        grid = min(-(-y.size // _THREADS), 65_535)
        self._run("finish", grid, y, bias, _ACTIVATIONS.index(activation), len(bias), y.size)

    def _readable(self, *arrays: Array) -> tuple[Array, ...]:
        """Return arrays (B, H, T, D) with equal strides and a contiguous last axis.

        In the model they have these already, as views of one array, and are not copied.
        """
        if all(
            x.dtype == self.dtype and x.strides == arrays[0].strides and _strides(x)[-1] == 1
            for x in arrays
        ):
            return arrays
        return tuple(cupy.ascontiguousarray(x, self.dtype) for x in arrays)

    def _multiply(self, x: Any, w: Any, transposed: bool, y: Any) -> None:
        """Compute y = x @ w, or x @ wT, of matrices, or of a batch (B, H) of matrices.

        cuBLAS is column-major and sees all three transposed, so it computes yT = wT xT.
        """
        n_in, n_out = x.shape[-1], y.shape[-1]
        count, (x_step, w_step, y_step) = 1, (0, 0, 0)
        if x.ndim == 4:
            count = x.shape[0] * x.shape[1]
            x_step, w_step, y_step = (_strides(array)[1] for array in (x, w, y))
        cublas.gemmStridedBatchedEx(
            cupy.cuda.device.get_cublas_handle(),
            cublas.CUBLAS_OP_T if transposed else cublas.CUBLAS_OP_N,
            cublas.CUBLAS_OP_N,
            *(n_out, x.shape[-2], n_in, _ONE.ctypes.data),
            *(w.data.ptr, _TYPES[w.dtype.name], w.shape[-1], w_step),
            *(x.data.ptr, _TYPES[x.dtype.name], n_in, x_step),
            *(_ZERO.ctypes.data, y.data.ptr, _TYPES[y.dtype.name], y.shape[-1], y_step),
            *(count, cublas.CUBLAS_COMPUTE_32F, cublas.CUBLAS_GEMM_DEFAULT),
        )

    def _run(self, name: str, grid: int, *values: Any, shared: int = 0) -> None:
        arguments = tuple(kind(x) for kind, x in zip(_KERNELS[name], values, strict=True))
        self._kernels[name]((grid,), (_THREADS,), arguments, shared_mem=shared)


# The parameters of the kernels: arrays, or numbers with the types that the kernels expect.
_P, _I, _L, _F = (lambda array: array), np.int32, np.int64, np.float32
_KERNELS: dict[str, tuple[Callable[..., Any], ...]] = {
    "embed": (_P, _P, _P, _P, _L, _L, _I, _P),
    "layer_norm": (_P, _P, _P, _F, _I, _P),
    "finish": (_P, _P, _I, _I, _L),
    "store": (_P, _P, _L, _L, _L, _P, _P, _I, _I, _I, _L, _P, _P),
    "softmax": (_P, _P, _F, _I, _I, _I, _P),
    "attend_one": (_P, _L, _L, _P, _P, _L, _P, _F, _I, _I, _P),
}


def _strides(x: Array) -> tuple[int, ...]:
    """Return the strides of an array in elements."""
    return tuple(stride // x.itemsize for stride in x.strides)


def _capacity(keys: Array, values: Array) -> int:
    """Return the capacity in tokens of one layer of a cache (B, H, capacity, D)."""
    if not (keys.flags.c_contiguous and values.flags.c_contiguous):
        raise ValueError("a layer of the cache must be contiguous")
    return keys.shape[2]


def _on_device(counts: Array) -> Array:
    """Copy integers from the host to the device, once for all layers of a pass."""
    return _copied(counts.shape, np.asarray(counts, np.int64).tobytes())


@lru_cache(maxsize=8)
def _copied(shape: tuple[int, ...], numbers: bytes) -> Array:
    return cupy.asarray(np.frombuffer(numbers, np.int64).reshape(shape))
