import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpt_cli.system import machine
from gpt_cli.system.machine import blas_threads, free_memory
from support.processes import posix

MEMINFO = Path("/proc/meminfo")


@pytest.fixture
def group(tmp_path, monkeypatch):
    """An empty folder in place of the container's."""
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(machine, "_OWN_GROUPS", tmp_path / "own")
    return tmp_path


@pytest.mark.skipif(not MEMINFO.exists(), reason="needs /proc")
def test_some_memory_is_free_and_not_more_than_there_is():
    lines = MEMINFO.read_text().splitlines()
    total = int(next(line.split()[1] for line in lines if line.startswith("MemTotal"))) * 1024
    free = free_memory()
    assert 10e6 < free <= total


STAT = "anon 46000000\nactive_file 500000\ninactive_file 2000000\n"
LIMIT, USAGE = "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"  # in older kernels


@pytest.mark.parametrize(
    ("files", "free"),
    [
        (
            {"memory.max": "50000000", "memory.current": "49000000", "memory.stat": STAT},
            3_500_000,
        ),
        ({LIMIT: "50000000", USAGE: "49000000", "memory/memory.stat": STAT}, 3_500_000),
        ({"memory.max": "5", "memory.current": "7"}, 0),
    ],
)
def test_the_limit_of_a_container_counts_less_what_gives_way(group, files, free):
    (group / "memory").mkdir()
    for name, content in files.items():
        (group / name).write_text(f"{content}\n")
    assert free_memory() == free


@pytest.mark.parametrize("limited", ["a", "a/b", "a/b/c"])
def test_the_groups_that_a_group_is_in_count_too(group, limited):
    (group / "own").write_text("1:cpu:/x\n0::/a/b/c\n")
    (group / "a/b/c").mkdir(parents=True)
    (group / limited / "memory.max").write_text("5000000\n")
    (group / limited / "memory.current").write_text("1000000\n")
    assert free_memory() == 4_000_000


def test_a_container_without_limit_leaves_what_the_machine_has(group):
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("49000000\n")
    assert [*machine._group_memory()] == []


@posix
@pytest.mark.skipif(not MEMINFO.exists(), reason="needs /proc")
def test_the_limit_of_the_process_counts():
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30));"
        "from gpt_cli.system.machine import free_memory; print(free_memory())"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    assert 2**28 < int(shown) < 2**30


@posix
def test_the_peak_is_that_of_this_process_and_stays():
    code = "from gpt_cli.system.machine import peak_memory; x = {}; del x; print(peak_memory())"

    def peak(*ones: str) -> int:
        command = [sys.executable, "-c", code.format(*ones)]
        return int(subprocess.run(command, capture_output=True, check=True).stdout)

    little, much = peak("0"), peak("b'1' * 300_000_000")
    assert 1e6 < little < 100e6
    assert 290e6 < much - little < 310e6


def test_the_peak_is_unknown_where_nobody_tells(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "_STATUS", tmp_path / "none")
    monkeypatch.setattr(sys, "platform", "win32")
    assert machine.peak_memory() is None


@pytest.mark.parametrize(
    ("openblas", "openmp", "threads"),
    [("1", "2", 1), ("", "1", 1), ("0", "1", 1), ("", "", 3), ("7", "1", 3), ("many", "2", 2)],
)
def test_threads_are_what_openblas_takes(openblas, openmp, threads, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 5}, raising=False)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", openblas)
    monkeypatch.setenv("OMP_NUM_THREADS", openmp)
    assert blas_threads() == threads


@pytest.mark.parametrize(
    ("own", "openmp", "number"),
    [("", "", 2), ("", "1", 1), ("5", "1", 5), ("1", "", 1), ("0", "", 2), ("many", "7", 2)],
)
def test_threads_are_the_cores_that_are_left_unless_a_variable_says_otherwise(
    group, monkeypatch, own, openmp, number
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 5}, raising=False)
    monkeypatch.setenv("GPT_CLI_THREADS", own)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "")
    monkeypatch.setenv("OMP_NUM_THREADS", openmp)
    (group / "cpu.max").write_text("200000 100000\n")
    assert machine.threads() == number


@pytest.mark.parametrize(
    ("limit", "number"),
    [("200000 100000", 2), ("150000 100000", 2), ("10000 100000", 1), ("max 100000", 3), ("x", 3)],
)
def test_the_share_of_a_group_limits_the_cores(group, monkeypatch, limit, number):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 5}, raising=False)
    assert machine.cores() == 3
    (group / "cpu.max").write_text(limit + "\n")
    assert machine.cores() == number


def test_it_is_known_without_numpy_whether_the_library_computes(monkeypatch, tmp_path):
    expected = machine.native_library() is not None
    assert machine.native_computes() == expected
    for content in (None, b"no library"):
        if content is not None:
            (tmp_path / "libkernels.so").write_bytes(content)
        monkeypatch.setattr(machine, "_NATIVE", tmp_path)
        assert not machine.native_computes()


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (548_105_171, "548 MB"), (999_999, "1 MB"), (6.4e9, "6.4 GB")],
)
def test_sizes_are_for_people(size, text):
    assert machine.format_size(size) == text
