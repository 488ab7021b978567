"""The rows of `gpt-cli batch`: read from lines or JSON Lines, written as JSON Lines, resumed."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from gpt_cli.cli.text import read_lines, without_line_end, write
from gpt_cli.errors import InputError, ResourceError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Row:
    """A line of the input that is not blank."""

    index: int  # among the rows, from 0
    line: int  # among the lines, from 1
    id: Any  # whatever the row calls itself; None if it does not
    request: dict[str, Any] | InputError  # the prompt and the row's own options

    @property
    def has_seed(self) -> bool:
        """Whether it has a seed of its own."""
        return isinstance(self.request, dict) and self.request.get("seed") is not None

    @property
    def prompt(self) -> Any:
        """What the row calls so, which may be anything."""
        return None if isinstance(self.request, InputError) else self.request.get("prompt")


def read_rows(file: Path, form: str) -> Iterator[list[Row]]:
    """Yield the rows of a file, in lists of what comes at once.

    Args:
        file: "-" is standard input.
        form: "lines", "jsonl", or "auto": "jsonl" if the first row begins with a brace.

    Raises:
        InputError: the file cannot be read.
    """
    indices = count()
    for block in _row_lines(file):
        if form == "auto" and block:
            form = "jsonl" if block[0][1].lstrip().startswith(b"{") else "lines"
        yield [_parse(next(indices), line, data, form) for line, data in block]


def count_rows(file: Path) -> int:
    """Return how many rows a file has.

    Raises:
        InputError: the file cannot be read.
    """
    return sum(map(len, _row_lines(file)))


def _row_lines(file: Path) -> Iterator[list[tuple[int, bytes]]]:
    """Yield the lines that are rows, with their numbers from 1, in lists of what comes at once."""
    numbers = count(1)
    for block in read_lines(file):
        lines = [(next(numbers), data) for data in block]
        if lines[0][0] == 1:
            lines[0] = 1, block[0].removeprefix(_BYTE_ORDER_MARK)
        yield [(number, data) for number, data in lines if data.strip()]


def _parse(index: int, line: int, data: bytes, form: str) -> Row:
    try:
        text = without_line_end(data.decode())
        if form == "lines":
            return Row(index, line, None, {"prompt": text})
        request = json.loads(text)
        if not isinstance(request, dict):
            raise InputError('a row must be a JSON object, such as {"prompt": "Once"}')
        id = request.pop("id", None)
        json.dumps(id, ensure_ascii=False, allow_nan=False).encode()
        return Row(index, line, id, request)
    except UnicodeDecodeError as error:
        reason = InputError(f"the row is not UTF-8 at byte {error.start}")
    except json.JSONDecodeError as error:
        reason = InputError(f"the row is not valid JSON: {error.msg} at character {error.pos}")
    except (ValueError, RecursionError):
        reason = InputError("the row holds what JSON cannot write again, or is nested too deeply")
    except InputError as error:
        reason = error
    return Row(index, line, None, reason)


class Output:
    """Where records go: a file that must be new or is continued, or standard output.

    Each record is written whole, at once. While it is entered, no other run can enter the file.

    Attributes:
        rows, failed: how many rows an earlier run has written, and how many of them are errors;
            known when it is entered.
        seed: that of an earlier run, when a row that has none of its own has been met.
    """

    def __init__(self, path: Path | None, *, resume: bool):
        if resume and path is None:
            raise InputError("--resume goes on with a file: give --output OUT with it")
        if path is not None and path.exists() and not path.is_file():
            raise InputError(f"{path} is not a file: name another --output")
        if path is not None and path.exists() and not resume:
            raise InputError(f"{path} exists: --resume goes on with it, or name another --output")
        if path is not None and not path.parent.is_dir():
            raise InputError(f"cannot write {path}: there is no folder {path.parent}")
        self.rows = self.failed = 0
        self.seed: int | None = None
        self._path = path
        self._end = 0  # of what an earlier run has written whole, in bytes
        self._written: list[tuple[int, int] | None] = []  # hash and seed, None where it failed
        self._model: str | None = None

    def __enter__(self) -> "Output":
        if self._path is not None:
            self._path.touch()
            self._file = self._path.open("r+b")
            try:
                _lock(self._file, self._path)
                self._read(self._path)
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

    def _read(self, path: Path) -> None:
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
                    made_from = _hash(record.get("id"), record["prompt"])
                    self._written.append((made_from, record["seed"]))
                    self._model = record["model"]
            except (ValueError, TypeError, LookupError, RecursionError):
                raise InputError(
                    f"{path}, line {self.rows + 1}, is no record of this command: "
                    "name another --output"
                ) from None
            self.rows += 1
            self._end += len(data)

    def has(self, row: Row, model: str, seed: int | None) -> bool:
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
        if made_from != _hash(row.id, row.prompt):
            raise InputError(
                f"{self._path} was made from another input: its row {row.index} is not that of "
                f"line {row.line}; name another --output"
            )
        if self._model != model:
            raise InputError(
                f"{self._path} was made with --model {self._model}, not {model}; "
                "name another --output"
            )
        if not row.has_seed:
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


def _lock(file: BinaryIO, path: Path) -> None:
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
