"""Compile kernels for the current GPU with NVRTC, and keep the result in CuPy's cache folder.

CuPy's RawModule would append -ftz=true to the options: tiny numbers would become 0.
"""

import hashlib
import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from ctypes import addressof, c_char_p, c_void_p, cast
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from gpt_cli.errors import GPTCLIError
from gpt_cli.system import gpu
from gpt_cli.system.atomic import write_file

if TYPE_CHECKING:
    from cupy.cuda.function import Module

OPTIONS = ("--std=c++17", "--fmad=false", "-ftz=false", "--prec-div=true", "--prec-sqrt=true")
_INCLUDE = '#include "constants.inc"'
_DIGEST = hashlib.sha256().digest_size

_log = logging.getLogger(__name__)


def load(names: Sequence[str], options: Sequence[str]) -> "Module":
    """Return a module compiled from files of this folder, in this order.

    A module in the cache does not need NVRTC, a library of 100 MB. Several threads may load and
    compile at the same time.
    """
    code = source(names)
    options = (*OPTIONS, *options)
    capability = _capability()
    file = _cache_file(code, options, capability)
    binary = _cached(file) if file else None
    if binary is not None:
        with suppress(Exception):  # the driver refuses it: compile it again
            return _module(binary)
    started = time.perf_counter()
    binary = _compile(code, options, capability)
    seconds = time.perf_counter() - started
    _log.info("compiled %s for compute capability %d: %.1f s", names[-1], capability, seconds)
    module = _module(binary)
    if file:
        _keep(file, binary)
    return module


def load_all(
    groups: Sequence[Sequence[str]], options: Sequence[str]
) -> "dict[str, Future[Module]]":
    """Start loading one module for each list of files, in parallel; return them by kernel name.

    The futures raise the errors of `load`.
    """
    from cupy.cuda import runtime

    device = runtime.getDevice()

    def load_here(names: Sequence[str]) -> "Module":
        runtime.setDevice(device)  # each thread has its own current device
        return load(names, options)

    pool = ThreadPoolExecutor(len(groups))
    modules = [pool.submit(load_here, names) for names in groups]
    pool.shutdown(wait=False)
    pairs = zip(groups, modules, strict=True)
    return {kernel: module for names, module in pairs for kernel in kernels(names)}


def kernels(names: Sequence[str]) -> list[str]:
    """Return the names of the kernels in some files, for all formats."""
    return re.findall(r"^KERNEL.* (\w+)\(", source(names), re.MULTILINE)


class Kernel:
    """A kernel of a module, which is launched on the current stream.

    CuPy's own launch takes 12 microseconds for a struct, four times as long.
    """

    def __init__(self, module: "Module", name: str, shared: int):
        """Let blocks have up to `shared` bytes of dynamic shared memory; by default it is 48 KB."""
        from cupy.cuda import get_current_stream
        from cupy_backends.cuda.api import driver

        self._function = module.get_function(name)  # keeps the module loaded
        self._address = self._function.ptr
        self._driver = driver
        self._stream = get_current_stream
        attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.funcSetAttribute(self._address, attribute, shared)

    def launch(self, grid: tuple[int, int], threads: int, shared: int, argument: bytes) -> None:
        """Launch blocks of `threads` threads and `shared` bytes of shared memory, with a struct."""
        arguments = c_char_p(argument)  # the address of the only argument, which the driver copies
        self._driver.launchKernel(
            self._address, *grid, 1, threads, 1, 1, shared, self._stream().ptr,
            addressof(arguments), 0,
        )  # fmt: skip

    def launch_together(self, blocks: int, threads: int, shared: int) -> None:
        """Launch a kernel without arguments whose blocks wait for one another."""
        self._driver.launchCooperativeKernel(
            self._address, blocks, 1, 1, threads, 1, 1, shared, self._stream().ptr, 0
        )


def set_constant(module: "Module", name: str, value: bytes) -> None:
    """Write a variable in constant memory before the next launch on the current stream."""
    from cupy.cuda import get_current_stream, runtime

    address = module.get_global_var(name)
    source = cast(c_char_p(value), c_void_p).value
    kind = runtime.memcpyHostToDevice
    # From memory that is not pinned, the driver copies `value` before it returns.
    runtime.memcpyAsync(address, source, len(value), kind, get_current_stream().ptr)


def source(names: Sequence[str]) -> str:
    """Return the text of some files of this folder as one; messages about it name the files."""
    return "".join(f"{line}\n" for name in names for line in _lines(name))


def _lines(name: str) -> Iterator[str]:
    """Yield the lines of a file, with the constants where it includes them."""
    folder = files(__package__)
    yield f'#line 1 "{name}"'
    for number, line in enumerate(folder.joinpath(name).read_text("utf-8").splitlines(), 1):
        if line != _INCLUDE:
            yield line
            continue
        yield '#line 1 "constants.inc"'
        yield files("gpt_cli.ops").joinpath("constants.inc").read_text("utf-8")
        yield f'#line {number + 1} "{name}"'


def _capability() -> int:
    """Return the compute capability of the current device, such as 90."""
    from cupy.cuda import Device

    return int(Device().compute_capability)


def _module(binary: bytes) -> "Module":
    from cupy.cuda.function import Module

    module = Module()
    module.load(binary)
    return module


def _compile(code: str, options: Sequence[str], capability: int) -> bytes:
    """Return machine code for a compute capability.

    Unlike PTX, it also runs with a driver that is older than NVRTC, of the same major version.
    """
    from cupy.cuda import nvrtc

    # Machine code runs on later devices of the same major version, too.
    known = [sm for sm in nvrtc.getSupportedArchs() if capability // 10 * 10 <= sm <= capability]
    if not known:
        version = ".".join(map(str, nvrtc.getVersion()))
        raise RuntimeError(f"NVRTC {version} does not know the compute capability {capability}")
    program = nvrtc.createProgram(code, "kernels.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*options, f"-arch=sm_{max(known)}"))
        return nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as error:
        messages = nvrtc.getProgramLog(program).split("\n")
        raise RuntimeError(f"{error}: {messages[0]}") from error
    finally:
        nvrtc.destroyProgram(program)


def _cache_file(code: str, options: Sequence[str], capability: int) -> Path | None:
    """Return the file of a module in CuPy's folder; None if CuPy may not use the disk.

    NVRTC's version is not part of the key: that would need NVRTC, and the bits are the same.
    """
    if os.environ.get("CUPY_CACHE_IN_MEMORY") == "1":
        return None
    key = "\0".join([code, *options, str(capability)]).encode()
    return gpu.kernel_cache() / f"gpt-cli-{hashlib.sha256(key).hexdigest()}.cubin"


def _cached(file: Path) -> bytes | None:
    """Return a module in the cache; None if there is none, or it is damaged."""
    try:
        data = file.read_bytes()
    except OSError:
        return None
    digest, binary = data[:_DIGEST], data[_DIGEST:]
    return binary if hashlib.sha256(binary).digest() == digest else None


def _keep(file: Path, binary: bytes) -> None:
    """Write a module into the cache, after its digest. If that fails, log it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, hashlib.sha256(binary).digest() + binary, replace=True)
    except (GPTCLIError, OSError) as error:
        _log.info("compiled kernels are not kept: %s", error)
