"""Fixtures for faults: a separate, watched world, a time limit, and rows of the tables."""

import functools
import platform
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import gpt_cli
from support.world import Suffer, World


def pytest_addoption(parser):
    parser.addoption("--table", type=Path, help="Write the faults with their results here.")


@pytest.fixture
def world(tmp_path) -> World:
    """Return new folders for home, temporary files, cache and work."""
    return World(tmp_path)


@pytest.fixture
def model(world, case_folder) -> Path:
    """Return a small complete model to damage."""
    return shutil.copytree(case_folder("saved"), world.root / "model")


@pytest.fixture
def suffer(world, record_property) -> Suffer:
    """Return a function that runs a command that must fail; see `World.suffer`."""

    def run(*arguments: object, **expected: object) -> str:
        message = world.suffer(*arguments, **expected)
        record_property("message", message)
        return message

    return run


@pytest.fixture
def suffer_here(world, suffer) -> Suffer:
    """Return the same for a command in this process."""
    return functools.partial(suffer, run=world.run_here)


@pytest.fixture
def survive(record_property) -> Callable[[int], None]:
    """Return a function that records how many processes a test has killed."""
    return lambda count: record_property("kills", count)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if marker := item.get_closest_marker("fault"):
        about, *_ = item.module.__doc__.split("\n")
        section = f"## {item.path.name}\n\n{about}"
        intact = marker.kwargs.get("intact", "")
        report.user_properties.append(("fault", [section, *marker.args, intact]))
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
    """Return a table for each test module, sorted by the numbers and the names of faults."""
    sections: dict[str, dict[tuple[int, str], dict[str, object]]] = {}
    outcomes: Counter[str] = Counter()
    kills = compared = 0
    for report in reports:
        properties = dict(report.user_properties)
        if "fault" not in properties:
            continue
        section, number, name, code, intact = properties["fault"]
        rows = sections.setdefault(section, {})
        row = rows.setdefault((number, name), {"results": Counter()})
        row |= {"code": code, "intact": intact, "message": properties.get("message", "")}
        row["results"][report.outcome] += 1
        outcomes[report.outcome] += 1
        kills += properties.get("kills", 0)
        compared += properties.get("rows", 0)
    return "\n".join(
        [
            "# Faults and their results",
            "",
            f"Written by `make faults` with gpt-cli {gpt_cli.__version__}, "
            f"Python {platform.python_version()} on {platform.system()}.",
            f"Faults tried: {outcomes.total() - outcomes['skipped']}; handled as expected: "
            f"{outcomes['passed']}; skipped: {outcomes['skipped']}. Processes ended by a "
            f"signal or by their reader: {kills}. Rows compared after 25 such ends of each run: "
            f"{compared}; none was lost or duplicate.",
            "",
            *(
                line
                for section in sorted(sections)
                for line in _section(section, sections[section])
            ),
        ]
    )


def _section(section: str, rows: dict[tuple[int, str], dict[str, object]]) -> list[str]:
    return [
        section,
        "",
        "| fault | exit | message | what stays intact | result |",
        "|-|-|-|-|-|",
        *(_row(name, **rows[number, name]) for number, name in sorted(rows)),
        "",
    ]


def _row(name, *, code, message, intact, results) -> str:
    counts = ", ".join(f"{count} {outcome}" for outcome, count in results.items())
    cells = [name, code, message, intact, counts]
    return f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |"
