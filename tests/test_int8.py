"""Int8 weights: how they are made, what is computed with them, and how near that is to float32."""

import functools
import itertools
import json
import os
import platform
import subprocess
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from checkpoints import (
    CONFIG,
    make_weights,
    noise,
    safetensors_bytes,
    store,
    stored_tensors,
    write_checkpoint,
)
from hypothesis import given
from hypothesis import strategies as st
from processes import COMMAND

import gpt_cli
from gpt_cli import checkpoint
from gpt_cli.config import GPT2Config
from gpt_cli.errors import CheckpointError
from gpt_cli.generate import left_pad
from gpt_cli.kv_cache import KVCache
from gpt_cli.model import forward
from gpt_cli.ops import Linear, get_ops
from gpt_cli.ops.int8 import BLOCK, LARGEST, LARGEST_ACTIVATION, Int8Rows, quantize
from gpt_cli.ops.numpy_ops import ACTIVATIONS, Int8NumPyOps

ALMOST_NOTHING = 2e-36  # below it, weights may be rounded to 0
DAMAGE = {  # by its bits: there are many numbers that are none
    "inf": 0x7F800000,
    "-inf": 0xFF800000,
    "nan": 0x7FC00000,
    "-nan": 0xFFC00000,
    "the first nan": 0x7F800001,
    "the last nan": 0x7FFFFFFF,
}


def array(name: str, *shape: int, seed: int = 0):
    return noise(name, *shape, seed=seed).astype(np.float32)


@st.composite
def matrices(draw):
    """A few large weights among many small ones, of any size."""
    shape = draw(st.integers(1, 200), "rows"), draw(st.integers(1, 6), "columns")
    cubed = noise("matrix", *shape, seed=draw(st.integers(0, 1000), "seed")) ** 3
    return (cubed * 2.0 ** draw(st.integers(-80, 120), "exponent")).astype(np.float32)


def of_each_weight(scale, rows: int):
    """The scale of each weight of a matrix that is not transposed."""
    return scale.repeat(BLOCK, axis=0)[:rows].astype(np.float64)


def in_blocks(matrix):
    """The largest weight of each block."""
    starts = np.arange(0, len(matrix), BLOCK)
    return np.maximum.reduceat(abs(matrix.astype(np.float64)), starts, axis=0)


@functools.cache
def ops_named(name: str):
    pytest.importorskip(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPT_CLI_OPS", name)
        return get_ops("cpu", "int8")


@pytest.fixture(scope="session", params=["numpy", "numba"])
def int8_ops(request):
    """Each way to compute with int8 weights."""
    return ops_named(request.param)


@pytest.fixture(scope="session")
def compiled():
    return ops_named("numba")


@pytest.fixture(scope="session")
def twin():
    """What the compiled operations must compute."""
    return Int8NumPyOps()


def assemble(ops, **changes):
    """A model as `make_model` of conftest makes it."""
    config = CONFIG | {"n_embd": 64, "n_layer": 2} | changes
    return checkpoint.assemble(GPT2Config.from_dict(config), ops, make_weights(config))


@pytest.fixture(scope="session")
def make_int8_model(int8_ops):
    return functools.cache(lambda **changes: assemble(int8_ops, **changes))


# --- how the weights are rounded -----------------------------------------------------------------


@given(matrix=matrices())
def test_a_weight_is_within_half_a_scale_of_what_it_was(matrix):
    made = quantize(matrix)
    assert made.weight.dtype == np.int8
    assert abs(made.weight.astype(int)).max() <= LARGEST
    error = abs(made[:].astype(np.float64) - matrix)
    assert (error <= 0.50001 * of_each_weight(made.scale, len(matrix))).all()


@given(matrix=matrices())
def test_a_scale_is_as_large_as_it_must_be_and_no_more_precise_than_bfloat16(matrix):
    scale = quantize(matrix).scale
    assert scale.dtype == np.float32
    assert not (scale.view(np.uint32) & 0xFFFF).any()
    least = in_blocks(matrix) / LARGEST
    assert (scale >= least * (1 - 2**-23)).all()
    assert (scale <= least * (1 + 2**-7)).all()


@given(matrix=matrices())
def test_what_is_transposed_is_rounded_as_if_it_were_not(matrix):
    made, other = quantize(matrix), quantize(matrix.T.copy(), transposed=True)
    assert np.array_equal(other.weight.T, made.weight)
    assert np.array_equal(other.scale.T, made.scale)
    assert np.array_equal(other[:].T, made[:])


@given(matrix=matrices(), block=st.integers(0, 3))
def test_a_block_does_not_depend_on_the_others(matrix, block):
    rows = slice(block * BLOCK, (block + 1) * BLOCK)
    others = matrix / np.float32(1000)
    others[rows] = matrix[rows]
    made, changed = quantize(matrix), quantize(others)
    assert np.array_equal(made.weight[rows], changed.weight[rows])
    assert np.array_equal(made.scale[block : block + 1], changed.scale[block : block + 1])


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(("n_in", "blocks"), [(1, 1), (63, 1), (64, 1), (65, 2), (200, 4)])
def test_the_last_block_may_be_shorter(n_in, blocks, transposed):
    matrix = array("matrix", 3, n_in) if transposed else array("matrix", n_in, 3)
    made = quantize(matrix, transposed=transposed)
    assert made.shape == made.weight.shape == matrix.shape
    assert made.scale.shape == ((3, blocks) if transposed else (blocks, 3))


@pytest.mark.parametrize("transposed", [True, False])
def test_a_block_of_zeros_stays_one(transposed):
    matrix = array("matrix", 150, 3)
    matrix[64:128, 1] = 0
    made = quantize(matrix.T.copy() if transposed else matrix, transposed=transposed)
    rounded = made[:].T if transposed else made[:]
    assert not rounded[64:128, 1].any()
    assert rounded[[0, 140], 1].all()


@pytest.mark.parametrize("size", [1e-45, 1e-40, 2e-38, 1e-36, 1e-30, 1e30, 3e38])
def test_the_smallest_and_largest_numbers_can_be_rounded(size):
    matrix = np.array([size, -size, size / 2, 0], np.float32)[:, None]
    made = quantize(matrix)
    rounded = made[:].astype(np.float64)
    assert abs(rounded - matrix).max() <= max(ALMOST_NOTHING, 0.50001 * made.scale.item())


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_not_finite_makes_the_scale_of_its_block_so_and_no_other(damage, transposed):
    matrix = array("matrix", 150, 3)
    matrix.view(np.uint32)[70, 1] = DAMAGE[damage]
    made = quantize(matrix.T.copy() if transposed else matrix, transposed=transposed)
    scale = made.scale.T if transposed else made.scale
    assert np.argwhere(~np.isfinite(scale)).tolist() == [[1, 1]]


@given(matrix=matrices())
def test_a_block_with_a_weight_of_the_largest_int8_is_rounded_once_only(matrix):
    made = quantize(matrix)
    again = quantize(made[:])
    full = in_blocks(made.weight) == LARGEST
    assert np.array_equal(again.scale[full], made.scale[full])
    same = of_each_weight(full, len(matrix)) == 1
    assert np.array_equal(again.weight[same], made.weight[same])


@given(matrix=matrices(), ends=st.lists(st.integers(0, 220), min_size=2, max_size=2).map(sorted))
@pytest.mark.parametrize("transposed", [True, False])
def test_any_range_of_rows_is_that_of_the_whole(matrix, ends, transposed):
    made = quantize(matrix, transposed=transposed)
    whole, part = made[:], made[slice(*ends)]
    assert whole.dtype == part.dtype == np.float32
    assert np.array_equal(part, whole[slice(*ends)])


def test_rows_stand_for_the_weights_times_the_scales_of_their_blocks():
    weight = np.array([[1, -2], [127, 0], [-127, 5]], np.int8).repeat(BLOCK, axis=0)
    scale = np.array([[1, 2], [0.5, 4], [8, 0.25]], np.float32)
    expected = np.array([[1, -4], [63.5, 0], [-1016, 1.25]], np.float32).repeat(BLOCK, axis=0)
    assert np.array_equal(Int8Rows(weight, scale, False)[:], expected)
    assert np.array_equal(Int8Rows(weight.T, scale.T, True)[:], expected.T)


# --- products ------------------------------------------------------------------------------------


def assert_near(result, expected, tolerance, size=1.0):
    """Compare with a tolerance relative to the largest number, and at least to `size`."""
    assert result.dtype == np.float32
    assert result.shape == expected.shape
    assert abs(result - expected).max() <= tolerance * max(size, abs(expected).max())


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("rows", [(1, 1), (1, 2), (1, 7), (3, 5), (2, 40)])
@pytest.mark.parametrize("n_in", [12, 64, 100, 192])
def test_compiled_products_are_those_of_the_twin(compiled, twin, activation, rows, n_in):
    x = array("x", *rows, n_in)
    for n_out, bias in ((20, None), (20, array("bias", 20)), (70, None), (70, array("bias", 70))):
        weight = array("weight", n_in, n_out)
        one, other = (Linear(ops.place_matrix(weight), bias) for ops in (compiled, twin))
        size = abs(twin.linear(x, other)).max()  # before the activation
        y, expected = (
            compiled.linear(x, one, activation=activation),
            twin.linear(x, other, activation=activation),
        )
        assert_near(y, expected, 2e-6, size)


@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize("n_in", [12, 64, 100, 192])
@pytest.mark.parametrize("transposed", [True, False])
def test_a_product_differs_by_the_rounding_of_the_activations_only(
    int8_ops, rows, n_in, transposed
):
    x, weight, bias = array("x", rows, n_in), array("weight", n_in, 70), array("bias", 70)
    stored = weight.T.copy() if transposed else weight
    w = Linear(int8_ops.place_matrix(stored, transposed=transposed), bias)
    rounded = quantize(weight)[:].astype(np.float64)
    step = abs(x).max(axis=1, keepdims=True) / LARGEST_ACTIVATION
    rounds_off = 0.51 * step * abs(rounded).sum(axis=0) + 1e-6 * (abs(x) @ abs(rounded))
    error = abs(int8_ops.linear(x, w) - (x.astype(np.float64) @ rounded + bias))
    assert (error <= rounds_off).all()


@pytest.mark.parametrize("rows", [1, 2, 4, 13])
@pytest.mark.parametrize("n_in", [64, 100, 192])
@pytest.mark.parametrize("x_sign", [1, -1])
@pytest.mark.parametrize("w_sign", [1, -1])
def test_the_largest_products_do_not_overflow(int8_ops, rows, n_in, x_sign, w_sign):
    x = np.full((rows, n_in), x_sign * LARGEST_ACTIVATION, np.float32)
    w = Linear(int8_ops.place_matrix(np.full((n_in, 40), w_sign * LARGEST, np.float32)))
    exact = float(n_in * x_sign * w_sign * LARGEST_ACTIVATION * LARGEST)
    y = int8_ops.linear(x, w)
    np.testing.assert_allclose(y, exact, rtol=1e-6)
    if int8_ops.name == "numba" and n_in % BLOCK == 0:  # float32 has enough digits for them
        assert (y == exact).all()


def test_every_number_of_16_bits_is_taken_exactly(int8_ops):
    x = np.arange(-LARGEST_ACTIVATION, LARGEST_ACTIVATION + 1, dtype=np.float32)[:, None]
    x = np.hstack([x, np.full_like(x, LARGEST_ACTIVATION)])
    w = Linear(int8_ops.place_matrix(np.array([[LARGEST], [0]], np.float32)))
    y = int8_ops.linear(x, w)
    np.testing.assert_allclose(y[:, 0], LARGEST * x[:, 0].astype(np.float64), rtol=2e-7)


def test_one_huge_activation_makes_the_others_coarse_and_nothing_more(int8_ops):
    x, weight = array("x", 3, 100), array("weight", 100, 40)
    x[:, 70] = 30_000
    y = int8_ops.linear(x, Linear(int8_ops.place_matrix(weight)))
    rounded = quantize(weight)[:].astype(np.float64)
    most = 0.51 * 30_000 / LARGEST_ACTIVATION * abs(rounded).sum(axis=0)
    assert (abs(y - x.astype(np.float64) @ rounded) <= most).all()


@pytest.mark.parametrize("number", [0, 1e-35, -1e-45])
@pytest.mark.parametrize("rows", [1, 9])
def test_a_row_of_next_to_nothing_gives_the_bias(int8_ops, number, rows):
    bias = array("bias", 40)
    w = Linear(int8_ops.place_matrix(array("weight", 100, 40)), bias)
    x = array("x", rows, 100)
    x[-1] = number
    assert np.array_equal(int8_ops.linear(x, w)[-1], bias)


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("rows", [3, 20])
@pytest.mark.parametrize("activation", [None, "gelu_new"])
def test_what_is_no_number_stays_so_in_its_row_and_only_there(int8_ops, damage, rows, activation):
    x, w = array("x", rows, 100), Linear(int8_ops.place_matrix(array("weight", 100, 40)))
    whole = int8_ops.linear(x, w, activation=activation)
    x.view(np.uint32)[1, 70] = DAMAGE[damage]
    with np.errstate(invalid="ignore"):
        y = int8_ops.linear(x, w, activation=activation)
    assert not np.isfinite(y[1]).any()
    others = np.arange(rows) != 1
    assert_near(y[others], whole[others], 2e-6)


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_numbers_need_not_lie_side_by_side(int8_ops, rows):
    x, w = array("x", rows, 200), Linear(int8_ops.place_matrix(array("weight", 100, 40)))
    for view in (x[:, ::2], x[:, 50:150], x[::-1, :100]):
        assert np.array_equal(int8_ops.linear(view, w), int8_ops.linear(view.copy(), w))


@pytest.mark.parametrize("activation", [None, "gelu_new", "silu"])
@pytest.mark.parametrize("rows", [2, 5, 8, 23])
def test_a_row_of_a_batch_is_exactly_the_row_alone(compiled, rows, activation):
    x = array("x", rows, 100) * np.float32(10) ** np.arange(rows, dtype=np.float32)[:, None]
    w = Linear(compiled.place_matrix(array("weight", 100, 70)), array("bias", 70))
    together = compiled.linear(x, w, activation=activation)
    for row, alone in zip(together, x, strict=True):
        assert np.array_equal(row, compiled.linear(alone[None], w, activation=activation)[0])


def test_the_arguments_are_left_as_they_are(int8_ops):
    x, matrix, heads = array("x", 9, 100), array("matrix", 100, 40), array("heads", 2, 2, 4, 4)
    copies = x.copy(), matrix.copy(), heads.copy()
    w = Linear(int8_ops.place_matrix(matrix), matrix[0])
    for activation in (None, *ACTIVATIONS):
        int8_ops.linear(x, w, activation=activation)
    int8_ops.attend(heads, heads, heads, 0.5, np.tril(np.ones((4, 4), bool))[None, None])
    assert all(map(np.array_equal, (x, matrix, heads), copies))


# --- where matrices are placed -------------------------------------------------------------------


def rows_of(int8_ops, placed, n_in):
    """The matrix that has been placed: a row for each product with a unit vector."""
    return int8_ops.linear(np.eye(n_in, dtype=np.float32), Linear(placed))


@pytest.mark.parametrize("piece", [1, 700, 7000, 10**6])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("rounded", [True, False])
def test_a_matrix_is_placed_whole_however_it_is_read(
    int8_ops, monkeypatch, piece, transposed, rounded
):
    if int8_ops.name == "numba":
        monkeypatch.setattr("gpt_cli.ops.numba_ops._PIECE", piece)
    matrix = array("matrix", 150, 170)
    rows = matrix.T.copy() if transposed else matrix
    if rounded:
        rows = quantize(rows, transposed=transposed)
    placed = int8_ops.place_matrix(rows, transposed=transposed)
    expected = quantize(matrix)[:]
    np.testing.assert_allclose(rows_of(int8_ops, placed, 150), expected, rtol=5e-7)


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(("n_in", "n_out"), [(1, 1), (64, 32), (65, 33), (130, 200)])
def test_what_is_int8_already_is_placed_as_what_it_was_made_from(int8_ops, n_in, n_out, transposed):
    matrix = array("matrix", n_out, n_in) if transposed else array("matrix", n_in, n_out)
    made = quantize(matrix, transposed=transposed)
    one, other = (int8_ops.place_matrix(rows, transposed=transposed) for rows in (matrix, made))
    assert np.array_equal(rows_of(int8_ops, one, n_in), rows_of(int8_ops, other, n_in))


@pytest.mark.parametrize("n_in", [12, 64, 100, 192])
@pytest.mark.parametrize("rounded", [True, False])
def test_embed_adds_the_rounded_columns_to_the_positions(int8_ops, n_in, rounded):
    wte, wpe = array("wte", 70, n_in), array("wpe", 6, n_in)
    made = quantize(wte, transposed=True)
    ids, positions = np.array([[69, 0, 3], [32, 31, 2]]), np.array([[0, 0, 1], [2, 3, 5]])
    placed = int8_ops.place_matrix(made if rounded else wte, transposed=True)
    x = int8_ops.embed(placed, wpe, ids, positions)
    assert x.dtype == np.float32
    assert np.array_equal(x, made[:][ids] + wpe[positions])
    shared = int8_ops.embed(placed, wpe, ids, np.array([[3, 4, 5]]))
    assert np.array_equal(shared, made[:][ids] + wpe[3:6])


@pytest.mark.parametrize(("id", "position"), [(70, 0), (0, 6)])
def test_embed_refuses_what_is_out_of_range(int8_ops, id, position):
    wte = int8_ops.place_matrix(array("wte", 70, 12), transposed=True)
    with pytest.raises(IndexError):
        int8_ops.embed(wte, array("wpe", 6, 12), np.array([[0, id]]), np.array([[0, position]]))


# --- keys and values -----------------------------------------------------------------------------


def as_float16(x):
    with np.errstate(over="ignore"):
        return np.asarray(x, np.float32).astype(np.float16)


def assert_same_numbers(one, other):
    """Compare float16 arrays: zeros have signs, and what is no number may have any bits."""
    assert np.array_equal(one, other, equal_nan=True)
    real = ~np.isnan(other)
    assert np.array_equal(np.signbit(one)[real], np.signbit(other)[real])


# Around what float16 can hold, where every way to round has its border.
near_float16 = st.one_of(
    st.floats(width=32),
    st.floats(-70_000, 70_000, width=32),
    st.floats(-(2.0**-13), 2.0**-13, width=32),
)


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (2, 3), (2, 4), (5, 9)])
@given(numbers=st.lists(near_float16, min_size=1, max_size=40), start=st.integers(0, 3))
def test_keys_are_stored_as_float16_in_their_place_only(compiled, numbers, batch, tokens, start):
    x = np.resize(np.array(numbers, np.float32), (batch, 3, tokens, 10))
    cache = np.full((2, batch, 3, tokens + 4, 10), 7, np.float16)
    expected = cache.copy()
    expected[1, :, :, start : start + tokens] = as_float16(x)
    compiled.store(x, cache[1, :, :, start : start + tokens])
    assert_same_numbers(cache, expected)


def test_keys_to_store_may_be_views(int8_ops):
    qkv = array("qkv", 2, 9, 3 * 24)
    x = qkv[:, :, 24:48].reshape(2, 9, 3, 8).swapaxes(1, 2)
    cache = np.zeros((2, 3, 12, 8), np.float16)
    int8_ops.store(x, cache[:, :, 1:10])
    assert np.array_equal(cache[:, :, 1:10], x.astype(np.float16))
    assert not cache[:, :, [0, 10, 11]].any()


def test_every_float16_is_read_by_a_processor_that_does_not_know_them():
    pytest.importorskip("numba")
    from gpt_cli.ops import kernels

    bits = np.arange(2**16, dtype=np.uint16)
    found = np.array([kernels._float_of_half(half) for half in bits], np.float32)
    expected = bits.view(np.float16).astype(np.float32)
    assert np.array_equal(found, expected, equal_nan=True)
    real = ~np.isnan(expected)
    assert np.array_equal(np.signbit(found)[real], np.signbit(expected)[real])


def rounded_without_hardware(numbers):
    pytest.importorskip("numba")
    from gpt_cli.ops import kernels

    bits = [kernels._half_of_float(number) for number in np.asarray(numbers, np.float32)]
    return np.array(bits, np.uint16).view(np.float16)


@given(numbers=st.lists(near_float16, min_size=1, max_size=20))
def test_float16_is_written_by_a_processor_that_does_not_know_it(numbers):
    assert_same_numbers(rounded_without_hardware(numbers), as_float16(numbers))


def test_the_borders_of_float16_are_those_of_numpy(compiled):
    ends = [np.nan, np.inf, 3e38, 65_536, 65_520, 65_519.99, 65_504, 1, 0]
    small = [2.0**-14, 2.0**-14 - 2.0**-25, 2.0**-24, 2.0**-25, 2.0**-26, 1e-45]
    numbers = np.array([*ends, *small], np.float32)
    for x in (numbers, -numbers):
        assert_same_numbers(rounded_without_hardware(x), as_float16(x))
        stored = np.zeros((1, 1, 1, len(x)), np.float16)
        compiled.store(x[None, None, None], stored)
        assert_same_numbers(stored[0, 0, 0], as_float16(x))


def test_a_number_between_two_float16_is_rounded_to_the_even_one():
    halfs = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)[::7]
    after = np.nextafter(halfs.astype(np.float16), np.float16(np.inf)).astype(np.float32)
    after[np.isinf(after)] = 65_536
    between = (halfs + after) / 2
    for numbers in (
        between,
        -between,
        np.nextafter(between, np.float32(0)),
        np.nextafter(between, np.float32(np.inf)),
    ):
        assert_same_numbers(rounded_without_hardware(numbers), as_float16(numbers))


def attention(T, D, padding=None):
    """What `attend` takes: queries, keys and values, and what is visible."""
    S = T + 2
    q, keys, values = array("q", 2, 3, T, D), array("keys", 2, 3, S, D), array("values", 2, 3, S, D)
    visible = (np.arange(S) <= np.arange(S - T, S)[:, None])[None, None]
    if padding:
        visible = visible & (np.arange(S) >= np.array(padding)[:, None, None])[:, None]
    return q, keys, values, None if T == 1 and padding is None else visible


ATTENTION = pytest.mark.parametrize(
    ("T", "D", "padding"), list(itertools.product([1, 2, 24, 100], [8, 64, 70], [None, (0, 1)]))
)


@ATTENTION
def test_keys_and_values_count_as_what_a_cache_would_hold(int8_ops, T, D, padding):
    q, keys, values, visible = attention(T, D, padding)
    kept = keys.astype(np.float16), values.astype(np.float16)
    from_cache = int8_ops.attend(q, *kept, 0.25, visible)
    assert np.array_equal(from_cache, int8_ops.attend(q, keys, values, 0.25, visible))


@ATTENTION
def test_compiled_attention_is_that_of_the_twin(compiled, twin, T, D, padding):
    q, keys, values, visible = attention(T, D, padding)
    attended, expected = (ops.attend(q, keys, values, 0.25, visible) for ops in (compiled, twin))
    assert_near(attended, expected, 4e-6)


@pytest.mark.parametrize("T", [1, 5])
def test_attend_reads_views_of_longer_caches(int8_ops, T):
    cache = array("cache", 2, 3, 40, 8).astype(np.float16)
    q, keys = array("q", 2, 3, T, 8), cache[:, :, :30]
    visible = (np.arange(30) <= np.arange(30 - T, 30)[:, None])[None, None]
    views = int8_ops.attend(q, keys, keys, 0.3, visible)
    assert np.array_equal(views, int8_ops.attend(q, keys.copy(), keys.copy(), 0.3, visible))


# --- the model -----------------------------------------------------------------------------------

VOCAB_SIZE = 290
texts = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=40)


def assert_alike(logits, expected, most=1e-2):
    """Differences of float32 may tip a number from one 16-bit number to the next."""
    assert logits.shape == expected.shape
    assert abs(logits - expected).max() <= most * expected.std()


def in_chunks(model, ids, size, padding=None):
    cache = KVCache(model.config, model.ops, *ids.shape)
    parts = [ids[:, start : start + size] for start in range(0, ids.shape[1], size)]
    return np.hstack([forward(model, part, cache, padding=padding) for part in parts])


SIZES = [
    {},
    {"n_embd": 96, "n_head": 2},
    {"n_inner": 100, "activation_function": "gelu"},
    {"tie_word_embeddings": False},
]


@pytest.mark.parametrize("changes", SIZES)
def test_compiled_logits_are_those_of_the_twin(compiled, twin, changes):
    ids = np.arange(160).reshape(2, 80) * 7 % VOCAB_SIZE
    logits, expected = (forward(assemble(ops, **changes), ids) for ops in (compiled, twin))
    assert logits.dtype == np.float32
    assert_alike(logits, expected)


def test_a_cache_holds_float16(make_int8_model):
    model = make_int8_model()
    cache = KVCache(model.config, model.ops, 1, 3)
    forward(model, np.array([[1, 2, 3]]), cache)
    assert cache.k.dtype == cache.v.dtype == np.float16


@given(text=texts, size=st.integers(1, 12))
def test_any_chunking_with_a_cache_is_the_whole_text_without(make_int8_model, text, size):
    model, ids = make_int8_model(), np.array([text])
    assert_alike(in_chunks(model, ids, size), forward(model, ids))


@given(rows=st.lists(texts, min_size=1, max_size=4), size=st.integers(1, 12))
def test_a_row_of_a_ragged_batch_is_the_row_alone(make_int8_model, rows, size):
    model = make_int8_model()
    ids, padding = left_pad(rows)
    for logits in (
        forward(model, ids, padding=padding),
        in_chunks(model, ids, size, padding),
    ):
        for row, text in zip(logits, rows, strict=True):
            assert_alike(row[-len(text) :], forward(model, np.array([text]))[0])


@pytest.fixture(scope="module")
def stories():
    """What the bundled model writes, as ids, and the logits of float32."""
    engine = gpt_cli.load("tiny", dtype="float32")
    beginnings = ["Once upon a time", "The cat", "Lily was", "One day"]
    written = engine.generate(beginnings, max_tokens=150, seed=3, ignore_eos=True)
    ids = [engine.encode(start) for start in beginnings]
    rows = [row + list(done.ids) for row, done in zip(ids, written, strict=True)]
    return [(row, engine.logits([row])[0]) for row in rows]


def log_softmax(logits):
    logits = logits.astype(np.float64)
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def test_int8_is_near_float32_on_what_the_bundled_model_writes(int8_ops, stories, monkeypatch):
    monkeypatch.setenv("GPT_CLI_OPS", int8_ops.name)
    engine = gpt_cli.load("tiny", dtype="int8")
    assert (engine.model.ops.name, engine.model.ops.dtype) == (int8_ops.name, "int8")
    expected = np.concatenate([logits for _, logits in stories])
    logits = np.concatenate([engine.logits([ids])[0] for ids, _ in stories])
    exact, found = log_softmax(expected), log_softmax(logits)
    assert (np.exp(exact) * (exact - found)).sum(axis=-1).mean() <= 1e-3
    second, first = np.partition(expected, -2, axis=-1)[:, -2:].T
    clear = first - second >= np.median(first - second)
    assert (logits.argmax(axis=-1) == expected.argmax(axis=-1))[clear].mean() >= 0.99


def with_damage(folder, name, damage):
    """Write a checkpoint with one number that is none."""
    write_checkpoint(folder, CONFIG)
    weights = make_weights(CONFIG)
    weights[name].view(np.uint32)[..., 5] = DAMAGE[damage]
    tensors = stored_tensors(CONFIG) | {name: store(weights[name])}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    return str(folder)


@pytest.mark.parametrize("name", ["wte.weight", "h.1.mlp.c_fc.weight", "h.2.attn.c_proj.bias"])
@pytest.mark.parametrize("damage", ["inf", "nan", "the last nan"])
def test_damaged_weights_are_noticed(int8_ops, monkeypatch, tmp_path, name, damage):
    monkeypatch.setenv("GPT_CLI_OPS", int8_ops.name)
    engine = gpt_cli.load(with_damage(tmp_path, name, damage), dtype="int8")
    with pytest.raises(CheckpointError, match="its weights are damaged"):
        engine.logits([[1, 2, 3]])
    with pytest.raises(CheckpointError, match="its weights are damaged"):
        engine.generate(["a"], max_tokens=2)


# --- other processors ----------------------------------------------------------------------------


def greedy_story(**env):
    """What the command tells of 40 tokens."""
    options = ["-m", "tiny", "--dtype", "int8", "--temperature", "0", "-n", "40", "--json"]
    finished = subprocess.run(
        [*COMMAND, "generate", *options, "--logprobs", "0", "Once upon a time"],
        env=os.environ | {"GPT_CLI_OPS": "numba"} | env,
        capture_output=True,
        timeout=240,
        check=True,
    )
    return json.loads(finished.stdout)


OTHERS = {
    "generic": {"NUMBA_CPU_NAME": "generic"},
    "haswell": {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma"},
}


@pytest.fixture(scope="module")
def stories_by_processor(tmp_path_factory):
    """What this processor tells, and what it does as one that can do less; side by side.

    For the others all is compiled anew, which takes half a minute each.
    """
    pytest.importorskip("numba")
    with ThreadPoolExecutor() as pool:
        told = {
            name: pool.submit(
                greedy_story, **processor, NUMBA_CACHE_DIR=str(tmp_path_factory.mktemp(name))
            )
            for name, processor in OTHERS.items()
        }
        told["this"] = pool.submit(greedy_story)
        return {name: story.result() for name, story in told.items()}


@pytest.mark.slow
@pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="names processors of x86"
)
@pytest.mark.parametrize("processor", OTHERS)
def test_processors_that_can_do_less_compute_the_same(stories_by_processor, processor):
    story, own = (stories_by_processor[name] for name in (processor, "this"))
    assert story["text"] == own["text"]
    found, expected = ([token["logprob"] for token in each["logprobs"]] for each in (story, own))
    assert found == pytest.approx(expected, rel=1e-2, abs=1e-3)
