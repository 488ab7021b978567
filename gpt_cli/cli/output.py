"""The output of commands: standard streams, and text for terminals.

Standard output carries the result in UTF-8 and nothing else.
"""

import errno
import logging
import re
import sys
from typing import Any, TextIO

from gpt_cli.errors import ResourceError
from gpt_cli.records import json_line
from gpt_cli.system.terminal import silence, write_error

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_LONGEST_NOTE = 300  # characters
_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"}
_PICTURES[0x7F] = 0x2421  # DEL
_PICTURES.update(dict.fromkeys(range(0x80, 0xA0), 0xFFFD))  # C1
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def write(text: str | bytes, *, escapes: bool = False) -> None:
    """Write to standard output without delay: text as UTF-8, with unchanged line ends.

    On a terminal, control characters become visible, unless the text has `escapes` of gpt-cli.
    If the reader has closed the pipe, raise BrokenPipeError.
    """
    if sys.stdout is None:
        raise ResourceError("standard output is closed: redirect it to a file or a pipe")
    # A path may hold bytes that are not UTF-8, which Python represents by surrogates.
    data = text if isinstance(text, bytes) else text.encode(errors="surrogateescape")
    if on_terminal(sys.stdout) and not escapes:
        data = visible(data.decode(errors="replace")).encode()
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except OSError as error:
        silence(sys.stdout)
        if error.errno in (errno.EPIPE, errno.EINVAL):  # the latter on Windows
            raise BrokenPipeError from None
        raise ResourceError(f"cannot write to standard output: {error.strerror}") from None


def write_json(*values: Any) -> None:
    """Write values to standard output as lines of JSON."""
    write("".join(map(json_line, values)))


def remark(*lines: str) -> None:
    """Write notes about what a user may not expect, if standard error is a terminal.

    Elsewhere only --verbose shows them: Vim's `:r !` and other tools insert standard error into the
    text, too. Notes that logs need, as those of a job, are written by `note`.
    """
    if on_terminal(sys.stderr) or verbose():
        note(*(f"gpt-cli: note: {line}" for line in lines))


def verbose() -> bool:
    """Return whether --verbose is set."""
    return logging.getLogger("gpt_cli").isEnabledFor(logging.INFO)


def note(*lines: str) -> None:
    """Write lines to standard error, without control characters."""
    write_error("".join(f"{visible(line)}\n" for line in lines))


class NoteStream:
    """A replacement for sys.stdout that writes the messages of a library as notes.

    The first line of a message is shown, cut to 300 characters. Bytes written to `buffer` pass.
    """

    def __init__(self, stream: TextIO, *, shown: bool):
        self._stream = stream
        self._shown = shown

    def write(self, text: str) -> int:
        """Show a message as a note."""
        line = _COLOURS.sub("", text).strip().partition("\n")[0]
        if line and self._shown:
            note(f"gpt-cli: note: {line[:_LONGEST_NOTE]}")
        return len(text)

    def __getattr__(self, name: str) -> Any:
        """Return another attribute of the stream, such as `buffer`."""
        return getattr(self._stream, name)


def on_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is open and is a terminal."""
    return stream is not None and stream.isatty()


def visible(text: str) -> str:
    """Replace control characters by symbols, such as U+241B for ESC; keep tabs and line ends.

    The text cannot move the cursor of a terminal or change its settings.
    """
    # Standard error escapes surrogates itself.
    return text.replace("\r\n", "\n").translate(_PICTURES)


def bar(length: float) -> str:
    """Return a bar of a length in columns, in steps of 1/8."""
    whole, eighths = divmod(round(length * 8), 8)
    return "█" * whole + _EIGHTHS[eighths].rstrip()
