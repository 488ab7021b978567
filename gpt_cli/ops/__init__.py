"""The seam: the few operations that the model is written in, once per way of computing them.

Everything that is fast lives behind this protocol; `numpy_ops` is the reference that the others
are tested against. Shapes: B batch, T new tokens, S = past + T, H heads, D head size, C = H * D.
"""

import importlib
import logging
import os
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpt_cli import gpu, machine
from gpt_cli.errors import InputError, ResourceError

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
    """An array of the host, or a file that gives some rows of one at a time."""

    @property
    def shape(self) -> tuple[int, ...]:
        """How many there are along each axis."""
        ...

    def __getitem__(self, rows: slice, /) -> Array:
        """Return a range of rows."""
        ...


class Ops(Protocol):
    """What the model asks of a device. An implementation may fuse inside one operation only."""

    name: str
    """What computes, for people."""

    dtype: str
    """What the weights are held in."""

    cache_dtype: type[np.floating[Any]]
    """What a cache holds keys and values in."""

    threads: int
    """How many threads of the host compute."""

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

    def store(self, x: Array, place: Array) -> None:
        """Copy keys or values x (B, H, T, D) to their place in a cache, rounded to its type."""
        ...

    def attend(
        self, q: Array, keys: Array, values: Array, scale: float, visible: Array | None
    ) -> Array:
        """softmax(scale * q keysT, over what is visible) values.

        q (B, H, T, D), keys and values (B, H, S, D), which are taken as a cache would have rounded
        them, visible (B or 1, 1, T, S) of booleans, or
        None for a single query that sees every key -> (B, H, T, D). The queries are those of the
        last T keys, and `visible` shows none of them a key after its own.
        """
        ...

    def add(self, x: Array, y: Array) -> Array:
        """x + y."""
        ...

    def recorder(self, past: int, activation: str) -> "Recorder | None":
        """Operations that record a decode step of one text after `past` tokens; None if none do.

        `activation` is that of the MLPs.
        """
        ...

    def log_normalizer(self, logits: Array) -> Array:
        """What to subtract from logits (B, V) for logarithms of probabilities: (B,) float64."""
        ...


class Recorder(Ops, Protocol):
    """Operations that only note what to do, until their `step` does it."""

    def finish(self, result: Array) -> None:
        """Take what the model has returned: the recording is at its end."""
        ...

    def step(self, ids: Array, past: int) -> Array:
        """Do for a token ids (1, 1) after `past` others what was recorded; return the result.

        It is the same array each time.
        """
        ...


class _Implementation(NamedTuple):
    module: str
    name: str
    needs: str | None = None  # a package that is an extra
    extra: str | None = None
    on_demand: bool = False  # only where it is asked for by name
    slow_start: bool = False  # not for what is over soon
    addresses: int = 0  # bytes of address space that it takes at most before it computes


_COMPILER = 900 << 20  # LLVM ends the process where it gets no more

# What computes for a device and a type of weights: by name, the fastest first.
_IMPLEMENTATIONS = {
    ("cuda", "float32"): {"cupy": _Implementation("gpt_cli.ops.cupy_ops", "CuPyOps")},
    ("cuda", "float16"): {"cupy": _Implementation("gpt_cli.ops.cupy_ops", "Float16CuPyOps")},
    ("cpu", "float32"): {
        "numba": _Implementation(
            "gpt_cli.ops.numba_ops",
            "NumbaOps",
            "numba",
            "fast",
            slow_start=True,
            addresses=_COMPILER,
        ),
        "numpy": _Implementation("gpt_cli.ops.numpy_ops", "NumPyOps"),
    },
    ("cpu", "int8"): {
        "numba": _Implementation(
            "gpt_cli.ops.numba_ops", "Int8NumbaOps", "numba", "fast", addresses=_COMPILER
        ),
        # The reference. It would be slower than float32.
        "numpy": _Implementation("gpt_cli.ops.numpy_ops", "Int8NumPyOps", on_demand=True),
    },
}
_CHOICE = "GPT_CLI_OPS"  # the variable that says which of several

_log = logging.getLogger(__name__)


def check_available(device: str, dtype: str) -> None:
    """Check, without loading anything, that something computes this: see `get_ops`.

    Raises:
        InputError: nothing does, or it needs a package that is not installed, or GPT_CLI_OPS names
            what is not there.
        ResourceError: it needs a GPU, and there is none that can be used.
    """
    several = _several(device, dtype)
    choice = os.environ.get(_CHOICE)
    if choice and choice not in several:
        raise InputError(f"{_CHOICE} must be {' or '.join(several)} for {dtype}, not {choice!r}")
    missing = {
        name: entry for name, entry in several.items() if entry.needs and not find_spec(entry.needs)
    }
    names = [choice] if choice else [name for name in several if not several[name].on_demand]
    if all(name in missing for name in names):
        entry = missing[names[0]]
        what = f"{_CHOICE}={choice}" if choice else f"computing in {dtype}"
        raise InputError(f"{what} needs {entry.needs}: pip install 'gpt-cli[{entry.extra}]'")


def get_ops(device: str, dtype: str, *, brief: bool = False) -> Ops:
    """Return the operations for a device ("auto" takes a GPU if it can) and a type of weights.

    Where there are several, it is the fastest of those that can be used; but of those that start
    slowly none, where so little is computed that it is `brief`; or the one that the variable
    GPT_CLI_OPS names.

    Raises:
        InputError: nothing computes that.
        ResourceError: it needs a GPU, or a library, and there is none that can be used.
    """
    check_available(device, dtype)
    several = _several(device, dtype)
    if device == "auto" and ("cuda", dtype) in _IMPLEMENTATIONS and (problem := gpu.problem()):
        _log.info("computing on the CPU: %s", problem)
    names = [name for name in several if not several[name].on_demand]
    if choice := os.environ.get(_CHOICE):
        names = [choice]
    elif brief:
        names = [name for name in names if not several[name].slow_start] or names
    left = machine.addresses()
    for name in names:
        try:
            if several[name].addresses and left is not None and left < several[name].addresses:
                raise ImportError(f"a limit (ulimit -v) leaves {left >> 20} MiB of address space")
            module = importlib.import_module(several[name].module)
            ops: Ops = getattr(module, several[name].name)()
        except ImportError as error:
            reason = error
            _log.info("%s cannot be used: %s", name, error)
        else:
            return ops
    if names == ["cupy"]:
        raise ResourceError(
            f"CuPy cannot compute here ({reason}); what it needs comes with "
            f"pip install 'gpt-cli[{gpu.cuda_extra()}]'"
        )
    raise ResourceError(f"{names[-1]} cannot compute in {dtype} here: {reason}")


def _several(device: str, dtype: str) -> dict[str, _Implementation]:
    """Return what computes this on a device; for "auto" on a GPU that can be used, then the CPU."""
    devices = ["cuda", "cpu"] if device == "auto" else [device]
    offered = {name: _IMPLEMENTATIONS.get((name, dtype), {}) for name in devices}
    if not any(offered.values()):
        every = ", ".join(f"{dtype} on {device}" for device, dtype in _IMPLEMENTATIONS)
        raise InputError(f"cannot compute in {dtype} on {device}; this version offers {every}")
    if offered.get("cuda") and (problem := gpu.problem()):
        if not offered.get("cpu"):
            raise ResourceError(f"cannot compute in {dtype} on a GPU: {problem}")
        offered["cuda"] = {}
    return {name: entry for each in offered.values() for name, entry in each.items()}
