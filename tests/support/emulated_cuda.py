"""An emulation of the CuPy functions that `cupy_ops` uses: NumPy, and `emulated_kernels`.

Like CuPy's, these arrays refuse implicit conversion to NumPy. New arrays are filled with NaN.
"""

import sys
from collections.abc import Sequence
from concurrent.futures import Future
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import numpy as np

from gpt_cli.ops.cuda.compiler import kernels
from support.emulated_kernels import Card, Kernel, Module, compile_kernels, read_source


class DeviceArray:
    """An array that NumPy's functions reject, as they reject CuPy's."""

    __array_ufunc__ = None

    def __init__(self, host: np.ndarray):
        self._host = host

    def __array__(self, *args, **kwargs):
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __getattr__(self, name: str):
        found = getattr(self._host, name)
        return _wrapped(found) if callable(found) else _on_device(found)

    @property
    def data(self) -> SimpleNamespace:
        return SimpleNamespace(ptr=self._host.ctypes.data)

    def set(self, host: np.ndarray) -> None:
        assert isinstance(host, np.ndarray)
        assert host.dtype == self._host.dtype
        assert host.flags.c_contiguous
        self._host[...] = host

    def get(self) -> np.ndarray:
        return self._host.copy()

    def __getitem__(self, index):
        part = self._host[_on_host(index, index=True)]
        if not np.may_share_memory(part, self._host):
            part = np.asarray(part, order="C")  # like a copy by CuPy; NumPy's may be transposed
        return _on_device(part)

    def __setitem__(self, index, value):
        self._host[_on_host(index, index=True)] = _on_host(value)

    def __iter__(self):
        return (_on_device(row) for row in self._host)


def _operator(name: str):
    return lambda self, *others: _on_device(getattr(self._host, name)(*map(_on_host, others)))


for _name in (
    *("add", "sub", "mul", "truediv", "pow", "and", "or", "xor", "matmul", "mod", "floordiv"),
    *("radd", "rsub", "rmul", "rtruediv", "rpow", "rand", "ror", "rmatmul"),
    *("eq", "ne", "lt", "le", "gt", "ge", "neg", "invert", "abs", "float", "int", "bool", "len"),
):
    setattr(DeviceArray, f"__{_name}__", _operator(f"__{_name}__"))


def _on_device(result):
    """Wrap arrays and scalars that a function of NumPy has returned."""
    if isinstance(result, np.ndarray | np.generic):
        return DeviceArray(np.asarray(result))
    if isinstance(result, tuple) and any(isinstance(part, np.ndarray) for part in result):
        return tuple(map(_on_device, result))
    return result


def _on_host(value, *, index: bool = False):
    """Unwrap arrays; refuse those of NumPy, except as an index."""
    if isinstance(value, DeviceArray):
        return value._host
    if isinstance(value, tuple | list):
        return type(value)(_on_host(part, index=index) for part in value)
    if isinstance(value, np.ndarray) and not index:
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    return value


def _wrapped(function):
    def call(*args, **kwargs):
        kwargs = {name: _on_host(value) for name, value in kwargs.items()}
        return _on_device(function(*map(_on_host, args), **kwargs))

    return call


def _asarray(value, *args, **kwargs):
    host = value._host if isinstance(value, DeviceArray) else np.array(value)
    return DeviceArray(np.asarray(host, *args, **kwargs))


def _empty(shape, dtype=np.float64):
    """Return uninitialized memory filled with NaNs, so that a read of it shows."""
    host = np.empty(shape, dtype)
    host.reshape(-1).view(np.uint8).fill(0xFF)
    return DeviceArray(host)


class _Module(ModuleType):
    """A module with functions of NumPy under CuPy's names."""

    def __getattr__(self, name: str):
        found = getattr(np, name)
        return _wrapped(found) if callable(found) and not isinstance(found, type) else found


class _Device:
    def __init__(self, card: Card):
        self.id, self.attributes = 0, card.attributes()
        self.compute_capability = str(card.capability)
        self.mem_info = _memory()

    def synchronize(self) -> None:
        """Do nothing: kernels end before their launch returns."""


def _memory() -> tuple[int, int]:
    return 1 << 33, 1 << 34  # bytes that are free, of how many


def modules(card: Card) -> dict[str, object]:
    """Return what to put into sys.modules."""
    cupy = _Module("cupy")
    cupy.__spec__ = ModuleSpec("cupy", None)
    cupy.asarray, cupy.empty, cupy.asnumpy = _asarray, _empty, DeviceArray.get
    cupy.ndarray = DeviceArray
    cupy.get_default_memory_pool = lambda: SimpleNamespace(free_bytes=lambda: 0)
    cupy.cuda = SimpleNamespace(
        Device=lambda number=0: _Device(card),
        runtime=SimpleNamespace(
            memGetInfo=_memory,
            getDevice=lambda: 0,
            getDeviceProperties=lambda number: card.properties(),
        ),
        get_current_stream=lambda: SimpleNamespace(synchronize=lambda: None),
    )
    return {
        "cupy": cupy,
        "cupyx": SimpleNamespace(empty_pinned=np.empty),
        "cupy.cuda": cupy.cuda,
        "cupy.cuda.runtime": cupy.cuda.runtime,
    }


def loader(card: Card):
    """Return what replaces `gpt_cli.ops.cuda.compiler.load`."""

    def load(files: Sequence[str], options: Sequence[str]) -> Module:
        return compile_kernels(read_source(files), tuple(options), card)

    return load


def loader_of_all(card: Card):
    """Return what replaces `gpt_cli.ops.cuda.compiler.load_all`: it compiles all files at once."""

    def load_all(
        groups: Sequence[Sequence[str]], options: Sequence[str]
    ) -> dict[str, Future[Module]]:
        files = list(dict.fromkeys(name for names in groups for name in names))
        module: Future[Module] = Future()
        module.set_result(loader(card)(files, options))
        return dict.fromkeys(kernels(files), module)

    return load_all


def install(patch, card: Card = Card()) -> None:  # noqa: B008 (it never changes)
    """Make `import cupy` find this emulation and a GPU seem present, until the patch is undone."""
    for name, module in modules(card).items():
        patch.setitem(sys.modules, name, module)
    # Import it anew, and drop it afterwards, because it keeps references to these modules.
    patch.setitem(sys.modules, "gpt_cli.ops.cupy_ops", None)
    patch.delitem(sys.modules, "gpt_cli.ops.cupy_ops")
    patch.setattr("gpt_cli.ops.cuda.compiler.load", loader(card))
    patch.setattr("gpt_cli.ops.cuda.compiler.load_all", loader_of_all(card))
    patch.setattr("gpt_cli.ops.cuda.compiler.Kernel", Kernel)
    patch.setattr("gpt_cli.ops.cuda.compiler.set_constant", Module.set_constant)
    patch.setattr("gpt_cli.system.gpu.problem", lambda: None)
    patch.setattr("gpt_cli.system.gpu.load_driver", lambda: None)
