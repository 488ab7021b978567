"""The files that docs/service.md shows."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/service.md"


def shown_files() -> dict[str, str]:
    """Return the files by their names, without folders."""
    blocks = re.findall(r"^```\w+\n# (\S+)\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)
    return {name.rpartition("/")[2]: text for name, text in blocks}
