"""Sinks: where the records of a job go, and how an interrupted job is resumed."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self

from gpt_cli.errors import InputError, ResourceError
from gpt_cli.jobs import storage
from gpt_cli.jobs.jsonl import encode
from gpt_cli.jobs.layout import InputRow
from gpt_cli.jobs.manifest import ANOTHER, Manifest, refusal
from gpt_cli.records import Record

LATER = "resume the job when that is fixed"


@dataclass(frozen=True)
class Resumed:
    """The output of an earlier run."""

    rows: int = 0
    failed: int = 0  # rows whose record is an error
    seed: int | None = None  # the seed to continue with


class Sink(Protocol):
    """The output of a job, which is entered while it is written.

    A run calls `resume` once, `check` for the rows that an earlier run has written if the sink
    `compares`, `write` for all other records in order, and `finish`.
    """

    compares: bool = False  # whether `check` compares rows; else a run may skip reading them

    def __enter__(self) -> Self:
        """Lock the output, so that no other run writes it."""
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Write the rest; remove an output without records."""
        return

    def resume(self) -> Resumed:
        """Return what an earlier run has written; raise InputError if it was another job."""
        return Resumed()

    def check(self, row: InputRow) -> None:
        """Raise InputError if the record of an earlier run was made from another row."""
        return

    def write(self, record: Record) -> None:
        """Write the next record, now or later; raise ResourceError if that fails."""

    def finish(self, rows: int) -> None:
        """Complete an output; raise InputError for rows beyond the input or of another run."""
        return


class JSONLines(Sink):
    """A JSON Lines file on this machine, to which each record is appended at once.

    Its manifest is the hidden file .NAME.job.json beside it.
    """

    compares = True  # so the input may have grown, and may be a pipe

    def __init__(self, path: Path, texts: Sequence[str], job: Mapping[str, Any]):
        self._path = path
        self._texts = texts  # the fields of a row's text
        self._side = path.with_name(f".{path.name}.job.json")
        job = {name: value for name, value in job.items() if name not in ("input", "format")}
        self._manifest = Manifest(str(path), str(self._side), job)
        self._rows: list[int | None] = []  # the hash of each row that was written; None if failed

    def __enter__(self) -> Self:
        self._new = not self._path.exists()
        with storage.writing(str(self._path), ANOTHER):
            self._path.touch()
            self._file = self._path.open("r+b")
        lock(self._file, self._path)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self._file.close()
        except OSError:  # it retried a failed flush, which `write` has reported
            if error is None:
                raise
        if self._new and error is not None and self._path.stat().st_size == 0:
            self._path.unlink()  # it is closed: Windows removes no file that is open
            with suppress(OSError):
                self._side.unlink()

    def resume(self) -> Resumed:
        known = not self._new and self._manifest.exists()
        if known:
            self._manifest.compare()
        failed, end = self._read()
        if self._rows and not known:
            raise refusal(f"{self._path} cannot be resumed without its manifest {self._side.name}")
        if not known:
            with storage.writing(str(self._side), ANOTHER):
                self._side.write_bytes(self._manifest.begin())
        self._file.seek(end)
        return Resumed(len(self._rows), failed, self._manifest.seed)

    def _read(self) -> tuple[int, int]:
        """Read the records; return the number of errors, and of bytes without a torn record."""
        failed = end = 0
        for data in (line for lines in storage.read_lines(self._path) for line in lines):
            beginning = f'{{"index": {len(self._rows)}, '.encode()
            if not data.endswith(b"\n") and data.startswith(beginning[: len(data)]):
                break  # the run was killed while it wrote this
            try:
                if not (data.startswith(beginning) and data.endswith(b"\n")):
                    raise ValueError
                record = json.loads(data.decode(errors="surrogateescape"))
                error = "error" in record
                row_hash = None if error else self._hash(record, record.get("id"))
            except (ValueError, TypeError, LookupError, RecursionError):
                line = f"{self._path}, line {len(self._rows) + 1}"
                raise refusal(f"{line}, is not a record of this command") from None
            self._rows.append(row_hash)
            failed += error
            end += len(data)
        return failed, end

    def _hash(self, fields: Mapping[str, Any], id: Any) -> int:
        return hash(json.dumps([id, *(fields[name] for name in self._texts)]))

    def check(self, row: InputRow) -> None:
        written = self._rows[row.index]
        if written is not None and (row.error or written != self._hash(row.fields, row.id)):
            difference = f"row {row.index} differs from line {row.line}; {ANOTHER}"
            raise InputError(f"{self._path} was made from another input: {difference}")

    def write(self, record: Record) -> None:
        with storage.writing(str(self._path), LATER):
            self._file.truncate()  # drops the incomplete record of an earlier run
            self._file.write(encode(record))
            self._file.flush()

    def finish(self, rows: int) -> None:
        if rows < len(self._rows):
            size = f"at least {len(self._rows)} rows, not {rows}"
            raise refusal(f"{self._path} was made from another input, of {size}")


def lock(file: BinaryIO, path: Path | str) -> None:
    """Lock a file until it is closed; close it and raise ResourceError if another run has it."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ResourceError(f"{path} is being written by another run: wait until it ends") from None
