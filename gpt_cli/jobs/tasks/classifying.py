"""Find the labels of the texts of rows."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gpt_cli import records
from gpt_cli.errors import InputError
from gpt_cli.jobs.layout import InputRow, Template
from gpt_cli.jobs.task import Rows, TextTask
from gpt_cli.records import Record, Schema

if TYPE_CHECKING:
    from gpt_cli.engine import Engine
    from gpt_cli.scoring.classify import Classification, LongTexts


@dataclass(frozen=True)
class Classifying(TextTask):
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
