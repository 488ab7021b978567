"""Per-row tasks and their JSON records."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from gpt_cli import records
from gpt_cli.errors import InputError
from gpt_cli.jobs.rows import Row
from gpt_cli.jobs.template import LINE, Template
from gpt_cli.options.request import CONSTRAINTS, Options
from gpt_cli.records import ERROR, PLACE, Record, Schema

if TYPE_CHECKING:
    from gpt_cli.engine import Engine
    from gpt_cli.scoring.rank import RankBy

_WINDOW = 256  # rows


class Task(Protocol):
    """Computes a result for each row; to run on another machine, a task is pickled."""

    @property
    @abstractmethod
    def fields(self) -> tuple[str, ...]:
        """The fields of a row that are read, besides its id. The first is its text."""

    template: Template | None = None  # fields of a row in a text, in place of a row's text

    @property
    def texts(self) -> tuple[str, ...]:
        """The fields that make the text of a row, which its record repeats."""
        return self.template.names if self.template else self.fields[:1]

    @property
    def columns(self) -> tuple[str, ...]:
        """All fields of a row that are read, besides its id.

        Raises:
            InputError: the template has the name of an option, or of another field of a record.
        """
        options = self.fields[1:]
        if taken := [name for name in self.texts if name in options]:
            raise InputError(
                f"the template's {{{taken[0]}}} is the name of an option: rename the field"
            )
        others = PLACE | self.schema | self.error_place | ERROR
        if taken := [name for name in self.texts if name in others]:
            raise InputError(
                f"the template's {{{taken[0]}}} is a field of each record: rename it in the input"
            )
        return (*self.texts, *options)

    def text(self, row: Row) -> str:
        """Return the text of a row."""
        return self.template.fill(row.fields) if self.template else row.fields[self.fields[0]]

    def options_of(self, row: Row) -> dict[str, Any]:
        """Return the row's own options; the input of a template may have any other fields."""
        known = self.fields[1:] if self.template else row.fields.keys() - self.texts
        return {name: row.fields[name] for name in row.fields if name in known}

    @property
    @abstractmethod
    def schema(self) -> Schema:
        """The fields of a result."""

    @property
    def error_place(self) -> Schema:
        """The fields of an error's record with the file and the number of the line of the row."""
        return {"file": "string", "line_number" if LINE in self.texts else "line": "int64"}

    @property
    def window(self) -> int:
        """The number of rows that `results` gets at a time."""
        return _WINDOW

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that the results depend on besides row and model, as JSON values.

        By default the fields of a dataclass. `resume` refuses an output with other settings.
        """
        return asdict(self) if is_dataclass(self) else {}

    def with_seed(self, seed: int | None) -> "Task":
        """Return this task with a seed: its own, else the one given, else a drawn one.

        The default is for tasks that draw nothing.
        """
        return self

    @abstractmethod
    def results(self, engine: "Engine", rows: Sequence[Row]) -> Iterator[Record | InputError]:
        """Yield the result of each row, in order, or the error of a row.

        Raises:
            InputError: an option is out of range.
            ResourceError: there is not enough memory.
            CheckpointError: the weights are damaged.
        """

    def tokens(self, record: Record) -> int:
        """Return the number of tokens that were computed for a record."""
        return 0

    def records(self, engine: "Engine", rows: Sequence[Row]) -> Iterator[Record]:
        """Yield the record of each row, in order: its index, id and texts with its result.

        The record of a row that failed has its place in the input, and the error.
        """
        valid = [row for row in rows if row.error is None]
        results = zip(valid, self.results(engine, valid), strict=True)
        for row in rows:
            result = row.error or next(results)[1]
            place = {"index": row.index} | ({} if row.id is None else {"id": row.id})
            if isinstance(result, InputError):
                found = zip(self.error_place, (row.file, row.line), strict=True)
                known = {name: value for name, value in found if value is not None}
                yield place | known | records.of_error(result)
            else:
                yield place | {name: row.fields[name] for name in self.texts} | result


@dataclass(frozen=True)
class Generation(Task):
    """Continue the prompt of each row.

    The text of a row depends on its index and its own options, and not on other rows.
    """

    options: Options  # of rows without options of their own
    batch_size: int | None = None
    logprobs: bool = False
    template: Template | None = None

    fields = ("prompt", *Options.row_fields())

    @property
    def schema(self) -> Schema:
        token = records.TOKEN | {"top": [records.TOKEN]}
        return records.COMPLETION | ({"logprobs": [token]} if self.logprobs else {})

    @property
    def window(self) -> int:
        from gpt_cli.generation.batch import read_ahead  # brings NumPy

        return max(_WINDOW, read_ahead(self.batch_size))

    @property
    def settings(self) -> dict[str, Any]:
        template = self.template and asdict(self.template)
        return asdict(self.options) | {"logprobs": self.logprobs, "template": template}

    def with_seed(self, seed: int | None) -> "Generation":
        return replace(self, options=self.options.with_seed(seed))

    def results(self, engine: "Engine", rows: Sequence[Row]) -> Iterator[Record | InputError]:
        found = engine.batch(
            map(self._asked, rows),
            self.options,
            batch_size=self.batch_size,
            indices=(row.index for row in rows),
        )
        record = partial(records.of_completion, engine, logprobs=self.logprobs)
        for each in found:
            yield each if isinstance(each, InputError) else record(each)

    def _asked(self, row: Row) -> dict[str, Any] | InputError:
        """Return the prompt and the options of a row; its choices follow the prompt: `spaced`."""
        own, prompt = self.options_of(row), self.text(row)
        choices = own.get("choices")
        if all(own.get(name) is None for name in CONSTRAINTS):
            choices = self.options.choices or None
        try:
            if choices is not None and isinstance(prompt, str):
                own["choices"] = [*spaced(prompt, choices)]
        except InputError as error:
            return error
        return own | {"prompt": prompt}

    def tokens(self, record: Record) -> int:
        return int(record["usage"]["completion_tokens"])


@dataclass(frozen=True)
class Scoring(Task):
    """Compute the likelihood of the text of each row."""

    stride: int | None = None
    logprobs: bool = False  # with ranks and entropies
    words: bool = False
    bos: bool = False
    template: Template | None = None

    fields = ("text",)

    @property
    def schema(self) -> Schema:
        tokens = {"logprobs": [records.SCORED_TOKEN]} if self.logprobs else {}
        return records.SCORE | tokens | ({"words": [records.WORD]} if self.words else {})

    def results(self, engine: "Engine", rows: Sequence[Row]) -> Iterator[Record | InputError]:
        record = partial(records.of_score, engine, logprobs=self.logprobs)
        for each in engine.score_many(
            [self.text(row) for row in rows],
            stride=self.stride,
            bos=self.bos,
            ranks=self.logprobs,
            entropies=self.logprobs,
            words=self.words,
        ):
            yield each if isinstance(each, InputError) else record(each)

    def tokens(self, record: Record) -> int:
        return int(record["tokens_scored"])


@dataclass(frozen=True)
class Ranking(Task):
    """Rank continuations of the prompt of each row.

    A row may have "choices" of its own.
    """

    choices: tuple[str, ...] = ()
    by: "RankBy" = "total"
    exact: bool = False  # see `spaced`
    template: Template | None = None

    fields = ("prompt", "choices")
    schema: ClassVar[Schema] = {"choices": [records.CHOICE]}

    def results(self, engine: "Engine", rows: Sequence[Row]) -> Iterator[Record | InputError]:
        given = [self._given(row) for row in rows]
        asked = [
            each if isinstance(each, InputError) else (self.text(row), list(each))
            for row, each in zip(rows, given, strict=True)
        ]
        for each, ranked in zip(given, engine.rank_many(asked, by=self.by), strict=True):
            if isinstance(each, InputError):
                yield each
            elif isinstance(ranked, InputError):
                yield ranked
            else:
                yield {"choices": records.of_ranking(engine, ranked, each)}

    def _given(self, row: Row) -> dict[str, str] | InputError:
        """Return the choices of a row with what was given: see `spaced`."""
        own = row.fields.get("choices")
        choices = self.choices if own is None else own
        try:
            if own is None and not choices:
                raise InputError('a row needs a list of "choices", or give --choices')
            return spaced(self.text(row), choices, exact=self.exact)
        except InputError as error:
            return error

    def tokens(self, record: Record) -> int:
        return sum(choice["tokens"] for choice in record["choices"])


def spaced(prompt: str, choices: Sequence[str], *, exact: bool = False) -> dict[str, str]:
    """Return choices as they follow a prompt, each with what was given.

    Unless `exact`, spaces around a choice are removed, and one is put before it if the prompt does
    not end with white space.

    Raises:
        InputError: there is no choice, or one is not a string, empty, or given twice.
    """
    listed = isinstance(choices, list | tuple) and choices
    if not listed or any(not isinstance(choice, str) for choice in choices):
        raise InputError('the "choices" of a row must be a list of one or more strings')
    space = "" if exact or not prompt or prompt[-1].isspace() else " "
    found: dict[str, str] = {}
    for choice in choices if exact else [choice.strip() for choice in choices]:
        if not choice:
            raise InputError("a choice is empty: remove it")
        if space + choice in found:
            raise InputError(f"duplicate choice {choice!r:.40}: remove it")
        found[space + choice] = choice
    return found
