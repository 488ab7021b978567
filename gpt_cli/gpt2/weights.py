"""The walk over a model's weights."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any


def named_weights(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the arrays and packed matrices of a model by their names in the checkpoint."""
    for name, leaf in leaves(model):
        if hasattr(leaf, "is_finite") or hasattr(leaf, "shape"):  # a packed matrix, or an array
            yield f"{name}.weight" if name in ("wte", "wpe") else name, leaf


def leaves(part: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the arrays, matrices and numbers of a part of a model, with their names."""
    if is_dataclass(part):
        items = [(field.name, getattr(part, field.name)) for field in fields(part)]
    elif isinstance(part, tuple):
        items = [(str(index), value) for index, value in enumerate(part)]
    else:
        yield name, part
        return
    for key, value in items:
        yield from leaves(value, f"{name}.{key}" if name else key)
