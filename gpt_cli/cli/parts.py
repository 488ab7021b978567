"""Where records go in parts: a folder of files, each of which is whole or not there.

So it is with Parquet and at addresses, where nothing can be added to a file.
"""

import json
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from gpt_cli import parquet, places
from gpt_cli.cli.output import JOB, lock
from gpt_cli.errors import MALFORMED, InputError
from gpt_cli.rows import Row

SECONDS, BYTES = 60.0, 64 << 20  # of records, after which a part is written

_ANOTHER = "name another --output"
_MENDED = "--resume goes on when that is mended"


class Parts:
    """Records in files of a folder, which is new or is continued.

    The name of a file has the index of its first row. `_job.json` says what the records depend on.
    While it is entered, no other run can enter a folder of this machine.

    Args:
        place: the folder, or its address.
        ending: of the files, ".jsonl" or ".parquet".
        columns: of the records, as `gpt_cli.records` has them.
        job: all that the records depend on, as JSON has it.
        seed_given: whether the seed in `job` must be that of an earlier run; else it gives way.
        resume: whether there may be an earlier run.

    Raises:
        InputError: the folder holds something else, or what was made from another job.
        ResourceError: a package for such files is missing.

    Attributes:
        rows, failed: how many rows an earlier run has written, and how many of them are errors;
            known when it is entered.
        to_check: 0, for `_job.json` tells whether the rows are the same.
        seed: that of an earlier run, where the job has one.
    """

    to_check = 0

    def __init__(
        self,
        place: str,
        ending: str,
        columns: Mapping[str, Any],
        job: Mapping[str, Any],
        *,
        seed_given: bool,
        resume: bool,
    ):
        if ending == ".parquet":
            parquet.require()
        self.rows = self.failed = 0
        self.seed: int | None = None
        self.place = place
        self._ending = ending
        self._columns = columns
        self._job = dict(job)
        self._seed_given = seed_given
        self._resume = resume
        self._written: list[str] = []
        self._fs, self._folder = places.filesystem(place)
        self._begin()
        self._check()

    def _check(self) -> bool:
        """Return whether there was an earlier run, of which the seed is taken.

        Raises:
            InputError: it was of another job.
        """
        with places.reading(self.place):
            begun = self._fs.exists(self._path(JOB)) and self._fs.cat_file(self._path(JOB))
            if not begun and self._names():
                raise InputError(f"{self.place} holds files of something else: {_ANOTHER}")
        if begun and not self._resume:
            raise InputError(f"{self.place} exists: --resume goes on with it, or {_ANOTHER}")
        if begun:
            self._compare(begun)
        return bool(begun)

    def _compare(self, begun: bytes) -> None:
        try:
            earlier = json.loads(begun)
            if not isinstance(earlier, dict):
                raise ValueError
        except ValueError:
            raise InputError(f"{self.place}/{JOB} is no record of a job: {_ANOTHER}") from None
        if not self._seed_given and "seed" in self._job:
            self._job["seed"] = self.seed = earlier.get("seed")
        if earlier.get("input") != self._job["input"]:
            raise InputError(f"{self.place} was made from another input: {_ANOTHER}")
        for name, value in self._job.items():
            if name not in earlier or earlier[name] != value:
                raise InputError(
                    f"{self.place} was made with {name} {json.dumps(earlier.get(name)):.200}, "
                    f"not {json.dumps(value):.200}: {_ANOTHER}"
                )

    def __enter__(self) -> "Parts":
        with ExitStack() as stack:
            with places.writing(self.place, _ANOTHER):
                self._new = not self._fs.exists(self._folder)
                here = isinstance(self._fs, LocalFileSystem)
                if self._new:
                    if not here and "/" not in self._folder.strip("/"):
                        raise FileNotFoundError  # a bucket: made, it would be one misspelt
                    with suppress(FileExistsError):
                        self._fs.mkdir(self._folder, create_parents=False)
                if here:
                    file = stack.enter_context(Path(self._path(JOB)).open("a+b"))
                    lock(file, self.place)
            if not self._check():  # again, as another run may just have ended
                with places.writing(self.place, _MENDED):
                    # Into the file that is locked, which a new one in its place would not be.
                    self._fs.pipe_file(self._path(JOB), json.dumps(self._job, indent=1).encode())
            self._survey()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._stack:
            self._flush()
        # Windows removes no file that is open.
        if self._new and error is not None and not self._names():
            self._fs.rm(self._folder, recursive=True)  # nothing could begin

    def _survey(self) -> None:
        """Count what is there."""
        for name in self._names():
            if name != self._name(self.rows):
                raise InputError(
                    f"{self.place}/{name} is not the part that begins with row {self.rows}, which "
                    f"was expected: {_ANOTHER}"
                )
            try:
                with places.reading(self.place), self._fs.open(self._path(name), "rb") as stream:
                    rows, failed = _count(stream, self._ending)
            except MALFORMED:
                raise InputError(
                    f"{self.place}/{name} holds no records of this command: {_ANOTHER}"
                ) from None
            self._written.append(name)
            self.rows += rows
            self.failed += failed
        self._first = self.rows

    def _names(self) -> list[str]:
        """The parts, and whatever else is not hidden."""
        if not self._fs.isdir(self._folder):
            return []
        # A folder of a bucket may be among its files, too.
        paths = [path for path in self._fs.ls(self._folder, detail=False) if path != self._folder]
        names = [path.rpartition("/")[2] for path in paths]
        return sorted(name for name in names if name and not places.is_hidden(name))

    def _name(self, index: int) -> str:
        return f"part-{index:012}{self._ending}"

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def has(self, row: Row) -> bool:
        """Return whether an earlier run has written this row."""
        return row.index < self.rows

    def write(self, line: str) -> None:
        """Write one record, sooner or later.

        Raises:
            ResourceError: there is no room for it.
        """
        self._lines.append(line)
        self._bytes += len(line)
        if self._bytes >= BYTES or time.perf_counter() - self._since >= SECONDS:
            self._flush()

    def _flush(self) -> None:
        lines = self._lines
        self._begin()
        if lines:
            data = BytesIO()
            _encode(lines, self._columns, self._ending, data)
            name = self._name(self._first)
            self._put(name, data.getvalue())
            self._written.append(name)
            self._first += len(lines)

    def _begin(self) -> None:
        self._lines: list[str] = []
        self._bytes = 0
        self._since = time.perf_counter()

    def _put(self, name: str, data: bytes) -> None:
        with _new_file(self._fs, self._path(name), self.place) as stream:
            stream.write(data)

    def end(self, rows: int) -> None:
        """Write what has not been written; the input had so many rows.

        Raises:
            InputError: another run has written there, too.
        """
        self._flush()
        if self._names() != self._written:
            raise InputError(f"{self.place} holds files of another run, too: {_ANOTHER}")


class Whole(Parts):
    """One file, of parts in a folder beside it, which is gone when the file is there.

    Args:
        file: its path or address, which ends with ".parquet", or in any other way for JSON Lines.
        columns, job, seed_given, resume: see `Parts`.

    Raises:
        InputError: the file is there, or the folder beside it cannot be continued.
        ResourceError: a package for such files is missing.
    """

    def __init__(
        self,
        file: str,
        columns: Mapping[str, Any],
        job: Mapping[str, Any],
        *,
        seed_given: bool,
        resume: bool,
    ):
        self._file = file
        if places.exists(file):
            raise InputError(f"{file} exists: {_ANOTHER}")
        ending = ".parquet" if file.endswith(".parquet") else ".jsonl"
        place = f"{file}.parts"
        super().__init__(place, ending, columns, job, seed_given=seed_given, resume=resume)

    def end(self, rows: int) -> None:
        """Make the file; the input had so many rows."""
        super().end(rows)
        fs, path = places.filesystem(self._file)
        with _new_file(fs, path, self._file) as target:
            if self._ending == ".parquet":
                parquet.join(self._streams(), self._columns, target)
            else:
                for stream in self._streams():
                    shutil.copyfileobj(stream, target)
        self._stack.close()  # Windows removes no file that is open
        with places.writing(self.place, "remove it by hand"):
            self._fs.rm(self._folder, recursive=True)

    def _streams(self) -> Iterator[BinaryIO]:
        for name in self._names():
            with places.reading(self.place), self._fs.open(self._path(name), "rb") as stream:
                yield stream


@contextmanager
def _new_file(fs: AbstractFileSystem, path: str, name: str) -> Iterator[BinaryIO]:
    """Open a file that will be there when it is whole, and else not at all.

    Raises:
        ResourceError: it cannot be written.
    """
    folder, _, own = path.rpartition("/")
    new = f"{folder}/.{own}.{uuid.uuid4().hex}"
    try:
        with places.writing(name, _MENDED):
            with fs.open(new, "wb") as stream:
                yield stream
            if isinstance(fs, LocalFileSystem):
                Path(new).replace(path)  # whole at once; `mv` of older fsspec copies
            else:
                fs.mv(new, path)
    except BaseException:
        with suppress(Exception):
            fs.rm(new)
        raise


def _encode(
    lines: Sequence[str], columns: Mapping[str, Any], ending: str, target: BinaryIO
) -> None:
    if ending == ".parquet":
        parquet.write(lines, columns, target)
    else:
        target.write("".join(lines).encode(errors="surrogateescape"))


def _count(stream: BinaryIO, ending: str) -> tuple[int, int]:
    """Return how many records there are, and how many of them are errors."""
    if ending == ".parquet":
        return parquet.count(stream)
    failures = ["error" in json.loads(line.decode(errors="surrogateescape")) for line in stream]
    return len(failures), sum(failures)
