"""Standard streams: standard output carries the result in UTF-8 and nothing else."""

import errno
import logging
import os
import re
import sys
from contextlib import suppress
from typing import Any, TextIO

from gpt_cli.errors import ResourceError

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_LONGEST_NOTE = 300  # characters
_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\t\n"}
_PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)  # DEL and C1


def write(text: str | bytes, *, escapes: bool = False) -> None:
    """Write to standard output without delay: text as UTF-8, with unchanged line ends.

    On a terminal, control characters are made visible, unless the text has `escapes` of gpt-cli.
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


def remark(*lines: str) -> None:
    """Write notes to standard error if it is a terminal, or with --verbose.

    Vim's `:r !` and other tools insert standard error into the text, too.
    """
    if on_terminal(sys.stderr) or logging.getLogger("gpt_cli").isEnabledFor(logging.INFO):
        note(*(f"gpt-cli: note: {line}" for line in lines))


def note(*lines: str) -> None:
    """Write lines to standard error, without control characters."""
    write_error("".join(f"{visible(line)}\n" for line in lines))


def write_error(text: str) -> None:
    """Write to standard error, if it is open."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        silence(sys.stderr)


class NoteStream:
    """A replacement of sys.stdout that turns messages of a library into notes on standard error.

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


def silence(stream: TextIO) -> None:
    """Redirect a stream to the null device, so that exit does not retry a failed flush."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def on_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is open and is a terminal."""
    return stream is not None and stream.isatty()


def visible(text: str) -> str:
    """Return text with symbols in place of control characters, such as U+241B for ESC.

    It cannot move the cursor of a terminal or change its settings. Tabs and line ends stay.
    """
    # Standard error escapes surrogates itself.
    return text.replace("\r\n", "\n").translate(_PICTURES)
