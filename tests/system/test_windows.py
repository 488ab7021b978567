"""Commands do on Windows what they do here, as far as its rules can be imitated on Linux."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gpt_cli
from gpt_cli.jobs import storage
from gpt_cli.system import machine
from support.in_process import finished

TESTS = Path(__file__).parents[1]
PACKAGE = Path(gpt_cli.__file__).parent
ROWS = '{"prompt": "Once upon a time"}\n{"prompt": "The moon was"}\n'
GENERATE = ("generate", "-m", "tiny", "-n", "12", "-s", "1")
JOB = ("-m", "tiny", "rows.jsonl")


def commands(sep):
    """Return variables and commands that write to the folder `out`."""
    return [
        ({}, [*GENERATE, "Once upon a time"]),
        ({"GPT_CLI_OPS": "numpy"}, [*GENERATE, "--temperature", "0", "Once upon a time"]),
        ({"GPT_CLI_OPS": ""}, ["compress", "-m", "tiny", "rows.jsonl", "-o", "out/compressed"]),
        ({}, ["score", *JOB, "-o", f"out{sep}a.jsonl"]),
        ({}, ["score", *JOB, "-o", f"out{sep}a.csv"]),
        ({}, ["activations", *JOB, "--hook", "ln_final.hook_normalized", "-o", f"out{sep}a.npz"]),
        ({}, ["quantize", "tiny", "-o", "out/folder"]),
        ({}, ["show", "surprise", "-m", "tiny", "The moon"]),
        ({}, [*GENERATE, "--file", "月.txt"]),  # an error
    ]


def files():
    return {str(path): path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_commands_write_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(ROWS)
    Path("out").mkdir()
    processes = [finished(*arguments, **variables) for variables, arguments in commands("/")]
    expected = [[run.returncode, run.stdout.decode()] for run in processes]
    assert [code for code, _ in expected] == [*[0] * 8, 2]
    written = files()
    Path("out").rename("here")
    Path("out").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "support.windows", json.dumps(commands("\\"))],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(PACKAGE.parent)])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert [[code, out] for code, out, _ in results] == expected, results
    assert results[-1][2] == processes[-1].stderr.decode()
    assert files() == written


def test_text_is_written_as_bytes_and_read_as_utf_8():
    r"""In text mode, Windows would write "\r\n", and read the code page of the system."""
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text("utf-8")
        assert not re.search(r"(?<!super\(\))\.write_text\(|\.read_text\(\)", text), path
        assert not re.search(r'\.open\(("[rwax+]+t?"\)|\))', text), path


def test_an_error_of_a_socket_has_the_text_of_the_system(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr("ctypes.FormatError", lambda code: f"text {code}", raising=False)
    assert machine.error_text(10048) == "text 10048"


def test_a_name_with_backslashes_has_folders(monkeypatch):
    monkeypatch.setattr(os, "sep", "\\")
    assert storage.with_slashes(r"C:\models\a.csv") == "C:/models/a.csv"
    assert storage.with_slashes(r"s3://bucket/a\b.csv") == r"s3://bucket/a\b.csv"
