"""Callable classes for pipelines of Ray Data; each of its actors holds a model.

    rows = ray.data.read_json("rows.jsonl", lines=True)  # {"index": 0, "prompt": "Once upon"}
    rows.map_batches(
        gpt_cli.ray.Generate,
        fn_constructor_kwargs={"model": "tiny", "options": {"max_tokens": 20, "seed": 1}},
        batch_format="pyarrow",
        concurrency=1,  # actors; the reader needs a CPU, too, or both wait forever
        num_cpus=1,
    ).write_json("texts")

The result of a row is that of `Engine` on one machine, wherever it is computed: to the last bit on
nodes with the compiled library, within rounding where NumPy or a GPU computes. If an actor dies,
Ray computes its batches again, with the same results. A node downloads a model from the Hub once.
An actor uses as many threads as it has CPUs: Ray sets OMP_NUM_THREADS, which NumPy and the library
read. Ray Data must be installed: `pip install 'ray[data]'`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow

from gpt_cli import records
from gpt_cli.engine import load
from gpt_cli.errors import InputError
from gpt_cli.jobs.parquet import arrow_schema, whole
from gpt_cli.options import Options
from gpt_cli.records import COMPLETION, ERROR, SCORE, Record, Schema

__all__ = ["Generate", "Score"]

_USAGE: Schema = COMPLETION["usage"]
_GENERATED = {name: COMPLETION[name] for name in ("text", "finish_reason", "seed")} | _USAGE | ERROR
_SCORED = {name: kind for name, kind in SCORE.items() if name != "model"} | ERROR


class Generate:
    """Continue the prompts of a table.

    Args:
        model: a name or a folder, as for `gpt_cli.load`.
        options: the fields of `Options`, for rows without their own; they must have a seed, or
            each actor would draw another.
        load_options: keywords for `gpt_cli.load`, such as dtype and device.

    A row has a "prompt" and an "index", its number in the whole job, which keys the random draws;
    it may have the fields of `Options.row_fields()`. All columns are kept, and these are added:
    "text", "finish_reason", "seed", "prompt_tokens", "completion_tokens" and "error", which has a
    "code" and a "message" if the row failed; then the others are null.
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
        fields = ["prompt", *(name for name in Options.row_fields() if name in table.column_names)]
        rows = [
            {name: whole(row[name]) for name in row} for row in table.select(fields).to_pylist()
        ]
        indices = table["index"].to_pylist()
        found: list[Record] = []
        for row, result in zip(
            rows, self._engine.batch(rows, self._options, indices=indices), strict=True
        ):
            if isinstance(result, InputError):
                found.append(records.of_error(result))
            else:
                record = records.of_completion(self._engine, row["prompt"], result)
                found.append(record | record["usage"])
        return _with_columns(table, found, _GENERATED)


class Score:
    """Score the texts of a table.

    Args:
        model: a name or a folder, as for `gpt_cli.load`.
        stride: see `Engine.score_many`.
        load_options: keywords for `gpt_cli.load`, such as dtype and device.

    A row has a "text". All columns are kept, and these are added: "tokens", "tokens_scored",
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
        found = [
            records.of_error(result)
            if isinstance(result, InputError)
            else records.of_score(self._engine, result)
            for result in results
        ]
        return _with_columns(table, found, _SCORED)


def _check_columns(table: pyarrow.Table, needed: list[str]) -> None:
    """Raise InputError for errors that concern all rows."""
    if not isinstance(table, pyarrow.Table):
        raise InputError('a pyarrow.Table is needed: give map_batches batch_format="pyarrow"')
    missing = [name for name in needed if name not in table.column_names]
    if missing:
        raise InputError(f"there is no column {missing[0]!r}; the columns are {table.column_names}")


def _with_columns(table: pyarrow.Table, found: Sequence[Record], schema: Schema) -> pyarrow.Table:
    """Add columns of records; they replace columns of the same names, such as a row's own seed."""
    added = pyarrow.Table.from_pylist(found, arrow_schema(schema))
    table = table.drop_columns([name for name in schema if name in table.column_names])
    for name in schema:
        table = table.append_column(name, added[name])
    return table
