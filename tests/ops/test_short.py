"""Rounding to 16 bits, against arithmetic in float64 and Python's own floats."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt_cli.ops.short import RoundedRows, round_to, widen
from support.native_arrays import NAN_AND_INF, array, seeds, sizes
from support.rounding import nearest

SHORT = ["float16", "bfloat16"]
EVERY = np.arange(2**16, dtype=np.uint16)


def assert_nearest(values, dtype):
    """Compare by bits, so that the sign of zero counts."""
    rounded = widen(round_to(values, dtype), dtype)
    assert np.array_equal(rounded.view(np.uint32), nearest(values, dtype).view(np.uint32))


@pytest.mark.parametrize("dtype", SHORT)
def test_every_16_bit_number_is_widened_exactly_and_rounded_to_itself(dtype):
    if dtype == "float16":
        expected = [value for (value,) in struct.iter_unpack("<e", EVERY.tobytes())]
    else:  # the upper half of a float32
        expected = [struct.unpack("<f", b"\0\0" + bits.tobytes())[0] for bits in EVERY]
    wide = widen(EVERY, dtype)
    assert np.array_equal(wide, np.float32(expected), equal_nan=True)
    numbers = ~np.isnan(wide)
    assert np.array_equal(np.signbit(wide[numbers]), (EVERY >> 15 == 1)[numbers])
    assert np.array_equal(round_to(wide, dtype)[numbers], EVERY[numbers])


@pytest.mark.parametrize(("dtype", "dropped"), [("float16", 13), ("bfloat16", 16)])
def test_numbers_at_and_beside_every_tie_are_rounded_to_the_nearest(dtype, dropped):
    # All float32 numbers, subnormal ones among them, whose last bits are one of these.
    half = 1 << (dropped - 1)
    for last in (0, 1, half - 1, half, half + 1, 2 * half - 1):
        bits = (np.arange(1 << (32 - dropped), dtype=np.uint32) << dropped) | np.uint32(last)
        values = bits.view(np.float32)
        assert_nearest(values[np.isfinite(values)], dtype)


@pytest.mark.parametrize("dtype", SHORT)
def test_numbers_beyond_the_largest_become_infinite_from_the_middle_on(dtype):
    largest = nearest(np.float32([65504 if dtype == "float16" else 3.38953139e38]), dtype)
    halfway = np.float32(65520 if dtype == "float16" else 2.0**128 - 2.0**119)
    below = np.nextafter(halfway, np.float32(0))
    rounded = widen(round_to(np.float32([below, halfway, -below, -halfway]), dtype), dtype)
    assert rounded.tolist() == [*largest, np.inf, *-largest, -np.inf]


@pytest.mark.parametrize("dtype", SHORT)
@pytest.mark.parametrize("value", NAN_AND_INF)
def test_nan_and_infinity_stay_so_with_their_sign(dtype, value):
    values = np.float32([1, value, -0.0])
    rounded = widen(round_to(values, dtype), dtype)
    assert np.array_equal(rounded, values, equal_nan=True)
    assert np.array_equal(np.signbit(rounded), np.signbit(values))


def test_every_nan_of_a_large_array_stays_one():
    values = (np.arange(0x7F800001, 0x80000000, 4099, dtype=np.uint32)).view(np.float32)
    for dtype in SHORT:
        for nans in (values, -values):
            assert np.isnan(widen(round_to(nans, dtype), dtype)).all()


@given(dtype=st.sampled_from(SHORT), exponent=st.integers(-140, 120), seed=seeds)
def test_any_shape_and_layout_is_rounded(dtype, exponent, seed):
    matrix = array("matrix", 7, 6, seed=seed) * np.float32(2) ** exponent
    assert_nearest(matrix, dtype)
    for view in (matrix.T, matrix[::2, 1::2], matrix[0], matrix[:0]):
        assert_nearest(view, dtype)


@given(dtype=st.sampled_from(SHORT), n_in=sizes, n_out=sizes, step=st.integers(1, 70), seed=seeds)
def test_ranges_of_rounded_rows_are_those_of_the_matrix(dtype, n_in, n_out, step, seed):
    matrix = array("matrix", n_in, n_out, seed=seed)
    rows = RoundedRows(matrix, dtype)
    assert rows.shape == (n_in, n_out)
    parts = [slice(start, start + step) for start in range(0, n_in, step)]
    assert np.array_equal(
        np.concatenate([rows.bits(part) for part in parts]), rows.bits(slice(None))
    )
    assert np.array_equal(np.concatenate([rows[part] for part in parts]), nearest(matrix, dtype))
