"""Reading rows: a range of a file as rows, with their fields or errors."""

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any, TypeAlias

from gpt_cli.errors import MALFORMED, InputError
from gpt_cli.jobs import delimited, formats, parquet, storage
from gpt_cli.jobs.formats import BYTE_ORDER_MARK, InputFile, Ranges
from gpt_cli.jobs.layout import InputRow, Layout
from gpt_cli.records import Record

NumberedLine: TypeAlias = tuple[int, bytes]
# Of a row, or why it cannot be read. A whole file has no number.
Content: TypeAlias = tuple[int | None, bytes | Record | InputError]


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
            table = parquet.read(file.name, file_range.group, start, end, file.header)
            rows = enumerate(table, file_range.line)
        elif file.format == "text":
            rows = [whole(file)]
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
        return every_line or bool(without_mark(number, line).strip())

    def parse(self, contents: Iterable[Content], index: int, file: InputFile) -> list[InputRow]:
        """Return the rows with numbered lines, fields or files, counted from `index`."""
        name = file.name if self.many else None
        return [
            self._parse(InputRow(row_index, number, name), data, file)
            for row_index, (number, data) in enumerate(contents, index)
        ]

    def _parse(self, row: InputRow, data: bytes | Record | InputError, file: InputFile) -> InputRow:
        """Return the row with the content of its line or table row, or with an error."""
        every_line = self.layout.every_line and file.format == "lines"
        try:
            if isinstance(data, InputError):
                raise data
            if isinstance(data, bytes):
                if every_line or self.layout.passes_rows:
                    row = replace(row, data=data)
                data = self._fields(data, row, file)
            if not isinstance(data, dict):
                example = json.dumps({self.layout.fields[0]: "Once"})
                raise InputError(f"a row must be a JSON object, such as {example}")
            id = self.layout.id_of(data)
            if self.layout.keep_fields != "none":
                json.dumps(id, ensure_ascii=False, allow_nan=False).encode()
                row = replace(row, id=id)  # for an error record, too
            if file.format == "jsonl":  # the columns of a table have been checked
                self.layout.check_names(data)
            texts = self._texts(data)
            return replace(row, fields=self._storable(data) | texts)
        except UnicodeDecodeError as error:
            unit = "line" if every_line else "row"
            cure = "convert the file, such as by iconv -f CP1252 -t UTF-8"
            reason = InputError(f"the {unit} is not UTF-8 at byte {error.start}: {cure}")
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
            text = storage.decoded(file.name, data)
        else:
            text = without_mark(row.line, data).decode()
        text = storage.without_line_end(text)
        if file.format == "jsonl":
            return json.loads(text)
        return dict.fromkeys(self.layout.texts, text)

    def _texts(self, fields: dict[str, Any]) -> dict[str, str]:
        """Remove and return the text of a row, or the fields of the template as texts."""
        layout = self.layout
        texts = {}
        for name, source in layout.sources(fields).items():
            text = fields.get(source)
            if text is None and layout.joins_words and not layout.template:
                text = _joined(fields.get("words"))
            if layout.template and isinstance(text, int | float) and not isinstance(text, bool):
                text = str(text)
            if not isinstance(text, str):
                raise self._no_text(source, fields)
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise InputError(
                    f"the {source} is not valid Unicode at character {error.start}"
                ) from None
            fields.pop(source, None)
            texts[name] = text
        return texts

    def _no_text(self, name: str, fields: dict[str, Any]) -> InputError:
        """Return the error of a row whose text is missing, or is no text."""
        layout = self.layout
        if name in fields:
            name = f'"{name}", not {json.dumps(fields[name], default=str):.40}'
        elif layout.template:
            name = f'"{name}"'
        else:
            name = " or ".join(f'"{text}"' for text in layout.alternatives)
            if fields:
                name += f"; its fields are {', '.join(fields):.200}"
            name += layout.advice(field for field in fields if isinstance(fields[field], str))
        kind = "string or number" if layout.template else "string"
        return InputError(f"a row needs a {kind} {name}")

    def _storable(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the fields besides the text as JSON can hold them, if records keep them all.

        Other fields than options have null in place of a number that is not finite. Raise
        ValueError for what is not Unicode.
        """
        if self.layout.keep_fields != "all" or not fields:
            return fields
        try:
            json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError:
            raise
        except ValueError:
            finite = json.loads(json.dumps(fields), parse_constant=lambda _: None)
            options = {name: fields[name] for name in self.layout.options if name in fields}
            return finite | options
        return fields


def numbered(lines: Iterable[bytes], file: InputFile, first: int = 1) -> Iterator[NumberedLine]:
    """Yield lines with their numbers, counted from `first`; in CSV and TSV, rows with lines."""
    if file.delimiter:
        return delimited.split(lines, file.delimiter, file.name, first)
    return enumerate(lines, first)


def whole(file: InputFile) -> Content:
    """Return the content of a file that is one row."""
    if file.error:
        return None, file.error
    try:
        return None, formats.read_whole(file)
    except InputError as error:
        return None, error


def without_mark(number: int | None, data: bytes) -> bytes:
    """Return a line without the byte order mark of a file."""
    return data.removeprefix(BYTE_ORDER_MARK) if number == 1 else data


def is_request(line: bytes) -> bool:
    """Return whether a line is a request, as OpenAI's batch files have them."""
    with suppress(*MALFORMED):
        return {"custom_id", "url", "body"} <= json.loads(line).keys()
    return False


def _joined(words: Any) -> str | None:
    """Return the text of words, if there are any; raise InputError if they are not texts."""
    if words is None:
        return None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise InputError('the "words" of a row must be a list of strings')
    return "".join(words)
