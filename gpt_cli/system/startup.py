"""Prepare the process before NumPy is imported."""

import os

from gpt_cli.errors import ResourceError
from gpt_cli.system.library import native_computes
from gpt_cli.system.machine import addresses, blas_threads, cores

# Our variable, and the variables of the BLAS libraries that NumPy may be built with.
THREAD_VARIABLES = (
    "GPT_CLI_THREADS",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)

# Bytes of address space to import NumPy and load a small model: measured, with a margin.
_TO_START = 480 << 20
_PER_THREAD = 40 << 20
_MOST_THREADS = 64  # of the OpenBLAS in NumPy's wheels


def prepare(threads: int | None) -> None:
    """Set the number of threads and check the address space, before NumPy is imported.

    Unless a variable sets it, the number is how many cores the process may use. The BLAS libraries
    do not know that in a container. If the compiled library computes, NumPy gets only one thread:
    to start more takes a fifth of the time of its import.

    ResourceError if the address space is too small: OpenBLAS would end the process.
    """
    if threads is None and not any(name in os.environ for name in THREAD_VARIABLES):
        threads = cores()
    if threads is not None:
        numpy_computes = not native_computes() or os.environ.get("GPT_CLI_OPS") == "numpy"
        numpy_threads = threads if numpy_computes else 1
        os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(numpy_threads)))
        os.environ["GPT_CLI_THREADS"] = str(threads)
    left = addresses()
    needed = _TO_START + min(blas_threads(), _MOST_THREADS) * _PER_THREAD
    if left is not None and left < needed:
        raise ResourceError(
            f"{needed >> 20} MiB of address space are needed to start, and a limit leaves "
            f"{left >> 20}: raise it (ulimit -v), or set fewer threads"
        )
