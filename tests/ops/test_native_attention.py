"""Compiled attention and its cache."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt_cli.ops import AttentionSteps
from gpt_cli.ops.numpy_ops import softmax
from support.native_arrays import (
    COLUMNS,
    NUMPY,
    added_up,
    array,
    assert_same_bits,
    at_each_level,
    cache_of,
    chain,
    head_sizes,
    rows_of_x,
    seeds,
)

pytestmark = pytest.mark.usefixtures("library")


# --- attention -----------------------------------------------------------------------------------


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
    cache = cache_of(ops, keys, values, S + 40)
    attended = ops.attend(q, *cache, 0.3, visible)
    weights = np.empty((2, B, H, T, S), np.float32)
    assert_same_bits(
        ops.attend_in_steps(q, *cache, 0.3, visible, AttentionSteps(*weights)), attended
    )
    if dtype == "int8":
        keys, values = (x.astype(np.float16) for x in (keys, values))
    exact = q.astype(np.float64), keys.astype(np.float64), values.astype(np.float64)
    assert attended.dtype == np.float32
    assert abs(attended - NUMPY.attend(*exact, 0.3, visible)).max() <= 8e-6
    expected = np.empty((2, B, H, T, S))
    NUMPY.attend_in_steps(*exact, 0.3, visible, AttentionSteps(*expected))
    hidden = np.isneginf(expected[0])
    assert np.array_equal(np.isneginf(weights[0]), hidden) and not weights[1][hidden].any()
    assert np.allclose(weights[0][~hidden], expected[0][~hidden], rtol=0, atol=8e-6)
    assert np.allclose(weights[1], expected[1], rtol=0, atol=8e-6)


@given(S=st.integers(1, 100), D=head_sizes, seed=seeds)
@at_each_level
def test_attention_adds_in_a_fixed_order(level, native, S, D, seed):
    ops, q = native("float32"), array("q", 1, 1, 1, D, seed=seed)
    keys, values = (array(name, 1, 1, S, D, seed=seed) for name in ("keys", "values"))
    attended = ops.attend(q, *cache_of(ops, keys, values, S), 0.3, np.array([[S]]))[0, 0]
    scores = chain(q[0, 0], keys[0, 0].T, np.zeros((1, S), np.float32)) * np.float32(0.3)
    weights = ops.exp(scores - scores.max())
    mixed = chain(weights, values[0, 0], np.zeros((1, D), np.float32))
    assert_same_bits(attended, mixed / added_up(weights[0]))


@pytest.mark.parametrize("where", ["q", "keys"])
@pytest.mark.parametrize("damage", [np.nan, np.inf, -np.inf])
@given(T=rows_of_x, D=head_sizes, data=st.data())
@settings(max_examples=15)
def test_nan_and_inf_spoil_only_the_queries_that_see_them(native, where, damage, T, D, data):
    ops = native("float32")
    heads = {name: array(name, 2, 2, T, D) for name in ("q", "keys", "values")}
    visible = np.tile(np.arange(1, T + 1), (2, 1))

    def attended(q, keys, values):
        return ops.attend(q, *cache_of(ops, keys, values, T), 0.3, visible)

    before = attended(**heads)
    t, d = data.draw(st.integers(0, T - 1)), data.draw(st.integers(0, D - 1))
    heads[where][1, 0, t, d] = damage
    after = attended(**heads)
    with np.errstate(all="ignore"):
        scores = heads["q"] @ heads["keys"].swapaxes(-1, -2)
        scores = np.where(np.arange(T) < visible[:, None, :, None], scores, -np.inf)
        expected = softmax(scores) @ heads["values"]
    assert np.array_equal(np.isfinite(after), np.isfinite(expected))
    for undamaged in (np.s_[0], np.s_[1, 1], np.s_[1, 0, :t]):
        assert_same_bits(after[undamaged], before[undamaged])


# --- the cache -----------------------------------------------------------------------------------


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
            tokens = slice(past[row], past[row] + lengths[row])
            expected[row, :, tokens] = 0  # values are padded with zeros to whole panels
            expected[row, :, tokens, :D] = new[row, :, : lengths[row]]
        assert np.array_equal(stored, expected)


def test_store_and_attend_reject_tokens_beyond_the_capacity(parts):
    ops, heads, cache = parts["ops"], parts["heads"], parts["cache"]
    before = [panels.copy() for panels in cache]
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
        for panels, other in zip(before, cache, strict=True):
            assert np.array_equal(panels, other, equal_nan=True)
    for visible in (0, -1, 65, 2**62):
        seen = np.ones((2, 4), int)
        seen[1, 2] = visible
        with pytest.raises(IndexError, match="visible must be from 1 to 64 keys"):
            ops.attend(heads, *cache, 1.0, seen)


def rejected(operation, *arguments, match="cannot be"):
    with pytest.raises(ValueError, match=match):
        operation(*arguments)


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
        rejected(ops.store, heads, heads, *cache, none, four)
        rejected(ops.attend, heads, *cache, 1.0, seen)
    for past, lengths in ((none[:1], four), (none, four[None]), (none, four[:1])):
        rejected(ops.store, heads, heads, keys, values, past, lengths)
    for v in (heads[:1], heads[:, :2], heads[:, :, :3], heads[..., :4], heads[..., None]):
        rejected(ops.store, heads, v, keys, values, none, four, match=r"cannot be|unpack")
    for visible in (seen[:1], seen[:, :3], seen[0], seen[..., None]):
        rejected(ops.attend, heads, keys, values, 1.0, visible)
    for q in (heads[..., :4], heads[:1], heads[:, :2], heads[0]):
        rejected(ops.attend, q, keys, values, 1.0, seen, match=r"cannot be|unpack")


@pytest.mark.parametrize("threads", [1, 2])
def test_panels_of_a_cache_are_converted_as_numpy_does(level, native, monkeypatch, threads):
    draft_ops = native("float32").draft_ops()
    monkeypatch.setattr(draft_ops, "threads", threads)
    floats = np.arange(3 * 2 * 2 * 3 * 30 * COLUMNS, dtype=np.uint32) * np.uint32(1_491_101)
    source = floats.view(np.float32).reshape(3, 2, 2, 3, 30, COLUMNS)  # enough for two threads
    source[0, 0, 0, 1, 0, :6] = np.nan, np.inf, -np.inf, 65519, 65520, -0.0
    to = np.zeros(source.shape, np.float16)
    copied = to[:, :, :, 1:]
    draft_ops.copyto(copied, source[:, :, :, 1:])
    with np.errstate(all="ignore"):
        expected = source[:, :, :, 1:].astype(np.float16)
    assert not to[:, :, :, 0].any()
    missing = np.isnan(expected)
    assert np.array_equal(np.isnan(copied), missing)
    assert np.array_equal(copied[~missing].view("u2"), expected[~missing].view("u2"))


def test_the_first_rows_of_a_cache_become_float16(native):
    wide = np.arange(2 * 3 * 2 * 2 * 3 * COLUMNS, dtype=np.float32).reshape(2, 3, 2, 2, 3, COLUMNS)
    narrow = np.zeros(wide.shape, np.float16)
    native("float32").draft_ops().copyto(narrow[:, :2], wide[:, :2])
    assert np.array_equal(narrow[:, :2], wide[:, :2].astype(np.float16))
    assert not narrow[:, 2].any()


def test_panels_of_a_cache_are_checked(native):
    draft_ops = native("float32").draft_ops()
    wide, narrow = (np.zeros((3, 2, 2, 4, 5, COLUMNS), dtype) for dtype in ("f4", "f2"))
    for to, panels in (
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
        rejected(draft_ops.copyto, to, panels, match="a cache cannot be float")
