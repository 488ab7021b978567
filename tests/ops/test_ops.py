import math
import os
from itertools import product

import numpy as np
import pytest

from gpt_cli.errors import InputError, ResourceError
from gpt_cli.ops import LayerNorm, Linear, bindings, check_available, get_ops
from gpt_cli.ops.numpy_ops import ACTIVATIONS
from support.native_arrays import activated, array

EXACT_ACTIVATIONS = {
    "gelu_new": lambda x: x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu": lambda x: x / 2 * (1 + math.erf(x / math.sqrt(2))),
    "relu": lambda x: max(x, 0.0),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "tanh": math.tanh,
}


def exact_softmax(x):
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def causal(B, T, S):
    """Return the numbers of keys that the last T of S tokens see."""
    return np.broadcast_to(np.arange(S - T, S) + 1, (B, T))


def assert_close(result, expected, tolerance=2e-6):
    assert result.dtype == np.float32
    assert result.shape == expected.shape
    assert abs(result - expected).max() <= tolerance * max(1, abs(expected).max())


@pytest.mark.parametrize("positions", [[[0, 0, 1], [2, 3, 5]], [[3, 4, 5]]])
def test_embed_adds_rows_of_both_tables(ops, positions):
    wte, wpe = array("wte", 10, 4), array("wpe", 6, 4)
    ids, positions = np.array([[9, 0, 3], [1, 1, 2]]), np.array(positions)
    x = ops.embed(ops.place_matrix(wte, transposed=True), wpe, ids, positions)
    assert_close(x, wte[ids].astype(np.float64) + wpe[positions])


@pytest.mark.parametrize(("id", "position"), [(10, 0), (0, 6)])
def test_embed_rejects_ids_and_positions_out_of_range(ops, id, position):
    wte, wpe = ops.place_matrix(array("wte", 10, 4), transposed=True), array("wpe", 6, 4)
    with pytest.raises(IndexError):
        ops.embed(wte, wpe, np.array([[0, id]]), np.array([[0, position]]))


@pytest.mark.parametrize("shape", [(2, 3, 8), (1, 1, 8), (5, 33)])
@pytest.mark.parametrize("epsilon", [1e-5, 1e-2])
@pytest.mark.parametrize("offset", [0, 30])
def test_layer_norm(ops, shape, epsilon, offset):
    x = array("x", *shape) + np.float32(offset)
    weight, bias = array("weight", shape[-1]), array("bias", shape[-1])
    y = ops.layer_norm(x, LayerNorm(weight, bias, epsilon))
    exact = x - x.mean(axis=-1, keepdims=True, dtype=np.float64)
    exact /= np.sqrt((exact**2).mean(axis=-1, keepdims=True) + epsilon)
    assert_close(y, exact * weight + bias, tolerance=1e-5)


def test_layer_norm_of_equal_values_is_the_bias(ops):
    bias = array("bias", 8)
    ln = LayerNorm(array("weight", 8), bias, 1e-5)
    y = ops.layer_norm(np.full((1, 2, 8), 3, np.float32), ln)
    assert_close(y, np.broadcast_to(bias, (1, 2, 8)))


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("rows", [(1, 1), (1, 2), (1, 7), (4, 1), (3, 5), (2, 40)])
def test_linear(ops, activation, rows):
    matrices = [(20, False), (70, False), (20, True)]
    for (n_out, transposed), has_bias in product(matrices, (True, False)):
        x, weight, bias = array("x", *rows, 12), array("weight", 12, n_out), array("bias", n_out)
        placed = ops.place_matrix(weight.T.copy() if transposed else weight, transposed=transposed)
        w = Linear(placed, bias if has_bias else None)
        y = ops.linear(x, w, activation=activation)
        exact = x.astype(np.float64) @ weight + has_bias * bias
        if activation:
            exact = np.vectorize(EXACT_ACTIVATIONS[activation])(exact)
        assert_close(y, exact)


@pytest.mark.parametrize("D", [8, 64, 70])
@pytest.mark.parametrize("T", [1, 2, 24, 64, 150])
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("ragged", [False, True])
def test_attend(ops, cached, T, D, scale, ragged):
    q, S = array("q", 2, 3, T, D), T + 2
    keys, values = array("keys", 2, 3, S, D), array("values", 2, 3, S, D)
    visible = causal(2, T, S) - np.array([[0], [1]]) * ragged
    attended = ops.attend(q, *cached(ops, keys, values, 1), scale, visible)
    scores = scale * q.astype(np.float64) @ keys.swapaxes(-1, -2)
    hidden = np.arange(S) >= visible[:, None, :, None]
    exact = exact_softmax(np.where(hidden, -np.inf, scores)) @ values
    # Scores, and their rounding errors, grow with the head size.
    assert_close(attended, exact, tolerance=2e-6 if D == 8 else 4e-6)


def test_each_row_of_a_cache_has_its_own_length_and_tokens(ops):
    q, keys, values = (array(name, 3, 2, 7, 8) for name in ("q", "keys", "values"))
    cache = [layers[0] for layers in ops.new_cache(1, 3, 2, 50, 8)]
    past, new = np.array([0, 31, 5]), np.array([7, 4, 0])
    before = array("keys", 3, 2, 31, 8)
    ops.store(before, -before, *cache, past * 0, past)
    ops.store(keys, values, *cache, past, new)
    attended = ops.attend(q, *cache, 0.5, np.repeat((past + new)[:, None], 7, axis=1))
    for row in range(3):
        row_keys, row_values = (
            np.concatenate([old[row, :, : past[row]], added[row, :, : new[row]]], axis=1)
            for old, added in ((before, keys), (-before, values))
        )
        scores = 0.5 * q[row].astype(np.float64) @ row_keys.swapaxes(-1, -2)
        assert_close(attended[row], exact_softmax(scores) @ row_values)


def test_attend_ignores_invisible_keys_and_does_not_overflow_exp(ops, cached):
    q, keys = array("q", 1, 1, 2, 4), array("keys", 1, 1, 3, 4)
    values = np.repeat(np.array([1, 2, 1e38], np.float32), 4).reshape(1, 1, 3, 4)
    first, second = ops.attend(q, *cached(ops, keys, values), 1.0, np.array([[1, 2]]))[0, 0]
    assert (first == 1).all()
    assert ((second > 1) & (second < 2)).all()
    q, keys, values = (100 * array(name, 1, 2, 3, 4) for name in ("q", "keys", "values"))
    attended = ops.attend(q, *cached(ops, keys, values), 1.0, causal(1, 3, 3))
    assert np.isfinite(attended).all()
    assert abs(attended).max() <= abs(values).max() * 1.00001


@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (5, 50_257)])
def test_log_normalizer(ops, shape):
    logits = 5 * array("logits", shape[0], shape[1] + 3)[:, :-3]  # with gaps between rows
    normalizers = ops.log_normalizer(logits)
    exact = np.log(np.exp(logits.astype(np.float64)).sum(axis=-1))
    assert normalizers.dtype == np.float64
    np.testing.assert_allclose(normalizers, exact, rtol=1e-6)
    logits = np.array([[1, np.nan, 2], [1, 2, 3]], np.float32)
    assert np.isnan(ops.log_normalizer(logits)).tolist() == [True, False]


@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (5, 50_257)])
def test_cumulative_counts_are_the_probabilities(ops, shape):
    logits = 5 * array("logits", shape[0], shape[1] + 3)[:, :-3]  # with gaps between rows
    sums = ops.cumulative_counts(logits)
    counts = np.diff(sums, prepend=0)
    assert sums.dtype == np.int64
    assert counts.min() >= 1
    assert (counts.max(axis=-1) == 2**30 + 1).all()
    exact = np.exp(logits.astype(np.float64))
    exact /= exact.sum(axis=-1, keepdims=True)
    # The 1 that is added to each count takes 2^-30 of the likeliest token's.
    np.testing.assert_allclose(counts / sums[:, -1:], exact, rtol=1e-4, atol=2**-29)


def test_arguments_are_not_modified(ops, int8_ops, cached):
    x, matrix = array("x", 2, 4, 8), array("matrix", 8, 8)
    heads = array("heads", 2, 2, 4, 4)
    copies = x.copy(), matrix.copy(), heads.copy()
    for tested in (ops, int8_ops):
        tested.layer_norm(x, LayerNorm(matrix[0], matrix[1], 1e-5))
        placed = tested.place_matrix(matrix)
        for activation in (None, *ACTIVATIONS):
            tested.linear(x, Linear(placed, matrix[0]), activation=activation)
        tested.attend(heads, *cached(tested, heads, heads), 0.5, causal(2, 4, 4))
        tested.exp(x)
        tested.log_normalizer(x[0])
        tested.embed(placed, matrix, np.array([[1, 2]]), np.array([[0, 1]]))
    assert all(map(np.array_equal, (x, matrix, heads), copies))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_exact_to_a_millionth(ops, activation):
    x = np.linspace(-12, 12, 4001, dtype=np.float32)
    exact = [EXACT_ACTIVATIONS[activation](value) for value in x.tolist()]
    y = activated(ops, x, activation)
    assert y.dtype == np.float32
    assert (abs(y - exact) <= 1e-6 * abs(x) + 1e-7).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_have_their_limits_for_large_numbers(ops, activation):
    x = np.array([-1e4, -200, 0, 200, 1e4], np.float32)
    limits = [-1, -1, 0, 1, 1] if activation == "tanh" else [0, 0, 0, 200, 1e4]
    assert ACTIVATIONS[activation](x.copy()).tolist() == limits
    assert abs(activated(ops, x, activation) - limits).max() < 1e-30


def test_nan_propagates(ops, cached):
    x = np.array([np.nan, 1, np.inf, 2], np.float32)[None, None, :, None]
    assert np.isnan(activated(ops, x[0, 0, :, 0], "gelu_new")).tolist() == [True, *[False] * 3]
    for q, keys, values in ((x, x, abs(x)), (np.ones_like(x), x, np.ones_like(x))):
        y = ops.attend(q, *cached(ops, keys, values), 1.0, causal(1, 4, 4))
        assert np.isnan(y[0, 0, :, 0]).all()


def test_exp(ops):
    x = array("x", 2, 3, 8)
    assert_close(ops.exp(x), np.exp(x.astype(np.float64)), tolerance=5e-7)
    assert not ops.exp(np.full((1, 3), -np.inf, np.float32)).any()


def test_threads_is_at_most_the_number_of_cores(ops):
    assert 1 <= ops.threads <= os.cpu_count()


# --- the choice of an implementation -------------------------------------------------------------


@pytest.fixture
def unset(monkeypatch):
    monkeypatch.delenv("GPT_CLI_OPS", raising=False)
    return monkeypatch


@pytest.fixture
def installed(unset):
    """Return a function that sets the path of the installed library, or None."""

    def install(path):
        for module in ("select", "bindings"):
            unset.setattr(f"gpt_cli.ops.{module}.native_library", lambda: path)
        bindings.library.cache_clear()

    yield install
    bindings.library.cache_clear()


@pytest.fixture
def without_library(installed):
    installed(None)


@pytest.mark.usefixtures("library")
def test_the_library_computes_if_it_is_installed_with_any_number_of_threads(unset):
    for dtype in ("float32", "bfloat16", "float16", "int8"):
        ops = get_ops("cpu", dtype, threads=3)
        assert (ops.name, ops.dtype, ops.threads) == ("native", dtype, 3)
    unset.setattr("gpt_cli.system.gpu.problem", lambda: "none is there")
    assert get_ops("auto", "float32").name == "native"


def test_without_the_library_numpy_computes_and_other_types_are_refused(without_library):
    assert get_ops("cpu", "float32").name == "numpy"
    for dtype in ("bfloat16", "float16", "int8"):
        with pytest.raises(InputError, match=f"dtype {dtype} needs the compiled library"):
            get_ops("cpu", dtype)


def test_numpy_is_the_fallback_if_the_library_cannot_be_loaded(installed, tmp_path, caplog):
    (tmp_path / "libkernels.so").write_bytes(b"no library")
    installed(tmp_path / "libkernels.so")
    with caplog.at_level("INFO", "gpt_cli"):
        assert get_ops("cpu", "float32").name == "numpy"
    assert "native cannot be used" in caplog.text
    with pytest.raises(ResourceError, match="dtype int8: native does not work here"):
        get_ops("cpu", "int8")


@pytest.mark.usefixtures("library")
def test_a_library_of_another_version_is_not_used(unset, caplog):
    unset.setattr(bindings, "_VERSION", 0)
    bindings.library.cache_clear()
    with caplog.at_level("INFO", "gpt_cli"):
        assert get_ops("cpu", "float32").name == "numpy"
    bindings.library.cache_clear()
    assert "belongs to another version: reinstall gpt2-cli" in caplog.text


def test_the_implementation_may_be_chosen(unset, ops, int8_ops):
    for expected in (ops, int8_ops):
        unset.setenv("GPT_CLI_OPS", expected.name)
        chosen = get_ops("cpu", expected.dtype)
        assert (chosen.name, chosen.dtype) == (expected.name, expected.dtype)


def test_an_invalid_choice_is_an_error(without_library, unset):
    unset.setenv("GPT_CLI_OPS", "abacus")
    for dtype in ("float32", "int8"):
        message = f"GPT_CLI_OPS must be native or numpy for {dtype}, not 'abacus'"
        with pytest.raises(InputError, match=message):
            get_ops("cpu", dtype)
    with pytest.raises(InputError, match="must be native or numpy, not 'abacus'"):
        check_available("cpu", "auto")  # the type is that of a model that is not known yet
    unset.setenv("GPT_CLI_OPS", "native")
    with pytest.raises(InputError, match="GPT_CLI_OPS=native needs the compiled library"):
        get_ops("cpu", "float32")


DTYPES = "dtype must be one of auto, float32, bfloat16, float16, int8"


@pytest.mark.parametrize(
    ("device", "dtype", "message"),
    [
        ("abacus", "float32", 'device must be one of auto, cuda, cpu, not "abacus"'),
        ("gpu", "float32", 'device must be one of auto, cuda, cpu, not "gpu" (did you mean cuda?)'),
        ("cpu", "float7", f'{DTYPES}, not "float7" (did you mean float'),
        ("cpu", "fp32", f'{DTYPES}, not "fp32" (did you mean float32?)'),
        ("auto", "bf16", f'{DTYPES}, not "bf16" (did you mean bfloat16?)'),
        ("cuda", "auto8", f'{DTYPES}, not "auto8" (did you mean auto'),
    ],
)
def test_an_unknown_device_or_type_is_refused(device, dtype, message):
    with pytest.raises(InputError) as caught:
        get_ops(device, dtype)
    assert str(caught.value).startswith(message)
