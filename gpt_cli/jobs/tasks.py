"""Per-row tasks and their JSON records."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from gpt_cli import records
from gpt_cli.errors import InputError
from gpt_cli.jobs.rows import Row
from gpt_cli.options import Options
from gpt_cli.records import Record, Schema

if TYPE_CHECKING:
    from gpt_cli.engine import Engine

_WINDOW = 256  # rows


class Task(Protocol):
    """Computes a result for each row; to run on another machine, a task is pickled."""

    @property
    @abstractmethod
    def fields(self) -> tuple[str, ...]:
        """The fields of a row that are read, besides its id. The first is its text."""

    @property
    @abstractmethod
    def schema(self) -> Schema:
        """The fields of a result."""

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
        """Yield the record of each row, in order: its index, id and text with its result.

        The record of a row that failed has its place in the input, and the error.
        """
        valid = [row for row in rows if row.error is None]
        results = zip(valid, self.results(engine, valid), strict=True)
        for row in rows:
            result = row.error or next(results)[1]
            place = {"index": row.index} | ({} if row.id is None else {"id": row.id})
            if isinstance(result, InputError):
                file = {} if row.file is None else {"file": row.file}
                yield place | file | {"line": row.line} | records.of_error(result)
            else:
                text = self.fields[0]
                yield place | {text: row.fields[text]} | result


@dataclass(frozen=True)
class Generation(Task):
    """Continue the prompt of each row.

    The text of a row depends on its index and its own options, and not on other rows.
    """

    options: Options  # of rows without options of their own
    batch_size: int | None = None
    logprobs: bool = False

    fields = ("prompt", *Options.row_fields())

    @property
    def schema(self) -> Schema:
        token = records.TOKEN | {"top": [records.TOKEN]}
        return records.COMPLETION | ({"logprobs": [token]} if self.logprobs else {})

    @property
    def window(self) -> int:
        from gpt_cli.batch import read_ahead  # brings NumPy

        return max(_WINDOW, read_ahead(self.batch_size))

    @property
    def settings(self) -> dict[str, Any]:
        return asdict(self.options) | {"logprobs": self.logprobs}

    def with_seed(self, seed: int | None) -> "Generation":
        return replace(self, options=self.options.with_seed(seed))

    def results(self, engine: "Engine", rows: Sequence[Row]) -> Iterator[Record | InputError]:
        found = engine.batch(
            (row.fields for row in rows),
            self.options,
            batch_size=self.batch_size,
            indices=(row.index for row in rows),
        )
        record = partial(records.of_completion, engine, logprobs=self.logprobs)
        for each in found:
            yield each if isinstance(each, InputError) else record(each)

    def tokens(self, record: Record) -> int:
        return int(record["usage"]["completion_tokens"])


@dataclass(frozen=True)
class Scoring(Task):
    """Compute the likelihood of the text of each row."""

    stride: int | None = None
    logprobs: bool = False  # with ranks and entropies
    words: bool = False
    bos: bool = False

    fields = ("text",)

    @property
    def schema(self) -> Schema:
        tokens = {"logprobs": [records.SCORED_TOKEN]} if self.logprobs else {}
        return records.SCORE | tokens | ({"words": [records.WORD]} if self.words else {})

    def results(self, engine: "Engine", rows: Sequence[Row]) -> Iterator[Record | InputError]:
        texts: list[Any] = [row.fields["text"] for row in rows]
        record = partial(records.of_score, engine, logprobs=self.logprobs)
        for each in engine.score_many(
            texts,
            stride=self.stride,
            bos=self.bos,
            ranks=self.logprobs,
            entropies=self.logprobs,
            words=self.words,
        ):
            yield each if isinstance(each, InputError) else record(each)

    def tokens(self, record: Record) -> int:
        return int(record["tokens_scored"])
