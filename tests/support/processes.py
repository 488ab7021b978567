"""Run `gpt-cli` as a user does, in a pipe or on a terminal."""

import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

COMMAND = [sys.executable, "-P", "-m", "gpt_cli"]  # -P: do not import from the working folder
LIMIT = 60  # seconds that a process may take, on a busy machine
posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals and terminals")


class LimitedProcess(subprocess.Popen):
    """A process that is killed after a number of seconds, and if the test fails in its block.

    So the test does not wait for ever for its output or its end.

    Attributes:
        guard: the timer that kills it, which `cancel` stops.
    """

    def __init__(self, *arguments: Any, limit: float = LIMIT, **options: Any):
        super().__init__(*arguments, **options)
        self.guard = threading.Timer(limit, self.kill)
        self.guard.daemon = True
        self.guard.start()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind:
            self.kill()
        super().__exit__(kind, error, trace)
        self.guard.cancel()


def path_with_command(folder: Path, gpt_cli: Sequence[str] = COMMAND) -> str:
    """Make the scripts `gpt-cli` and `python` in a new folder; return a PATH with it first."""
    folder.mkdir()
    for name, command in (("gpt-cli", gpt_cli), ("python", [sys.executable])):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
    return os.pathsep.join([str(folder), os.environ["PATH"]])


def run_on_terminal(*arguments: str, columns: int = 300, **env: str) -> tuple[int, str]:
    """Run `gpt-cli` on a terminal; return its exit code and its output."""
    return on_terminal([*COMMAND, *arguments], columns, env)


def on_terminal(
    command: list[str], columns: int, env: dict[str, str], folder: Path | None = None
) -> tuple[int, str]:
    """Run any command on a terminal; return its exit code and its output."""
    import pty
    import termios

    inherited = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    process = LimitedProcess(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**inherited, "TERM": "xterm", **env},
        cwd=folder,
    )
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 65536):
            shown += piece
    except OSError:  # Linux raises it when the other end is closed
        pass
    os.close(ours)
    return process.wait(), shown.decode()


def is_quiet(errors: bytes) -> bool:
    """Return whether no traceback comes from the program.

    On a busy machine, a signal may come before its first line runs: then Python prints one.
    """
    return b"Traceback" not in errors or b"__main__.py" not in errors
