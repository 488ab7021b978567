"""Rows of an input: lines, JSON Lines or Parquet, from one file or many, here or at an address."""

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, TypeAlias, get_args

from gpt_cli.errors import InputError
from gpt_cli.jobs import parquet, storage
from gpt_cli.jobs.layout import InputRow, Layout
from gpt_cli.jobs.storage import Format
from gpt_cli.records import Record

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

NumberedLine: TypeAlias = tuple[int | None, bytes]  # the number is None for a whole file


@dataclass(frozen=True, slots=True)
class FileRange:
    """A range of a file, which can be read alone, on any machine."""

    file: str
    group: int  # row group, in Parquet
    start: int  # in bytes; in Parquet, in rows of the group
    end: int
    index: int  # of its first row
    line: int  # number of its first line or row
    rows: int


@dataclass(frozen=True)
class RowReader:
    """A reader of rows; it is pickled to read on another machine."""

    format: Format
    layout: Layout
    many: bool = False  # whether there are several files; their rows have their names

    def read(self, file_range: FileRange) -> list[InputRow]:
        """Return the rows of a range; raise InputError if its file has changed."""
        file = file_range.file
        start, end = file_range.start, file_range.end
        lines: Iterable[NumberedLine | tuple[int, Record]]
        if self.format == "parquet":
            columns = None if self.layout.all_columns else self.layout.columns
            table = parquet.read(file, file_range.group, start, end, columns)
            lines = enumerate(table, file_range.line)
        elif self.format == "text":
            lines = [(None, storage.read_bytes(file))]
        else:
            data = BytesIO(storage.read_range(file, start, end))
            lines = self.numbered(data, file_range.line)
        rows = self.parse(lines, file_range.index, file if self.many else None)
        if len(rows) != file_range.rows:
            raise InputError(f"{file} changed while it was read: run the command again")
        return rows

    def is_row(self, number: int, line: bytes) -> bool:
        """Return whether a line is a row; by default blank lines are skipped."""
        return self.layout.every_line or bool(_without_mark(number, line).strip())

    def numbered(self, lines: Iterable[bytes], first: int) -> list[NumberedLine]:
        """Return the lines that are rows with their numbers, counted from `first`."""
        return [
            (number, line) for number, line in enumerate(lines, first) if self.is_row(number, line)
        ]

    def parse(
        self, lines: Iterable[NumberedLine | tuple[int, Record]], index: int, file: str | None
    ) -> list[InputRow]:
        """Return the rows of numbered lines or table rows, counted from `index`."""
        return [
            self._parse(InputRow(row_index, number, file), data)
            for row_index, (number, data) in enumerate(lines, index)
        ]

    def _parse(self, row: InputRow, data: bytes | Record) -> InputRow:
        """Return the row with the content of its line or table row, or with an error."""
        every_line = self.layout.every_line
        try:
            if isinstance(data, bytes):
                row = replace(row, data=data if every_line else b"")
                data = self._fields(data, row)
            if not isinstance(data, dict):
                example = json.dumps({self.layout.fields[0]: "Once"})
                raise InputError(f"a row must be a JSON object, such as {example}")
            id = data.pop("id", None)
            json.dumps(id, ensure_ascii=False, allow_nan=False).encode()
            row = replace(row, id=id)  # for an error record, too
            return replace(row, fields=data | self._texts(data))
        except UnicodeDecodeError as error:
            unit = "line" if every_line else "row"
            reason = InputError(f"the {unit} is not UTF-8 at byte {error.start}")
        except json.JSONDecodeError as error:
            reason = InputError(f"the row is not valid JSON: {error.msg} at character {error.pos}")
        except (TypeError, ValueError, RecursionError):
            reason = InputError("the row cannot be written as JSON, or is nested too deeply")
        except InputError as error:
            reason = error
        return replace(row, error=reason)

    def _fields(self, data: bytes, row: InputRow) -> Any:
        """Return the fields of a line, which may be any JSON, or of a file that is one row."""
        if self.format == "text":
            text = storage.decoded(row.file or "", data)
        else:
            text = _without_mark(row.line, data).decode()
        text = storage.without_line_end(text)
        if self.format == "jsonl":
            return json.loads(text)
        return dict.fromkeys(self.layout.texts, text)

    def _texts(self, fields: dict[str, Any]) -> dict[str, str]:
        """Return the text of a row, or the fields of the template; numbers become texts."""
        template = self.layout.template
        texts = {}
        for name in self.layout.texts:
            text = fields.get(name)
            if text is None and self.layout.joins_words and not template:
                text = _joined(fields.get("words"))
            if template and isinstance(text, int | float) and not isinstance(text, bool):
                text = str(text)
            if not isinstance(text, str):
                kind = "string or number" if template else "string"
                value = f", not {json.dumps(text, default=str):.40}" if name in fields else ""
                raise InputError(f'a row needs a {kind} "{name}"{value}')
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise InputError(
                    f"the {name} is not valid Unicode at character {error.start}"
                ) from None
            texts[name] = text
        return texts


class Source:
    """The input of a job.

    The names are those of files, folders, patterns with `*`, or addresses of these; "-" is standard
    input. The format "auto" is "parquet" if the names of the files end with .parquet. Otherwise it
    is "jsonl" if the first row begins with a brace, and else "lines". In the format "text", each
    file is one row. A range holds only rows that are computed together.
    """

    def __init__(self, names: Sequence[str], format: Format, layout: Layout, rows_together: int):
        if format not in get_args(Format):
            raise InputError(f"the format must be one of {', '.join(get_args(Format))}")
        self.names = names
        self.files = [file for name in names for file in storage.find(name)]
        if format == "auto" and self._are_tables():
            format = "parquet"
        self.streams = any(map(storage.is_stream, names))  # read once, without ranges
        if self.streams and format == "parquet":
            raise InputError("Parquet cannot be read from a pipe: name a file")
        self._rows_together = rows_together
        self._rows = 0  # in the ranges
        self.ranges: list[FileRange] = []
        self._contents: list[list[Any]] = []  # see `contents`; empty in the format "text"
        self.ignored: list[str] = []  # columns of tables that are not read
        self.whole_ids = format == "parquet"  # if all ids are integers
        are_named = len(self.files) > 1 or format == "text"
        self.reader = RowReader(format, layout, are_named)
        self.total: int | None = None  # until a stream has ended
        if self.streams:
            self._available = self._read_streams()
            return
        for file in self.files:
            if format == "text":
                self._add(file, 0, storage.size(file), line=1, rows=1)
                continue
            checksum = self._cut_table(file) if format == "parquet" else self._cut_lines(file)
            self._contents.append([Path(file).name, storage.size(file), checksum])
        self.total = self._rows

    def _are_tables(self) -> bool:
        """Return whether the files are tables; raise InputError if only some are."""
        tables = [file for file in self.files if file.endswith(".parquet")]
        if 0 < len(tables) < len(self.files):
            raise InputError(
                f"{', '.join(self.names):.200} has Parquet and other files: name files of one "
                "format, for example FOLDER/*.parquet"
            )
        return bool(tables)

    @property
    def contents(self) -> list[list[Any]]:
        """The name, size and checksum of each file, for a manifest."""
        if self.reader.format != "text":
            return self._contents
        contents = []
        for file in self.files:  # read only here: a job without a manifest reads a file once
            data = storage.read_bytes(file)
            contents.append([Path(file).name, len(data), zlib.crc32(data)])
        return contents

    def rows(self, start: int = 0) -> Iterator[list[InputRow]]:
        """Yield the rows that are computed together; files may be read only from `start` on."""
        if not self.streams:
            for ranges in ranges_together(self.ranges, self._rows_together, start):
                yield list(chain.from_iterable(map(self.reader.read, ranges)))
            return
        index = 0
        for file, lines in self._available:
            name = file if self.reader.many else None
            for first in range(0, len(lines), self._rows_together):
                rows = self.reader.parse(lines[first : first + self._rows_together], index, name)
                index += len(rows)
                yield rows
        self.total = index

    def peek(self) -> Format:
        """Return the format; wait for the first row of a stream, which decides it."""
        if self.streams and self.reader.format == "auto":
            first = list(islice(self._available, 1))
            self._available = chain(first, self._available)
        return self.reader.format

    def _read_streams(self) -> Iterator[tuple[str, Sequence[NumberedLine]]]:
        """Yield a file, and those of its lines that are rows and are available at once."""
        for file in self.files:
            if self.reader.format == "text":
                yield file, [(None, storage.read_bytes(file))]
                continue
            number = 1
            for available in storage.read_lines(file):
                rows = self.reader.numbered(available, number)
                number += len(available)
                if rows:
                    self._guess_format(*rows[0])
                    yield file, rows

    def _add(
        self, file: str, start: int, end: int, *, line: int, rows: int, group: int = 0
    ) -> None:
        """Append a range."""
        self.ranges.append(FileRange(file, group, start, end, self._rows, line, rows))
        self._rows += rows

    def _cut_table(self, file: str) -> int:
        """Append the ranges of a table; return a checksum of its metadata."""
        survey = parquet.survey(file, self.reader.layout)
        self.ignored += [name for name in survey.ignored if name not in self.ignored]
        self.whole_ids = self.whole_ids and survey.whole_ids
        line = 1
        for group, size in enumerate(survey.group_sizes):
            start = 0
            while start < size:
                end = min(start + self._rows_together - self._rows % self._rows_together, size)
                self._add(file, start, end, line=line + start, rows=end - start, group=group)
                start = end
            line += size
        return survey.checksum

    def _cut_lines(self, file: str) -> int:
        """Append the ranges of a file of lines; return a checksum of its bytes."""
        checksum = 0
        start = 0  # of the next range, in bytes
        end = 0
        line = 1  # the first of the range
        rows = 0  # in the range
        for number, data in enumerate(chain.from_iterable(storage.read_lines(file)), 1):
            checksum = zlib.crc32(data, checksum)
            end += len(data)
            if self.reader.is_row(number, data):
                rows += 1
                self._guess_format(number, data)
            if rows and (self._rows + rows) % self._rows_together == 0:
                self._add(file, start, end, line=line, rows=rows)
                start = end
                line = number + 1
                rows = 0
        if rows:
            self._add(file, start, end, line=line, rows=rows)
        return checksum

    def _guess_format(self, number: int | None, first: bytes) -> None:
        """Decide the format "auto" by the first row."""
        if self.reader.format == "auto":
            is_object = _without_mark(number, first).lstrip().startswith(b"{")
            self.reader = replace(self.reader, format="jsonl" if is_object else "lines")


def ranges_together(
    ranges: Iterable[FileRange], rows: int, start: int = 0
) -> Iterator[list[FileRange]]:
    """Yield lists of the ranges that have `rows` rows; leave out ranges before the row `start`."""
    rest = (file_range for file_range in ranges if file_range.index + file_range.rows > start)
    for _, group in groupby(rest, lambda file_range: file_range.index // rows):
        yield list(group)


def _without_mark(number: int | None, data: bytes) -> bytes:
    """Return a line without the byte order mark of a file."""
    return data.removeprefix(_BYTE_ORDER_MARK) if number == 1 else data


def _joined(words: Any) -> str | None:
    """Return the text of words, if there are any; raise InputError if they are not texts."""
    if words is None:
        return None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise InputError('the "words" of a row must be a list of strings')
    return "".join(words)
