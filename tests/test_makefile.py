"""The environments of the Makefile."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VERSION = ".".join(map(str, sys.version_info[:2]))

pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="needs make")


@pytest.fixture
def make(tmp_path):
    """Return a function that runs make in a folder without environments."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "gpt_cli" / "ops").mkdir(parents=True)
    for name in ("hatch_build.py", "gpt_cli/ops/constants.inc"):
        (tmp_path / name).touch()
    outer = ("PYTHON", "VENV", "PIP_CONSTRAINT", "MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL")
    variables = {name: value for name, value in os.environ.items() if name not in outer}

    def run(*arguments):
        command = ["make", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (["test"], ".venv"),
        (["test", f"PYTHON={sys.executable}"], f".venv-{VERSION}"),
        (["test-oldest", f"PYTHON={sys.executable}"], ".venv-oldest"),
    ],
)
def test_each_python_has_its_own_environment(make, arguments, environment):
    commands = make("--dry-run", *arguments)
    assert f" -m venv {environment}\n" in commands
    assert set(re.findall(r"(?<!/)\.venv[^/\s]*", commands)) == {environment}


def test_the_oldest_dependencies_are_the_lower_bounds(make, tmp_path):
    make("build/oldest.txt", f"PYTHON={sys.executable}")
    pinned = dict(line.split("==") for line in (tmp_path / "build/oldest.txt").read_text().split())
    bounds = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert [f"{name}>={version}" for name, version in pinned.items()] == [
        bound.split(",")[0] for bound in bounds
    ]
