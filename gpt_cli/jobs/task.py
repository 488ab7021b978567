"""A task: what is computed for each row of an input, and the record of its result."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from gpt_cli import records
from gpt_cli.errors import InputError, checked, compute_valid
from gpt_cli.jobs.layout import InputRow, KeepFields, Layout, Template
from gpt_cli.records import Record, Schema

if TYPE_CHECKING:
    from gpt_cli.engine import Engine

Rows: TypeAlias = Sequence[InputRow]

ROWS_TOGETHER = 256
# Settings that a manifest has only if they are set: version 1.0 did not have them.
ABSENT_IF_UNSET = {"special", "eos", "context", "token_logprobs", "calibrate"}
ABSENT_IF_UNSET |= {"min_tokens", "bad_words", "stop_token_ids", "samples"}


def comparable(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings without those that are not set and that older outputs do not have."""
    return {name: value for name, value in settings.items() if value or name not in ABSENT_IF_UNSET}


class Task(ABC):
    """The computation for each row; a task is pickled to run on another machine."""

    # The fields of a row that its record has: none, its id, or all. None is for a sink that shows
    # no records: only the fields that the task reads are kept, and the others are noted.
    keep_fields: KeepFields | None = "all"
    template: Template | None = None  # a text with fields of a row, instead of the row's text
    every_line: bool = False  # blank lines are rows, too, and records have the "data" of lines
    passes_rows: bool = False  # a filter: rows, all in one format, pass as the "data" of records
    has_lines: bool = False  # all records have the line or the row of their file
    reserved: tuple[str, ...] = ()  # names of records besides those in the schema; some with `*`

    @property
    def endings(self) -> tuple[str, ...]:
        """The endings of outputs; a part in a folder has the first, or .parquet beside .jsonl."""
        return ".jsonl", ".parquet", ".csv", ".tsv"

    @property
    @abstractmethod
    def fields(self) -> tuple[str, ...]:
        """The fields of a row that are read, besides its id. The first is its text."""

    @property
    @abstractmethod
    def schema(self) -> Schema:
        """The fields of a result."""

    @cached_property
    def layout(self) -> Layout:
        """The fields of rows and records."""
        return Layout(
            self.fields,
            self.template,
            self.schema,
            every_line=self.every_line,
            passes_rows=self.passes_rows,
            takes_template=True,
            keep_fields=self.keep_fields,
            reserved=self.reserved,
        )

    @property
    def rows_together(self) -> int:
        """The number of rows that `results` gets at a time."""
        return ROWS_TOGETHER

    @property
    def settings(self) -> dict[str, Any]:
        """The options that change results, as JSON values; by default the fields of a dataclass.

        An output with other settings cannot be resumed. Older outputs do not have all of them, so
        those in `ABSENT_IF_UNSET` are only there if they are set.
        """
        return comparable(asdict(self)) if is_dataclass(self) else {}

    def with_seed(self, seed: int | None) -> "Task":
        """Return the task with a seed if it draws numbers: its own, else `seed`, else any."""
        return self

    def check_lines(self) -> None:
        """Raise InputError if plain lines lack something that the task reads."""
        if self.template:
            self.template.check_line()

    def prepare(self, row: InputRow) -> InputRow:
        """Return a row for `results`; raise InputError if nothing can be computed for it."""
        if row.error:
            raise row.error
        return row

    @abstractmethod
    def results(self, engine: "Engine", rows: Rows) -> Iterable[Any]:
        """Return the results of rows, in order; that of a row may be an InputError."""

    def record(self, engine: "Engine", row: InputRow, result: Any) -> Record:
        """Return a result as the fields of a record; raise InputError if that is not possible."""
        return result

    def contents(self, engine: "Engine", row: InputRow, result: Any) -> list[Record]:
        """Return the fields of the records of a row: of one, unless a result has several parts."""
        return [self.record(engine, row, result)]

    def records(self, engine: "Engine", rows: Rows, first: int = 0) -> Iterator[list[Record]]:
        """Yield the records of each row from index `first` on: of its result, or an error."""
        rows = [row for row in rows if row.index >= first]
        results = compute_valid(
            rows, self.prepare, lambda valid: self._computed(engine, list(valid))
        )
        for row, result in zip(rows, results, strict=True):
            try:
                contents = self.contents(engine, row, checked(result))
                identity = self.identity(row)
            except InputError as error:
                contents = [records.of_error(error)]
                identity = self.identity(row, is_error=True)
            yield [identity | content for content in contents]

    def identity(self, row: InputRow, *, is_error: bool = False) -> Record:
        """Return what a record has of its row: where it is in the input, and its fields."""
        layout = self.layout
        values: Record = {"index": row.index, "id": row.id, "data": row.data or None}
        if row.file is not None or self.has_lines or layout.every_line or is_error:
            file, line = layout.origin
            values[file] = row.file
            values[line] = row.line
        if not is_error:
            for name in layout.texts:
                values[name] = row.fields[name]
        values = {name: value for name, value in values.items() if value is not None}
        return values | layout.kept(row.fields, is_error=is_error)

    def _computed(self, engine: "Engine", rows: Rows) -> Iterator[Any]:
        """Yield the results of rows: for one whose edits make values overflow, the error."""
        from gpt_cli.gpt2.weights import EditOverflowError  # brings NumPy

        done = 0
        try:
            for result in self.results(engine, rows):
                done += 1
                yield result
        except EditOverflowError as error:
            middle = (done + len(rows)) // 2  # until the row is alone
            if middle == done:
                yield error
            else:
                yield from self._computed(engine, rows[done:middle])
                yield from self._computed(engine, rows[middle:])

    def tokens(self, record: Record) -> int:
        """Return the number of tokens that were computed for a record."""
        return 0


@dataclass(frozen=True)
class RecordTask(Task):
    """A task for rows whose records have fields of them: see `Task.keep_fields`."""

    keep_fields: KeepFields | None = field(default="all", kw_only=True)


class TextTask(RecordTask):
    """A task for texts with optional edits."""

    fields: tuple[str, ...] = ("text", "edits", "special")

    def texts(self, rows: Rows) -> list[dict[str, Any]]:
        """Return rows with their texts and their fields, as an engine takes them."""
        names = self.layout.options
        return [
            {"text": self.layout.text(row)} | {name: row.fields.get(name) for name in names}
            for row in rows
        ]
