"""ctypes bindings of the compiled library: its structs, operations and processor levels."""

import ctypes
import os
import weakref
from contextlib import suppress
from ctypes import c_double, c_float, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any

import numpy as np

from gpt_cli.errors import InputError
from gpt_cli.folder.dtypes import GROUP
from gpt_cli.ops.contract import Array, Block, LayerNorm
from gpt_cli.ops.kernels import ACTIVATIONS
from gpt_cli.ops.memory import address
from gpt_cli.system.library import native_library

LEVELS = ("avx512vnni", "avx512", "avxvnni", "avx2", "neondot", "neon")
_VARIABLE = "GPT_CLI_LEVEL"  # environment variable that selects a level
_VERSION = 10  # of native/native.h

FLOAT32 = np.dtype("f4")
FLOAT64 = np.dtype("f8")
INT64 = np.dtype("i8")

# The types of fields.
_TYPES: dict[str, Any] = {"P": c_void_p, "N": c_int64, "I": c_int32, "F": c_float, "D": c_double}


class Struct(ctypes.Structure):
    """A struct of native/kernels.h that keeps the arrays alive that its pointers point to."""

    strides: dict[str, str]  # fields NAME_stride by NAME

    def __init__(self, **fields: Any):
        """Set fields to numbers, structs, addresses, or pointers to arrays."""
        self._fields = fields
        for name, value in fields.items():
            if isinstance(value, np.ndarray):
                self.point(name, value)
            else:
                setattr(self, name, value)

    def point(self, name: str, array: Array) -> None:
        """Set a pointer to an array, and NAME_stride, if there is one, to its rows' stride."""
        self._fields[name] = array
        setattr(self, name, address(array))
        if name in self.strides:
            setattr(self, self.strides[name], array.strides[0] // array.itemsize)

    def run(self, threads: int) -> int:
        """Run the operation of this name; return 0, or the error that native/native.h describes."""
        return getattr(library(), f"gpt2_{type(self).__name__}")(ctypes.byref(self), threads)


STRUCTS: dict[str, type[Struct]] = {}  # by name, in the order of `gpt2_layout.sizes`


def _fields(declarations: str) -> list[tuple[str, Any]]:
    """Return fields from declarations as in C: a type (of `_TYPES`, or a struct), then names."""
    types = _TYPES | STRUCTS
    fields = []
    for declaration in declarations.split(";"):
        kind, *names = declaration.split()
        fields += [(name, types[kind]) for name in names]
    return fields


def _struct(name: str, declarations: str) -> type[Struct]:
    """Return the mirror of a struct in C."""
    fields = _fields(declarations)
    suffix = "_stride"
    strides = {field.removesuffix(suffix): field for field, _ in fields if field.endswith(suffix)}
    STRUCTS[name] = type(name, (Struct,), {"strides": strides, "_fields_": fields})
    return STRUCTS[name]


_HEADS = "b_stride h_stride t_stride"
_CACHE = "B H T D cache_panels"

Matrix = _struct("matrix", "P panels; N n_in n_out panel_bytes; I format")
Norm = _struct("norm", "P weight bias; F epsilon")
BlockStruct = _struct(
    "block",
    "norm ln_1 ln_2; matrix c_attn c_proj c_fc mlp_c_proj;"
    "P c_attn_bias c_proj_bias c_fc_bias mlp_c_proj_bias; F scale; I activation",
)
Embed = _struct("embed", "P wte wpe ids positions x; N tokens n_positions")
LayerNormRows = _struct("layer_norm", "norm norm; P x y; N rows C x_stride y_stride")
LinearRows = _struct("linear", "P w bias x y scratch; N rows x_stride y_stride; I activation")
Store = _struct("store", f"P k v keys values past lengths; N {_HEADS} {_CACHE}; I half")
Narrow = _struct("narrow", "P x y; N rows stride n")
Attend = _struct(
    "attend",
    f"P q keys values visible y scratch scores pattern; N {_HEADS} y_stride {_CACHE} S;"
    "F scale; I half known_step",
)
AllLayers = _struct(
    "layers",
    "P blocks x y visible past lengths keys values scratch;"
    f"N n_layer x_stride y_stride keys_bytes values_bytes {_CACHE}; I half",
)
LogSumExp = _struct("log_sum_exp", "P x y; N rows x_stride n")
Exp = _struct("exp", "P x y; N n")
Activate = _struct("activate", "P x y; N n; I activation")
Cumulate = _struct("cumulate", "P logits sums; N rows logits_stride n")
Choose = _struct(
    "choose",
    "P logits uniforms ids scratch; N rows logits_stride n top_k; D top_p; F temperature log_min_p",
)
Draft = _struct(
    "draft",
    "embed embed; layers layers; layer_norm ln_f; linear lm_head; choose choose;"
    "P positions visible banned; N banned_count count",
)
Quantize = _struct("quantize", "P w to")
Pack = _struct("pack", "P to rows scales; N first count; I transposed")
StoredRows = _struct("stored_rows", "pack pack; N offset; I file error")
Read = _struct("read", "P parts; N count next")


class _Storage(ctypes.Structure):
    """`struct storage`."""

    _fields_ = (("name", ctypes.c_char_p), *_fields("N weight_bytes unit_rows unit_bytes"))


class _Layout(ctypes.Structure):
    """`struct layout`."""

    _fields_ = (
        *_fields("N version columns group max_tile_rows row_padding digits_bytes formats"),
        ("storage", ctypes.POINTER(_Storage)),
        ("sizes", c_int64 * len(STRUCTS)),
    )


class LayerStructs:
    """The layers of a model (`model.Block`s) as an array of structs."""

    def __init__(self, h: tuple[Block, ...]):
        self.h = [weakref.ref(b) for b in h]
        self.width = h[0].attn.c_attn.weight.n_in
        self._blocks = [self._block(b, h[0]) for b in h]  # keep the arrays that they point to alive
        self._array = (BlockStruct * len(h))(*self._blocks)
        self.struct = ctypes.addressof(self._array)

    def _block(self, b: Block, first: Block) -> Struct:
        """Return a block as a struct; raise ValueError if its shapes are not those of the first."""
        C, H, inner = self.width, first.attn.n_head, first.mlp.c_fc.weight.n_out
        linears = {
            "c_attn": b.attn.c_attn,
            "c_proj": b.attn.c_proj,
            "c_fc": b.mlp.c_fc,
            "mlp_c_proj": b.mlp.c_proj,
        }
        matrices = [w.weight for w in linears.values()]
        shapes = [(matrix.n_in, matrix.n_out) for matrix in matrices]
        right = shapes == [(C, 3 * C), (C, C), (C, inner), (inner, C)] and C % H == 0
        has_groups = first.attn.c_attn.weight.has_groups
        alike = all(matrix.has_groups == has_groups for matrix in matrices)
        check(right and alike and b.attn.n_head == H, "a layer", matrices[0].panels)
        fields = {"scale": b.attn.scale, "activation": ACTIVATIONS.index(b.mlp.activation)}
        for name, w in linears.items():
            fields[name] = w.weight.matrix
            fields[f"{name}_bias"] = vector_of(w.bias, w.weight.n_out)
        return BlockStruct(ln_1=norm_of(b.ln_1, C), ln_2=norm_of(b.ln_2, C), **fields)


_layers: weakref.WeakKeyDictionary[Any, LayerStructs] = weakref.WeakKeyDictionary()  # by the first


def layers_of(h: tuple[Block, ...]) -> LayerStructs:
    """Return the layers of a model as structs, which are kept for the next pass."""
    layers = _layers.get(h[0])
    if layers is None or layers.h != [weakref.ref(b) for b in h]:
        layers = LayerStructs(h)
        _layers[h[0]] = layers
    return layers


@cache
def library() -> ctypes.CDLL:
    """Load the library; raise ImportError if there is none, or it is broken or another version."""
    path = native_library()
    if path is None:
        raise ImportError("the library was not compiled when gpt-cli was installed")
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(str(error)) from error
    sizes = [ctypes.sizeof(kind) for kind in STRUCTS.values()]
    with suppress(ValueError):  # it has no `gpt2_layout`
        constants = _Layout.in_dll(lib, "gpt2_layout")
        if (constants.version, constants.group, list(constants.sizes)) == (_VERSION, GROUP, sizes):
            lib.gpt2_layers_scratch.restype = c_int64
            lib.gpt2_linear_ranges.restype = c_int64
            lib.gpt2_use_level.restype = None
            return lib
    raise ImportError(f"{path} belongs to another version: reinstall gpt2-cli")


@cache
def layout() -> _Layout:
    """Return `gpt2_layout`: the constants of the library."""
    return _Layout.in_dll(library(), "gpt2_layout")


@cache
def formats() -> dict[str, tuple[int, _Storage]]:
    """Return the number and the `struct storage` of each format, by its name."""
    formats = layout().storage[: layout().formats]
    return {storage.name.decode(): (number, storage) for number, storage in enumerate(formats)}


def layers_scratch(layers: Struct, threads: int) -> int:
    """Return the bytes of scratch memory that the operation `layers` needs."""
    return 4 * int(library().gpt2_layers_scratch(ctypes.byref(layers), threads))


def levels() -> list[str]:
    """Return the levels that this processor supports, the highest first."""
    return [level for level in LEVELS if library().gpt2_has_level(level.encode())]


def use_level(level: str) -> None:
    """Select one of `levels` for all later calls. Results keep their bits."""
    library().gpt2_use_level(level.encode())


def choose_level() -> str:
    """Select the level that GPT_CLI_LEVEL names, or the highest supported one; return its name.

    Raise ImportError if the library has no level for this processor, and InputError for a level
    that does not exist or that this processor does not have.
    """
    available = levels()
    if not available:
        raise ImportError("this processor has no fused multiply-add (AVX2 and FMA)")
    level = os.environ.get(_VARIABLE) or available[0]
    if level in available:
        use_level(level)
        return level
    if level in LEVELS:
        raise InputError(f"{_VARIABLE}={level}: this processor has {', '.join(available)}")
    raise InputError(f"{_VARIABLE} must be one of {', '.join(LEVELS)}, not {level!r:.40}")


def check(right: bool, name: str, array: Array) -> None:
    """Raise ValueError if an array does not have the type and shape that the C code takes."""
    if not right:
        raise ValueError(f"{name} cannot be {array.dtype} {array.shape} here")


def readable(x: Array) -> Array:
    """Return x, or a copy, as aligned float32 with a contiguous last axis."""
    right = x.dtype == FLOAT32 and x.strides[-1] == 4 and x.flags.aligned
    return x if right else x.astype(FLOAT32, "C")


def contiguous(x: Array, dtype: np.dtype[Any]) -> Array:
    """Return x, or a copy, in this type, aligned and C-contiguous."""
    right = x.dtype == dtype and x.flags.c_contiguous and x.flags.aligned
    return x if right else x.astype(dtype, "C")


def norm_of(ln: LayerNorm, width: int) -> Struct:
    """Return a layer norm of rows of this width as a struct."""
    weight, bias = vector_of(ln.weight, width), vector_of(ln.bias, width)
    return Norm(weight=weight, bias=bias, epsilon=ln.epsilon)


def vector_of(x: Array, n: int) -> Array:
    """Return a vector (n,) as contiguous float32."""
    check(x.shape == (n,), "a vector", x)
    return readable(x)
