"""Prompts in, text out: standard output carries the result and nothing else, in UTF-8."""

import contextlib
import errno
import sys
from pathlib import Path
from typing import TextIO

from gpt_cli.errors import InputError, ResourceError


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
    if file is None:
        if sys.stdin is None or on_terminal(sys.stdin):
            raise InputError("no prompt: give a PROMPT, --file FILE, or a pipe on standard input")
        file = Path("-")
    text = _read(file)
    if prompt is not None:
        return text + prompt
    return text.removesuffix("\n").removesuffix("\r")


def _read(file: Path) -> str:
    name = "standard input" if file == Path("-") else str(file)
    try:
        if file != Path("-"):
            data = file.read_bytes()
        elif sys.stdin is None:
            raise InputError("standard input is closed")
        else:
            data = sys.stdin.buffer.read()
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise InputError(f"cannot read {name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8: byte {error.start} cannot be read") from None
    if not text:
        raise InputError(f"{name} is empty, and a prompt is needed")
    return text


def write(text: str) -> None:
    """Write to standard output at once: as UTF-8, and with line ends as they are.

    Raises:
        BrokenPipeError: the reader has closed the pipe.
        ResourceError: the output cannot be written.
    """
    if sys.stdout is None:
        raise ResourceError("standard output is closed")
    try:
        # A path may hold bytes that are no UTF-8; Python has them as surrogates.
        sys.stdout.buffer.write(text.encode(errors="surrogateescape"))
        sys.stdout.buffer.flush()
    except OSError as error:
        if error.errno in (errno.EPIPE, errno.EINVAL):  # the latter is Windows' word for it
            raise BrokenPipeError from None
        raise ResourceError(f"cannot write to standard output: {error.strerror}") from None


def note(*lines: str) -> None:
    """Write lines to standard error, where there is one that takes them."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            sys.stderr.write("".join(f"{line}\n" for line in lines))
            sys.stderr.flush()


def on_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is open and is a terminal."""
    return stream is not None and stream.isatty()
