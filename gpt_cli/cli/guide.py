"""The pages of the guide, `docs/*.md`, on a terminal and in a pipe. This module imports rich."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console
from rich.markdown import CodeBlock, Markdown, TableDataElement
from rich.syntax import Syntax
from rich.theme import Theme

from gpt_cli.cli.output import on_terminal, remark, write
from gpt_cli.cli.table import Column, Table
from gpt_cli.errors import InputError, ResourceError, did_you_mean

_PACKAGE = Path(__file__).parent.parent
_FOLDERS = (_PACKAGE / "docs", _PACKAGE.parent / "docs")  # of a wheel, of a checkout
# The colours of rich are for dark terminals.
_THEME = Theme({"markdown.code": "cyan", "markdown.link_url": "underline"})
_FORMULAS = "The formulas of this page are LaTeX; its web page draws them."
# On a terminal, replace pictures by their descriptions and links to pages by their topics, and
# leave out the paths of other files.
_IN_TERMINAL = {
    r"!\[([^]]*)\]\([^)]*\)": r"(Picture: \1)",
    r"\[([^][]*)\]\(([\w-]+)\.md(#[^)]*)?\)": r"\1 (`gpt-cli help \2`)",
    r"\[(`[^`]*`|[^][]*)\]\((#|\.\./)[^)]*\)": r"\1",
    r"(?s)\A(.*?\n)(?=.*\n```math\n)": rf"\1\n{_FORMULAS}\n",
}


def find_page(name: str) -> str | None:
    """Return the page of a topic, of a command in its title, or of a view of `show`, if any."""
    pages = _pages()
    name = name.lower().removesuffix(".md")
    if name in pages:
        return pages[name]
    if f"| `show {name}` |" in pages["show"]:
        return pages["show"]
    titled = (page for page in pages.values() if f"`gpt-cli {name}`" in page.partition("\n")[0])
    return next(titled, None)


def list_topics() -> None:
    """Write the topics with the titles of their pages."""
    titles = {}
    for topic, page in _pages().items():
        first_line = page.partition("\n")[0]
        titles[topic] = first_line.strip("# ").replace("`", "")
    _show(Table(Column(), Column(wrap=True), aligned=True).whole(titles.items()))
    remark("`gpt-cli help TOPIC` shows a page; `gpt-cli --help` lists the commands")


def show_page(name: str, commands: Iterable[str]) -> None:
    """Write a page, as Markdown in a pipe; raise InputError with the nearest topics without one."""
    page = find_page(name)
    if page is None:
        near = _nearest(name, commands)
        raise InputError(f"there is no topic {name!r:.80}{near}; see `gpt-cli help`")
    _show(_formatted(page) if on_terminal(sys.stdout) else page)


def _nearest(words: str, commands: Iterable[str]) -> str:
    """Return a hint: the pages that have the words most often, or the nearest topic or command."""
    pages = _pages()
    if words.strip():
        for start in (r"^#+ .*\b", r"\b"):  # in a heading, or anywhere
            pattern = re.compile(start + re.escape(words.strip()), re.IGNORECASE | re.MULTILINE)
            counts = Counter({topic: len(pattern.findall(page)) for topic, page in pages.items()})
            topics = [topic for topic, count in counts.most_common(3) if count]
            if topics:
                return f"; pages about it: {', '.join(topics)}"
    return did_you_mean(words, [*pages, *commands])


def _pages() -> dict[str, str]:
    """Return the Markdown of each page, by its topic, such as how-gpt2-works."""
    for folder in _FOLDERS:
        if folder.is_dir():
            return {file.stem: file.read_text("utf-8") for file in sorted(folder.glob("*.md"))}
    raise ResourceError("the pages of the guide are missing: reinstall gpt2-cli")


def _formatted(page: str) -> str:
    for pattern, replacement in _IN_TERMINAL.items():
        page = re.sub(pattern, replacement, page)
    width = shutil.get_terminal_size().columns  # rich takes 80 if TERM=dumb
    console = Console(file=sys.stdout, theme=_THEME, width=width)
    if console.legacy_windows:  # it would show the codes of colours
        return page
    with console.capture() as captured:
        markdown = _Page(page, code_theme="ansi_light", hyperlinks=False)
        console.print(markdown, width=min(console.width, 100), crop=False)
    return captured.get()


class _Cell(TableDataElement):
    def __init__(self, justify: Any):
        super().__init__(justify)
        self.content.overflow = "fold"  # break long words; rich would cut them


class _Code(CodeBlock):
    def __rich_console__(self, console: Any, options: Any) -> Any:
        code = Syntax("", self.lexer_name, theme=self.theme, tab_size=8).highlight(str(self.text))
        code.rstrip()
        code.no_wrap = True  # so that long commands can be copied
        code.overflow = "ignore"
        yield code


class _Page(Markdown):
    elements: ClassVar[dict[str, Any]] = {
        **Markdown.elements,
        "fence": _Code,
        "th_open": _Cell,
        "td_open": _Cell,
    }


def _show(text: str) -> None:
    """Write a text. If it is longer than the terminal, show it in a pager: PAGER, or less."""
    if on_terminal(sys.stdout) and text.count("\n") >= shutil.get_terminal_size().lines:
        less = {"LESS": os.environ.get("LESS", "-FX") + " -R", "LESSCHARSET": "utf-8"}
        handler = signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is for the pager
        try:
            with suppress(OSError, ValueError, IndexError):  # not installed, bad quotes, empty
                command = shlex.split(os.environ.get("PAGER", "less"))
                subprocess.run(command, input=text.encode(), env=os.environ | less)  # noqa: S603
                return
        finally:
            signal.signal(signal.SIGINT, handler)
    write(text, escapes=True)
