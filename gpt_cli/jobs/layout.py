"""The fields of rows that a task reads, and those of the records that it writes."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gpt_cli.errors import InputError
from gpt_cli.records import ERROR, IDENTITY, Record, Schema, error_of

_LINE = "line"  # the field that a plain line has
_PART = re.compile(r"\{([^{}]+)\}|([^{}]+)|\{(\{)|\}(\})|[{}]")  # name, text, {{, }}


@dataclass(frozen=True, slots=True)
class InputRow:
    """One row of the input, parsed."""

    index: int  # among all rows, from 0
    line: int | None  # the number of its line, or row, in its file, from 1; None: the whole file
    file: str | None  # None if there is only one, and a row is not the whole file
    id: Any = None  # any JSON value
    fields: dict[str, Any] = field(default_factory=dict)  # the text and the options of the row
    error: InputError | None = None  # why it has no fields
    data: bytes = b""  # its line, if every line is a row, or the row as it is in its file


@dataclass(frozen=True)
class Template:
    """A text: `{name}` stands for a field of a row, `{line}` for a plain line, `{{` for a brace."""

    text: str

    def __post_init__(self) -> None:
        if not self.names:
            raise InputError("the template has no field: write {line}, or {name} of a field")

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the fields, without duplicates."""
        return tuple(dict.fromkeys(part for is_name, part in self._parts if is_name))

    @cached_property
    def _parts(self) -> list[tuple[bool, str]]:
        """Names of fields (True), and texts."""
        parts = []
        for match in _PART.finditer(self.text):
            group = match.lastindex
            if group is None:
                raise InputError(
                    f"the template has a lone {match[0]} at character {match.start() + 1}: "
                    "write {{ or }} for a brace, {name} for a field"
                )
            parts.append((group == 1, match[group]))
        return parts

    def check_line(self) -> None:
        """Raise InputError if a plain line does not have all fields."""
        for name in self.names:
            if name != _LINE:
                raise InputError(
                    f"the template has {{{name:.40}}}, and the input has plain lines: "
                    "write {line}, or give JSON Lines or a table"
                )

    def fill(self, fields: Mapping[str, str]) -> str:
        """Return the text with the values of its fields."""
        return "".join(fields[part] if is_name else part for is_name, part in self._parts)


@dataclass(frozen=True)
class Layout:
    """The fields of the rows that a task reads, and of the records that it writes."""

    fields: tuple[str, ...]  # of a row besides its id; the first is its text
    template: Template | None = None  # its fields replace the text
    schema: Schema = field(default_factory=dict)  # of a result
    every_line: bool = False  # blank lines are rows, too, and rows have their lines
    passes_rows: bool = False  # all rows have their data, in one format, to be written unchanged
    whole_files: bool = False  # a file of lines is one row
    all_columns: bool = False  # all columns of a table are read, and records have "columns"
    joins_words: bool = False  # a row without a text may have "words", whose join is the text

    def __post_init__(self) -> None:
        options = self.fields[1:]
        reserved = IDENTITY | self.schema | self.origin | ERROR
        for name in self.texts:
            if name in options or name in reserved:
                kind = "the name of an option" if name in options else "a field of each record"
                raise InputError(f"the template's {{{name}}} is {kind}: rename it in the input")

    @property
    def texts(self) -> tuple[str, ...]:
        """The fields that make the text of a row, which its record repeats."""
        return self.template.names if self.template else self.fields[:1]

    @property
    def columns(self) -> tuple[str, ...]:
        """All fields of a row that are read, besides its id."""
        return (*self.texts, *self.fields[1:])

    @property
    def origin(self) -> Schema:
        """The fields of a record with the file, if there are several, and the line number.

        With one file, the line number is only in errors and, with "columns", in all records.
        """
        return {"file": "string", "line_number" if _LINE in self.texts else "line": "int64"}

    @property
    def table(self) -> Schema:
        """The columns of a table of records."""
        return IDENTITY | dict.fromkeys(self.texts, "string") | self.schema | self.origin | ERROR

    def id_of(self, fields: dict[str, Any]) -> Any:
        """Return the id of a row, which is taken from its fields."""
        return fields.pop("id", None)

    def line_start(self, index: int) -> str:
        """Return how the line of a record begins; the index is that of its row."""
        return f'{{"index": {index}, '

    def error_of(self, record: Record) -> Record | None:
        """Return the error of a record, which has a "message"; None if it is a result."""
        return error_of(record)

    def text(self, row: InputRow) -> str:
        """Return the text of a row: its first field, or the template with its fields."""
        return self.template.fill(row.fields) if self.template else row.fields[self.fields[0]]
