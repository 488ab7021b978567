"""A program in C gets from the library what Python gets; `make test-windows` runs it elsewhere."""

import shutil
import subprocess

import pytest

from gpt_cli.ops import bindings
from gpt_cli.system.library import native_library
from support.compiled import made_once
from support.processes import posix
from tools import test_systems as systems
from tools.hashes import hashes


@posix
@pytest.mark.usefixtures("library")
@pytest.mark.skipif(shutil.which(systems.CC[0]) is None, reason="needs a C compiler")
def test_the_driver_prints_the_hashes_of_python():
    headers = sorted(systems.SOURCES.glob("*.h"))
    sources = [path.read_bytes() for path in (systems.DRIVER, *headers)]
    driver = made_once(
        (systems.CC, sources), "", lambda path: systems.compile_driver(systems.CC, path, "-ldl")
    )
    command = [str(driver), str(native_library())]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    levels = bindings.levels()
    assert systems.difference(output, levels) is None
    lines = output.splitlines()
    level, threads, _, name = lines[-1].split(" ", 3)
    lines[-1] = f"{level} {threads} 00000000 {name}"
    problem = f"{level}, {threads} threads: 1 of {len(hashes())}: {name}"
    assert systems.difference("\n".join(lines), levels) == problem
    assert "it has the levels" in systems.difference(output, [*levels, "sse2"])
