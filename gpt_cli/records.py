"""What is told of rows: a task does something with each row, and tells of it in a line of JSON."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, TypeAlias

from gpt_cli import batch
from gpt_cli.engine import Engine
from gpt_cli.errors import InputError
from gpt_cli.generate import Completion, Options
from gpt_cli.rows import Row
from gpt_cli.score import Score

# Names of columns, with their types as pyarrow calls them; a list has that of what it holds.
Columns: TypeAlias = dict[str, Any]

_TOGETHER = 256  # rows

PLACE: Columns = {"index": "int64", "id": "string"}
ERROR: Columns = {
    "file": "string",
    "line": "int64",
    "error": {"code": "string", "message": "string"},
}
_TOKEN: Columns = {"id": "int64", "token": "string", "bytes": ["int64"], "logprob": "double"}


@dataclass(frozen=True)
class Record:
    """What has become of a row."""

    line: str  # JSON, with its line end
    tokens: int  # that were made, or scored
    failed: bool


class Task(Protocol):
    """What is done with each row: plain data, which can be sent to wherever a model is."""

    @property
    def fields(self) -> tuple[str, ...]:
        """What a row may have besides an id; the first is its text, and is in its record."""

    @property
    def mark(self) -> str:
        """What only a record of this task has, and each that is no error."""

    @property
    def columns(self) -> Columns:
        """The columns of a table of the records, but for `PLACE` and `ERROR`."""

    @property
    def together(self) -> int:
        """How many rows are best given at a time."""

    @property
    def settings(self) -> dict[str, Any]:
        """What the records depend on besides the row and the model, as JSON has it."""

    def with_seed(self, seed: int) -> "Task":
        """Return the same task, with another seed for rows that have none."""

    def records(self, engine: Engine, rows: Sequence[Row]) -> Iterator[Record]:
        """Do it; yield what has become of each row, in their order.

        Raises:
            InputError: an option is out of range.
            ResourceError: there is not enough memory.
            CheckpointError: the weights are damaged.
        """


@dataclass(frozen=True)
class Generation:
    """Continue the prompt of each row.

    A row's text depends on its index and its own options, and not on the other rows.
    """

    options: Options  # of rows that have none of their own
    batch_size: int | None = None
    logprobs: bool = False

    fields = ("prompt", *batch.ROW_OPTIONS)
    mark = "finish_reason"

    @property
    def columns(self) -> Columns:
        """See `Task`."""
        told: Columns = {
            "prompt": "string",
            "text": "string",
            "finish_reason": "string",
            "seed": "uint64",
            "model": "string",
            "usage": {"prompt_tokens": "int64", "completion_tokens": "int64"},
            "timing": {"load_s": "double", "ttft_s": "double", "decode_tok_s": "double"},
        }
        return told | ({"logprobs": [_TOKEN | {"top": [_TOKEN]}]} if self.logprobs else {})

    @property
    def settings(self) -> dict[str, Any]:
        """See `Task`."""
        return asdict(self.options) | {"stop": list(self.options.stop), "logprobs": self.logprobs}

    def with_seed(self, seed: int) -> "Generation":
        """See `Task`."""
        return replace(self, options=replace(self.options, seed=seed))

    @property
    def together(self) -> int:
        """As many as are sorted by length to be computed side by side, and not very few."""
        return max(_TOGETHER, batch.read_ahead(self.batch_size))

    def records(self, engine: Engine, rows: Sequence[Row]) -> Iterator[Record]:
        """Continue the rows; see `Task`."""
        requests = (row.request for row in rows)
        indices = (row.index for row in rows)
        results = engine.batch(requests, self.options, batch_size=self.batch_size, indices=indices)
        for row, result in zip(rows, results, strict=True):
            if isinstance(result, InputError):
                yield _failed(row, result)
            else:
                told = of_completion(engine, row.get("prompt"), result, logprobs=self.logprobs)
                yield Record(json_line(_place(row) | told), len(result.ids), False)


@dataclass(frozen=True)
class Scoring:
    """Tell how likely the text of each row is."""

    stride: int | None = None
    logprobs: bool = False

    fields = ("text",)
    mark = "tokens_scored"
    together = _TOGETHER

    @property
    def columns(self) -> Columns:
        """See `Task`."""
        told: Columns = {
            "text": "string",
            "model": "string",
            "tokens": "int64",
            "tokens_scored": "int64",
            "total_logprob": "double",
            "perplexity": "double",
            "bits_per_byte": "double",
        }
        return told | ({"logprobs": [_TOKEN]} if self.logprobs else {})

    @property
    def settings(self) -> dict[str, Any]:
        """See `Task`."""
        return asdict(self)

    def with_seed(self, seed: int) -> "Scoring":
        """Return the task itself: there is nothing to draw."""
        return self

    def records(self, engine: Engine, rows: Sequence[Row]) -> Iterator[Record]:
        """Score the rows; see `Task`."""
        texts = [
            row.request if isinstance(row.request, InputError) else row.get("text") for row in rows
        ]
        results = engine.score_many(texts, stride=self.stride)
        for row, text, result in zip(rows, texts, results, strict=True):
            if isinstance(result, InputError):
                yield _failed(row, result)
            else:
                told = {"text": text} | of_score(engine, result, logprobs=self.logprobs)
                yield Record(json_line(_place(row) | told), result.tokens_scored, False)


def _failed(row: Row, reason: InputError) -> Record:
    told = _place(row) | ({} if row.file is None else {"file": row.file}) | {"line": row.line}
    return Record(json_line(told | of_error(reason)), 0, True)


def _place(row: Row) -> dict[str, Any]:
    return {"index": row.index} | ({} if row.id is None else {"id": row.id})


def json_line(value: Any) -> str:
    """Return a value as one line of JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n"


def timing(engine: Engine, completion: Completion) -> dict[str, float | None]:
    """Seconds to load, seconds to the first token, and tokens a second after it."""
    times = completion.seconds
    rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None
    return {
        "load_s": round(engine.load_seconds, 4),
        "ttft_s": round(times[0], 4) if times else None,
        "decode_tok_s": rate and round(rate, 2),
    }


def of_completion(
    engine: Engine, prompt: str, completion: Completion, *, logprobs: bool
) -> dict[str, Any]:
    """Return what is told about a completion, with the log-probability of each token if wanted."""
    told = {
        "prompt": prompt,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "seed": completion.seed,
        "model": engine.name,
        "usage": {
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": len(completion.ids),
        },
        "timing": timing(engine, completion),
    }
    if logprobs:
        steps = zip(completion.ids, completion.logprobs, completion.top_logprobs, strict=True)
        told["logprobs"] = [
            of_token(engine, id, logprob) | {"top": [of_token(engine, *other) for other in top]}
            for id, logprob, top in steps
        ]
    return told


def of_score(engine: Engine, score: Score, *, logprobs: bool) -> dict[str, Any]:
    """Return what is told about a score, with the log-likelihood of each token if wanted."""
    told = {
        "model": engine.name,
        "tokens": len(score.ids),
        "tokens_scored": score.tokens_scored,
        "total_logprob": score.total_logprob,
        "perplexity": None if score.perplexity == math.inf else score.perplexity,
        "bits_per_byte": score.bits_per_byte,
    }
    if logprobs:
        pairs = zip(score.ids, score.token_logprobs, strict=True)
        told["logprobs"] = [of_token(engine, *pair) for pair in pairs]
    return told


def of_error(reason: InputError) -> dict[str, Any]:
    """Return what is told of a row that failed."""
    return {"error": {"code": reason.code, "message": str(reason)}}


def of_token(engine: Engine, id: int, logprob: float | None) -> dict[str, Any]:
    """Return a token with its text, in which U+FFFD stands for an unfinished character.

    A model may have more ids than its tokenizer has tokens; the others have a name and no bytes.
    """
    try:
        piece = engine.tokenizer.token_bytes(id)
    except InputError:
        return {"id": id, "token": f"<{id}>", "bytes": [], "logprob": logprob}
    text = piece.decode(errors="replace")
    return {"id": id, "token": text, "bytes": list(piece), "logprob": logprob}
