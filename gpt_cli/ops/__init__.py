"""The seam: the few operations that the model is written in, once per way of computing them.

Everything that is fast lives behind this protocol; `numpy_ops` is the reference that the others
are tested against. Shapes: B batch, T new tokens, S = past + T, H heads, D head size, C = H * D.
"""

import importlib
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from io import FileIO
from types import ModuleType
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from numpy.typing import NDArray

from gpt_cli import gpu
from gpt_cli.errors import InputError, ResourceError, did_you_mean
from gpt_cli.machine import MOST_THREADS, native_library

Array: TypeAlias = NDArray[Any]  # an array on the device that the ops compute on
Matrix: TypeAlias = Any  # a matrix (n_in, n_out) in the layout of the ops that have placed it


@dataclass(frozen=True)
class LayerNorm:
    """Gain and offset of one layer norm, both (C,), and what keeps its division from zero."""

    weight: Array
    bias: Array
    epsilon: float


@dataclass(frozen=True, eq=False)  # a key by what it is, not by its numbers
class Linear:
    """A matrix (n_in, n_out), as GPT-2's checkpoints have it, and a bias (n_out,) or none."""

    weight: Matrix
    bias: Array | None = None


class Rows(Protocol):
    """An array of the host, or a file that gives some rows of one at a time, in float32."""

    @property
    def shape(self) -> tuple[int, ...]:
        """How many there are along each axis."""
        ...

    def __getitem__(self, rows: slice, /) -> Array:
        """Return a range of rows."""
        ...


@runtime_checkable
class StoredRows(Rows, Protocol):
    """Rows that lie in a file."""

    dtype: str
    """The stored type, by its name in safetensors: F32, F16, BF16 or I8."""

    def opened(self) -> AbstractContextManager[tuple[FileIO, int]]:
        """Open the file; give it, and the byte at which the rows begin.

        Raises:
            CheckpointError: at the end; the file has changed, or the block raised EOFError.
        """
        ...


class Ops(Protocol):
    """The operations of a device that the model is written in.

    An implementation fuses inside one operation. `layers`, where there is one, runs the same
    operations in one call.
    """

    name: str
    """What computes, for people."""

    dtype: str
    """What the weights are held in."""

    cache_block: int
    """How many tokens the fourth axis of a cache counts together."""

    threads: int
    """How many threads of this machine compute."""

    layers: Callable[[Array, tuple[Any, ...], Array, Any], Array] | None
    """`model.layers` in one call: (x, h, visible, cache) -> x, the same bits. None if the
    implementation has no such thing."""

    xp: ModuleType
    """The array namespace, NumPy's or CuPy's, for everything that needs no fusing."""

    def free_memory(self) -> int | None:
        """Bytes of the device that can be taken; None where nobody tells."""
        ...

    def place(self, array: Array) -> Array:
        """Move a float32 array of the host to the device, once."""
        ...

    def place_matrix(self, rows: Rows, *, transposed: bool = False) -> Matrix:
        """Put a float32 matrix of the host where `linear` and `embed` want it.

        Its rows are those of (n_in, n_out), or of (n_out, n_in) where it is `transposed`.
        """
        ...

    def to_host(self, array: Array) -> Array:
        """Copy an array of the device to the host."""
        ...

    def embed(self, wte: Matrix, wpe: Array, ids: Array, positions: Array) -> Array:
        """Columns of wte (C, V) and rows of wpe (n_positions, C), added.

        ids (B, T), positions (B or 1, T) -> (B, T, C).
        """
        ...

    def layer_norm(self, x: Array, ln: LayerNorm) -> Array:
        """x (..., C) -> (..., C) with mean 0 and variance 1, then gain and offset."""
        ...

    def linear(self, x: Array, w: Linear, activation: str | None = None) -> Array:
        """x (..., n_in) -> activation(x @ weight + bias), (..., n_out)."""
        ...

    def new_cache(
        self, layers: int, batch: int, heads: int, capacity: int, size: int
    ) -> tuple[Array, Array]:
        """Return room for keys and for values, (layers, B, H, blocks of `cache_block` tokens, ...).

        What follows is the implementation's business; `size` is D.
        """
        ...

    def store(
        self, k: Array, v: Array, keys: Array, values: Array, past: Array, lengths: Array
    ) -> None:
        """Copy new keys and values behind those that one layer of a cache has.

        k, v (B, H, T, D); past (B,) tokens that each row has; lengths (B,), from 0 to T, how many
        of the new ones are the row's own.
        """
        ...

    def attend(self, q: Array, keys: Array, values: Array, scale: float, visible: Array) -> Array:
        """softmax(scale * q keysT, over what is visible) values.

        q (B, H, T, D); keys and values are one layer of a cache; visible (B, T) says how many of
        the row's keys, from the first on, each query sees: 1 or more -> (B, H, T, D).
        """
        ...

    def add(self, x: Array, y: Array) -> Array:
        """x + y."""
        ...

    def exp(self, x: Array) -> Array:
        """E to the power of each number."""
        ...

    def log_normalizer(self, logits: Array) -> Array:
        """What to subtract from logits (B, V) for logarithms of probabilities: (B,) float64."""
        ...


class _Implementation(NamedTuple):
    module: str
    name: str
    on_demand: bool = False  # only where it is asked for by name


def _native(name: str) -> _Implementation:
    return _Implementation("gpt_cli.ops.native_ops", name)


# What computes for a device and a type of weights: by name, the fastest first.
_IMPLEMENTATIONS = {
    ("cuda", "float32"): {"cupy": _Implementation("gpt_cli.ops.cupy_ops", "CuPyOps")},
    ("cuda", "float16"): {"cupy": _Implementation("gpt_cli.ops.cupy_ops", "Float16CuPyOps")},
    ("cpu", "float32"): {
        "native": _native("NativeOps"),
        "numpy": _Implementation("gpt_cli.ops.numpy_ops", "NumPyOps"),
    },
    ("cpu", "bfloat16"): {"native": _native("BFloat16NativeOps")},
    ("cpu", "float16"): {"native": _native("Float16NativeOps")},
    ("cpu", "int8"): {
        "native": _native("Int8NativeOps"),
        # The reference. It would be slower than float32.
        "numpy": _Implementation("gpt_cli.ops.numpy_ops", "Int8NumPyOps", on_demand=True),
    },
}
_SYNONYMS = {"gpu": "cuda", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
SHORT = ("float16", "bfloat16")  # types of 16 bits
_CHOICE = "GPT_CLI_OPS"  # the variable that says which of several

_log = logging.getLogger(__name__)


def check_available(device: str, dtype: str) -> None:
    """Check, without loading anything, that something computes this: see `get_ops`.

    Raises:
        InputError: nothing does, or what it needs is not installed, or GPT_CLI_OPS names
            what is not there.
        ResourceError: it needs a GPU, and there is none that can be used.
    """
    several = _several(device, dtype)
    problems = [_missing(name) for name in _candidates(several, dtype)]
    if all(problems):
        choice = os.environ.get(_CHOICE)
        what = f"{_CHOICE}={choice}" if choice else f"--dtype {dtype}"
        raise InputError(f"{what} needs {problems[0]}")


def get_ops(device: str, dtype: str, threads: int | None = None) -> Ops:
    """Return the operations for a device ("auto" takes a GPU if it can) and a type of weights.

    Where there are several, it is the fastest of those that can be used, or the one that the
    variable GPT_CLI_OPS names. `threads` is how many compute; by default see `machine.threads`.
    NumPy's own number cannot be changed here.

    Raises:
        InputError: nothing computes that.
        ResourceError: it needs a GPU, or a library, and there is none that can be used.
    """
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise InputError(f"--threads must be from 1 to {MOST_THREADS}")
    check_available(device, dtype)
    several = _several(device, dtype)
    if device == "auto" and ("cuda", dtype) in _IMPLEMENTATIONS and (problem := gpu.problem()):
        _log.info("computing on the CPU: %s", problem)
    for name in _candidates(several, dtype):
        try:
            module = importlib.import_module(several[name].module)
            ops: Ops = getattr(module, several[name].name)()
        except ImportError as error:
            reason = error
            _log.info("%s cannot be used: %s", name, error)
        else:
            if threads is not None and name == "native":
                ops.threads = threads
            return ops
    if name == "cupy":
        raise ResourceError(
            f"--device {device}: CuPy does not work ({reason}): {gpu.install_hint()}"
        )
    raise ResourceError(f"--dtype {dtype}: {name} does not work here: {reason}")


def held_dtype(stored: str, device: str) -> str:
    """Return what weights are held in that are stored in this type, unless another is chosen.

    16 bits stay so on a CPU with the compiled library, which widens them exactly; else they become
    float32.
    """
    if stored not in SHORT:
        return stored
    with suppress(InputError, ResourceError):
        if device == "cpu" or (device == "auto" and gpu.problem() is not None):
            return get_ops("cpu", stored).dtype
    return "float32"


def _candidates(several: Mapping[str, _Implementation], dtype: str) -> list[str]:
    """Return the names of what may compute: the one that GPT_CLI_OPS names, or the fastest first.

    Raises:
        InputError: GPT_CLI_OPS names what does not compute this.
    """
    choice = os.environ.get(_CHOICE)
    if not choice:
        return [name for name in several if not several[name].on_demand]
    if choice not in several:
        raise InputError(f"{_CHOICE} must be {' or '.join(several)} for {dtype}, not {choice!r}")
    return [choice]


def _missing(name: str) -> str | None:
    """Return what an implementation needs and is not installed, with the cure; None if nothing."""
    if name == "cupy" and not find_spec("cupy"):
        return f"CuPy: {gpu.install_hint()}"
    if name == "native" and native_library() is None:
        return (
            "the compiled library, and gpt-cli was installed without it: "
            "install a C compiler, then reinstall gpt2-cli (`gpt-cli doctor` says more)"
        )
    return None


def _several(device: str, dtype: str) -> dict[str, _Implementation]:
    """Return what computes this on a device; for "auto" on a GPU that can be used, then the CPU."""
    devices = ["cuda", "cpu"] if device == "auto" else [device]
    offered = {name: _IMPLEMENTATIONS.get((name, dtype), {}) for name in devices}
    if not any(offered.values()):
        for flag, name, known in (
            ("--device", device, ["auto", *(device for device, _ in _IMPLEMENTATIONS)]),
            ("--dtype", dtype, ["auto", *(dtype for _, dtype in _IMPLEMENTATIONS)]),
        ):
            if name not in known:
                hint = did_you_mean(_SYNONYMS.get(name, name), known)
                raise InputError(f"{flag} {name}{hint}: choose {', '.join(dict.fromkeys(known))}")
        every = ", ".join(dtype for name, dtype in _IMPLEMENTATIONS if name == device)
        raise InputError(f"--dtype {dtype} is not available with --device {device}: choose {every}")
    if offered.get("cuda") and (problem := gpu.problem()):
        if not offered.get("cpu"):
            raise ResourceError(f"--device cuda: {problem}")
        offered["cuda"] = {}
    return {name: entry for each in offered.values() for name, entry in each.items()}
