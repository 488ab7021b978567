"""The input of a command: an argument, a file or a pipe."""

import sys
from pathlib import Path

from gpt_cli.cli.output import on_terminal
from gpt_cli.errors import InputError
from gpt_cli.jobs.storage import read_text, without_line_end


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """Return the text of `file` ("-" is standard input) followed by `prompt`.

    Without both, the prompt is read from a pipe. One line end is dropped from the end of a file or
    a pipe, where editors and `echo` put it.
    """
    if file is None and prompt is not None:
        return prompt
    text = read_text(or_pipe(file, "no prompt: give a PROMPT, --file FILE"))
    return text + prompt if prompt is not None else without_line_end(text)


def input_file(argument: str | None, option: str | None, rows: str) -> str:
    """Return an argument or --file, else "-" for a pipe; both, or none, is an InputError."""
    refuse_both(argument, option)
    return or_pipe(argument if option is None else option, f"no {rows}: give a FILE")


def refuse_both(argument: object, option: object) -> None:
    """Raise InputError if there is an argument and the option file."""
    if argument is not None and option is not None:
        raise InputError("--file and an argument are both given: leave one of them out")


def or_pipe(file: Path | str | None, missing: str) -> str:
    """Return the name of a file, or "-" for a pipe; raise InputError if there is neither."""
    if file is None and (sys.stdin is None or on_terminal(sys.stdin)):
        raise InputError(f"{missing}, or a pipe on standard input")
    return str(file or "-")
