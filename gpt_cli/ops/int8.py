"""Int8 weights: what they stand for, and how they are made.

The n_in weights behind one number of a product are cut into blocks of BLOCK; the last may be
shorter. Each weight is an int8 times the scale of its block, which is as large as it must be for
the largest weight of the block: one large weight makes those of its block coarse, and no others.
"""

from dataclasses import dataclass

import numpy as np

from gpt_cli.ops import Array, Rows

# Both are in the C code, too: native/kernels.h and `round_row` in native/kernels.c.
BLOCK = 64  # and in files
LARGEST = 127  # of an int8 whose negative is one, too


@dataclass(frozen=True, eq=False)
class Int8Rows:
    """A matrix in int8 with its scales; as `Rows`, the float32 numbers that it stands for.

    Like the arguments of `Ops.place_matrix`: weight (n_in, n_out) with scale (blocks, n_out), or,
    transposed, weight (n_out, n_in) with scale (n_out, blocks).

    Attributes:
        weight: int8, from -LARGEST to LARGEST.
        scale: float32, with the precision of bfloat16 (`quantize` makes no other).
        transposed: which of the two.
    """

    weight: Rows
    scale: Rows
    transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """How many there are along each axis."""
        return self.weight.shape

    def parts(self, rows: slice) -> tuple[Array, Array]:
        """Return some rows of the weights, and the scales of their blocks."""
        start, stop, _ = rows.indices(self.shape[0])
        if self.transposed:
            return self.weight[start:stop], self.scale[start:stop]
        return self.weight[start:stop], self.scale[start // BLOCK : -(-stop // BLOCK)]

    def __getitem__(self, rows: slice, /) -> Array:
        """Return some rows in float32."""
        weight, scale = self.parts(rows)
        with np.errstate(invalid="ignore"):  # of a damaged scale the product tells
            if self.transposed:
                block = np.arange(weight.shape[1]) // BLOCK
                return weight * scale[:, block]
            start = rows.indices(self.shape[0])[0]
            block = np.arange(start, start + len(weight)) // BLOCK - start // BLOCK
            return weight * scale[block]


def quantize(rows: Rows, *, transposed: bool = False) -> Int8Rows:
    """Round a float32 matrix to int8, (n_in, n_out), or (n_out, n_in) where it is `transposed`.

    The scale of a block is NaN if any of its weights is NaN or infinite.
    """
    n_rows, length = rows.shape
    weight = np.empty((n_rows, length), np.int8)
    blocks = [(-(-n_rows // BLOCK)), length] if not transposed else [n_rows, -(-length // BLOCK)]
    scale = np.empty(blocks, np.float32)
    made = Int8Rows(weight, scale, transposed)
    for start in range(0, n_rows, BLOCK):
        part = slice(start, start + BLOCK)
        _quantize(rows[part], *made.parts(part), transposed)
    return made


def _quantize(matrix: Array, weight: Array, scale: Array, transposed: bool) -> None:
    """Fill `weight` and `scale`, of BLOCK rows at most."""
    if transposed:
        starts = np.arange(0, matrix.shape[1], BLOCK)
        largest = np.maximum.reduceat(np.abs(matrix), starts, axis=1)
    else:
        largest = np.abs(matrix).max(axis=0, keepdims=True)
    with np.errstate(invalid="ignore"):  # of damaged weights the scale tells
        scale[:] = _to_bfloat16(largest / np.float32(LARGEST))
        every = scale.repeat(BLOCK, axis=1)[:, : matrix.shape[1]] if transposed else scale
        steps = matrix / np.maximum(every, np.finfo(np.float32).tiny)
        weight[:] = np.rint(steps, out=steps)


def _to_bfloat16(scale: Array) -> Array:
    """Round positive float32 numbers up to the upper half of their bits: weights must fit."""
    bits: Array = scale.view(np.uint32)
    bits = (bits + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(scale), bits.view(np.float32), np.float32(np.nan))


# Activations are rounded to whole numbers, of which the largest in its row is this. They are
# 256 * high + low, both int8, so that products of int8 do for them.
LARGEST_ACTIVATION = 256 * LARGEST + LARGEST
SMALLEST = 1e-30  # of a row's largest number: rows below it become smaller still


def round_activations(x: Array) -> Array:
    """Return x (..., n_in) as products with int8 weights take it: each row in whole steps."""
    largest = np.abs(x).max(axis=-1, keepdims=True)
    per_step = np.float32(LARGEST_ACTIVATION) / np.maximum(largest, np.float32(SMALLEST))
    step = largest / np.float32(LARGEST_ACTIVATION)
    rounded: Array = np.floor(x * per_step + np.float32(0.5)) * step
    return rounded
