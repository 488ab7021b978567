"""Each compiled operation: compared with NumPy at each level, and with invalid input."""

import ctypes
import gc
import math
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
from checkpoints import CONFIG, filed, make_weights, noise
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import posix

from gpt_cli.errors import CheckpointError, InputError
from gpt_cli.folder.config import GPT2Config
from gpt_cli.folder.tensors import Tensor, aligned_empty
from gpt_cli.gpt2 import checkpoint
from gpt_cli.gpt2.model import forward
from gpt_cli.ops import LayerNorm, Linear, bindings, memory, native_ops
from gpt_cli.ops.int8 import GROUP, LARGEST, Int8Rows, quantize
from gpt_cli.ops.memory import Arena, Workspace, address
from gpt_cli.ops.numpy_ops import ACTIVATIONS, NumPyOps, softmax

pytestmark = pytest.mark.usefixtures("library")

COLUMNS, PARTIAL_SUMS = 32, 16
# Both infinities, and NaNs of several kinds.
NAN_AND_INF = np.uint32(
    [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF]
).view(np.float32)
FLOATS = ["float32", "bfloat16", "float16"]
NUMPY = NumPyOps()

# Around the sizes of vectors, tiles, panels and blocks.
sizes = st.sampled_from([1, 2, 3, 7, 13, 16, 17, 31, 32, 33, 47, 64, 65, 97, 128, 131])
rows_of_x = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 25, 31])
head_sizes = st.sampled_from([8, 16, 17, 31, 32, 33, 47, 64, 80, 97, 128])
seeds = st.integers(0, 10_000)
activations = st.sampled_from([None, *ACTIVATIONS])
at_each_level = settings(max_examples=25)


def array(name: str, *shape: int, seed: int = 0):
    return noise(name, *shape, seed=seed).astype(np.float32)


def matrix_of(dtype, *shape, seed=0):
    """Return a matrix as a checkpoint stores it, for operations with this type of weights."""
    matrix = array("matrix", *shape, seed=seed)
    return matrix if dtype in ("float32", "int8") else filed(matrix, dtype)


def assert_same_bits(found, expected):
    """Compare float32 arrays by their bits; NaNs may differ."""
    assert found.dtype == expected.dtype == np.float32
    assert found.shape == expected.shape
    numbers = ~np.isnan(expected)
    assert np.array_equal(np.isnan(found), ~numbers)
    assert np.array_equal(found[numbers].view(np.uint32), expected[numbers].view(np.uint32))


# --- compared with NumPy in float64 --------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, "int8"])
@given(C=sizes, V=sizes, tokens=st.integers(1, 40), seed=seeds)
@at_each_level
def test_embed(level, native, dtype, C, V, tokens, seed):
    random = np.random.default_rng(seed)
    wte, wpe = matrix_of(dtype, V, C, seed=seed), array("wpe", 9, C, seed=seed)
    ids, positions = random.integers(V, size=(1, tokens)), random.integers(9, size=(1, tokens))
    found = native(dtype).embed(
        native(dtype).place_matrix(wte, transposed=True), wpe, ids, positions
    )
    held = quantize(wte, transposed=True) if dtype == "int8" else wte
    assert_same_bits(found, held[:][ids] + wpe[positions])


def cache_of(ops, keys, values, capacity):
    """Return one layer of a cache that holds keys and values (B, H, S, D)."""
    B, H, S, D = keys.shape
    layer = [layers[0] for layers in ops.new_cache(1, B, H, capacity, D)]
    for each in layer:
        each[...] = np.nan  # unwritten elements must not matter
    ops.store(keys, values, *layer, np.zeros(B, int), np.full(B, S))
    return layer


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@given(
    B=st.integers(1, 3), H=st.integers(1, 3), T=rows_of_x, more=st.integers(0, 70), D=head_sizes,
    seed=seeds,
)  # fmt: skip
@at_each_level
def test_attend(level, native, dtype, B, H, T, more, D, seed):
    ops, S = native(dtype), T + more
    q = array("q", B, H, T, D, seed=seed)
    keys, values = array("keys", B, H, S, D, seed=seed), array("values", B, H, S, D, seed=seed)
    visible = np.random.default_rng(seed).integers(1, S + 1, (B, T))
    found = ops.attend(q, *cache_of(ops, keys, values, S + 40), 0.3, visible)
    if dtype == "int8":
        keys, values = (x.astype(np.float16) for x in (keys, values))
    exact = q.astype(np.float64), keys.astype(np.float64), values.astype(np.float64)
    assert found.dtype == np.float32
    assert abs(found - NUMPY.attend(*exact, 0.3, visible)).max() <= 8e-6


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@given(B=st.integers(1, 3), H=st.integers(1, 3), T=st.integers(0, 40), D=head_sizes, data=st.data())
@at_each_level
def test_store_writes_the_new_tokens_of_each_row_and_nothing_else(
    level, native, dtype, B, H, T, D, data
):
    ops, S = native(dtype), 100
    past = np.array([data.draw(st.integers(0, S - T)) for _ in range(B)])
    lengths = np.array([data.draw(st.integers(0, T)) for _ in range(B)])
    k, v = array("k", B, H, T, D), array("v", B, H, T, D)
    keys, values = (layers[0] for layers in ops.new_cache(1, B, H, S, D))
    keys[...], values[...] = 7, 8
    ops.store(k, v, keys, values, past, lengths)
    by_token = keys.swapaxes(-1, -2).reshape(B, H, -1, D), values.reshape(B, H, 128, -1)
    for stored, new, untouched in zip(by_token, (k, v), (7, 8), strict=True):
        width = stored.shape[-1]
        expected = np.full((B, H, 128, width), untouched, stored.dtype)
        for row in range(B):
            place = slice(past[row], past[row] + lengths[row])
            expected[row, :, place] = 0  # values are padded with zeros to whole panels
            expected[row, :, place, :D] = new[row, :, : lengths[row]]
        assert np.array_equal(stored, expected)


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
        return [native("float32").exp(x), *(activated(native, x, name) for name in ACTIVATIONS)]

    expected, found = (computed(each) for each in (bindings.levels()[0], level))
    for one_kind, other in zip(found, expected, strict=True):
        assert_same_bits(one_kind, other)


# --- the order of sums ---------------------------------------------------------------------------


def multiply_add(x, y, z):
    """Return x * y + z in float32, rounded once.

    The product is exact in float64. If the sum is not, it is rounded to odd: then rounding it to
    float32 gives the result of a single rounding (S. Boldo and G. Melquiond, 2008).
    """
    product, z = np.multiply(x, y, dtype=np.float64), np.asarray(z, np.float64)
    total = product + z
    of_z = total - product
    error = (product - (total - of_z)) + (z - of_z)
    even = total.view(np.int64) & 1 == 0
    odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where((error != 0) & even, odd, total).astype(np.float32)


def chain(x, matrix, start):
    """Return start (rows, n) + x (rows, K) @ matrix (K, n), added in order along K."""
    for k in range(len(matrix)):
        start = multiply_add(x[:, k, None], matrix[k], start)
    return start


def activated(native, x, activation):
    """Return the activation of each number (rows, n), by a product with 1."""
    ops = native("float32")
    one = Linear(ops.place_matrix(np.eye(1, dtype=np.float32)))
    return ops.linear(x.reshape(-1, 1), one, activation).reshape(x.shape)


def sum_of(partial):
    """Return the sum of PARTIAL_SUMS numbers, added as a tree."""
    half = PARTIAL_SUMS // 2
    while half:
        partial = partial[:half] + partial[half : 2 * half]
        half //= 2
    return partial[0]


def filled_up(row):
    """Split a row into pieces of PARTIAL_SUMS numbers, padded with zeros."""
    return np.append(row, np.zeros(-len(row) % PARTIAL_SUMS, np.float32)).reshape(-1, PARTIAL_SUMS)


def added_up(row):
    """Return the sum of a row in the order of the library."""
    return sum_of(sum(filled_up(row), np.zeros(PARTIAL_SUMS, np.float32)))


@pytest.mark.parametrize("dtype", FLOATS)
@given(
    rows=rows_of_x, n_in=sizes, n_out=sizes, activation=activations, has_bias=st.booleans(),
    transposed=st.booleans(), seed=seeds,
)  # fmt: skip
@at_each_level
def test_linear_is_a_chain_of_multiply_adds(
    level, native, dtype, rows, n_in, n_out, activation, has_bias, transposed, seed
):
    ops, x = native(dtype), array("x", rows, n_in, seed=seed)
    stored = matrix_of(dtype, *((n_out, n_in) if transposed else (n_in, n_out)), seed=seed)
    bias = array("bias", n_out, seed=seed) if has_bias else None
    start = np.broadcast_to(np.zeros(n_out, np.float32) if bias is None else bias, (rows, n_out))
    w = Linear(ops.place_matrix(stored, transposed=transposed), bias)
    sums = chain(x, stored[:].T if transposed else stored[:], start)
    assert_same_bits(ops.linear(x, w, activation), activated(native, sums, activation))


@pytest.mark.parametrize("dtype", FLOATS)
@given(
    rows=st.integers(45, 75), n_in=st.sampled_from([255, 256, 257, 600]), n_out=sizes,
    activation=activations, has_bias=st.booleans(), seed=seeds,
)  # fmt: skip
@settings(max_examples=10)
def test_many_rows_have_the_bits_of_single_rows(
    level, native, dtype, rows, n_in, n_out, activation, has_bias, seed
):
    ops, x = native(dtype), array("x", rows, n_in, seed=seed)
    bias = array("bias", n_out, seed=seed) if has_bias else None
    w = Linear(ops.place_matrix(matrix_of(dtype, n_in, n_out, seed=seed)), bias)
    together = ops.linear(x, w, activation)
    for row, y in zip(x, together, strict=True):
        assert_same_bits(y, ops.linear(row[None], w, activation)[0])


@given(
    rows=rows_of_x, n_in=sizes, n_out=sizes, activation=activations, has_bias=st.booleans(),
    seed=seeds,
)  # fmt: skip
@at_each_level
def test_linear_with_int8_weights_is_a_chain_over_blocks(
    level, native, rows, n_in, n_out, activation, has_bias, seed
):
    ops, x = native("int8"), array("x", rows, n_in, seed=seed)
    made = quantize(array("matrix", n_in, n_out, seed=seed))
    bias = array("bias", n_out, seed=seed) if has_bias else None
    found = ops.linear(x, Linear(ops.place_matrix(made), bias), activation)
    most, largest = np.float32(32639), abs(x).max(axis=-1, keepdims=True)
    whole = np.rint(x.astype(np.float64) * (most / largest)).astype(np.int64)
    total = np.zeros((rows, n_out), np.float32)
    for place, scale in enumerate(made.scale):
        block = slice(place * GROUP, place * GROUP + GROUP)
        sums = whole[:, block] @ made.weight[block].astype(np.int64)
        total = multiply_add(sums.astype(np.float32), scale, total)
    start = np.float32(0) if bias is None else bias
    total = multiply_add(total, largest / most, start)
    assert_same_bits(found, activated(native, total, activation))


@given(rows=rows_of_x, C=st.integers(1, 200), seed=seeds)
@at_each_level
def test_layer_norm_adds_in_a_fixed_order(level, native, rows, C, seed):
    x, weight, bias = array("x", rows, C, seed=seed), array("weight", C), array("bias", C)
    found = native("float32").layer_norm(x, LayerNorm(weight, bias, 1e-5))
    for row, y in zip(x, found, strict=True):
        centred = row - added_up(row) / np.float32(C)
        squares = np.zeros(PARTIAL_SUMS, np.float32)
        for piece in filled_up(centred):
            squares = multiply_add(piece, piece, squares)
        deviation = np.sqrt(sum_of(squares) / np.float32(C) + np.float32(1e-5))
        assert_same_bits(y, multiply_add(centred * (np.float32(1) / deviation), weight, bias))


@given(S=st.integers(1, 100), D=head_sizes, seed=seeds)
@at_each_level
def test_attention_adds_in_a_fixed_order(level, native, S, D, seed):
    ops, q = native("float32"), array("q", 1, 1, 1, D, seed=seed)
    keys, values = (array(name, 1, 1, S, D, seed=seed) for name in ("keys", "values"))
    found = ops.attend(q, *cache_of(ops, keys, values, S), 0.3, np.array([[S]]))[0, 0]
    scores = chain(q[0, 0], keys[0, 0].T, np.zeros((1, S), np.float32)) * np.float32(0.3)
    weights = ops.exp(scores - scores.max())
    mixed = chain(weights, values[0, 0], np.zeros((1, D), np.float32))
    assert_same_bits(found, mixed / added_up(weights[0]))


@given(rows=rows_of_x, n=st.integers(1, 1000), scale=st.sampled_from([1, 20]), seed=seeds)
@at_each_level
def test_log_normalizer_adds_in_a_fixed_order(level, native, rows, n, scale, seed):
    ops, logits = native("float32"), scale * array("logits", rows, n, seed=seed)
    for row, found in zip(logits, ops.log_normalizer(logits), strict=True):
        weights, sums = ops.exp(row - row.max()), np.zeros(PARTIAL_SUMS)
        for start in range(0, n, 256):
            sums += sum(filled_up(weights[start : start + 256]), np.zeros(PARTIAL_SUMS, np.float32))
        assert abs(found - (float(row.max()) + math.log(sum_of(sums)))) <= 1e-15 * max(1, found)


@given(rows=rows_of_x, n=st.integers(1, 1000), scale=st.sampled_from([1, 20]), seed=seeds)
@at_each_level
def test_cumulative_counts_are_those_of_the_weights(level, native, rows, n, scale, seed):
    ops, logits = native("float32"), scale * array("logits", rows, n + 3, seed=seed)[:, :n]
    found = ops.cumulative_counts(logits)
    weights = ops.exp(logits - logits.max(axis=-1, keepdims=True)).astype(np.float64)
    counts = 1 + np.floor(weights * 2**30).astype(np.int64)
    assert np.array_equal(found, np.cumsum(counts, axis=-1))


# --- parts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("shape", [(768, 768), (768, 2304), (3072, 768), (768, 3072)])
def test_a_matrix_has_parts_for_all_threads_and_none_that_is_too_small(
    library, native, dtype, shape
):
    packed = bindings.Packed(*shape, dtype, Arena())
    (panels, *_), bytes_of_one = packed.panels.shape, packed.panels.strides[0]
    call = bindings.LinearRows(w=packed.struct)
    for threads in range(2, 65):
        ranges = library.gpt2_linear_ranges(ctypes.byref(call), threads)
        least = -(-min(256 * 1024, panels * bytes_of_one // (2 * threads)) // bytes_of_one)
        assert min(threads, panels) <= ranges <= panels
        assert (ranges - 1) * least < panels  # all but the last have at least this many panels


# --- NaN and infinity ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, "int8"])
@pytest.mark.parametrize("damage", NAN_AND_INF)
@given(rows=rows_of_x, n_in=sizes, activation=activations, data=st.data())
@settings(max_examples=15)
def test_nan_and_inf_spoil_only_their_row_as_in_numpy(
    native, dtype, damage, rows, n_in, activation, data
):
    ops, x = native(dtype), array("x", rows, n_in)
    stored, bias = matrix_of(dtype, n_in, 40), array("bias", 40)
    w = Linear(ops.place_matrix(stored), bias)
    row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, n_in - 1))
    before = ops.linear(x, w, activation)
    x[row, column] = damage
    found = ops.linear(x, w, activation)
    others = np.arange(rows) != row
    assert_same_bits(found[others], before[others])
    with np.errstate(all="ignore"):
        expected = NUMPY.linear(x.astype(np.float64), Linear(stored[:], bias), activation)
    finite = np.isfinite(found[row])
    if dtype == "int8" and activation is None:
        assert not finite.any()
    elif dtype != "int8":
        assert np.array_equal(finite, np.isfinite(expected[row]))


@pytest.mark.parametrize("damage", [np.nan, np.inf, -np.inf])
@given(rows=rows_of_x, C=st.integers(2, 100), data=st.data())
@settings(max_examples=15)
def test_nan_and_inf_spoil_only_their_row_of_a_norm_or_normalizer(native, damage, rows, C, data):
    ops, x = native("float32"), array("x", rows, C)
    ln = LayerNorm(array("weight", C), array("bias", C), 1e-5)
    row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, C - 1))
    before, normalizer = ops.layer_norm(x, ln), ops.log_normalizer(x)
    x[row, column] = damage
    found, others = ops.layer_norm(x, ln), np.arange(rows) != row
    assert np.isnan(found[row]).all()
    assert_same_bits(found[others], before[others])
    spoilt = ops.log_normalizer(x)
    assert np.isfinite(spoilt[row]) == (damage == -np.inf)
    assert np.array_equal(spoilt[others], normalizer[others])


@pytest.mark.parametrize("where", ["q", "keys"])
@pytest.mark.parametrize("damage", [np.nan, np.inf, -np.inf])
@given(T=rows_of_x, D=head_sizes, data=st.data())
@settings(max_examples=15)
def test_nan_and_inf_spoil_only_the_queries_that_see_them(native, where, damage, T, D, data):
    ops = native("float32")
    given_ = {name: array(name, 2, 2, T, D) for name in ("q", "keys", "values")}
    visible = np.tile(np.arange(1, T + 1), (2, 1))

    def attended(q, keys, values):
        return ops.attend(q, *cache_of(ops, keys, values, T), 0.3, visible)

    before = attended(**given_)
    t, d = data.draw(st.integers(0, T - 1)), data.draw(st.integers(0, D - 1))
    given_[where][1, 0, t, d] = damage
    found = attended(**given_)
    with np.errstate(all="ignore"):
        scores = given_["q"] @ given_["keys"].swapaxes(-1, -2)
        scores = np.where(np.arange(T) < visible[:, None, :, None], scores, -np.inf)
        expected = softmax(scores) @ given_["values"]
    assert np.array_equal(np.isfinite(found), np.isfinite(expected))
    assert_same_bits(found[0], before[0])
    assert_same_bits(found[1, 1], before[1, 1])
    assert_same_bits(found[1, 0, :t], before[1, 0, :t])


# --- other array layouts -------------------------------------------------------------------------


def misaligned(x):
    """Return a copy of an array at an odd address."""
    room = np.empty(x.nbytes + 1, np.uint8)
    moved = room[1:].view(x.dtype).reshape(x.shape)
    moved[...] = x
    assert not moved.flags.aligned
    return moved


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
        for each in cache:
            each[...] = 0
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

    for found, expected in zip(results(laid), results(np.copy), strict=True):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("piece", [1, 100, 5000, 10**6])
@pytest.mark.parametrize("kind", ["float32", "int8", "rounded"])
def test_packing_in_pieces_equals_packing_at_once(native, monkeypatch, kind, transposed, piece):
    ops, matrix = native("float32" if kind == "float32" else "int8"), array("matrix", 131, 97)
    whole = ops.place_matrix(matrix, transposed=transposed)
    if kind == "rounded":
        matrix = quantize(matrix, transposed=transposed)
    monkeypatch.setattr(native_ops, "_PIECE", piece)
    again = ops.place_matrix(matrix, transposed=transposed)
    assert (again.n_in, again.n_out) == ((97, 131) if transposed else (131, 97))
    assert np.array_equal(again.panels.view(np.uint8), whole.panels.view(np.uint8))


# C reads 256 kB at a time. These sizes end a piece at a row and within one, and need several.
@pytest.mark.parametrize(
    ("n_rows", "length"), [(1, 1), (131, 97), (1030, 512), (300, 1001), (70, 70_000)]
)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [*FLOATS, "int8"])
def test_packing_from_a_file_equals_packing_from_memory(native, dtype, transposed, n_rows, length):
    matrix = array("matrix", n_rows, length)
    if dtype == "int8":
        made = quantize(matrix, transposed=transposed)
        stored = Int8Rows(filed(made.weight, "int8"), made.scale, transposed)
        expected = native(dtype).place_matrix(made, transposed=transposed).panels
    else:
        stored = filed(matrix, dtype)
        expected = native("float32").place_matrix(stored[:], transposed=transposed).panels
    found = native(dtype).place_matrix(stored, transposed=transposed).panels
    if dtype == "bfloat16":
        found = (found.astype(np.uint32) << 16).view(np.float32)
    elif dtype == "float16":
        found = found.view(np.float16).astype(np.float32)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("dtype", [*FLOATS, "int8"])
def test_a_truncated_file_is_rejected(native, dtype):
    stored = filed(np.ones((3, 4), np.int8 if dtype == "int8" else np.float32), dtype)
    longer = replace(stored, shape=(4, 4))
    rows = Int8Rows(longer, np.ones((1, 4), np.float32), False) if dtype == "int8" else longer
    with pytest.raises(CheckpointError, match="changed while it was read"):
        native(dtype).place_matrix(rows)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("wrong", ["weight", "scale"])
@pytest.mark.parametrize("in_file", [False, True])
def test_int8_in_another_format_is_rejected(native, transposed, wrong, in_file):
    made = quantize(array("matrix", 70, 40), transposed=transposed)
    if wrong == "weight":
        made.weight[69, 39] = -128  # some levels cannot negate it
    else:
        made.scale[-1, -1] = 0.0117999
    weight = filed(made.weight, "int8") if in_file else made.weight
    with pytest.raises(CheckpointError, match="int8 weights must be from -127 to 127"):
        native("int8").place_matrix(Int8Rows(weight, made.scale, transposed), transposed=transposed)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_tensor_in_int8_without_scales_is_rejected(native, transposed):
    stored = filed(np.ones((70, 40), np.int8), "int8")
    with pytest.raises(ValueError, match="an int8 matrix needs scales"):
        native("int8").place_matrix(stored, transposed=transposed)
    matrix = bindings.Packed(70, 40, "int8", Arena())
    call = bindings.PackFile(to=matrix.struct, transposed=transposed)  # no file, no scales
    assert call.run(1) == native_ops._INVALID_INT8


def test_matrices_that_other_ops_placed_or_of_an_unreadable_file_are_rejected(native, tmp_path):
    class Unreadable(Tensor):
        @contextmanager
        def opened(self):
            with (tmp_path / "written").open("wb", buffering=0) as file:
                yield file, 0

    ops, placed = native("float32"), native("int8").place_matrix(array("matrix", 40, 40))
    with pytest.raises(ValueError, match="the weight cannot be"):
        ops.linear(array("x", 1, 40), Linear(placed))
    with pytest.raises(ValueError, match="rows and columns"):
        ops.place_matrix(np.empty((0, 4), np.float32))
    with pytest.raises(OSError, match=r"Bad file descriptor: .*written"):
        ops.place_matrix(Unreadable(tmp_path, None, 0, "F32", (2, 2)))


# --- a cache in float16 --------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2])
def test_blocks_of_a_cache_are_converted_as_numpy_does(level, native, monkeypatch, threads):
    draft_ops = native("float32").draft_ops()
    monkeypatch.setattr(draft_ops, "threads", threads)
    floats = np.arange(3 * 2 * 2 * 3 * 30 * COLUMNS, dtype=np.uint32) * np.uint32(1_491_101)
    source = floats.view(np.float32).reshape(3, 2, 2, 3, 30, COLUMNS)  # enough for two threads
    source[0, 0, 0, 1, 0, :6] = np.nan, np.inf, -np.inf, 65519, 65520, -0.0
    made = np.zeros(source.shape, np.float16)
    draft_ops.copyto(made[:, :, :, 1:], source[:, :, :, 1:])
    with np.errstate(all="ignore"):
        expected = source.astype(np.float16)
    assert not made[:, :, :, 0].any()
    missing = np.isnan(expected[:, :, :, 1:])
    assert np.array_equal(np.isnan(made[:, :, :, 1:]), missing)
    bits = [x[:, :, :, 1:][~missing].view(np.uint16) for x in (made, expected)]
    assert np.array_equal(*bits)


def test_the_first_rows_of_a_cache_become_float16(native):
    wide = np.arange(2 * 3 * 2 * 2 * 3 * COLUMNS, dtype=np.float32).reshape(2, 3, 2, 2, 3, COLUMNS)
    narrow = np.zeros(wide.shape, np.float16)
    native("float32").draft_ops().copyto(narrow[:, :2], wide[:, :2])
    assert np.array_equal(narrow[:, :2], wide[:, :2].astype(np.float16))
    assert not narrow[:, 2].any()


def test_blocks_of_a_cache_are_checked(native):
    draft_ops = native("float32").draft_ops()
    wide, narrow = (
        np.zeros((3, 2, 2, 4, 5, COLUMNS), np.float32),
        np.zeros((3, 2, 2, 4, 5, COLUMNS), np.float16),
    )
    for to, blocks in (
        (wide, wide),
        (narrow, narrow),
        (narrow[:, :, :, 1:], wide),
        (narrow[:, :, :1], wide[:, :, :1]),
        (narrow[:, :, :, :, 1:], wide[:, :, :, :, 1:]),
        (narrow[..., 1:], wide[..., 1:]),
        (narrow[:, :, :, ::2], wide[:, :, :, ::2]),
        (narrow[:, :, :, 2:], wide[:, :, :, :2].copy()),
        (np.zeros((1, 1, 1, 1, 3, 5), np.float16), np.zeros((1, 1, 1, 1, 3, 5), np.float32)),
    ):
        with pytest.raises(ValueError, match="a cache cannot be float"):
            draft_ops.copyto(to, blocks)


# --- int8 from matrices in memory ----------------------------------------------------------------


def quantized(ops, matrix, transposed=False):
    return ops.draft_ops().quantize(ops.place_matrix(matrix, transposed=transposed))


def assert_quantized_as_packed(native, dtype, matrix, transposed=False):
    matrix = matrix if dtype == "float32" else filed(matrix, dtype)
    expected = native("int8").place_matrix(matrix[:], transposed=transposed)
    found = quantized(native(dtype), matrix, transposed)
    assert (found.n_in, found.n_out, found.format) == (expected.n_in, expected.n_out, "int8")
    assert np.array_equal(found.panels, expected.panels)


@pytest.mark.parametrize("dtype", FLOATS)
@given(
    n_in=sizes, n_out=sizes, transposed=st.booleans(), exponent=st.integers(-150, 122),
    threads=st.integers(1, 3), seed=seeds,
)  # fmt: skip
@at_each_level
def test_quantizing_in_memory_equals_packing(
    level, native, dtype, n_in, n_out, transposed, exponent, threads, seed
):
    random = np.random.default_rng(seed)
    exponent = exponent // 13 if dtype == "float16" else exponent
    matrix = array("matrix", n_in, n_out, seed=seed) ** 3 * np.float32(2) ** exponent
    matrix[random.random(matrix.shape) < 0.2] = -0.0
    matrix[:, random.integers(n_out, size=n_out // 9)] = 0
    matrix[:GROUP, n_out // 2] = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native(dtype), "threads", threads)
        matrix = matrix.T.copy() if transposed else matrix
        assert_quantized_as_packed(native, dtype, matrix, transposed)


@pytest.mark.parametrize("dtype", FLOATS)
def test_numbers_of_every_size_are_quantized_as_they_are_packed(level, native, dtype):
    if dtype == "float16":
        numbers = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    else:
        numbers = (np.arange(0x7F80, dtype=np.uint32) << 16).view(np.float32)
    if dtype == "float32":
        numbers = np.concatenate([numbers, np.nextafter(numbers, np.float32(0))])
    for order in (numbers, -np.random.default_rng(1).permutation(numbers)):
        assert_quantized_as_packed(native, dtype, np.resize(order, (384, 170)))


def test_ties_are_quantized_as_they_are_packed(level, native):
    matrix = np.resize(np.arange(-126.5, 127), (GROUP, 130))
    matrix[0] = LARGEST
    matrix *= 2.0 ** np.arange(-142, 118, 2)
    assert_quantized_as_packed(native, "float32", matrix.astype(np.float32))


def test_int8_is_not_quantized_again(native):
    placed = native("int8").place_matrix(array("matrix", 40, 40))
    with pytest.raises(ValueError, match="the matrix cannot be"):
        native("float32").draft_ops().quantize(placed)


@pytest.mark.parametrize("damage", NAN_AND_INF)
def test_a_damaged_weight_changes_only_its_block_in_int8(level, native, damage):
    matrix = array("matrix", 150, 70)
    expected = quantized(native("float32"), matrix).panels
    matrix[70, 40] = damage
    found = quantized(native("float32"), matrix).panels
    panels, blocks, _ = found.shape
    same = found == expected
    weights = same[..., : GROUP * COLUMNS].reshape(panels, blocks, GROUP // 4, COLUMNS, 4)
    scales = same[..., GROUP * COLUMNS :].reshape(panels, blocks, COLUMNS, 2)
    weights[1, 1, :, 40 % COLUMNS] = scales[1, 1, 40 % COLUMNS] = True
    assert weights.all()
    assert scales.all()


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_empty_inputs_give_empty_outputs(native, dtype):
    ops, matrix = native(dtype), array("matrix", 8, 20)
    w, x = Linear(ops.place_matrix(matrix)), np.empty((0, 8), np.float32)
    assert ops.linear(x, w).shape == (0, 20)
    assert ops.linear(x[None], w, "gelu").shape == (1, 0, 20)
    assert ops.layer_norm(x, LayerNorm(matrix[:, 0], matrix[:, 1], 1e-5)).shape == (0, 8)
    assert ops.exp(x).shape == (0, 8)
    assert ops.log_normalizer(x).shape == (0,)
    assert (
        ops.embed(w.weight, matrix[:, :8], np.empty((2, 0), int), np.empty((1, 0), int)).size == 0
    )
    for B, T in ((0, 3), (2, 0)):
        heads, counts = np.empty((B, 2, T, 8), np.float32), np.zeros(B, int)
        cache = [layers[0] for layers in ops.new_cache(1, B, 2, 5, 8)]
        ops.store(heads, heads, *cache, counts, counts)
        assert ops.attend(heads, *cache, 1.0, np.ones((B, T), int)).shape == heads.shape


# --- invalid arguments ---------------------------------------------------------------------------


@pytest.fixture
def parts(native):
    """Return arguments of the operations with valid shapes."""
    ops = native("float32")
    heads = array("heads", 2, 3, 4, 8)
    cache = [layers[0] for layers in ops.new_cache(1, 2, 3, 40, 8)]
    ops.store(heads, heads, *cache, np.array([0, 0]), np.array([4, 4]))
    return {
        "ops": ops, "x": array("x", 2, 12), "w": ops.place_matrix(array("matrix", 12, 20)),
        "bias": array("bias", 20), "wpe": array("wpe", 6, 12), "heads": heads, "cache": cache,
    }  # fmt: skip


def test_linear_rejects_wrong_shapes(parts):
    for x, bias, activation in (
        ((2, 11), (20,), None),
        ((2, 13), (20,), None),
        ((2, 12), (19,), None),
        ((2, 12), (1, 20), None),
        ((2, 12), (20,), "tan"),
    ):
        with pytest.raises(ValueError, match=r"cannot be|not in tuple"):
            parts["ops"].linear(array("x", *x), Linear(parts["w"], array("b", *bias)), activation)


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


@pytest.mark.parametrize(("id", "position"), [(20, 0), (-1, 0), (0, 6), (0, -1), (2**40, 0)])
@pytest.mark.parametrize("dtype", [*FLOATS, "int8"])
def test_an_id_or_position_out_of_range_is_rejected(native, parts, dtype, id, position):
    ops, wte = native(dtype), native(dtype).place_matrix(matrix_of(dtype, 12, 20))
    with pytest.raises(IndexError, match="an id or a position is out of range"):
        ops.embed(wte, parts["wpe"], np.array([[0, id]]), np.array([[0, position]]))


def test_store_and_attend_reject_tokens_beyond_the_capacity(parts):
    ops, heads, cache = parts["ops"], parts["heads"], parts["cache"]
    before = [each.copy() for each in cache]
    for past, lengths in (
        ([61, 0], [4, 0]),
        ([0, 65], [0, 0]),
        ([-1, 0], [1, 1]),
        ([0, 0], [4, 5]),  # of 4
        ([0, 0], [-1, 1]),
        ([2**62, 0], [4, 4]),
    ):
        with pytest.raises(IndexError, match="the cache has room for 64 tokens"):
            ops.store(heads, heads, *cache, np.array(past), np.array(lengths))
        for each, other in zip(before, cache, strict=True):
            assert np.array_equal(each, other, equal_nan=True)
    for visible in (0, -1, 65, 2**62):
        seen = np.ones((2, 4), int)
        seen[1, 2] = visible
        with pytest.raises(IndexError, match="visible must be from 1 to 64 keys"):
            ops.attend(heads, *cache, 1.0, seen)


def test_keys_and_values_of_wrong_shapes_are_rejected(parts):
    ops, heads, (keys, values) = parts["ops"], parts["heads"], parts["cache"]
    none, four, seen = np.array([0, 0]), np.array([4, 4]), np.ones((2, 4), int)
    wrong_caches = [
        (keys[:1], values[:1]),
        (keys[:, :2], values[:, :2]),
        (keys[..., :4, :], values),
        (keys, values[..., :16]),
        (keys[:, :, :1], values),
        (values, keys),
        (np.zeros_like(keys, np.float16), values),
        (keys, np.zeros_like(values, np.float16)),
        (np.asfortranarray(keys), values),
        (keys[..., ::-1], values),
        (keys, values[:, ::-1]),
    ]
    for cache in wrong_caches:
        with pytest.raises(ValueError, match="cannot be"):
            ops.store(heads, heads, *cache, none, four)
        with pytest.raises(ValueError, match="cannot be"):
            ops.attend(heads, *cache, 1.0, seen)
    for past, lengths in ((none[:1], four), (none, four[None]), (none, four[:1])):
        with pytest.raises(ValueError, match="cannot be"):
            ops.store(heads, heads, *parts["cache"], past, lengths)
    for v in (heads[:1], heads[:, :2], heads[:, :, :3], heads[..., :4], heads[..., None]):
        with pytest.raises(ValueError, match=r"cannot be|unpack"):
            ops.store(heads, v, *parts["cache"], none, four)
    for visible in (seen[:1], seen[:, :3], seen[0], seen[..., None]):
        with pytest.raises(ValueError, match="cannot be"):
            ops.attend(heads, *parts["cache"], 1.0, visible)
    for q in (heads[..., :4], heads[:1], heads[:, :2], heads[0]):
        with pytest.raises(ValueError, match=r"cannot be|unpack"):
            ops.attend(q, *parts["cache"], 1.0, seen)


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
        assert native_ops.NativeOps().level == native_ops.Int8NativeOps().level == name


def test_an_unknown_or_unsupported_level_is_rejected(variable):
    variable("abacus")
    with pytest.raises(InputError, match=r"GPT_CLI_LEVEL must be one of .*, not 'abacus'"):
        native_ops.NativeOps()
    for name in {*bindings.LEVELS} - {*bindings.levels()}:
        variable(name)
        with pytest.raises(InputError, match=f"GPT_CLI_LEVEL={name}: this processor"):
            native_ops.NativeOps()


# --- memory --------------------------------------------------------------------------------------

BYTE = np.dtype("u1")
LARGE = 200_000  # bytes, enough for a workspace to keep


def test_address_is_that_of_the_first_element():
    x = np.arange(60.0).reshape(3, 4, 5)
    views = [x, x[1], x[:, ::-1], x[..., 2], x.T, x[:0], x[1, 2, 3], np.float32(1), misaligned(x)]
    for view in map(np.asarray, views):
        assert address(view) == view.ctypes.data


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (1000, 7)])
def test_aligned_empty_starts_on_a_cache_line(shape):
    made = aligned_empty(shape, np.dtype("f4"))
    assert (made.shape, made.dtype) == (shape, np.float32)
    assert made.size == 0 or address(made) % 64 == 0


@pytest.mark.parametrize("cycle", [False, True])
def test_workspace_reuses_memory_also_from_reference_cycles(cycle):
    workspace, held = Workspace(), []
    held += [held, workspace.empty((LARGE,), BYTE)] if cycle else [workspace.empty((LARGE,), BYTE)]
    place = address(held[-1])
    del held
    if cycle:
        gc.collect()
    assert address(workspace.empty((LARGE - 1,), BYTE)) == place


def test_workspace_keeps_memory_in_use_while_a_view_is_alive():
    workspace = Workspace()
    first = workspace.empty((LARGE // 4,), np.dtype("f4"))
    place, view = address(first), first[5:].reshape(-1, 5).T[1:3]
    del first
    second = workspace.empty((LARGE,), BYTE)
    assert address(second) != place
    del view
    assert address(workspace.empty((LARGE,), BYTE)) == place


def test_workspace_keeps_no_more_than_its_peak_use():
    workspace = Workspace()
    for size in range(LARGE, 2 * LARGE, LARGE // 20):
        workspace.empty((size,), BYTE)
    together = [workspace.empty((size,), BYTE) for size in (2 * LARGE, LARGE, 3 * LARGE)]
    del together
    assert workspace.free_bytes() <= 6 * LARGE


@given(steps=st.lists(st.tuples(st.integers(130_000, 140_000), st.integers(0, 5)), max_size=30))
def test_workspace_hands_out_no_memory_twice(steps):
    workspace, used = Workspace(), []
    for place, (size, freed) in enumerate(steps):
        del used[freed : freed + 1]
        used.append((place, workspace.empty((size,), BYTE)))
        used[-1][1][...] = place % 251
    for place, made in used:
        assert (made == place % 251).all()


def test_workspace_hands_out_no_memory_twice_to_concurrent_threads():
    workspaces = [Workspace()]

    def prepare():
        """Make a workspace whose only large enough buffer comes after smaller ones."""
        workspaces[:] = [Workspace()]
        held = [workspaces[0].empty((size,), BYTE) for size in (LARGE - 9, LARGE - 9, LARGE)]
        del held

    together = Barrier(4, prepare)

    def use(thread):
        try:
            for _ in range(700):
                together.wait()
                made = workspaces[0].empty((LARGE,), BYTE)
                made[0] = thread
                time.sleep(0)
                assert made[0] == thread
        except BaseException:
            together.abort()  # release the other threads
            raise

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(use, range(4)))
    finally:
        sys.setswitchinterval(interval)


# --- threads and processes -----------------------------------------------------------------------


@pytest.fixture(scope="module", params=["float32", "int8"])
def model(native, request):
    """Return a model that is large enough to use several threads."""
    config = CONFIG | {"n_embd": 96, "n_layer": 2}
    weights = make_weights(config)
    return checkpoint.assemble(GPT2Config.from_dict(config), native(request.param), weights)


def texts(count):
    return [np.arange(80)[None] * (text + 3) % 290 for text in range(count)]


def test_several_threads_may_compute_concurrently(model, monkeypatch):
    expected = [forward(model, ids) for ids in texts(6)]
    monkeypatch.setattr(model.ops, "threads", 3)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            found = list(pool.map(lambda ids: forward(model, ids), texts(6)))
            for one, other in zip(found, expected, strict=True):
                assert_same_bits(one, other)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_threads_block_all_signals_but_those_of_their_own_instructions(model, monkeypatch):
    monkeypatch.setattr(model.ops, "threads", 3)
    forward(model, *texts(1))
    own = {"SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"}
    right = 0
    for status in Path("/proc/self/task").glob("*/status"):
        fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines())
        mask = int(fields["SigBlk"], 16)
        names = {each.name for each in signal.Signals if mask >> (each - 1) & 1}
        right += own.isdisjoint(names) and names >= {"SIGINT", "SIGTERM", "SIGHUP", "SIGPIPE"}
    assert right >= 2


def in_a_fork(act):
    """Run a function in a fork of this process, which must succeed."""
    child = os.fork()
    if child == 0:
        code = 8
        try:
            act()
            code = 7
        finally:
            os._exit(code)
    for _ in range(200):
        finished, status = os.waitpid(child, os.WNOHANG)
        if finished:
            assert os.waitstatus_to_exitcode(status) == 7
            return
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("the fork hangs")


# Python warns about a fork of a process with several threads.
forks = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@posix
@forks
@pytest.mark.parametrize("threads", [3, 16, 300])
def test_a_fork_computes_the_same_with_any_number_of_threads(model, monkeypatch, threads):
    (ids,) = texts(1)
    expected = forward(model, ids)
    monkeypatch.setattr(model.ops, "threads", threads)

    def compute():
        for _ in range(3):
            assert_same_bits(forward(model, ids), expected)

    if threads == 3:  # of more, the threads end with the fork
        compute()
    in_a_fork(compute)


@posix
@forks
def test_a_fork_has_its_own_memory():
    workspace = Workspace()
    kept, free = (workspace.empty((LARGE,), BYTE) for _ in range(2))
    kept[...] = 1
    place = address(free)
    del free

    def use():
        kept[...] = 2
        again = workspace.empty((LARGE,), BYTE)
        assert address(again) == place
        again[...] = 2

    ours = workspace.empty((LARGE,), BYTE)
    ours[...] = 3
    del ours
    in_a_fork(use)
    assert (kept == 1).all()
    assert (workspace.empty((LARGE,), BYTE) == 3).all()


@posix
@forks
def test_a_fork_can_allocate_while_another_thread_holds_the_lock():
    workspace, arena = Workspace(), Arena()

    def use():
        workspace.empty((LARGE,), BYTE)[...] = 1
        arena.zeros((LARGE,), BYTE)[...] = 1

    with memory._lock, ThreadPoolExecutor(1) as other:
        # The fork has no thread that could release the lock.
        other.submit(in_a_fork, use).result(timeout=60)
