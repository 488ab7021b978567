"""Prompts in, text out: standard output carries the result and nothing else, in UTF-8."""

import errno
import json
import os
import re
import shutil
import sys
import textwrap
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from gpt_cli.errors import InputError, ResourceError
from gpt_cli.reading import read_text, without_line_end

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_LONGEST_NOTE = 300  # characters
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"}
_PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)  # DEL, and Latin-1's


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """Return the text of `file` ("-" is standard input) followed by `prompt`.

    With neither, a pipe on standard input is the prompt. Where the prompt ends with a file or a
    pipe, one line end is dropped from its end: editors and `echo` put it there.

    Raises:
        InputError: there is no prompt, or it is not UTF-8.
        ResourceError: the file cannot be read.
    """
    if file is None and prompt is not None:
        return prompt
    if file is None and not piped():
        raise InputError("no prompt: give a PROMPT, --file FILE, or a pipe on standard input")
    text = read_text(file or Path("-"))
    return text + prompt if prompt is not None else without_line_end(text)


def input_file(file: str | None, missing: str) -> str:
    """Return the name of the input, "-" for standard input.

    Raises:
        InputError: there is none and nothing is piped (`missing` says so).
    """
    if file is None and not piped():
        raise InputError(missing)
    return file or "-"


def piped() -> bool:
    """Return whether something can come through standard input without being typed."""
    return sys.stdin is not None and not on_terminal(sys.stdin)


def write(text: str | bytes, *, escapes: bool = False) -> None:
    """Write to standard output at once: text as UTF-8, and with line ends as they are.

    A terminal is shown control characters, which may be a stranger's, and does not obey them;
    unless they are escapes of ours, and the text that they colour is `visible`.

    Raises:
        BrokenPipeError: the reader has closed the pipe.
        ResourceError: the output cannot be written.
    """
    if sys.stdout is None:
        raise ResourceError("standard output is closed: let it lead somewhere")
    # A path may hold bytes that are no UTF-8; Python has them as surrogates.
    data = text if isinstance(text, bytes) else text.encode(errors="surrogateescape")
    if on_terminal(sys.stdout) and not escapes:
        data = visible(data.decode(errors="replace")).encode()
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except OSError as error:
        silence(sys.stdout)
        if error.errno in (errno.EPIPE, errno.EINVAL):  # the latter is Windows' word for it
            raise BrokenPipeError from None
        raise ResourceError(f"cannot write to standard output: {error.strerror}") from None


def hanging(head: str, text: str) -> str:
    """Return the lines of a row, whose last cell goes on below itself where a terminal ends.

    Where half of the terminal or more is taken, or a word has no room, it is below all of the row.
    """
    if not on_terminal(sys.stdout):
        return f"{head}{text}\n"
    columns = shutil.get_terminal_size().columns
    longest = max(map(len, text.split()))
    if 2 * len(head) > columns or longest > columns - len(head):
        head = f"{head.rstrip()}\n    "
    indent = len(head.rpartition("\n")[2])
    lines = textwrap.wrap(text, columns - indent, break_long_words=False, break_on_hyphens=False)
    return head + f"\n{' ' * indent}".join(lines) + "\n"


def visible(text: str) -> str:
    """Return text that moves no terminal's cursor and changes none of its settings.

    But for tabs and line ends, pictures stand for the control characters, such as U+241B for ESC.
    """
    # Standard error writes a surrogate as its number.
    return text.replace("\r\n", "\n").translate(_PICTURES)


def quoted(data: bytes) -> str:
    r"""Return bytes on one line, in quotes, as JSON has text, but safe for any terminal.

    What it may not show is escaped, and a byte that is part of no character becomes `\xf0`.
    """
    return f'"{"".join(map(_escaped, data.decode(errors="surrogateescape")))}"'


def bar(length: float) -> str:
    """Return a bar of so many columns, to an eighth."""
    whole, eighths = divmod(round(length * 8), 8)
    return "█" * whole + _EIGHTHS[eighths].rstrip()


def _escaped(character: str) -> str:
    if "\udc80" <= character <= "\udcff":
        return f"\\x{ord(character) - 0xDC00:02x}"
    if character.isprintable() and character not in '"\\':
        return character
    return json.dumps(character)[1:-1]


def note(*lines: str) -> None:
    """Write lines to standard error, where there is one, without control characters."""
    tell("".join(f"{visible(line)}\n" for line in lines))


def tell(text: str) -> None:
    """Write to standard error, where there is one that takes it."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        silence(sys.stderr)


class Aside:
    """A standard output of which only the bytes below are written: what a library prints is noted.

    Of each message, the beginning of its first line is shown on standard error, or nothing.
    """

    def __init__(self, stream: TextIO, *, shown: bool):
        self._stream = stream
        self._shown = shown

    def write(self, text: str) -> int:
        """Note a message."""
        line = _COLOURS.sub("", text).strip().partition("\n")[0]
        if line and self._shown:
            note(f"gpt-cli: note: {line[:_LONGEST_NOTE]}")
        return len(text)

    def __getattr__(self, name: str) -> Any:
        """What else a stream has, such as `buffer`."""
        return getattr(self._stream, name)


def silence(stream: TextIO) -> None:
    """Lead to nowhere what a stream did not take: Python would try it again when it exits."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def on_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is open and is a terminal."""
    return stream is not None and stream.isatty()
