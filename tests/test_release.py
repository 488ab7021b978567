"""The version of a release in all files that name it, and the notes of the release."""

import re
from pathlib import Path

import pytest

import gpt_cli

ROOT = Path(__file__).parents[1]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_the_changelog_and_the_citations_have_this_version_and_its_date():
    dates = re.findall(rf"^## \[{gpt_cli.__version__}\] - (\S+)$", CHANGELOG, re.MULTILINE)
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\nversion: {gpt_cli.__version__}\n" in citation
    page = (ROOT / "docs" / "cite.md").read_text("utf-8")
    assert f"  version = {{{gpt_cli.__version__}}}\n" in page
    assert re.findall(r'^date-released: "(.*)"$', citation, re.MULTILINE) == dates


def test_the_notes_of_a_release_are_its_section(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    from release_notes import notes

    text = "## [Unreleased]\n\n## [1.1.0] - 2027-01-31\n\n- b\n\n## [1.0.0] - 2026-11-25\n\n- a\n"
    assert notes(text, "1.1.0") == "- b"
    assert notes(text, "1.0.0") == "- a"
    with pytest.raises(SystemExit, match=r"no section `## \[1.2.0\] - YYYY-MM-DD`"):
        notes(text, "1.2.0")
