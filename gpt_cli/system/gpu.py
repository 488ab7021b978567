"""Find out whether an NVIDIA GPU can be used: the driver, a device, CuPy, and what CuPy needs."""

import ctypes
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

_LEAST = 7, 5  # compute capability: CUDA 13 compiles for none below
_PACKAGES = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x")  # all install the same files


class Fault(NamedTuple):
    """A problem with the GPU and the command or step that solves it."""

    text: str
    cure: str


def problem() -> str | None:
    """Return why this machine cannot compute on an NVIDIA GPU; None if no reason is known.

    Ask the driver. Do not import CuPy, which takes a second.
    """
    driver = load_driver()
    if driver is None:
        return "no NVIDIA driver is installed"
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "the NVIDIA driver finds no GPU"
    major, minor = capability(driver)
    if (major, minor) < _LEAST:
        return f"the GPU has compute capability {major}.{minor}, and 7.5 is needed"
    if find_spec("cupy") is None:
        return f"CuPy is not installed: {install_hint()}"
    return None


def fault() -> Fault | None:
    """Return why CuPy, which is installed, does not work; None if no reason is known.

    It takes longer than `problem`: it looks for packages and loads a library.
    """
    packages = cupy_packages()
    major, minor = driver_version()
    if len(packages) > 1:
        return Fault(f"more than one CuPy is installed: {', '.join(packages)}", install_hint())
    if packages and major and _cuda_of(packages[0]) > major:
        text = f"{packages[0]} is too new for the driver, which is for CUDA {major}.{minor}"
        return Fault(text, install_hint())
    try:
        kernel_cache().mkdir(parents=True, exist_ok=True)  # as CuPy does when it is imported
    except OSError as error:
        text = f"CuPy cannot create its folder {kernel_cache()}: {error.strerror}"
        return Fault(text, "set CUPY_CACHE_DIR to a folder that can be written")
    missing = _missing()
    return Fault(missing, install_hint()) if missing else None


def _missing() -> str | None:
    """Return what CuPy does not find of CUDA; None if it finds all that it needs."""
    try:
        from cuda import pathfinder  # CuPy searches with it
    except ImportError:
        return "CuPy is older than version 14"
    try:
        pathfinder.load_nvidia_dynamic_lib("nvrtc")
    except pathfinder.DynamicLibNotFoundError:
        return "CuPy does not find NVRTC, the library that compiles kernels"
    if pathfinder.find_nvidia_header_directory("cudart") is None:
        return "CuPy does not find cuda_fp16.h, which its own kernels include"
    return None


def install_hint() -> str:
    """Return the command that installs CuPy, and what it needs of CUDA, for the driver.

    A suitable CuPy that is installed stays. Others go first: they have files of the same names.
    """
    packages = cupy_packages()
    cuda = 13 if driver_version() >= (13, 0) else 12
    if packages == ["cupy-cuda12x"]:  # later drivers are suitable for it, too
        cuda = 12
    install = f"pip install 'cupy-cuda{cuda}x>=14' 'cuda-toolkit[cudart,nvrtc]=={cuda}.*'"
    if packages in ([], [f"cupy-cuda{cuda}x"]):
        return install
    return f"pip uninstall --yes {' '.join(packages)} && {install}"


def kernel_cache() -> Path:
    """Return the folder in which CuPy keeps compiled kernels."""
    folder = os.environ.get("CUPY_CACHE_DIR") or Path("~", ".cupy", "kernel_cache")
    return Path(folder).expanduser()


def cupy_packages() -> list[str]:
    """Return the names of the installed packages of CuPy; there should be one."""
    if find_spec("cupy") is None:
        return []
    from importlib.metadata import distributions  # slow to import, and every command imports this

    return [name for name in _PACKAGES if any(distributions(name=name))]


def _cuda_of(package: str) -> int:
    """Return the version of CUDA that a package of CuPy is for; 0 if its name does not say it."""
    digits = re.search(r"\d+", package)
    return int(digits[0]) if digits else 0


def driver_version() -> tuple[int, int]:
    """Return the version of CUDA that the driver is for, such as (12, 8); (0, 0) without one."""
    driver = load_driver()
    version = ctypes.c_int()
    if driver is not None:
        driver.cuDriverGetVersion(ctypes.byref(version))
    return version.value // 1000, version.value % 1000 // 10


def capability(driver: ctypes.CDLL) -> tuple[int, int]:
    """Return the compute capability of the first device, such as (9, 0)."""
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(device), 0)
    driver.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
    return major.value, minor.value


def name() -> str:
    """Return the name of the first device; `problem` has returned None."""
    driver = load_driver()
    device = ctypes.c_int()
    text = ctypes.create_string_buffer(256)
    if driver is not None:
        driver.cuDeviceGet(ctypes.byref(device), 0)
        driver.cuDeviceGetName(text, len(text), device)
    return text.value.decode()


def load_driver() -> ctypes.CDLL | None:
    """Return the library of NVIDIA's driver, or None."""
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None
