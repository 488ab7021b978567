"""Pass on the rows whose texts have a perplexity within bounds."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpt_cli import records
from gpt_cli.jobs.layout import KeepFields
from gpt_cli.jobs.task import Rows
from gpt_cli.jobs.tasks.scoring import Scoring
from gpt_cli.options.arguments import check_type
from gpt_cli.options.declare import ABOVE_0, OptionError, check
from gpt_cli.records import Record

if TYPE_CHECKING:
    from gpt_cli.engine import Engine


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
