"""Passes of more rows than one launch has, on an emulated GPU: the bits of the C library."""

import numpy as np
import pytest

from gpt_cli.gpt2.kv_cache import KVCache
from gpt_cli.gpt2.model import hidden_states
from gpt_cli.ops import get_ops
from gpt_cli.ops.cuda import plans
from gpt_cli.options.request import SamplingParams
from support import emulated_cuda
from support.decoding import decode_by_steps
from support.emulated_kernels import Card
from support.models import DTYPES, model_of
from support.native_arrays import assert_same_bits

CARDS = [Card(), Card(backwards=True), Card(capability=75, shared_memory=65_536)]
STEPS, CAPACITY = 5, 40
SHAPES = [
    {"n_layer": 2, "n_head": 2, "head_size": 8},
    {
        "n_layer": 1, "n_head": 3, "head_size": 5, "n_inner": 44, "tie_word_embeddings": False,
        "activation_function": "relu",
    },
]  # fmt: skip
PARAMS = SamplingParams(temperature=0.9, top_k=9, top_p=0.95, min_p=0.001)


@pytest.fixture
def both(monkeypatch, library):
    """Return a function that makes a model on the CPU, and the same on a GPU."""
    monkeypatch.delenv("GPT_CLI_OPS", raising=False)

    def make(dtype, card=CARDS[0], **changes):
        emulated_cuda.install(monkeypatch, card)
        return [model_of(get_ops(device, dtype), dtype, **changes) for device in ("cpu", "cuda")]

    return make


def ragged(rows):
    """Return texts (rows, 12) and their lengths, from 1 to 12."""
    ids = np.random.default_rng(rows).integers(0, 250, (rows, 12))
    return ids, 1 + np.arange(rows) % 12


def cache_of(model, ids, lengths):
    cache = KVCache(model.config, model.ops, len(ids) + 3, CAPACITY).view(len(ids))
    x = hidden_states(model, model.ops.xp.asarray(ids), cache, lengths)
    return cache, model.ops.to_host(x)


def decoded(model, rows, *, banned=(3, 7), params=PARAMS, decode=None, steps=STEPS):
    """Return what `decode` gives for texts of different lengths."""
    ids, lengths = ragged(rows)
    cache, _ = cache_of(model, ids, lengths)
    uniforms = np.random.default_rng(1).random((steps, rows))
    banned = model.ops.xp.asarray(np.array(banned, np.int64))
    last = np.arange(rows)
    if decode is None:
        return model.ops.decode(model, cache, last, uniforms, banned, params)
    return decode(model, cache, last, uniforms, banned, params)


def assert_same_tokens(cpu, cuda, rows, **how):
    expected = decoded(cpu, rows, decode=decode_by_steps, **how)
    actual = decoded(cuda, rows, **how)
    assert np.array_equal(actual[0], expected[0])
    assert actual[1].tobytes() == expected[1].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "shape"), [(17, 0), (23, 1), (40, 1)])
def test_decode(both, dtype, rows, shape):
    card = CARDS[rows % len(CARDS)]
    assert_same_tokens(*both(dtype, card, **SHAPES[shape]), rows)


@pytest.mark.parametrize(
    "how",
    [
        {"banned": ()},
        {"banned": range(0, 250, 3)},
        {"banned": range(0, 250, 3), "params": SamplingParams(temperature=2.0, top_k=200)},
        {"params": SamplingParams(temperature=1e-3, top_k=1), "steps": 1},
    ],
)
def test_decode_with_other_choices(both, how):
    assert_same_tokens(*both("float32", **SHAPES[0]), 18, **how)


@pytest.mark.parametrize("rows", [1, 9])
def test_rows_that_no_pass_can_have_decode_by_operations(both, monkeypatch, rows):
    cpu, cuda = both("float32", **SHAPES[1])
    monkeypatch.setattr(cuda.ops._passes, "decode", None)
    assert_same_tokens(cpu, cuda, rows)


def test_up_to_8_rows_decode_in_one_launch(both, monkeypatch):
    cpu, cuda = both("float32", **SHAPES[0])
    monkeypatch.setattr("gpt_cli.ops.cuda.decoding.decode", None)
    assert_same_tokens(cpu, cuda, 8)


def test_texts_whose_scores_are_not_in_shared_memory(both, monkeypatch):
    attend, small = plans.attend, plans.Device(2, 100)
    monkeypatch.setattr(plans, "attend", lambda *shape: attend(*shape[:-1], small))
    assert plans.attend(1, 1, 8, 1, None).kernel == "attend_long"
    assert_same_tokens(*both("float32", **SHAPES[0]), 17)


@pytest.mark.parametrize("damage", [np.nan, np.inf, 2e38])
def test_results_that_are_not_finite_end_the_call(both, damage):
    cuda = both("float32", **SHAPES[0])[1]
    bias = np.zeros(cuda.config.vocab_size, np.float32)
    bias[100] = damage
    object.__setattr__(cuda.lm_head, "bias", cuda.ops.xp.asarray(bias))
    assert decoded(cuda, 17) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("changes", SHAPES)
@pytest.mark.parametrize("rows", [2, 17])
def test_layers_of_ragged_texts(both, dtype, changes, rows):
    ids, lengths = ragged(rows)
    expected, actual = (
        cache_of(model, ids, lengths)[1] for model in both(dtype, CARDS[rows % 3], **changes)
    )
    for row, length in enumerate(lengths):
        assert_same_bits(actual[row, :length], expected[row, :length])


def test_layers_do_not_change_their_argument(both):
    cuda = both("float32", **SHAPES[0])[1]
    x = np.random.default_rng(0).standard_normal((20, 1, 16), np.float32)
    device = cuda.ops.xp.asarray(x)
    cache = KVCache(cuda.config, cuda.ops, 20, CAPACITY)
    cache.reserve(np.ones(20, np.int64))
    cuda.ops.layers(device, cuda.h, np.ones((20, 1), np.int64), cache)
    assert_same_bits(cuda.ops.to_host(device), x)
