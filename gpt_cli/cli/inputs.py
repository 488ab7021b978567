"""The input of a command: an argument, a file or a pipe."""

import re
import sys
from pathlib import Path

from gpt_cli.cli.streams import on_terminal
from gpt_cli.errors import InputError
from gpt_cli.jobs.storage import read_text, without_line_end

_ESCAPES = {r"\n": "\n", r"\t": "\t", r"\r": "\r", r"\\": "\\"}


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """Return the text of `file` ("-" is standard input) followed by `prompt`.

    Without both, the prompt is read from a pipe. One line end is dropped from the end of a file or
    a pipe, where editors and `echo` put it.

    Raises:
        InputError: there is no prompt, or it is not UTF-8.
        ResourceError: the file does not fit the memory.
    """
    if file is None and prompt is not None:
        return prompt
    if file is None and not piped():
        raise InputError("no prompt: give a PROMPT, --file FILE, or a pipe on standard input")
    text = read_text(file or Path("-"))
    return text + prompt if prompt is not None else without_line_end(text)


def input_file(argument: str | None, option: str | None, rows: str) -> str:
    """Return the name of the input: an argument or --file, else "-" for a pipe.

    Raises:
        InputError: both are given, or none and nothing is piped.
    """
    if argument is not None and option is not None:
        raise InputError("--file and an argument are both given: leave one of them out")
    name = argument if option is None else option
    if name is None and not piped():
        raise InputError(f"no {rows}: give a FILE, or a pipe on standard input")
    return name or "-"


def piped() -> bool:
    """Return whether standard input is open and not a terminal."""
    return sys.stdin is not None and not on_terminal(sys.stdin)


def unescape(text: str) -> str:
    r"""Return text with `\n`, `\t`, `\r` and `\\` replaced by the characters they stand for."""
    return re.sub(r"\\[ntr\\]", lambda match: _ESCAPES[match[0]], text)
