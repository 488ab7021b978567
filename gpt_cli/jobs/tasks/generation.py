"""Continue the prompts of rows."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from gpt_cli import records
from gpt_cli.errors import InputError, StuckError
from gpt_cli.jobs.layout import InputRow, Template
from gpt_cli.jobs.task import RecordTask, Rows, comparable
from gpt_cli.jobs.tasks.choices import spaced
from gpt_cli.options.arguments import check_type
from gpt_cli.options.declare import OptionError, check
from gpt_cli.options.edit import check_texts
from gpt_cli.options.request import CONSTRAINTS, SAMPLES, Options, Samples
from gpt_cli.records import Record, Schema

if TYPE_CHECKING:
    from gpt_cli.engine import Engine
    from gpt_cli.generation.generate import Completion


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
