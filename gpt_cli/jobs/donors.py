"""Rows whose activations the edits of other rows take: `HOOK=row:ID`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from gpt_cli.errors import InputError
from gpt_cli.jobs.layout import InputRow

if TYPE_CHECKING:
    from gpt_cli.engine import Engine

_REFERENCE = "row:"


def with_donors(
    engine: "Engine",
    rows: Sequence[InputRow],
    prepare: Callable[[InputRow], InputRow],
    ids_of: Callable[["Engine", InputRow], list[int]],
) -> "Engine":
    """Return an engine with the activations that edits of rows take from others of these rows.

    A row that cannot be computed, or that takes from itself in a circle, gives none: the edits that
    need it are errors of their rows.
    """
    hooks: dict[str, set[str]] = {}  # by the id of the donor
    for row in rows:
        for donor, names in _references(engine, row):
            hooks.setdefault(donor, set()).update(names)
    if not hooks:
        return engine
    by_id = {str(row.id): row for row in rows}
    tried: set[str] = set()

    def compute(donor: str) -> None:
        nonlocal engine
        if donor in tried or donor not in by_id:
            return
        tried.add(donor)
        for other, _ in _references(engine, by_id[donor]):
            compute(other)
        with suppress(InputError):
            row = prepare(by_id[donor])
            edits = row.fields.get("edits") or ()
            values = engine.recorded(ids_of(engine, row), sorted(hooks[donor]), edits)
            engine = engine.with_donors({donor: values})

    for donor in hooks:
        compute(donor)
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
