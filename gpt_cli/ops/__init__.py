"""The seam: the few operations that the model is written in, once per way of computing them.

Everything that is fast lives behind this protocol; `numpy_ops` is the reference that the others
are tested against. Shapes: B batch, T new tokens, S = past + T, H heads, D head size, C = H * D.
"""

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol, TypeAlias

from numpy.typing import NDArray

from gpt_cli.errors import InputError

Array: TypeAlias = NDArray[Any]  # an array on the device that the ops compute on


@dataclass(frozen=True)
class LayerNorm:
    """Gain and offset of one layer norm, both (C,), and what keeps its division from zero."""

    weight: Array
    bias: Array
    epsilon: float


@dataclass(frozen=True, eq=False)  # a key by what it is, not by its numbers
class Linear:
    """A matrix (n_in, n_out), as GPT-2's checkpoints have it, and a bias (n_out,) or none."""

    weight: Array
    bias: Array | None = None


class Ops(Protocol):
    """What the model asks of a device. An implementation may fuse inside one operation only."""

    xp: ModuleType
    """The array namespace, NumPy's or CuPy's, for everything that needs no fusing."""

    def place(self, array: Array) -> Array:
        """Move a float32 array of the host to the device, once."""
        ...

    def to_host(self, array: Array) -> Array:
        """Copy an array of the device to the host."""
        ...

    def embed(self, wte: Array, wpe: Array, ids: Array, positions: Array) -> Array:
        """ids (B, T), positions (B or 1, T) -> wte[ids] + wpe[positions] (B, T, C)."""
        ...

    def layer_norm(self, x: Array, ln: LayerNorm) -> Array:
        """x (..., C) -> (..., C) with mean 0 and variance 1, then gain and offset."""
        ...

    def linear(self, x: Array, w: Linear, activation: str | None = None) -> Array:
        """x (..., n_in) -> activation(x @ weight + bias), (..., n_out)."""
        ...

    def attend(
        self, q: Array, keys: Array, values: Array, scale: float, visible: Array | None
    ) -> Array:
        """softmax(scale * q keysT, over what is visible) values.

        q (B, H, T, D), keys and values (B, H, S, D), visible (B or 1, 1, T, S) of booleans, or
        None where every query sees every key -> (B, H, T, D). The queries are those of the last T
        keys, and `visible` shows none of them a key after its own.
        """
        ...


# Which implementation computes for a device and a type of weights: (module, class).
_IMPLEMENTATIONS = {
    ("cpu", "float32"): ("gpt_cli.ops.numpy_ops", "NumPyOps"),
}


def get_ops(device: str, dtype: str) -> Ops:
    """Return the operations for a device ("auto" takes the best there is) and a type of weights.

    Raises:
        InputError: nothing computes that.
    """
    key = ("cpu" if device == "auto" else device, dtype)
    if key not in _IMPLEMENTATIONS:
        offered = ", ".join(f"{dtype} on {device}" for device, dtype in _IMPLEMENTATIONS)
        raise InputError(f"cannot compute in {dtype} on {device}; this version offers {offered}")
    module, name = _IMPLEMENTATIONS[key]
    implementation: Ops = getattr(importlib.import_module(module), name)()
    return implementation
