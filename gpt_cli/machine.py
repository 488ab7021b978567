"""The memory and threads of this machine, and whether it can use the compiled library."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from gpt_cli.errors import ResourceError

_NATIVE = Path(__file__).parent / "ops" / "native"
_ENDINGS = (".so", ".dylib", ".dll")  # of a library
MOST_THREADS = 256  # of the compiled library

_CGROUP = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_STATUS = Path("/proc/self/status")


def free_memory() -> int | None:
    """Bytes that can be taken without swapping or being killed; None where nobody tells.

    The least of what Linux has available, of what the limits of the process's control groups (a
    container's) leave, and of what its own (`ulimit -v`) leaves.
    """
    known = [bytes for bytes in (_available(), _cgroup(), addresses()) if bytes is not None]
    return max(0, min(known)) if known else None


def format_size(size: float) -> str:
    """Return a number of bytes for people: `548 MB`."""
    for unit in ("B", "kB", "MB"):
        if size < 999.5:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def check_room(what: str, needed: int, free: int | None, cure: str) -> None:
    """Raise ResourceError if it is known that fewer bytes are free than `what` needs.

    Args:
        what: ends with a word such as "takes".
        needed: bytes.
        free: bytes; None where nobody tells.
        cure: what a user can do.
    """
    if free is not None and needed > free:
        raise ResourceError(
            f"{what} {needed / 1e6:,.0f} MB of memory, and {free / 1e6:,.0f} MB are free: {cure}"
        )


def addresses() -> int | None:
    """Bytes of address space that the process's own limit (`ulimit -v`) leaves; None without one.

    Libraries reserve far more of it than they use.
    """
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most == resource.RLIM_INFINITY:
        return None
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        pages = 0  # nobody tells how much is taken
    return most - pages * os.sysconf("SC_PAGE_SIZE")


def peak_memory() -> int | None:
    """The most bytes that this process has had in memory so far; None where nobody tells."""
    # Linux counts into ru_maxrss what the program that started this one had in memory.
    own = _fields(_STATUS).get("VmHWM:")
    if own is not None:
        return own * 1024
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def cores() -> int:
    """How many cores this process may use: where it may run, or its group's share (cgroup v2)."""
    known = [_affinity()]
    for group in _groups():
        try:
            quota, period = map(int, (group / "cpu.max").read_text().split())
        except (OSError, ValueError):  # no such group, or its limit is "max"
            continue
        known.append(max(1, round(quota / period)))
    return min(known)


def threads() -> int:
    """Return how many threads compute by default.

    GPT_CLI_THREADS, else as many as this process may use cores, and as OPENBLAS_NUM_THREADS or
    OMP_NUM_THREADS allows.
    """
    given = os.environ.get("GPT_CLI_THREADS", "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    return min(cores(), blas_threads())


def blas_threads() -> int:
    """How many threads OpenBLAS, which NumPy comes with, takes for a matrix product."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):  # in its order
        if (given := os.environ.get(name, "")).isdecimal() and int(given) > 0:
            return min(int(given), _affinity())
    return _affinity()


def native_library() -> Path | None:
    """Return the file of the compiled library, or None if installing gpt-cli compiled none."""
    return next((path for path in _NATIVE.glob("libkernels.*") if path.suffix in _ENDINGS), None)


def native_computes() -> bool:
    """Return whether the compiled library can be used here; NumPy is not needed to know it."""
    path = native_library()
    if path is None:
        return False
    import ctypes

    try:
        library = ctypes.CDLL(str(path))
        return any(library.gpt2_has_level(level) for level in (b"avx2", b"neon"))
    except (OSError, AttributeError):
        return False


def _affinity() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS and Windows
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _available() -> int | None:
    fields = _fields(Path("/proc/meminfo"))
    return fields["MemAvailable:"] * 1024 if "MemAvailable:" in fields else None


def _cgroup() -> int | None:
    left = [
        room
        for group in _groups()
        for limit, usage in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        )
        if (room := _room(group / limit, group / usage)) is not None
    ]
    return min(left, default=None)


def _groups() -> Iterator[Path]:
    """The folders of the process's control groups, and of those that they are in."""
    yield from (_CGROUP, _CGROUP / "memory")
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            group = _CGROUP / controllers / path.lstrip("/")
            yield group
            yield from group.parents[: len(Path(path).parts)]


def _room(limit: Path, usage: Path) -> int | None:
    """What a group may still take, None if it has no limit."""
    try:
        most, used = int(limit.read_text()), int(usage.read_text())
    except (OSError, ValueError):  # no such group, or its limit is "max"
        return None
    # The pages of files count as used, and give way.
    stat = _fields(limit.with_name("memory.stat"))
    return most - used + stat.get("inactive_file", 0) + stat.get("active_file", 0)


def _fields(path: Path) -> dict[str, int]:
    """The numbers of a file of lines `name number ...`; none where it cannot be read."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
