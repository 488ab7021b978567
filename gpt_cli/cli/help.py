"""The help of commands: the layout, the groups of options, and the examples at the end."""

import inspect
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from textwrap import dedent, indent, wrap
from typing import Any

import typer
from typer.core import TyperCommand

from gpt_cli.cli.parameters import command as with_flags

# The groups of options, and the order of the options in each. All others come last.
GROUPS = {
    "Model": "model adapter edit bos-token revision offline",
    "Input": "file answer wrong what hook hooks pool format delimiter template escape context "
    "special bos eos lines stride overflow prompt-tokens",
    "Sampling": "max-tokens min-tokens temperature top-k top-p min-p typical-p repeat-penalty "
    "presence-penalty frequency-penalty no-repeat-ngram logit-bias beams length-penalty "
    "early-stopping stop include-stop bad-words ignore-eos seed samples",
    "Choices and constraints": "choices choices-file by calibrate exact regex json-schema grammar",
    "Output": "output out-dtype pca to keep-fields resume salvage segment top layer head html open "
    "png plot force echo stream json logprobs tokens words layers min-k total count max-perplexity "
    "min-perplexity stats",
    "Server": "name host port unix-socket unix-socket-mode unix-socket-group api-key api-key-file "
    "trusted-proxy allow-anyone allow-edits cors max-queue max-body grace access-log",
    "Machine": "device dtype threads cache speculate batch-size repetitions engine address workers "
    "gpus-per-worker",
}
EXAMPLES = "\b\nExamples:\n"  # after a backspace, typer does not rewrap the lines of a paragraph


def add_command(app: typer.Typer, name: str, function: Callable[..., None]) -> None:
    """Add a command. Its docstring is its help, and ends with examples."""
    text, _, examples = inspect.cleandoc(function.__doc__ or "").partition("\n\nExamples:\n")
    epilog = EXAMPLES + indent(dedent(examples), "  ")
    # Without a short help, typer would cut the docstring; it wraps this one.
    short = text.partition("\n")[0]
    add = app.command(name, cls=Command, help=text, epilog=epilog, short_help=short)
    add(with_flags(function))


class Command(TyperCommand):
    """A command whose help shows the options in groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, and the options of each group."""
        entries: dict[str, tuple[str, str]] = {}
        for param in self.get_params(ctx):
            entry = param.get_help_record(ctx)
            if entry:  # it is not hidden
                entries[param.opts[0]] = entry
        width = min(formatter.names_width, max(len(name) for name, _ in entries.values()))
        sections = {"Arguments": [name for name in entries if not name.startswith("-")]}
        for title, group in GROUPS.items():
            sections[title] = [f"--{name}" for name in group.split()]
        sections["Other"] = list(entries)
        for title, names in sections.items():
            rows = [entries.pop(name) for name in names if name in entries]
            if rows:
                with formatter.section(title):
                    formatter.write_dl([(name.ljust(width), text) for name, text in rows])


class HelpFormatter(typer.Context.formatter_class):  # type: ignore[valid-type,misc]
    """A formatter for narrow terminals: typer's needs 50 columns, and 30 of them for names."""

    def __init__(self, **limits: int | None):
        columns = shutil.get_terminal_size(_size_of_error_terminal()).columns
        super().__init__(width=max(min(columns, 80), 20) - 2)
        self.names_width = 24 if self.width >= 60 else 12

    def write_dl(self, rows: Sequence[tuple[str, str]]) -> None:
        """Write names and their descriptions in two columns."""
        super().write_dl(rows, self.names_width)

    def write_text(self, text: str) -> None:
        """Write a text; examples are broken at spaces, so that a shell can still read them."""
        if text.startswith(EXAMPLES):
            text = re.sub("(?m)^  .*", lambda line: _wrap_command(line[0], self.width - 1), text)
        super().write_text(text)


def _size_of_error_terminal() -> tuple[int, int]:
    """Return the size of the terminal while a pager reads standard output; else 80 by 24."""
    with suppress(AttributeError, OSError, ValueError):  # closed, or no terminal
        return os.get_terminal_size(sys.__stderr__.fileno())  # type: ignore[union-attr]
    return 80, 24


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
