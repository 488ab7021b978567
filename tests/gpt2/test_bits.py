"""The library gives the same bits however a result is computed.

Each test computes a reference: a text alone, in one pass, without a cache, in one thread. Then it
computes the same in other ways.
"""

import operator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpt_cli
from gpt_cli.folder.config import ACTIVATIONS
from gpt_cli.generation.row import Request
from gpt_cli.generation.sampling import cumulated_weights, sample
from gpt_cli.gpt2.hooks import Recorder, hook_shapes, rows_of
from gpt_cli.gpt2.model import forward, hidden_states
from gpt_cli.gpt2.prefill import right_pad
from gpt_cli.ops import Ops
from gpt_cli.options.request import Options, SamplingParams
from gpt_cli.texts.loaded import LoadedModel
from gpt_cli.texts.text import Text
from support.checkpoints import VOCAB, noise
from support.models import (
    DTYPES,
    LEVELS,
    completions_of,
    computing,
    forward_in_chunks,
    model_of,
    outcomes,
    threads_and_levels,
)
from support.sampling_values import sampling_options
from support.scores import logprobs_of, question, score_ids

pytestmark = pytest.mark.usefixtures("library")

N_POSITIONS = 120

configs = st.fixed_dictionaries(
    {
        "vocab_size": st.integers(5, 130),
        "n_positions": st.just(N_POSITIONS),
        "n_layer": st.integers(1, 2),
        "n_head": st.integers(1, 3),
        "head_size": st.sampled_from([8, 16, 17, 32, 47, 64, 80]),
        "n_inner": st.sampled_from([33, 64, 100, 200]),
        "activation_function": st.sampled_from(ACTIVATIONS),
        "tie_word_embeddings": st.booleans(),
    }
)
lengths_of_rows = st.lists(st.integers(1, N_POSITIONS), min_size=1, max_size=5)


def assert_same_bits(actual, expected):
    assert actual.dtype == expected.dtype == np.float32
    assert np.array_equal(actual.view(np.uint32), expected.view(np.uint32))


# --- the model -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@given(config=configs, lengths=lengths_of_rows, way=threads_and_levels, data=st.data())
def test_a_text_has_the_same_logits_for_any_batch_chunks_threads_and_level(
    native, dtype, config, lengths, way, data
):
    model = model_of(native(dtype), dtype, **config)
    random = np.random.default_rng(data.draw(st.integers(0, 1000), "seed"))
    rows = [random.integers(config["vocab_size"], size=length) for length in lengths]
    with computing(model.ops, 1, LEVELS[0]):
        alone = [forward(model, row[None])[0] for row in rows]
    ids, lengths = right_pad(rows)
    T = ids.shape[1]
    ends = [*sorted(data.draw(st.sets(st.integers(1, T), max_size=6), "ends") - {T}), T]
    with computing(model.ops, *way):
        whole = forward(model, ids, None, lengths)
        chunks = forward_in_chunks(model, ids, ends, lengths)
    for logits in (whole, chunks):
        for row, expected in zip(logits, alone, strict=True):
            assert_same_bits(row[: len(expected)], expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_token_by_token_is_the_whole_text(native, dtype):
    model = model_of(native(dtype), dtype, n_head=3, head_size=47, n_positions=N_POSITIONS)
    ids = np.arange(2 * 110).reshape(2, 110) % 290
    whole = forward(model, ids)
    with computing(model.ops, 2, LEVELS[-1]):
        assert_same_bits(forward_in_chunks(model, ids, range(1, 111)), whole)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@given(config=configs, T=st.integers(1, 60), seed=st.integers(0, 1000))
@settings(max_examples=12)
def test_weights_in_16_bits_equal_the_same_weights_in_float32(native, dtype, config, T, seed):
    short, long = (
        model_of(native(held), dtype, seed=seed, **config) for held in (dtype, "float32")
    )
    ids = np.arange(T)[None] * 7 % config["vocab_size"]
    assert short.h[0].mlp.c_fc.weight.panels.dtype == np.uint16
    for level in LEVELS:
        with computing(short.ops, 2, level):
            assert_same_bits(forward(short, ids), forward(long, ids))


@pytest.mark.parametrize("dtype", DTYPES)
@given(config=configs, lengths=lengths_of_rows, way=threads_and_levels)
@settings(max_examples=12)
def test_layers_in_one_call_equals_the_single_operations(native, dtype, config, lengths, way):
    model = model_of(native(dtype), dtype, **config)
    ids, lengths = right_pad([np.arange(length) % config["vocab_size"] for length in lengths])
    ends = [(ids.shape[1] + 1) // 2, ids.shape[1]][ids.shape[1] == 1 :]
    expected = forward_in_chunks(model, ids, ends, lengths)
    with computing(model.ops, *way) as patch:
        patch.setattr(model.ops, "layers", None)
        actual = forward_in_chunks(model, ids, ends, lengths)
    for one, other, length in zip(actual, expected, lengths, strict=True):
        assert_same_bits(one[:length], other[:length])


@pytest.mark.parametrize("dtype", DTYPES)
@given(config=configs, lengths=lengths_of_rows, way=threads_and_levels)
@settings(max_examples=12)
def test_each_hook_has_the_same_values_in_any_batch(native, dtype, config, lengths, way):
    model = model_of(native(dtype), dtype, **config)
    names = frozenset(hook_shapes(model.config))
    rows = [np.arange(length) * 7 % config["vocab_size"] for length in lengths]
    with computing(model.ops, 1, LEVELS[0]):
        expected = []
        for row in rows:
            recorder = Recorder(names)
            states = hidden_states(model, row[None], hook=recorder)
            assert_same_bits(states, hidden_states(model, row[None]))  # in one call, no hooks
            expected += rows_of(recorder.values, [len(row)])
    ids, counts = right_pad(rows)
    recorder = Recorder(names)
    with computing(model.ops, *way):
        hidden_states(model, ids, None, counts, recorder)
    assert [*recorder.values] == [*hook_shapes(model.config)]
    for values, alone in zip(rows_of(recorder.values, lengths), expected, strict=True):
        for name in names:
            assert_same_bits(values[name].copy(), alone[name].copy())


# --- generation and scoring ----------------------------------------------------------------------


@pytest.fixture(scope="module", params=["float32", "int8"])
def model(native, request):
    """Return a model with a short context, in which every fifth token ends the text."""
    ends = list(range(0, len(VOCAB), 5))
    return model_of(
        native(request.param), n_head=3, head_size=17, n_positions=24, n_layer=2, eos_token_id=ends
    )


prompts = st.lists(st.integers(0, len(VOCAB) - 1), min_size=1, max_size=20)
options_of_a_run = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 12),
        "seed": st.integers(0, 2**64 - 1),
        "ignore_eos": st.booleans(),
        "stop": st.sampled_from([(), ("a", "he")]),
        "overflow": st.sampled_from(["truncate", "shift"]),
        "top_logprobs": st.sampled_from([0, 3]),
    }
)
options = st.builds(operator.or_, sampling_options, options_of_a_run)
several_requests = st.lists(st.tuples(prompts, options, st.integers(0, 9)), min_size=1, max_size=5)


def texts_of(model, tokenizer, requests, use_cache=True):
    rows = [
        Request(Text(prompt), Options(**options, use_cache=use_cache), index)
        for prompt, options, index in requests
    ]
    return outcomes(completions_of(model, tokenizer, rows))


@given(
    requests=several_requests, use_cache=st.booleans(), a_pass=st.sampled_from([1, 7, 40, 1024]),
    way=threads_and_levels,
)  # fmt: skip
@settings(max_examples=40)
def test_a_completion_is_the_same_in_any_batch_with_and_without_a_cache(
    model, tokenizer, requests, use_cache, a_pass, way
):
    alone = [texts_of(model, tokenizer, [request])[0] for request in requests]
    with computing(model.ops, *way) as patch:
        patch.setattr(Ops, "pass_tokens", a_pass)
        assert texts_of(model, tokenizer, requests, use_cache) == alone


texts = st.lists(st.lists(st.integers(0, len(VOCAB) - 1), max_size=60), max_size=5)


@given(
    texts=texts, stride=st.sampled_from([None, 1, 23]), a_pass=st.sampled_from([1, 50, 1024]),
    a_slice=st.sampled_from([1, 7, 512]), way=threads_and_levels,
)  # fmt: skip
def test_a_score_is_the_same_in_any_batch(model, tokenizer, texts, stride, a_pass, a_slice, way):
    alone = [score_ids(LoadedModel(model, tokenizer), [text], stride)[0] for text in texts]
    with computing(model.ops, *way) as patch:
        patch.setattr(Ops, "pass_tokens", a_pass)
        patch.setattr(Ops, "logits_rows", a_slice)
        assert score_ids(LoadedModel(model, tokenizer), texts, stride) == alone


@given(
    prompt=prompts.map(lambda ids: ids[:12]),
    choices=st.lists(prompts.map(lambda ids: ids[:12]), min_size=1, max_size=5),
    a_pass=st.sampled_from([1, 50, 1024]), way=threads_and_levels,
)  # fmt: skip
def test_a_choice_is_as_likely_beside_any_others_and_as_in_the_whole_text(
    model, tokenizer, prompt, choices, a_pass, way
):
    loaded = LoadedModel(model, tokenizer)
    whole = [score_ids(loaded, [prompt + ids])[0].token_logprobs for ids in choices]
    with computing(model.ops, *way) as patch:
        patch.setattr(Ops, "pass_tokens", a_pass)
        (logprobs,) = logprobs_of(LoadedModel(model, None), [question(prompt, choices)])
    assert logprobs == [row[len(prompt) :] for row in whole]


@pytest.fixture(scope="module")
def tiny(library):
    return gpt_cli.load("tiny", device="cpu")


STORIES = ["Once upon a time", "The cat", "Lily saw a big", "One day, a boy named Tim went to the"]


def test_all_ways_to_use_the_bundled_model_agree(tiny):
    options = {"max_tokens": 12, "seed": 5, "top_logprobs": 3, "ignore_eos": True}
    rows = [{"prompt": prompt, "seed": 5} for prompt in STORIES]
    alone = [tiny.generate([prompt], **options)[0] for prompt in STORIES]
    for batch_size in (1, 2, 3, 4):
        together = list(tiny.batch(rows, Options(**options), batch_size=batch_size))
        assert outcomes(together) == outcomes(alone)
    for prompt, done in zip(STORIES, alone, strict=True):
        assert tiny.next_tokens(prompt, 3) == done.top_logprobs[0]
        # Score the generated text: temperature and filters must not matter.
        ids = tiny.encode(prompt) + done.ids
        (scored,) = score_ids(LoadedModel(tiny.model, tiny.tokenizer), [ids])
        assert scored.token_logprobs[-len(done.ids) :] == done.logprobs


# --- choosing a token ----------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@given(
    rows=st.integers(1, 4), V=st.integers(1, 700), seed=st.integers(0, 1000),
    scale=st.sampled_from([0.1, 3.0, 60.0]), digits=st.sampled_from([0, 8]),
    forbidden=st.sampled_from([0.0, 0.5, 0.99]),
    params=st.builds(
        SamplingParams, temperature=st.sampled_from([0.01, 0.7, 1.5]),
        top_k=st.sampled_from([1, 3, 40, 300]), top_p=st.sampled_from([0.1, 0.9, 1.0]),
        min_p=st.sampled_from([0.0, 0.1, 1.0]), typical_p=st.sampled_from([1.0, 1.0, 0.6]),
    ),
    data=st.data(),
)  # fmt: skip
def test_the_library_chooses_what_numpy_chooses(
    native, level, rows, V, seed, scale, digits, forbidden, params, data
):
    """With ties, with tokens that may not be chosen, and at the edges of the draw."""
    ops = native("float32")
    logits = (scale * noise("logits", rows, V, seed=seed)).round(digits).astype(np.float32)
    logits[np.random.default_rng(seed).random((rows, V)) < forbidden] = -np.inf
    logits[:, data.draw(st.integers(0, V - 1))] = 0.5
    number = st.floats(0, 1, exclude_max=True) | st.sampled_from([0.0, 1 - 2**-53])
    uniforms = np.array(data.draw(st.lists(number, min_size=rows, max_size=rows)))
    with computing(ops, 2, level) as patch:
        chosen = sample(ops, logits, uniforms, params, [[]] * rows).tolist()
        patch.setattr(ops, "choose", lambda *arguments: None)
        assert chosen == sample(ops, logits, uniforms, params, [[]] * rows).tolist()


@given(
    rows=st.integers(1, 5), V=st.integers(1, 400), seed=st.integers(0, 1000),
    params=st.builds(
        SamplingParams, temperature=st.sampled_from([0.7, 1.5]), top_k=st.sampled_from([0, 1, 3]),
        top_p=st.sampled_from([0.5, 1.0]), min_p=st.sampled_from([0.0, 0.1]),
    ),
    data=st.data(),
)  # fmt: skip
def test_a_row_draws_the_same_token_beside_any_others(native, rows, V, seed, params, data):
    ops = native("float32")
    logits = 3 * noise("logits", rows, V, seed=seed).astype(np.float32)
    cumulated = cumulated_weights(ops, logits)
    for row, together in zip(logits, cumulated, strict=True):
        assert np.array_equal(cumulated_weights(ops, row[None])[0], together)
    # Numbers at which the draw changes from one token to the next.
    ids = [data.draw(st.integers(0, V - 1)) for _ in range(rows)]
    ends = cumulated[np.arange(rows), ids] / cumulated[:, -1]
    for uniforms in (ends * (1 - 2**-53), np.nextafter(ends, 0), np.minimum(ends, 1 - 2**-53)):
        drawn = sample(ops, logits, uniforms, params, [[]] * rows)
        pairs = zip(logits, uniforms, strict=True)
        alone = [sample(ops, row[None], draw[None], params, [[]]).item() for row, draw in pairs]
        assert drawn.tolist() == alone
