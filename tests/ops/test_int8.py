"""Int8 weights: quantization, operations, and accuracy relative to float32."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpt_cli
from gpt_cli.errors import CheckpointError
from gpt_cli.folder.config import GPT2Config
from gpt_cli.gpt2 import checkpoint
from gpt_cli.gpt2.model import forward
from gpt_cli.ops import Linear
from gpt_cli.ops.int8 import GROUP, LARGEST, LARGEST_ACTIVATION, Int8Rows, quantize
from gpt_cli.ops.numpy_ops import NumPyOps
from support.checkpoints import CONFIG, make_weights, noise, write_damaged

ALMOST_NOTHING = 2e-36  # below it, weights may be rounded to 0
DAMAGE = {  # by its bits: there are many NaNs
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
    """Draw a matrix with a few large weights among many small ones, of any magnitude."""
    shape = draw(st.integers(1, 200), "rows"), draw(st.integers(1, 6), "columns")
    cubed = noise("matrix", *shape, seed=draw(st.integers(0, 1000), "seed")) ** 3
    return (cubed * 2.0 ** draw(st.integers(-80, 120), "exponent")).astype(np.float32)


def of_each_weight(scale, rows: int):
    """Return the scale of each weight of a matrix that is not transposed."""
    return scale.repeat(GROUP, axis=0)[:rows].astype(np.float64)


def in_blocks(matrix):
    """Return the largest weight of each block."""
    starts = np.arange(0, len(matrix), GROUP)
    return np.maximum.reduceat(abs(matrix.astype(np.float64)), starts, axis=0)


@pytest.fixture(scope="session")
def compiled(native):
    return native("int8")


def assemble(ops, **changes):
    """Return a model like those of `make_model` in conftest."""
    config = CONFIG | {"n_embd": 64, "n_layer": 2} | changes
    return checkpoint.assemble(GPT2Config.from_dict(config), ops, make_weights(config))


# --- quantization --------------------------------------------------------------------------------


@given(matrix=matrices())
def test_a_weight_is_within_half_a_scale_of_what_it_was(matrix):
    made = quantize(matrix)
    assert made.weight.dtype == np.int8
    assert abs(made.weight.astype(int)).max() <= LARGEST
    error = abs(made[:].astype(np.float64) - matrix)
    assert (error <= 0.50001 * of_each_weight(made.scale, len(matrix))).all()


@given(matrix=matrices())
def test_a_scale_is_minimal_and_fits_bfloat16(matrix):
    scale = quantize(matrix).scale
    assert scale.dtype == np.float32
    assert not (scale.view(np.uint32) & 0xFFFF).any()
    least = in_blocks(matrix) / LARGEST
    assert (scale >= least * (1 - 2**-23)).all()
    assert (scale <= least * (1 + 2**-7)).all()


@given(matrix=matrices())
def test_transposed_matrices_are_quantized_alike(matrix):
    made, other = quantize(matrix), quantize(matrix.T.copy(), transposed=True)
    assert np.array_equal(other.weight.T, made.weight)
    assert np.array_equal(other.scale.T, made.scale)
    assert np.array_equal(other[:].T, made[:])


@given(matrix=matrices(), block=st.integers(0, 3))
def test_a_block_does_not_depend_on_the_others(matrix, block):
    rows = slice(block * GROUP, (block + 1) * GROUP)
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
def test_a_block_of_zeros_stays_zero(transposed):
    matrix = array("matrix", 150, 3)
    matrix[64:128, 1] = 0
    made = quantize(matrix.T.copy() if transposed else matrix, transposed=transposed)
    rounded = made[:].T if transposed else made[:]
    assert not rounded[64:128, 1].any()
    assert rounded[[0, 140], 1].all()


@pytest.mark.parametrize("size", [1e-45, 1e-40, 2e-38, 1e-36, 1e-30, 1e30, 3e38])
def test_the_smallest_and_largest_numbers_can_be_quantized(size):
    matrix = np.array([size, -size, size / 2, 0], np.float32)[:, None]
    made = quantize(matrix)
    rounded = made[:].astype(np.float64)
    assert abs(rounded - matrix).max() <= max(ALMOST_NOTHING, 0.50001 * made.scale.item())


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("damage", DAMAGE)
def test_nan_and_inf_spoil_only_the_scale_of_their_block(damage, transposed):
    matrix = array("matrix", 150, 3)
    matrix.view(np.uint32)[70, 1] = DAMAGE[damage]
    made = quantize(matrix.T.copy() if transposed else matrix, transposed=transposed)
    scale = made.scale.T if transposed else made.scale
    assert np.argwhere(~np.isfinite(scale)).tolist() == [[1, 1]]


@given(matrix=matrices())
def test_quantizing_again_changes_no_block_that_uses_the_full_range(matrix):
    made = quantize(matrix)
    again = quantize(made[:])
    full = in_blocks(made.weight) == LARGEST
    assert np.array_equal(again.scale[full], made.scale[full])
    same = of_each_weight(full, len(matrix)) == 1
    assert np.array_equal(again.weight[same], made.weight[same])


@given(matrix=matrices(), ends=st.lists(st.integers(0, 220), min_size=2, max_size=2).map(sorted))
@pytest.mark.parametrize("transposed", [True, False])
def test_a_slice_of_rows_equals_the_slice_of_the_whole(matrix, ends, transposed):
    made = quantize(matrix, transposed=transposed)
    whole, part = made[:], made[slice(*ends)]
    assert whole.dtype == part.dtype == np.float32
    assert np.array_equal(part, whole[slice(*ends)])


def test_rows_stand_for_the_weights_times_the_scales_of_their_blocks():
    weight = np.array([[1, -2], [127, 0], [-127, 5]], np.int8).repeat(GROUP, axis=0)
    scale = np.array([[1, 2], [0.5, 4], [8, 0.25]], np.float32)
    expected = np.array([[1, -4], [63.5, 0], [-1016, 1.25]], np.float32).repeat(GROUP, axis=0)
    assert np.array_equal(Int8Rows(weight, scale, False)[:], expected)
    assert np.array_equal(Int8Rows(weight.T, scale.T, True)[:], expected.T)


# --- products ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize("n_in", [12, 64, 100, 192])
@pytest.mark.parametrize("transposed", [True, False])
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
@pytest.mark.parametrize("x_sign", [1, -1])
@pytest.mark.parametrize("w_sign", [1, -1])
def test_the_largest_products_do_not_overflow(int8_ops, rows, n_in, x_sign, w_sign):
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


def as_float16(x):
    with np.errstate(over="ignore"):
        return np.asarray(x, np.float32).astype(np.float16)


def assert_same_numbers(one, other):
    """Compare float16 arrays: zeros have signs, and NaNs may differ."""
    assert np.array_equal(one, other, equal_nan=True)
    real = ~np.isnan(other)
    assert np.array_equal(np.signbit(one)[real], np.signbit(other)[real])


def stored(ops, x, past=0):
    """Store x (B, H, S, D) as keys and -x as values; return both from the panels of the cache."""
    B, H, S, D = x.shape
    keys, values = (layers[0] for layers in ops.new_cache(1, B, H, past + S, D))
    ops.store(x, -x, keys, values, np.full(B, past), np.full(B, S))
    keys = keys.swapaxes(-1, -2).reshape(B, H, -1, D)
    values = values.reshape(B, H, keys.shape[2], -1)[..., :D]
    return keys[:, :, past : past + S], values[:, :, past : past + S]


def test_keys_and_values_are_stored_as_float16_with_ties_rounded_to_even(compiled):
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
        for given_, found in zip((x, -x), stored(compiled, x), strict=True):
            assert found.dtype == np.float16
            assert_same_numbers(found, as_float16(given_))


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
    found, expected = (
        int8_ops.attend(q, *cached(int8_ops, *given_), 0.25, visible)
        for given_ in ((keys, values), rounded)
    )
    assert np.array_equal(found, expected)


# --- the model -----------------------------------------------------------------------------------

VOCAB_SIZE = 290


def assert_alike(logits, expected, most=1e-2):
    """Compare loosely: a float32 difference may change the rounding to 16 bits."""
    assert logits.shape == expected.shape
    assert abs(logits - expected).max() <= most * expected.std()


SIZES = [
    {},
    {"n_embd": 96, "n_head": 2},
    {"n_inner": 100, "activation_function": "gelu"},
    {"tie_word_embeddings": False},
]


@pytest.mark.parametrize("changes", SIZES)
def test_compiled_logits_equal_the_reference(compiled, changes):
    ids = np.arange(160).reshape(2, 80) * 7 % VOCAB_SIZE
    both = (assemble(ops, **changes) for ops in (compiled, NumPyOps("int8")))
    logits, expected = (forward(model, ids) for model in both)
    assert logits.dtype == np.float32
    assert_alike(logits, expected)


@pytest.fixture(scope="module")
def stories():
    """Return texts by the bundled model, as ids with their float32 logits."""
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
    exact, found = log_softmax(expected), log_softmax(logits)
    assert (np.exp(exact) * (exact - found)).sum(axis=-1).mean() <= 1e-3
    second, first = np.partition(expected, -2, axis=-1)[:, -2:].T
    clear = first - second >= np.median(first - second)
    assert (logits.argmax(axis=-1) == expected.argmax(axis=-1))[clear].mean() >= 0.99


@pytest.mark.parametrize("name", ["wte.weight", "h.1.mlp.c_fc.weight", "h.2.attn.c_proj.bias"])
@pytest.mark.parametrize("damage", ["inf", "nan", "the last nan"])
def test_damaged_weights_are_detected(int8_ops, monkeypatch, tmp_path, name, damage):
    monkeypatch.setenv("GPT_CLI_OPS", int8_ops.name)
    folder = write_damaged(tmp_path, name, np.uint32(DAMAGE[damage]).view(np.float32))
    engine = gpt_cli.load(str(folder), dtype="int8")
    with pytest.raises(CheckpointError, match="its weights are damaged"):
        engine.logits([[1, 2, 3]])
    with pytest.raises(CheckpointError, match="its weights are damaged"):
        engine.generate(["a"], max_tokens=2)
