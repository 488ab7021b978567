"""Callable classes for tables: what `map_batches` of Ray Data calls, in each of its actors."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import pyarrow

from gpt_cli.batch import ROW_OPTIONS
from gpt_cli.engine import load
from gpt_cli.errors import InputError
from gpt_cli.generate import Options
from gpt_cli.parquet import whole
from gpt_cli.records import of_error

_Columns: TypeAlias = dict[str, tuple[list[Any], pyarrow.DataType]]  # values, null where failed

_ERROR = pyarrow.struct([("code", pyarrow.string()), ("message", pyarrow.string())])


class Generate:
    """Continue the prompts of a table.

    Args:
        model: a name or a folder, as for `gpt_cli.load`.
        options: the fields of `Options`, for rows that have none of their own; the seed must be
            one of them, or each actor would draw another.
        load_options: keywords for `gpt_cli.load`, such as dtype and device.

    A row has a "prompt" and an "index", its number in the whole job, by which the draws are keyed;
    it may have the fields of `gpt_cli.batch.ROW_OPTIONS`. All columns are passed on, and with them
    come "text", "finish_reason", "seed", "prompt_tokens", "completion_tokens" and "error", which
    has a "code" and a "message" where the others are null.
    """

    def __init__(
        self,
        model: str,
        options: Mapping[str, Any],
        load_options: Mapping[str, Any] | None = None,
    ):
        if "seed" not in options:
            raise InputError("the options need a seed, or each actor would draw another")
        self._options = Options(**options)
        self._engine = load(model, **(load_options or {}))

    def __call__(self, table: pyarrow.Table) -> pyarrow.Table:
        """Continue the rows of a table, side by side."""
        _check_columns(table, ["prompt", "index"])
        fields = ["prompt", *(name for name in ROW_OPTIONS if name in table.column_names)]
        rows = [
            {name: whole(row[name]) for name in row} for row in table.select(fields).to_pylist()
        ]
        indices = table["index"].to_pylist()
        results = list(self._engine.batch(rows, self._options, indices=indices))
        done = [None if isinstance(result, InputError) else result for result in results]
        columns: _Columns = {
            "text": ([row and row.text for row in done], pyarrow.string()),
            "finish_reason": ([row and row.finish_reason for row in done], pyarrow.string()),
            "seed": ([row and row.seed for row in done], pyarrow.uint64()),
            "prompt_tokens": ([row and row.prompt_tokens for row in done], pyarrow.int64()),
            "completion_tokens": ([row and len(row.ids) for row in done], pyarrow.int64()),
            "error": ([_error(result) for result in results], _ERROR),
        }
        return _with_columns(table, columns)


class Score:
    """Score the texts of a table.

    Args:
        model: a name or a folder, as for `gpt_cli.load`.
        stride: see `Engine.score_many`.
        load_options: keywords for `gpt_cli.load`, such as dtype and device.

    A row has a "text". All columns are passed on, and with them come "tokens", "tokens_scored",
    "total_logprob", "perplexity", "bits_per_byte" and "error".
    """

    def __init__(
        self,
        model: str,
        stride: int | None = None,
        load_options: Mapping[str, Any] | None = None,
    ):
        self._stride = stride
        self._engine = load(model, **(load_options or {}))

    def __call__(self, table: pyarrow.Table) -> pyarrow.Table:
        """Score the rows of a table, side by side."""
        _check_columns(table, ["text"])
        results = self._engine.score_many(table["text"].to_pylist(), stride=self._stride)
        done = [None if isinstance(result, InputError) else result for result in results]
        columns: _Columns = {
            "tokens": ([row and len(row.ids) for row in done], pyarrow.int64()),
            "tokens_scored": ([row and row.tokens_scored for row in done], pyarrow.int64()),
            "total_logprob": ([row and row.total_logprob for row in done], pyarrow.float64()),
            "perplexity": ([row and row.perplexity for row in done], pyarrow.float64()),
            "bits_per_byte": ([row and row.bits_per_byte for row in done], pyarrow.float64()),
            "error": ([_error(result) for result in results], _ERROR),
        }
        return _with_columns(table, columns)


def _check_columns(table: pyarrow.Table, needed: list[str]) -> None:
    """Raise InputError for what is wrong with all rows alike."""
    if not isinstance(table, pyarrow.Table):
        raise InputError('a pyarrow.Table is needed: give map_batches batch_format="pyarrow"')
    missing = [name for name in needed if name not in table.column_names]
    if missing:
        raise InputError(f"rows have no column {missing[0]!r}; theirs are {table.column_names}")


def _error(result: object) -> dict[str, str] | None:
    if not isinstance(result, InputError):
        return None
    return of_error(result)["error"]


def _with_columns(table: pyarrow.Table, columns: _Columns) -> pyarrow.Table:
    """Add columns; one of the same name, such as a row's own seed, gives way."""
    table = table.drop_columns([name for name in columns if name in table.column_names])
    for name, (values, kind) in columns.items():
        table = table.append_column(name, pyarrow.array(values, kind))
    return table
