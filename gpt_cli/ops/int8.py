"""Int8 weights: their format and quantization.

The n_in weights of one output are cut into groups of GROUP; the last may be shorter. A weight is an
int8 times the scale of its group. The largest weight of the group determines the scale, so an
outlier costs precision in that group only.
"""

from dataclasses import dataclass

import numpy as np

from gpt_cli.errors import CheckpointError
from gpt_cli.folder.dtypes import GROUP
from gpt_cli.ops.contract import Array, Rows

LARGEST = 127  # -128 is not used, so that every weight can be negated


def invalid(name: str) -> CheckpointError:
    """Return the error about int8 weights that `gpt-cli quantize` does not write."""
    return CheckpointError(
        f"{name}: int8 weights must be from -127 to 127, with scales that bfloat16 can hold: "
        "make the folder again with `gpt-cli quantize`"
    )


@dataclass(frozen=True, eq=False)
class Int8Rows:
    """A matrix in int8 with its scales; as `Rows`, it is the dequantized float32 matrix.

    Weight (n_in, n_out) with scale (groups, n_out), or, transposed, weight (n_out, n_in) with scale
    (n_out, groups).
    """

    weight: Rows  # int8, from -LARGEST to LARGEST
    scale: Rows  # float32 values that bfloat16 can hold
    transposed: bool  # whether the rows are outputs, as in `Ops.place_matrix`

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the lengths of the axes."""
        return self.weight.shape

    def parts(self, rows: slice) -> tuple[Array, Array]:
        """Return a range of rows of the weights, with the scales of their groups."""
        start, stop, _ = rows.indices(self.shape[0])
        groups = slice(start, stop) if self.transposed else slice(start // GROUP, -(-stop // GROUP))
        return self.weight[start:stop], self.scale[groups]

    def __getitem__(self, rows: slice, /) -> Array:
        """Return a range of rows, dequantized to float32."""
        weight, scale = self.parts(rows)
        with np.errstate(invalid="ignore"):  # a damaged scale is detected in the result
            if self.transposed:
                return weight * scale.repeat(GROUP, axis=1)[:, : weight.shape[1]]
            skipped = rows.indices(self.shape[0])[0] % GROUP  # rows of the first group
            return weight * scale.repeat(GROUP, axis=0)[skipped : skipped + len(weight)]


def scales_shape(n_rows: int, length: int, transposed: bool) -> tuple[int, int]:
    """Return the shape of the scales of rows of weights."""
    return (n_rows, -(-length // GROUP)) if transposed else (-(-n_rows // GROUP), length)


def quantize(rows: Rows, *, transposed: bool = False) -> Int8Rows:
    """Quantize a float32 matrix (n_in, n_out), or (n_out, n_in) if `transposed`.

    The scale of a group is NaN if one of its weights is NaN or infinite.
    """
    n_rows, length = rows.shape
    shape = scales_shape(n_rows, length, transposed)
    quantized = Int8Rows(
        np.empty((n_rows, length), np.int8), np.empty(shape, np.float32), transposed
    )
    for start in range(0, n_rows, GROUP):
        part = slice(start, start + GROUP)
        matrix = rows[part]
        weight, scale = quantized.parts(part)
        if transposed:
            largest = np.maximum.reduceat(np.abs(matrix), range(0, length, GROUP), axis=1)
        else:
            largest = np.abs(matrix).max(axis=0, keepdims=True)
        with np.errstate(invalid="ignore"):  # damaged weights give a NaN scale
            scale[:] = _to_bfloat16(largest / np.float32(LARGEST))
            scales = scale.repeat(GROUP, axis=1)[:, :length] if transposed else scale
            steps = matrix / np.maximum(scales, np.finfo(np.float32).tiny)
            weight[:] = np.rint(steps, out=steps)
    return quantized


def _to_bfloat16(scale: Array) -> Array:
    """Round positive float32 numbers up to bfloat16, so that no weight exceeds LARGEST."""
    bits = (scale.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(scale), bits.view(np.float32), np.float32(np.nan))


# Activations are rounded to integers; the largest of a row becomes this one. An integer is
# 256 * high + low, both int8, so that int8 dot products suffice.
LARGEST_ACTIVATION = 256 * LARGEST + LARGEST
SMALLEST = 1e-30  # a row's largest number is not below this, so that a division by it is finite


def round_activations(x: Array) -> Array:
    """Round rows of x (..., n_in) to multiples of their steps, as products with int8 weights do."""
    largest = np.abs(x).max(axis=-1, keepdims=True)
    per_step = np.float32(LARGEST_ACTIVATION) / np.maximum(largest, np.float32(SMALLEST))
    step = largest / np.float32(LARGEST_ACTIVATION)
    return np.floor(x * per_step + np.float32(0.5)) * step
