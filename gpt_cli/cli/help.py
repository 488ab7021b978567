"""The help of commands: its layout, and the examples at its end."""

import inspect
import re
import shutil
from collections.abc import Callable, Sequence
from textwrap import dedent, indent, wrap

import typer

from gpt_cli.cli.options import command as with_groups

_EXAMPLES = "\b\nExamples:\n"  # after a backspace, typer does not rewrap the lines of a paragraph


def add_command(app: typer.Typer, name: str, function: Callable[..., None]) -> None:
    """Add a command; its help and its examples, which come last, are its docstring."""
    text, _, examples = inspect.cleandoc(function.__doc__ or "").partition("\n\nExamples:\n")
    epilog = _EXAMPLES + indent(dedent(examples), "  ")
    # Without a short help, typer would cut the docstring; it wraps this one.
    add = app.command(name, help=text, epilog=epilog, short_help=text.partition("\n")[0])
    add(with_groups(function))


class HelpFormatter(typer.Context.formatter_class):  # type: ignore[valid-type,misc]
    """A formatter for narrow terminals: typer's needs 50 columns, and 30 of them for names."""

    def __init__(self, **limits: int | None):
        columns = shutil.get_terminal_size().columns
        super().__init__(width=max(min(columns, 80), 20) - 2)

    def write_dl(self, rows: Sequence[tuple[str, str]]) -> None:
        """Write names and their descriptions in two columns."""
        super().write_dl(rows, 30 if self.width >= 60 else 12)

    def write_text(self, text: str) -> None:
        """Write a text; examples are broken at spaces, so that a shell can still read them."""
        if text.startswith(_EXAMPLES):
            text = re.sub("(?m)^  .*", lambda line: _wrap_command(line[0], self.width - 1), text)
        super().write_text(text)


def _wrap_command(line: str, width: int) -> str:
    """Break an indented command at spaces that are not in quotes, unless it fits."""
    if len(line) <= width:
        return line
    unbroken = re.sub("'[^']*'", lambda quotation: quotation[0].replace(" ", "\xa0"), line)
    room = width - len(" \\")
    lines = wrap(
        unbroken, room, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    return " \\\n".join(lines).replace("\xa0", " ")
