"""Records as JSON Lines; the functions have the names and the parameters of those of `parquet`."""

import json
import shutil
from collections.abc import Callable, Iterable
from typing import BinaryIO, TypeAlias

from gpt_cli.records import Record, Schema, json_line

Streams: TypeAlias = Callable[[], Iterable[BinaryIO]]  # opens parts, one after the other


def encode(record: Record) -> bytes:
    """Return a record as a line; a path in it may hold bytes that are not UTF-8."""
    return json_line(record).encode(errors="surrogateescape")


def write(records: Iterable[Record], schema: Schema, stream: BinaryIO) -> None:
    """Write records as lines."""
    stream.write(b"".join(map(encode, records)))


def count(stream: BinaryIO) -> tuple[int, int]:
    """Return the number of records in a file, and the number of errors among them."""
    failures = ["error" in json.loads(line.decode(errors="surrogateescape")) for line in stream]
    return len(failures), sum(failures)


def join(streams: Streams, schema: Schema, target: BinaryIO, manifest: bytes = b"") -> None:
    """Write one file of several, without the manifest."""
    for stream in streams():
        shutil.copyfileobj(stream, target)
