"""CSV and TSV, by Python's csv: tables with a header, quotes, and line ends in quotes."""

import csv
import io
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, BinaryIO

from gpt_cli.errors import InputError, counted
from gpt_cli.jobs import storage
from gpt_cli.jobs.formats import BYTE_ORDER_MARK, InputFile
from gpt_cli.jobs.jsonl import RecordFormat, Streams
from gpt_cli.jobs.layout import Layout
from gpt_cli.records import Record, Schema

# csv's words
_OPEN_QUOTE = "unexpected end of data"
_CARRIAGE_RETURN = "new-line character"
# Fields that are texts, whatever they look like; those with several texts may be lists.
_TEXTS = ("id", "regex", "grammar", "context", "prompt")
_TEXTS_OR_LISTS = ("stop", "edits")
_DELIMITERS = ";\t|,"

csv.field_size_limit(2**31 - 1)  # a row must fit the memory: see `split`


def split(
    lines: Iterable[bytes], delimiter: str, file: str, first: int = 1
) -> Iterator[tuple[int, bytes]]:
    """Yield rows as they are in a file, with the numbers of their first lines.

    The lines are counted from `first`. A row may have line ends in quotes; if a quote never closes,
    it has all lines that are left. Raise ResourceError if it does not fit the free memory.
    """
    row_lines: list[bytes] = []
    limit = storage.memory_limit()

    def texts() -> Iterator[str]:
        size = 0
        for line in lines:
            size = size + len(line) if row_lines else len(line)
            storage.check_size(file, size, limit)
            row_lines.append(line)
            yield line.decode(errors="surrogateescape")

    reader = _reader(texts(), delimiter)
    number = first
    while True:
        try:
            next(reader)
        except csv.Error:
            pass  # `cells` raises it again, for this row
        except StopIteration:
            return
        yield number, b"".join(row_lines)
        number += len(row_lines)
        row_lines.clear()


def cells(data: bytes, delimiter: str) -> list[str]:
    """Return the cells of one row; raise InputError or UnicodeDecodeError if it is damaged."""
    text = data.decode()
    if "\0" in text:
        raise InputError("the row has NUL bytes, as a file that was cut off or is in UTF-16")
    try:
        return next(_reader([text], delimiter))
    except csv.Error as error:
        if _CARRIAGE_RETURN in str(error):
            cure = "end lines by LF, such as with tr '\\r' '\\n'"
            raise InputError(f"the row has a CR outside of quotes: {cure}") from None
        if str(error) != _OPEN_QUOTE:
            raise InputError(f"the row is not valid CSV: {error}") from None
        lines = counted(text.removesuffix("\n").count("\n") + 1, "line")
        raise InputError(
            f"a quote of the row never closes: {lines}, up to the end of the file, are in it"
        ) from None


def columns_of(file: InputFile, data: bytes, layout: Layout) -> tuple[str, ...]:
    """Return the columns of a table by its header; raise InputError if they do not suit a layout.

    A column without a name is not read.
    """
    label = storage.label(file.name)
    try:
        columns = cells(data.removeprefix(BYTE_ORDER_MARK), file.delimiter)
    except UnicodeDecodeError:
        raise InputError(f"the header of {label} is not UTF-8: convert it with iconv") from None
    except InputError as error:
        raise InputError(f"the header of {label} cannot be read: {error}") from None
    for name in columns:
        if name and columns.count(name) > 1:
            raise InputError(f"{label} has several columns {name!r}: keep one of them")
    marks = [mark for mark in _DELIMITERS if len(columns) == 1 and mark in columns[0]]
    try:
        layout.check_columns(columns, texts=() if marks else columns)
    except InputError as error:
        cure = f"; is its delimiter {marks[0]!r}?" if marks else ""
        raise InputError(f"{label} {error}{cure}") from None
    return tuple(columns)


def fields(file: InputFile, data: bytes, layout: Layout) -> Record:
    """Return the fields of a row; raise InputError or UnicodeDecodeError if it is damaged.

    Cells are strings, except those of options. Empty cells of options, and an empty id, are left
    out.
    """
    row = cells(data, file.delimiter)
    columns = file.header
    if tuple(row) == columns:
        raise InputError("the row is the header again: remove it")
    if len(row) != len(columns):
        raise InputError(f"the row has {counted(len(row), 'cell')}, not {len(columns)}")
    texts = layout.sources(columns).values()
    record: Record = {}
    for name, cell in zip(columns, row, strict=True):
        if name in texts:
            record[name] = cell
        elif name == "id" or name in layout.options:
            if cell:
                record[name] = cell if name in _TEXTS else _value(name, cell)
        elif name and layout.keep_fields == "all":
            record[name] = cell
    return record


def _value(option: str, cell: str) -> Any:
    """Return a cell of an option as JSON, or as text if it is none or the option is a text."""
    try:
        value = json.loads(cell)
    except (ValueError, RecursionError):
        return cell
    return cell if option in _TEXTS_OR_LISTS and not isinstance(value, list) else value


def _reader(lines: Iterable[str], delimiter: str) -> Iterator[list[str]]:
    return csv.reader(lines, delimiter=delimiter, strict=True)


class Delimited(RecordFormat):
    """Tables of records with a header, and a column for each field; they hold no manifest.

    Fields with several values are JSON. A field that a record lacks is an empty cell.
    """

    has_manifest = False

    def __init__(self, delimiter: str):
        self._delimiter = delimiter

    def write(self, records: Sequence[Record], schema: Schema, stream: BinaryIO) -> None:
        """Write a header and records; columns of fields that are not in the schema follow it."""
        columns = list(dict.fromkeys(chain(schema, *records)))
        rows = ([_cell(record.get(name)) for name in columns] for record in records)
        stream.write(self._encoded(chain([columns], rows)))

    def _encoded(self, rows: Iterable[Sequence[str]]) -> bytes:
        text = io.StringIO(newline="")
        writer, careful = (
            csv.writer(text, delimiter=self._delimiter, quoting=quoting, lineterminator="\n")
            for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_ALL)
        )
        for row in rows:
            # Alone, "\r" would be in no quotes, and end the row for many readers.
            (careful if any("\r" in cell for cell in row) else writer).writerow(row)
        return text.getvalue().encode(errors="surrogateescape")

    def count(self, stream: BinaryIO) -> tuple[int, int]:
        """Return the numbers of rows and of errors; one of MALFORMED for another table."""
        records = self._rows(stream)
        rows = set()
        failed = set()
        try:
            names = next(records, [])
            index, error = names.index("index"), names.index("error")
            for record in records:
                rows.add(record[index])
                if record[error]:
                    failed.add(record[index])
        except csv.Error as reason:
            raise ValueError(str(reason)) from None
        return len(rows), len(failed)

    def join(self, streams: Streams, schema: Schema, target: BinaryIO, manifest: bytes) -> None:
        """Write one table of several, with the columns of all, and without the manifest."""
        headers = [next(self._rows(stream)) for stream in streams()]
        columns = list(dict.fromkeys(chain(schema, *headers)))
        target.write(self._encoded([columns]))
        for stream in streams():
            rows = self._rows(stream)
            header = next(rows)
            if header == columns:
                shutil.copyfileobj(stream, target)
                continue
            for row in rows:
                record = dict(zip(header, row, strict=True))
                target.write(self._encoded([[record.get(name, "") for name in columns]]))

    def _rows(self, stream: BinaryIO) -> Iterator[list[str]]:
        lines = (line.decode(errors="surrogateescape") for line in stream)
        return _reader(lines, self._delimiter)

    def manifest(self, stream: BinaryIO) -> None:
        """Return None: tables hold no manifest."""


def _cell(value: Any) -> str:
    """Return a field of a record as a cell."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
