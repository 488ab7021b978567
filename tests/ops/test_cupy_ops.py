"""The operations on a GPU, and without one on `emulated_cuda`."""

import sys

import numpy as np
import pytest

from gpt_cli.engine import Engine
from gpt_cli.generation.loaded import LoadedModel
from gpt_cli.generation.row import Request
from gpt_cli.gpt2.kv_cache import KVCache
from gpt_cli.gpt2.model import forward
from gpt_cli.ops import LayerNorm, Linear, get_ops
from gpt_cli.ops.numpy_ops import ACTIVATIONS, NumPyOps
from gpt_cli.options.request import Options
from gpt_cli.scoring.trace import trace
from gpt_cli.scoring.tree import tree
from gpt_cli.system import gpu
from support import emulated_cuda
from support.models import completions_of, model_of

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
def ops(request):
    device, dtype = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GPT_CLI_OPS", raising=False)
        if device == "gpu":
            if problem := gpu.problem():
                pytest.exit(f"nothing was tested: {problem}", returncode=1)
            ops = get_ops("cuda", dtype)
            assert ops.xp.cuda.is_available()
        else:
            emulated_cuda.install(patch)
            ops = get_ops("cuda", dtype)
            patch.setattr(sys.modules[type(ops).__module__], "_THREADS", 64)  # fewer to emulate
        yield ops


@pytest.fixture
def float32_ops(ops):
    if ops.dtype == "float16":
        pytest.skip("float16 rounds differently")
    return ops


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def assert_close(ops, compute):
    """Compare the results of a function for `ops` and for NumPy; return the first."""
    result, expected = compute(ops), compute(NUMPY)
    host = ops.to_host(result)
    assert host.shape == expected.shape
    scale = 1e-5 if ops.dtype == "float32" else 5e-3
    np.testing.assert_allclose(host, expected, rtol=scale, atol=scale * abs(expected).max())
    return result


def tolerance(ops):
    """Return the largest relative difference of the results of a whole model."""
    return 1e-4 if ops.dtype == "float32" else 1e-2


@pytest.mark.parametrize("C", [5, 64, 300])
def test_layer_norm(ops, C):
    def compute(ops):
        weight, bias = (ops.xp.asarray(random(C, seed=seed)) for seed in (1, 2))
        return ops.layer_norm(ops.xp.asarray(random(2, 3, C)), LayerNorm(weight, bias, 1e-5))

    assert assert_close(ops, compute).dtype == ops.dtype


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("n_out", [24, 29])
def test_linear(ops, activation, transposed, n_out):
    def compute(ops):
        x, bias = ops.xp.asarray(random(2, 3, 40, seed=1)), ops.xp.asarray(random(n_out, seed=2))
        matrix = random(n_out, 40) if transposed else random(40, n_out)
        w = Linear(ops.place_matrix(matrix, transposed=transposed), bias)
        return ops.linear(x, w, activation)

    assert_close(ops, compute)


def test_logits_are_float32_of_a_vocabulary_of_any_size(ops):
    def compute(ops):
        w = Linear(ops.place_matrix(random(29, 40), transposed=True))
        return ops.linear(ops.xp.asarray(random(4, 3, 40, seed=1))[:, -1], w)

    assert assert_close(ops, compute).dtype == np.float32


def embedded(ops, ids, positions):
    wte = ops.place_matrix(random(30, 20), transposed=True)
    wpe = ops.xp.asarray(random(7, 20, seed=1))
    return ops.embed(wte, wpe, ops.xp.asarray(ids), np.array(positions))


@pytest.mark.parametrize("positions", [[[4, 5, 6]], [[4, 5, 6], [0, 0, 1]]])
def test_embed(ops, positions):
    x = assert_close(ops, lambda ops: embedded(ops, [[1, 29, 3], [4, 5, 0]], positions))
    assert x.dtype == np.float32


@pytest.mark.parametrize(("id", "position"), [(-1, 0), (30, 0), (0, 7), (0, -1)])
def test_ids_and_positions_out_of_range_give_nan(ops, id, position):
    assert np.isnan(ops.to_host(embedded(ops, [[id]], [[position]]))).all()


def stored(ops, k, v, past, lengths, capacity=9):
    """Return the keys and values of one layer of a new cache after a `store`."""
    B, H, _, D = k.shape
    keys, values = (array[1] for array in ops.new_cache(2, B, H, capacity, D))
    k, v = ops.xp.asarray(k), ops.xp.asarray(v)
    ops.store(k, v, keys, values, np.array(past), np.array(lengths))
    return keys, values


@pytest.mark.parametrize("views", [True, False])
def test_a_row_appends_its_own_tokens(ops, views):
    past, lengths = [0, 2, 3], [5, 3, 0]
    rows = random(3, 5, 2, 4, 6)  # (B, T, 2, H, D), as the model computes k and v
    for row, length in enumerate(lengths):
        rows[row, length:] = np.nan  # padding
    rows = rows.astype(ops.dtype)
    k, v = rows.transpose(2, 0, 3, 1, 4)
    if not views:
        k, v = k.astype(np.float32), v.copy()
    results, expected = (stored(x, k, v, past, lengths) for x in (ops, NUMPY))
    for device, host in zip(results, expected, strict=True):
        assert device.dtype == ops.dtype
        assert np.array_equal(ops.to_host(device), host)


def test_a_cache_that_is_not_contiguous_is_rejected(ops):
    k = ops.xp.asarray(random(2, 3, 1, 4))
    keys, values = (array[:, 0] for array in ops.new_cache(2, 2, 3, 5, 4))
    with pytest.raises(ValueError, match="must be contiguous"):
        ops.store(k, k, keys, values, np.array([0, 0]), np.array([1, 1]))
    with pytest.raises(ValueError, match="must be contiguous"):
        ops.attend(k, keys, values, 0.3, np.array([[1], [1]]))


def assert_attention_is_close(ops, q, k, v, lengths, visible, capacity=9):
    """Compare attention over the first keys and values, `lengths` (B,) of each row."""

    def compute(ops):
        cache = stored(ops, k, v, [0] * len(k), lengths, capacity)
        return ops.attend(ops.xp.asarray(q), *cache, 0.3, np.array(visible))

    assert_close(ops, compute)


@pytest.mark.parametrize("D", [6, 64, 300])
@pytest.mark.parametrize(
    "visible",
    [
        [[1], [1]],
        [[70], [70]],
        [[70], [68]],
        [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]],
        [[1, 2, 3, 4, 5], [1, 2, 3, 3, 3]],
        [[38, 39, 40], [36, 37, 38]],
    ],
    ids=lambda visible: f"{visible[0]}-{visible[1]}",
)
def test_attend(ops, D, visible):
    B, T = np.shape(visible)
    S = np.max(visible) + 4  # beyond the visible keys: those of another text
    q, (k, v) = random(B, T, 3, D).swapaxes(1, 2), random(2, B, 3, S, D, seed=1)
    assert_attention_is_close(ops, q, k, v, [S] * B, visible, capacity=S)


@pytest.mark.parametrize("visible", [[[5], [3]], [[1, 3, 5], [1, 2, 3]]])
def test_unwritten_keys_and_values_do_not_matter(ops, visible):
    q, k, v = random(3, 2, 2, 5, 8)
    assert_attention_is_close(ops, q[:, :, : len(visible[0])], k, v, [5, 3], visible)


def test_a_text_too_long_for_shared_memory(ops, monkeypatch):
    monkeypatch.setattr(sys.modules[type(ops).__module__], "_SHARED", 0)
    q, k, v = random(3, 2, 2, 50, 16)
    assert_attention_is_close(ops, q[:, :, :1], k, v, [50, 41], [[50], [41]], capacity=50)


def test_exp_log_normalizer_and_cumulative_counts(ops):
    x = random(3, 100) * 9
    np.testing.assert_allclose(ops.to_host(ops.exp(ops.xp.asarray(x))), np.exp(x), rtol=1e-6)
    assert_close(ops, lambda ops: ops.log_normalizer(ops.xp.asarray(x)))
    sums = ops.to_host(ops.cumulative_counts(ops.xp.asarray(x)))
    assert sums.dtype == np.int64
    np.testing.assert_allclose(sums, NUMPY.cumulative_counts(x), rtol=1e-6)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False, "n_inner": 20}])
@pytest.mark.parametrize("lengths", [[[9, 9], [1, 1], [2, 2]], [[9, 6], [1, 1], [2, 0]]])
def test_logits_are_those_of_the_cpu(ops, changes, lengths):
    def logits(ops):
        model, rows = model_of(ops, **changes), []
        cache = KVCache(model.config, ops, 2, 12)
        ids = ops.xp.asarray(np.arange(24).reshape(2, 12))
        for part, new in zip((ids[:, :9], ids[:, 9:10], ids[:, 10:]), lengths, strict=True):
            computed = ops.to_host(forward(model, part, cache, np.array(new)))
            rows += [row[:length] for row, length in zip(computed, new, strict=True)]
        return np.concatenate(rows)

    expected = logits(NUMPY)
    assert abs(logits(ops) - expected).max() < tolerance(ops) * abs(expected).max()


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0},
        {"temperature": 1, "top_k": 0, "top_p": 1},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.01, "repeat_penalty": 1.2, "top_logprobs": 3},
    ],
)
@pytest.mark.parametrize("use_cache", [True, False])
def test_a_seed_gives_the_same_text_as_on_the_cpu(float32_ops, tokenizer, how, use_cache):
    how = {"seed": 3, "ignore_eos": True, "use_cache": use_cache} | how
    rows = [([1, 2, 3], 6), ([4, 5], 3), ([6, 7, 8, 9, 10], 5)]  # prompts, new tokens
    requests = [
        Request(prompt, Options(max_tokens=new, **how), index)
        for index, (prompt, new) in enumerate(rows)
    ]

    both = (completions_of(model_of(ops), tokenizer, requests) for ops in (float32_ops, NUMPY))
    for done, expected in zip(*both, strict=True):
        assert (done.ids, done.text) == (expected.ids, expected.text)
        np.testing.assert_allclose(done.logprobs, expected.logprobs, rtol=1e-4)


def test_a_score_is_that_of_the_cpu(ops, tokenizer):
    def score(ops):
        engine = Engine(LoadedModel(model_of(ops), tokenizer), "m", 0)
        return engine.score("The sand\nis hering", bos=True, ranks=True, entropies=True, words=True)

    def numbers(score):
        yield from (score.token_logprobs, score.entropies)
        yield [word.surprisal for word in score.words]

    result, expected = score(ops), score(NUMPY)
    for device, host in zip(numbers(result), numbers(expected), strict=True):
        np.testing.assert_allclose(device, host, rtol=tolerance(ops))
    if ops.dtype == "float32":
        assert result.ranks == expected.ranks


def test_a_trace_is_that_of_the_cpu(ops):
    result, expected = (trace(model_of(x), [1, 2, 3, 4, 5]) for x in (ops, NUMPY))
    for name in ("residual", "attention", "logits"):
        device, host = getattr(result, name), getattr(expected, name)
        assert isinstance(device, np.ndarray)
        assert abs(device - host).max() < tolerance(ops) * abs(host).max()
    (ids, logprobs), (cpu_ids, cpu_logprobs) = result.lens(3), expected.lens(3)
    np.testing.assert_allclose(logprobs, cpu_logprobs, atol=10 * tolerance(ops))
    if ops.dtype == "float32":
        assert np.array_equal(ids, cpu_ids)


def test_a_tree_is_that_of_the_cpu(float32_ops):
    def nodes(children):
        for node in children:
            yield node.id, node.total_logprob
            yield from nodes(node.children)

    (ids, logprobs), (cpu_ids, cpu_logprobs) = (
        zip(*nodes(tree(model_of(ops), [1, 2, 3], 12)), strict=True) for ops in (float32_ops, NUMPY)
    )
    assert ids == cpu_ids
    np.testing.assert_allclose(logprobs, cpu_logprobs, rtol=1e-4)
