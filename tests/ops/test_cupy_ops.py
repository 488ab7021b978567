"""The operations on a GPU have the bits of the C library; without a GPU, on `emulated_cuda`."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt_cli.errors import CheckpointError
from gpt_cli.ops import AttentionSteps
from gpt_cli.ops.int8 import quantize
from gpt_cli.ops.numpy_ops import ACTIVATIONS
from gpt_cli.options.request import SamplingParams
from support.emulated_kernels import Card
from support.native_arrays import NAN_AND_INF, activations, array, head_sizes, seeds, sizes
from support.pairs import (
    DEVICES,
    assert_same,
    linear_of,
    norm_of,
    pair_on,
    placed,
    stored,
)

few = settings(max_examples=15)


@pytest.fixture(scope="module", params=DEVICES, ids="-".join)
def pair(request, native):
    device, dtype = request.param
    with pair_on(device, dtype, native(dtype)) as pair:
        yield pair


# --- weights, embedding --------------------------------------------------------------------------


def columns(ops, matrix, V, C):
    """Return all columns of a matrix (C, V), by `embed`."""
    nothing = ops.xp.asarray(np.full((1, C), -0.0, np.float32))
    return ops.embed(matrix, nothing, ops.xp.arange(V)[None], np.zeros((1, V), np.int64))


@given(C=sizes, V=sizes, transposed=st.booleans(), seed=seeds)
@few
def test_every_weight_can_be_read(pair, C, V, transposed, seed):
    rows = array("rows", *((V, C) if transposed else (C, V)), seed=seed)
    pair.assert_same(lambda ops: columns(ops, placed(ops, rows, transposed=transposed), V, C))


@pytest.mark.parametrize("transposed", [False, True])
def test_a_matrix_is_placed_in_pieces(pair, monkeypatch, transposed):
    monkeypatch.setattr(f"{type(pair.gpu).__module__}._PIECE", 3000)
    rows = array("rows", 200, 70)
    C, V = (70, 200) if transposed else (200, 70)
    pair.assert_same(lambda ops: columns(ops, placed(ops, rows, transposed=transposed), V, C))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_an_empty_matrix_is_rejected(pair, shape):
    for ops in (pair.gpu, pair.cpu):
        with pytest.raises(ValueError, match="must have rows and columns"):
            ops.place_matrix(np.zeros(shape, np.float32))


@given(B=st.integers(1, 3), T=st.integers(1, 5), shared=st.booleans(), seed=seeds)
@few
def test_embed(pair, B, T, shared, seed):
    random = np.random.default_rng(seed)
    ids, positions = random.integers(0, 30, (B, T)), random.integers(0, 7, (B, T))
    positions = positions[:1] if shared else positions
    wte, wpe = array("wte", 30, 20, seed=seed), array("wpe", 7, 20, seed=seed)

    def compute(ops):
        matrix = placed(ops, wte, transposed=True)
        return ops.embed(matrix, ops.xp.asarray(wpe), ops.xp.asarray(ids), positions)

    pair.assert_same(compute)


@pytest.mark.parametrize(("id", "position"), [(-1, 0), (30, 0), (0, 7), (0, -1)])
def test_ids_and_positions_out_of_range_give_nan(pair, id, position):
    ops, wpe = pair.gpu, array("wpe", 7, 20)
    wte = placed(ops, array("wte", 30, 20), transposed=True)
    ids = ops.xp.asarray(np.array([[id]]))
    x = ops.embed(wte, ops.xp.asarray(wpe), ids, np.array([[position]]))
    assert np.isnan(ops.to_host(x)).all()


@pytest.mark.parametrize("damage", [None, np.nan, np.inf, -np.inf])
def test_a_matrix_says_whether_it_is_finite(pair, damage):
    rows = array("rows", 70, 30)
    rows[3, 5] = rows[3, 5] if damage is None else damage
    if damage is not None and pair.gpu.dtype == "int8":
        stored = quantize(array("rows", 70, 30), transposed=False)
        stored.scale[0, 5] = damage
        rows = stored
    matrix = placed(pair.gpu, rows) if isinstance(rows, np.ndarray) else pair.gpu.place_matrix(rows)
    assert matrix.is_finite() == (damage is None)


# --- rows and numbers ----------------------------------------------------------------------------


@given(rows=st.integers(0, 9), C=sizes, damage=st.sampled_from([1, np.nan, np.inf]), seed=seeds)
@few
def test_layer_norm(pair, rows, C, damage, seed):
    x = array("x", rows, C, seed=seed)
    x[:1, 0] *= np.float32(damage)
    with np.errstate(all="ignore"):
        pair.assert_same(lambda ops: ops.layer_norm(ops.xp.asarray(x), norm_of(ops, C, seed)))


@given(
    rows=st.sampled_from([1, 2, 5, 16, 17, 70]), n_in=sizes, n_out=sizes, has_bias=st.booleans(),
    activation=activations, transposed=st.booleans(), seed=seeds,
)  # fmt: skip
def test_linear(pair, rows, n_in, n_out, has_bias, activation, transposed, seed):
    shape = (n_out, n_in) if transposed else (n_in, n_out)
    weight, x = array("matrix", *shape, seed=seed), array("x", rows, n_in, seed=seed)
    bias = array("bias", n_out, seed=seed) if has_bias else None

    def compute(ops):
        w = linear_of(ops, weight, bias, transposed=transposed)
        return ops.linear(ops.xp.asarray(x), w, activation)

    pair.assert_same(compute)


def test_linear_of_a_view_and_of_no_rows(pair):
    x, weight = array("x", 4, 3, 40), array("matrix", 40, 29)
    for part in (np.s_[:, -1], np.s_[:, ::2], np.s_[:0]):
        pair.assert_same(lambda ops, part=part: ops.linear(
            ops.xp.asarray(x)[part], linear_of(ops, weight)
        ))  # fmt: skip


@given(n=st.sampled_from([0, 1, 255, 3000]), activation=st.sampled_from([*ACTIVATIONS]), seed=seeds)
@few
def test_activate(pair, n, activation, seed):
    x = array("x", n, seed=seed) * np.float32(20)
    x[: len(NAN_AND_INF)] = NAN_AND_INF[:n]
    with np.errstate(all="ignore"):
        pair.assert_same(lambda ops: ops.activate(ops.xp.asarray(x), activation))


def test_exp_at_its_borders(pair):
    borders = np.float32([-87, 88, 0, -0.0, 1e-45, -1e-45, 1.1754944e-38, -103, 3.4e38, -3.4e38])
    up, down = (np.nextafter(borders, np.float32(to)) for to in (np.inf, -np.inf))
    x = np.concatenate([borders, up, down, NAN_AND_INF])
    pair.assert_same(lambda ops: ops.exp(ops.xp.asarray(x)))


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_exp_of_other_layouts(pair, kind):
    x = (array("x", 30, 21) * 50).astype(kind)
    for part in (np.s_[:], np.s_[::2, ::-3], np.s_[:0]):
        pair.assert_same(lambda ops, part=part: ops.exp(ops.xp.asarray(x)[part]))
    pair.assert_same(lambda ops: ops.exp(ops.xp.asarray(x).swapaxes(0, 1)))


# --- attention -----------------------------------------------------------------------------------


@given(
    B=st.integers(1, 3), H=st.integers(1, 2), T=st.sampled_from([1, 2, 9, 17, 40]), D=head_sizes,
    more=st.integers(0, 50), steps=st.integers(1, 3), seed=seeds,
)  # fmt: skip
def test_attend_to_what_was_stored(pair, B, H, T, D, more, steps, seed):
    random, S = np.random.default_rng(seed), T + more
    k, v = array("k", B, H, S, D, seed=seed), array("v", B, H, S, D, seed=seed)
    q = array("q", B, T, H, D, seed=seed)
    counts = random.multinomial(S, [1 / steps] * steps, B).T  # each row has its own chunks
    visible = random.integers(1, S + 1, (B, T))

    def compute(ops):
        cache = stored(ops, k, v, list(counts), S + 33)
        return ops.attend(ops.xp.asarray(q).swapaxes(1, 2), *cache, 0.3, visible)

    pair.assert_same(compute)


def test_what_is_not_visible_does_not_matter(pair):
    k, v, q = (array(name, 3, 2, 40, 16) for name in "kvq")
    lengths = np.array([40, 33, 1])

    def compute(ops):
        cache = stored(ops, k, v, [lengths], 75)
        return ops.attend(ops.xp.asarray(q[:, :, :1]), *cache, 0.3, lengths[:, None])

    pair.assert_same(compute)


@pytest.mark.parametrize("known_step", [None, "scores", "pattern"])
@given(T=st.sampled_from([1, 5, 17]), more=st.integers(0, 40), is_view=st.booleans(), seed=seeds)
@few
def test_attend_in_steps(pair, known_step, T, more, is_view, seed):
    B, H, D, S = 2, 2, 17, T + more
    k, v = array("k", B, H, S, D, seed=seed), array("v", B, H, S, D, seed=seed)
    q = array("q", B, H, T, D, seed=seed)
    visible = np.random.default_rng(seed).integers(1, S + 1, (B, T))
    begin = [array("scores", B, H, T, S, seed=seed), abs(array("pattern", B, H, T, S, seed=seed))]

    def compute(ops):
        steps = [ops.xp.asarray(x.copy()) for x in begin]
        if is_view and ops is pair.gpu:  # not contiguous
            steps = [ops.xp.asarray(np.repeat(x, 2, axis=-1))[..., ::2] for x in begin]
        cache = stored(ops, k, v, [np.full(B, S)], S)
        z = ops.attend_in_steps(
            ops.xp.asarray(q), *cache, 0.3, visible, AttentionSteps(*steps, known_step)
        )
        return z, *steps

    pair.assert_same(compute)


def test_a_cache_has_an_end_and_must_be_contiguous(pair):
    ops, k = pair.gpu, pair.gpu.xp.asarray(array("k", 2, 3, 1, 8))
    keys, values = ops.new_cache(2, 2, 3, 5, 8)
    with pytest.raises(IndexError, match="room for 32 tokens"):
        ops.store(k, k, keys[0], values[0], np.array([0, 32]), np.array([1, 1]))
    for seen in (0, 33):
        with pytest.raises(IndexError, match="visible must be from 1 to 32 keys"):
            ops.attend(k, keys[0], values[0], 0.3, np.array([[1], [seen]]))
    with pytest.raises(ValueError, match="must be contiguous"):
        ops.store(k, k, keys[:, 0], values[:, 0], np.array([0, 0]), np.array([1, 1]))
    with pytest.raises(ValueError, match="must be contiguous"):
        ops.attend(k, keys[:, 0], values[:, 0], 0.3, np.array([[1], [1]]))


# --- logits --------------------------------------------------------------------------------------


@given(
    rows=st.integers(0, 3), n=st.sampled_from([1, 63, 300, 9001]),
    damage=st.sampled_from([0, np.nan, np.inf, -np.inf]), seed=seeds,
)  # fmt: skip
@few
def test_log_normalizer(pair, rows, n, damage, seed):
    logits = array("logits", rows, n, seed=seed) * np.float32(9)
    logits[:1, n // 2] += np.float32(damage)
    with np.errstate(all="ignore"):
        pair.assert_same(lambda ops: ops.log_normalizer(ops.xp.asarray(logits)))


@given(rows=st.integers(0, 3), n=st.sampled_from([1, 255, 3000]), scale=st.sampled_from([0, 9, 90]))
@few
def test_cumulative_counts(pair, rows, n, scale):
    logits = array("logits", rows, n) * np.float32(scale)
    pair.assert_same(lambda ops: ops.cumulative_counts(ops.xp.asarray(logits)))


@given(
    n=st.sampled_from([1, 5, 64, 300, 2100]), top_k=st.sampled_from([1, 4, 40, 1024]),
    top_p=st.sampled_from([0.1, 0.9, 1.0]), min_p=st.sampled_from([0.0, 0.05]),
    temperature=st.sampled_from([1e-3, 0.7, 1.0, 100.0]),
    kind=st.sampled_from(["plain", "ties", "equal", "masked"]), seed=seeds,
)  # fmt: skip
@settings(max_examples=40)
def test_choose(pair, n, top_k, top_p, min_p, temperature, kind, seed):
    random, logits = np.random.default_rng(seed), array("logits", 3, n, seed=seed)
    if kind == "ties":
        logits = np.round(logits)
    elif kind == "equal":
        logits[...] = 2.5
    elif kind == "masked":
        logits[random.random(logits.shape) < 0.7] = -np.inf
        logits[:, n // 3] = 1
    uniforms = random.random(3)
    uniforms[0] = seed % 2 and np.nextafter(1, 0)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)

    def compute(ops):
        ids = ops.choose(ops.xp.asarray(logits), uniforms, params)
        return None if ids is None else ids

    pair.assert_same(compute)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_damaged_rows_give_ids_of_the_vocabulary(pair, number):
    logits = array("logits", 3, 300)
    logits[1] = number
    uniforms, params = np.array([0.3, 0.5, 0.9]), SamplingParams(top_k=40)
    ids, expected = (
        ops.to_host(ops.choose(ops.xp.asarray(logits), uniforms, params))
        for ops in (pair.gpu, pair.cpu)
    )
    assert_same(ids[::2], expected[::2])
    assert 0 <= ids[1] < 300


# --- memory, types, cards ------------------------------------------------------------------------


def test_memory_and_types(pair):
    ops = pair.gpu
    assert ops.free_memory() > 1 << 20
    assert ops.batch_invariant
    assert (ops.cache_type, ops.dtype) == (pair.cpu.cache_type, pair.cpu.dtype)
    host = array("x", 3)
    assert ops.to_host(host) is host


def test_int8_weights_of_other_programs_are_rejected(native):
    with pair_on("emulated", "int8", native("int8")) as pair:
        good = quantize(array("matrix", 64, 3), transposed=False)
        worst = good.weight.copy()
        worst[3, 1] = -128
        for rows in (
            replace(good, weight=worst),
            replace(good, scale=good.scale * np.float32(1.001)),
        ):
            for ops in (pair.gpu, pair.cpu):
                with pytest.raises(CheckpointError, match="must be from -127 to 127"):
                    ops.place_matrix(rows)


CARDS = {
    "2018": Card(capability=75, shared_memory=65_536),
    "backwards": Card(processors=3, backwards=True),
}


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_every_card_has_the_same_bits(native, dtype, card):
    weight, x, bias = array("matrix", 70, 60), array("x", 20, 70), array("bias", 60)
    k, v, q = (array(name, 2, 2, 40, 24) for name in "kvq")

    def compute(ops):
        y = ops.linear(ops.xp.asarray(x), linear_of(ops, weight, bias), "gelu_new")
        cache = stored(ops, k, v, [np.array([40, 33])], 40)
        z = ops.attend(ops.xp.asarray(q), *cache, 0.3, np.minimum(np.arange(1, 41), [[40], [33]]))
        return y, z, ops.log_normalizer(y)

    with pair_on("emulated", dtype, native(dtype), card) as pair:
        pair.assert_same(compute)
