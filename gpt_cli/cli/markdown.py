"""Markdown on a terminal, by rich."""

import re
import sys
from typing import Any, ClassVar

from rich.console import Console
from rich.markdown import Markdown, TableDataElement
from rich.theme import Theme

_WIDEST = 100  # columns
# The colours of rich are for dark terminals.
_THEME = Theme({"markdown.code": "cyan", "markdown.link_url": "underline"})
# What a terminal cannot show or follow: pictures, links within a page, and paths of other pages.
_REPLACED = {
    r"!\[([^]]*)\]\([^)]*\)": r"(Picture: \1)",
    r"\[([^][]*)\]\(#[^)]*\)": r"\1",
    r"\]\(([\w-]+)\.md(#[^)]*)?\)": r"](\1)",
    r"\]\(\.\./": "](",
}


def formatted(page: str) -> str:
    """Return a page of the guide for the terminal that is standard output."""
    for pattern, replacement in _REPLACED.items():
        page = re.sub(pattern, replacement, page)
    console = Console(file=sys.stdout, theme=_THEME)
    with console.capture() as captured:
        markdown = _Markdown(page, code_theme="ansi_light", hyperlinks=False)
        console.print(markdown, width=min(console.width, _WIDEST))
    return captured.get()


class _Cell(TableDataElement):
    """A cell of a table that breaks long words; rich would cut them."""

    def __init__(self, justify: Any):
        super().__init__(justify)
        self.content.overflow = "fold"


class _Markdown(Markdown):
    elements: ClassVar[dict[str, Any]] = {**Markdown.elements, "th_open": _Cell, "td_open": _Cell}
