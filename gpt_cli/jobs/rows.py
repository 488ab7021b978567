"""Rows of an input: lines, JSON Lines or tables, from one file or many, here or at an address."""

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, TypeAlias, get_args

from gpt_cli.errors import InputError
from gpt_cli.jobs import delimited, formats, parquet, storage
from gpt_cli.jobs.compressed import Ranges
from gpt_cli.jobs.formats import BYTE_ORDER_MARK, Format, InputFile
from gpt_cli.jobs.layout import InputRow, Layout
from gpt_cli.options.declare import OptionError
from gpt_cli.records import Record

NumberedLine: TypeAlias = tuple[int, bytes]
Content: TypeAlias = tuple[int | None, bytes | Record]  # of a row; a whole file has no number

_WHOLE: Content = (None, b"")  # a file that is one row: its reading may be the error of the row


@dataclass(frozen=True, slots=True)
class FileRange:
    """A range of a file, which can be read alone, on any machine."""

    file: InputFile
    group: int  # row group, in Parquet
    start: int  # in bytes, decompressed; in Parquet, in rows of the group
    end: int
    index: int  # of its first row
    line: int  # number of its first line, or of its first row in Parquet
    rows: int


@dataclass(frozen=True)
class RowReader:
    """A reader of rows; it is pickled to read on another machine."""

    layout: Layout
    many: bool = False  # whether there are several files; their rows have their names

    def read(self, file_range: FileRange, ranges: Ranges) -> list[InputRow]:
        """Return the rows of a range; raise InputError if its file has changed."""
        file = file_range.file
        start, end = file_range.start, file_range.end
        rows: Iterable[Content]
        if file.format == "parquet":
            columns = None if self.layout.all_columns else self.layout.columns
            table = parquet.read(file.name, file_range.group, start, end, columns)
            rows = enumerate(table, file_range.line)
        elif file.format == "text":
            rows = [_WHOLE]
        else:
            if file.compression:
                data = ranges.read(file.name, file.compression, start, end)
            else:
                data = storage.read_range(file.name, start, end)
            lines = numbered(BytesIO(data), file, file_range.line)
            rows = [line for line in lines if self.is_row(file, *line)]
        parsed = self.parse(rows, file_range.index, file)
        if len(parsed) != file_range.rows:
            raise InputError(f"{file.name} changed while it was read: run the command again")
        return parsed

    def is_row(self, file: InputFile, number: int, line: bytes) -> bool:
        """Return whether a line is a row; by default blank lines are skipped."""
        if file.header:
            return number > file.header_line and bool(line.strip())
        every_line = self.layout.every_line and file.format == "lines"
        return every_line or bool(_without_mark(number, line).strip())

    def parse(self, contents: Iterable[Content], index: int, file: InputFile) -> list[InputRow]:
        """Return the rows with numbered lines, fields or files, counted from `index`."""
        name = file.name if self.many else None
        return [
            self._parse(InputRow(row_index, number, name), data, file)
            for row_index, (number, data) in enumerate(contents, index)
        ]

    def _parse(self, row: InputRow, data: bytes | Record, file: InputFile) -> InputRow:
        """Return the row with the content of its line or table row, or with an error."""
        every_line = self.layout.every_line and file.format == "lines"
        try:
            if isinstance(data, bytes):
                if every_line or self.layout.passes_rows:
                    row = replace(row, data=data)
                data = self._fields(data, row, file)
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

    def _fields(self, data: bytes, row: InputRow, file: InputFile) -> Any:
        """Return the fields of a line, which may be any JSON, or of a file that is one row."""
        if file.format in ("csv", "tsv"):
            return delimited.fields(file, data, self.layout)
        if file.format == "text":
            text = storage.decoded(file.name, formats.read_whole(file))
        else:
            text = _without_mark(row.line, data).decode()
        text = storage.without_line_end(text)
        if file.format == "jsonl":
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
    input. With the format "auto", `formats` finds that of each file. In the format "text", each
    file is one row. A range holds only rows that are computed together. The delimiter is that of
    CSV and TSV.
    """

    def __init__(
        self,
        names: Sequence[str],
        format: Format,
        layout: Layout,
        rows_together: int,
        delimiter: str | None = None,
    ):
        if format not in get_args(Format):
            raise InputError(f"the format must be one of {', '.join(get_args(Format))}")
        self.names = names
        files = [file for name in names for file in storage.find(name)]
        self.files = [formats.named(file, format, delimiter) for file in files]
        self.delimiter = delimiter
        if delimiter and not any(file.delimiter for file in self.files):
            raise OptionError("delimiter", "is of CSV and TSV: set the format to csv")
        self.streams = any(map(storage.is_stream, names))  # read once, without ranges
        if self.streams and any(file.format == "parquet" for file in self.files):
            raise InputError("Parquet cannot be read from a pipe: name a file")
        self._rows_together = rows_together
        self._rows = 0  # in the ranges
        self.ranges: list[FileRange] = []
        self._contents: list[list[Any]] = []  # see `contents`; empty in the format "text"
        self.ignored: list[str] = []  # columns of tables that are not read
        self.header = b""  # of rows that are passed on
        self._passed: tuple[str, str, tuple[str, ...]] | None = None  # their format
        are_named = len(files) > 1 or format == "text"
        self.reader = RowReader(layout, are_named)
        self.whole_ids = True  # if all ids are integers, as in tables of Parquet
        self.total: int | None = None  # until a stream has ended
        if self.streams:
            self.whole_ids = False
            self._available = self._read_streams()
            return
        for number, file in enumerate(self.files):
            if format == "text":
                self._add(file, 0, storage.size(file.name), line=1, rows=1)
                continue
            if file.format != "parquet":
                file, checksum = self._cut_lines(file)
            if file.format == "parquet":
                checksum = self._cut_table(file)
            self.files[number] = file
            self._contents.append([Path(file.name).name, storage.size(file.name), checksum])
        self.whole_ids = self.whole_ids and self.formats == ["parquet"]
        self.total = self._rows

    @property
    def formats(self) -> list[Format]:
        """The formats of the files without duplicates; that of a stream may not be known yet."""
        return sorted({file.format for file in self.files})

    @property
    def contents(self) -> list[list[Any]]:
        """The name, size and checksum of each file, for a manifest."""
        if self.formats != ["text"]:
            return self._contents
        contents = []
        for file in self.files:  # read only here: a job without a manifest reads a file once
            data = storage.read_bytes(file.name)
            contents.append([Path(file.name).name, len(data), zlib.crc32(data)])
        return contents

    def rows(self, start: int = 0) -> Iterator[list[InputRow]]:
        """Yield the rows that are computed together; files may be read only from `start` on."""
        if not self.streams:
            with Ranges() as opened:
                for ranges in ranges_together(self.ranges, self._rows_together, start):
                    read = (self.reader.read(file_range, opened) for file_range in ranges)
                    yield list(chain.from_iterable(read))
            return
        index = 0
        for file, lines in self._available:
            for first in range(0, len(lines), self._rows_together):
                rows = self.reader.parse(lines[first : first + self._rows_together], index, file)
                index += len(rows)
                yield rows
        self.total = index

    def peek(self) -> list[Format]:
        """Return the formats; wait for the first row of a stream, which may decide its format."""
        if self.streams and "auto" in self.formats:
            first = list(islice(self._available, 1))
            self._available = chain(first, self._available)
        return self.formats

    def _read_streams(self) -> Iterator[tuple[InputFile, Sequence[Content]]]:
        """Yield a file, and those of its lines that are rows and are available at once."""
        for place, file in enumerate(self.files):
            if file.format == "text":
                yield file, [_WHOLE]
                continue
            with formats.opened(file) as (file, stream):
                if file.format == "parquet":
                    raise InputError(f"{file.name} is Parquet: name it without a pipe")
                available = _Available(storage.lines_of(stream, file.name))
                file, lines = self._begun(file, numbered(available, file))
                self.files[place] = file
                rows = []
                for number, line in lines:
                    if self.reader.is_row(file, number, line):
                        rows.append((number, line))
                    if rows and not available.more:
                        yield file, rows
                        rows = []
                if rows:
                    yield file, rows

    def _begun(
        self, file: InputFile, lines: Iterator[NumberedLine]
    ) -> tuple[InputFile, Iterator[NumberedLine]]:
        """Return a file as its first row or its header describes it, and all its lines."""
        taken = []
        for number, line in lines:
            taken.append((number, line))
            if not _without_mark(number, line).strip():
                continue
            if file.delimiter:
                layout = self.reader.layout
                header = delimited.columns_of(file, line, layout)
                self._ignore([name for name in header if name not in ("id", *layout.columns)])
                file = replace(file, header=header, header_line=number)
            else:
                file = file.with_first_row(line)
            self._pass_on(file, line)
            break
        return file, chain(taken, lines)

    def _pass_on(self, file: InputFile, line: bytes) -> None:
        """Keep the header of rows that are passed on; InputError if their formats differ."""
        if not self.reader.layout.passes_rows:
            return
        kind = file.format, file.delimiter, file.header
        if self._passed not in (None, kind):
            raise InputError(
                f"{storage.label(file.name)} has another format or other columns than the files "
                "before it: filter it alone"
            )
        self._passed = kind
        self.header = line if file.delimiter else b""

    def _ignore(self, columns: Iterable[str]) -> None:
        """Note columns that are not read, unless records have all columns."""
        if not self.reader.layout.all_columns:
            self.ignored += [name for name in columns if name and name not in self.ignored]

    def _add(
        self, file: InputFile, start: int, end: int, *, line: int, rows: int, group: int = 0
    ) -> None:
        """Append a range."""
        self.ranges.append(FileRange(file, group, start, end, self._rows, line, rows))
        self._rows += rows

    def _cut_table(self, file: InputFile) -> int:
        """Append the ranges of a table; return a checksum of its metadata."""
        if self.reader.layout.passes_rows:
            raise InputError(
                f"{file.name} is Parquet, whose rows cannot be written to standard output: write "
                "scores with an output, and filter these"
            )
        survey = parquet.survey(file.name, self.reader.layout)
        self._ignore(survey.ignored)
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

    def _cut_lines(self, file: InputFile) -> tuple[InputFile, int]:
        """Append the ranges of a file of lines; return it as found, and a checksum of its bytes.

        A file that turns out to be Parquet is not read.
        """
        with formats.opened(file) as (file, stream):
            if file.format == "parquet":
                return file, 0
            available = chain.from_iterable(storage.lines_of(stream, file.name))
            file, lines = self._begun(file, numbered(available, file))
            checksum = 0
            start = 0  # of the next range, in bytes
            end = 0
            first = 1  # the first line of the range
            rows = 0  # in the range
            for number, data in lines:
                checksum = zlib.crc32(data, checksum)
                end += len(data)
                rows += self.reader.is_row(file, number, data)
                if rows and (self._rows + rows) % self._rows_together == 0:
                    self._add(file, start, end, line=first, rows=rows)
                    start = end
                    first = number + data.count(b"\n")
                    rows = 0
            if rows:
                self._add(file, start, end, line=first, rows=rows)
        return file, checksum


class _Available:
    """Iterates over lines that come in lists of those that are available at once."""

    def __init__(self, lists: Iterable[list[bytes]]):
        self._lists = iter(lists)
        self._lines: list[bytes] = []
        self._taken = 0

    @property
    def more(self) -> bool:
        """Return whether the next line is available without waiting."""
        return self._taken < len(self._lines)

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        while not self.more:
            self._lines = next(self._lists)
            self._taken = 0
        self._taken += 1
        return self._lines[self._taken - 1]


def numbered(lines: Iterable[bytes], file: InputFile, first: int = 1) -> Iterator[NumberedLine]:
    """Yield lines with their numbers, counted from `first`; in CSV and TSV, rows with lines."""
    if file.delimiter:
        return delimited.split(lines, file.delimiter, file.name, first)
    return enumerate(lines, first)


def ranges_together(
    ranges: Iterable[FileRange], rows: int, start: int = 0
) -> Iterator[list[FileRange]]:
    """Yield lists of the ranges that have `rows` rows; leave out ranges before the row `start`."""
    rest = (file_range for file_range in ranges if file_range.index + file_range.rows > start)
    for _, group in groupby(rest, lambda file_range: file_range.index // rows):
        yield list(group)


def _without_mark(number: int | None, data: bytes) -> bytes:
    """Return a line without the byte order mark of a file."""
    return data.removeprefix(BYTE_ORDER_MARK) if number == 1 else data


def _joined(words: Any) -> str | None:
    """Return the text of words, if there are any; raise InputError if they are not texts."""
    if words is None:
        return None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise InputError('the "words" of a row must be a list of strings')
    return "".join(words)
