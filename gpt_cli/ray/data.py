"""Callable classes for pipelines of Ray Data; their actors hold models."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow

from gpt_cli import jobs
from gpt_cli.errors import InputError
from gpt_cli.jobs.layout import InputRow
from gpt_cli.jobs.parquet import table_of, whole
from gpt_cli.jobs.task import RecordTask
from gpt_cli.jobs.tasks.activations import OutDtype
from gpt_cli.loading import load
from gpt_cli.options.arguments import check_type
from gpt_cli.options.declare import OptionError
from gpt_cli.options.request import Options
from gpt_cli.records import CLASSIFICATION, COMPLETION, ERROR, SAMPLE, SCORE, WORD, Schema

if TYPE_CHECKING:
    from gpt_cli.scoring.activations import Pool
    from gpt_cli.scoring.classify import LongTexts
    from gpt_cli.scoring.rank import RankBy

_USAGE: Schema = COMPLETION["usage"]


class _TableActor:
    """A task with a model, for the rows of tables."""

    _needed: tuple[str, ...]  # columns
    _added: Schema  # columns; they replace those of the same names, such as the seed of a row

    def __init__(self, task: RecordTask, model: str, load_options: Mapping[str, Any] | None):
        self._task = replace(task, keep_fields="none")  # the table keeps its columns
        self._engine = load(model, **(load_options or {}))

    def __call__(self, table: pyarrow.Table) -> pyarrow.Table:
        """Return the table with the results of its rows, computed side by side."""
        if not isinstance(table, pyarrow.Table):
            raise InputError('a pyarrow.Table is needed: set batch_format="pyarrow" in map_batches')
        names = table.column_names
        for name in self._needed:
            if name not in names:
                raise InputError(f"there is no column {name!r}; the columns are {names}")
        records = self._task.records(self._engine, self._rows(table))
        schema = {"index": "int64"} | self._added
        flat = []
        for number, of_row in enumerate(records):
            for record in of_row:
                record = record | record.get("usage", {}) | {"index": number}
                flat.append({n: record[n] for n in (*schema, "arrays") if n in record})
        added = table_of(flat, schema)
        table = table.drop_columns([name for name in self._added if name in names])
        if len(added) > len(table):  # such as a row per word, or per sample
            table = table.take(added["index"])
        for name in self._added:
            table = table.append_column(name, added[name])
        return table

    def _rows(self, table: pyarrow.Table) -> list[InputRow]:
        """Return the rows of a table, with the fields that the task reads."""
        indices = table["index"].to_pylist() if "index" in self._needed else range(len(table))
        names = [name for name in self._task.fields if name in table.column_names]
        rows = []
        for index, values in zip(indices, table.select(names).to_pylist(), strict=True):
            fields = {name: whole(value) for name, value in values.items()}
            rows.append(InputRow(index, 0, None, fields=fields))
        return rows


class Generator(_TableActor):
    """Continue the prompts of a table.

    A row has a "prompt" and an "index", its number in the whole job, which keys the random draws;
    it may have the other fields of a row for `gpt-cli batch`; `options` are their defaults. They
    must have a seed, or every actor would draw another. A row with "n" becomes one for each of its
    samples. Added are "sample", "text", "finish_reason", "seed",
    "prompt_tokens" and "completion_tokens".
    """

    _needed = ("prompt", "index")
    _added = (
        {"sample": SAMPLE["sample"]}
        | {name: COMPLETION[name] for name in ("text", "finish_reason", "seed")}
        | _USAGE
        | ERROR
    )

    def __init__(
        self, model: str, options: Mapping[str, Any], load_options: Mapping[str, Any] | None = None
    ):
        if "seed" not in options:
            raise InputError("the options need a seed, or each actor would draw another")
        super().__init__(jobs.Generation(Options(**options)), model, load_options)


class Scorer(_TableActor):
    """Score the texts of a table.

    A row has a "text". Added are "tokens", "tokens_scored", "total_logprob", "perplexity" and
    "bits_per_byte". For `stride`, see `Engine.score_many`.
    """

    _needed = ("text",)
    _added = {
        name: kind for name, kind in SCORE.items() if name not in ("model", "adapter")
    } | ERROR

    def __init__(
        self, model: str, stride: int | None = None, load_options: Mapping[str, Any] | None = None
    ):
        super().__init__(jobs.Scoring(stride), model, load_options)


class Activations(_TableActor):
    """Add the pooled values at hook points of the texts of a table.

    A row has a "text". Added are "tokens", and a list of one size per hook point. With the pool
    "word", a row becomes one per word, and "word", "start" and "end" are added. See
    `Engine.activations`.
    """

    _needed = ("text",)

    def __init__(
        self,
        model: str,
        hooks: Sequence[str],
        pool: "Pool" = "mean",
        *,
        bos: bool = False,
        out_dtype: OutDtype = "float32",
        load_options: Mapping[str, Any] | None = None,
    ):
        check_type("hooks", hooks, Sequence[str])
        if pool is None:
            raise OptionError("pool", "must be set for a table")
        task = jobs.Activations(tuple(hooks), pool, bos, out_dtype=out_dtype)
        super().__init__(task, model, load_options)
        kind = {"float32": "float", "float16": "halffloat"}[out_dtype]
        names = ("word", "start", "end") if pool == "word" else ()
        self._added = task.schema | {name: WORD[name] for name in names} | ERROR
        (example,) = self._engine.activations(["a"], hooks, pool="last", bos=bos)
        self._added |= {name: (kind, value.size) for name, value in example.items()}


class Classifier(_TableActor):
    """Find the labels of the texts of a table, with a model that is a classifier.

    A row has a "text". Added are "label", "probabilities", "value", "logits" and "tokens". For
    `overflow`, see `Engine.classify`.
    """

    _needed = ("text",)
    _added = {
        name: kind for name, kind in CLASSIFICATION.items() if name not in ("model", "adapter")
    } | ERROR

    def __init__(
        self,
        model: str,
        *,
        overflow: "LongTexts" = "error",
        load_options: Mapping[str, Any] | None = None,
    ):
        super().__init__(jobs.Classifying(overflow), model, load_options)


class Ranker(_TableActor):
    """Rank continuations of the prompts of a table.

    A row has a "prompt", and may have a list of "choices", which replace `choices`. Unless `exact`,
    a space is put between prompt and choice. Added are "choices", the likeliest first, as
    `gpt-cli rank` writes them in JSON. For `by`, see `Engine.rank`.
    """

    _needed = ("prompt",)
    _added = jobs.Ranking().schema | ERROR

    def __init__(
        self,
        model: str,
        choices: Sequence[str] = (),
        *,
        by: "RankBy" = "total",
        exact: bool = False,
        load_options: Mapping[str, Any] | None = None,
    ):
        check_type("choices", choices, Sequence[str])
        super().__init__(jobs.Ranking(tuple(choices), by, exact), model, load_options)
