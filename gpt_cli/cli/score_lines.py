"""The lines of `gpt-cli score`: a task that keeps them, and a sink that writes them again."""

import sys
from collections.abc import Iterator, Sequence
from typing import ClassVar

from gpt_cli import jobs, records
from gpt_cli.cli.jobs import Lines
from gpt_cli.cli.score_format import HEADER, Form
from gpt_cli.cli.streams import on_terminal, write
from gpt_cli.engine import Engine
from gpt_cli.errors import InputError
from gpt_cli.records import Record, Schema
from gpt_cli.scoring.score import Score


class ScoredLines(jobs.Task):
    """Score each line; its record also has its bytes, as "data"."""

    fields = ("text",)
    schema: ClassVar[Schema] = records.SCORE
    every_line = True

    def __init__(self, form: Form):
        self._form = form

    def results(
        self, engine: Engine, rows: Sequence[jobs.InputRow]
    ) -> Iterator[Score | InputError]:
        """Yield the score of each line, or an error."""
        texts = [row.fields["text"] for row in rows]
        return iter(engine.score_many(texts, **self._form.options))

    def record(self, engine: Engine, row: jobs.InputRow, result: Score) -> Record:
        """Return the record of a score."""
        return records.of_score(engine, result, logprobs=self._form.tokens)

    def records(self, engine: Engine, rows: Sequence[jobs.InputRow]) -> Iterator[Record]:
        """Yield the record of each line."""
        for row, record in zip(rows, super().records(engine, rows), strict=True):
            yield record | {"data": row.data}

    def tokens(self, record: Record) -> int:
        """Return the number of tokens that are scored."""
        return int(record["tokens_scored"])


class LineSink(Lines):
    """Lines with their scores, or unchanged where the filter lets them pass."""

    totals = False
    failure = "{} of {} lines could not be scored"

    def __init__(self, form: Form, *, quiet: bool):
        super().__init__(quiet=quiet)
        self._form = form
        self._aligned = on_terminal(sys.stdout)

    def resume(self) -> jobs.Resumed:
        """Begin with a header on a terminal."""
        if self._aligned and self._form.plain and not self._form.filters:
            write(HEADER)
        return super().resume()

    def write(self, record: Record) -> None:
        """Write the output for a line; show an error."""
        data = record.pop("data")
        if "error" in record:
            self.complain(record)
        if self._form.passes(record):
            write(self._form.of_line(record, data, aligned=self._aligned))
