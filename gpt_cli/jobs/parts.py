"""Sinks of parts, for Parquet files and addresses, where nothing can be appended."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Self

from fsspec.implementations.local import LocalFileSystem

from gpt_cli.errors import MALFORMED
from gpt_cli.jobs import delimited, parquet, storage
from gpt_cli.jobs.jsonl import ErrorOf, Lines, RecordFormat, encode
from gpt_cli.jobs.sinks import (
    ANOTHER,
    LATER,
    MANIFEST,
    LineEnds,
    Manifest,
    Resumed,
    Sink,
    existing,
    lock,
    refusal,
)
from gpt_cli.records import Record, Schema, error_of

SECONDS = 60.0  # after which a part is written
BYTES = 64 << 20  # after which a part is written


def _format(ending: str, error_of: ErrorOf = error_of) -> RecordFormat:
    """Return the format of files with an ending."""
    if ending == ".parquet":
        return parquet.Parquet()
    if ending == ".jsonl":
        return Lines(error_of)
    if ending in (".csv", ".tsv"):
        return delimited.Delimited("," if ending == ".csv" else "\t")
    from gpt_cli.jobs import arrays  # brings NumPy

    return arrays.Npz() if ending == ".npz" else arrays.Safetensors()


class Folder(Sink):
    """Parts in a folder or at its address, which is new or is resumed.

    The name of a part has the index of its first row, and the ending of its format.
    `_job.json` is the manifest of the job, which has checksums of the input.
    """

    def __init__(
        self,
        name: str,
        ending: str,
        schema: Schema,
        job: Mapping[str, Any],
        *,
        resume: bool,
        error_of: ErrorOf = error_of,
    ):
        if ending == ".parquet":
            parquet.library()
        self.name = name
        self._format = _format(ending, error_of)
        self._ending = ending
        self._schema = schema
        self._resume = resume
        self._fs, self._folder = storage.filesystem(name)
        self._manifest = Manifest(name, f"{name}/{MANIFEST}", job)
        self._written: list[str] = []
        self._first = 0  # index of the first row of the next part
        self._begin_part()
        self._check_earlier_run()

    def _check_earlier_run(self) -> bool:
        """Return whether there was one; raise InputError if it was another job."""
        begun = self._manifest.exists()
        with storage.reading(self.name):
            if not begun and self._names():
                raise refusal(f"{self.name} has other files")
        if begun and not self._resume:
            raise existing(self.name)
        if begun:
            self._manifest.compare()
        return begun

    def __enter__(self) -> Self:
        self._locked = ExitStack()
        with storage.writing(self.name, ANOTHER):
            self._new = not self._fs.exists(self._folder)
            here = isinstance(self._fs, LocalFileSystem)
            if self._new:
                if not here and "/" not in self._folder.strip("/"):
                    raise FileNotFoundError  # a bucket, which may be misspelt
                with suppress(FileExistsError):
                    self._fs.mkdir(self._folder, create_parents=False)
            if here:
                file = self._locked.enter_context(Path(self._folder, MANIFEST).open("a+b"))
                lock(file, self.name)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with self._locked:
            self._write_part()
        # The manifest is closed: Windows removes no file that is open.
        if self._new and error is not None and not self._names():
            self._fs.rm(self._folder, recursive=True)

    def resume(self) -> Resumed:
        if not self._check_earlier_run():  # again, as another run may just have ended
            with storage.writing(self.name, LATER):
                # Not by an atomic replacement: the lock is on this file.
                self._fs.pipe_file(f"{self._folder}/{MANIFEST}", self._manifest.begin())
        failed = 0
        for name in self._names():
            if name != self._next_name:
                part = f"the part that begins with row {self._first}"
                raise refusal(f"{self.name}/{name} is not {part}")
            earlier = count(f"{self.name}/{name}", self._format)
            self._written.append(name)
            self._first += earlier.rows
            failed += earlier.failed
        return Resumed(self._first, failed, self._manifest.seed)

    def write(self, record: Record) -> None:
        self.write_row([record])

    def write_row(self, records: Sequence[Record]) -> None:
        self._part += records
        self._rows += 1
        self._bytes += sum(map(self._size, records))
        if self._bytes >= BYTES or time.perf_counter() - self._since >= SECONDS:
            self._write_part()

    def _size(self, record: Record) -> int:
        """Return roughly how many bytes a record takes in a file."""
        arrays = record.get("arrays", {})
        rest = {name: value for name, value in record.items() if name != "arrays"}
        return len(encode(rest)) + sum(array.nbytes for array in arrays.values())

    def finish(self, rows: int) -> None:
        self._write_part()
        if self._names() != self._written:
            raise refusal(f"{self.name} has files of another run")

    def _begin_part(self) -> None:
        self._part: list[Record] = []
        self._rows = 0
        self._bytes = 0
        self._since = time.perf_counter()

    def _write_part(self) -> None:
        records = self._part
        rows = self._rows
        self._begin_part()
        if not records:
            return
        name = self._next_name
        path = f"{self._folder}/{name}"
        opened = storage.new_object(self._fs, path, self.name, LATER)
        with opened as stream, storage.writing(self.name, LATER):
            self._format.write(records, self._schema, stream)
        self._written.append(name)
        self._first += rows

    def _names(self) -> list[str]:
        """Return the names of the parts, and of all other files that are not hidden."""
        if not self._fs.isdir(self._folder):
            return []
        # A bucket may list a folder among its files.
        paths = [path for path in self._fs.ls(self._folder, detail=False) if path != self._folder]
        names = [path.rpartition("/")[2] for path in paths]
        return sorted(name for name in names if name and not storage.is_hidden(name))

    def _streams(self) -> Iterator[BinaryIO]:
        """Yield the parts, opened one after the other."""
        for name in self._names():
            path = f"{self._folder}/{name}"
            with storage.reading(self.name), self._fs.open(path, "rb") as stream:
                yield stream

    @property
    def _next_name(self) -> str:
        return f"part-{self._first:012}{self._ending}"


class File(Folder):
    """One file. At the end, it is joined from the parts in FILE.parts, which is then removed.

    Its format is that of the ending of its name, by default JSON Lines; that of the parts is the
    same, unless they have another ending.
    """

    def __init__(
        self,
        name: str,
        schema: Schema,
        job: Mapping[str, Any],
        *,
        resume: bool,
        error_of: ErrorOf = error_of,
        ending: str | None = None,
    ):
        if storage.exists(name):
            raise refusal(f"{name} exists")
        self._file = name
        parts = f"{name}.parts"
        ending = ending or _ending(name)
        super().__init__(parts, ending, schema, job, resume=resume, error_of=error_of)

    def finish(self, rows: int) -> None:
        super().finish(rows)
        fs, path = storage.filesystem(self._file)
        opened = storage.new_object(fs, path, self._file, LATER)
        with opened as target, storage.writing(self._file, LATER):
            self._join(target)
        self._locked.close()  # Windows removes no file that is open
        with storage.writing(self.name, "remove it by hand"):
            self._fs.rm(self._folder, recursive=True)

    def _join(self, target: BinaryIO) -> None:
        """Write the file from the parts, and a hidden file if it cannot hold the manifest."""
        self._format.join(self._streams, self._schema, target, self._manifest.begin())
        if not self._format.has_manifest:
            self._write_side({})

    def _write_side(self, counts: Record) -> None:
        """Write the manifest, and counts, to the hidden file beside the file."""
        side = _side(self._file)
        content = counts | {"job": json.loads(self._manifest.begin())}
        with storage.new_object(*storage.filesystem(side), side, LATER) as stream:
            stream.write(json.dumps(content, indent=1).encode())


class FilteredFile(File):
    """The rows that pass a filter, below the header of their table.

    The parts have a line of JSON for each row of the input: its "index", and its "data" if it
    passes, or its "error". A hidden file beside the output has the manifest and the counts.
    """

    keeps_errors = False

    def __init__(self, name: str, job: Mapping[str, Any], *, resume: bool):
        super().__init__(name, {}, job, resume=resume, ending=".jsonl")
        self._header = b""

    def begin(self, header: bytes) -> None:
        self._header = header

    def resume(self) -> Resumed:
        earlier = super().resume()
        return replace(earlier, kept=sum("data" in row for row in self._read()))

    def write_row(self, records: Sequence[Record]) -> None:
        """Write what a part has of a row; a row that passes is Unicode."""
        (record,) = records
        row = {"index": record["index"]}
        if "error" in record:
            row["error"] = record["error"]["code"]
        elif "data" in record:
            row["data"] = record["data"].decode()
        super().write_row([row])

    def _size(self, record: Record) -> int:
        return 20 + len(record.get("data", ""))  # to encode it twice would take a while

    def _read(self) -> Iterator[Record]:
        """Yield the lines of all parts."""
        for stream in self._streams():
            yield from map(json.loads, stream)

    def _join(self, target: BinaryIO) -> None:
        """Write the rows that pass, and then the hidden file."""
        ends = LineEnds()
        target.write(ends.complete(self._header) if self._header else b"")
        counts = {"rows": 0, "failed": 0, "kept": 0}
        for row in self._read():
            counts["rows"] += 1
            counts["failed"] += "error" in row
            if "data" in row:
                counts["kept"] += 1
                target.write(ends.complete(row["data"].encode()))
        self._write_side(counts)


def _ending(name: str) -> str:
    """Return the ending that stands for the format of a file of records."""
    ending = PurePosixPath(name).suffix.lower()
    return ending if ending in (".parquet", ".csv", ".tsv", ".safetensors", ".npz") else ".jsonl"


def check_complete(name: str, job: Mapping[str, Any], error_of: ErrorOf = error_of) -> Resumed:
    """Return the numbers of records and of errors in a complete file.

    Raise InputError if it was made by another job. JSON Lines of version 1.0 have no manifest.
    """
    format = _format(_ending(name), error_of)
    resumed = count(name, format)
    if format.has_manifest:
        with storage.open_file(name) as stream:
            content = format.manifest(stream)
        if content is None:
            raise refusal(f"{name} has no manifest, so it may be of another job or an old version")
        Manifest(name, name, job).compare(content)
    elif storage.exists(_side(name)):
        _compare_side(name, job)
    return resumed


def check_filtered(name: str, job: Mapping[str, Any]) -> Resumed:
    """Return the counts of a complete file; raise InputError if it was made by another job."""
    if not storage.exists(_side(name)):
        raise refusal(f"{name} exists, and has no manifest {_side(name)}")
    counts = _compare_side(name, job)
    return Resumed(counts["rows"], counts["failed"], kept=counts["kept"])


def _compare_side(name: str, job: Mapping[str, Any]) -> Record:
    """Return the counts in the hidden file beside a file; InputError if its job was another."""
    side = _side(name)
    try:
        content = json.loads(storage.read_bytes(side))
        manifest = json.dumps(content.pop("job")).encode()
    except MALFORMED:
        raise refusal(f"{side} is no manifest of {name}") from None
    Manifest(name, side, job).compare(manifest)
    return dict(content)


def _side(name: str) -> str:
    """Return the name of the hidden file beside a file."""
    folder, slash, base = name.rpartition("/")
    return f"{folder}{slash}.{base}.job.json"


def count(name: str, format: RecordFormat) -> Resumed:
    """Return the numbers of records and of errors in a complete file."""
    fs, path = storage.filesystem(name)
    with storage.reading(name), fs.open(path, "rb") as stream:
        try:
            return Resumed(*format.count(stream))
        except MALFORMED:
            raise refusal(f"{name} has no records of this command") from None
