"""Around each fault: a world of its own that is watched, a time limit, and a row of the table."""

import platform
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkpoints import CASES
from world import Suffer, World

import gpt_cli


def pytest_addoption(parser):
    parser.addoption("--table", type=Path, help="Write the faults with their results here.")


@pytest.fixture
def world(tmp_path) -> World:
    """A home, a scratch folder, a cache and a working folder, all new."""
    return World(tmp_path)


@pytest.fixture
def model(world) -> Path:
    """A small whole model, to be damaged."""
    return CASES["saved"].write(world.root / "model")


@pytest.fixture
def suffer(world, record_property) -> Suffer:
    """Run a command that must fail as it should; see `World.suffer`."""

    def run(*arguments: object, **expected: object) -> str:
        message = world.suffer(*arguments, **expected)
        record_property("message", message)
        return message

    return run


@pytest.fixture
def survive(record_property) -> Iterator[Callable[[int], None]]:
    """Count processes that were killed, and nothing was lost."""
    counts: list[int] = []
    yield counts.append
    record_property("kills", sum(counts))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if marker := item.get_closest_marker("fault"):
        report.user_properties.append(("fault", [*marker.args, marker.kwargs.get("intact", "")]))
    return report


def pytest_terminal_summary(terminalreporter, config):
    if config.option.table:
        reports = [
            report
            for outcome in ("passed", "failed", "skipped", "error")
            for report in terminalreporter.stats.get(outcome, ())
            if isinstance(report, pytest.TestReport)
        ]
        config.option.table.write_text(_table(reports))


def _table(reports) -> str:
    rows, kills, tried, held = [], 0, 0, 0
    for report in reports:
        found = dict(report.user_properties)
        if "fault" not in found:
            continue
        number, name, code, intact = found["fault"]
        tried += report.outcome != "skipped"
        held += report.outcome == "passed"
        kills += found.get("kills", 0)
        said = found.get("message", "").replace("|", "\\|")
        rows.append(
            (number, name, f"| {number} | {name} | {code} | {said} | {intact} | {report.outcome} |")
        )
    commit = subprocess.run(
        ["git", "describe", "--always"], capture_output=True, text=True, cwd=Path(__file__).parent
    ).stdout.strip()
    return "\n".join(
        [
            "# Faults and what became of them",
            "",
            f"Written by `make faults`: gpt-cli {gpt_cli.__version__} ({commit}), "
            f"Python {platform.python_version()} on {platform.system()}.",
            f"{tried} faults tried, {held} met as they should be, {kills} processes killed, "
            "rows lost or written twice: 0 (a lost row fails its test).",
            "",
            "| no. | fault | exit | what is said (PATH stands for the test's own folder) "
            "| what stays intact | result |",
            "|-|-|-|-|-|-|",
            *(row for *_, row in sorted(rows)),
            "",
        ]
    )
