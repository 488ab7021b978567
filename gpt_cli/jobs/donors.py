"""Rows whose activations the edits of other rows take: `HOOK=row:ID`."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

from gpt_cli.errors import InputError
from gpt_cli.jobs.layout import InputRow

if TYPE_CHECKING:
    from gpt_cli.engine import Engine
    from gpt_cli.jobs.tasks import Task

_REFERENCE = "row:"


def with_donors(engine: "Engine", rows: Sequence[InputRow], task: "Task") -> "Engine":
    """Return an engine with the activations that edits of rows take from others of these rows.

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
                task.prepare(row := rows[number])
                edits = row.fields.get("edits") or ()
                values = engine.recorded(task.ids(engine, row), sorted(hooks[number]), edits)
                engine = engine.with_donors({str(row.id): values})
        order.done(*ready)
    return engine


def _references(engine: "Engine", row: InputRow) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the ids of the donors of a row, with the hook points that it takes from them."""
    from gpt_cli.gpt2.edits import Edit

    edits = row.fields.get("edits") or ()
    for text in [edits] if isinstance(edits, str) else edits:
        if isinstance(text, str) and _REFERENCE in text:
            try:
                edit = Edit.parse(text, engine.model.config)
            except InputError:
                continue
            if edit.row is not None:
                yield edit.row, [*edit.hooks]
