"""Rows of work: lines, JSON Lines or Parquet, of one file or many, here or at an address.

A row is known by its index among all rows. Files are cut in pieces, stretches of a file that can
be read by themselves, wherever that is done.
"""

import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from io import BytesIO
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Literal, TypeAlias

from gpt_cli import parquet, places
from gpt_cli.errors import InputError
from gpt_cli.reading import read_lines, read_stretch, without_line_end

Form: TypeAlias = Literal["auto", "lines", "jsonl", "parquet"]

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Line:
    """A row as it was read: a line that is not blank; of a table, a row as JSON."""

    index: int  # among the rows, from 0
    line: int  # among the lines, or the rows, of its file, from 1
    file: str | None  # None where there is only one
    data: bytes


@dataclass(frozen=True)
class Row:
    """What a line says."""

    index: int
    line: int
    file: str | None
    id: Any  # whatever the row calls itself; None if it does not
    request: dict[str, Any] | InputError  # the text, and the row's own options

    @property
    def has_seed(self) -> bool:
        """Whether it has a seed of its own."""
        return isinstance(self.request, dict) and self.request.get("seed") is not None

    def get(self, field: str) -> Any:
        """What the row has under this name, which may be anything."""
        return None if isinstance(self.request, InputError) else self.request.get(field)


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a file."""

    file: str
    group: int  # of rows, in Parquet
    start: int  # in bytes; in Parquet, in rows of the group
    end: int
    index: int  # of its first row
    line: int  # the number of its first line, or row
    rows: int


@dataclass(frozen=True)
class Reader:
    """How rows are read: what a worker anywhere needs to know."""

    form: Form
    fields: tuple[str, ...]  # what a row may have besides an id; the first is its text
    many: bool  # whether there is more than one file

    def read(self, piece: Piece) -> Iterator[Line]:
        """Yield the lines of a piece.

        Raises:
            InputError: its file cannot be read, or is not what it was.
        """
        lines: Iterable[tuple[int, bytes]]
        if self.form == "parquet":
            rows = parquet.read(piece.file, piece.group, piece.start, piece.end, self.fields)
            lines = enumerate(rows, piece.line)
        else:
            data = BytesIO(read_stretch(piece.file, piece.start, piece.end))
            lines = _filled(enumerate(data, piece.line))
        index = piece.index - 1
        for index, (number, row) in enumerate(lines, piece.index):
            yield Line(index, number, piece.file if self.many else None, row)
        if index != piece.index + piece.rows - 1:
            raise InputError(f"{piece.file} has changed while it was read")

    def parse(self, line: Line) -> Row:
        """Return what a line says, or why it says nothing of use."""
        place = (line.index, line.line, line.file)
        try:
            text = without_line_end(line.data.decode())
            if self.form == "lines":
                return Row(*place, None, {self.fields[0]: text})
            request = json.loads(text)
            if not isinstance(request, dict):
                example = json.dumps({self.fields[0]: "Once"})
                raise InputError(f"a row must be a JSON object, such as {example}")
            id = request.pop("id", None)
            json.dumps(id, ensure_ascii=False, allow_nan=False).encode()
            return Row(*place, id, request)
        except UnicodeDecodeError as error:
            reason = InputError(f"the row is not UTF-8 at byte {error.start}")
        except json.JSONDecodeError as error:
            reason = InputError(f"the row is not valid JSON: {error.msg} at character {error.pos}")
        except (ValueError, RecursionError):
            reason = InputError(
                "the row holds what JSON cannot write again, or is nested too deeply"
            )
        except InputError as error:
            reason = error
        return Row(*place, None, reason)


class Source:
    """Where rows come from.

    Args:
        name: a file, a folder, a pattern with `*`, or an address of such; "-" is standard input.
        form: what the files are. "auto" is "parquet" by the ending of their names, or "jsonl" if
            the first row begins with a brace, else "lines".
        fields: what a row may have besides an id; the first is its text, and the whole of a line.
        together: how many rows are best computed together; those of small files, too.

    Raises:
        InputError: nothing can be read there, not all files are tables, or a table has no column
            for the text.
        ResourceError: a package for such files is missing.

    Attributes:
        streams: whether it can be read only once, and has no pieces.
        files: their names, in their order.
    """

    def __init__(self, name: str, form: Form, fields: tuple[str, ...], together: int):
        path = Path(name)
        self.streams = name == "-" or path.is_fifo() or path.is_char_device()
        if self.streams and form == "parquet":
            raise InputError("Parquet is read from its end, which a pipe cannot: name a file")
        self.files = [name] if self.streams else places.find(name)
        if form == "auto" and not self.streams:
            tables = sum(file.endswith(".parquet") for file in self.files)
            if 0 < tables < len(self.files):
                raise InputError(
                    f"{name} holds Parquet and other files: name those of one kind, as by "
                    "FOLDER/*.parquet"
                )
            form = "parquet" if tables else _guess(_first_row(self.files))
        self.reader = Reader(form, fields, len(self.files) > 1)
        self._together = together
        self._streamed: int | None = None
        self._sums: dict[str, int] = {}
        surveyed = self.files if form == "parquet" else []
        self._surveys = {file: parquet.survey(file, fields) for file in surveyed}

    @property
    def ignored(self) -> list[str]:
        """Columns of tables that are not read."""
        found = chain.from_iterable(survey.ignored for survey in self._surveys.values())
        return list(dict.fromkeys(found))

    @property
    def whole_ids(self) -> bool:
        """Whether all ids are integers, as those of tables may be."""
        return bool(self._surveys) and all(found.whole_ids for found in self._surveys.values())

    @cached_property
    def pieces(self) -> list[Piece]:
        """The files in pieces, none of which goes past a multiple of `together`; it reads them.

        Raises:
            InputError: a file cannot be read.
        """
        pieces: list[Piece] = []
        index = 0
        for file in self.files:
            pieces += self._cut(file, index)
            index = pieces[-1].index + pieces[-1].rows if pieces else 0
        return pieces

    @property
    def contents(self) -> list[list[Any]]:
        """What tells the files from others: the name of each, its bytes and a sum of them.

        Of a table, it is a sum of its description, which has the sizes and bounds of columns.
        """
        return [
            [places.base(file), places.size(file), self._sums[file]]
            for file in (self.files if self.pieces else [])
        ]

    @property
    def total(self) -> int | None:
        """How many rows there are; None before a stream has been read to its end."""
        return self._streamed if self.streams else sum(piece.rows for piece in self.pieces)

    def rows(self, start: int = 0) -> Iterator[list[Row]]:
        """Yield the rows: so many as are computed together, or those of a stream that come at once.

        Of what is no stream, those before `start` may be left out.

        Raises:
            InputError: a file cannot be read.
        """
        if self.streams:
            yield from self._stream()
            return
        pieces = (piece for piece in self.pieces if piece.index + piece.rows > start)
        for block in blocks(pieces, self._together):
            lines = chain.from_iterable(map(self.reader.read, block))
            yield [self.reader.parse(line) for line in lines]

    def _stream(self) -> Iterator[list[Row]]:
        reader = self.reader
        index, first = 0, 1  # of the next row and the next line
        for block in read_lines(self.files[0]):
            found = enumerate(_filled(enumerate(block, first)), index)
            lines = [Line(index, number, None, data) for index, (number, data) in found]
            index += len(lines)
            first += len(block)
            if reader.form == "auto" and lines:
                reader = replace(reader, form=_guess(lines[0].data))
            yield [reader.parse(line) for line in lines]
        self._streamed = index

    def _cut(self, file: str, index: int) -> Iterator[Piece]:
        if self.reader.form != "parquet":
            yield from self._cut_lines(file, index)
            return
        self._sums[file] = self._surveys[file].sum
        line = 1
        for group, size in enumerate(self._surveys[file].sizes):
            start = 0
            while start < size:
                end = min(start + self._together - index % self._together, size)
                yield Piece(file, group, start, end, index, line + start, end - start)
                index += end - start
                start = end
            line += size

    def _cut_lines(self, file: str, index: int) -> Iterator[Piece]:
        start = end = rows = total = 0
        line = 1
        for number, data in enumerate(chain.from_iterable(read_lines(file)), 1):
            total = zlib.crc32(data, total)
            end += len(data)
            rows += _is_row(number, data)
            if rows and (index + rows) % self._together == 0:
                yield Piece(file, 0, start, end, index, line, rows)
                start, line, index, rows = end, number + 1, index + rows, 0
        if rows:
            yield Piece(file, 0, start, end, index, line, rows)
        self._sums[file] = total


def blocks(pieces: Iterable[Piece], rows: int) -> Iterator[list[Piece]]:
    """Yield the pieces of each so many rows."""
    for _, block in groupby(pieces, lambda piece: piece.index // rows):
        yield list(block)


def _filled(lines: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are rows, without the mark that a file may begin with."""
    for number, data in lines:
        if _is_row(number, data):
            yield number, data.removeprefix(_BYTE_ORDER_MARK) if number == 1 else data


def _is_row(number: int, data: bytes) -> bool:
    return bool((data.removeprefix(_BYTE_ORDER_MARK) if number == 1 else data).strip())


def _guess(data: bytes) -> Form:
    return "jsonl" if data.lstrip().startswith(b"{") else "lines"


def _first_row(files: Iterable[str]) -> bytes:
    for file in files:
        for _, data in _filled(enumerate(chain.from_iterable(read_lines(file)), 1)):
            return data
    return b""
