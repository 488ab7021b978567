"""Rank choices as continuations of the prompts of rows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gpt_cli import records
from gpt_cli.errors import InputError
from gpt_cli.jobs.layout import InputRow, Template
from gpt_cli.jobs.task import RecordTask, Rows
from gpt_cli.jobs.tasks.choices import spaced
from gpt_cli.options.arguments import check_type
from gpt_cli.options.declare import OptionError
from gpt_cli.records import Record, Schema

if TYPE_CHECKING:
    from gpt_cli.engine import Engine
    from gpt_cli.scoring.rank import Choice, RankBy


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
