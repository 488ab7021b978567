"""The pages of the guide, `docs/*.md`, on a terminal and in a pipe."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from gpt_cli.cli.output import hanging, on_terminal, remark, write
from gpt_cli.errors import InputError, ResourceError, did_you_mean

_PACKAGE = Path(__file__).parent.parent
_FOLDERS = (_PACKAGE / "docs", _PACKAGE.parent / "docs")  # of a wheel, of a checkout


def read_pages() -> dict[str, str]:
    """Return the Markdown of each page, by its topic, such as how-gpt2-works."""
    if folder := next(filter(Path.is_dir, _FOLDERS), None):
        return {file.stem: file.read_text("utf-8") for file in sorted(folder.glob("*.md"))}
    raise ResourceError("the pages of the guide are missing: reinstall gpt2-cli")


def title_of(page: str) -> str:
    """Return the title of a page."""
    return page.partition("\n")[0].removeprefix("# ")


def find_page(name: str) -> str | None:
    """Return the page with the topic `name`, or with the command `name` in its title, if any."""
    pages = read_pages()
    titled = (page for page in pages.values() if f"`gpt-cli {name}`" in title_of(page))
    return pages.get(name) or next(titled, None)


def list_topics() -> None:
    """Write the topics with the titles of their pages."""
    pages = read_pages()
    width = max(map(len, pages)) + 2
    _show(
        "".join(
            hanging(f"{topic:{width}}", title_of(page).replace("`", ""))
            for topic, page in pages.items()
        )
    )
    remark("`gpt-cli help TOPIC` shows a page; `gpt-cli --help` lists the commands")


def show_page(name: str, commands: Iterable[str]) -> None:
    """Write a page: as Markdown in a pipe, formatted on a terminal.

    Raise InputError, with the nearest topic or command, if there is none.
    """
    page = find_page(name)
    if page is None:
        near = did_you_mean(name, [*read_pages(), *commands])
        raise InputError(f"there is no topic {name:.80}{near}; see `gpt-cli help`")
    if on_terminal(sys.stdout):
        from gpt_cli.cli.markdown import formatted

        page = formatted(page)
    _show(page)


def _show(text: str) -> None:
    """Write a text, or show it in a pager if it is longer than the terminal."""
    short = text.count("\n") < shutil.get_terminal_size().lines
    if short or not on_terminal(sys.stdout) or not _paged(text):
        write(text, escapes=True)


def _paged(text: str) -> bool:
    """Show a text in the pager that PAGER names, or in less; return whether it could be started."""
    less = {"LESS": os.environ.get("LESS", "-FX") + " -R", "LESSCHARSET": "utf-8"}  # -R: colours
    handler = signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is for the pager
    try:
        command = shlex.split(os.environ.get("PAGER", "less"))
        subprocess.run(command, input=text.encode(), env=os.environ | less)  # noqa: S603
    except (OSError, ValueError, IndexError):  # not installed; unbalanced quotes; empty
        return False
    finally:
        signal.signal(signal.SIGINT, handler)
    return True
