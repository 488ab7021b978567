"""The tasks: to continue, score, rank or classify the texts of rows, or to compute activations."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from gpt_cli import records
from gpt_cli.errors import InputError, StuckError
from gpt_cli.jobs import storage
from gpt_cli.jobs.layout import InputRow, KeepFields, Layout, Template
from gpt_cli.jobs.task import Rows, Task, comparable
from gpt_cli.options.arguments import check_type
from gpt_cli.options.declare import ABOVE_0, OptionError, check
from gpt_cli.options.edit import check_texts
from gpt_cli.options.request import CONSTRAINTS, SAMPLES, Options, Samples
from gpt_cli.records import Record, Schema

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gpt_cli.engine import Engine
    from gpt_cli.generation.generate import Completion
    from gpt_cli.scoring.activations import Pool, TextActivations
    from gpt_cli.scoring.classify import Classification, LongTexts
    from gpt_cli.scoring.rank import Choice, RankBy
    from gpt_cli.scoring.score import Score, ScoreOptions

OutDtype: TypeAlias = Literal["float32", "float16"]

_UNPOOLED_TOGETHER = 64  # a worker of Ray returns the values of all their tokens at once


@dataclass(frozen=True)
class RecordTask(Task):
    """A task for rows whose records have fields of them: see `Task.keep_fields`."""

    keep_fields: KeepFields | None = field(default="all", kw_only=True)


@dataclass(frozen=True)
class Generation(RecordTask):
    """Continue prompts; the text of a row depends on its index and options, not on other rows."""

    options: Options  # the defaults of rows
    batch_size: int | None = None
    logprobs: bool = False
    template: Template | None = None
    samples: int = 1  # texts of a row without a field "n"

    fields = ("prompt", "n", *Options.row_fields())

    def __post_init__(self) -> None:
        check_type("options", self.options, Options)
        check_texts(self.options.edits)
        check("samples", self.samples, SAMPLES)

    @property
    def schema(self) -> Schema:
        schema = records.SAMPLE | records.COMPLETION | records.HYPOTHESIS
        if self.logprobs:
            schema["logprobs"] = [records.TOKEN | {"top": [records.TOKEN]}]
        return schema

    @property
    def rows_together(self) -> int:
        from gpt_cli.generation.generate import read_ahead  # brings NumPy

        return max(super().rows_together, read_ahead(self.batch_size))

    @property
    def settings(self) -> dict[str, Any]:
        template = asdict(self.template) if self.template else None
        settings = asdict(self.options) | {"logprobs": self.logprobs, "template": template}
        settings["keep_fields"] = self.keep_fields
        if self.samples > 1:  # outputs of version 1.0 do not have it
            settings["samples"] = self.samples
        return comparable(settings)

    def with_seed(self, seed: int | None) -> "Generation":
        return replace(self, options=self.options.with_seed(seed))

    def prepare(self, row: InputRow) -> InputRow:
        """Return the row with its prompt and options, and its choices as they follow the prompt."""
        row = super().prepare(row)
        prompt = self.layout.text(row)
        names = self.layout.options  # a row may have any other fields
        options = {name: value for name, value in row.fields.items() if name in names}
        choices = options.get("choices")
        if all(options.get(name) is None for name in CONSTRAINTS):  # then the default applies
            choices = self.options.choices or None
        if choices is not None and isinstance(prompt, str):
            options["choices"] = list(spaced(prompt, choices))
        row = replace(row, fields=options | {"prompt": prompt})
        self._check_samples(row)
        return row

    def _check_samples(self, row: InputRow) -> None:
        """Raise OptionError if a row cannot have as many samples."""
        samples = self._samples(row)
        beams = self._beams(row)
        if isinstance(beams, int) and samples > beams:
            name = "samples" if row.fields.get("n") is None else "n"
            raise OptionError(name, f"must be at most beams, which is {beams}")

    def _beams(self, row: InputRow) -> Any:
        """Return the beams of a row, which may be no number; None if it is no search."""
        beams = row.fields.get("beams")
        return self.options.beams if beams is None else beams

    def _samples(self, row: InputRow) -> int:
        """Return the number of texts of a row; raise OptionError if its "n" is not valid."""
        n = row.fields.get("n")
        return self.samples if n is None else Samples.parse_json({"n": n})["n"]

    def results(self, engine: "Engine", rows: Rows) -> "Iterator[list[Completion] | InputError]":
        """Yield the samples of each row; the best ones of a search come from one text."""
        from gpt_cli.generation.row import SAMPLE  # brings NumPy

        fields = []
        indices = []
        counts = []
        for row in rows:
            options = {name: value for name, value in row.fields.items() if name != "n"}
            counts.append(self._samples(row) if self._beams(row) is None else 1)
            fields += [options] * counts[-1]
            indices += [row.index + sample * SAMPLE for sample in range(counts[-1])]
        completed = engine.batch(fields, self.options, batch_size=self.batch_size, indices=indices)
        for row, count in zip(rows, counts, strict=True):
            samples: list[Completion] = []
            error = None
            for result in islice(completed, count):
                if isinstance(result, InputError):
                    error = result
                else:
                    samples += [result, *result.others]
            yield error or samples[: self._samples(row)]

    def record(self, engine: "Engine", row: InputRow, result: "Completion") -> Record:
        if result.finish_reason == "stuck":
            end = json.dumps(result.text[-40:], ensure_ascii=False)
            raise StuckError(f"no token can follow {end}: {records.STUCK}")
        return records.of_completion(engine, result, logprobs=self.logprobs)

    def contents(self, engine: "Engine", row: InputRow, result: "list[Completion]") -> list[Record]:
        if self.samples == 1 and row.fields.get("n") is None:
            return super().contents(engine, row, *result)
        contents = []
        for sample, completion in enumerate(result):
            content: Record = {"sample": sample, "samples": len(result)}
            try:
                content |= self.record(engine, row, completion)
            except InputError as error:
                content |= records.of_error(error)
            contents.append(content)
        return contents

    def tokens(self, record: Record) -> int:
        return int(record["usage"]["completion_tokens"])


class _OfTexts(RecordTask):
    """A task for texts with optional edits."""

    fields: tuple[str, ...] = ("text", "edits", "special")

    def texts(self, rows: Rows) -> list[dict[str, Any]]:
        """Return rows with their texts and their fields, as an engine takes them."""
        names = self.layout.options
        return [
            {"text": self.layout.text(row)} | {name: row.fields.get(name) for name in names}
            for row in rows
        ]


@dataclass(frozen=True)
class Scoring(_OfTexts):
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
        fields = _OfTexts.fields if self.template else self.fields
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


@dataclass(frozen=True, kw_only=True)
class Filtering(Scoring):
    """Score texts, and pass on the rows with a perplexity within bounds, as they are.

    The record of a row that passes has its bytes as "data"; an output has only these.
    """

    max_perplexity: float | None = None
    min_perplexity: float | None = None
    every_line: bool = True
    keep_fields: KeepFields | None = field(default=None, kw_only=True)

    passes_rows = True

    def __post_init__(self) -> None:
        bounds = {name: getattr(self, name) for name in ("max_perplexity", "min_perplexity")}
        for name, bound in bounds.items():
            if bound is not None:
                check_type(name, bound, float | int)
                check(name, bound, ABOVE_0)
        if set(bounds.values()) == {None}:
            raise OptionError("max_perplexity", "or min_perplexity must be set")
        if (self.min_perplexity or 0) > (self.max_perplexity or math.inf):
            raise OptionError("min_perplexity", "is above the maximum: no row could pass")

    @property
    def settings(self) -> dict[str, Any]:
        bounds = {"max_perplexity": self.max_perplexity, "min_perplexity": self.min_perplexity}
        return super().settings | bounds

    def records(self, engine: "Engine", rows: Rows, first: int = 0) -> Iterator[list[Record]]:
        """Yield the record of each row; only one that passes has the "data" of its row."""
        for of_row in super().records(engine, rows, first):
            for record in of_row:
                if not self._passes(record):
                    record.pop("data", None)
            yield of_row

    def _passes(self, record: Record) -> bool:
        """Return whether a row passes: one that failed, or has no perplexity, does not."""
        perplexity = math.nan if "error" in record else records.perplexity_of(record)
        return (self.min_perplexity or 0) <= perplexity <= (self.max_perplexity or math.inf)


@dataclass(frozen=True)
class Activations(_OfTexts):
    """Compute `Engine.activations` of texts; they are the arrays of a record."""

    hooks: tuple[str, ...]
    pool: "Pool | None" = None
    bos: bool = False
    template: Template | None = None
    out_dtype: OutDtype = "float32"
    special: bool = False  # of rows without a field "special"

    has_lines = True

    def __post_init__(self) -> None:
        check_type("hooks", self.hooks, Sequence[str])

    @property
    def schema(self) -> Schema:
        schema = {"tokens": "int64"}
        # A template may have a {text}, which is then one of its fields.
        if self.template and "text" not in self.template.names:
            schema["text"] = "string"
        return schema

    @property
    def reserved(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names of arrays, among them all hook points, and "arrays" itself."""
        items = {None: ("position", "token"), "word": ("word", "start", "end")}
        return "arrays", *items.get(self.pool, ()), "hook_*", "blocks.*", "ln_final.*"

    @property
    def endings(self) -> tuple[str, ...]:
        return (".safetensors", ".npz", ".parquet") if self.pool else (".safetensors", ".npz")

    @property
    def rows_together(self) -> int:
        return super().rows_together if self.pool else _UNPOOLED_TOGETHER

    @property
    def settings(self) -> dict[str, Any]:
        settings = super().settings
        return {"hook": settings.pop("hooks")} | settings  # "hook" is its name in manifests

    def results(self, engine: "Engine", rows: Rows) -> "Iterator[TextActivations | InputError]":
        texts = self.texts(rows)
        return engine.activation_rows(
            texts, self.hooks, self.pool, bos=self.bos, special=self.special
        )

    def record(self, engine: "Engine", row: InputRow, result: "TextActivations") -> Record:
        """Return a result with its text: words begin and end there, not in a field of its row."""
        try:
            arrays = self._arrays(result)
        except FloatingPointError:
            raise InputError("a value is too large for float16: choose float32") from None
        return {"tokens": len(result.ids), "arrays": arrays, "text": self.layout.text(row)}

    def _arrays(self, result: "TextActivations") -> "dict[str, NDArray[Any]]":
        """Return the arrays of a record; raise FloatingPointError if a value overflows."""
        from numpy import errstate

        from gpt_cli.gpt2.hooks import has_key_axis

        arrays = result.word_columns if self.pool else result.token_columns
        with errstate(over="raise"):
            for name, value in result.values.items():
                value = value.swapaxes(0, 1) if has_key_axis(name) else value
                arrays[name] = value.astype(self.out_dtype)
        return arrays

    def tokens(self, record: Record) -> int:
        return int(record["tokens"])


@dataclass(frozen=True)
class Classifying(_OfTexts):
    """Find the labels of texts: see `Engine.classify`."""

    overflow: "LongTexts" = "error"
    template: Template | None = None
    special: bool = False  # of rows without a field "special"

    schema: ClassVar[Schema] = records.CLASSIFICATION

    def results(self, engine: "Engine", rows: Rows) -> "list[Classification | InputError]":
        return engine.classify(self.texts(rows), overflow=self.overflow, special=self.special)

    def record(self, engine: "Engine", row: InputRow, result: "Classification") -> Record:
        return records.of_classification(engine, result)

    def tokens(self, record: Record) -> int:
        return int(record["tokens"])


@dataclass(frozen=True)
class Ranking(RecordTask):
    """Rank continuations of prompts: see `Engine.rank`; a row may have other "choices"."""

    choices: tuple[str, ...] = ()
    by: "RankBy" = "total"
    exact: bool = False  # see `spaced`
    template: Template | None = None
    special: bool = False  # of rows without a field "special"
    calibrate: str | None = None
    token_logprobs: bool = False

    fields = ("prompt", "choices", "edits", "special")

    @property
    def schema(self) -> Schema:
        choice = dict(records.CHOICE)
        if self.calibrate is not None:
            choice |= records.NEUTRAL
        if self.token_logprobs:
            choice["logprobs"] = [records.TOKEN]
        return {"choices": [choice]}

    @property
    def settings(self) -> dict[str, Any]:
        settings = super().settings
        if self.calibrate is not None:
            settings["calibrate"] = [self.calibrate]  # an empty text is set, too
        return settings

    def __post_init__(self) -> None:
        check_type("choices", self.choices, Sequence[str])

    def check_lines(self) -> None:
        super().check_lines()
        if not self.choices:
            raise OptionError("choices", "must be given for plain lines, which have none")

    def prepare(self, row: InputRow) -> InputRow:
        """Return the row with its prompt, and its choices as they follow it."""
        row = super().prepare(row)
        texts = {"prompt": self.layout.text(row), "choices": list(self._spaced(row))}
        others = {name: row.fields.get(name) for name in ("edits", "special")}
        return replace(row, fields=texts | others)

    def _spaced(self, row: InputRow) -> dict[str, str]:
        """Return the choices of a row, or the default ones, as `spaced` does."""
        choices = row.fields.get("choices")
        if choices is None:
            choices = self.choices
            if not choices:
                raise InputError(
                    'a row needs a list of "choices": there are no default choices (--choices)'
                )
        return spaced(self.layout.text(row), choices, exact=self.exact)

    def results(self, engine: "Engine", rows: Rows) -> "list[list[Choice] | InputError]":
        questions = [row.fields for row in rows]
        return engine.rank_many(
            questions, by=self.by, calibrate=self.calibrate, special=self.special
        )

    def record(self, engine: "Engine", row: InputRow, result: "list[Choice]") -> Record:
        written = self._spaced(row)
        choices = records.of_ranking(engine, result, written, logprobs=self.token_logprobs)
        return {"choices": choices}

    def tokens(self, record: Record) -> int:
        return sum(choice["tokens"] for choice in record["choices"])


def spaced(prompt: str, choices: Sequence[str], *, exact: bool = False) -> dict[str, str]:
    """Return the written choices, by the texts that follow a prompt.

    Unless `exact`, spaces around a choice are removed, and one is put before it if the prompt does
    not end with white space. A choice that is empty, a duplicate or no string is an InputError.
    """
    is_list = isinstance(choices, list | tuple) and len(choices) > 0
    if not is_list or not all(isinstance(choice, str) for choice in choices):
        raise InputError(
            'the "choices" of a row must be a list of one or more strings, such as ["yes", "no"]'
        )
    space = "" if exact or not prompt or prompt[-1].isspace() else " "
    written: dict[str, str] = {}
    for choice in choices:
        if not exact:
            choice = choice.strip()
        if not choice:
            raise InputError("a choice is empty: remove it")
        text = space + choice
        if text in written:
            raise InputError(f"duplicate choice {choice!r:.40}: remove it")
        written[text] = choice
    return written
