"""The weights of a model by name, and the damaged ones among them."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt_cli.errors import CheckpointError, InputError, counted, did_you_mean
from gpt_cli.folder.config import expected_shapes, is_matrix, is_transposed
from gpt_cli.gpt2.hooks import NO_HOOK, Hook
from gpt_cli.gpt2.source import MODEL, is_modified
from gpt_cli.ops import Array, Matrix, Ops

_log = logging.getLogger(__name__)


class NotFiniteError(CheckpointError):
    """Logits are not finite; `rows` are their indices."""

    rows: Sequence[int] = ()


class EditOverflowError(NotFiniteError, InputError):
    """Logits are not finite in a pass with edits."""

    exit_code = InputError.exit_code


def leaves(part: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the arrays, matrices and numbers of a part of a model, with their names."""
    if is_dataclass(part) or isinstance(part, tuple):
        items = enumerate(part) if isinstance(part, tuple) else vars(part).items()
        for key, value in items:
            yield from leaves(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, part


def named_weights(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the arrays and packed matrices of a model by their names in the checkpoint."""
    for name, leaf in leaves(model):
        if hasattr(leaf, "is_finite") or hasattr(leaf, "shape"):  # a packed matrix, or an array
            yield f"{name}.weight" if name in ("wte", "wpe") else name, leaf


def untied_weights(model: Any) -> dict[str, Any]:
    """Return the arrays and packed matrices of a model by name, without a tied head."""
    weights = dict(named_weights(model))
    if weights["lm_head.weight"] is weights["wte.weight"]:
        del weights["lm_head.weight"]
    return weights


def columns_of(ops: Ops, matrix: Matrix, n_in: int, indices: Sequence[int]) -> Array:
    """Return columns of a matrix (n_in, n_out) on the host, in float32: (indices, n_in)."""
    # They are read as embeddings of tokens. That of the position, -0.0, changes no bit.
    ids = ops.xp.asarray([indices])
    positions = ops.xp.zeros((1, 1), int)
    zero = ops.xp.full((1, n_in), -0.0, np.float32)
    return ops.to_host(ops.embed(matrix, zero, ids, positions))[0]


class Weights(Mapping[str, NDArray[np.float32]]):
    """The weights of a model by their names in the checkpoint, as copies on the host.

    They are float32 in the checkpoint's layout, with the values that the model computes with. A
    tied head is not among them. KeyError for another name.
    """

    def __init__(self, model: Any):
        self._ops = model.ops
        self._weights = untied_weights(model)
        self._shapes = dict(expected_shapes(model.config, head=True))

    def __getitem__(self, name: str, /) -> NDArray[np.float32]:
        if name not in self._weights:
            raise KeyError(f"{name}{did_you_mean(str(name), self._weights)}")
        weight = self._weights[name]
        shape = self._shapes[name]
        if not is_matrix(name, shape):
            return np.array(self._ops.to_host(weight), np.float32)
        transposed = is_transposed(name)
        n_out, n_in = shape if transposed else shape[::-1]
        columns = columns_of(self._ops, weight, n_in, range(n_out))
        return np.array(columns if transposed else columns.T, order="C")

    def __repr__(self) -> str:
        """Return the number of weights, rather than gigabytes of values."""
        return f"<{counted(len(self), 'weight')}: {', '.join([*self][:3])}, ...>"

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def damaged_weight(model: Any) -> str | None:
    """Return the name of the first weight of a model that has an infinity or a NaN."""
    isfinite = model.ops.xp.isfinite
    for name, weight in named_weights(model):
        is_packed = hasattr(weight, "is_finite")
        if not (weight.is_finite() if is_packed else isfinite(weight).all()):
            return name
    return None


def check_finite(model: Any, logits: Array, hook: Hook = NO_HOOK) -> None:
    """Raise NotFiniteError if logits (..., V) are not finite; the log names a damaged weight.

    Raise EditOverflowError if no weight is damaged, and the hook of the pass changes values.
    """
    if np.isfinite(float(logits.max() - logits.min())):
        return
    damaged = damaged_weight(model)
    _log.info("not finite: %s", damaged or "no weight, only the results")
    kind = NotFiniteError
    cure = (
        "if dtype float32 does not help, its weights are damaged (-v names one): "
        "get the model again"
    )
    if damaged and model.ops.dtype == "float16":
        cure = f"float16 holds numbers up to 65504, so choose dtype bfloat16; {cure}"
    if is_modified():
        cure = f"undo the changes in {MODEL}"
    elif hook.changes_values and not damaged:
        kind = EditOverflowError
        cure = "edits make values overflow: give smaller numbers"
    error = kind(f"the model's results are not finite: {cure}")
    finite = model.ops.xp.isfinite(logits).all(-1)
    error.rows = np.flatnonzero(~model.ops.to_host(finite)).tolist()
    raise error
