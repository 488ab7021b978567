"""The operations on the CPU by the library in `native/`: layouts and calls, nothing clever.

Everything that the C code relies on is checked here: shapes, types, strides. Its results depend on
a row's own numbers and on nothing else, so they are the same to the last bit in any batch, on any
number of threads, at any level of the processor.
"""

import ctypes
import os
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from gpt_cli.errors import InputError
from gpt_cli.machine import free_memory, threads
from gpt_cli.ops import Array, LayerNorm, Linear, Rows, native_library
from gpt_cli.ops.int8 import BLOCK, Int8Rows, quantize
from gpt_cli.ops.memory import Workspace, address, aligned_empty

LEVELS = ("avx512vnni", "avx512", "avxvnni", "avx2", "neondot", "neon")
_LEVEL = "GPT_CLI_LEVEL"  # the variable that takes a lower level than the processor has

# As in native/kernels.h.
COLUMNS = 32
_MOST_ROWS = 12
_FORMATS = ("float32", "bfloat16", "float16", "int8")
_ACTIVATIONS = (None, "gelu_new", "gelu", "relu", "silu", "tanh")
_BLOCK_BYTES = BLOCK * COLUMNS + 2 * COLUMNS  # of struct int8_block
_DIGITS_BYTES = 3 * 64  # of struct digits

# Rows lie this many floats further apart than they are long. Where they were a power of two apart,
# the processor's cache would have to keep all rows of a tile in the same few places.
_GAP = 16
_PIECE = 256 * 1024  # numbers that are read and packed at a time: 1 MB, which stays in a cache

_F32, _F16, _I64, _U8 = (np.dtype(kind) for kind in ("f4", "f2", "i8", "u1"))
_P, _N, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "has_level": (_I, [ctypes.c_char_p]),
    "use_level": (None, [ctypes.c_char_p]),
    "embed": (_I, [_P, _P, _P, _P, _N, _N, _P, _I]),
    "layer_norm": (None, [_P, _N, _N, _N, _P, _P, _F, _P, _N, _I]),
    "linear": (None, [_P, _P, _P, _N, _N, _I, _P, _N, _P, _I]),
    "add": (None, [_P, _N, _P, _N, _N, _N, _P, _N, _I]),
    "store": (_I, [_P, _P, _N, _N, _N, _P, _P, _P, _P, _N, _N, _N, _N, _I, _I]),
    "attend": (_I, [_P, *[_N] * 3, _P, _P, _P, _F, *[_N] * 5, _I, _P, _N, _P, _N, _I]),
    "block": (_I, [_P, _P, _N, *[_P] * 5, _N, _N, _N, _I, _P, _N, _P, _I]),
    "block_scratch": (_N, [_P, _N, _N, _N, _I]),
    "log_sum_exp": (None, [_P, _N, _N, _N, _P, _I]),
    "exp": (None, [_P, _N, _P, _I]),
    "pack_rows": (None, [_P, *[_N] * 5, _P]),
    "pack_columns": (None, [_P, *[_N] * 4, _P]),
    "pack_int8_rows": (None, [_P, _P, *[_N] * 4, _P]),
    "pack_int8_columns": (None, [_P, _P, *[_N] * 3, _P]),
}


class _Matrix(ctypes.Structure):
    """`struct matrix` of native/kernels.h."""

    _fields_ = (("panels", _P), ("n_in", _N), ("n_out", _N), ("format", ctypes.c_int32))


class _Norm(ctypes.Structure):
    """`struct norm` of native/native.h."""

    _fields_ = (("weight", _P), ("bias", _P), ("epsilon", _F))


class _Block(ctypes.Structure):
    """`struct block` of native/native.h, with what keeps its addresses valid."""

    _fields_ = (
        *((name, _Norm) for name in ("ln_1", "ln_2")),
        *((name, _Matrix) for name in ("c_attn", "c_proj", "c_fc", "mlp_c_proj")),
        *((f"{name}_bias", _P) for name in ("c_attn", "c_proj", "c_fc", "mlp_c_proj")),
        ("n_head", _N),
        ("scale", _F),
        ("activation", ctypes.c_int32),
    )

    def __init__(self, b: Any):
        """Describe a `model.Block`."""
        linears = [b.attn.c_attn, b.attn.c_proj, b.mlp.c_fc, b.mlp.c_proj]
        C, inner = linears[0].weight.n_in, linears[2].weight.n_out
        shapes = [(each.weight.n_in, each.weight.n_out) for each in linears]
        right = shapes == [(C, 3 * C), (C, C), (C, inner), (inner, C)] and C % b.attn.n_head == 0
        _check(right, "a block", linears[0].weight.panels)
        norms = [[_vector(norm.weight, C), _vector(norm.bias, C)] for norm in (b.ln_1, b.ln_2)]
        biases = [_vector(each.bias, each.weight.n_out) for each in linears]
        self._kept = linears, norms, biases
        super().__init__(
            _Norm(*map(address, norms[0]), b.ln_1.epsilon),
            _Norm(*map(address, norms[1]), b.ln_2.epsilon),
            *(each.weight.matrix for each in linears),
            *map(address, biases),
            b.attn.n_head,
            b.attn.scale,
            _ACTIVATIONS.index(b.mlp.activation),
        )


@dataclass(frozen=True, eq=False)
class Packed:
    """A matrix (n_in, n_out) in panels of columns that lie side by side: see native/kernels.h."""

    panels: Array
    n_in: int
    n_out: int
    format: str
    width: int = field(init=False)  # n_out in whole panels
    matrix: _Matrix = field(init=False, repr=False)  # the same for C
    struct: int = field(init=False)  # and its address

    def __post_init__(self) -> None:
        kind = _FORMATS.index(self.format)
        matrix = _Matrix(address(self.panels), self.n_in, self.n_out, kind)
        object.__setattr__(self, "matrix", matrix)
        object.__setattr__(self, "struct", ctypes.addressof(matrix))
        object.__setattr__(self, "width", -(-self.n_out // COLUMNS) * COLUMNS)


@cache
def library() -> ctypes.CDLL:
    """Load the library.

    Raises:
        ImportError: it is not there, or cannot be loaded.
    """
    path = native_library()
    if path is None:
        raise ImportError("the library was not compiled when gpt-cli was installed")
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(str(error)) from error
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, f"gpt2_{name}")
        function.restype, function.argtypes = result, arguments
    return lib


def levels() -> list[str]:
    """Return the levels that this processor has, the highest first."""
    return [level for level in LEVELS if library().gpt2_has_level(level.encode())]


def use_level(level: str) -> None:
    """Compute with one of `levels` from now on. The bits stay the same."""
    library().gpt2_use_level(level.encode())


def choose_level() -> str:
    """Use the level that GPT_CLI_LEVEL names, or the highest that there is; return its name.

    Raises:
        ImportError: the library cannot be used.
        InputError: the variable names no level, or one that this processor does not have.
    """
    available = levels()
    if not available:
        raise ImportError("this processor has no fused multiply-add (AVX2 and FMA)")
    wanted = os.environ.get(_LEVEL) or available[0]
    if wanted in available:
        use_level(wanted)
        return wanted
    if wanted in LEVELS:
        raise InputError(f"{_LEVEL}={wanted}: this processor has {', '.join(available)}")
    raise InputError(f"{_LEVEL} must be one of {', '.join(LEVELS)}, not {wanted!r:.40}")


class NativeOps:
    """The operations of `gpt_cli.ops.Ops` on the CPU."""

    name = "native"
    dtype = "float32"
    cache_block = COLUMNS
    xp: ModuleType = np
    _cache_type = _F32

    def __init__(self) -> None:
        self._lib = library()
        self.level = choose_level()
        self.threads = threads()
        self._workspace = Workspace()
        self._blocks: WeakKeyDictionary[Any, _Block] = WeakKeyDictionary()  # of models in use

    def free_memory(self) -> int | None:
        """Bytes of this machine's memory that can be taken; None if unknown."""
        free = free_memory()
        return None if free is None else free + self._workspace.free_bytes()

    def place(self, array: Array) -> Array:
        """Return the array itself: it is where it belongs."""
        return array

    def to_host(self, array: Array) -> Array:
        """Return the array itself."""
        return array

    # --- weights ---------------------------------------------------------------------------------

    def place_matrix(self, rows: Rows, *, transposed: bool = False) -> Packed:
        """Cut a matrix (n_in, n_out) into panels, some rows at a time while they are in cache."""
        n_rows, length = rows.shape
        n_in, n_out = (length, n_rows) if transposed else (n_rows, length)
        panels = self._empty_panels(-(-n_out // COLUMNS), n_in)
        if n_out % COLUMNS or self.dtype == "int8":
            panels[-1] = 0  # its last columns may be none of the matrix
        step = max(1, _PIECE // length // BLOCK) * BLOCK
        for start in range(0, n_rows, step):
            self._pack(rows, slice(start, start + step), transposed, (n_in, n_out), panels)
        return Packed(panels, n_in, n_out, self.dtype)

    def _empty_panels(self, count: int, n_in: int) -> Array:
        return aligned_empty((count, n_in, COLUMNS), _F32)

    def _pack(
        self, rows: Rows, part: slice, transposed: bool, shape: tuple[int, int], panels: Array
    ) -> None:
        array = np.ascontiguousarray(self._read(rows, part), panels.dtype)
        given = address(array), part.start, len(array)
        if transposed:
            self._lib.gpt2_pack_columns(*given, shape[0], panels.itemsize, address(panels))
        else:
            self._lib.gpt2_pack_rows(*given, *shape, panels.itemsize, address(panels))

    def _read(self, rows: Rows, part: slice) -> Array:
        return rows[part]

    # --- operations ------------------------------------------------------------------------------

    def embed(self, wte: Packed, wpe: Array, ids: Array, positions: Array) -> Array:
        """Columns of wte and rows of wpe, added: (B, T, C).

        Raises:
            IndexError: an id or a position is out of range.
        """
        ids = np.ascontiguousarray(ids, _I64)
        positions = np.ascontiguousarray(np.broadcast_to(positions, ids.shape), _I64)
        wpe = np.ascontiguousarray(wpe, _F32)
        _check(wpe.ndim == 2 and wpe.shape[1] == wte.n_in, "wpe", wpe)
        x = self._workspace.empty((*ids.shape, wte.n_in), _F32)
        tables = wte.struct, address(wpe), address(ids), address(positions), len(wpe)
        if self._lib.gpt2_embed(*tables, ids.size, address(x), self.threads):
            raise IndexError(f"an id or a position is out of range: {wte.n_out}, {len(wpe)}")
        return x

    def layer_norm(self, x: Array, ln: LayerNorm) -> Array:
        """(x - mean) / sqrt(variance + epsilon) * weight + bias, over the last axis."""
        C = x.shape[-1]
        rows = _rows(x, C)
        weight, bias = _vector(ln.weight, C), _vector(ln.bias, C)
        y = self._empty_rows(len(rows), C)
        norm = address(weight), address(bias), ln.epsilon
        given = address(rows), len(rows), rows.strides[0] // 4, C, *norm
        self._lib.gpt2_layer_norm(*given, address(y), y.strides[0] // 4, self.threads)
        return y.reshape(x.shape)

    def linear(self, x: Array, w: Linear, activation: str | None = None) -> Array:
        """activation(x @ weight + bias), each panel of the weight read once for all rows."""
        packed: Packed = w.weight
        rows = _rows(x, packed.n_in)
        bias = None if w.bias is None else _vector(w.bias, packed.n_out)
        y = self._empty_rows(len(rows), packed.width)
        start = 0 if bias is None else address(bias)
        given = packed.struct, start, address(rows), len(rows), rows.strides[0] // 4
        result = _ACTIVATIONS.index(activation), address(y), y.strides[0] // 4
        scratch = self._scratch(len(rows), packed.n_in)
        self._lib.gpt2_linear(*given, *result, address(scratch), self.threads)
        return y[:, : packed.n_out].reshape(*x.shape[:-1], packed.n_out)

    def _scratch(self, rows: int, n_in: int) -> Array:
        return _NOTHING

    def add(self, x: Array, y: Array) -> Array:
        """x + y."""
        _check(x.shape == y.shape, "y", y)
        C = x.shape[-1]
        one, other = _rows(x, C), _rows(y, C)
        total = self._empty_rows(len(one), C)
        given = address(one), one.strides[0] // 4, address(other), other.strides[0] // 4
        result = address(total), total.strides[0] // 4
        self._lib.gpt2_add(*given, len(one), C, *result, self.threads)
        return total.reshape(x.shape)

    def new_cache(
        self, layers: int, batch: int, heads: int, capacity: int, size: int
    ) -> tuple[Array, Array]:
        """Return room for keys and for values, as panels: see `struct store` in native/kernels.h.

        Shapes: (layers, B, H, blocks, D, COLUMNS), and (layers, B, H, blocks, COLUMNS, width) with
        D filled up to whole panels.
        """
        shape = layers, batch, heads, -(-capacity // COLUMNS)
        width = -(-size // COLUMNS) * COLUMNS
        keys = self._workspace.empty((*shape, size, COLUMNS), self._cache_type)
        values = self._workspace.empty((*shape, COLUMNS, width), self._cache_type)
        return keys, values

    def store(
        self, k: Array, v: Array, keys: Array, values: Array, past: Array, lengths: Array
    ) -> None:
        """Copy new keys and values (B, H, T, D) behind those that a cache has.

        Raises:
            IndexError: there is no room for them.
        """
        B, H, T, D = k.shape
        k, v = _heads(k), _heads(v)
        if k.strides != v.strides:
            k, v = np.ascontiguousarray(k), np.ascontiguousarray(v)
        blocks = self._check_cache(keys, values, B, H, D)
        past, lengths = _counts(past, (B,)), _counts(lengths, (B,))
        _check(v.shape == k.shape and (B == 0 or lengths.max() <= T), "lengths", lengths)
        given = address(k), address(v), *(stride // 4 for stride in k.strides[:3])
        cache = address(keys), address(values), address(past), address(lengths)
        if self._lib.gpt2_store(*given, *cache, B, H, D, blocks, self._half, self.threads):
            raise IndexError(f"the cache has room for {blocks * COLUMNS} tokens")

    def attend(self, q: Array, keys: Array, values: Array, scale: float, visible: Array) -> Array:
        """softmax(scale * q keysT) values, over the first `visible` keys (B, T) of each query.

        Raises:
            IndexError: a query sees no key, or more than there are.
        """
        B, H, T, D = q.shape
        q = _heads(q)
        blocks = self._check_cache(keys, values, B, H, D)
        visible = _counts(visible, (B, T))
        y = self._empty_rows(B * T, H * D)
        stride = blocks * COLUMNS + _GAP
        scratch = self._workspace.empty((self.threads, min(T, _MOST_ROWS), stride), _F32)
        given = address(q), *(step // 4 for step in q.strides[:3])
        cache = address(keys), address(values), address(visible), scale
        result = address(y), y.strides[0] // 4, address(scratch), stride, self.threads
        if self._lib.gpt2_attend(*given, *cache, B, H, T, D, blocks, self._half, *result):
            raise IndexError(f"visible must be from 1 to {blocks * COLUMNS} keys")
        return y.reshape(B, T, H, D).swapaxes(1, 2)

    _half = 0

    def _check_cache(self, keys: Array, values: Array, B: int, H: int, D: int) -> int:
        """Check the keys and values of one layer of a cache; return how many blocks it has."""
        blocks = keys.shape[2]
        width = -(-D // COLUMNS) * COLUMNS
        _check(keys.shape == (B, H, blocks, D, COLUMNS), "keys", keys)
        _check(values.shape == (B, H, blocks, COLUMNS, width), "values", values)
        for array in (keys, values):
            right = array.dtype == self._cache_type and array.flags.c_contiguous
            _check(right, "a layer of the cache", array)
        return blocks

    def block(self, x: Array, b: Any, visible: Array, cache: Any, layer: int) -> Array:
        """`model.block` in one call: the same steps, and the same bits."""
        described = self._blocks.get(b)
        if described is None:
            described = self._blocks[b] = _Block(b)
        B, T, C = x.shape
        H = b.attn.n_head
        rows = _rows(x, described.c_attn.n_in)
        keys, values = cache.layer(layer)
        blocks = self._check_cache(keys, values, B, H, C // H)
        visible = _counts(visible, (B, T))
        past, new = _counts(cache.lengths, (B,)), _counts(cache.new, (B,))
        _check(new.max(initial=0) <= T, "the number of new tokens", new)
        struct = ctypes.addressof(described)
        size = self._lib.gpt2_block_scratch(struct, B * T, T, blocks, self.threads)
        scratch = self._workspace.empty((size + 16,), _F32)
        y = self._empty_rows(B * T, C)
        counts = address(visible), address(past), address(new)
        given = struct, address(rows), rows.strides[0] // 4, *counts, address(keys), address(values)
        result = address(y), y.strides[0] // 4, -(-address(scratch) // 64) * 64, self.threads
        if self._lib.gpt2_block(*given, B, T, blocks, self._half, *result):
            raise IndexError(f"the cache has room for {blocks * COLUMNS} tokens")
        return y.reshape(x.shape)

    def exp(self, x: Array) -> Array:
        """E to the power of each number, to within two units in the last place; 0 below -87."""
        x = np.ascontiguousarray(x, _F32)
        y = np.empty(x.shape, _F32)
        self._lib.gpt2_exp(address(x), x.size, address(y), self.threads)
        return y

    def log_normalizer(self, logits: Array) -> Array:
        """The logarithm of the sum of exp(logits), over the last axis, in float64."""
        rows = _rows(logits, logits.shape[-1])
        normalizer = np.empty(len(rows))
        given = address(rows), len(rows), rows.strides[0] // 4, rows.shape[1]
        self._lib.gpt2_log_sum_exp(*given, address(normalizer), self.threads)
        return normalizer

    def _empty_rows(self, count: int, width: int) -> Array:
        """Return an uninitialized array (count, width), with a gap between rows."""
        if count == 1:
            return np.empty((1, width), _F32)
        return self._workspace.empty((count, width + _GAP), _F32)[:, :width]


class Int8NativeOps(NativeOps):
    """The same with weights in int8, of which a quarter of the bytes is read; see `ops.int8`."""

    dtype = "int8"
    _cache_type = _F16
    _half = 1

    def _empty_panels(self, count: int, n_in: int) -> Array:
        panels = aligned_empty((count, -(-n_in // BLOCK), _BLOCK_BYTES), _U8)
        panels[:, -1] = 0  # the last block may be shorter
        return panels

    def _pack(
        self, rows: Rows, part: slice, transposed: bool, shape: tuple[int, int], panels: Array
    ) -> None:
        if isinstance(rows, Int8Rows):
            weight, scale = rows.parts(part)
        else:
            weight, scale = quantize(rows[part], transposed=transposed).parts(slice(None))
        weight = np.ascontiguousarray(weight, np.int8)
        scale = np.ascontiguousarray(scale, _F32)
        given = address(weight), address(scale), part.start, len(weight)
        if transposed:
            self._lib.gpt2_pack_int8_columns(*given, shape[0], address(panels))
        else:
            self._lib.gpt2_pack_int8_rows(*given, *shape, address(panels))

    def _scratch(self, rows: int, n_in: int) -> Array:
        return self._workspace.empty((rows * (-(-n_in // BLOCK) * _DIGITS_BYTES + 4),), _U8)


class BFloat16NativeOps(NativeOps):
    """The same with matrices that are stored in bfloat16 and stay so: widening them is exact."""

    dtype = "bfloat16"

    def _empty_panels(self, count: int, n_in: int) -> Array:
        return aligned_empty((count, n_in, COLUMNS), np.dtype("u2"))

    def _read(self, rows: Rows, part: slice) -> Array:
        return rows.stored(part)


class Float16NativeOps(BFloat16NativeOps):
    """The same with matrices that are stored in float16."""

    dtype = "float16"

    def _read(self, rows: Rows, part: slice) -> Array:
        return rows.stored(part).view("u2")


_NOTHING = np.empty(0, _U8)


def _check(right: bool, name: str, array: Array) -> None:
    """Raise ValueError if an array is not what the C code takes."""
    if not right:
        raise ValueError(f"{name} cannot be {array.dtype} {array.shape} here")


def _readable(x: Array) -> Array:
    """Return x as C reads it: aligned float32, with the numbers of the last axis side by side."""
    return x if x.dtype == _F32 and x.strides[-1] == 4 and x.flags.aligned else x.astype(_F32, "C")


def _rows(x: Array, width: int) -> Array:
    """Return x (..., width) as float32 rows of which the numbers lie side by side."""
    _check(x.shape[-1] == width, "x", x)
    return _readable(x.reshape(-1, width))


def _heads(x: Array) -> Array:
    """Return x (B, H, T, D) as float32, with the numbers of a head side by side."""
    return _readable(x)


def _vector(x: Array, n: int) -> Array:
    """Return a vector of n float32 numbers that lie side by side."""
    _check(x.shape == (n,), "a vector", x)
    return _readable(x)


def _counts(x: Array, shape: tuple[int, ...]) -> Array:
    """Return whole numbers of this shape as C takes them."""
    _check(x.shape == shape, "counts", x)
    return x if x.dtype == _I64 and x.flags.c_contiguous else np.ascontiguousarray(x, _I64)
