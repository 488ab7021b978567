"""A device that shows whether all but the operations gives the bits of the CPU.

Its operations are those of the C library, behind the arrays of `emulated_cuda`. Of CuPy it has only
what is exact on a GPU: elementwise +, -, *, / and comparisons (which take tiny float32 for 0),
selections, sorts, and sums of integers. Everything else raises InexactError: CuPy adds floats in an
order of its own, and its exponentials are not ours.
"""

from abc import update_abstractmethods
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np

from gpt_cli.ops import AttentionSteps, LayerNorm, Linear, Ops
from support import emulated_cuda
from support.emulated_cuda import DeviceArray
from support.emulated_kernels import Card

# Of floats, too. A function may be added if it gives NumPy's bits on every GPU.
EXACT = {
    *("abs", "all", "any", "arange", "argmax", "argsort", "asarray", "broadcast_to", "concatenate"),
    *("copyto", "empty", "flatnonzero", "full", "full_like", "isfinite", "partition", "sort"),
    *("stack", "take_along_axis", "where", "zeros"),
}
EXACT_OF_INTEGERS = {"cumsum", "sum"}
EXACT_METHODS = {
    *("all", "any", "argmax", "argsort", "astype", "copy", "max", "min", "ravel", "reshape"),
    *("squeeze", "swapaxes", "tolist", "transpose", "view", "item"),
}
_ROUNDED = ("add", "sub", "mul", "truediv", "radd", "rsub", "rmul", "rtruediv")
_ROUNDED += ("eq", "ne", "lt", "le", "gt", "ge")  # their operands
_TINY = np.finfo(np.float32).tiny


class InexactError(AssertionError):
    """A function of CuPy that may not take part in a result."""

    def __init__(self, name: str):
        super().__init__(
            f"{name} of floats on a GPU has other bits than NumPy's: compute it on the host "
            "(`ops.to_host`), or in an operation of `Ops`"
        )


def _checked(name, function, exact, method_of=None):
    """Return a function, or a method of an array, that raises InexactError if it is not exact."""

    def call(*args, **kwargs):
        if not exact:
            array = args[0] if method_of is None else method_of
            if name not in EXACT_OF_INTEGERS or array.dtype.kind == "f" or "dtype" in kwargs:
                raise InexactError(name)
        return function(*args, **kwargs)

    return call


class _StrictModule(ModuleType):
    """The emulated CuPy; a function that is not exact raises InexactError."""

    def __init__(self):
        super().__init__("cupy")
        self._cupy = emulated_cuda.modules(Card())["cupy"]

    def __getattr__(self, name: str):
        found = getattr(self._cupy, name)
        if isinstance(found, ModuleType):
            raise InexactError(f"{name}.*")
        if isinstance(found, type) or not callable(found):
            return found
        return _checked(name, found, name in EXACT)


def _flushed(operator):
    """Round tiny results and operands of float32 to 0, as CuPy's kernels do."""

    def flush(value):
        if isinstance(value, DeviceArray) and value.dtype == np.float32:
            host = value._host
            return DeviceArray(np.where(abs(host) < _TINY, np.copysign(0, host), host))
        return value

    def call(self, other):
        return flush(operator(flush(self), flush(other)))

    return call


def install(patch) -> ModuleType:
    """Make arrays of the emulation strict until the patch is undone; return its `xp`."""
    attribute = DeviceArray.__getattr__

    def strict_attribute(self, name: str):
        found = attribute(self, name)
        exact = name in EXACT_METHODS
        return _checked(name, found, exact, self) if callable(found) else found

    def refused(name):
        def call(self, *others):
            raise InexactError(name)

        return call

    patch.setattr(DeviceArray, "__getattr__", strict_attribute)
    for name in ("matmul", "rmatmul", "pow", "rpow"):
        patch.setattr(DeviceArray, f"__{name}__", refused(name))
    for name in _ROUNDED:
        patch.setattr(DeviceArray, f"__{name}__", _flushed(getattr(DeviceArray, f"__{name}__")))
    return _StrictModule()


def _on_host(value: Any) -> Any:
    """Return an argument of an operation with NumPy's arrays, which share the memory."""
    if isinstance(value, DeviceArray):
        return value._host
    if isinstance(value, AttentionSteps):
        return AttentionSteps(*map(_on_host, value))
    if isinstance(value, LayerNorm | Linear):
        return replace(value, **{name: _on_host(part) for name, part in vars(value).items()})
    return value


def _on_device(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_on_device, value))
    return DeviceArray(value) if isinstance(value, np.ndarray) else value


class StrictOps(Ops):
    """The operations of the C library behind arrays of a device.

    It computes one layer at a time, and chooses no tokens: `sampling.sample` does.
    """

    name = "strict"
    batch_invariant = True

    def __init__(self, native: Ops, xp: ModuleType):
        self._native, self.xp = native, xp
        self.dtype, self.threads = native.dtype, native.threads
        self.cache_type, self.cache_panel = native.cache_type, native.cache_panel

    def to_host(self, array):
        return array.get() if isinstance(array, DeviceArray) else array


def _operation(name: str):
    def call(self, *args, **kwargs):
        args = map(_on_host, args)
        result = getattr(self._native, name)(*args, **{k: _on_host(v) for k, v in kwargs.items()})
        return _on_device(result)

    return call


for _name in (
    *("activate", "add", "attend", "attend_in_steps", "copyto", "cumulative_counts", "embed"),
    *("exp", "layer_norm", "linear", "log_normalizer", "new_cache", "place_matrix", "store"),
):
    setattr(StrictOps, _name, _operation(_name))
update_abstractmethods(StrictOps)
