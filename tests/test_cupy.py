"""The operations on a GPU, where there is one; and without one, on what `emulated_cuda` has."""

import shutil
import sys

import emulated_cuda
import numpy as np
import pytest
from checkpoints import CONFIG, make_weights

from gpt_cli import checkpoint, gpu
from gpt_cli.config import GPT2Config
from gpt_cli.generate import Completion, Options, Request, generate
from gpt_cli.kv_cache import KVCache
from gpt_cli.model import forward
from gpt_cli.ops import LayerNorm, Linear, get_ops
from gpt_cli.ops.numpy_ops import ACTIVATIONS, NumPyOps
from gpt_cli.trace import trace
from gpt_cli.tree import tree

NUMPY = NumPyOps()
DTYPES = ("float32", "float16")


@pytest.fixture(
    scope="module",
    params=[
        *(("emulated", dtype) for dtype in DTYPES),
        *(pytest.param(("gpu", dtype), marks=pytest.mark.gpu) for dtype in DTYPES),
    ],
    ids="-".join,
)
def ops(request, tmp_path_factory):
    device, dtype = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GPT_CLI_OPS")
        if device == "gpu":
            if problem := gpu.problem():
                pytest.exit(f"nothing was tested: {problem}", returncode=1)
            ops = get_ops("cuda", dtype)
            assert ops.xp.cuda.is_available()
            yield ops
            return
        if shutil.which("g++") is None:
            pytest.skip("needs a C++ compiler")
        emulated_cuda.install(patch, tmp_path_factory.mktemp("cuda"))
        ops = get_ops("cuda", dtype)
        patch.setattr(sys.modules[type(ops).__module__], "_THREADS", 64)  # fewer to wait for
        yield ops


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def assert_close(ops, found, expected):
    found = ops.to_host(found)
    assert found.shape == expected.shape
    scale = 1e-5 if ops.dtype == "float32" else 5e-3
    np.testing.assert_allclose(found, expected, rtol=scale, atol=scale * abs(expected).max())


def matrices(ops, n_in, n_out, transposed=False):
    """The same matrix for both."""
    matrix = random(n_out, n_in) if transposed else random(n_in, n_out)
    return [each.place_matrix(matrix, transposed=transposed) for each in (ops, NUMPY)]


@pytest.mark.parametrize("C", [5, 64, 300])
def test_layer_norm(ops, C):
    x, weight, bias = random(2, 3, C), random(C, seed=1), random(C, seed=2)
    ln = LayerNorm(ops.place(weight), ops.place(bias), 1e-5)
    found = ops.layer_norm(ops.place(x), ln)
    assert found.dtype == ops.dtype
    assert_close(ops, found, NUMPY.layer_norm(x, LayerNorm(weight, bias, 1e-5)))


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("n_out", [24, 29])
def test_linear(ops, activation, transposed, n_out):
    x, bias = random(2, 3, 40, seed=1), random(n_out, seed=2)
    placed, matrix = matrices(ops, 40, n_out, transposed)
    found = ops.linear(ops.place(x), Linear(placed, ops.place(bias)), activation)
    assert_close(ops, found, NUMPY.linear(x, Linear(matrix, bias), activation))


def test_logits_are_float32_of_a_vocabulary_of_any_size(ops):
    x = random(4, 3, 40, seed=1)
    placed, matrix = matrices(ops, 40, 29, transposed=True)
    found = ops.linear(ops.place(x)[:, -1], Linear(placed))
    assert found.dtype == np.float32
    assert_close(ops, found, NUMPY.linear(x[:, -1], Linear(matrix)))


def test_embed(ops):
    placed, matrix = matrices(ops, 20, 30, transposed=True)
    wpe = random(7, 20, seed=1)
    ids, positions = np.array([[1, 29, 3], [4, 5, 0]]), np.array([[4, 5, 6]])
    found = ops.embed(placed, ops.place(wpe), ops.xp.asarray(ids), ops.xp.asarray(positions))
    assert found.dtype == np.float32
    assert_close(ops, found, NUMPY.embed(matrix, wpe, ids, positions))


@pytest.mark.parametrize(("id", "position"), [(-1, 0), (30, 0), (0, 7), (0, -1)])
def test_what_is_out_of_range_is_no_number(ops, id, position):
    placed, _ = matrices(ops, 20, 30, transposed=True)
    given = (ops.xp.asarray([[number]]) for number in (id, position))
    assert np.isnan(ops.to_host(ops.embed(placed, ops.place(random(7, 20)), *given))).all()


@pytest.mark.parametrize("D", [6, 64, 300])
@pytest.mark.parametrize(
    ("T", "S", "padding", "cached"),
    [
        (1, 1, None, True),
        (1, 70, None, False),
        (1, 70, [0, 2], True),
        (5, 5, None, False),
        (5, 5, [0, 2], True),
        (3, 40, [0, 2], True),
    ],
)
def test_attend(ops, D, T, S, padding, cached):
    q = random(2, T, 3, D).swapaxes(1, 2)
    room = np.zeros((2, 2, 3, S + 4, D), np.float32)
    room[:, :, :, :S] = random(2, 2, 3, S, D, seed=1)
    k, v = room[:, :, :, :S] if cached else room[:, :, :, :S].copy()
    keys = np.arange(S)
    visible = (keys <= keys[S - T :, None])[None, None]
    if padding is not None:
        visible = visible & (keys >= np.array(padding)[:, None, None, None])
    elif T == 1:
        visible = None
    seen = None if visible is None else ops.xp.asarray(visible)
    kept = ops.place(room).astype(ops.cache_dtype)[:, :, :, :S]
    given = kept if cached else ops.place(room[:, :, :, :S].copy())
    found = ops.attend(ops.place(q), *given, 0.3, seen)
    assert_close(ops, found, NUMPY.attend(q, k, v, 0.3, visible))


def test_a_text_too_long_for_the_memory_of_a_block(ops, monkeypatch):
    monkeypatch.setattr(sys.modules[type(ops).__module__], "_SHARED", 0)
    q, k, v = random(3, 2, 2, 50, 16)
    q = q[:, :, :1]
    found = ops.attend(ops.place(q), ops.place(k), ops.place(v), 0.3, None)
    assert_close(ops, found, NUMPY.attend(q, k, v, 0.3, None))


def test_log_normalizer(ops):
    logits = random(3, 100) * 9
    assert_close(ops, ops.log_normalizer(ops.place(logits)), NUMPY.log_normalizer(logits))


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False, "n_inner": 20}])
@pytest.mark.parametrize("padding", [None, [0, 3]])
def test_the_model_computes_what_it_does_on_the_cpu(ops, changes, padding):
    config = CONFIG | changes
    logits = {}
    for each in (ops, NUMPY):
        xp = each.xp
        model = checkpoint.assemble(GPT2Config.from_dict(config), each, make_weights(config))
        cache = KVCache(model.config, each, 2, 12)
        ids = np.arange(24).reshape(2, 12)
        padded = None if padding is None else xp.asarray(padding)
        parts = [
            forward(model, xp.asarray(ids[:, part]), cache, padding=padded)
            for part in (slice(0, 9), slice(9, 10), slice(10, 12))
        ]
        logits[each.name] = np.concatenate([each.to_host(part) for part in parts], axis=1)
    found, expected = logits["cupy"], logits["numpy"]
    tolerance = 1e-4 if ops.dtype == "float32" else 1e-2
    assert abs(found - expected).max() < tolerance * abs(expected).max()


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0},
        {"temperature": 1, "top_k": 0, "top_p": 1},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.01, "repeat_penalty": 1.2, "top_logprobs": 3},
    ],
)
@pytest.mark.parametrize("use_cache", [True, False])
def test_a_seed_gives_the_same_text_as_on_the_cpu(ops, tokenizer, how, use_cache):
    if ops.dtype == "float16":
        pytest.skip("rounded otherwise")
    options = Options(max_tokens=6, seed=3, ignore_eos=True, use_cache=use_cache, **how)
    requests = [Request([1, 2, 3], options), Request([4, 5], options, 1)]
    done = {}
    for each in (ops, NUMPY):
        model = checkpoint.assemble(GPT2Config.from_dict(CONFIG), each, make_weights(CONFIG))
        completions = [Completion(len(row.prompt), 0) for row in requests]
        for step in generate(model, tokenizer, requests):
            completions[step.row].add(step)
        done[each.name] = completions
    for found, expected in zip(done["cupy"], done["numpy"], strict=True):
        assert found.ids == expected.ids
        assert found.text == expected.text
        np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=1e-4)


def test_what_is_inside_is_as_on_the_cpu(ops):
    tolerance = 1e-4 if ops.dtype == "float32" else 1e-2
    found, expected = (
        trace(
            checkpoint.assemble(GPT2Config.from_dict(CONFIG), each, make_weights(CONFIG)),
            [1, 2, 3, 4, 5],
        )
        for each in (ops, NUMPY)
    )
    for name in ("residual", "attention", "logits"):
        there, here = getattr(found, name), getattr(expected, name)
        assert isinstance(there, np.ndarray)
        assert abs(there - here).max() < tolerance * abs(here).max()
    there, here = found.lens(3), expected.lens(3)
    np.testing.assert_allclose(there[1], here[1], atol=10 * tolerance)
    if ops.dtype == "float32":
        assert np.array_equal(there[0], here[0])


def test_the_tree_is_as_on_the_cpu(ops):
    if ops.dtype == "float16":
        pytest.skip("rounded otherwise")

    def lines(nodes):
        for node in nodes:
            yield node.id, node.total_logprob
            yield from lines(node.children)

    found, expected = (
        [*lines(tree(checkpoint.assemble(config, each, make_weights(CONFIG)), [1, 2, 3], 12))]
        for config in [GPT2Config.from_dict(CONFIG)]
        for each in (ops, NUMPY)
    )
    assert [id for id, _ in found] == [id for id, _ in expected]
    np.testing.assert_allclose([p for _, p in found], [p for _, p in expected], rtol=1e-4)
