"""From tensors on disk or in memory to a model on a device, and to one with other weights."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np

from gpt_cli.errors import InputError, did_you_mean
from gpt_cli.folder.config import GPT2Config, expected_shapes, is_matrix, is_transposed
from gpt_cli.folder.dtypes import SHORT
from gpt_cli.folder.tensors import Tensor
from gpt_cli.gpt2.model import GPT2, MLP, Attention, Block
from gpt_cli.gpt2.weights import Weights, untied_weights
from gpt_cli.ops import LayerNorm, Linear, Ops, Rows, get_ops
from gpt_cli.ops.short import RoundedRows

_COMPARED = 1024  # rows at a time


def assemble(config: GPT2Config, ops: Ops, tensors: Mapping[str, Rows]) -> GPT2:
    """Build a model from tensors on disk or in memory, which `ops` places on its device.

    A head that is stored although it is tied is used if it differs from wte, as in transformers.
    """
    with placing(config, ops, tensors) as wait:
        return build(config, ops, wait())


@contextmanager
def placing(
    config: GPT2Config, ops: Ops, tensors: Mapping[str, Rows]
) -> Iterator[Callable[[], dict[str, Any]]]:
    """Place the tensors of a model in the background.

    Yield a function that waits until all are placed and returns the weights for `build`. On exit,
    no more are placed.
    """
    tensors = without_tied_head(tensors, config)
    matrices = [name for name in tensors if is_matrix(name, tensors[name].shape)]
    # The largest first, so that the threads end at about the same time.
    matrices.sort(key=lambda name: -math.prod(tensors[name].shape))
    with ops.placing([_as_stored(name, tensors[name]) for name in matrices]) as wait:
        vectors = tensors.keys() - set(matrices)
        weights = {name: ops.xp.asarray(tensors[name][:]) for name in vectors}
        yield lambda: weights | dict(zip(matrices, wait(), strict=True))


def build(config: GPT2Config, ops: Ops, weights: Mapping[str, Any]) -> GPT2:
    """Build a model from weights on the device of `ops`, by their names in a checkpoint."""

    def linear(name: str) -> Linear:
        return Linear(weights[f"{name}.weight"], weights[f"{name}.bias"])

    def layer_norm(name: str) -> LayerNorm:
        return LayerNorm(
            weights[f"{name}.weight"], weights[f"{name}.bias"], config.layer_norm_epsilon
        )

    def block(layer: int) -> Block:
        h = f"h.{layer}"
        scale = 1 / math.sqrt(config.head_size) if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            scale /= layer + 1
        return Block(
            layer_norm(f"{h}.ln_1"),
            Attention(linear(f"{h}.attn.c_attn"), linear(f"{h}.attn.c_proj"), config.n_head, scale),
            layer_norm(f"{h}.ln_2"),
            MLP(linear(f"{h}.mlp.c_fc"), linear(f"{h}.mlp.c_proj"), config.activation_function),
        )

    return GPT2(
        config=config,
        ops=ops,
        wte=weights["wte.weight"],
        wpe=weights["wpe.weight"],
        h=tuple(block(layer) for layer in range(config.n_layer)),
        ln_f=layer_norm("ln_f"),
        lm_head=Linear(
            weights.get("lm_head.weight", weights["wte.weight"]), weights.get("lm_head.bias")
        ),
    )


def _placed(ops: Ops, name: str, tensor: Rows) -> Any:
    """Return a tensor on the device of `ops`, in the layout of its operations."""
    if is_matrix(name, tensor.shape):
        rows, transposed = _as_stored(name, tensor)
        return ops.place_matrix(rows, transposed=transposed)
    return ops.xp.asarray(tensor[:])


def _as_stored(name: str, rows: Rows) -> tuple[Rows, bool]:
    """Return a matrix whose rows are stored without gaps, and whether it is transposed."""
    if not _has_gaps(rows):
        return rows, is_transposed(name)
    swapped = _swapped(rows)
    if not _has_gaps(swapped):
        return swapped, not is_transposed(name)
    return without_gaps(rows), is_transposed(name)


def without_gaps(rows: Rows) -> Rows:
    """Read a view with strides as a whole: its rows would be read from everywhere."""
    if isinstance(rows, RoundedRows):
        return replace(rows, rows=without_gaps(rows.rows))
    return rows[:] if _has_gaps(rows) else rows


def _has_gaps(rows: Rows) -> bool:
    stored = _before_rounding(rows)
    return isinstance(stored, Tensor) and stored.strides is not None


def _swapped(rows: Rows) -> Rows:
    """Return a matrix in a file with its axes swapped."""
    if isinstance(rows, RoundedRows):
        return replace(rows, rows=_swapped(rows.rows))
    return cast("Tensor", rows).transposed()


def with_weights(model: GPT2, arrays: Mapping[str, Any]) -> GPT2:
    """Return a model with other weights, which shares all others; a tied head follows wte.

    `arrays` are by their names in a checkpoint, in its layout; they are copied. TypeError if they
    are not numbers, and InputError if a name or a shape is not the model's, or one is not finite.
    """
    if model.ops.one_type and model.ops.dtype in SHORT:
        model = _in_float32(model)  # else the new weights would be rounded
    weights = untied_weights(model)
    shapes = dict(expected_shapes(model.config, head=True))
    for name, values in arrays.items():
        if name not in shapes:
            raise InputError(f"the model has no weight {name}{did_you_mean(str(name), shapes)}")
        array = np.asarray(values)
        if array.dtype.kind not in "biuf":
            raise TypeError(f"the weight {name} must be an array of real numbers")
        if array.shape != shapes[name]:
            must = f"must have the shape {list(shapes[name])}, not {list(array.shape)}"
            raise InputError(f"the weight {name} {must}")
        with np.errstate(over="ignore"):
            array = np.array(array, np.float32)
        if not np.isfinite(array).all():
            raise InputError(f"the weight {name} is not finite in float32")
        weights[name] = _placed(model.ops, name, array)
    return build(model.config, model.ops, weights)


def _in_float32(model: GPT2) -> GPT2:
    """Return a model on a GPU with the same weights in float32."""
    ops = get_ops("cuda", "float32")
    weights = {name: _placed(ops, name, array) for name, array in Weights(model).items()}
    return build(model.config, ops, weights)


def without_tied_head(tensors: Mapping[str, Rows], config: GPT2Config) -> dict[str, Rows]:
    """Remove a head that is stored although it is tied and equal to wte."""
    without = dict(tensors)
    head = tensors.get("lm_head.weight")
    if head is not None and config.tie_word_embeddings and _are_equal(tensors["wte.weight"], head):
        del without["lm_head.weight"]
    return without


def _are_equal(rows: Rows, others: Rows) -> bool:
    """Return whether two matrices of the same shape have the same values."""
    stored = _before_rounding(rows)
    if isinstance(stored, Tensor) and stored == _before_rounding(others):
        return True  # two names of one place in a PyTorch file
    parts = [slice(start, start + _COMPARED) for start in range(0, rows.shape[0], _COMPARED)]
    return all(np.array_equal(rows[part], others[part]) for part in parts)


def _before_rounding(rows: Rows) -> Rows:
    return rows.rows if isinstance(rows, RoundedRows) else rows
