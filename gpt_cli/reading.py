"""Texts, bytes and lines, from files here or at an address, and from standard input.

The file "-" is standard input.
"""

import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import cast

from gpt_cli import places
from gpt_cli.errors import InputError, ResourceError
from gpt_cli.machine import free_memory

_BLOCK = 1 << 20  # bytes to read at once, if they are there
_GROWTH = 32  # times its bytes is more than a text takes as tokens; 14 as measured


def read_text(file: Path | str) -> str:
    """Return the whole text of a file, less a byte order mark.

    Raises:
        InputError: it cannot be read, is empty or is not UTF-8.
    """
    name = _name(file)
    try:
        text = read_bytes(file).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name} is not UTF-8: byte {error.start} cannot be read; convert it, as iconv does"
        ) from None
    if not text:
        raise InputError(f"{name} is empty: a text is needed")
    return text


def read_bytes(file: Path | str) -> bytes:
    """Return all of a file.

    Raises:
        InputError: it cannot be read.
        ResourceError: it has no end, or none that the memory has room for.
    """
    room = _room()
    data = bytearray()
    with open_file(file) as stream:
        while block := stream.read(_BLOCK):
            data += block
            if len(data) > room:
                raise _too_long(file, room)
    return bytes(data)


def read_stretch(file: str, start: int, end: int) -> bytes:
    """Return some of the bytes of a file.

    Raises:
        InputError: it cannot be read, or has become shorter.
    """
    if places.is_address(file):
        fs, path = places.filesystem(file)
        with places.reading(file):
            # And no more, as a stream would read ahead. What is second differs between packages.
            data = fs.cat_file(path, start=start, end=end)
    else:
        with open_file(file) as stream:
            stream.seek(start)
            data = stream.read(end - start)
    if len(data) < end - start:
        raise InputError(f"{file} has become shorter while it was read")
    if len(data) > end - start:  # as of http:// without ranges
        raise InputError(f"{file} is where no part of a file can be had: copy it here")
    return data


def without_line_end(text: str) -> str:
    r"""Return the text less one "\n" or "\r\n" at its end."""
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


def read_lines(file: Path | str) -> Iterator[list[bytes]]:
    """Yield the lines of a file, with their ends.

    They come in lists of what can be had without waiting: those of a slow pipe one by one.

    Raises:
        InputError: the file cannot be read.
        ResourceError: a line has no end, or none that the memory has room for.
    """
    with open_file(file) as stream:
        room = _room()
        pieces: list[bytes] = []  # of a line that has not ended
        held = 0  # bytes in them
        at_end = False
        while not at_end:
            data, at_end = _read_available(stream)
            *ended, rest = data.split(b"\n")
            lines = [line + b"\n" for line in ended]
            if lines:
                lines[0] = b"".join([*pieces, lines[0]])
                pieces = []
                held = 0
            pieces.append(rest)
            held += len(rest)
            if held > room:
                raise _too_long(file, room)
            if at_end and any(pieces):
                lines.append(b"".join(pieces))
            if lines:
                yield lines


def _room() -> int:
    """How many bytes of text the free memory has room for, with the tokens that they become."""
    free = free_memory()
    return sys.maxsize if free is None else free // _GROWTH


def _too_long(file: Path | str, room: int) -> ResourceError:
    return ResourceError(
        f"{_name(file)} has more than {room / 1e6:,.0f} MB of text at once, which is all that the "
        "free memory has room for: cut it in pieces"
    )


@contextmanager
def open_file(file: Path | str) -> Iterator[BufferedReader]:
    """Open a file, to read bytes.

    Raises:
        InputError: it cannot be read, now or later.
    """
    name = str(file)
    if name == "-":
        if sys.stdin is None:
            raise InputError("standard input is closed")
        with places.reading(_name(file)):
            yield cast(BufferedReader, sys.stdin.buffer)
    elif places.is_address(name):
        fs, path = places.filesystem(name)
        with places.reading(name), BufferedReader(fs.open(path, "rb")) as stream:
            yield stream
    else:
        with places.reading(name), Path(name).open("rb") as stream:
            yield stream


def _name(file: Path | str) -> str:
    return "standard input" if str(file) == "-" else str(file)


def _read_available(stream: BufferedReader) -> tuple[bytes, bool]:
    """Wait for bytes; return them with what else is there, and whether it is known to be all."""
    data = stream.read1(_BLOCK)
    if not data:
        return b"", True
    while len(data) < _BLOCK and _ready(stream):
        more = stream.read1(_BLOCK)
        if not more:
            return data, True
        data += more
    return data, False


def _ready(stream: BufferedReader) -> bool:
    try:
        return bool(select.select([stream], [], [], 0)[0])
    except OSError:  # Windows can ask only sockets
        return False
