"""Kernels of gpt_cli/ops/cuda that are compiled as C++ and run on the CPU.

`cuda/device.h` replaces device.cu, and `cuda/threads.cpp` runs the threads of a block as coroutines
in a fixed order; of a cooperative launch, those of all blocks. The arithmetic is rounded as a GPU
rounds it. Asynchronous copies are made as late as possible, and until then their targets are NaN.
A card may watch for races, which show missing barriers. The emulation does not show a GPU's speed
or lack of memory.
"""

import ctypes
import math
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from gpt_cli.ops.cuda import compiler
from support.compiled import made_once

_FOLDER = Path(__file__).with_name("cuda")
_ONE_LAUNCH = threading.Lock()
_STATIC_SHARED = 48 * 1024  # bytes that a kernel may have without asking for more

# No product and sum is fused but by `multiply_add`. Structs are read as vectors, and bytes as both.
# _FORTIFY_SOURCE would take the jumps between stacks for errors.
_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-w", "-U_FORTIFY_SOURCE")
_ARITHMETIC = (
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-fwrapv",
    "-fomit-frame-pointer",
)

# Each access to memory calls a function of races.cpp, and not of the library that GCC has for it.
_WATCHED = ("-fsanitize=thread", "-nodefaultlibs", "-g1")


@dataclass(frozen=True)
class Card:
    """The GPU that is emulated."""

    capability: int = 90
    processors: int = 2
    shared_memory: int = 232_448  # bytes of a block, at most
    backwards: bool = False  # start the last thread first, so that other missing barriers show
    watches_races: bool = False  # report accesses that no barrier orders: see cuda/races.h

    def properties(self) -> dict[str, object]:
        """Return what `cupy.cuda.runtime.getDeviceProperties` returns."""
        return {
            "name": b"emulated",
            "major": self.capability // 10,
            "minor": self.capability % 10,
            "multiProcessorCount": self.processors,
            "sharedMemPerBlock": _STATIC_SHARED,
            "sharedMemPerBlockOptin": self.shared_memory,
            "sharedMemPerMultiprocessor": self.shared_memory + 1024,
            "maxThreadsPerBlock": 1024,
            "warpSize": 32,
            "totalGlobalMem": 1 << 34,
        }

    def attributes(self) -> dict[str, int]:
        """Return what `cupy.cuda.Device.attributes` returns."""
        return {
            "MultiProcessorCount": self.processors,
            "MaxSharedMemoryPerBlock": _STATIC_SHARED,
            "MaxSharedMemoryPerBlockOptin": self.shared_memory,
            "MaxSharedMemoryPerMultiprocessor": self.shared_memory + 1024,
            "ComputeCapabilityMajor": self.capability // 10,
            "ComputeCapabilityMinor": self.capability % 10,
            "CooperativeLaunch": 1,
        }


def _compiler() -> list[str]:
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    fused = ["-mfma"] if fuses() else []
    return ["g++", *_FLAGS, *_ARITHMETIC, *fused, f"-I{_FOLDER}"]


def fuses() -> bool:
    """Return whether this processor fuses a product and a sum in one instruction."""
    return bool(re.search(r"\bfma\b", _processor()))


@cache
def _processor() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""


def _load(
    key: object,
    make: Callable[[], str],
    mode: int = ctypes.DEFAULT_MODE,
    flags: tuple[str, ...] = (),
) -> ctypes.CDLL:
    """Load the library of a C++ source, which is made if this one was not compiled before.

    Processes that run at once compile it once.
    """
    command = [*_compiler(), *flags]
    texts = [path.read_text() for path in sorted(_FOLDER.iterdir())]

    def compile_to(path: Path) -> None:
        _run([*command, "-shared", "-x", "c++", "-o", str(path), "-"], make())

    # The folder of the headers is not that of another checkout: `texts` has what is in it.
    named = [part for part in command if not part.startswith("-I")]
    path = made_once((key, named, _version(), texts), ".so", compile_to)
    return ctypes.CDLL(str(path), mode)


@cache
def _version() -> str:
    return _run(["g++", "--version"], "")


def _run(command: list[str], text: str) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout


@cache
def _launcher():
    source = '#include "threads.cpp"\n#include "copies.cpp"\n#include "races.cpp"\n'
    library = _load(source, lambda: source, ctypes.RTLD_GLOBAL)
    launch = library.emulated_launch
    launch.restype = ctypes.c_char_p
    return launch


def read_source(names: Sequence[str]) -> str:
    """Return files of gpt_cli/ops/cuda as one source, without what `device.h` replaces."""
    return compiler.source([name for name in names if name != "device.cu"])


@cache
def compile_kernels(
    source: str, options: tuple[str, ...], card: Card, flags: tuple[str, ...] = ()
) -> "Module":
    """Compile kernels and load them. Of the options of NVRTC, only macros count.

    `flags` are more flags of g++, which may break the arithmetic.
    """
    _launcher()
    macros = [option for option in options if option.startswith("-D")]
    macros.append(f"-D__CUDA_ARCH__={card.capability * 10}")
    flags = (*flags, *_WATCHED) if card.watches_races else flags
    library = _load((source, macros), lambda: _with_launchers(source, macros), flags=flags)
    return Module(library, card)


_CONSTANT = re.compile(r"EMULATED_CONSTANT\s+(struct \w+) (\w+);")
_KERNEL = re.compile(r"EMULATED_KERNEL\s+(?:EMULATED_BOUNDS\((.+?);.+?\)\s*)?(\w+)\(([^)]*)\)")


def _with_launchers(source: str, macros: list[str]) -> str:
    """Return a source after the preprocessor, with what `Function` needs of each kernel."""
    bounds = "-DLAUNCH_BOUNDS(threads,blocks)=EMULATED_BOUNDS(threads;blocks)"
    marks = ["-DKERNEL=EMULATED_KERNEL", "-DCONSTANT=EMULATED_CONSTANT", bounds]
    command = [*_compiler(), *macros, *marks, "-E", "-x", "c++", "-"]
    marked = _run(command, f'#include "device.h"\n{source}')
    launchers = []
    for threads, name, parameters in _KERNEL.findall(marked):
        kinds = [re.sub(r"\w+$", "", part.strip()) for part in parameters.split(",") if part]
        values = ", ".join(f"*({kind} *)arguments[{i}]" for i, kind in enumerate(kinds))
        sizes = [f"sizeof({kind})" for kind in kinds]
        launchers.append(
            f'extern "C" void launch_{name}(void **arguments) {{ {name}({values}); }}\n'
            f'extern "C" int sizes_{name}[] = {{{", ".join([str(len(kinds)), *sizes])}}};\n'
            f'extern "C" int threads_{name} = {threads or 1024};\n'
        )
    for kind, name in _CONSTANT.findall(marked):
        launchers.append(f'extern "C" int sizeof_{name} = sizeof({kind});\n')
    marked = marked.replace("EMULATED_CONSTANT", "")
    plain = re.sub(r"EMULATED_BOUNDS\(.+?;.+?\)", "", marked)
    return plain.replace("EMULATED_KERNEL", 'extern "C" void') + "".join(launchers)


class Module:
    def __init__(self, library: ctypes.CDLL, card: Card):
        self._library, self.card = library, card

    def get_function(self, name: str) -> "Function":
        if not hasattr(self._library, f"launch_{name}"):
            raise RuntimeError(f"CUDA_ERROR_NOT_FOUND: {name}")
        return Function(self._library, name, self.card)

    def set_constant(self, name: str, value: bytes) -> None:
        """Write a variable in constant memory."""
        size = ctypes.c_int.in_dll(self._library, f"sizeof_{name}").value
        assert size == len(value), (name, size)
        (ctypes.c_char * size).in_dll(self._library, name)[:] = value


class Function:
    num_regs = 32

    def __init__(self, library: ctypes.CDLL, name: str, card: Card):
        self.name, self._card = name, card
        self._kernel = library[f"launch_{name}"]
        count = ctypes.c_int.in_dll(library, f"sizes_{name}").value
        self._sizes = list((ctypes.c_int * (count + 1)).in_dll(library, f"sizes_{name}"))[1:]
        self.max_threads_per_block = ctypes.c_int.in_dll(library, f"threads_{name}").value
        self._shared = _STATIC_SHARED

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        return self._shared

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, size: int) -> None:
        if size > self._card.shared_memory:
            raise RuntimeError("CUDA_ERROR_INVALID_VALUE: shared memory")
        self._shared = size

    def __call__(
        self, grid, block, arguments, *, shared_mem: int = 0, enable_cooperative_groups=False
    ) -> None:
        grid, block = ((*sizes, 1, 1)[:3] for sizes in (grid, block))
        threads = math.prod(block)
        self._check(grid, threads, shared_mem, enable_cooperative_groups)
        values = [_bytes_of(argument) for argument in arguments]
        assert [len(value) for value in values] == self._sizes, (self.name, self._sizes)
        kept = [ctypes.create_string_buffer(value, len(value)) for value in values]
        pointers = (ctypes.c_void_p * len(kept))(*map(ctypes.addressof, kept))
        sizes = ((ctypes.c_uint * 3)(*map(int, sizes)) for sizes in (grid, block))
        with _ONE_LAUNCH:
            error = _launcher()(
                self._kernel,
                pointers,
                *sizes,
                shared_mem,
                enable_cooperative_groups,
                self._card.backwards,
                self._card.watches_races,
            )
        if error is not None:
            raise RuntimeError(f"{self.name}: {_with_lines(error.decode())}")

    def _check(self, grid, threads: int, shared: int, together: bool) -> None:
        """Raise an error for a launch that the card refuses."""
        if not (0 < threads <= self.max_threads_per_block and min(grid) > 0):
            raise RuntimeError(f"CUDA_ERROR_INVALID_VALUE: {self.name}: {grid}, {threads} threads")
        if grid[0] >= 1 << 31 or max(grid[1:]) >= 1 << 16:
            raise RuntimeError(f"CUDA_ERROR_INVALID_VALUE: {self.name}: grid {grid}")
        if shared > self._shared:
            raise RuntimeError(f"CUDA_ERROR_INVALID_VALUE: {self.name}: {shared} bytes shared")
        fitting = min(2048 // threads, (self._card.shared_memory + 1024) // (shared + 1024))
        if together and math.prod(grid) > fitting * self._card.processors:
            raise RuntimeError(f"CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE: {self.name}")


def _with_lines(message: str) -> str:
    """Return a message with lines of the source for addresses in libraries."""

    def line_of(address: re.Match[str]) -> str:
        command = ["addr2line", "-e", address[1], address[2]]
        line = subprocess.run(command, capture_output=True, text=True).stdout
        return Path(line.split(" ")[0].strip()).name

    if shutil.which("addr2line") is None:
        return message
    return re.sub(r"(\S+\.so)\+(0x[0-9a-f]+)", line_of, message)


class Kernel:
    """A replacement for `gpt_cli.ops.cuda.compiler.Kernel`."""

    def __init__(self, module: Module, name: str, shared: int):
        self._function = module.get_function(name)
        self._function.max_dynamic_shared_size_bytes = shared

    def launch(self, grid, threads: int, shared: int, argument: bytes) -> None:
        self._function(grid, (threads,), (argument,), shared_mem=shared)

    def launch_together(self, blocks: int, threads: int, shared: int) -> None:
        options = {"shared_mem": shared, "enable_cooperative_groups": True}
        self._function((blocks,), (threads,), (), **options)


def _bytes_of(argument) -> bytes:
    """Return what a kernel receives: the number, the struct, or the address of an array."""
    if isinstance(argument, bytes):
        return argument
    if isinstance(argument, np.generic):
        return argument.tobytes()
    if isinstance(argument, np.ndarray):
        assert argument.size == 1
        return argument.tobytes()
    return bytes(ctypes.c_size_t(argument.data.ptr))
