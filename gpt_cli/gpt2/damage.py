"""Detect damaged weights in the logits, and find the damaged weight."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from gpt_cli.errors import CheckpointError
from gpt_cli.gpt2.weights import named_weights
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
            "the model's results are not finite: if dtype float32 does not help, its weights "
            "are damaged (-v names one): get the model again"
        )
        ops = model.ops
        error.rows = np.flatnonzero(~ops.to_host(ops.xp.isfinite(logits).all(-1))).tolist()
        raise error


def damaged_weight(model: Any) -> str | None:
    """Return the name of the first weight of a model that has an infinity or a NaN."""
    isfinite = model.ops.xp.isfinite
    for name, weight in named_weights(model):
        if not (weight.is_finite() if hasattr(weight, "is_finite") else isfinite(weight).all()):
            return name
    return None
