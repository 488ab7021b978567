"""The tables of docs/reference.md."""

import re
from pathlib import Path

SECTIONS = dict(
    re.findall(
        r"^##+ (.+)\n((?:(?!##).*\n)*)",
        (Path(__file__).parents[2] / "docs/reference.md").read_text("utf-8"),
        re.MULTILINE,
    )
)


def tables_of(section: str) -> list[set[str]]:
    """Return the names in the first column of each table of a section, without the titles."""
    tables = re.findall(r"^\|-.*\n((?:\|.*\n)*)", SECTIONS[section], re.MULTILINE)
    firsts = [re.findall(r"^\| (.*?) \|", table, re.MULTILINE) for table in tables]
    return [set(re.findall(r"`([^`]+)`", " ".join(cells))) for cells in firsts]


def names_of(section: str) -> set[str]:
    return set().union(*tables_of(section))


def exit_codes() -> dict[int, list[str]]:
    """Return the errors in Python of each exit code."""
    rows = re.findall(r"^\| (\d+) \|.*\|(.*)\|$", SECTIONS["Exit codes"], re.MULTILINE)
    return {int(code): re.findall(r"`(\w+)`", cell) for code, cell in rows}
