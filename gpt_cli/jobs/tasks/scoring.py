"""Compute the likelihoods of the texts of rows."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from gpt_cli import records
from gpt_cli.errors import InputError
from gpt_cli.jobs import storage
from gpt_cli.jobs.layout import InputRow, Layout, Template
from gpt_cli.jobs.task import Rows, TextTask
from gpt_cli.records import Record, Schema

if TYPE_CHECKING:
    from gpt_cli.engine import Engine
    from gpt_cli.scoring.score import Score, ScoreOptions


@dataclass(frozen=True)
class Scoring(TextTask):
    """Compute the likelihoods of texts: see `Engine.score_many`."""

    stride: int | None = None
    logprobs: bool = False
    words: bool = False
    bos: bool = False
    template: Template | None = None
    details: bool = True  # ranks, gaps and entropies with log-probabilities
    every_line: bool = False
    layers: bool = False
    min_k: float | None = None
    whole_files: bool = False  # files of lines are rows, whose errors have their names
    eos: bool = False
    special: bool = False  # of rows without a field "special"
    context: str = ""  # of rows without a field "context" or "prompt"

    fields = ("text", "edits", "special", "context", "prompt", "words")

    @cached_property
    def layout(self) -> Layout:
        """The fields of rows and records; the input of a template may have any other fields."""
        fields = TextTask.fields if self.template else self.fields
        return Layout(
            fields,
            self.template,
            self.schema,
            every_line=self.every_line,
            passes_rows=self.passes_rows,
            whole_files=self.whole_files,
            joins_words=True,
            takes_template=not self.passes_rows,
            keep_fields=self.keep_fields,
        )

    @property
    def schema(self) -> Schema:
        schema = dict(records.SCORE)
        layers = records.LAYERS if self.layers else {}
        if self.min_k is not None:
            schema.update(records.MIN_K)
        if self.logprobs:
            schema["logprobs"] = [records.SCORED_TOKEN | layers]
        if self.words:
            schema["words"] = [records.WORD | layers]
        return schema

    @property
    def settings(self) -> dict[str, Any]:
        names = (
            "stride",
            "logprobs",
            "words",
            "bos",
            "template",
            "layers",
            "min_k",
            "eos",
            "special",
            "context",
            "keep_fields",
        )
        return {name: value for name, value in super().settings.items() if name in names}

    def results(self, engine: "Engine", rows: Rows) -> "list[Score | InputError]":
        results = engine.score_many(self.texts(rows), **self.options)
        if not self.whole_files:
            return results
        before = bool(engine.loaded.start_ids(bos=self.bos) or self.context)
        return [
            self._of_file(row, result, has_start=before) if row.line is None else result
            for row, result in zip(rows, results, strict=True)
        ]

    def _of_file(
        self, row: InputRow, result: "Score | InputError", *, has_start: bool
    ) -> "Score | InputError":
        """Return the result of a whole file, or an error with its name."""
        from gpt_cli.scoring.score import too_short  # brings NumPy

        if not isinstance(result, InputError):
            if result.tokens_scored:
                return result
            result = too_short(has_start=has_start and not result.ids)
        return InputError(f"{storage.label(row.file or '')}: {result}")

    @property
    def options(self) -> "ScoreOptions":
        """The keywords of `Engine.score_many`."""
        details = self.logprobs and self.details
        return {
            "stride": self.stride,
            "bos": self.bos,
            "eos": self.eos,
            "special": self.special,
            "context": self.context,
            "ranks": details,
            "gaps": details,
            "entropies": details or self.min_k is not None,
            "words": self.words,
            "layers": self.layers,
        }

    def record(self, engine: "Engine", row: InputRow, result: "Score") -> Record:
        return records.of_score(engine, result, logprobs=self.logprobs, min_k=self.min_k)

    def tokens(self, record: Record) -> int:
        return int(record["tokens_scored"])
