"""ctypes bindings of the compiled library: its functions, structs and processor levels."""

import ctypes
import os
import weakref
from functools import cache
from typing import Any

import numpy as np

from gpt_cli.errors import InputError
from gpt_cli.ops import Array
from gpt_cli.ops.int8 import BLOCK
from gpt_cli.ops.memory import address
from gpt_cli.system.machine import native_library

LEVELS = ("avx512vnni", "avx512", "avxvnni", "avx2", "neondot", "neon")
_VARIABLE = "GPT_CLI_LEVEL"  # environment variable that selects a level

# These must match native/kernels.h.
COLUMNS = 32
MAX_TILE_ROWS = 12
INT8_BLOCK_BYTES = BLOCK * COLUMNS + 2 * COLUMNS  # size of struct int8_block
DIGITS_BYTES = 3 * 64  # size of struct digits
FORMATS = ("float32", "bfloat16", "float16", "int8")
ACTIVATIONS = (None, "gelu_new", "gelu", "relu", "silu", "tanh")

FLOAT32 = np.dtype("f4")
_P, _N, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "has_level": (_I, [ctypes.c_char_p]),
    "use_level": (None, [ctypes.c_char_p]),
    "embed": (_I, [_P, _P, _P, _P, _N, _N, _P, _I]),
    "layer_norm": (None, [_P, _N, _N, _N, _P, _P, _F, _P, _N, _I]),
    "linear": (None, [_P, _P, _P, _N, _N, _I, _P, _N, _P, _I]),
    "store": (_I, [_P, _P, _N, _N, _N, _P, _P, _P, _P, *[_N] * 5, _I, _I]),
    "narrow": (None, [_P, _N, _N, _N, _P, _I]),
    "attend": (_I, [_P, *[_N] * 3, _P, _P, _P, _F, *[_N] * 5, _I, _P, _N, _P, _N, _I]),
    "layers": (_I, [_P, _N, _P, _N, *[_P] * 5, *[_N] * 5, _I, _P, _N, _P, _I]),
    "draft": (_I, [_P]),
    "layers_scratch": (_N, [_P, _N, _N, _N, _I]),
    "log_sum_exp": (None, [_P, _N, _N, _N, _P, _I]),
    "exp": (None, [_P, _N, _P, _I]),
    "choose": (None, [_P, _N, _N, _N, _P, _F, _N, ctypes.c_double, _F, _P, _P, _I]),
    "cumulate": (None, [_P, _N, _N, _N, _P, _I]),
    "quantize": (None, [_P, _P, _I]),
    "pack": (_I, [_P, _P, *[_N] * 4, _I, _I, _P]),
    "pack_file": (_I, [_I, _N, _P, _N, _N, _I, _I, _P]),
}


class _Matrix(ctypes.Structure):
    """`struct matrix` of native/kernels.h."""

    _fields_ = (("panels", _P), ("n_in", _N), ("n_out", _N), ("format", ctypes.c_int32))


class Norm(ctypes.Structure):
    """`struct norm` of native/native.h."""

    _fields_ = (("weight", _P), ("bias", _P), ("epsilon", _F))


class _Block(ctypes.Structure):
    """`struct block` of native/native.h."""

    _fields_ = (
        *((name, Norm) for name in ("ln_1", "ln_2")),
        *((name, _Matrix) for name in ("c_attn", "c_proj", "c_fc", "mlp_c_proj")),
        *((f"{name}_bias", _P) for name in ("c_attn", "c_proj", "c_fc", "mlp_c_proj")),
        ("n_head", _N),
        ("scale", _F),
        ("activation", ctypes.c_int32),
    )


class Draft(ctypes.Structure):
    """`struct draft` of native/native.h."""

    _fields_ = (
        *((name, _P) for name in ("blocks", "wte", "lm_head", "wpe", "lm_head_bias")),
        ("ln_f", Norm),
        *((name, _N) for name in ("n_layer", "n_positions")),
        *((name, _P) for name in ("keys", "values")),
        *((name, _N) for name in ("keys_stride", "values_stride", "cache_blocks")),
        ("half", ctypes.c_int32),
        ("banned", _P),
        ("banned_count", _N),
        *((name, _F) for name in ("temperature", "log_min_p")),
        ("top_k", _N),
        ("top_p", ctypes.c_double),
        *((name, _P) for name in ("uniforms", "positions", "visible", "new", "ids")),
        *((name, _N) for name in ("B", "count")),
        *((name, _P) for name in ("x", "normed", "logits", "layers", "choice", "digits")),
        *((name, ctypes.c_int32) for name in ("threads",)),
    )


# The version of the functions and the sizes that both sides must agree on: `gpt2_layout` in C.
_SIZES = ctypes.sizeof(_Matrix), ctypes.sizeof(_Block), ctypes.sizeof(Draft)
_LAYOUT = (5, COLUMNS, MAX_TILE_ROWS, BLOCK, INT8_BLOCK_BYTES, DIGITS_BYTES, *_SIZES)


class Layers:
    """The layers of a model (`model.Block`s) as C structs, with the arrays that they point to."""

    def __init__(self, h: tuple[Any, ...]):
        self.width: int = h[0].attn.c_attn.weight.n_in  # C
        self._blocks = [weakref.ref(b) for b in h]
        self._kept: list[object] = []
        check(len({self._shape(b) for b in h}) == 1, "a layer", h[0].ln_1.weight)
        self._structs = (_Block * len(h))(*map(self._describe, h))
        self.struct = ctypes.addressof(self._structs)  # of an array of `struct block`

    def matches(self, h: tuple[Any, ...]) -> bool:
        """Return whether this was made from these layers."""
        return self._blocks == [weakref.ref(b) for b in h]

    def _shape(self, b: Any) -> object:
        """Check the shapes of a layer; return the properties that all layers must share."""
        matrices = [each.weight for each in _linears(b)]
        C, inner = self.width, matrices[2].n_out
        shapes = [(each.n_in, each.n_out) for each in matrices]
        right = shapes == [(C, 3 * C), (C, C), (C, inner), (inner, C)] and C % b.attn.n_head == 0
        alike = len({each.format for each in matrices}) == 1
        check(right and alike, "a layer", matrices[0].panels)
        return inner, b.attn.n_head, matrices[0].format

    def _describe(self, b: Any) -> _Block:
        linears = _linears(b)
        norms = [
            (vector_of(ln.weight, self.width), vector_of(ln.bias, self.width), ln.epsilon)
            for ln in (b.ln_1, b.ln_2)
        ]
        biases = [vector_of(each.bias, each.weight.n_out) for each in linears]
        self._kept += [norms, biases, [each.weight for each in linears]]
        return _Block(
            *(Norm(address(weight), address(bias), epsilon) for weight, bias, epsilon in norms),
            *(each.weight.matrix for each in linears),
            *map(address, biases),
            b.attn.n_head,
            b.attn.scale,
            ACTIVATIONS.index(b.mlp.activation),
        )


def _linears(b: Any) -> list[Any]:
    return [b.attn.c_attn, b.attn.c_proj, b.mlp.c_fc, b.mlp.c_proj]


class Packed:
    """A matrix (n_in, n_out) in panels of COLUMNS columns: see native/kernels.h."""

    def __init__(self, panels: Array, n_in: int, n_out: int, format: str):
        self.panels, self.n_in, self.n_out, self.format = panels, n_in, n_out, format
        self.width = -(-n_out // COLUMNS) * COLUMNS  # padded to whole panels
        self.matrix = _Matrix(address(panels), n_in, n_out, FORMATS.index(format))
        self.struct = ctypes.addressof(self.matrix)

    def is_finite(self) -> bool:
        """Return whether all weights are finite, by the exponents of weights or scales."""
        if self.format == "float32":
            return bool(np.isfinite(self.panels).all())
        scales = self.panels[..., -2 * COLUMNS :] if self.format == "int8" else self.panels
        exponent = np.uint16(0x7C00 if self.format == "float16" else 0x7F80)
        bits = scales.view(np.uint16)
        return not ((bits & exponent) == exponent).any()


@cache
def library() -> ctypes.CDLL:
    """Load the library.

    Raises:
        ImportError: it is missing, cannot be loaded, or is another version.
    """
    path = native_library()
    if path is None:
        raise ImportError("the library was not compiled when gpt-cli was installed")
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(str(error)) from error
    try:
        layout = tuple((_N * len(_LAYOUT)).in_dll(lib, "gpt2_layout"))
    except ValueError:
        layout = ()
    if layout != _LAYOUT:
        raise ImportError(f"{path} belongs to another version: reinstall gpt2-cli")
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, f"gpt2_{name}")
        function.restype, function.argtypes = result, arguments
    return lib


def levels() -> list[str]:
    """Return the levels that this processor supports, the highest first."""
    return [level for level in LEVELS if library().gpt2_has_level(level.encode())]


def use_level(level: str) -> None:
    """Select one of `levels` for all later calls. Results keep their bits."""
    library().gpt2_use_level(level.encode())


def choose_level() -> str:
    """Select the level that GPT_CLI_LEVEL names, or the highest supported one; return its name.

    Raises:
        ImportError: the library cannot be used on this processor.
        InputError: the variable names an unknown or unsupported level.
    """
    available = levels()
    if not available:
        raise ImportError("this processor has no fused multiply-add (AVX2 and FMA)")
    wanted = os.environ.get(_VARIABLE) or available[0]
    if wanted in available:
        use_level(wanted)
        return wanted
    if wanted in LEVELS:
        raise InputError(f"{_VARIABLE}={wanted}: this processor has {', '.join(available)}")
    raise InputError(f"{_VARIABLE} must be one of {', '.join(LEVELS)}, not {wanted!r:.40}")


def check(right: bool, name: str, array: Array) -> None:
    """Raise ValueError if an array does not have the type and shape that the C code takes."""
    if not right:
        raise ValueError(f"{name} cannot be {array.dtype} {array.shape} here")


def readable(x: Array) -> Array:
    """Return x, or a copy, as aligned float32 with a contiguous last axis."""
    right = x.dtype == FLOAT32 and x.strides[-1] == 4 and x.flags.aligned
    return x if right else x.astype(FLOAT32, "C")


def vector_of(x: Array, n: int) -> Array:
    """Return a vector (n,) as contiguous float32."""
    check(x.shape == (n,), "a vector", x)
    return readable(x)
