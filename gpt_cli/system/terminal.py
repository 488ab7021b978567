"""The standard streams, and the line of progress that a terminal replaces on standard error."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO


def use_utf8() -> None:
    r"""Let standard output and error be UTF-8 with unchanged line ends on Windows, too.

    There, a pipe or a file would get the code page of the system, and "\r\n".
    """
    if sys.platform == "win32":
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, TextIOWrapper):
                stream.reconfigure(encoding="utf-8", errors=stream.errors, newline="\n")


def columns() -> int:
    """Return the width of the terminal behind standard error; 0 if there is none."""
    with suppress(OSError, ValueError):
        if sys.stderr is not None and sys.stderr.isatty():
            return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    return 0


def replace_line(line: str) -> None:
    """Replace the line of progress that the terminal shows."""
    width = (columns() or 80) - 1
    write_error(f"\r{line[:width].ljust(width)}\r")


def write_error(text: str) -> None:
    """Write to standard error. Nothing happens if it is closed, or its terminal is gone."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):
        silence(sys.stderr)


def silence(stream: TextIO) -> None:
    """Redirect a stream to the null device, so that exit does not retry a failed flush."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def silent_stderr() -> Iterator[None]:
    """Hide what libraries in other languages write to standard error during the block.

    Nothing happens if it is closed: another file may then have its descriptor.
    """
    stderr = None
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            sys.stderr.flush()
            stderr = os.dup(2)
    if stderr is None:
        yield
        return
    try:
        with Path(os.devnull).open("wb") as null:
            os.dup2(null.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
