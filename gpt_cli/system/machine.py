"""Memory and threads of this machine."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from gpt_cli.errors import ResourceError

if sys.platform != "win32":
    import resource

T = TypeVar("T")

MOST_THREADS = 256  # of the compiled library
_MOST_READERS = 4

_CGROUP = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
# The limit and the use of a group's memory, in cgroup v2 and v1.
_MEMORY_FILES = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
_STATUS = Path("/proc/self/status")

_starting = threading.Lock()  # of threads: the size of their stacks is global


def within(seconds: float, call: Callable[[], T], stack: int = 0) -> T:
    """Return what a function returns, or raise what it raises, in a thread with a timeout.

    After TimeoutError, the call goes on, but the process may end before it. `stack` is the size of
    the thread's stack in bytes; 0 is the system's default.
    """
    from concurrent.futures import Future  # takes a millisecond that few commands need

    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    with _starting:
        before = threading.stack_size(stack)
        try:
            threading.Thread(target=run, daemon=True).start()
        finally:
            threading.stack_size(before)
    return answer.result(seconds)


def free_memory() -> int | None:
    """Return the bytes that can be allocated without swapping or being killed; None if unknown.

    It is the minimum of Linux's available memory and of what the limits of the control groups (the
    container) and of the process (`ulimit -v`) leave.
    """
    available = _numbers(Path("/proc/meminfo")).get("MemAvailable:")
    known = [size for size in (*_group_memory(), available, addresses()) if size is not None]
    return max(0, min(known)) if known else None


def error_text(code: int) -> str:
    """Return the system's text for the code of an error, also of a socket on Windows."""
    if sys.platform == "win32":
        from ctypes import FormatError

        return FormatError(code)
    return os.strerror(code)


def format_size(size: float) -> str:
    """Return a number of bytes for people: `548 MB`."""
    for unit in ("B", "kB", "MB"):
        if size < 999.5:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def check_room(what: str, needed: int, free: int | None, cure: str) -> None:
    """Raise ResourceError if fewer bytes are free (None: unknown) than needed.

    The message begins with `what`, its subject and verb, such as "the weights of tiny take".
    """
    if free is not None and needed > free:
        raise ResourceError(
            f"{what} {needed / 1e6:,.0f} MB of memory, and {free / 1e6:,.0f} MB are free: {cure}"
        )


def addresses() -> int | None:
    """Return the bytes of address space that `ulimit -v` leaves; None without a limit.

    Libraries reserve far more address space than they use.
    """
    if sys.platform == "win32":
        return None
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most == resource.RLIM_INFINITY:
        return None
    pages = _integers(Path("/proc/self/statm"))  # of all memory first; [] if unknown
    used = pages[0] * os.sysconf("SC_PAGE_SIZE") if pages else 0
    return most - used


def peak_memory() -> int | None:
    """Return the peak memory of this process so far, in bytes; None if unknown."""
    # On Linux, ru_maxrss includes the memory of the program that started this one.
    peak = _numbers(_STATUS).get("VmHWM:")
    if peak is not None:
        return peak
    if sys.platform == "win32":
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def cores() -> int:
    """Return how many cores this process may use, by its affinity and its group (cgroup v2)."""
    limits = [_integers(group / "cpu.max") for group in _groups()]
    shares = [max(1, round(quota / period)) for quota, period in filter(None, limits)]
    return min([_affinity(), *shares])


def readers() -> int:
    """Return how many threads should read files: few, because copying limits the rate."""
    return min(cores(), _MOST_READERS)


def threads() -> int:
    """Return the default number of threads.

    It is GPT_CLI_THREADS, or the usable cores up to OPENBLAS_NUM_THREADS or OMP_NUM_THREADS.
    """
    return _first_number("GPT_CLI_THREADS") or min(cores(), blas_threads())


def blas_threads() -> int:
    """Return how many threads NumPy's OpenBLAS uses for a matrix product."""
    most = _affinity()
    return min(_first_number("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS") or most, most)


def _first_number(*variables: str) -> int | None:
    """Return the value of the first environment variable that is a number above 0."""
    values = [os.environ.get(name, "") for name in variables]
    return next((int(value) for value in values if value.isdecimal() and int(value)), None)


def _affinity() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS and Windows
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _group_memory() -> Iterator[int]:
    """Yield the bytes that the control groups with a limit may still allocate."""
    for group in _groups():
        for limit, usage in _MEMORY_FILES:
            most = _integers(group / limit)
            used = _integers(group / usage)
            if most and used:
                # Cached pages of files count as used, but can be reclaimed.
                stat = _numbers(group / "memory.stat")
                yield most[0] - used[0] + stat.get("inactive_file", 0) + stat.get("active_file", 0)


def _groups() -> Iterator[Path]:
    """Yield the folders of the process's control groups and of their parents."""
    yield from (_CGROUP, _CGROUP / "memory")
    for line in _text(_OWN_GROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            group = _CGROUP / controllers / path.lstrip("/")
            yield group
            yield from group.parents[: len(Path(path).parts)]


def _integers(path: Path) -> list[int]:
    """Return the integers in a file; [] if there is none, or a limit is "max"."""
    words = _text(path).split()
    return [int(word) for word in words] if all(map(str.isdecimal, words)) else []


def _numbers(path: Path) -> dict[str, int]:
    """Return the numbers in a file of lines `name number [kB]`, in bytes."""
    lines = [line.split() for line in _text(path).splitlines()]
    return {
        words[0]: int(words[1]) * (1024 if words[2:] == ["kB"] else 1)
        for words in lines
        if len(words) > 1 and words[1].isdecimal()
    }


def _text(path: Path) -> str:
    """Return the text of a file; "" if it cannot be read."""
    with suppress(OSError):
        return path.read_text("utf-8")
    return ""
