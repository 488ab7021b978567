"""The man pages of docs/man: current, complete, and without a warning of man or mandoc."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gpt_cli.cli.commands import COMMANDS
from support.in_process import run_here

ROOT = Path(__file__).parents[1]
PAGES = {path.name: path.read_text("utf-8") for path in sorted(ROOT.glob("docs/man/*"))}


def plain(name):
    """Return a page without fonts, and with plain hyphens."""
    return re.sub(r"\\f[BR]|\\(?=-)", "", PAGES[name])


def test_the_pages_are_those_of_the_commands(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import man_pages

    assert {f"gpt-cli-{name}.1" for name in COMMANDS} < PAGES.keys()
    assert man_pages.man_pages() == PAGES, "run `make man`"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_the_groups_the_flags_and_the_examples_of_the_help(name):
    command = name.removesuffix(".1").split("-", 3 if "-show-" in name else 2)[2:]
    text = run_here(*command, "--help")[0].decode()
    page = plain(name).replace(r"\(aq", "'").replace(r"\e", "\\")
    options, _, examples = text.partition("\n  Examples:\n")
    _, *sections = re.split(r"(?m)^(\w[\w ]+):$", options)
    assert all(f"\n.SH {title.upper()}\n" in page for title in sections[::2])
    flags = re.findall(r"(?m)^  (-.*?)(?:  |$)", "".join(sections))
    assert flags
    assert set(flags) <= set(page.splitlines())
    assert all(f"\n{line.strip()}\n" in page for line in examples.splitlines() if "\\" not in line)


def test_the_first_page_has_the_exit_codes_and_the_variables_of_the_reference():
    page = plain("gpt-cli.1")
    _, codes, variables = re.split(
        r"\.SH (?:EXIT STATUS|ENVIRONMENT)\n", page.split(".SH FILES")[0]
    )
    reference = (ROOT / "docs" / "reference.md").read_text("utf-8").partition("\n## JSON")[0]
    for section, pattern in ((codes, r"(?m)^\| (\d+) \|"), (variables, r"(?m)^\| (`.*?`) \|")):
        names = [name.replace("`", "") for name in re.findall(pattern, reference)]
        assert len(names) > 10
        assert re.findall(r"(?m)^\.TP\n(.*)$", section) == names


def test_no_line_ends_at_a_space_in_quotes():
    assert r"such as \(aq\ [0\-9]{4}\(aq" in PAGES["gpt-cli-batch.1"]


@pytest.mark.parametrize(
    "command",
    ["mandoc -T lint -W warning", "groff -ww -man -T utf8 -z"],
    ids=lambda c: c.split()[0],
)
def test_the_pages_give_no_warning(command):
    if not shutil.which(command.split()[0]):
        pytest.skip("not installed")
    files = [ROOT / "docs" / "man" / name for name in PAGES]
    finished = subprocess.run([*command.split(), *files], capture_output=True, text=True)
    assert finished.stdout + finished.stderr == ""
