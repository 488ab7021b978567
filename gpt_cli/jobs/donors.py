"""Rows whose activations the edits of other rows take: `HOOK=row:ID`."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any

from gpt_cli.errors import InputError
from gpt_cli.jobs.layout import InputRow

if TYPE_CHECKING:
    from gpt_cli.engine import Engine
    from gpt_cli.scoring.activations import Text


def with_donors(
    engine: "Engine", rows: Sequence[InputRow], text_of: Callable[["Engine", InputRow], "Text"]
) -> "Engine":
    """Return an engine with the activations that edits of rows take from others of these rows.

    `text_of` returns the ids and edits of a row, or raises InputError. This error, or that of a
    circle, is in place of the activations.
    """
    counts = Counter(str(row.id) for row in rows if row.id is not None)
    numbers = {str(row.id): n for n, row in enumerate(rows) if counts[str(row.id)] == 1}
    hooks: dict[int, set[str]] = {}  # by the number of the donor
    donors: dict[str, Any] = {}
    order: TopologicalSorter[int] = TopologicalSorter()
    for number, row in enumerate(rows):
        for id, names in _references(engine, row):
            if id in numbers:
                hooks.setdefault(numbers[id], set()).update(names)
                order.add(number, numbers[id])
                donors[id] = InputError("takes from a circle of rows")
    with suppress(CycleError):  # rows of a circle do not get ready
        order.prepare()
    engine = engine.with_donors(donors) if donors else engine
    while ready := order.get_ready():
        for number in hooks.keys() & {*ready}:
            row = rows[number]
            try:
                values: Any = engine.recorded(*text_of(engine, row), sorted(hooks[number]))
            except InputError as error:
                values = InputError(f"has an error: {error!s:.200}")
            engine = engine.with_donors({str(row.id): values})
        order.done(*ready)
    return engine


def _references(engine: "Engine", row: InputRow) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the ids of the donors of a row, with the hook points that it takes from them."""
    edits = row.fields.get("edits")
    if "row:" in str(edits):
        with suppress(InputError):  # an error of the row
            for edit in engine.loaded.row_edits(edits):
                if edit.row is not None:
                    yield edit.row, [*edit.hooks]
