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
    """Return an empty folder that replaces that of the container's group."""
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(machine, "_OWN_GROUPS", tmp_path / "own")
    return tmp_path


@pytest.mark.skipif(not MEMINFO.exists(), reason="needs /proc")
def test_some_memory_is_free_and_not_more_than_the_machine_has():
    assert 10e6 < free_memory() <= machine._numbers(MEMINFO)["MemTotal:"]


STAT = "anon 46000000\nactive_file 500000\ninactive_file 2000000\n"
LIMIT, USAGE = "memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"  # in older kernels


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"memory.max": "50000000", "memory.current": "49000000", "memory.stat": STAT}, 3_500_000),
        ({LIMIT: "50000000", USAGE: "49000000", "memory/memory.stat": STAT}, 3_500_000),
        ({"memory.max": "5", "memory.current": "7"}, 0),
    ],
)
def test_the_limit_of_a_container_leaves_pages_that_can_be_reclaimed(group, files, free):
    (group / "memory").mkdir()
    for name, content in files.items():
        (group / name).write_text(f"{content}\n")
    assert free_memory() == free


@pytest.mark.parametrize("limited", ["a", "a/b", "a/b/c"])
def test_the_limits_of_parent_groups_count(group, limited):
    (group / "own").write_text("1:cpu:/x\n0::/a/b/c\n")
    (group / "a/b/c").mkdir(parents=True)
    (group / limited / "memory.max").write_text("5000000\n")
    (group / limited / "memory.current").write_text("1000000\n")
    assert free_memory() == 4_000_000


def test_a_group_without_a_limit_does_not_count(group):
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("49000000\n")
    assert [*machine._group_memory()] == []


def in_a_process(code: str) -> int:
    """Return the number that Python code prints."""
    command = [sys.executable, "-c", f"from gpt_cli.system import machine; {code}"]
    return int(subprocess.run(command, capture_output=True, check=True).stdout)


@posix
@pytest.mark.skipif(not MEMINFO.exists(), reason="needs /proc")
def test_the_limit_of_the_process_counts():
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))"
    assert 2**28 < in_a_process(f"{limit}; print(machine.free_memory())") < 2**30


@posix
def test_the_peak_is_that_of_this_process_and_stays():
    little, much = (
        in_a_process(f"x = {x}; del x; print(machine.peak_memory())") for x in (0, "b'1' * 10**8")
    )
    assert 1e6 < little < 100e6
    assert 95e6 < much - little < 105e6


def test_the_peak_may_be_unknown(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "_STATUS", tmp_path / "none")
    monkeypatch.setattr(sys, "platform", "win32")
    assert machine.peak_memory() is None


@pytest.mark.parametrize(
    ("openblas", "openmp", "threads"),
    [("1", "2", 1), ("", "1", 1), ("0", "1", 1), ("", "", 3), ("7", "1", 3), ("many", "2", 2)],
)
def test_blas_threads_are_those_of_openblas(openblas, openmp, threads, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 5}, raising=False)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", openblas)
    monkeypatch.setenv("OMP_NUM_THREADS", openmp)
    assert blas_threads() == threads


@pytest.mark.parametrize(
    ("own", "openmp", "number"),
    [("", "", 2), ("", "1", 1), ("5", "1", 5), ("1", "", 1), ("0", "", 2), ("many", "7", 2)],
)
def test_threads_are_the_usable_cores_unless_a_variable_says_otherwise(
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


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (548_105_171, "548 MB"), (999_999, "1 MB"), (6.4e9, "6.4 GB")],
)
def test_sizes_have_a_readable_unit(size, text):
    assert machine.format_size(size) == text
