"""Around each fault: a world of its own that is watched, a time limit, and a row of the table."""

import platform
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import CASES
from in_process import run_here
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
def suffer_here(world, record_property) -> Suffer:
    """Do the same for a command in this process, which takes a tenth of the time."""

    def run(*arguments: object, code: int, says: str, do: str) -> str:
        before = world.tree()
        out, errors = run_here(*arguments, code=code)
        finished = subprocess.CompletedProcess(arguments, code, out, errors.encode())
        message = world.check(finished, code, says, do)
        assert world.tree() == before
        record_property("message", message)
        return message

    return run


@pytest.fixture
def survive(record_property) -> Callable[[int], None]:
    """Take note of how many processes a test has killed."""
    return lambda count: record_property("kills", count)


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
    rows: dict[tuple[int, str], dict[str, object]] = {}
    outcomes: Counter[str] = Counter()
    kills = compared = 0
    for report in reports:
        found = dict(report.user_properties)
        if "fault" not in found:
            continue
        number, name, code, intact = found["fault"]
        row = rows.setdefault((number, name), {"results": Counter()})
        row |= {"code": code, "intact": intact, "message": found.get("message", "")}
        row["results"][report.outcome] += 1
        outcomes[report.outcome] += 1
        kills += found.get("kills", 0)
        compared += found.get("rows", 0)
    return "\n".join(
        [
            "# Faults, and what became of them",
            "",
            f"Written by `make faults` with gpt-cli {gpt_cli.__version__}, "
            f"Python {platform.python_version()} on {platform.system()}.",
            f"Faults tried: {outcomes.total() - outcomes['skipped']}; met as they should be: "
            f"{outcomes['passed']}; skipped: {outcomes['skipped']}. Processes that were ended by a "
            f"signal or by their reader: {kills}. Rows compared after 25 such ends of each run, "
            f"of which none was lost and none twice: {compared}.",
            "",
            "| no. | fault | exit | what is said | what stays intact | result |",
            "|-|-|-|-|-|-|",
            *(_row(*key, **row) for key, row in sorted(rows.items())),
            "",
        ]
    )


def _row(number, name, *, code, message, intact, results) -> str:
    told = ", ".join(f"{count} {outcome}" for outcome, count in results.items())
    cells = [number, name, code, message, intact, told]
    return f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |"
