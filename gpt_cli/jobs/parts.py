"""Sinks of parts, for Parquet files and addresses, where nothing can be appended."""

import json
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from gpt_cli.errors import MALFORMED, InputError
from gpt_cli.jobs import manifest, parquet, storage
from gpt_cli.jobs.manifest import ANOTHER, Manifest, refusal
from gpt_cli.jobs.sinks import LATER, Resumed, Sink, encode, lock
from gpt_cli.records import Record, Schema

SECONDS, BYTES = 60.0, 64 << 20  # after which a part is written


class Folder(Sink):
    """Parts in a folder, or at its address, which is new or is resumed.

    The name of a part has the index of its first row, and the ending ".jsonl" or ".parquet".
    `_job.json` is the manifest of the job, which has checksums of the input.

    Raises:
        InputError: the folder has other content, or was made by another job.
        ResourceError: a package for such files is missing.
    """

    def __init__(
        self, place: str, ending: str, schema: Schema, job: Mapping[str, Any], *, resume: bool
    ):
        if ending == ".parquet":
            parquet.library()
        self.place = place
        self._ending = ending
        self._schema = schema
        self._resume = resume
        self._fs, self._folder = storage.filesystem(place)
        self._manifest = Manifest(place, f"{place}/{manifest.NAME}", job)
        self._written: list[str] = []
        self._first = 0  # index of the first row of the next part
        self._begin_part()
        self._check_folder()

    def _check_folder(self) -> bool:
        """Return whether there was an earlier run; raise InputError if it was another job."""
        begun = self._manifest.exists()
        with storage.reading(self.place):
            if not begun and self._names():
                raise refusal(f"{self.place} has other files")
        if begun and not self._resume:
            raise InputError(f"{self.place} exists: continue it with --resume, or {ANOTHER}")
        if begun:
            self._manifest.compare()
        return begun

    def __enter__(self) -> Self:
        self._locked = ExitStack()
        with storage.writing(self.place, ANOTHER):
            self._new = not self._fs.exists(self._folder)
            here = isinstance(self._fs, LocalFileSystem)
            if self._new:
                if not here and "/" not in self._folder.strip("/"):
                    raise FileNotFoundError  # a bucket, which may be misspelt
                with suppress(FileExistsError):
                    self._fs.mkdir(self._folder, create_parents=False)
            if here:
                file = self._locked.enter_context(Path(self._path(manifest.NAME)).open("a+b"))
                lock(file, self.place)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with self._locked:
            self._write_part()
        # The manifest is closed: Windows removes no file that is open.
        if self._new and error is not None and not self._names():
            self._fs.rm(self._folder, recursive=True)

    def resume(self) -> Resumed:
        if not self._check_folder():  # again, as another run may just have ended
            with storage.writing(self.place, LATER):
                # In place: the file is locked, and an atomic replacement would not be.
                self._fs.pipe_file(self._path(manifest.NAME), self._manifest.begin())
        failed = 0
        for name in self._names():
            if name != self._name(self._first):
                begins = f"begins with row {self._first}"
                raise refusal(f"{self.place}/{name} is not the part that {begins}")
            with storage.reading(self.place), self._fs.open(self._path(name), "rb") as stream:
                try:
                    rows, errors = _count(stream, self._ending)
                except MALFORMED:
                    message = f"{self.place}/{name} has no records of this command"
                    raise refusal(message) from None
            self._written.append(name)
            self._first += rows
            failed += errors
        return Resumed(self._first, failed, self._manifest.seed)

    def write(self, record: Record) -> None:
        self._part.append(record)
        self._bytes += len(encode(record))
        if self._bytes >= BYTES or time.perf_counter() - self._since >= SECONDS:
            self._write_part()

    def finish(self, rows: int) -> None:
        self._write_part()
        if self._names() != self._written:
            raise refusal(f"{self.place} has files of another run")

    def _begin_part(self) -> None:
        self._part: list[Record] = []
        self._bytes = 0
        self._since = time.perf_counter()

    def _write_part(self) -> None:
        records = self._part
        self._begin_part()
        if not records:
            return
        name = self._name(self._first)
        with _atomic(self._fs, self._path(name), self.place) as stream:
            if self._ending == ".parquet":
                parquet.write(records, self._schema, stream)
            else:
                stream.write(b"".join(map(encode, records)))
        self._written.append(name)
        self._first += len(records)

    def _names(self) -> list[str]:
        """Return the names of the parts, and of all other files that are not hidden."""
        if not self._fs.isdir(self._folder):
            return []
        # A bucket may list a folder among its files.
        paths = [path for path in self._fs.ls(self._folder, detail=False) if path != self._folder]
        names = [path.rpartition("/")[2] for path in paths]
        return sorted(name for name in names if name and not storage.is_hidden(name))

    def _name(self, index: int) -> str:
        return f"part-{index:012}{self._ending}"

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"


class File(Folder):
    """One file, joined at the end from the parts in the folder FILE.parts, which then is removed.

    The file is Parquet if its name ends with ".parquet", else JSON Lines.
    """

    def __init__(self, file: str, schema: Schema, job: Mapping[str, Any], *, resume: bool):
        self._file = file
        if storage.exists(file):
            raise refusal(f"{file} exists")
        ending = ".parquet" if file.endswith(".parquet") else ".jsonl"
        super().__init__(f"{file}.parts", ending, schema, job, resume=resume)

    def finish(self, rows: int) -> None:
        super().finish(rows)
        fs, path = storage.filesystem(self._file)
        with _atomic(fs, path, self._file) as target:
            if self._ending == ".parquet":
                parquet.join(self._streams(), self._schema, target)
            else:
                for stream in self._streams():
                    shutil.copyfileobj(stream, target)
        self._locked.close()  # Windows removes no file that is open
        with storage.writing(self.place, "remove it by hand"):
            self._fs.rm(self._folder, recursive=True)

    def _streams(self) -> Iterator[BinaryIO]:
        for name in self._names():
            with storage.reading(self.place), self._fs.open(self._path(name), "rb") as stream:
                yield stream


def _count(stream: BinaryIO, ending: str) -> tuple[int, int]:
    """Return the number of records, and the number of errors among them."""
    if ending == ".parquet":
        return parquet.count(stream)
    failures = ["error" in json.loads(line.decode(errors="surrogateescape")) for line in stream]
    return len(failures), sum(failures)


@contextmanager
def _atomic(fs: AbstractFileSystem, path: str, name: str) -> Iterator[BinaryIO]:
    """Open a file that appears only when complete; raise ResourceError if it cannot be written."""
    folder, _, own = path.rpartition("/")
    new = f"{folder}/.{own}.{uuid.uuid4().hex}"
    try:
        with storage.writing(name, LATER):
            with fs.open(new, "wb") as stream:
                yield stream
            if isinstance(fs, LocalFileSystem):
                Path(new).replace(path)  # atomic; older versions of fsspec copy
            else:
                fs.mv(new, path)
    except BaseException:
        with suppress(Exception):
            fs.rm(new)
        raise
