"""Int8 weights: quantization, operations, and accuracy relative to float32."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpt_cli
from gpt_cli.errors import CheckpointError
from gpt_cli.folder.dtypes import GROUP
from gpt_cli.gpt2.model import forward
from gpt_cli.ops import Linear
from gpt_cli.ops.int8 import LARGEST, LARGEST_ACTIVATION, Int8Rows, quantize
from gpt_cli.ops.numpy_ops import NumPyOps
from support.checkpoints import VOCAB, noise, write_damaged
from support.models import model_of
from support.native_arrays import NAN_AND_INF, array

ALMOST_NOTHING = 2e-36  # below it, weights may be rounded to 0


@st.composite
def drawn_matrices(draw):
    """Draw a matrix with a few large weights among many small ones, of any magnitude."""
    shape = draw(st.integers(1, 200), "rows"), draw(st.integers(1, 6), "columns")
    cubed = noise("matrix", *shape, seed=draw(st.integers(0, 1000), "seed")) ** 3
    return (cubed * 2.0 ** draw(st.integers(-80, 120), "exponent")).astype(np.float32)


matrices = drawn_matrices()
transpositions = pytest.mark.parametrize("transposed", [True, False])


def quantized(matrix, transposed=False):
    """Return the weights, the scales and the rounded matrix, all (n_in, n_out)."""
    rows = quantize(matrix.T.copy() if transposed else matrix, transposed=transposed)
    arrays = rows.weight, rows.scale, rows[:]
    return [array.T for array in arrays] if transposed else arrays


def of_weights(scale, rows: int):
    """Return the scale of each weight."""
    return scale.repeat(GROUP, axis=0)[:rows].astype(np.float64)


def largest_of_groups(matrix):
    starts = np.arange(0, len(matrix), GROUP)
    return np.maximum.reduceat(abs(matrix.astype(np.float64)), starts, axis=0)


@pytest.fixture(scope="session")
def compiled(native):
    return native("int8")


# --- quantization --------------------------------------------------------------------------------


@given(matrix=matrices)
def test_a_weight_is_rounded_by_at_most_half_a_scale(matrix):
    weight, scale, rounded = quantized(matrix)
    assert weight.dtype == np.int8
    assert abs(weight.astype(int)).max() <= LARGEST
    error = abs(rounded.astype(np.float64) - matrix)
    assert (error <= 0.50001 * of_weights(scale, len(matrix))).all()


@given(matrix=matrices)
def test_a_scale_is_minimal_and_fits_bfloat16(matrix):
    _, scale, _ = quantized(matrix)
    assert scale.dtype == np.float32
    assert not (scale.view(np.uint32) & 0xFFFF).any()
    least = largest_of_groups(matrix) / LARGEST
    assert (scale >= least * (1 - 2**-23)).all()
    assert (scale <= least * (1 + 2**-7)).all()


@given(matrix=matrices)
def test_transposed_matrices_are_quantized_alike(matrix):
    assert all(map(np.array_equal, quantized(matrix, transposed=True), quantized(matrix)))


@given(matrix=matrices, group=st.integers(0, 3))
def test_a_group_does_not_depend_on_the_others(matrix, group):
    rows = slice(group * GROUP, (group + 1) * GROUP)
    others = matrix / np.float32(1000)
    others[rows] = matrix[rows]
    (weight, scale, _), (changed, changed_scale, _) = quantized(matrix), quantized(others)
    assert np.array_equal(weight[rows], changed[rows])
    assert np.array_equal(scale[group : group + 1], changed_scale[group : group + 1])


@transpositions
@pytest.mark.parametrize(("n_in", "groups"), [(1, 1), (63, 1), (64, 1), (65, 2), (200, 4)])
def test_the_last_group_may_be_shorter(n_in, groups, transposed):
    shapes = [x.shape for x in quantized(array("matrix", n_in, 3), transposed)]
    assert shapes == [(n_in, 3), (groups, 3), (n_in, 3)]


@transpositions
def test_a_group_of_zeros_stays_zero(transposed):
    matrix = array("matrix", 150, 3)
    matrix[64:128, 1] = 0
    _, _, rounded = quantized(matrix, transposed)
    assert not rounded[64:128, 1].any()
    assert rounded[[0, 140], 1].all()


@pytest.mark.parametrize("size", [1e-45, 1e-40, 2e-38, 1e-36, 1e-30, 1e30, 3e38])
def test_the_smallest_and_largest_numbers_can_be_quantized(size):
    matrix = np.array([size, -size, size / 2, 0], np.float32)[:, None]
    _, scale, rounded = quantized(matrix)
    error = abs(rounded.astype(np.float64) - matrix).max()
    assert error <= max(ALMOST_NOTHING, 0.50001 * scale.item())


@transpositions
@pytest.mark.parametrize("damage", NAN_AND_INF)
def test_nan_and_inf_spoil_only_the_scale_of_their_group(damage, transposed):
    matrix = array("matrix", 150, 3)
    matrix.view(np.uint32)[70, 1] = damage.view(np.uint32)  # keeps the bits of a NaN
    _, scale, _ = quantized(matrix, transposed)
    assert np.argwhere(~np.isfinite(scale)).tolist() == [[1, 1]]


@given(matrix=matrices)
def test_quantizing_again_changes_no_group_that_uses_the_full_range(matrix):
    weight, scale, rounded = quantized(matrix)
    again, scale_again, _ = quantized(rounded)
    full = largest_of_groups(weight) == LARGEST
    assert np.array_equal(scale_again[full], scale[full])
    same = of_weights(full, len(matrix)) == 1
    assert np.array_equal(again[same], weight[same])


@given(matrix=matrices, ends=st.lists(st.integers(0, 220), min_size=2, max_size=2).map(sorted))
@transpositions
def test_a_slice_of_rows_equals_the_slice_of_the_whole(matrix, ends, transposed):
    rows = quantize(matrix, transposed=transposed)
    whole, part = rows[:], rows[slice(*ends)]
    assert whole.dtype == part.dtype == np.float32
    assert np.array_equal(part, whole[slice(*ends)])


def test_rows_are_the_weights_times_the_scales_of_their_groups():
    weight = np.array([[1, -2], [127, 0], [-127, 5]], np.int8).repeat(GROUP, axis=0)
    scale = np.array([[1, 2], [0.5, 4], [8, 0.25]], np.float32)
    expected = np.array([[1, -4], [63.5, 0], [-1016, 1.25]], np.float32).repeat(GROUP, axis=0)
    assert np.array_equal(Int8Rows(weight, scale, False)[:], expected)
    assert np.array_equal(Int8Rows(weight.T, scale.T, True)[:], expected.T)


# --- products ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize("n_in", [12, 64, 100, 192])
@transpositions
def test_products_differ_only_by_the_rounding_of_activations(int8_ops, rows, n_in, transposed):
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
def test_the_largest_products_do_not_overflow(int8_ops, rows, n_in):
    for x_sign, w_sign in product((1, -1), repeat=2):
        x = np.full((rows, n_in), x_sign * LARGEST_ACTIVATION, np.float32)
        w = Linear(int8_ops.place_matrix(np.full((n_in, 40), w_sign * LARGEST, np.float32)))
        exact = float(n_in * x_sign * w_sign * LARGEST_ACTIVATION * LARGEST)
        y = int8_ops.linear(x, w)
        np.testing.assert_allclose(y, exact, rtol=1e-6)
        if int8_ops.name == "native" and n_in % GROUP == 0:  # float32 holds them exactly
            assert (y == exact).all()


def test_every_16_bit_activation_is_exact(int8_ops):
    x = np.arange(-LARGEST_ACTIVATION, LARGEST_ACTIVATION + 1, dtype=np.float32)[:, None]
    x = np.hstack([x, np.full_like(x, LARGEST_ACTIVATION)])
    w = Linear(int8_ops.place_matrix(np.array([[LARGEST], [0]], np.float32)))
    y = int8_ops.linear(x, w)
    np.testing.assert_allclose(y[:, 0], LARGEST * x[:, 0].astype(np.float64), rtol=2e-7)


def test_one_huge_activation_only_coarsens_the_others(int8_ops):
    x, weight = array("x", 3, 100), array("weight", 100, 40)
    x[:, 70] = 30_000
    y = int8_ops.linear(x, Linear(int8_ops.place_matrix(weight)))
    rounded = quantize(weight)[:].astype(np.float64)
    most = 0.51 * 30_000 / LARGEST_ACTIVATION * abs(rounded).sum(axis=0)
    assert (abs(y - x.astype(np.float64) @ rounded) <= most).all()


@pytest.mark.parametrize("number", [0, 1e-35, -1e-45])
@pytest.mark.parametrize("rows", [1, 9])
def test_a_row_of_tiny_activations_gives_the_bias(int8_ops, number, rows):
    bias = array("bias", 40)
    w = Linear(int8_ops.place_matrix(array("weight", 100, 40)), bias)
    x = array("x", rows, 100)
    x[-1] = number
    assert np.array_equal(int8_ops.linear(x, w)[-1], bias)


# --- keys and values -----------------------------------------------------------------------------


def test_keys_and_values_are_stored_as_float16_with_ties_rounded_to_even(compiled, cached):
    halfs = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    between = (halfs + np.append(halfs[1:], np.float32(65_536))) / 2
    others = np.resize(np.float32([np.nan, np.inf, 70_000, 3e38, 1e-10, 1e-45]), 64)
    for numbers in (
        between,
        np.nextafter(between, np.float32(0)),
        np.nextafter(between, np.float32(np.inf)),
        others,
    ):
        x = numbers.reshape(1, 1, -1, 64)
        keys, values = cached(compiled, x, -x)
        for panels, exact in ((keys.swapaxes(-1, -2), x), (values, -x)):
            stored = panels.reshape(1, 1, -1, 64)[:, :, : x.shape[2]]
            with np.errstate(over="ignore"):
                expected = exact.astype(np.float16)
            assert stored.dtype == np.float16
            real = ~np.isnan(expected)
            assert np.array_equal(np.isnan(stored), ~real)
            assert np.array_equal(stored[real].view(np.uint16), expected[real].view(np.uint16))


def test_every_float16_is_widened_exactly(compiled, cached):
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    values = every[np.isfinite(every)].astype(np.float32).reshape(-1, 1, 1, 64)
    q, visible = np.zeros_like(values), np.ones((len(values), 1), int)
    attended = compiled.attend(q, *cached(compiled, q, values), 1.0, visible)  # each sees one key
    assert np.array_equal(attended, values)


@pytest.mark.parametrize("T", [1, 2, 24, 100])
@pytest.mark.parametrize("D", [8, 64, 70])
@pytest.mark.parametrize("ragged", [False, True])
def test_attend_uses_keys_and_values_as_rounded_by_the_cache(int8_ops, cached, T, D, ragged):
    S = T + 2
    q, keys, values = array("q", 2, 3, T, D), array("keys", 2, 3, S, D), array("values", 2, 3, S, D)
    visible = np.arange(3, S + 1) - np.array([[0], [1]]) * ragged
    rounded = [x.astype(np.float16).astype(np.float32) for x in (keys, values)]
    attended, expected = (
        int8_ops.attend(q, *cached(int8_ops, *arrays), 0.25, visible)
        for arrays in ((keys, values), rounded)
    )
    assert np.array_equal(attended, expected)


# --- the model -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_embd": 96, "n_head": 2},
        {"n_inner": 100, "activation_function": "gelu"},
        {"tie_word_embeddings": False},
    ],
)
def test_compiled_logits_are_close_to_the_reference(compiled, changes):
    changes = {"n_embd": 64, "n_layer": 2} | changes
    ids = np.arange(160).reshape(2, 80) * 7 % len(VOCAB)
    logits, expected = (
        forward(model_of(ops, **changes), ids) for ops in (compiled, NumPyOps("int8"))
    )
    assert logits.dtype == np.float32
    assert logits.shape == expected.shape
    # A difference in float32 may change the rounding to 16 bits.
    assert abs(logits - expected).max() <= 1e-2 * expected.std()


@pytest.fixture(scope="module")
def stories():
    """Return texts of the bundled model, as ids, with their logits in float32."""
    engine = gpt_cli.load("tiny", dtype="float32")
    beginnings = ["Once upon a time", "The cat", "Lily was", "One day"]
    written = engine.generate(beginnings, max_tokens=150, seed=3, ignore_eos=True)
    ids = [engine.encode(start) for start in beginnings]
    rows = [row + list(done.ids) for row, done in zip(ids, written, strict=True)]
    return [(row, engine.logits([row])[0]) for row in rows]


def log_softmax(logits):
    logits = logits.astype(np.float64)
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def test_int8_is_close_to_float32_on_texts_of_the_bundled_model(int8_ops, stories, monkeypatch):
    monkeypatch.setenv("GPT_CLI_OPS", int8_ops.name)
    engine = gpt_cli.load("tiny", dtype="int8")
    assert (engine.model.ops.name, engine.model.ops.dtype) == (int8_ops.name, "int8")
    expected = np.concatenate([logits for _, logits in stories])
    logits = np.concatenate([engine.logits([ids])[0] for ids, _ in stories])
    exact, rounded = log_softmax(expected), log_softmax(logits)
    assert (np.exp(exact) * (exact - rounded)).sum(axis=-1).mean() <= 1e-3
    second, first = np.partition(expected, -2, axis=-1)[:, -2:].T
    clear = first - second >= np.median(first - second)
    assert (logits.argmax(axis=-1) == expected.argmax(axis=-1))[clear].mean() >= 0.99


@pytest.mark.parametrize("name", ["wte.weight", "h.1.mlp.c_fc.weight", "h.2.attn.c_proj.bias"])
@pytest.mark.parametrize("damage", NAN_AND_INF[[0, 2, 5]])
def test_damaged_weights_are_detected(int8_ops, monkeypatch, tmp_path, name, damage):
    monkeypatch.setenv("GPT_CLI_OPS", int8_ops.name)
    folder = write_damaged(tmp_path, name, damage)
    engine = gpt_cli.load(str(folder), dtype="int8")
    with pytest.raises(CheckpointError, match="its weights are damaged"):
        engine.logits([[1, 2, 3]])
    with pytest.raises(CheckpointError, match="its weights are damaged"):
        engine.generate(["a"], max_tokens=2)
