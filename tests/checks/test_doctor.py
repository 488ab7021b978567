"""The examination of a machine: what it says of this one, and of others that are imagined."""

import json
from pathlib import Path

import pytest

from gpt_cli import hub
from gpt_cli.checks import doctor
from gpt_cli.cli import app
from gpt_cli.ops import bindings
from gpt_cli.system import gpu, machine
from support.loopback_hub import LoopbackHub, use_hub
from support.processes import posix, run_on_terminal

NAMES = [
    "gpt-cli",
    "numpy",
    "library",
    "threads",
    "memory",
    "gpu",
    "tiny",
    "cache",
    "terminal",
    "hub",
]


@pytest.fixture(autouse=True)
def no_hub(tmp_path, thread_variables, monkeypatch):
    use_hub("http://127.0.0.1:9", tmp_path / "cache", monkeypatch)


def finding(name):
    return next(found for found in doctor.examine() if found.name == name)


def test_each_line_says_how_it_is_and_what_would_help(capfd):
    assert app.run(["doctor", "--json"]) == 0
    findings = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [found["name"] for found in findings] == NAMES
    assert {found["status"] for found in findings} <= {"ok", "note"}
    assert all(found["cure"] for found in findings if found["name"] == "hub")
    assert app.run(["doctor"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("ok       gpt-cli ")
    assert any("; cure: " in line for line in lines)


@pytest.mark.usefixtures("library")
def test_the_level_at_which_the_library_computes_is_told(monkeypatch):
    monkeypatch.delenv("GPT_CLI_OPS", raising=False)
    highest, *lower = bindings.levels()
    found = finding("library")
    assert (found.status, found.cure) == ("ok", None)
    assert found.found.startswith(f"computes at the level {highest}")
    assert all(level in found.found for level in lower)


def test_a_level_that_is_lower_than_the_processors_is_told(level, monkeypatch):
    monkeypatch.delenv("GPT_CLI_OPS", raising=False)
    found = finding("library")
    assert found.status == "ok"
    assert found.found.startswith(f"computes at the level {level}")


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("variable", "value", "name", "status", "says"),
    [
        ("GPT_CLI_OPS", "foo", "library", "problem", "must be native or numpy"),
        ("GPT_CLI_OPS", "numpy", "library", "note", ", but GPT_CLI_OPS=numpy is set"),
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


def test_without_the_library_it_is_said_how_to_get_it(monkeypatch):
    monkeypatch.setattr(doctor, "native_library", lambda: None)
    found = finding("library")
    assert found.status == "note"
    assert found.found.startswith("not compiled at installation: NumPy computes")
    assert found.cure == "install a C compiler, then reinstall gpt2-cli"


def test_a_library_that_cannot_be_loaded_is_a_problem(monkeypatch, capfd):
    def fail():
        raise ImportError("invalid ELF header")

    monkeypatch.setattr(doctor, "native_library", lambda: Path("libkernels.so"))
    monkeypatch.setattr(bindings, "library", fail)
    assert app.run(["doctor"]) == 5
    out, err = capfd.readouterr()
    assert "problem  library   cannot be loaded: invalid ELF header; cure: " in out
    assert err == "gpt-cli: error: problems with library: see the cures\n"


def test_more_threads_than_cores_are_noted(monkeypatch):
    monkeypatch.setattr(machine, "cores", lambda: 1)
    monkeypatch.setenv("GPT_CLI_THREADS", "8")
    assert "number: 8" in finding("threads").found
    assert finding("threads").cure.startswith("set threads to 1")


@pytest.mark.parametrize(("free", "status"), [(None, "note"), (5 << 20, "note"), (8 << 30, "ok")])
def test_little_memory_is_noted(free, status, monkeypatch):
    monkeypatch.setattr(machine, "free_memory", lambda: free)
    assert finding("memory").status == status


def test_two_packages_of_cupy_are_a_problem(monkeypatch):
    monkeypatch.setattr(doctor, "distributions", lambda name: [name] if name != "cupy" else [])
    found = finding("gpu")
    assert found.status == "problem"
    assert found.cure == "pip uninstall cupy-cuda12x"


@pytest.mark.parametrize("driver", [None, "one"])
def test_the_line_for_pip_is_given_where_there_is_a_driver(driver, monkeypatch):
    monkeypatch.setattr(gpu, "problem", lambda: "CuPy is not installed")
    monkeypatch.setattr(gpu, "load_driver", lambda: driver)
    monkeypatch.setattr(gpu, "install_hint", lambda: "pip install cupy")
    found = finding("gpu")
    assert found.status == "note"
    assert found.cure == (None if driver is None else "pip install cupy")


def test_a_cache_that_cannot_be_written_is_a_problem(monkeypatch):
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    assert finding("cache").cure == "set HF_HOME to another place"


@pytest.mark.parametrize("fault", [None, "503", "stall"])
def test_the_hub_is_asked(fault, tmp_path, monkeypatch):
    with LoopbackHub(tmp_path / "hub") as server:
        use_hub(server.endpoint, tmp_path / "cache", monkeypatch)
        if fault:
            server.fail(fault)
        found = finding("hub")
        assert found.status == ("note" if fault else "ok")
        assert server.endpoint in found.found
        assert len(server.requests) == 1


def test_offline_the_hub_is_not_asked(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "switched off" in hub.problem()


@posix
@pytest.mark.parametrize("columns", [40, 80])
def test_a_terminal_is_told_of_and_a_row_goes_on_below_its_last_cell(columns):
    code, shown = run_on_terminal("doctor", columns=columns)
    assert code == 0
    assert f"xterm, {columns} columns, fewer than 256 colours, utf-8" in " ".join(shown.split())
    lines = shown.split("\r\n")
    for line in lines:  # a path may be longer than the terminal is wide
        assert len(line) <= columns or len(line.split()) == 1
    if columns == 80:
        place = next(i for i, line in enumerate(lines) if line.startswith("note     hub "))
        assert lines[place].index("http") == 19
        for line in lines[place + 1 : -1]:
            assert line.startswith(" " * 19)
            assert line[19] != " "
