"""Where records go a line at a time: standard output, or a file, which can be continued."""

import json
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from gpt_cli.cli.text import write
from gpt_cli.errors import InputError, ResourceError
from gpt_cli.reading import read_lines
from gpt_cli.records import Task
from gpt_cli.rows import Row

JOB = "_job.json"  # in a folder of records: what they were made from


class Output:
    """Where records go: a file that must be new or is continued, or standard output.

    Each record is written whole, at once. While it is entered, no other run can enter the file.

    Attributes:
        rows, failed: how many rows an earlier run has written, and how many of them are errors;
            known when it is entered.
        to_check: how many rows `has` must see, before others, to know that they are the same.
        seed: that of an earlier run, when a row that has none of its own has been met.
    """

    def __init__(
        self, path: Path | None, task: Task, model: str, seed: int | None, *, resume: bool
    ):
        if resume and path is None:
            raise InputError("--resume goes on with a file: give --output OUT with it")
        if path is not None and path.exists() and not path.is_file():
            raise InputError(f"{path} is not a file: name another --output")
        if path is not None and path.exists() and not resume:
            raise InputError(f"{path} exists: --resume goes on with it, or name another --output")
        self.rows = self.failed = self.to_check = 0
        self.seed: int | None = None
        self._path = path
        self._task = task
        self._wanted = model, seed
        self._end = 0  # of what an earlier run has written whole, in bytes
        # Hash of the row, and its seed where the task has any; None where it failed.
        self._written: list[tuple[int, int | None] | None] = []
        self._model: str | None = None

    def __enter__(self) -> "Output":
        if self._path is not None:
            self._new = not self._path.exists()
            self._path.touch()
            self._file = self._path.open("r+b")
            try:
                lock(self._file, self._path)
                self._read(self._path)
                self.to_check = self.rows
                self._file.seek(self._end)
            except BaseException:
                self._file.close()
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._path is not None:
            try:
                self._file.close()
            except OSError:  # it has tried again what `write` has told of
                if error is None:
                    raise
            if self._new and error is not None and self._path.stat().st_size == 0:
                self._path.unlink()  # nothing could begin; Windows removes no file that is open

    def _read(self, path: Path) -> None:
        field, mark = self._task.fields[0], self._task.mark
        for data in (line for block in read_lines(path) for line in block):
            beginning = f'{{"index": {self.rows}, '.encode()
            if not data.endswith(b"\n") and data.startswith(beginning[: len(data)]):
                break  # the run was killed while it wrote this
            try:
                if not (data.startswith(beginning) and data.endswith(b"\n")):
                    raise ValueError
                record = json.loads(data.decode(errors="surrogateescape"))
                if "error" in record:
                    self.failed += 1
                    self._written.append(None)
                else:
                    if mark not in record:
                        raise LookupError
                    made_from = _hash(record.get("id"), record[field])
                    self._written.append((made_from, record.get("seed")))
                    self._model = record["model"]
            except (ValueError, TypeError, LookupError, RecursionError):
                raise InputError(
                    f"{path}, line {self.rows + 1}, is no record of this command: "
                    "name another --output"
                ) from None
            self.rows += 1
            self._end += len(data)

    def has(self, row: Row) -> bool:
        """Return whether an earlier run has written this row.

        Raises:
            InputError: what it has written there is another row, another model's or another seed's.
        """
        if row.index >= self.rows:
            return False
        written = self._written[row.index]
        if written is None:
            return True
        made_from, written_seed = written
        model, seed = self._wanted
        if made_from != _hash(row.id, row.get(self._task.fields[0])):
            raise InputError(
                f"{self._path} was made from another input: its row {row.index} is not that of "
                f"line {row.line}; name another --output"
            )
        if self._model != model:
            raise InputError(
                f"{self._path} was made with --model {self._model}, not {model}; "
                "name another --output"
            )
        if written_seed is not None and not row.has_seed:
            self.seed = written_seed
            if seed not in (None, written_seed):
                raise InputError(
                    f"{self._path} was made with --seed {written_seed}, not {seed}; "
                    "name another --output"
                )
        return True

    def write(self, line: str) -> None:
        """Write one record.

        Raises:
            ResourceError: there is no room for it.
        """
        if self._path is None:
            write(line)
            return
        try:
            self._file.truncate()  # what is left of a record that an earlier run did not finish
            self._file.write(line.encode(errors="surrogateescape"))
            self._file.flush()
        except OSError as error:
            raise ResourceError(
                f"cannot write {self._path}: {error.strerror}; --resume goes on when that is mended"
            ) from None

    def end(self, rows: int) -> None:
        """Check that the input, which has so many rows, is that of an earlier run, too.

        Raises:
            InputError: it has fewer.
        """
        if rows < self.rows:
            raise InputError(
                f"{self._path} was made from another input, of {self.rows} rows or more, "
                f"not {rows}; name another --output"
            )


def lock(file: BinaryIO, path: Path | str) -> None:
    """Raise ResourceError if another run holds this file; else hold it until it is closed."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ResourceError(f"{path} is being written by another run: wait until it ends") from None


def _hash(id: Any, prompt: Any) -> int:
    return hash(json.dumps([id, prompt]))
