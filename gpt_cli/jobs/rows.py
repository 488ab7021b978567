"""Rows of an input: lines, JSON Lines or Parquet, from one file or many, here or at an address."""

import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from io import BytesIO
from itertools import chain, groupby
from pathlib import Path
from typing import Any, get_args

from gpt_cli.errors import InputError
from gpt_cli.jobs import parquet, storage
from gpt_cli.jobs.storage import Format
from gpt_cli.jobs.template import LINE, Template

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the input, parsed."""

    index: int  # among all rows, from 0
    line: int  # the number of its line, or row, in its file, from 1
    file: str | None  # None if there is only one
    id: Any = None  # the row's own, any JSON value
    fields: dict[str, Any] = field(default_factory=dict)  # the text and the row's own options
    error: InputError | None = None  # why it has no fields


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of a file, which can be read on its own, on any machine."""

    file: str
    group: int  # row group, in Parquet
    start: int  # in bytes; in Parquet, in rows of the group
    end: int
    index: int  # of its first row
    line: int  # number of its first line or row
    rows: int


@dataclass(frozen=True)
class Reader:
    """A reader of rows, which can be sent to another machine."""

    format: Format
    fields: tuple[str, ...]  # that a row may have besides an id; the first is its text
    many: bool = False  # whether there are several files, and a row has the name of its file
    template: Template | None = None  # its fields come first, in place of a text

    def read(self, piece: Piece) -> list[Row]:
        """Return the rows of a piece; raise InputError if its file has changed."""
        lines: Iterable[tuple[int, Any]]
        if self.format == "parquet":
            found = parquet.read(piece.file, piece.group, piece.start, piece.end, self.fields)
            lines = enumerate(found, piece.line)
        else:
            data = BytesIO(storage.read_range(piece.file, piece.start, piece.end))
            lines = _filled(data, piece.line)
        rows = self.parse(lines, piece.index, piece.file if self.many else None)
        if len(rows) != piece.rows:
            raise InputError(f"{piece.file} changed while it was read: run the command again")
        return rows

    def parse(self, lines: Iterable[tuple[int, Any]], index: int, file: str | None) -> list[Row]:
        """Return the rows of numbered lines or table rows, the first of which has an `index`."""
        return [
            self._parse(Row(place, number, file), data)
            for place, (number, data) in enumerate(lines, index)
        ]

    def _parse(self, row: Row, data: bytes | dict[str, Any]) -> Row:
        """Return the row with the content of its line or table row, or with an error."""
        try:
            fields = data if isinstance(data, dict) else self._fields(data.decode())
            id = fields.pop("id", None)
            json.dumps(id, ensure_ascii=False, allow_nan=False).encode()
            row = replace(row, id=id)  # for an error record, too
            return replace(row, fields=fields | self._texts(fields))
        except UnicodeDecodeError as error:
            reason = InputError(f"the row is not UTF-8 at byte {error.start}")
        except json.JSONDecodeError as error:
            reason = InputError(f"the row is not valid JSON: {error.msg} at character {error.pos}")
        except (TypeError, ValueError, RecursionError):
            reason = InputError("the row cannot be written as JSON, or is nested too deeply")
        except InputError as error:
            reason = error
        return replace(row, error=reason)

    def _texts(self, fields: dict[str, Any]) -> dict[str, str]:
        """Return the row's text, or the fields of the template, of which numbers become texts."""
        found = {}
        for name in self.template.names if self.template else self.fields[:1]:
            text = fields.get(name)
            if self.template and isinstance(text, int | float) and not isinstance(text, bool):
                text = str(text)
            if not isinstance(text, str):
                kind = "string or number" if self.template else "string"
                raise InputError(f'a row needs a {kind} "{name}"')
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise InputError(
                    f"the {name} is not valid Unicode at character {error.start}"
                ) from None
            found[name] = text
        return found

    def _fields(self, line: str) -> dict[str, Any]:
        text = storage.without_line_end(line)
        if self.format == "lines":
            return {LINE if self.template else self.fields[0]: text}
        fields = json.loads(text)
        if not isinstance(fields, dict):
            example = json.dumps({self.fields[0]: "Once"})
            raise InputError(f"a row must be a JSON object, such as {example}")
        return fields


class Source:
    """The input of a job.

    Args:
        name: a file, a folder, a pattern with `*`, or an address of these; "-" is standard input.
        format: of the files. "auto" is "parquet" by the ending of their names, or "jsonl" if the
            first row begins with a brace, else "lines".
        fields: that a row may have besides an id; the first is its text.
        window: the number of rows that are computed together; no piece spans more.
        template: a text with fields of a row, which come first in `fields`.

    Raises:
        InputError: nothing can be read, not all files are tables, or a table has no text column.
        ResourceError: a package for such files is missing.
    """

    def __init__(
        self,
        name: str,
        format: Format,
        fields: tuple[str, ...],
        window: int,
        template: Template | None = None,
    ):
        if format not in get_args(Format):
            raise InputError(f"the format must be one of {', '.join(get_args(Format))}")
        path = Path(name)
        self.name = name
        # A pipe can be read once, and has no pieces.
        self.streams = name == "-" or path.is_fifo() or path.is_char_device()
        if self.streams and format == "parquet":
            raise InputError("Parquet cannot be read from a pipe: name a file")
        self.files = [name] if self.streams else storage.find(name)  # sorted
        if format == "auto" and not self.streams:
            tables = sum(file.endswith(".parquet") for file in self.files)
            if 0 < tables < len(self.files):
                raise InputError(
                    f"{name} has Parquet and other files: name files of one format, for example "
                    "FOLDER/*.parquet"
                )
            format = "parquet" if tables else format
        self._window = window
        self._rows = 0  # in the pieces
        self.pieces: list[Piece] = []
        self.contents: list[list[Any]] = []  # name, size and checksum of each file
        self.ignored: list[str] = []  # columns of tables that are not read
        self.whole_ids = format == "parquet"  # whether all ids are integers
        self.reader = Reader(format, fields, len(self.files) > 1, template)
        for file in [] if self.streams else self.files:
            checksum = self._cut_table(file) if format == "parquet" else self._cut_lines(file)
            self.contents.append([Path(file).name, storage.size(file), checksum])
        self.total = None if self.streams else self._rows  # None until a stream has ended

    def rows(self, start: int = 0) -> Iterator[list[Row]]:
        """Yield the rows in lists: those to compute together, or those available in a stream.

        Rows before `start` may be left out, except in a stream.
        """
        if self.streams:
            yield from self._stream()
            return
        left = [piece for piece in self.pieces if piece.index + piece.rows > start]
        for block in blocks(left, self._window):
            yield list(chain.from_iterable(map(self.reader.read, block)))

    def _stream(self) -> Iterator[list[Row]]:
        index, line = 0, 1  # of the next row
        for block in storage.read_lines(self.files[0]):
            lines = list(_filled(block, line))
            if lines:
                self._guess_format(lines[0][1])
            yield self.reader.parse(lines, index, None)
            index += len(lines)
            line += len(block)
        self.total = index

    def _add(self, file: str, group: int, start: int, end: int, line: int, rows: int) -> None:
        self.pieces.append(Piece(file, group, start, end, self._rows, line, rows))
        self._rows += rows

    def _cut_table(self, file: str) -> int:
        """Append the pieces of a table; return a checksum of its metadata, which has statistics."""
        survey = parquet.survey(file, self.reader.fields, self.reader.template)
        self.ignored += [name for name in survey.ignored if name not in self.ignored]
        self.whole_ids &= survey.whole_ids
        line = 1
        for group, size in enumerate(survey.sizes):
            start = 0
            while start < size:
                end = min(start + self._window - self._rows % self._window, size)
                self._add(file, group, start, end, line + start, end - start)
                start = end
            line += size
        return survey.checksum

    def _cut_lines(self, file: str) -> int:
        """Append the pieces of a file of lines; return a checksum of its bytes."""
        start = end = rows = checksum = 0
        line = 1
        for number, data in enumerate(chain.from_iterable(storage.read_lines(file)), 1):
            checksum = zlib.crc32(data, checksum)
            end += len(data)
            if content := _content(number, data):
                rows += 1
                self._guess_format(content)
            if rows and (self._rows + rows) % self._window == 0:
                self._add(file, 0, start, end, line, rows)
                start, line, rows = end, number + 1, 0
        if rows:
            self._add(file, 0, start, end, line, rows)
        return checksum

    def _guess_format(self, first: bytes) -> None:
        """Decide the format by the first row."""
        if self.reader.format == "auto":
            begins_object = first.lstrip().startswith(b"{")
            self.reader = replace(self.reader, format="jsonl" if begins_object else "lines")
        if self.reader.format == "lines" and (template := self.reader.template):
            template.check_line()


def blocks(pieces: Iterable[Piece], rows: int) -> Iterator[list[Piece]]:
    """Yield the pieces of each `rows` rows."""
    for _, block in groupby(pieces, lambda piece: piece.index // rows):
        yield list(block)


def _filled(lines: Iterable[bytes], first: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank with their numbers, without a byte order mark."""
    for number, data in enumerate(lines, first):
        if content := _content(number, data):
            yield number, content


def _content(number: int, data: bytes) -> bytes:
    """Return a line without a byte order mark, or b"" if it is blank."""
    data = data.removeprefix(_BYTE_ORDER_MARK) if number == 1 else data
    return data if data.strip() else b""
