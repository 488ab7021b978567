"""The help of commands: its layout, and the examples at its end."""

import inspect
import shutil
from collections.abc import Callable, Sequence
from textwrap import dedent, indent

import typer

from gpt_cli.cli.options import command as with_groups


def add_command(app: typer.Typer, name: str, function: Callable[..., None]) -> None:
    """Add a command; its help and its examples, which come last, are its docstring."""
    text, _, examples = inspect.cleandoc(function.__doc__ or "").partition("\n\nExamples:\n")
    # After a backspace, typer does not rewrap the lines of a paragraph.
    epilog = f"\b\nExamples:\n{indent(dedent(examples), '  ')}"
    # A given short help is wrapped; without one, typer would cut the docstring.
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
