"""The operations on a GPU, and without one on `emulated_cuda`."""

import shutil
import sys

import numpy as np
import pytest

from gpt_cli.engine import Engine
from gpt_cli.folder.config import GPT2Config
from gpt_cli.generation.generate import Run
from gpt_cli.generation.loaded import LoadedModel
from gpt_cli.generation.row import Request
from gpt_cli.gpt2 import checkpoint
from gpt_cli.gpt2.kv_cache import KVCache
from gpt_cli.gpt2.model import forward
from gpt_cli.ops import LayerNorm, Linear, get_ops
from gpt_cli.ops.numpy_ops import ACTIVATIONS, NumPyOps
from gpt_cli.options.request import Options
from gpt_cli.scoring.trace import trace
from gpt_cli.scoring.tree import tree
from gpt_cli.system import gpu
from support import emulated_cuda
from support.checkpoints import CONFIG, make_weights

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
        patch.delenv("GPT_CLI_OPS", raising=False)
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
        patch.setattr(sys.modules[type(ops).__module__], "_THREADS", 64)  # fewer to emulate
        yield ops


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def assert_close(ops, found, expected):
    found = ops.to_host(found)
    assert found.shape == expected.shape
    scale = 1e-5 if ops.dtype == "float32" else 5e-3
    np.testing.assert_allclose(found, expected, rtol=scale, atol=scale * abs(expected).max())


def matrices(ops, n_in, n_out, transposed=False):
    """Place the same matrix with both implementations."""
    matrix = random(n_out, n_in) if transposed else random(n_in, n_out)
    return [each.place_matrix(matrix, transposed=transposed) for each in (ops, NUMPY)]


@pytest.mark.parametrize("C", [5, 64, 300])
def test_layer_norm(ops, C):
    x, weight, bias = random(2, 3, C), random(C, seed=1), random(C, seed=2)
    ln = LayerNorm(ops.xp.asarray(weight), ops.xp.asarray(bias), 1e-5)
    found = ops.layer_norm(ops.xp.asarray(x), ln)
    assert found.dtype == ops.dtype
    assert_close(ops, found, NUMPY.layer_norm(x, LayerNorm(weight, bias, 1e-5)))


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("n_out", [24, 29])
def test_linear(ops, activation, transposed, n_out):
    x, bias = random(2, 3, 40, seed=1), random(n_out, seed=2)
    placed, matrix = matrices(ops, 40, n_out, transposed)
    found = ops.linear(ops.xp.asarray(x), Linear(placed, ops.xp.asarray(bias)), activation)
    assert_close(ops, found, NUMPY.linear(x, Linear(matrix, bias), activation))


def test_logits_are_float32_of_a_vocabulary_of_any_size(ops):
    x = random(4, 3, 40, seed=1)
    placed, matrix = matrices(ops, 40, 29, transposed=True)
    found = ops.linear(ops.xp.asarray(x)[:, -1], Linear(placed))
    assert found.dtype == np.float32
    assert_close(ops, found, NUMPY.linear(x[:, -1], Linear(matrix)))


@pytest.mark.parametrize("positions", [[[4, 5, 6]], [[4, 5, 6], [0, 0, 1]]])
def test_embed(ops, positions):
    placed, matrix = matrices(ops, 20, 30, transposed=True)
    wpe = random(7, 20, seed=1)
    ids, positions = np.array([[1, 29, 3], [4, 5, 0]]), np.array(positions)
    found = ops.embed(placed, ops.xp.asarray(wpe), ops.xp.asarray(ids), positions)
    assert found.dtype == np.float32
    assert_close(ops, found, NUMPY.embed(matrix, wpe, ids, positions))


@pytest.mark.parametrize(("id", "position"), [(-1, 0), (30, 0), (0, 7), (0, -1)])
def test_ids_and_positions_out_of_range_give_nan(ops, id, position):
    placed, _ = matrices(ops, 20, 30, transposed=True)
    given = ops.xp.asarray([[id]]), np.array([[position]])
    assert np.isnan(ops.to_host(ops.embed(placed, ops.xp.asarray(random(7, 20)), *given))).all()


def stored(each, k, v, past, lengths, room=9):
    """Return the keys and values of one layer of a new cache after a `store`."""
    B, H, _, D = k.shape
    keys, values = (array[1] for array in each.new_cache(2, B, H, room, D))
    each.store(
        each.xp.asarray(k), each.xp.asarray(v), keys, values, np.array(past), np.array(lengths)
    )
    return keys, values


@pytest.mark.parametrize("views", [True, False])
def test_each_row_appends_its_own_tokens(ops, views):
    past, lengths = [0, 2, 3], [5, 3, 0]
    rows = random(3, 5, 2, 4, 6)  # (B, T, 2, H, D), as the model computes k and v
    for row, own in enumerate(lengths):
        rows[row, own:] = np.nan  # padding
    rows = rows.astype(ops.dtype)
    k, v = rows.transpose(2, 0, 3, 1, 4)
    if not views:
        k, v = k.astype(np.float32), v.copy()
    found, expected = (stored(each, k, v, past, lengths) for each in (ops, NUMPY))
    for there, here in zip(found, expected, strict=True):
        assert there.dtype == ops.dtype
        assert np.array_equal(ops.to_host(there), here)


def test_a_cache_that_is_not_contiguous_is_rejected(ops):
    k = ops.xp.asarray(random(2, 3, 1, 4))
    keys, values = (array[:, 0] for array in ops.new_cache(2, 2, 3, 5, 4))
    with pytest.raises(ValueError, match="must be contiguous"):
        ops.store(k, k, keys, values, np.array([0, 0]), np.array([1, 1]))
    with pytest.raises(ValueError, match="must be contiguous"):
        ops.attend(k, keys, values, 0.3, np.array([[1], [1]]))


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
    visible = np.array(visible)
    B, T = visible.shape
    S = visible.max() + 4  # beyond the visible keys: leftovers of another text
    q, (k, v) = random(B, T, 3, D).swapaxes(1, 2), random(2, B, 3, S, D, seed=1)
    found, expected = (
        each.attend(each.xp.asarray(q), *stored(each, k, v, [0] * B, [S] * B, room=S), 0.3, visible)
        for each in (ops, NUMPY)
    )
    assert_close(ops, found, expected)


@pytest.mark.parametrize("visible", [[[5], [3]], [[1, 3, 5], [1, 2, 3]]])
def test_unwritten_keys_and_values_do_not_matter(ops, visible):
    q, k, v = random(3, 2, 2, 5, 8)
    q, visible = q[:, :, : len(visible[0])], np.array(visible)
    found, expected = (
        each.attend(each.xp.asarray(q), *stored(each, k, v, [0, 0], [5, 3]), 0.3, visible)
        for each in (ops, NUMPY)
    )
    assert_close(ops, found, expected)


def test_a_text_too_long_for_shared_memory(ops, monkeypatch):
    monkeypatch.setattr(sys.modules[type(ops).__module__], "_SHARED", 0)
    q, k, v = random(3, 2, 2, 50, 16)
    q, visible = q[:, :, :1], np.array([[50], [41]])
    found, expected = (
        each.attend(
            each.xp.asarray(q), *stored(each, k, v, [0, 0], [50, 41], room=50), 0.3, visible
        )
        for each in (ops, NUMPY)
    )
    assert_close(ops, found, expected)


def test_exp_and_log_normalizer(ops):
    x = random(3, 100) * 9
    np.testing.assert_allclose(ops.to_host(ops.exp(ops.xp.asarray(x))), np.exp(x), rtol=1e-6)
    assert_close(ops, ops.log_normalizer(ops.xp.asarray(x)), NUMPY.log_normalizer(x))


def test_cumulative_counts(ops):
    x = random(3, 100) * 9
    found = ops.to_host(ops.cumulative_counts(ops.xp.asarray(x)))
    assert found.dtype == np.int64
    np.testing.assert_allclose(found, NUMPY.cumulative_counts(x), rtol=1e-6)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False, "n_inner": 20}])
@pytest.mark.parametrize("lengths", [[[9, 9], [1, 1], [2, 2]], [[9, 6], [1, 1], [2, 0]]])
def test_logits_are_those_of_the_cpu(ops, changes, lengths):
    config = CONFIG | changes
    logits = {}
    for each in (ops, NUMPY):
        model = checkpoint.assemble(GPT2Config.from_dict(config), each, make_weights(config))
        cache = KVCache(model.config, each, 2, 12)
        ids = each.xp.asarray(np.arange(24).reshape(2, 12))
        rows = []
        for part, new in zip((ids[:, :9], ids[:, 9:10], ids[:, 10:]), lengths, strict=True):
            computed = each.to_host(forward(model, part, cache, np.array(new)))
            rows += [row[:own] for row, own in zip(computed, new, strict=True)]
        logits[each.name] = np.concatenate(rows)
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
        pytest.skip("float16 rounds differently")
    how = {"seed": 3, "ignore_eos": True, "use_cache": use_cache} | how
    rows = [([1, 2, 3], 6), ([4, 5], 3), ([6, 7, 8, 9, 10], 5)]  # prompts, new tokens
    requests = [
        Request(prompt, Options(max_tokens=new, **how), index)
        for index, (prompt, new) in enumerate(rows)
    ]
    done = {}
    for each in (ops, NUMPY):
        model = checkpoint.assemble(GPT2Config.from_dict(CONFIG), each, make_weights(CONFIG))
        run = Run(LoadedModel(model, tokenizer), requests)
        list(run)
        done[each.name] = run.completions
    for found, expected in zip(done["cupy"], done["numpy"], strict=True):
        assert found.ids == expected.ids
        assert found.text == expected.text
        np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=1e-4)


def test_a_score_is_that_of_the_cpu(ops, tokenizer):
    config = GPT2Config.from_dict(CONFIG)
    found, expected = (
        Engine(
            LoadedModel(checkpoint.assemble(config, each, make_weights(CONFIG)), tokenizer), "m", 0
        ).score("The sand\nis hering", bos=True, ranks=True, entropies=True, words=True)
        for each in (ops, NUMPY)
    )
    tolerance = 1e-4 if ops.dtype == "float32" else 1e-2
    for there, here in (
        (found.token_logprobs, expected.token_logprobs),
        (found.entropies, expected.entropies),
        ([w.surprisal for w in found.words], [w.surprisal for w in expected.words]),
    ):
        np.testing.assert_allclose(there, here, rtol=tolerance)
    if ops.dtype == "float32":
        assert found.ranks == expected.ranks


def test_a_trace_is_that_of_the_cpu(ops):
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


def test_a_tree_is_that_of_the_cpu(ops):
    if ops.dtype == "float16":
        pytest.skip("float16 rounds differently")

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
