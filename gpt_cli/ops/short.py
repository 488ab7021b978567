"""Weights in 16 bits, float16 or bfloat16: rounding and widening.

Rounding is to the nearest number, ties to the even one, as when a checkpoint is saved in the type.
"""

from dataclasses import dataclass

import numpy as np

from gpt_cli.ops.contract import Array, Rows

_QUIET = np.uint16(0x40)  # bit of a NaN in bfloat16: its other bits may all be in the lower half


def round_to(values: Array, dtype: str) -> Array:
    """Return the bits (uint16) of float32 values that are rounded to a 16-bit type.

    Values beyond the largest number of the type become infinite.
    """
    return _ROUNDED[dtype](np.ascontiguousarray(values, np.float32))


def _to_float16(values: Array) -> Array:
    with np.errstate(over="ignore"):  # infinities are detected in the results
        return values.astype(np.float16).view(np.uint16)


def _to_bfloat16(values: Array) -> Array:
    bits = values.view(np.uint32)
    # The upper half, plus 1 if the lower half is above 0x8000, or equal to it and the upper is odd.
    sums = bits >> 16
    sums &= 1
    sums += 0x7FFF
    sums += bits
    sums >>= 16
    upper = sums.astype(np.uint16)
    is_nan = np.isnan(values)
    if is_nan.any():  # the sum may be an infinity, or a number
        upper[is_nan] = (bits[is_nan] >> 16).astype(np.uint16) | _QUIET
    return upper


def widen(bits: Array, dtype: str) -> Array:
    """Return the float32 values of bits (uint16) in a 16-bit type."""
    return _WIDENED[dtype](bits)


def _of_float16(bits: Array) -> Array:
    return bits.view(np.float16).astype(np.float32)


def _of_bfloat16(bits: Array) -> Array:
    return np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)


_ROUNDED = {"float16": _to_float16, "bfloat16": _to_bfloat16}
_WIDENED = {"float16": _of_float16, "bfloat16": _of_bfloat16}


@dataclass(frozen=True, eq=False)
class RoundedRows:
    """Rows that are rounded to a 16-bit type when they are read; as `Rows`, they are float32."""

    rows: Rows
    dtype: str  # float16 or bfloat16

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the lengths of the axes."""
        return self.rows.shape

    def bits(self, part: slice) -> Array:
        """Return a range of rows in the 16-bit type, as uint16."""
        return round_to(self.rows[part], self.dtype)

    def __getitem__(self, part: slice, /) -> Array:
        """Return a range of rows, widened to float32."""
        return widen(self.bits(part), self.dtype)
