"""Per-row tasks and their JSON records."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from gpt_cli import records
from gpt_cli.errors import InputError
from gpt_cli.jobs.rows import Row
from gpt_cli.options import Options
from gpt_cli.records import Record, Schema

if TYPE_CHECKING:
    from gpt_cli.engine import Engine

_TOGETHER = 256  # rows


class Task(Protocol):
    """A computation for each row: plain data, which can be sent to another machine."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that a row may have besides its id.

        The first is its text. A record without error has it unchanged: `--resume` compares it.
        """

    @property
    def schema(self) -> Schema:
        """The fields of a record without error, besides `records.PLACE`."""

    @property
    def together(self) -> int:
        """The number of rows that `records` is best given at a time."""
        return _TOGETHER

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that the records depend on besides row and model, as JSON values."""
        return {}

    def with_seed(self, seed: int | None) -> "Task":
        """Return this task with a seed: its own, else the one given, else a drawn one.

        The default is for tasks that draw nothing.
        """
        return self

    def records(self, engine: "Engine", rows: Sequence[Row]) -> Iterator[Record]:
        """Yield the record of each row, in order; for a row with an `error`, see `error_record`.

        Raises:
            InputError: an option is out of range.
            ResourceError: there is not enough memory.
            CheckpointError: the weights are damaged.
        """

    def tokens(self, record: Record) -> int:
        """Return the number of tokens that were computed for a record."""
        return 0


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
    def together(self) -> int:
        from gpt_cli.batch import read_ahead  # brings NumPy

        return max(_TOGETHER, read_ahead(self.batch_size))

    @property
    def settings(self) -> dict[str, Any]:
        return asdict(self.options) | {"logprobs": self.logprobs}

    def with_seed(self, seed: int | None) -> "Generation":
        return replace(self, options=self.options.with_seed(seed))

    def records(self, engine: "Engine", rows: Sequence[Row]) -> Iterator[Record]:
        requests = (row.error or row.fields for row in rows)
        indices = (row.index for row in rows)
        results = engine.batch(requests, self.options, batch_size=self.batch_size, indices=indices)
        for row, result in zip(rows, results, strict=True):
            if isinstance(result, InputError):
                yield error_record(row, result)
            else:
                prompt = row.fields["prompt"]
                told = records.of_completion(engine, prompt, result, logprobs=self.logprobs)
                yield place(row) | told

    def tokens(self, record: Record) -> int:
        return int(record["usage"]["completion_tokens"])


@dataclass(frozen=True)
class Scoring(Task):
    """Compute the likelihood of the text of each row."""

    stride: int | None = None
    logprobs: bool = False

    fields = ("text",)

    @property
    def schema(self) -> Schema:
        logprobs = {"logprobs": [records.TOKEN]} if self.logprobs else {}
        return {"text": "string"} | records.SCORE | logprobs

    @property
    def settings(self) -> dict[str, Any]:
        return asdict(self)

    def records(self, engine: "Engine", rows: Sequence[Row]) -> Iterator[Record]:
        texts: list[Any] = [row.error or row.fields.get("text") for row in rows]
        results = engine.score_many(texts, stride=self.stride)
        for row, text, result in zip(rows, texts, results, strict=True):
            if isinstance(result, InputError):
                yield error_record(row, result)
            else:
                told = records.of_score(engine, result, logprobs=self.logprobs)
                yield place(row) | {"text": text} | told

    def tokens(self, record: Record) -> int:
        return int(record["tokens_scored"])


def place(row: Row) -> Record:
    """Return the beginning of each record: the index of its row, and the id if it has one."""
    return {"index": row.index} | ({} if row.id is None else {"id": row.id})


def error_record(row: Row, error: InputError) -> Record:
    """Return the record of a row that failed, with its place in the input."""
    file = {} if row.file is None else {"file": row.file}
    return place(row) | file | {"line": row.line} | records.of_error(error)
