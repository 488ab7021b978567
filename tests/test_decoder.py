from dataclasses import replace

import numpy as np
import pytest
from checkpoints import CONFIG, make_weights

from gpt_cli import checkpoint
from gpt_cli.config import GPT2Config
from gpt_cli.generate import Completion, Options, Request, generate
from gpt_cli.kv_cache import KVCache
from gpt_cli.model import Decoder, forward
from gpt_cli.ops import get_ops

TEXT = np.arange(1, 41)[None] * 7 % CONFIG["vocab_size"]
CHANGES = [
    {},
    {"n_embd": 96, "n_head": 2, "n_inner": 100},
    {"n_layer": 1, "tie_word_embeddings": False, "scale_attn_weights": False},
    {"activation_function": "gelu"},  # is not recorded
]


@pytest.fixture(scope="module", params=["float32", "int8"])
def ops(request):
    pytest.importorskip("numba")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPT_CLI_OPS", "numba")
        return get_ops("cpu", request.param)


def model_with(ops, **changes):
    config = CONFIG | changes
    return checkpoint.assemble(GPT2Config.from_dict(config), ops, make_weights(config))


def begun(model, tokens=5, capacity=40):
    """A cache of the text's first tokens."""
    cache = KVCache(model.config, model.ops, 1, capacity)
    forward(model, TEXT[:, :tokens], cache)
    return cache


def assert_alike(found, expected):
    """The same but for the last bits, which may tip a number from one 16-bit number to the next."""
    assert found.shape == expected.shape
    found, expected = found.astype(np.float32), expected.astype(np.float32)
    last = 2.0**-10 * abs(expected)  # of float16, which keys and values are
    assert (abs(found - expected) <= 1e-3 * expected.std() + last).all()


def test_what_is_not_compiled_is_not_recorded(ops):
    assert ops.recorder(3, "gelu_new") is not None
    assert ops.recorder(3, "gelu") is None


@pytest.mark.parametrize("changes", CHANGES)
def test_a_decoder_computes_what_forward_does(ops, changes):
    model = model_with(ops, **changes)
    cache, other = begun(model), begun(model)
    decode = Decoder(model, cache)
    assert cache.length == 5
    for place in range(5, 40):
        id = TEXT[:, place : place + 1]
        assert_alike(decode(id), forward(model, id, other))
    assert cache.length == other.length == 40
    assert_alike(cache.k, other.k)
    assert_alike(cache.v, other.v)


def test_a_recorded_step_is_the_same_with_any_number_of_threads(ops):
    """Also where fewer come than are called: nobody waits for one who has taken nothing."""
    from gpt_cli.ops import kernels

    model = model_with(ops, n_embd=256, n_head=8, vocab_size=1000)
    recorder = ops.recorder(5, "gelu_new")
    cache = begun(model)
    recorder.finish(forward(replace(model, ops=recorder), TEXT[:, :1], cache))
    expected = recorder.step(TEXT[:, :1], 5).copy()
    for threads in (1, 2, 3, 16) * 10:
        recorder._result[:] = np.nan
        program = recorder._program, recorder._epsilons_and_scales
        kernels.repeat(*program, 5, recorder._nothing_kept, recorder._board, threads)
        assert np.array_equal(recorder._result, expected)


def test_decoders_of_several_texts_do_not_disturb_each_other(ops):
    model = model_with(ops)
    short, long = Decoder(model, begun(model, 1)), Decoder(model, begun(model, 20))
    others = begun(model, 1), begun(model, 20)
    for id in TEXT[0, 20:30]:
        for decode, other in zip((short, long), others, strict=True):
            assert_alike(decode(id[None, None]), forward(model, id[None, None], other))


def test_a_full_cache_is_noticed(ops):
    model = model_with(ops)
    decode = Decoder(model, begun(model, 5, capacity=6))
    decode(TEXT[:, :1])
    with pytest.raises(IndexError, match="the cache has room for 6 tokens"):
        decode(TEXT[:, :1])


def test_an_id_that_the_model_does_not_have_is_noticed(ops):
    model = model_with(ops)
    decode = Decoder(model, begun(model))
    for id in (-1, CONFIG["vocab_size"]):
        with pytest.raises(IndexError):
            decode(np.array([[id]]))


@pytest.mark.parametrize("overflow", ["error", "shift"])
def test_the_last_row_of_a_batch_goes_on_as_it_would_alone(ops, tokenizer, overflow):
    model = model_with(ops)
    options = Options(max_tokens=100, temperature=0, ignore_eos=True, overflow=overflow)
    rows = [Request([1, 2, 3], options), Request([4, 5, 6], Options(max_tokens=5, seed=1), 1)]

    def ids(requests):
        done = [Completion(len(row.prompt), 0) for row in requests]
        for step in generate(model, tokenizer, requests):
            done[step.row].add(step)
        return done[0].ids

    alone = ids(rows[:1])
    assert len(alone) == (100 if overflow == "shift" else 77)
    assert ids(rows) == alone
