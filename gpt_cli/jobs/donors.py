"""Rows whose activations the edits of other rows take: `HOOK=row:ID`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

from gpt_cli.errors import InputError
from gpt_cli.jobs.layout import InputRow

if TYPE_CHECKING:
    from gpt_cli.engine import Engine


def with_donors(
    engine: "Engine",
    rows: Sequence[InputRow],
    prepare: Callable[[InputRow], InputRow],
    ids_of: Callable[["Engine", InputRow], list[int]],
) -> "Engine":
    """Return an engine with the activations that edits of rows take from others of these rows.

    `prepare` raises InputError for a row that cannot be computed; `ids_of` returns its ids.
    A row that cannot be computed, or that takes from itself in a circle, gives none: the edits that
    need it are errors of their rows.
    """
    numbers = {str(row.id): number for number, row in enumerate(rows) if row.id is not None}
    hooks: dict[int, set[str]] = {}  # by the number of the donor
    order: TopologicalSorter[int] = TopologicalSorter()
    for number, row in enumerate(rows):
        for id, names in _references(engine, row):
            if id in numbers:
                hooks.setdefault(numbers[id], set()).update(names)
                order.add(number, numbers[id])
    with suppress(CycleError):  # rows of a circle do not get ready
        order.prepare()
    while ready := order.get_ready():
        for number in hooks.keys() & {*ready}:
            with suppress(InputError):
                prepare(row := rows[number])
                ids, edits = ids_of(engine, row), row.fields.get("edits")
                values = engine.recorded(ids, sorted(hooks[number]), edits)
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
