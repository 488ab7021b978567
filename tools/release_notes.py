"""Print the section of CHANGELOG.md about the version of this package: the notes of its release.

`make check-release` writes them to build/notes.md.
"""

import re
import sys
from pathlib import Path

import gpt_cli

ROOT = Path(__file__).parents[1]


def notes(changelog: str, version: str) -> str:
    """Return the text below the heading `## [version] - date`; exit if there is none."""
    heading = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## \[|\Z)"
    section = re.search(heading, changelog, re.MULTILINE | re.DOTALL)
    if not section or not section[1].strip():
        sys.exit(f"CHANGELOG.md has no section `## [{version}] - YYYY-MM-DD` with a text")
    return section[1].strip()


if __name__ == "__main__":
    print(notes((ROOT / "CHANGELOG.md").read_text("utf-8"), gpt_cli.__version__))
