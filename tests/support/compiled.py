"""What tests have compiled is kept for their next run, in any checkout."""

import hashlib
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
FOLDER = _CACHE / "gpt-cli-tests"
_KEPT = 7 * 24 * 3600  # seconds since the last use


def made_once(key: object, suffix: str, make: Callable[[Path], None]) -> Path:
    """Return the file for a key, which `make` writes to a path if there is none.

    Processes that run at once make it once. The key has all that the content depends on: sources,
    options, the version of the compiler.
    """
    fcntl = pytest.importorskip("fcntl")  # not on Windows
    path = FOLDER / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}{suffix}"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _forget_old()
            part = path.with_suffix(".part")
            make(part)
            part.replace(path)
    path.touch()
    return path


def _forget_old() -> None:
    for path in FOLDER.iterdir():
        with suppress(FileNotFoundError):  # of another process, which has renamed it
            if path.stat().st_mtime < time.time() - _KEPT:
                path.unlink()
