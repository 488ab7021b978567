"""The operations on the CPU, by the C library in `native/`: layouts, checks and calls.

This module checks everything that the C code relies on: shapes, types, strides. The result for a
row depends only on that row, so its bits are the same in any batch, with any number of threads, and
at any level of the processor.
"""

import math
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from gpt_cli.errors import CheckpointError
from gpt_cli.folder.tensors import DTYPES, Tensor
from gpt_cli.ops import SHORT, Array, LayerNorm, Linear, Rows, TwinOps
from gpt_cli.ops.bindings import (
    ACTIVATIONS,
    COLUMNS,
    DIGITS_BYTES,
    FLOAT32,
    FORMATS,
    INT8_BLOCK_BYTES,
    MAX_TILE_ROWS,
    Layers,
    Packed,
    check,
    choose_level,
    library,
    readable,
    vector_of,
)
from gpt_cli.ops.int8 import BLOCK, Int8Rows, quantize
from gpt_cli.ops.memory import Arena, Workspace, address
from gpt_cli.system.machine import MOST_THREADS, free_memory, threads

# Floats between rows. Rows a power of two apart would compete for few sets of the cache.
_ROW_PADDING = 16
_PIECE = 256 * 1024  # numbers read and packed at a time: 1 MB, which stays in the cache

_FLOAT16, _BYTE, _INT64 = np.dtype("f2"), np.dtype("u1"), np.dtype("i8")
_FLOAT64 = np.dtype("f8")
_EMPTY = np.empty(0, _BYTE)

LARGEST_TOP_K = 1024  # in C, whose sort is slower than NumPy's

# Results of packing other than 0 and an errno.
_FILE_ENDED, _INVALID_INT8 = -1, -2


def _check_int8(error: int, name: str) -> None:
    if error == _INVALID_INT8:
        raise CheckpointError(
            f"{name}: int8 weights must be from -127 to 127, with scales that bfloat16 can hold: "
            "make the folder again with `gpt-cli quantize`"
        )


class NativeOps:
    """The operations of `gpt_cli.ops.Ops` on the CPU."""

    name = "native"
    dtype = "float32"
    cache_block = COLUMNS
    xp: ModuleType = np
    batch_invariant = True
    draft: Callable[..., Array | None] | None = None
    to_host = staticmethod(np.asarray)
    _panel_type: np.dtype[Any] = FLOAT32
    _cache_type: np.dtype[Any] = FLOAT32

    def __init__(self) -> None:
        self._lib = library()
        self.level = choose_level()
        self._half = self._cache_type == _FLOAT16
        self.threads = min(threads(), MOST_THREADS)
        self._weights = Arena()
        self._workspace = Workspace()
        self._layers_of: WeakKeyDictionary[Any, Layers] = WeakKeyDictionary()  # by the first layer

    def free_memory(self) -> int | None:
        free = free_memory()
        return None if free is None else free + self._workspace.free_bytes()

    def twin_ops(self) -> TwinOps | None:
        from gpt_cli.ops.twin_ops import TwinNativeOps  # which derives from this class

        return TwinNativeOps(self.threads)

    # --- weights ---------------------------------------------------------------------------------

    def place_matrix(self, rows: Rows, *, transposed: bool = False) -> Packed:
        """Pack a matrix (n_in, n_out) into panels.

        If the stored type is the type in memory, C reads the file, without Python's lock.
        Otherwise, convert and pack some rows at a time, while they are in the cache.
        """
        n_rows, length = rows.shape
        n_in, n_out = (length, n_rows) if transposed else (n_rows, length)
        if not n_in or not n_out:
            raise ValueError("a matrix must have rows and columns")
        panels = self._empty_panels(-(-n_out // COLUMNS), n_in)
        result = n_in, n_out, FORMATS.index(self.dtype), transposed, address(panels)
        stored, scales = self._stored(rows)
        if isinstance(stored, Tensor) and DTYPES.get(stored.dtype) == self.dtype:
            with stored.opened() as (file, offset):
                place = file.fileno(), offset, address(scales)
                error = self._lib.gpt2_pack_file(*place, *result)
                if error > 0:
                    raise OSError(error, os.strerror(error), file.name)
                if error == _FILE_ENDED:
                    raise EOFError
                _check_int8(error, file.name)
        elif self.dtype in SHORT:
            raise ValueError(f"the matrix is not stored in {self.dtype}")
        else:
            step = max(1, _PIECE // length // BLOCK) * BLOCK
            for start in range(0, n_rows, step):
                part = slice(start, start + step)
                some, scales = self._converted(rows, part, transposed)
                given = address(some), address(scales), start, len(some)
                _check_int8(self._lib.gpt2_pack(*given, *result), "a matrix")
        return Packed(panels, n_in, n_out, self.dtype)

    def _empty_panels(self, count: int, n_in: int) -> Array:
        return self._weights.zeros((count, n_in, COLUMNS), self._panel_type)

    def _stored(self, rows: Rows) -> tuple[Rows, Array]:
        """Return the rows that may be stored in a file, and the scales of their blocks."""
        return rows, _EMPTY

    def _converted(self, rows: Rows, part: slice, transposed: bool) -> tuple[Array, Array]:
        """Return a range of rows in the type in memory, and the scales of their blocks."""
        return np.ascontiguousarray(rows[part], FLOAT32), _EMPTY

    # --- operations ------------------------------------------------------------------------------

    def embed(self, wte: Packed, wpe: Array, ids: Array, positions: Array) -> Array:
        ids = contiguous(ids, _INT64)
        if positions.shape != ids.shape:
            positions = np.broadcast_to(positions, ids.shape)
        positions = contiguous(positions, _INT64)
        wpe = contiguous(wpe, FLOAT32)
        check(wpe.ndim == 2 and wpe.shape[1] == wte.n_in, "wpe", wpe)
        x = self._workspace.empty((*ids.shape, wte.n_in), FLOAT32)
        tables = wte.struct, address(wpe), address(ids), address(positions), len(wpe)
        if self._lib.gpt2_embed(*tables, ids.size, address(x), self.threads):
            raise IndexError(f"an id or a position is out of range: {wte.n_out}, {len(wpe)}")
        return x

    def layer_norm(self, x: Array, ln: LayerNorm) -> Array:
        C = x.shape[-1]
        rows = _rows_of(x, C)
        weight, bias = vector_of(ln.weight, C), vector_of(ln.bias, C)
        y = self._empty_rows(len(rows), C)
        norm = address(weight), address(bias), ln.epsilon
        given = address(rows), len(rows), rows.strides[0] // 4, C, *norm
        self._lib.gpt2_layer_norm(*given, address(y), y.strides[0] // 4, self.threads)
        return y.reshape(x.shape)

    def linear(self, x: Array, w: Linear, activation: str | None = None) -> Array:
        packed: Packed = w.weight
        check(packed.format == self.dtype, "the weight", packed.panels)
        rows = _rows_of(x, packed.n_in)
        bias = None if w.bias is None else vector_of(w.bias, packed.n_out)
        y = self._empty_rows(len(rows), packed.width)
        start = 0 if bias is None else address(bias)
        given = packed.struct, start, address(rows), len(rows), rows.strides[0] // 4
        result = ACTIVATIONS.index(activation), address(y), y.strides[0] // 4
        scratch = self._scratch(len(rows), packed.n_in)
        self._lib.gpt2_linear(*given, *result, address(scratch), self.threads)
        return y[:, : packed.n_out].reshape(*x.shape[:-1], packed.n_out)

    def _scratch(self, rows: int, n_in: int) -> Array:
        return _EMPTY

    def new_cache(
        self, layers: int, batch: int, heads: int, capacity: int, size: int
    ) -> tuple[Array, Array]:
        """Return arrays for keys and values, in panels: see `struct store` in native/kernels.h.

        Shapes: (layers, B, H, blocks, D, COLUMNS) and (layers, B, H, blocks, COLUMNS, width), where
        `width` is D padded to whole panels.
        """
        shape = layers, batch, heads, -(-capacity // COLUMNS)
        width = -(-size // COLUMNS) * COLUMNS
        given: dict[str, Any] = {"dtype": self._cache_type, "waste": 2}
        keys = self._workspace.empty((*shape, size, COLUMNS), **given)
        return keys, self._workspace.empty((*shape, COLUMNS, width), **given)

    def store(
        self, k: Array, v: Array, keys: Array, values: Array, past: Array, lengths: Array
    ) -> None:
        B, H, T, D = k.shape
        k, v = readable(k), readable(v)
        if k.strides != v.strides:
            k, v = np.ascontiguousarray(k), np.ascontiguousarray(v)
        blocks = self._check_cache(keys, values, B, H, D)
        past, lengths = _counts_of(past, (B,)), _counts_of(lengths, (B,))
        check(v.shape == k.shape, "v", v)
        given = address(k), address(v), *(stride // 4 for stride in k.strides[:3])
        cache = address(keys), address(values), address(past), address(lengths)
        if self._lib.gpt2_store(*given, *cache, B, H, T, D, blocks, self._half, self.threads):
            raise IndexError(f"the cache has room for {blocks * COLUMNS} tokens")

    def copyto(self, to: Array, blocks: Array) -> None:
        np.copyto(to, blocks)

    def attend(self, q: Array, keys: Array, values: Array, scale: float, visible: Array) -> Array:
        B, H, T, D = q.shape
        q, threads = readable(q), self.threads
        blocks = self._check_cache(keys, values, B, H, D)
        visible = _counts_of(visible, (B, T))
        y = self._empty_rows(B * T, H * D)
        stride = blocks * COLUMNS + _ROW_PADDING
        scratch = self._workspace.empty((threads, min(T, MAX_TILE_ROWS), stride), FLOAT32)
        given = address(q), *(step // 4 for step in q.strides[:3])
        cache = address(keys), address(values), address(visible), scale
        result = address(y), y.strides[0] // 4, address(scratch), stride, threads
        if self._lib.gpt2_attend(*given, *cache, B, H, T, D, blocks, self._half, *result):
            raise IndexError(f"visible must be from 1 to {blocks * COLUMNS} keys")
        return y.reshape(B, T, H, D).swapaxes(1, 2)

    def _check_cache(self, keys: Array, values: Array, B: int, H: int, D: int) -> int:
        """Check the keys and values of one layer of a cache; return its number of blocks."""
        blocks = keys.shape[2]
        width = -(-D // COLUMNS) * COLUMNS
        for array, shape in ((keys, (D, COLUMNS)), (values, (COLUMNS, width))):
            right = array.shape == (B, H, blocks, *shape) and array.dtype == self._cache_type
            check(right and array.flags.c_contiguous, "a layer of the cache", array)
        return blocks

    def _described(self, h: tuple[Any, ...]) -> Layers:
        """Return the layers of a model as C structs, which are kept for the next pass."""
        described = self._layers_of.get(h[0])
        if described is None or not described.matches(h):
            described = self._layers_of[h[0]] = Layers(h)
        return described

    def layers(self, x: Array, h: tuple[Any, ...], visible: Array, cache: Any) -> Array:
        described = self._described(h)
        B, T, C = x.shape
        rows = _rows_of(x, described.width)
        H = h[0].attn.n_head
        keys, values = cache.keys, cache.values
        blocks = self._check_cache(keys[0], values[0], B, H, C // H)
        check(len(keys) == len(values) and len(keys) in (1, len(h)), "keys", keys)
        steps = (keys.strides[0], values.strides[0]) if len(keys) > 1 else (0, 0)
        visible = _counts_of(visible, (B, T))
        past, new = _counts_of(cache.lengths, (B,)), _counts_of(cache.new, (B,))
        threads = self.threads
        sizes = B * T, T, blocks, threads
        size = self._lib.gpt2_layers_scratch(described.struct, *sizes)
        scratch = self._workspace.empty((size + 16,), FLOAT32)
        y = self._empty_rows(B * T, C)
        given = described.struct, len(h), address(rows), rows.strides[0] // 4
        counts = address(visible), address(past), address(new)
        rooms = address(keys), address(values), *steps, B, T, blocks, self._half
        result = address(y), y.strides[0] // 4, -(-address(scratch) // 64) * 64, threads
        if self._lib.gpt2_layers(*given, *counts, *rooms, *result):
            raise IndexError(f"too many tokens for a cache of {blocks * COLUMNS}, or a pass of {T}")
        return y.reshape(x.shape)

    def exp(self, x: Array) -> Array:
        # To within one ulp; 0 below -87.
        x = np.ascontiguousarray(x, FLOAT32)
        y = np.empty(x.shape, FLOAT32)
        self._lib.gpt2_exp(address(x), x.size, address(y), self.threads)
        return y

    def log_normalizer(self, logits: Array) -> Array:
        rows = _rows_of(logits, logits.shape[-1])
        normalizer = np.empty(len(rows))
        given = address(rows), len(rows), rows.strides[0] // 4, rows.shape[1]
        self._lib.gpt2_log_sum_exp(*given, address(normalizer), self.threads)
        return normalizer

    def cumulative_counts(self, logits: Array) -> Array:
        rows = _rows_of(logits, logits.shape[-1])
        sums = self._workspace.empty(rows.shape, _INT64)
        given = address(rows), len(rows), rows.strides[0] // 4, rows.shape[1]
        self._lib.gpt2_cumulate(*given, address(sums), self.threads)
        return sums

    def choose(
        self,
        logits: Array,
        uniforms: Array,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
    ) -> Array | None:
        n = logits.shape[-1]
        if not 0 < top_k <= min(n, LARGEST_TOP_K):
            return None
        rows = _rows_of(logits, n)
        draws = contiguous(uniforms, _FLOAT64)
        check(draws.shape == (len(rows),), "uniforms", draws)
        ids = np.empty(len(rows), _INT64)
        scratch = self._workspace.empty((self.threads, 4 * n), FLOAT32)
        log_min_p = math.log(min_p) if min_p > 0 else -math.inf
        given = address(rows), len(rows), rows.strides[0] // 4, n, address(draws)
        filters = temperature, top_k, top_p, log_min_p
        self._lib.gpt2_choose(*given, *filters, address(scratch), address(ids), self.threads)
        return ids

    def _empty_rows(self, count: int, width: int) -> Array:
        """Return an uninitialized array (count, width), with padding between rows."""
        if count == 1:
            return np.empty((1, width), FLOAT32)
        return self._workspace.empty((count, width + _ROW_PADDING), FLOAT32)[:, :width]


class Int8NativeOps(NativeOps):
    """The operations with int8 weights, a quarter of the bytes to read: see `ops.int8`."""

    dtype = "int8"
    _cache_type: np.dtype[Any] = _FLOAT16

    def twin_ops(self) -> None:
        return None

    def _empty_panels(self, count: int, n_in: int) -> Array:
        return self._weights.zeros((count, -(-n_in // BLOCK), INT8_BLOCK_BYTES), _BYTE)

    def _stored(self, rows: Rows) -> tuple[Rows, Array]:
        if not isinstance(rows, Int8Rows):
            return rows, _EMPTY
        scale = rows.scale[:]
        blocks = list(rows.shape)
        blocks[rows.transposed] = -(-blocks[rows.transposed] // BLOCK)
        check(list(scale.shape) == blocks, "the scales", scale)
        return rows.weight, contiguous(scale, FLOAT32)

    def _converted(self, rows: Rows, part: slice, transposed: bool) -> tuple[Array, Array]:
        if isinstance(rows, Int8Rows):
            weight, scale = rows.parts(part)
        else:
            weight, scale = quantize(rows[part], transposed=transposed).parts(slice(None))
        return np.ascontiguousarray(weight, np.int8), contiguous(scale, FLOAT32)

    def _scratch(self, rows: int, n_in: int) -> Array:
        return self._workspace.empty((rows * (-(-n_in // BLOCK) * DIGITS_BYTES + 4),), _BYTE)


class BFloat16NativeOps(NativeOps):
    """The operations with matrices that are stored and kept in bfloat16: widening is exact."""

    dtype = "bfloat16"
    _panel_type = np.dtype("u2")


class Float16NativeOps(BFloat16NativeOps):
    """The operations with matrices that are stored and kept in float16."""

    dtype = "float16"


def _rows_of(x: Array, width: int) -> Array:
    """Return x (..., width) as float32 rows (n, width), each contiguous."""
    check(x.shape[-1] == width, "x", x)
    return readable(x.reshape(-1, width))


def _counts_of(x: Array, shape: tuple[int, ...]) -> Array:
    """Return integers of this shape as contiguous int64."""
    check(x.shape == shape, "counts", x)
    return contiguous(x, _INT64)


def contiguous(x: Array, dtype: np.dtype[Any]) -> Array:
    """Return x, or a copy, in this type, aligned and C-contiguous."""
    right = x.dtype == dtype and x.flags.c_contiguous and x.flags.aligned
    return x if right else x.astype(dtype, "C")
