"""The kernels of a GPU, in the emulation, have the bits of the C library."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt_cli.ops import AttentionSteps, LayerNorm, Linear
from gpt_cli.ops.cuda import plans
from gpt_cli.ops.int8 import quantize
from gpt_cli.ops.kernels import ACTIVATIONS
from support.checkpoints import filed
from support.cuda_kernels import (
    FORMATS,
    Matrix,
    assert_guarded,
    attend,
    launch,
    linear,
    result,
    struct_of,
)
from support.emulated_kernels import Card
from support.native_arrays import (
    FLOATS,
    NAN_AND_INF,
    activations,
    array,
    assert_same_bits,
    cache_of,
    head_sizes,
    seeds,
    sizes,
)

pytestmark = pytest.mark.usefixtures("library")

DEVICE = plans.Device(processors=2, shared=232_448)
# Missing barriers show in one order of the threads or the other.
cards = st.sampled_from([Card(), Card(backwards=True)])
CARD_OF_2018 = Card(capability=75, shared_memory=65_536)
few = settings(max_examples=20)


def place(native, dtype, rows, *, transposed, **how):
    """Return a matrix in both layouts: of the C library, and of the kernels."""
    ops = native(dtype)
    if dtype == "int8":
        stored = quantize(rows, transposed=transposed)
        packed = Matrix(
            stored.weight, stored.scale, dtype, transposed=transposed, device=DEVICE, **how
        )
        return ops, ops.place_matrix(stored, transposed=transposed), packed
    stored, bits = rows, rows
    if dtype != "float32":
        stored = filed(rows, dtype)
        bits = (np.ascontiguousarray(stored[:]).view(np.uint32) >> 16).astype(np.uint16)
        if dtype == "float16":
            bits = stored[:].astype(np.float16).view(np.uint16)
    packed = Matrix(bits, None, dtype, transposed=transposed, device=DEVICE, **how)
    return ops, ops.place_matrix(stored, transposed=transposed), packed


TILES = [(dtype, tile) for dtype in FORMATS for tile in plans.LAYOUTS[dtype].tiles]


@pytest.mark.parametrize(("dtype", "tile"), TILES, ids=lambda x: getattr(x, "kernel", x))
@given(
    rows=st.sampled_from([1, 2, 7, 16, 17, 33, 65, 130]), n_in=sizes, n_out=sizes,
    has_bias=st.booleans(), has_residual=st.booleans(), activation=activations,
    transposed=st.booleans(), card=cards, seed=seeds,
)  # fmt: skip
@few
def test_linear(
    native,
    dtype,
    tile,
    rows,
    n_in,
    n_out,
    has_bias,
    has_residual,
    activation,
    transposed,
    card,
    seed,
):
    shape = (n_out, n_in) if transposed else (n_in, n_out)
    stored = array("matrix", *shape, seed=seed)
    ops, placed, packed = place(native, dtype, stored, transposed=transposed)
    x = array("x", rows, n_in, seed=seed)
    bias = array("bias", n_out, seed=seed) if has_bias else None
    residual = array("residual", rows, n_out, seed=seed) if has_residual else None
    expected = ops.linear(x, Linear(placed, bias), activation)
    if has_residual:
        expected = residual + expected
    options = {"bias": bias, "residual": residual, "activation": activation, "card": card}
    assert_same_bits(linear(x, packed, dtype, tile=tile, **options), expected)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_linear_without_asynchronous_copies(native, dtype):
    ops, placed, packed = place(native, dtype, array("matrix", 200, 150), transposed=False)
    x = array("x", 70, 200)
    for tile in plans.LAYOUTS[dtype].tiles:
        y = linear(x, packed, dtype, tile=tile, card=CARD_OF_2018)
        assert_same_bits(y, ops.linear(x, Linear(placed)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_padding_keeps_the_sign_of_zero(native, dtype):
    ops, placed, packed = place(native, dtype, np.full((5, 9), -1, np.float32), transposed=False)
    x, bias = np.zeros((3, 5), np.float32), np.full(9, -0.0, np.float32)
    expected = ops.linear(x, Linear(placed, bias))
    assert np.signbit(expected).all()
    for tile in plans.LAYOUTS[dtype].tiles:
        assert_same_bits(linear(x, packed, dtype, tile=tile, bias=bias), expected)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("transposed", [False, True])
@given(n_in=sizes, n_out=sizes, step=st.sampled_from([64, 128]), seed=seeds)
@few
def test_pieces_of_a_matrix_are_packed_alike(native, dtype, transposed, n_in, n_out, step, seed):
    shape = (n_out, n_in) if transposed else (n_in, n_out)
    stored = array("matrix", *shape, seed=seed)
    _, _, whole = place(native, dtype, stored, transposed=transposed)
    if dtype != "int8":
        step -= 29
    _, _, pieces = place(native, dtype, stored, transposed=transposed, step=step)
    assert np.array_equal(whole.panels, pieces.panels)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("damage", [np.nan, np.inf, -np.inf])
def test_damage_stays_in_its_row(native, dtype, damage):
    ops, placed, packed = place(native, dtype, array("matrix", 70, 40), transposed=False)
    x = array("x", 19, 70)
    x[3, 5] = damage
    with np.errstate(all="ignore"):
        expected = ops.linear(x, Linear(placed))
    for tile in plans.LAYOUTS[dtype].tiles:
        assert_same_bits(linear(x, packed, dtype, tile=tile), expected)


@pytest.mark.parametrize("dtype", FORMATS)
@given(C=sizes, V=sizes, tokens=st.integers(1, 9), seed=seeds)
@few
def test_embed(native, dtype, C, V, tokens, seed):
    ops, placed, packed = place(native, dtype, array("wte", V, C, seed=seed), transposed=True)
    random, wpe = np.random.default_rng(seed), array("wpe", 11, C, seed=seed)
    ids, positions = random.integers(0, V, (1, tokens)), random.integers(0, 11, (1, tokens))
    x, memory = result((1, tokens, C))
    job = struct_of(
        "embed", wte=packed.struct, wpe=wpe, ids=ids, positions=positions, x=x, tokens=tokens,
        n_positions=11,
    )  # fmt: skip
    launch(dtype, plans.embed(tokens), job)
    assert_guarded(x, memory)
    assert_same_bits(x, ops.embed(placed, wpe, ids, positions))


@given(rows=st.integers(1, 9), C=sizes, damaged=st.booleans(), seed=seeds)
@few
def test_layer_norm(native, rows, C, damaged, seed):
    x, weight, bias = (
        array(n, *s, seed=seed) for n, s in zip("xwb", ((rows, C), (C,), (C,)), strict=True)
    )
    if damaged:
        x[0, 0] = np.inf
    y, memory = result((rows, C))
    ln = struct_of("norm", weight=weight, bias=bias, epsilon=1e-5)
    job = struct_of("layer_norm", ln=ln, x=x, y=y, rows=rows, C=C)
    launch("float32", plans.layer_norm(rows, C), job)
    assert_guarded(y, memory)
    with np.errstate(all="ignore"):
        assert_same_bits(y, native("float32").layer_norm(x, LayerNorm(weight, bias, 1e-5)))


@given(n=st.integers(1, 3000), activation=activations, seed=seeds)
@few
def test_functions_of_numbers(native, n, activation, seed):
    x = array("x", n, seed=seed) * np.float32(30)
    x[: len(NAN_AND_INF)] = NAN_AND_INF[:n]
    ops, (y, memory) = native("float32"), result((n,))
    names = ("exponentials", "exp") if activation is None else ("activations", "activate")
    job = struct_of("elementwise", x=x, y=y, n=n, activation=ACTIVATIONS.index(activation))
    launch("float32", plans.elementwise(names[0], n, DEVICE), job)
    assert_guarded(y, memory)
    arguments = () if activation is None else (activation,)
    assert_same_bits(y, getattr(ops, names[1])(x, *arguments))


def cache_by_kernels(ops, dtype, keys, values, capacity, lengths):
    """Return a layer of a cache with keys and values (B, H, S, D), stored in two steps."""
    B, H, _, D = keys.shape
    kind = np.float16 if dtype == "int8" else np.float32
    panels = -(-capacity // plans.SLOTS)
    stored_keys, memory = result((B, H, panels, D, plans.SLOTS), kind)
    stored_values, more = result((B, H, panels, plans.SLOTS, D), kind)
    half = lengths // 2
    for past, count in ((np.zeros_like(half), half), (half, lengths - half)):
        T = int(count.max())
        if not T:
            continue
        new = np.zeros((2, B, T, H, D), np.float32)
        for b in range(B):
            for to, source in zip(new, (keys, values), strict=True):
                to[b, : count[b]] = source[b, :, past[b] : past[b] + count[b]].swapaxes(0, 1)
        job = struct_of(
            "store", k=new[0], v=new[1], keys=stored_keys, values=stored_values, past=past,
            lengths=count, b_stride=T * H * D, h_stride=D, t_stride=H * D, B=B, H=H, T=T, D=D,
            cache_panels=panels,
        )  # fmt: skip
        launch(dtype, plans.store(B * H, T), job)
    assert_guarded(stored_keys, memory)
    assert_guarded(stored_values, more)
    return stored_keys, stored_values


def attention_plans(heads, T, D, S):
    """Return all launches that can compute an attention."""
    sizes = 232_448, 100_000, 50_000, 30_000, 12_000, 2_000  # bytes of shared memory
    launches = {plans.attend(heads, T, D, S, plans.Device(2, size)) for size in sizes}
    return sorted(launches, key=lambda launch: launch.kernel)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@given(
    B=st.integers(1, 2), H=st.integers(1, 2), T=st.sampled_from([1, 2, 7, 8, 15, 16, 17, 35]),
    more=st.integers(0, 70), D=head_sizes, card=cards, seed=seeds,
)  # fmt: skip
@settings(max_examples=40)
def test_attend(native, dtype, B, H, T, more, D, card, seed):
    ops, S = native(dtype), T + more
    q = array("q", B, T, H, D, seed=seed).swapaxes(1, 2)
    keys, values = array("keys", B, H, S, D, seed=seed), array("values", B, H, S, D, seed=seed)
    visible = np.random.default_rng(seed).integers(1, S + 1, (B, T))
    expected = ops.attend(q, *cache_of(ops, keys, values, S + 40), 0.3, visible)
    cache = cache_by_kernels(ops, dtype, keys, values, S + 40, np.full(B, S))
    for plan in attention_plans(B * H, T, D, S):
        y = attend(q, *cache, 0.3, visible, dtype, plan, card=card)
        assert_same_bits(y, expected)


@pytest.mark.parametrize("known_step", [None, "scores", "pattern"])
@given(
    B=st.integers(1, 2), H=st.integers(1, 2), T=st.sampled_from([1, 5, 8, 17]),
    more=st.integers(0, 70), D=st.sampled_from([8, 17, 64]), seed=seeds,
)  # fmt: skip
@few
def test_attend_in_steps(native, known_step, B, H, T, more, D, seed):
    ops, S = native("float32"), T + more
    q = array("q", B, H, T, D, seed=seed)
    keys, values = array("keys", B, H, S, D, seed=seed), array("values", B, H, S, D, seed=seed)
    visible = np.random.default_rng(seed).integers(1, S + 1, (B, T))
    begin = [
        array("scores", B, H, T, S, seed=seed),
        np.abs(array("pattern", B, H, T, S, seed=seed)),
    ]
    expected = [x.copy() for x in begin]
    cache = cache_of(ops, keys, values, S)
    y = ops.attend_in_steps(q, *cache, 0.3, visible, AttentionSteps(*expected, known_step))
    stored = cache_by_kernels(ops, "float32", keys, values, S, np.full(B, S))
    for plan in attention_plans(B * H, T, D, S):
        steps = [x.copy() for x in begin]
        found = attend(
            q, *stored, 0.3, visible, "float32", plan, steps=steps, known_step=known_step
        )
        assert_same_bits(found, y)
        for one, other in zip(steps, expected, strict=True):
            assert_same_bits(one, other)


@pytest.mark.parametrize("damage", [np.nan, np.inf, -np.inf])
def test_damage_spoils_only_the_queries_that_see_it(native, damage):
    ops, S, D = native("float32"), 37, 16
    q, keys, values = (array(name, 1, 1, S, D) for name in ("q", "keys", "values"))
    keys[0, 0, 20, 3], q[0, 0, 30, 5] = damage, damage
    visible = np.arange(1, S + 1)[None]
    expected = ops.attend(q, *cache_of(ops, keys, values, S), 0.3, visible)
    cache = cache_by_kernels(ops, "float32", keys, values, S, np.full(1, S))
    for plan in attention_plans(1, S, D, S):
        assert_same_bits(attend(q, *cache, 0.3, visible, "float32", plan), expected)


@pytest.mark.parametrize("dtype", FORMATS)
def test_tiles_fit_every_card(dtype):
    assert all(tile.shared <= 65_536 for tile in plans.LAYOUTS[dtype].tiles)


@pytest.mark.parametrize("shared", [65_536, 101_376, 232_448])
def test_prompts_of_the_whole_context_attend_by_several_queries_a_block(shared):
    launch = plans.attend(12, 1024, 64, 1024, plans.Device(40, shared))
    assert launch.kernel in ("attend_8", "attend_16")
