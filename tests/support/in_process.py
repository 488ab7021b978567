"""Run `gpt-cli` in the process of the tests, which saves the start of Python."""

import functools
import io
import json
import logging
import os
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest

from gpt_cli.cli import app

# Built once, as that takes as long as many commands do, but anew if a test replaces a part of it.
_application = functools.cache(lambda name, _add_command, build=app.application: build(name))
_get_command = functools.cache(app.get_command)


class Stream(io.TextIOWrapper):
    """A standard stream in memory, in a pipe or on a terminal."""

    def __init__(self, buffer: io.BytesIO | io.BufferedReader, terminal: bool):
        super().__init__(buffer, "utf-8", "backslashreplace", newline="")
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def finished(
    *arguments: object, input: bytes = b"", stdin: Any = None, terminal: bool = False, **env: str
) -> "subprocess.CompletedProcess[bytes]":
    """Run a command; return its exit code, standard output and error, together on a terminal."""
    out = io.BytesIO()
    buffers = out, out if terminal else io.BytesIO()
    stdout, stderr = (Stream(buffer, terminal) for buffer in buffers)
    stdin = stdin or Stream(io.BufferedReader(io.BytesIO(input)), terminal)
    with mock.patch.dict(os.environ, env), pytest.MonkeyPatch.context() as patch:
        for name, stream in {"stdin": stdin, "stdout": stdout, "stderr": stderr}.items():
            patch.setattr(sys, name, stream)
        patch.setattr(app, "application", lambda name: _application(name, app.add_command))
        patch.setattr(app, "get_command", _get_command)
        code = app.run([str(argument) for argument in arguments])
        stdout.flush()
        stderr.flush()
    # --verbose and --quiet have changed them.
    for name in ("gpt_cli", "gpt_cli.folder", "gpt_cli.gpt2", "gpt_cli.texts"):
        logging.getLogger(name).setLevel(logging.NOTSET)
    written = stdout.buffer.getvalue(), stderr.buffer.getvalue()
    return subprocess.CompletedProcess(arguments, code, *written)


def terminal_here(*arguments: object, columns: int = 300, **env: str) -> tuple[int, str]:
    """Run a command as on a terminal; return its exit code and its output."""
    env = {"TERM": "xterm", "COLUMNS": str(columns)} | env
    process = finished(*arguments, terminal=True, **env)
    return process.returncode, process.stdout.decode().replace("\n", "\r\n")


def run_here(*arguments: object, code: int = 0, **options: Any) -> tuple[bytes, str]:
    """Run a command and check its exit code; return standard output and error."""
    process = finished(*arguments, **options)
    errors = process.stderr.decode()
    assert process.returncode == code, errors
    return process.stdout, errors


def records_here(*arguments: object, **options: Any) -> list[dict[str, Any]]:
    """Run a command that prints JSON Lines and nothing else; return their objects."""
    out, errors = run_here(*arguments, **options)
    assert errors == ""
    return [json.loads(line) for line in out.decode().split("\n")[:-1]]


def refusal(*arguments: object, code: int = 2, **options: Any) -> str:
    """Run a command that must fail without a result; return its one line of error."""
    out, errors = run_here(*arguments, code=code, **options)
    assert out == b""
    assert errors.count("\n") == 1
    assert errors.startswith("gpt-cli: error: ")
    return errors
