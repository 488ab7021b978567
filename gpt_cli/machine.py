"""What this machine has left: how much memory a computation may take."""

import contextlib
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def free_memory() -> int | None:
    """Bytes that can be taken without swapping or being killed; None where nobody tells.

    The least of what Linux has available, what the limit of the container (cgroup) leaves, and
    what the limit of the process (`ulimit -v`) leaves.
    """
    known = [bytes for bytes in (_available(), _cgroup(), _limit()) if bytes is not None]
    return max(0, min(known)) if known else None


def _available() -> int | None:
    fields = _fields(Path("/proc/meminfo"))
    return fields["MemAvailable:"] * 1024 if "MemAvailable:" in fields else None


def _cgroup() -> int | None:
    for limit, usage, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError):  # no such group, or its limit is "max"
            most, used = (int((_CGROUP / name).read_text()) for name in (limit, usage))
            # Cached files count as used, and give way.
            reclaimable = _fields((_CGROUP / usage).with_name("memory.stat")).get(cache, 0)
            return most - used + reclaimable
    return None


def _limit() -> int | None:
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
        return None
    return most - pages * os.sysconf("SC_PAGE_SIZE")


def _fields(path: Path) -> dict[str, int]:
    """The numbers of a file of lines `name number ...`; none where it cannot be read."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
