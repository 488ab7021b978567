"""The fields of rows that a task reads, and those of the records that it writes."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from typing import Any, Literal, TypeAlias

from gpt_cli.errors import InputError
from gpt_cli.records import ERROR, IDENTITY, Record, Schema, error_of

KeepFields: TypeAlias = Literal["none", "id", "all"]

_LINE = "line"  # the field that a plain line has
_OTHER_TEXT = {
    "text": "prompt",
    "prompt": "text",
}  # the field of the text, if a row lacks the first
_PLAIN_NAME = re.compile(r"[^\W\d]\w{,30}([ .-]\w{1,30}){,2}")  # others may be no name, but a row
_SHORT = 4  # names of fewer letters are near too many others
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
    joins_words: bool = False  # a row without a text may have "words", whose join is the text
    takes_template: bool = False  # whether an error may advise one
    # The fields of a row that its record has. None: there are no records of rows, so only the
    # fields that are read are kept, and the others are noted.
    keep_fields: KeepFields | None = None
    reserved: tuple[str, ...] = ()  # more names of a record's own fields; some with `*`

    def __post_init__(self) -> None:
        options = self.options
        reserved = IDENTITY | self.schema | self.origin | ERROR
        for name in self.texts:
            if name in options or name in reserved:
                kind = "the name of an option" if name in options else "a field of each record"
                raise InputError(f"the template's {{{name}}} is {kind}: rename it in the input")

    @cached_property
    def texts(self) -> tuple[str, ...]:
        """The fields that make the text of a row, which its record repeats."""
        return self.template.names if self.template else self.fields[:1]

    @cached_property
    def options(self) -> tuple[str, ...]:
        """The fields of a row that are read, besides its id and its text."""
        return self.fields[1:]

    @property
    def columns(self) -> tuple[str, ...]:
        """All fields of a row that are read, besides its id."""
        return (*self.texts, *self.options)

    def sources(self, names: Collection[str]) -> dict[str, str]:
        """Return the fields of a row that have its texts, by the names of these.

        A row that has a prompt but no text is read as if its prompt were named "text", or the
        reverse: the names are those of its fields, or of the columns of its table.
        """
        sources = {name: name for name in self.texts}
        if self.template or self.fields[0] in names:
            return sources
        other = self.alternatives[-1]
        if other in names and not (self.joins_words and "words" in names):
            sources[self.fields[0]] = other
        return sources

    def columns_in(self, names: Sequence[str]) -> list[str]:
        """Return those of the columns of a table that are read."""
        if self.keep_fields == "all":
            return [name for name in names if name]
        known = {"id", *self.options, *self.sources(names).values()}
        return [name for name in names if name in known]

    def check_columns(self, names: Collection[str], texts: Iterable[str]) -> None:
        """Raise InputError if the columns of a table lack one, or one is perhaps misspelled.

        `texts` are those with strings. The message follows the name of the table.
        """
        for source in self.sources(names).values():
            if source not in names and not (self.joins_words and "words" in names):
                missing = [source] if self.template else self.alternatives
                raise InputError(
                    f"has no column {' or '.join(map(repr, missing))}; its columns are "
                    f"{list(names)}{self.advice(texts)}"
                )
        try:
            self.check_names(names)
        except InputError as error:
            raise InputError(f"has an {error}") from None

    @cached_property
    def alternatives(self) -> tuple[str, ...]:
        """The fields that a row may have for its text: the first that it has is the text."""
        first = self.fields[0]
        return (first, _OTHER_TEXT[first]) if first in _OTHER_TEXT else (first,)

    def advice(self, texts: Iterable[str]) -> str:
        """Return how to read one of these fields of a row that lacks its text, or ""."""
        for name in texts if self.takes_template and not self.template else ():
            if name not in self._known and _PLAIN_NAME.fullmatch(name):
                return f"; to read {name}, set the template (--template '{{{name}}}')"
        return ""

    def check_names(self, names: Iterable[str]) -> None:
        """Raise InputError for a field that is one letter away from the name of an option."""
        for name in names:
            if name not in self._known:
                option = _near(name, self.options)
                if option:
                    raise InputError(
                        f'unknown field "{name:.40}": did you mean "{option}"? If not, rename it'
                    )

    def renamed(self, names: Collection[str]) -> dict[str, str]:
        """Return the new names of fields of a row whose names its record has for its own fields."""
        own = [name for name in names if name not in self._repeated and self._is_own(name)]
        renamed = {}
        for name in own if self.keep_fields == "all" else ():
            new = f"row_{name}"
            while new in names or self._is_own(new):
                new = f"row_{new}"
            renamed[name] = new
        return renamed

    def kept(self, fields: Mapping[str, Any], *, is_error: bool = False) -> Record:
        """Return the fields of a row that its record has besides its texts, in their order.

        Left out are options that the record has anyway. A record that is an error has no options:
        one of them may be a value of a wrong type.
        """
        if self.keep_fields != "all":
            return {}
        left_out = self._repeated.union(self.options) if is_error else self._repeated
        new = self.renamed(fields)
        return {new.get(name, name): fields[name] for name in fields if name not in left_out}

    @cached_property
    def _known(self) -> frozenset[str]:
        """The names of fields that are not misspelled."""
        texts = self.texts if self.template else self.alternatives
        return frozenset({"id", *self.options, *texts})

    @cached_property
    def _repeated(self) -> frozenset[str]:
        """The fields of a row whose values its record has anyway."""
        return frozenset(self.texts).union(filter(self._is_own, self.options))

    def _is_own(self, name: str) -> bool:
        """Return whether a record has, or may have, a field of its own with this name."""
        return name in self._own or any(fnmatchcase(name, glob) for glob in self._globs)

    @cached_property
    def _own(self) -> frozenset[str]:
        data = ("data",) if self.every_line or self.passes_rows else ()
        return frozenset(self.table).union(self.reserved, data)

    @cached_property
    def _globs(self) -> tuple[str, ...]:
        return tuple(name for name in self.reserved if "*" in name)

    @property
    def origin(self) -> Schema:
        """The fields of a record with the file, if there are several, and the line number.

        With one file, the line number is only in errors, unless the task has it in all records.
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


@lru_cache(maxsize=4096)  # the rows of an input have the same names
def _near(name: str, options: Sequence[str]) -> str | None:
    """Return the option from which a name is one edit away, if there is one."""
    for option in options:
        if len(option) >= _SHORT and _is_one_edit(name, option):
            return option
    return None


def _is_one_edit(a: str, b: str) -> bool:
    """Return whether a letter is inserted, deleted or replaced, or two neighbours are swapped."""
    a, b = sorted((a, b), key=len)
    pairs = zip(a, b, strict=False)
    begin = next((index for index, (x, y) in enumerate(pairs) if x != y), len(a))
    a, b = a[begin:], b[begin:]
    swapped = a[1:2] + a[:1] + a[2:]
    return b in (swapped, b[:1] + a[1:], b[:1] + a) and a != b
