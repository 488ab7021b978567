"""The examination of a machine: what it says of this one, and of others that are imagined."""

from pathlib import Path

import pytest

from gpt_cli import hub
from gpt_cli.checks import doctor
from gpt_cli.errors import ResourceError
from gpt_cli.hub import connection
from gpt_cli.ops import bindings
from gpt_cli.system import gpu, machine
from support.in_process import records_here, run_here
from support.loopback_hub import LoopbackHub, use_hub
from support.processes import posix, run_on_terminal


@pytest.fixture(autouse=True)
def no_hub(tmp_path, thread_variables, monkeypatch):
    use_hub("http://127.0.0.1:9", tmp_path / "cache", monkeypatch)


def finding(name):
    return next(found for found in doctor.examine() if found.name == name)


def test_a_line_has_a_status_a_fact_and_a_cure():
    findings = records_here("doctor", "--json")
    names = "gpt-cli numpy library threads memory gpu tiny cache terminal hub"
    assert " ".join(found["name"] for found in findings) == names
    assert {found["status"] for found in findings} <= {"ok", "note"}
    assert findings[-1]["cure"]
    lines = run_here("doctor")[0].decode().splitlines()
    assert lines[0].startswith("ok       gpt-cli ")
    assert any("; cure: " in line for line in lines)


def test_the_level_of_the_library_is_reported_with_the_others(level, monkeypatch):
    monkeypatch.delenv("GPT_CLI_OPS", raising=False)
    found = finding("library")
    assert (found.status, found.cure) == ("ok", None)
    assert found.found.startswith(f"computes at the level {level}")
    assert all(other in found.found for other in bindings.levels())


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("variable", "value", "name", "status", "says"),
    [
        ("GPT_CLI_OPS", "foo", "library", "problem", "must be native, numpy or cupy"),
        ("GPT_CLI_OPS", "numpy", "library", "note", ", but GPT_CLI_OPS=numpy is set"),
        ("GPT_CLI_OPS", "cupy", "library", "note", ", but GPT_CLI_OPS=cupy is set"),
        ("GPT_CLI_LEVEL", "abacus", "library", "problem", "GPT_CLI_LEVEL must be one of"),
        *(("GPT_CLI_THREADS", n, "threads", "problem", "") for n in ("x", "0", "-1", "257")),
    ],
)
def test_a_variable_that_every_command_refuses_is_a_problem(
    monkeypatch, variable, value, name, status, says
):
    monkeypatch.setenv(variable, value)
    found = finding(name)
    assert found.status == status
    assert says in found.found
    assert found.cure.startswith(f"unset {variable}")


def test_without_the_library_the_cure_is_to_compile_it(monkeypatch):
    monkeypatch.setattr(doctor, "native_library", lambda: None)
    found = finding("library")
    assert found.status == "note"
    assert found.found.startswith("not compiled at installation: NumPy computes")
    assert found.cure == "install a C compiler, then reinstall gpt2-cli"


def test_a_library_that_cannot_be_loaded_is_a_problem(monkeypatch):
    def fail():
        raise ImportError("invalid ELF header")

    monkeypatch.setattr(doctor, "native_library", lambda: Path("libkernels.so"))
    monkeypatch.setattr(bindings, "library", fail)
    out, error = run_here("doctor", code=5)
    assert b"problem  library   cannot be loaded: invalid ELF header; cure: " in out
    assert error == "gpt-cli: error: problems with library: see the cures\n"


def test_more_threads_than_cores_are_noted(monkeypatch):
    monkeypatch.setattr(machine, "cores", lambda: 1)
    monkeypatch.setenv("GPT_CLI_THREADS", "8")
    assert "8 threads; 1 of " in finding("threads").found
    assert finding("threads").cure.startswith("set threads to 1")


@pytest.mark.parametrize(("free", "status"), [(None, "note"), (5 << 20, "note"), (8 << 30, "ok")])
def test_little_memory_is_noted(free, status, monkeypatch):
    monkeypatch.setattr(machine, "free_memory", lambda: free)
    assert finding("memory").status == status


@pytest.mark.parametrize(
    ("problem", "found", "cure"),
    [
        ("the NVIDIA driver finds no GPU", "not used: the NVIDIA driver finds no GPU", None),
        ("CuPy is missing: pip install cupy", "not used: CuPy is missing", "pip install cupy"),
    ],
)
def test_without_a_gpu_the_reason_is_a_note(monkeypatch, problem, found, cure):
    monkeypatch.setattr(gpu, "problem", lambda: problem)
    assert finding("gpu") == doctor.Finding("gpu", "note", found, cure)


def test_a_fault_of_cupy_is_a_problem(monkeypatch):
    monkeypatch.setattr(gpu, "problem", lambda: None)
    monkeypatch.setattr(gpu, "fault", lambda: gpu.Fault("no NVRTC", "pip install it"))
    assert finding("gpu") == doctor.Finding("gpu", "problem", "no NVRTC", "pip install it")


def test_a_gpu_is_ok_if_it_computes(monkeypatch):
    def broken(device, dtype):
        raise ResourceError("the kernels melted")

    monkeypatch.setattr(gpu, "problem", lambda: None)
    monkeypatch.setattr(gpu, "fault", lambda: None)
    monkeypatch.setattr(doctor, "get_ops", broken)
    assert finding("gpu") == doctor.Finding("gpu", "problem", "the kernels melted")
    monkeypatch.setattr(doctor, "get_ops", lambda device, dtype: None)
    monkeypatch.setattr(gpu, "name", lambda: "NVIDIA Abacus")
    monkeypatch.setattr(gpu, "cupy_packages", lambda: ["cupy-cuda13x"])
    monkeypatch.setattr(doctor, "version", lambda name: "14.2.0")
    assert finding("gpu") == doctor.Finding("gpu", "ok", "NVIDIA Abacus with cupy-cuda13x 14.2.0")


def test_a_cache_that_cannot_be_written_is_a_problem(monkeypatch):
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    assert finding("cache").cure == "set HF_HOME to another place"


@pytest.mark.parametrize("fault", [None, "503", "stall"])
def test_the_hub_gets_one_request(fault, tmp_path, monkeypatch):
    with LoopbackHub(tmp_path / "hub") as server:
        use_hub(server.endpoint, tmp_path / "cache", monkeypatch)
        if fault:
            server.fail(fault)
        if fault == "stall":
            monkeypatch.setattr(connection, "_ANSWER", 0.5)
        found = finding("hub")
        assert found.status == ("note" if fault else "ok")
        assert server.endpoint in found.found
        assert len(server.requests) == 1


def test_offline_the_hub_gets_no_request(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "switched off" in hub.problem()


@posix
@pytest.mark.parametrize("columns", [40, 80])
def test_a_terminal_is_described_and_its_lines_are_wrapped_in_the_last_column(columns):
    code, shown = run_on_terminal("doctor", columns=columns, HF_HUB_OFFLINE="1")
    assert code == 0
    assert f"xterm, {columns} columns, fewer than 256 colours, utf-8" in " ".join(shown.split())
    lines = shown.split("\r\n")
    for line in lines:  # a path may be longer than the terminal is wide
        assert len(line) <= columns or len(line.split()) == 1
    if columns == 80:
        start = next(i for i, line in enumerate(lines) if line.startswith("note     hub "))
        assert lines[start].index("switched off") == 19
        for line in lines[start + 1 : -1]:
            assert line.startswith(" " * 19)
            assert line[19] != " "
