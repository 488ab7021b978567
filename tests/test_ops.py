import math
import os
import signal
import sys
import time

import numpy as np
import pytest
from checkpoints import noise
from processes import posix

from gpt_cli.errors import InputError, ResourceError
from gpt_cli.model import forward
from gpt_cli.ops import LayerNorm, Linear, few_rows, get_ops
from gpt_cli.ops.numpy_ops import ACTIVATIONS, NumPyOps

EXACT_ACTIVATIONS = {
    "gelu_new": lambda x: x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu": lambda x: x / 2 * (1 + math.erf(x / math.sqrt(2))),
    "relu": lambda x: max(x, 0.0),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "tanh": math.tanh,
}


def array(name: str, *shape: int):
    return noise(name, *shape).astype(np.float32)


def in_a_fork(act) -> int:
    """Do something in a fork of this process; return its exit code: 7 if that went well."""
    child = os.fork()
    if child == 0:
        try:
            act()
            os._exit(7)
        finally:
            os._exit(8)
    for _ in range(100):
        finished, status = os.waitpid(child, os.WNOHANG)
        if finished:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("it waits for ever")


def exact_softmax(x):
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def assert_close(ops, result, expected, tolerance=2e-6):
    result = ops.to_host(result)
    assert result.dtype == np.float32
    assert result.shape == expected.shape
    assert abs(result - expected).max() <= tolerance * max(1, abs(expected).max())


def test_what_is_placed_comes_back(ops):
    x = array("x", 3, 4)
    assert np.array_equal(ops.to_host(ops.place(x.copy())), x)


def test_embed_adds_rows_of_both_tables(ops):
    wte, wpe = array("wte", 10, 4), array("wpe", 6, 4)
    ids, positions = np.array([[9, 0, 3], [1, 1, 2]]), np.array([[0, 0, 1], [2, 3, 5]])
    x = ops.embed(
        ops.place_matrix(wte, transposed=True),
        ops.place(wpe),
        ops.xp.asarray(ids),
        ops.xp.asarray(positions),
    )
    assert_close(ops, x, wte[ids].astype(np.float64) + wpe[positions])


def test_embed_broadcasts_the_positions_that_rows_share(ops):
    wte, wpe = array("wte", 10, 4), array("wpe", 6, 4)
    ids, positions = np.array([[9, 0], [1, 1]]), np.array([[3, 4]])
    x = ops.embed(
        ops.place_matrix(wte, transposed=True),
        ops.place(wpe),
        ops.xp.asarray(ids),
        ops.xp.asarray(positions),
    )
    assert_close(ops, x, wte[ids].astype(np.float64) + wpe[positions])


@pytest.mark.parametrize(("id", "position"), [(10, 0), (0, 6)])
def test_embed_refuses_what_is_out_of_range(ops, id, position):
    wte, wpe = ops.place_matrix(array("wte", 10, 4), transposed=True), array("wpe", 6, 4)
    with pytest.raises(IndexError):
        ops.embed(wte, ops.place(wpe), ops.xp.asarray([[0, id]]), ops.xp.asarray([[0, position]]))


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("piece", [1, 50, 700, 10_000])
def test_a_matrix_is_placed_whole_however_it_is_read(ops, monkeypatch, transposed, piece):
    if ops.name == "numba":
        monkeypatch.setattr("gpt_cli.ops.numba_ops._PIECE", piece)
    matrix = array("matrix", 37, 90)
    w = Linear(ops.place_matrix(matrix.T.copy() if transposed else matrix, transposed=transposed))
    y = ops.linear(ops.place(np.eye(37, dtype=np.float32)), w)
    assert np.array_equal(ops.to_host(y), matrix)


@pytest.mark.parametrize("shape", [(2, 3, 8), (1, 1, 8), (5, 33)])
@pytest.mark.parametrize("epsilon", [1e-5, 1e-2])
@pytest.mark.parametrize("offset", [0, 30])
def test_layer_norm(ops, shape, epsilon, offset):
    x = array("x", *shape) + np.float32(offset)
    weight, bias = array("weight", shape[-1]), array("bias", shape[-1])
    y = ops.layer_norm(ops.place(x.copy()), LayerNorm(ops.place(weight), ops.place(bias), epsilon))
    exact = x.astype(np.float64)
    exact = exact - exact.mean(axis=-1, keepdims=True)
    exact = exact / np.sqrt((exact**2).mean(axis=-1, keepdims=True) + epsilon)
    assert_close(ops, y, exact * weight + bias, tolerance=1e-5)


def test_layer_norm_of_equal_values_is_the_bias(ops):
    bias = array("bias", 8)
    ln = LayerNorm(ops.place(array("weight", 8)), ops.place(bias), 1e-5)
    y = ops.layer_norm(ops.place(np.full((1, 2, 8), 3, np.float32)), ln)
    assert_close(ops, y, np.broadcast_to(bias, (1, 2, 8)))


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("rows", [(1, 1), (1, 2), (1, 7), (4, 1), (3, 5), (2, 40)])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("n_out", [20, 70])
def test_linear(ops, activation, rows, has_bias, n_out):
    x, weight, bias = array("x", *rows, 12), array("weight", 12, n_out), array("bias", n_out)
    w = Linear(ops.place_matrix(weight), ops.place(bias) if has_bias else None)
    y = ops.linear(ops.place(x.copy()), w, activation=activation)
    exact = x.astype(np.float64) @ weight + has_bias * bias
    if activation:
        exact = np.vectorize(EXACT_ACTIVATIONS[activation])(exact)
    assert_close(ops, y, exact)


def test_linear_takes_a_transposed_matrix(ops):
    x, wte = array("x", 2, 3, 12), array("wte", 20, 12)
    y = ops.linear(ops.place(x), Linear(ops.place_matrix(wte, transposed=True)))
    assert_close(ops, y, x.astype(np.float64) @ wte.T)


@pytest.mark.parametrize("D", [8, 64, 70])
@pytest.mark.parametrize("T", [1, 2, 24, 64, 150])
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("padding", [None, (0, 1)])
def test_attend(ops, T, D, scale, padding):
    q = array("q", 2, 3, T, D)
    S = T + 2
    keys, values = array("keys", 2, 3, S, D), array("values", 2, 3, S, D)
    visible = (np.arange(S) <= np.arange(S - T, S)[:, None])[None, None]
    if padding:
        visible = visible & (np.arange(S) >= np.array(padding)[:, None, None])[:, None]
    attended = ops.attend(
        ops.place(q.copy()),
        ops.place(keys),
        ops.place(values),
        scale,
        None if T == 1 and padding is None else ops.xp.asarray(visible),
    )
    scores = scale * q.astype(np.float64) @ keys.swapaxes(-1, -2)
    exact = exact_softmax(np.where(visible, scores, -np.inf)) @ values
    # Scores grow with the head size, and what rounds off of them with them.
    assert_close(ops, attended, exact, tolerance=2e-6 if D == 8 else 4e-6)


def test_numbers_need_not_lie_side_by_side(ops):
    x, matrix = array("x", 3, 24), array("matrix", 12, 20)
    w = Linear(ops.place_matrix(matrix))
    assert_close(ops, ops.linear(x[:, ::2], w), x[:, ::2].astype(np.float64) @ matrix)
    whole = ops.log_normalizer(x[:, ::2].copy())
    assert np.array_equal(ops.to_host(ops.log_normalizer(x[:, ::2])), ops.to_host(whole))
    heads = array("heads", 1, 2, 3, 16)[..., ::2]
    seen = np.tril(np.ones((3, 3), bool))[None, None]
    views = ops.to_host(ops.attend(heads, heads, heads, 0.5, seen))
    assert np.array_equal(views, ops.to_host(ops.attend(*[heads.copy()] * 3, 0.5, seen)))


@pytest.mark.parametrize("T", [1, 5])
def test_attend_reads_views_of_longer_arrays(ops, T):
    qkv, cache = array("qkv", 2, T, 3 * 24), array("cache", 2, 3, 40, 8)
    q = qkv[:, :, :24].reshape(2, T, 3, 8).swapaxes(1, 2)
    keys = cache[:, :, :30]
    visible = (np.arange(30) <= np.arange(30 - T, 30)[:, None])[None, None]
    views = ops.attend(q, keys, keys, 0.3, visible)
    copies = ops.attend(q.copy(), keys.copy(), keys.copy(), 0.3, visible)
    assert np.array_equal(ops.to_host(views), ops.to_host(copies))


def test_attend_takes_nothing_from_what_is_invisible(ops):
    q, keys = array("q", 1, 1, 2, 4), array("keys", 1, 1, 3, 4)
    values = np.array([1, 2, 1e38], np.float32)[None, None, :, None]
    visible = np.array([[[[True, False, False], [True, True, False]]]])
    attended = ops.to_host(ops.attend(q, keys, values, 1.0, ops.xp.asarray(visible)))
    assert attended[0, 0, 0, 0] == 1
    assert 1 < attended[0, 0, 1, 0] < 2


def test_a_query_that_sees_nothing_gives_finite_numbers(ops):
    q, keys, values = (array(name, 1, 2, 3, 4) for name in ("q", "keys", "values"))
    attended = ops.attend(q, keys, values, 1.0, ops.xp.zeros((1, 1, 3, 3), bool))
    assert np.isfinite(ops.to_host(attended)).all()


def test_attend_survives_scores_beyond_what_exp_can_take(ops):
    q, keys, values = (100 * array(name, 1, 2, 3, 4) for name in ("q", "keys", "values"))
    visible = ops.xp.tril(ops.xp.ones((3, 3), bool))[None, None]
    attended = ops.to_host(ops.attend(q, keys, values, 1.0, visible))
    assert np.isfinite(attended).all()
    assert abs(attended).max() <= abs(values).max() * 1.00001


@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (5, 50_257)])
def test_log_normalizer(ops, shape):
    logits = 5 * array("logits", shape[0], shape[1] + 3)[:, :-3]  # rows may lie apart
    found = ops.to_host(ops.log_normalizer(logits))
    exact = np.log(np.exp(logits.astype(np.float64)).sum(axis=-1))
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, exact, rtol=1e-6)


def test_the_normalizer_of_what_is_no_number_is_none(ops):
    logits = np.array([[1, np.nan, 2], [1, 2, 3]], np.float32)
    assert np.isnan(ops.to_host(ops.log_normalizer(logits))).tolist() == [True, False]


def test_the_arguments_are_left_as_they_are(ops):
    x, matrix = array("x", 2, 4, 8), array("matrix", 8, 8)
    heads = array("heads", 2, 2, 4, 4)
    copies = x.copy(), matrix.copy(), heads.copy()
    ops.layer_norm(x, LayerNorm(matrix[0], matrix[1], 1e-5))
    placed = ops.place_matrix(matrix)
    for activation in (None, *ACTIVATIONS):
        ops.linear(x, Linear(placed, matrix[0]), activation=activation)
    ops.attend(heads, heads, heads, 0.5, ops.xp.eye(4, dtype=bool)[None, None])
    ops.embed(placed, matrix, np.array([[1, 2]]), np.array([[0, 1]]))
    assert all(map(np.array_equal, (x, matrix, heads), copies))


def activated(ops, x, activation):
    """The activation of each number, as `linear` applies it."""
    one = Linear(ops.place_matrix(np.ones((1, 1), np.float32)))
    return ops.to_host(ops.linear(ops.place(x[:, None]), one, activation=activation))[:, 0]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_exact_to_a_millionth(ops, activation):
    x = np.linspace(-12, 12, 4001, dtype=np.float32)
    exact = [EXACT_ACTIVATIONS[activation](value) for value in x.tolist()]
    y = activated(ops, x, activation)
    assert y.dtype == np.float32
    assert (abs(y - exact) <= 1e-6 * abs(x) + 1e-7).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_have_their_limits_far_out(ops, activation):
    x = np.array([-1e4, -200, 0, 200, 1e4], np.float32)
    limits = [-1, -1, 0, 1, 1] if activation == "tanh" else [0, 0, 0, 200, 1e4]
    assert ACTIVATIONS[activation](x.copy()).tolist() == limits
    assert abs(activated(ops, x, activation) - limits).max() < 1e-30


def test_what_is_no_number_stays_so(ops):
    x = np.array([np.nan, 1, np.inf, 2], np.float32)[None, None, :, None]
    seen = np.tril(np.ones((4, 4), bool))[None, None]
    assert np.isnan(activated(ops, x[0, 0, :, 0], "gelu_new")).tolist() == [True, *[False] * 3]
    for q, keys, values in ((x, x, abs(x)), (np.ones_like(x), x, np.ones_like(x))):
        y = ops.to_host(ops.attend(q, keys, values, 1.0, seen))
        assert np.isnan(y[0, 0, :, 0]).all()


def test_the_compiled_exponential_is_exact_to_two_units_in_the_last_place():
    pytest.importorskip("numba")
    from gpt_cli.ops.kernels import exp

    for x in np.linspace(-86.9, 88, 5000, dtype=np.float32):
        exact = np.float32(math.exp(x))
        assert abs(exp(x) - exact) <= 2 * np.spacing(exact)
    assert exp(np.float32(-88)) == exp(np.float32(-np.inf)) == 0
    assert exp(np.float32(100)) == exp(np.float32(88))
    assert np.isnan(exp(np.float32(np.nan)))


@pytest.fixture
def unset(monkeypatch):
    monkeypatch.delenv("GPT_CLI_OPS")
    return monkeypatch


def without_numba(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr("gpt_cli.ops.find_spec", lambda name: None)
    for name in ("numba_ops", "kernels"):
        monkeypatch.delitem(sys.modules, f"gpt_cli.ops.{name}", raising=False)
        monkeypatch.delattr(f"gpt_cli.ops.{name}", raising=False)


def test_the_fastest_operations_are_taken_unless_little_is_computed(unset):
    pytest.importorskip("numba")
    assert get_ops("cpu", "float32").name == "numba"
    unset.setattr("gpt_cli.gpu.problem", lambda: "none is there")
    assert get_ops("auto", "float32").name == "numba"
    assert get_ops("cpu", "float32", brief=True).name == "numpy"


def test_numpy_does_where_numba_is_missing(unset):
    without_numba(unset)
    assert get_ops("cpu", "float32").name == "numpy"


@pytest.mark.parametrize("brief", [True, False])
def test_the_operations_may_be_chosen(unset, brief):
    unset.setenv("GPT_CLI_OPS", "numpy")
    assert get_ops("cpu", "float32", brief=brief).name == "numpy"
    pytest.importorskip("numba")
    unset.setenv("GPT_CLI_OPS", "numba")
    assert get_ops("cpu", "float32", brief=brief).name == "numba"


def test_a_choice_that_cannot_be_had_is_an_error(unset):
    unset.setenv("GPT_CLI_OPS", "abacus")
    with pytest.raises(
        InputError, match="GPT_CLI_OPS must be numba or numpy for float32, not 'abacus'"
    ):
        get_ops("cpu", "float32")
    unset.setenv("GPT_CLI_OPS", "numba")
    without_numba(unset)
    with pytest.raises(InputError, match=r"needs numba: pip install 'gpt-cli\[fast\]'"):
        get_ops("cpu", "float32")


def test_it_is_known_how_many_threads_compute(ops):
    assert 1 <= ops.threads <= os.cpu_count()


@posix
def test_compiled_operations_refuse_to_be_used_in_a_fork(make_model, ops):
    if ops.name != "numba":
        pytest.skip("NumPy's threads are made anew")
    model = make_model()
    forward(model, np.array([[1, 2]]))

    def refused():
        with pytest.raises(ResourceError, match="GPT_CLI_OPS=numpy"):
            forward(model, np.array([[1, 2]]))
        with pytest.raises(ResourceError, match="GPT_CLI_OPS=numpy"):
            type(ops)()

    assert in_a_fork(refused) == 7


@pytest.mark.parametrize(("device", "dtype"), [("abacus", "float32"), ("cpu", "float7")])
def test_what_nothing_computes_is_refused(device, dtype):
    with pytest.raises(InputError, match=f"cannot compute in {dtype} on {device}"):
        get_ops(device, dtype)


# --- products with few rows ----------------------------------------------------------------------


@pytest.fixture
def often(monkeypatch):
    """Matrices of any size are cut in blocks at once, whatever this machine's library is."""
    monkeypatch.setattr(few_rows, "_openblas", lambda: "a library")
    monkeypatch.setattr(few_rows, "_threads", lambda: 2)
    monkeypatch.setattr(few_rows, "_OFTEN", 1)
    monkeypatch.setattr(few_rows, "_SMALL", 2000)
    monkeypatch.setattr(few_rows, "COLUMNS", 4)
    few_rows._pool.cache_clear()
    yield
    few_rows._pool.cache_clear()


@pytest.fixture
def uncut(monkeypatch):
    monkeypatch.setattr(few_rows, "_cut", lambda weight: pytest.fail("it was cut"))


@pytest.mark.parametrize("n_threads", [1, 2, 3, 50])
@pytest.mark.parametrize("n_out", [64, 67, 160])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_in_blocks_is_the_product(often, monkeypatch, n_threads, n_out, transposed):
    monkeypatch.setattr(few_rows, "_threads", lambda: n_threads)
    cut = []
    monkeypatch.setattr(
        few_rows, "_cut", lambda weight, real=few_rows._cut: cut.append(1) or real(weight)
    )
    w = Linear(array("w", n_out, 24).T if transposed else array("w", 24, n_out))
    products = few_rows.FewRows()
    for rows in (2, 8, few_rows.MOST_ROWS, 3):
        x = array("x", rows, 24)
        np.testing.assert_allclose(products.product(x, w), x @ w.weight, rtol=0, atol=1e-5)
    assert cut == [1]


@pytest.mark.parametrize(("rows", "n_in", "n_out"), [(8, 80, 64), (2, 4, 16)])
def test_a_product_too_large_or_too_small_for_blocks_is_left_whole(often, uncut, rows, n_in, n_out):
    few_rows.FewRows().product(array("x", rows, n_in), Linear(array("w", n_in, n_out)))


@pytest.mark.parametrize("why", ["memory", "kernels", "seldom"])
def test_a_matrix_is_cut_only_where_that_pays(often, uncut, monkeypatch, why):
    if why == "memory":
        monkeypatch.setattr(few_rows, "free_memory", lambda: 4 * 64 * 64 * 4 - 1)
    elif why == "kernels":
        monkeypatch.setattr(few_rows, "_openblas", lambda: None)
    else:
        monkeypatch.setattr(few_rows, "_OFTEN", 16)
    products, w, x = few_rows.FewRows(), Linear(array("w", 64, 64)), array("x", 4, 64)
    for _ in range(15):
        products.product(x, w)


def test_all_blocks_together_take_a_quarter_of_the_free_memory(often, monkeypatch):
    cut = []
    monkeypatch.setattr(
        few_rows, "_cut", lambda weight, real=few_rows._cut: cut.append(1) or real(weight)
    )
    monkeypatch.setattr(few_rows, "free_memory", lambda: 4 * 3 * 64 * 64 * 4)
    products, matrices = few_rows.FewRows(), [Linear(array("w", 64, 64)) for _ in range(5)]
    for w in matrices:
        products.product(array("x", 4, 64), w)
    assert len(cut) == 3


def test_what_is_kept_for_a_matrix_goes_with_it(often):
    products, w = few_rows.FewRows(), Linear(array("w", 64, 64))
    products.product(array("x", 4, 64), w)
    assert len(products._blocks) == 1
    del w
    assert len(products._blocks) == 0


@posix
def test_a_child_of_a_fork_has_threads_of_its_own(often):
    products, w, x = few_rows.FewRows(), Linear(array("w", 64, 64)), array("x", 4, 64)
    products.product(x, w)
    assert in_a_fork(lambda: products.product(x, w)) == 7


def test_whether_the_library_has_such_kernels_can_be_told():
    assert (few_rows._openblas() is None) <= (few_rows._threads() == 1)


def test_a_small_batch_computes_the_same_in_blocks(often):
    weight, bias, x = array("w", 64, 96), array("b", 96), array("x", 4, 1, 64)
    ops, w = NumPyOps(), Linear(weight, bias)
    for _ in range(2):
        assert_close(ops, ops.linear(x, w), x.astype(np.float64) @ weight + bias)
