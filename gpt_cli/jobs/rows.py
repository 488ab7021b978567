"""Rows of an input: lines, JSON Lines or tables, from one file or many, here or at an address."""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, get_args

from gpt_cli.errors import InputError
from gpt_cli.jobs import delimited, formats, parquet, storage
from gpt_cli.jobs.formats import Format, InputFile, Ranges
from gpt_cli.jobs.layout import InputRow, Layout
from gpt_cli.jobs.reader import (
    Content,
    FileRange,
    NumberedLine,
    RowReader,
    is_request,
    numbered,
    whole,
    without_mark,
)
from gpt_cli.options.declare import OptionError


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
        self._first_row: bytes | None = None  # the line of the first row
        self.ignored: list[str] = []  # columns of tables that are not read
        self.header = b""  # of rows that are passed on
        self._passed: tuple[str, str, tuple[str, ...]] | None = None  # their format
        are_named = len(files) > 1 or format == "text" or layout.whole_files
        self.reader = RowReader(layout, are_named)
        self.whole_ids = True  # if all ids are integers, as in tables of Parquet
        self.total: int | None = None  # until a stream has ended
        if self.streams:
            self.whole_ids = False
            self._available = self._read_streams()
            return
        cut = self._cut_unless_whole if layout.whole_files else self._cut
        for number, file in enumerate(self.files):
            self.files[number] = cut(file)
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
                together = ranges_together(self.ranges, self._rows_together, start)
                if self.reader.layout.whole_files:
                    together = chain.from_iterable(map(_apart, together))
                for ranges in together:
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
            self._wait()
        return self.formats

    def _wait(self) -> None:
        """Wait for the first rows of a stream."""
        first = list(islice(self._available, 1))
        self._available = chain(first, self._available)

    def begins_with_request(self) -> bool:
        """Return whether the first row is a request; wait for the first row of a stream.

        A request is an object with "custom_id", "url" and "body", as OpenAI's batch files have it.
        """
        if self.streams and not {"auto", "jsonl"}.isdisjoint(self.formats):
            self._wait()
        return is_request(self._first_row or b"")

    def read_for(self, layout: Layout) -> None:
        """Read lines of JSON with this layout instead."""
        self.reader = replace(self.reader, layout=layout)

    def _read_streams(self) -> Iterator[tuple[InputFile, Sequence[Content]]]:
        """Yield a file, and those of its lines that are rows and are available at once."""
        for place, file in enumerate(self.files):
            if file.format == "text":
                yield file, [whole(file)]
                continue
            try:
                yield from self._read_stream(place, file)
            except InputError as error:
                if not self.reader.layout.whole_files:
                    raise
                yield replace(file, format="text"), [(None, error)]

    def _read_stream(
        self, place: int, file: InputFile
    ) -> Iterator[tuple[InputFile, Sequence[Content]]]:
        """Yield one file as `_read_streams` does."""
        with formats.opened(file) as (file, stream):
            if self.reader.layout.whole_files:
                file = formats.whole_unless_rows(file, stream.peek())
            self.files[place] = file
            if file.format == "parquet":
                raise InputError(f"{file.name} is Parquet: name it without a pipe")
            if file.format == "text":
                yield file, [(None, storage.bytes_of(stream, file.name))]
                return
            available = _Available(storage.lines_of(stream, file.name))
            file, lines = self._begun(file, numbered(available, file))
            self.files[place] = file
            rows: list[Content] = []
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
        first_lines = []
        for number, line in lines:
            first_lines.append((number, line))
            if not without_mark(number, line).strip():
                continue
            if self._first_row is None:
                self._first_row = without_mark(number, line)
            if file.delimiter:
                header = delimited.columns_of(file, line, self.reader.layout)
                read = self.reader.layout.columns_in(header)
                self._ignore([name for name in header if name not in read])
                file = replace(file, header=header, header_line=number)
            else:
                file = file.with_first_row(line)
            self._pass_on(file, line)
            break
        return file, chain(first_lines, lines)

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
        """Note columns that are not read, unless a user has chosen that, or rows are passed on."""
        layout = self.reader.layout
        if layout.keep_fields in ("none", "id") or layout.passes_rows:
            return
        names = [name or "one without a name" for name in columns]
        self.ignored += [name for name in names if name not in self.ignored]

    def _add(
        self, file: InputFile, start: int, end: int, *, line: int, rows: int, group: int = 0
    ) -> None:
        """Append a range."""
        self.ranges.append(FileRange(file, group, start, end, self._rows, line, rows))
        self._rows += rows

    def _cut_unless_whole(self, file: InputFile) -> InputFile:
        """Append the ranges of a file of rows, or else a text or the error of the file."""
        ranges, rows = len(self.ranges), self._rows
        try:
            return self._cut(formats.whole_unless_rows(file))
        except InputError as error:
            del self.ranges[ranges:]
            self._rows = rows
            return self._cut(replace(file, format="text", error=error))

    def _cut(self, file: InputFile) -> InputFile:
        """Append the ranges of a file; return it with what its content says."""
        if file.format == "text":
            self._add(file, 0, storage.size(file.name), line=1, rows=1)
            return file
        if file.format != "parquet":
            file, checksum = self._cut_lines(file)
        if file.format == "parquet":
            file, checksum = self._cut_table(file)
        self._contents.append([Path(file.name).name, storage.size(file.name), checksum])
        return file

    def _cut_table(self, file: InputFile) -> tuple[InputFile, int]:
        """Append the ranges of a table; return it with its columns, and a checksum of metadata."""
        if self.reader.layout.passes_rows:
            raise InputError(
                f"{file.name} is Parquet, whose rows cannot pass unchanged: write their scores, "
                "without a filter, and filter these"
            )
        survey = parquet.survey(file.name, self.reader.layout)
        self._ignore(survey.ignored)
        file = replace(file, header=survey.columns)
        self.whole_ids = self.whole_ids and survey.whole_ids
        line = 1
        for group, size in enumerate(survey.group_sizes):
            start = 0
            while start < size:
                end = min(start + self._rows_together - self._rows % self._rows_together, size)
                self._add(file, start, end, line=line + start, rows=end - start, group=group)
                start = end
            line += size
        return file, survey.checksum

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


def _apart(ranges: list[FileRange]) -> Iterator[list[FileRange]]:
    """Yield whole files one by one, which may be large, and ranges of tables together."""
    for is_whole, group in groupby(ranges, lambda file_range: file_range.file.format == "text"):
        together = list(group)
        yield from ([file_range] for file_range in together) if is_whole else [together]


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


def ranges_together(
    ranges: Iterable[FileRange], rows: int, start: int = 0
) -> Iterator[list[FileRange]]:
    """Yield lists of the ranges that have `rows` rows; leave out ranges before the row `start`."""
    rest = (file_range for file_range in ranges if file_range.index + file_range.rows > start)
    for _, group in groupby(rest, lambda file_range: file_range.index // rows):
        yield list(group)
