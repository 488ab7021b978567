"""Run `gpt-cli` as a user does, in a pipe or on a terminal, or in the process of the tests."""

import io
import os
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from gpt_cli.cli import app

COMMAND = [sys.executable, "-P", "-m", "gpt_cli"]  # -P: as the script, not from this folder
WITHOUT_LIBRARY = [  # the same where installing compiled none
    *COMMAND[:2],
    "-c",
    "import gpt_cli.ops; gpt_cli.ops.native_library = lambda: None;"
    "from gpt_cli.__main__ import main; main()",
]
posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals and terminals")


def run_here(
    *arguments: object, input: bytes = b"", **env: str
) -> "subprocess.CompletedProcess[bytes]":
    """Run `gpt-cli` in this process, which takes less time than a process of its own."""
    stdin, stdout, stderr = (
        io.TextIOWrapper(io.BytesIO(data), "utf-8", "backslashreplace", newline="\n")
        for data in (input, b"", b"")
    )
    streams = mock.patch.multiple(sys, stdin=stdin, stdout=stdout, stderr=stderr)
    with mock.patch.dict(os.environ, env), streams:
        code = app.run(list(map(str, arguments)))
    stderr.flush()
    written = stdout.buffer.getvalue(), stderr.buffer.getvalue()
    return subprocess.CompletedProcess(arguments, code, *written)


def path_with_command(folder: Path) -> str:
    """Make the script `gpt-cli` in a new folder; return a PATH on which a shell finds it."""
    script = folder / "gpt-cli"
    folder.mkdir()
    script.write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    return os.pathsep.join([str(folder), os.environ["PATH"]])


def run_on_terminal(*arguments: str, columns: int = 300, **env: str) -> tuple[int, str]:
    """Run `gpt-cli`; return its exit code and all that a terminal so wide got from it."""
    return on_terminal([*COMMAND, *arguments], columns, env)


def on_terminal(
    command: list[str], columns: int, env: dict[str, str], folder: Path | None = None
) -> tuple[int, str]:
    """Run any command; return its exit code and all that a terminal so wide got from it."""
    import pty
    import termios

    inherited = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    process = subprocess.Popen(
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
    except OSError:  # Linux says so when the other end is closed
        pass
    os.close(ours)
    return process.wait(), shown.decode()
