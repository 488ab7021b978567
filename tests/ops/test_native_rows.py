"""Compiled operations on rows: layer norm, exp, sums; levels, and arrays of any layout."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt_cli.errors import InputError
from gpt_cli.ops import LayerNorm, Linear, bindings, native_ops
from gpt_cli.ops.numpy_ops import ACTIVATIONS
from support.native_arrays import (
    PARTIAL_SUMS,
    activated,
    added_up,
    array,
    assert_same_bits,
    at_each_level,
    filled_up,
    misaligned,
    multiply_add,
    rows_of_x,
    seeds,
    sum_of,
)

pytestmark = pytest.mark.usefixtures("library")


# --- rows ----------------------------------------------------------------------------------------


def test_exp_is_exact_to_one_ulp(level, native):
    exp = native("float32").exp
    x = np.linspace(-87, 88, 400_001, dtype=np.float32)
    exact = np.exp(x.astype(np.float64))
    assert (abs(exp(x) - exact) <= np.spacing(exact.astype(np.float32))).all()
    below = np.array([np.nextafter(np.float32(-87), np.float32(-88)), -1e30, -np.inf], np.float32)
    assert exp(below).tolist() == [0, 0, 0]
    above = exp(np.array([88, 88.1, 1e30, np.inf, np.nan], np.float32))
    assert (above[:4] == above[0]).all()
    assert np.isnan(above[4])


def test_levels_agree_on_floats_of_every_kind(level, native):
    x = np.arange(0, 2**32, 99_991, dtype=np.uint64).astype(np.uint32).view(np.float32)

    def computed(level):
        bindings.use_level(level)
        return [
            native("float32").exp(x),
            *(activated(native("float32"), x, name) for name in ACTIVATIONS),
        ]

    for numbers, expected in zip(computed(level), computed(bindings.levels()[0]), strict=True):
        assert_same_bits(numbers, expected)


@given(rows=rows_of_x, C=st.integers(1, 200), seed=seeds)
@at_each_level
def test_layer_norm_adds_in_a_fixed_order(level, native, rows, C, seed):
    x, weight, bias = array("x", rows, C, seed=seed), array("weight", C), array("bias", C)
    normed = native("float32").layer_norm(x, LayerNorm(weight, bias, 1e-5))
    for row, y in zip(x, normed, strict=True):
        centred = row - added_up(row) / np.float32(C)
        squares = np.zeros(PARTIAL_SUMS, np.float32)
        for piece in filled_up(centred):
            squares = multiply_add(piece, piece, squares)
        deviation = np.sqrt(sum_of(squares) / np.float32(C) + np.float32(1e-5))
        assert_same_bits(y, multiply_add(centred * (np.float32(1) / deviation), weight, bias))


@given(rows=rows_of_x, n=st.integers(1, 1000), scale=st.sampled_from([1, 20]), seed=seeds)
@at_each_level
def test_log_normalizer_adds_in_a_fixed_order(level, native, rows, n, scale, seed):
    ops, logits = native("float32"), scale * array("logits", rows, n, seed=seed)
    for row, y in zip(logits, ops.log_normalizer(logits), strict=True):
        weights, sums = ops.exp(row - row.max()), np.zeros(PARTIAL_SUMS)
        for start in range(0, n, 256):
            sums += sum(filled_up(weights[start : start + 256]), np.zeros(PARTIAL_SUMS, np.float32))
        assert abs(y - (float(row.max()) + math.log(sum_of(sums)))) <= 1e-15 * max(1, y)


@given(rows=rows_of_x, n=st.integers(1, 1000), scale=st.sampled_from([1, 20]), seed=seeds)
@at_each_level
def test_cumulative_counts_are_those_of_the_weights(level, native, rows, n, scale, seed):
    ops, logits = native("float32"), scale * array("logits", rows, n + 3, seed=seed)[:, :n]
    weights = ops.exp(logits - logits.max(axis=-1, keepdims=True)).astype(np.float64)
    counts = 1 + np.floor(weights * 2**30).astype(np.int64)
    assert np.array_equal(ops.cumulative_counts(logits), np.cumsum(counts, axis=-1))


@pytest.mark.parametrize("damage", [np.nan, np.inf, -np.inf])
@given(rows=rows_of_x, C=st.integers(2, 100), data=st.data())
@settings(max_examples=15)
def test_nan_and_inf_spoil_only_their_row_of_a_norm_or_normalizer(native, damage, rows, C, data):
    ops, x = native("float32"), array("x", rows, C)
    ln = LayerNorm(array("weight", C), array("bias", C), 1e-5)
    row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, C - 1))
    before, normalizer = ops.layer_norm(x, ln), ops.log_normalizer(x)
    x[row, column] = damage
    after, others = ops.layer_norm(x, ln), np.arange(rows) != row
    assert np.isnan(after[row]).all()
    assert_same_bits(after[others], before[others])
    after = ops.log_normalizer(x)
    assert np.isfinite(after[row]) == (damage == -np.inf)
    assert np.array_equal(after[others], normalizer[others])


def test_other_operations_reject_wrong_shapes(parts):
    ops, x, norm = parts["ops"], parts["x"], array("norm", 12)
    for wrong in (array("norm", 11), array("norm", 1, 12), array("norm", 13)):
        for ln in (LayerNorm(wrong, norm, 1e-5), LayerNorm(norm, wrong, 1e-5)):
            with pytest.raises(ValueError, match="cannot be"):
                ops.layer_norm(x, ln)
    ids = np.array([[1, 2]])
    for wrong in (parts["wpe"][:, :11], parts["wpe"][0]):
        with pytest.raises(ValueError, match="wpe cannot be"):
            ops.embed(parts["w"], wrong, ids, ids)
    with pytest.raises(ValueError, match="broadcast"):
        ops.embed(parts["w"], parts["wpe"], ids, np.array([[1, 2, 3]]))
    for wrong in (np.float32([1, 2]), np.zeros((2, 3, 4), np.float32)):
        with pytest.raises(ValueError, match="unpack"):
            ops.place_matrix(wrong)


# --- array layouts -------------------------------------------------------------------------------


LAYOUTS = {
    "misaligned": misaligned,
    "every second number": lambda x: x.repeat(2, axis=-1)[..., ::2],
    "backwards": lambda x: x[..., ::-1].copy()[..., ::-1],
    "rows backwards": lambda x: x[::-1].copy()[::-1],
    "rows apart": lambda x: np.pad(x, [*[(0, 0)] * (x.ndim - 1), (3, 4)])[..., 3:-4],
    "columns first": np.asfortranarray,
    "the other byte order": lambda x: x.astype(x.dtype.newbyteorder()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_array_layout_changes_no_bit(native, dtype, layout):
    ops, laid = native(dtype), LAYOUTS[layout]
    B, H, T, D, C = 3, 2, 14, 24, 48
    x, matrix, bias = array("x", B, T, C), array("matrix", C, 70), array("bias", 70)
    norm = array("weight", C), array("offset", C)
    heads = [array(name, B, H, T, D) for name in "qkv"]
    ids, positions = np.arange(B * T).reshape(B, T) % 48, np.arange(T)[None]
    visible, lengths = positions.repeat(B, axis=0) + 1, np.array([T, T - 1, T])

    def results(laid):
        w = Linear(ops.place_matrix(laid(matrix)), laid(bias))
        wte = ops.place_matrix(laid(matrix), transposed=True)
        cache = [layers[0] for layers in ops.new_cache(1, B, H, T, D)]
        for panels in cache:
            panels[...] = 0
        q, k, v = map(laid, heads)
        ops.store(k, v, *cache, laid(lengths * 0), laid(lengths))
        return [
            ops.embed(wte, laid(array("wpe", T, 70)), laid(ids), laid(positions)),
            ops.layer_norm(laid(x), LayerNorm(*map(laid, norm), 1e-5)),
            *(ops.linear(laid(x), w, activation) for activation in (None, "gelu_new")),
            ops.linear(np.broadcast_to(laid(x)[:1, :1], x.shape), w),
            ops.attend(q, *cache, 0.3, laid(visible)),
            ops.exp(laid(x)),
            ops.log_normalizer(laid(x[0])).astype(np.float32),
        ]

    for result, expected in zip(results(laid), results(np.copy), strict=True):
        assert_same_bits(result, expected)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_empty_inputs_give_empty_outputs(native, dtype):
    ops, matrix = native(dtype), array("matrix", 8, 20)
    w, x = Linear(ops.place_matrix(matrix)), np.empty((0, 8), np.float32)
    assert ops.linear(x, w).shape == (0, 20)
    assert ops.linear(x[None], w, "gelu").shape == (1, 0, 20)
    assert ops.layer_norm(x, LayerNorm(matrix[:, 0], matrix[:, 1], 1e-5)).shape == (0, 8)
    assert ops.exp(x).shape == (0, 8)
    assert ops.log_normalizer(x).shape == (0,)
    ids = np.empty((2, 0), int)
    assert ops.embed(w.weight, matrix[:, :8], ids, ids[:1]).size == 0
    for B, T in ((0, 3), (2, 0)):
        heads, counts = np.empty((B, 2, T, 8), np.float32), np.zeros(B, int)
        cache = [layers[0] for layers in ops.new_cache(1, B, 2, 5, 8)]
        ops.store(heads, heads, *cache, counts, counts)
        assert ops.attend(heads, *cache, 1.0, np.ones((B, T), int)).shape == heads.shape


# --- levels --------------------------------------------------------------------------------------


@pytest.fixture
def variable(monkeypatch):
    """Return a function that sets GPT_CLI_LEVEL; restore the level afterwards."""
    yield lambda value: monkeypatch.setenv("GPT_CLI_LEVEL", value)
    monkeypatch.undo()
    bindings.choose_level()


def test_the_highest_level_is_used_unless_the_variable_names_another(variable):
    variable("")
    levels = bindings.levels()
    assert levels == [name for name in bindings.LEVELS if name in levels]
    assert native_ops.NativeOps().level == levels[0]
    for name in levels:
        variable(name)
        assert native_ops.NativeOps().level == native_ops.NativeOps("int8").level == name


def test_an_unknown_or_unsupported_level_is_rejected(variable):
    variable("abacus")
    with pytest.raises(InputError, match=r"GPT_CLI_LEVEL must be one of .*, not 'abacus'"):
        native_ops.NativeOps()
    for name in {*bindings.LEVELS} - {*bindings.levels()}:
        variable(name)
        with pytest.raises(InputError, match=f"GPT_CLI_LEVEL={name}: this processor"):
            native_ops.NativeOps()
