"""Detect damaged weights in the logits, and find the damaged weight."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from gpt_cli.errors import CheckpointError
from gpt_cli.ops import Array

_log = logging.getLogger(__name__)


class NotFiniteError(CheckpointError):
    """Logits are not finite; `rows` are their indices."""

    rows: Sequence[int] = ()


def check_finite(model: Any, logits: Array) -> None:
    """Raise NotFiniteError if logits (..., V) are not finite; the log names a damaged weight."""
    if not np.isfinite(float(logits.max() - logits.min())):
        _log.info("not finite: %s", damaged_weight(model) or "no weight, only the results")
        error = NotFiniteError(
            "the model's results are not finite: if --dtype float32 does not help, its weights "
            "are damaged (-v names one): get the model again"
        )
        ops = model.ops
        error.rows = np.flatnonzero(~ops.to_host(ops.xp.isfinite(logits).all(-1))).tolist()
        raise error


def damaged_weight(model: Any) -> str | None:
    """Return the name of the first weight of a model that has an infinity or a NaN."""
    isfinite = model.ops.xp.isfinite
    for name, weight in _weights(model, ""):
        if not (weight.is_finite() if hasattr(weight, "is_finite") else isfinite(weight).all()):
            return name
    return None


def _weights(part: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the weights of a part of the model, by their names in the checkpoint."""
    if isinstance(part, tuple):
        for place, block in enumerate(part):
            yield from _weights(block, f"{name}.{place}")
    elif hasattr(part, "is_finite") or hasattr(part, "shape"):  # a packed matrix, or an array
        yield name.removeprefix("."), part
    elif is_dataclass(part):
        for field in fields(part):
            yield from _weights(getattr(part, field.name), f"{name}.{field.name}")
