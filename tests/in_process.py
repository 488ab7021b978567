"""`gpt-cli` in the process of the tests: each command saves the time to start Python."""

import io
import json
import os
import sys
from typing import Any
from unittest import mock

import pytest

from gpt_cli.cli import app


def run_here(
    *arguments: object, input: bytes = b"", code: int = 0, **env: str
) -> tuple[bytes, str]:
    """Run a command as in a pipe; check its exit code; return standard output and error."""
    stdin, stdout, stderr = (
        io.TextIOWrapper(io.BytesIO(data), "utf-8", "backslashreplace", newline="")
        for data in (input, b"", b"")
    )
    with mock.patch.dict(os.environ, env), pytest.MonkeyPatch.context() as patch:
        for name, stream in {"stdin": stdin, "stdout": stdout, "stderr": stderr}.items():
            patch.setattr(sys, name, stream)
        found = app.run([str(argument) for argument in arguments])
        stdout.flush()
        stderr.flush()
    out, errors = stdout.buffer.getvalue(), stderr.buffer.getvalue().decode()
    assert found == code, errors
    return out, errors


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
