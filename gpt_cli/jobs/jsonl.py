"""The contract of a format of records, and JSON Lines."""

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import BinaryIO, TypeAlias

from gpt_cli.records import Record, Schema, error_of, json_line

ErrorOf: TypeAlias = Callable[
    [Record], Record | None
]  # returns the error of a record, if it is one
Streams: TypeAlias = Callable[[], Iterable[BinaryIO]]  # opens parts, one after the other


class RecordFormat(ABC):
    """A format of files of records. Several files can be joined, with a manifest, to one."""

    has_manifest = True  # in a joined file

    @abstractmethod
    def write(self, records: Sequence[Record], schema: Schema, stream: BinaryIO) -> None:
        """Write records."""

    @abstractmethod
    def count(self, stream: BinaryIO) -> tuple[int, int]:
        """Return the number of rows whose records are in a file, and of errors among them."""

    @abstractmethod
    def join(self, streams: Streams, schema: Schema, target: BinaryIO, manifest: bytes) -> None:
        """Write one file of several, with a manifest."""

    @abstractmethod
    def manifest(self, stream: BinaryIO) -> bytes | None:
        """Return the manifest of a joined file; None if there is none."""


class Lines(RecordFormat):
    """JSON Lines, which hold no manifest."""

    has_manifest = False

    def __init__(self, error_of: ErrorOf = error_of):
        self._error_of = error_of

    def write(self, records: Sequence[Record], schema: Schema, stream: BinaryIO) -> None:
        """Write records as lines."""
        stream.write(b"".join(map(encode, records)))

    def count(self, stream: BinaryIO) -> tuple[int, int]:
        """Return the numbers of rows and of errors."""
        rows = 0
        failed = set()
        for line in stream:
            record = json.loads(line.decode(errors="surrogateescape"))
            rows += record.get("sample", 0) == 0
            if self._error_of(record) is not None:
                failed.add(rows)
        return rows, len(failed)

    def join(self, streams: Streams, schema: Schema, target: BinaryIO, manifest: bytes) -> None:
        """Write one file of several, without the manifest."""
        for stream in streams():
            shutil.copyfileobj(stream, target)

    def manifest(self, stream: BinaryIO) -> None:
        """Return None: lines hold no manifest."""


def encode(record: Record) -> bytes:
    """Return a record as a line; a path in it may hold bytes that are not UTF-8."""
    return json_line(record).encode(errors="surrogateescape")
