"""Find out whether an NVIDIA GPU can be used: the driver, a device, CuPy."""

import ctypes
import sys
from importlib.util import find_spec


def problem() -> str | None:
    """Return why this machine cannot compute on an NVIDIA GPU; None if no reason is known.

    Ask the driver. Do not import CuPy, which takes a second.
    """
    driver, count = load_driver(), ctypes.c_int()
    if driver is None:
        return "no NVIDIA driver is installed"
    if find_spec("cupy") is None:
        return f"CuPy is not installed: {install_hint()}"
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "the NVIDIA driver finds no GPU"
    return None


def install_hint() -> str:
    """Return the command that installs CuPy with CUDA libraries for the installed driver."""
    driver, version = load_driver(), ctypes.c_int()
    if driver is not None:
        driver.cuDriverGetVersion(ctypes.byref(version))
    return f"pip install 'cupy-cuda{13 if version.value >= 13_000 else 12}x[ctk]'"


def load_driver() -> ctypes.CDLL | None:
    """Return the library of NVIDIA's driver, or None."""
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None
