"""`gpt-cli` as a user runs it: a process of its own, in a pipe or on a terminal."""

import os
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-m", "gpt_cli"]
posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals and terminals")


def run_on_terminal(*arguments: str, **env: str) -> tuple[int, str]:
    """Run a command; return its exit code and all that a wide terminal got from it."""
    import pty
    import termios

    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 300))
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", **env},
    )
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 65536):
            shown += piece
    except OSError:  # Linux says so when the other end is closed
        pass
    os.close(ours)
    return process.wait(), shown.decode()
