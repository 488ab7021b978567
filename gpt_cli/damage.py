"""Detect damaged weights in computed results, and find the weight."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, ParamSpec

import numpy as np

from gpt_cli.errors import CheckpointError
from gpt_cli.model import GPT2, MLP, Attention, Block
from gpt_cli.ops import Array, LayerNorm, Linear

P = ParamSpec("P")

_log = logging.getLogger(__name__)


def checked(compute: Callable[P, Array], *args: P.args, **kwargs: P.kwargs) -> Array:
    """Call a function of `model.py`, and check that its result is finite.

    Raises:
        CheckpointError: the result has an infinity or a NaN, so the weights are damaged. The log
            names the first damaged weight.
    """
    with np.errstate(all="ignore"):  # the error below replaces NumPy's warnings
        result = compute(*args, **kwargs)
    if not np.isfinite(float(result.max() - result.min())):
        for model in (argument for argument in args if isinstance(argument, GPT2)):
            _log.info("not finite: %s", damaged_weight(model) or "no weight, only the results")
        raise CheckpointError(
            "the model's results are not finite: its weights are damaged (-v names them; get the "
            "model again) or, with a dtype other than float32, out of the range of float16"
        )
    return result


def damaged_weight(model: GPT2) -> str | None:
    """Return the name of the first weight that holds an infinity or a NaN."""
    for name, weight in _weights(model, ""):
        if hasattr(weight, "is_finite"):  # a matrix in a layout of its own
            if not weight.is_finite():
                return name
            continue
        arrays = vars(weight).values() if is_dataclass(weight) else [weight]  # as it is placed
        for array in arrays:
            floating = getattr(getattr(array, "dtype", None), "kind", "") == "f"
            if floating and not model.ops.xp.isfinite(array).all():
                return name
    return None


def _weights(part: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the weights of a part of the model, by their names in the checkpoint."""
    if isinstance(part, GPT2 | Block | Attention | MLP | Linear | LayerNorm):
        for field in fields(part):
            yield from _weights(getattr(part, field.name), f"{name}.{field.name}")
    elif isinstance(part, tuple):
        for place, block in enumerate(part):
            yield from _weights(block, f"{name}.{place}")
    else:
        yield name.removeprefix("."), part
