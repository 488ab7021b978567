"""Sinks for records, observers of progress, and the manifest that lets a job be resumed."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Self

from gpt_cli.errors import MALFORMED, InputError, ResourceError, counted
from gpt_cli.jobs import storage
from gpt_cli.jobs.jsonl import encode
from gpt_cli.jobs.layout import InputRow, Layout
from gpt_cli.jobs.task import ABSENT_IF_UNSET
from gpt_cli.options.declare import OptionError
from gpt_cli.options.request import draw_seed
from gpt_cli.records import Record

MANIFEST = "_job.json"  # in a folder of records
ANOTHER = "name another output"
LATER = "resume the job when that is fixed"


@dataclass(frozen=True)
class Resumed:
    """The output of an earlier run."""

    rows: int = 0
    failed: int = 0  # rows whose record is an error
    seed: int | None = None  # the seed to continue with
    kept: int = 0  # rows that have passed a filter


class Observer:
    """Receives the progress of a job; this one ignores it."""

    def note(self, message: str) -> None:
        """Receive a message for the user."""

    def start(self, total: int | None, done: int, failed: int) -> None:
        """Receive the number of rows, if known, and those of an earlier run."""

    def advance(self, tokens: int, failed: bool) -> None:
        """Receive the tokens of one more record, and whether it is an error."""

    def dropped(self, record: Record) -> None:
        """Receive the record of an error that the output does not have."""

    def interrupted(self) -> None:
        """Receive an interrupt of a job that can be resumed."""


class Sink(ABC):
    """The output of a job; a context manager, open while writing.

    A run calls `resume` once; then, if the sink `compares`, `check` for each row that an earlier
    run has written; then `write_row` for each other row, in order, which calls `write` for each of
    its records; and `finish`.
    """

    compares: bool = False  # whether `check` needs the rows that an earlier run has written
    keeps_errors: bool = True  # whether the output has the records of errors, or shows them

    def __enter__(self) -> Self:
        """Lock the output against other runs."""
        return self

    def __exit__(  # noqa: B027 (most sinks need no `check` and no end)
        self, kind: object, error: object, trace: object
    ) -> None:
        """Write the rest; remove an output without records."""

    def resume(self) -> Resumed:
        """Return the rows of an earlier run; raise InputError if it was another job."""
        return Resumed()

    def begin(self, header: bytes) -> None:  # noqa: B027
        """Receive the header of an input whose rows are passed on; b"" if it has none."""

    def check(self, row: InputRow) -> None:  # noqa: B027
        """Raise InputError if the record of an earlier run is that of another row."""

    @abstractmethod
    def write(self, record: Record) -> None:
        """Write the next record, now or later; raise ResourceError if that fails."""

    def write_row(self, records: Sequence[Record]) -> None:
        """Write the records of the next row: one, or several with "sample" and "samples"."""
        for record in records:
            self.write(record)

    def finish(self, rows: int) -> None:  # noqa: B027
        """Complete the output of all rows; raise InputError if it has others, too."""


class LineEnds:
    """Completes rows that are written one after the other: the last one of a file may be open."""

    def __init__(self) -> None:
        self._is_open = False  # whether the last row lacks its line end

    def complete(self, row: bytes) -> bytes:
        """Return a row, after the line end that the row before it may lack."""
        row = b"\n" + row if self._is_open else row
        self._is_open = not row.endswith(b"\n")
        return row


def _shown(value: Any) -> str:
    """Return the value of an option as messages show it."""
    return "not set" if value is None else f"{json.dumps(value):.200}"


def _changed_file(earlier: Any, files: Any) -> str:
    """Return ", FILE is new" or the like for the first of listed files that differs, else ""."""
    if not (isinstance(earlier, list) and isinstance(files, list)):
        return ""
    before = list(map(_file_name, earlier))
    now = list(map(_file_name, files))
    for name, file in zip(now, files, strict=True):
        if file not in earlier:
            return f", {name} {'has changed' if name in before else 'is new'}"
    for name in before:
        if name not in now:
            return f", {name} is missing"
    return ", its files have another order"


def _file_name(file: Any) -> Any:
    """Return the name of a listed file, which is a name, or a list of a name and more."""
    return file if isinstance(file, str) else file[0]


def refusal(complaint: str) -> InputError:
    """Return the error of an output that cannot be used."""
    return InputError(f"{complaint}: {ANOTHER}")


def existing(output: str | Path) -> OptionError:
    """Return the error of an output that an earlier run has begun."""
    return OptionError(
        "resume", f"is not set, and {output} exists: set it to continue, or {ANOTHER}"
    )


class Manifest:
    """The manifest of one output, at a path or an address.

    The job is everything that the records depend on, as JSON values. A seed of None is drawn, or is
    that of an earlier run.
    """

    def __init__(self, output: str, file: str, job: Mapping[str, Any]):
        self._output = output
        self._file = file
        self._job = json.loads(json.dumps(job))  # tuples become lists, as in the file

    @property
    def seed(self) -> int | None:
        """The seed of the job; None if it draws nothing."""
        return self._job.get("seed")

    def exists(self) -> bool:
        """Return whether an earlier run has written it."""
        return storage.exists(self._file) and storage.size(self._file) > 0

    def compare(self, content: bytes | None = None) -> None:
        """Raise InputError if the earlier run was another job; its seed replaces None.

        The content of its manifest is by default that of the file.
        """
        try:
            earlier = json.loads(storage.read_bytes(self._file) if content is None else content)
            if not isinstance(earlier, dict):
                raise ValueError
        except ValueError:
            raise refusal(f"{self._file} is not a manifest") from None
        if "seed" in self._job and self._job["seed"] is None:
            self._job["seed"] = earlier.get("seed")
        if "keep_fields" in self._job:  # version 1.0 had no choice
            kept = "all" if self._job.get("task") == "activations" else "id"
            earlier.setdefault("keep_fields", kept)
        files = self._job.get("input")
        earlier_files = earlier.get("input")
        if files != earlier_files:
            change = _changed_file(earlier_files, files)
            raise refusal(f"{self._output} was made from another input{change}")
        absent_if_unset = {*ABSENT_IF_UNSET, "format", "delimiter", "bos_token", "edits"}
        for name, value in self._job.items():
            if name not in earlier and name in absent_if_unset:
                now = f"was not set, and is now {_shown(value)}"
                raise OptionError(name, f"of {self._output} {now}: {ANOTHER}")
            if name not in earlier:
                raise refusal(f"{self._output} was made by a version without {name}")
            if earlier[name] != value:
                theirs, ours = _shown(earlier[name]), _shown(value)
                # Long ones, such as JSON schemas, may begin alike.
                change = "differs" if theirs == ours else f"was {theirs}, and is now {ours}"
                raise OptionError(name, f"of {self._output} {change}: {ANOTHER}")
        for name, value in earlier.items():  # some are absent if they are not set
            if value and name not in {*self._job, "input"}:
                was = f"was {_shown(value)}, and is not set now"
                raise OptionError(name, f"of {self._output} {was}: {ANOTHER}")

    def begin(self) -> bytes:
        """Return the content of the file; a random seed replaces None."""
        if self._job.get("seed", 0) is None:
            self._job["seed"] = draw_seed()
        return json.dumps(self._job, indent=1).encode()


class JSONLines(Sink):
    """A JSON Lines file on this machine; each record is appended at once.

    Its manifest is the hidden file .NAME.job.json beside it.
    """

    compares = True  # so the input may be a pipe

    def __init__(self, path: Path, layout: Layout, job: Mapping[str, Any]):
        self._path = path
        self._layout = layout
        self._has_samples = "samples" in layout.schema
        self._side = path.with_name(f".{path.name}.job.json")
        files = list(map(_file_name, job.get("input") or []))
        # The rows that are written tell lines from JSON Lines, but not from whole files.
        dropped = ["input"] if job.get("format") == "text" else ["input", "format"]
        job = {name: value for name, value in job.items() if name not in dropped}
        if len(files) > 1:  # a single file may have grown, or may now be a pipe
            job["input"] = files
        self._manifest = Manifest(str(path), str(self._side), job)
        self._hashes: list[int | None] = []  # of the rows that were written; None if failed
        self._failed = 0  # rows with an error

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
        except OSError:  # of a flush that failed before, as `write` has reported
            if error is None:
                raise
        if self._new and error is not None and self._path.stat().st_size == 0:
            self._path.unlink()  # it is closed: Windows removes no file that is open
            with suppress(OSError):
                self._side.unlink()

    def resume(self) -> Resumed:
        has_manifest = not self._new and self._manifest.exists()
        if has_manifest:
            self._manifest.compare()
        end = self._read()
        if self._hashes and not has_manifest:
            raise refusal(f"{self._path} cannot be resumed without its manifest {self._side.name}")
        if not has_manifest:
            with storage.writing(str(self._side), ANOTHER):
                self._side.write_bytes(self._manifest.begin())
        self._file.seek(end)
        return Resumed(len(self._hashes), self._failed, self._manifest.seed)

    def _read(self) -> int:
        """Read the records; return the number of bytes of whole rows.

        The run was perhaps killed while it wrote a record, or between two samples of a row.
        """
        end = 0
        row: list[Record] = []  # the samples so far of the next row
        size = 0  # of their lines
        for number, data in enumerate(chain.from_iterable(storage.read_lines(str(self._path))), 1):
            beginning = self._layout.line_start(len(self._hashes)).encode()
            if not data.endswith(b"\n") and data.startswith(beginning[: len(data)]):
                break
            try:
                if not (data.startswith(beginning) and data.endswith(b"\n")):
                    raise ValueError
                record = json.loads(data.decode(errors="surrogateescape"))
                row.append(record)
                sample, samples = 0, 1
                if self._has_samples:  # else these are names of fields of rows
                    sample, samples = record.get("sample", 0), record.get("samples", 1)
                if sample != len(row) - 1:
                    raise ValueError
                size += len(data)
                if len(row) == samples:
                    self._add(row)
                    end += size
                    row, size = [], 0
            except MALFORMED:
                line = f"{self._path}, line {number}"
                raise refusal(f"{line}, is not a record of this command") from None
        return end

    def _add(self, row: Sequence[Record]) -> None:
        """Note the records of a row that an earlier run has written."""
        good = [record for record in row if self._layout.error_of(record) is None]
        self._hashes.append(self._hash(good[0], good[0].get("id")) if good else None)
        self._failed += len(good) < len(row)

    def _hash(self, fields: Mapping[str, Any], id: Any) -> int:
        """Return a hash of the id and the texts of a row or a record."""
        texts = [fields[name] for name in self._layout.texts]
        return hash(json.dumps([id, texts]))

    def check(self, row: InputRow) -> None:
        written = self._hashes[row.index]
        if written is not None and (row.error or written != self._hash(row.fields, row.id)):
            place = row.file if row.line is None else f"line {row.line}"
            difference = f"row {row.index} differs from {place}; {ANOTHER}"
            raise InputError(f"{self._path} was made from another input: {difference}")

    def write(self, record: Record) -> None:
        with storage.writing(str(self._path), LATER):
            self._file.truncate()  # drops the incomplete record of an earlier run
            self._file.write(encode(record))
            self._file.flush()

    def finish(self, rows: int) -> None:
        if rows < len(self._hashes):
            size = f"at least {counted(len(self._hashes), 'row')}, not {rows:,}"
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
