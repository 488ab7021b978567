"""Write docs/man: a man page for each command, from what its --help shows and docs/reference.md.

    make man

The pages are committed, because a wheel is built without typer. Their date is that of the newest
release in CHANGELOG.md, so the same source gives the same bytes.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any

from typer.main import get_command

from gpt_cli import __version__
from gpt_cli.cli.app import application
from gpt_cli.cli.guide import find_page
from gpt_cli.cli.help import EXAMPLES

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "man"
# In roff, a plain - is a hyphen, and a plain ' is a curved quotation mark.
_ESCAPES = {"\\": r"\e", "-": r"\-", "'": r"\(aq", "`": r"\(ga", "^": r"\(ha", "~": r"\(ti"}


def man_pages() -> dict[str, str]:
    """Return the pages by the names of their files, such as gpt-cli-show-tree.1."""
    program = get_command(application())
    context = program.make_context("gpt-cli", ["--help"], resilient_parsing=True)
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    date = re.findall(r"(?m)^## \[[\d.]+\] - (\S+)", changelog)[0]
    return {f"{_name(command)}.1": _page(command, date) for command in _with_subcommands(context)}


def _with_subcommands(context: Any) -> Iterator[Any]:
    """Yield the context of a command, and those of all commands below it."""
    yield context
    for name, command in getattr(context.command, "commands", {}).items():
        yield from _with_subcommands(type(context)(command, parent=context, info_name=name))


def _name(context: Any) -> str:
    return context.command_path.replace(" ", "-")


def _page(context: Any, date: str) -> str:
    """Return the man page of a command."""
    command, path, name = context.command, context.command_path, _name(context)
    summary = command.help.partition("\n")[0].removesuffix(".")
    usage = " ".join(command.collect_usage_pieces(context))
    options = _Formatter(name)
    command.format_options(context, options)
    examples = dedent(command.epilog.removeprefix(EXAMPLES).removeprefix("Begin with: "))
    topic = path.removeprefix("gpt-cli ") if context.parent else "reference"
    parts = [
        f'.TH {name.upper()} 1 "{date}" "gpt-cli {__version__}" "gpt-cli manual"',
        f".SH NAME\n{_roff(name)} \\- {_roff(summary)}",
        f".SH SYNOPSIS\n{_bold(path)} {_roff(usage)}",
        ".SH DESCRIPTION\n" + _roff(command.help).replace("\n\n", "\n.PP\n"),
        *options.lines,
        *([] if context.parent else _reference()),
        f".SH EXAMPLES\n.EX\n{_roff(examples)}\n.EE",
        ".SH SEE ALSO",
        f"{_bold(_name(context.parent))}(1)," if context.parent else f"{_bold('gpt-cli help')},",
        _bold(f"gpt-cli help {topic}" if find_page(topic) else "gpt-cli help"),
    ]
    return "\n".join(parts) + "\n"


def _reference() -> Iterator[str]:
    """Yield the sections about all commands: the tables of docs/reference.md, and the cache."""
    page = (ROOT / "docs" / "reference.md").read_text("utf-8")
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", page).replace("`", "")  # without links
    sections = {"EXIT STATUS": "Exit codes", "ENVIRONMENT": "Environment variables"}
    for title, heading in sections.items():
        table = plain.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
        yield f".SH {title}"
        for name, text in re.findall(r"(?m)^\| ([A-Z_\d].*?) \| (.*?) \|", table):
            yield f".TP\n{_bold(name)}\n{_roff(text)}"
    yield ".SH FILES\n.TP\n" + _bold("~/.cache/huggingface/hub")
    yield "models from the Hub, unless a variable above names another folder"


class _Formatter:
    """The sections of a man page; the help writes its options and commands to it."""

    width = 1000  # so that no description is cut
    names_width = 0

    def __init__(self, page: str):
        self.page = page
        self.lines: list[str] = []

    @contextmanager
    def section(self, title: str) -> Iterator[None]:
        """Begin a section."""
        self.lines.append(f".SH {title.upper()}")
        yield

    def write_dl(self, rows: Sequence[tuple[str, str]]) -> None:
        """Add names with their descriptions; flags are bold, and a command is named by its page."""
        are_commands = self.lines[-1] == ".SH COMMANDS"
        for name, text in rows:
            if are_commands:
                term = f"{_bold(f'{self.page}-{name.strip()}')}(1)"
            else:
                term = " ".join(_bold(w) if w[0] == "-" else _roff(w) for w in name.split())
            # No line is broken at a space in quotes.
            unbroken = re.sub(r"(?<!\w)'[^']*'", lambda quote: quote[0].replace(" ", "\xa0"), text)
            self.lines.append(f".TP\n{term}\n{_roff(unbroken)}")


def _bold(text: str) -> str:
    return f"\\fB{_roff(text)}\\fR"


def _roff(text: str) -> str:
    """Escape a text, so that the page shows its characters."""
    escaped = "".join(_ESCAPES.get(character, character) for character in text)
    return re.sub(r"(?m)^\.", r"\&.", escaped).replace("\xa0", r"\ ")


if __name__ == "__main__":
    for old in FOLDER.glob("*.1"):
        old.unlink()
    for name, page in man_pages().items():
        (FOLDER / name).write_text(page, encoding="utf-8", newline="\n")
