"""Write docs/man: a man page for each command, from what its --help shows.

    make man

The pages are committed, because a wheel is built without typer. Their date is that of the newest
release in CHANGELOG.md, so the same source gives the same bytes.
"""

import re
from collections.abc import Iterator
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
    releases = re.findall(r"(?m)^## \[[\d.]+\] - (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"))
    date = releases[0] if releases else ""
    return {f"{_name(command)}.1": _page(command, date) for command in _with_subcommands(context)}


def _with_subcommands(context: Any) -> Iterator[Any]:
    """Yield the context of a command, and those of all commands below it."""
    yield context
    for subcommand in _subcommands(context):
        yield from _with_subcommands(subcommand)


def _subcommands(context: Any) -> list[Any]:
    commands = getattr(context.command, "commands", {})
    return [type(context)(commands[name], parent=context, info_name=name) for name in commands]


def _page(context: Any, date: str) -> str:
    """Return the man page of a command."""
    command, path = context.command, context.command_path
    usage = " ".join(command.collect_usage_pieces(context))
    examples = dedent(command.epilog.removeprefix(EXAMPLES).removeprefix("Begin with: "))
    topic = path.removeprefix("gpt-cli ")
    guide = f"gpt-cli help {topic}" if find_page(topic) else "gpt-cli help"
    return "\n".join(
        [
            f'.TH {_name(context).upper()} 1 "{date}" "gpt-cli {__version__}" "gpt-cli manual"',
            f".SH NAME\n{_roff(_name(context))} \\- {_roff(_summary(context).removesuffix('.'))}",
            f".SH SYNOPSIS\n\\fB{_roff(path)}\\fR {_roff(usage)}",
            ".SH DESCRIPTION\n" + _roff(command.help).replace("\n\n", "\n.PP\n"),
            *(_section(title, rows) for title, rows in _sections(context).items()),
            f".SH EXAMPLES\n.EX\n{_roff(examples)}\n.EE",
            ".SH SEE ALSO",
            *(f"\\fB{_roff(_name(above))}\\fR(1)," for above in [context.parent] if above),
            f"\\fB{_roff(guide)}\\fR\n",
        ]
    )


def _name(context: Any) -> str:
    return context.command_path.replace(" ", "-")


def _summary(context: Any) -> str:
    return context.command.help.partition("\n")[0]


def _sections(context: Any) -> dict[str, list[tuple[str, str]]]:
    """Return names with their descriptions, by the titles of their sections."""
    command = context.command
    if hasattr(command, "sections"):
        return command.sections(context)
    records = [param.get_help_record(context) for param in command.get_params(context)]
    pages = [(f"{_name(below)}(1)", _summary(below)) for below in _subcommands(context)]
    return {"Options": [*filter(None, records)], "Commands": pages}


def _section(title: str, rows: list[tuple[str, str]]) -> str:
    """Return a section; flags and the names of pages are bold."""
    bold = [
        re.sub(r"(?<!\S)(\\-|gpt\\-)[^\s,(]+", r"\\fB\g<0>\\fR", _roff(name)) for name, _ in rows
    ]
    texts = [_roff(text) for _, text in rows]
    entries = zip(bold, texts, strict=True)
    return f".SH {title.upper()}\n" + "\n".join(f".TP\n{name}\n{text}" for name, text in entries)


def _roff(text: str) -> str:
    """Escape a text, so that it shows what it is."""
    escaped = "".join(_ESCAPES.get(character, character) for character in text)
    return re.sub(r"(?m)^\.", r"\&.", escaped)


if __name__ == "__main__":
    for old in FOLDER.glob("*.1"):
        old.unlink()
    for name, page in man_pages().items():
        (FOLDER / name).write_text(page, encoding="utf-8", newline="\n")
