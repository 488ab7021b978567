"""Whole models on a GPU have the bits of the C library; without a GPU, on `emulated_cuda`."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt_cli.compression.archive import ArchiveReader
from gpt_cli.compression.codec import Codec
from gpt_cli.engine import Engine
from gpt_cli.generation.row import Request
from gpt_cli.gpt2.kv_cache import KVCache
from gpt_cli.gpt2.model import forward, hidden_states
from gpt_cli.options.request import Options, SamplingParams
from gpt_cli.texts.loaded import LoadedModel
from gpt_cli.texts.text import Text
from support.emulated_kernels import Card
from support.models import completions_of, outcomes
from support.native_arrays import seeds
from support.pairs import (
    DEVICES,
    assert_same,
    decoded,
    logits_in_chunks,
    pair_on,
    random_ids,
)

# Sizes of many kinds: heads of 8 and 16 and an odd one, inner sizes, an untied head, activations.
MODELS = {
    "small": {"n_embd": 32, "n_head": 4},
    "odd": {"n_embd": 30, "n_head": 2, "n_inner": 21, "activation_function": "gelu"},
    "untied": {"n_embd": 48, "n_head": 3, "n_inner": 44, "tie_word_embeddings": False,
               "activation_function": "silu"},
}  # fmt: skip
few = settings(max_examples=4)


@pytest.fixture(scope="module", params=DEVICES, ids="-".join)
def pair(request, native):
    device, dtype = request.param
    with pair_on(device, dtype, native(dtype)) as pair:
        yield pair


class Models:
    """Each of `MODELS` on the GPU and on the CPU; hypothesis would print those of a dict."""

    def __init__(self, pair):
        self._pairs = {name: pair.models(**changes) for name, changes in MODELS.items()}

    def __getitem__(self, name):
        return self._pairs[name]


@pytest.fixture(scope="module")
def models(pair):
    return Models(pair)


# --- the forward pass ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@given(B=st.integers(1, 3), T=st.integers(1, 14), seed=seeds)
@few
def test_logits(models, name, B, T, seed):
    ids = random_ids(B, T, seed)
    results = [m.ops.to_host(forward(m, m.ops.xp.asarray(ids))) for m in models[name]]
    assert_same(*results)


@pytest.mark.parametrize("name", MODELS)
@given(B=st.integers(1, 3), steps=st.integers(1, 3), ragged=st.booleans(), seed=seeds)
@few
def test_logits_of_chunks(models, name, B, steps, ragged, seed):
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 9, (steps, B if ragged else 1))
    sizes[1:, :-1] *= random.integers(0, 2, sizes[1:, :-1].shape)  # rows without new tokens
    chunks = [np.broadcast_to(new, (B,)) for new in sizes]
    ids = random_ids(B, 40, seed)
    assert_same(*[logits_in_chunks(m, ids, chunks) for m in models[name]])


def test_a_token_does_not_depend_on_the_pass(models):
    """Passes in one launch, operations one by one, and passes without a cache are the same."""
    gpu, cpu = models["small"]
    ids = random_ids(1, 24)
    expected = forward(cpu, ids)[0]
    for chunks in ([24], [1] * 24, [3, 5, 16], [17, 1, 6]):
        rows = logits_in_chunks(gpu, ids, [np.array([new]) for new in chunks])
        assert_same(np.concatenate(rows), expected)
    batch = gpu.ops.xp.asarray(np.repeat(ids, 3, axis=0))
    assert_same(gpu.ops.to_host(forward(gpu, batch))[2], expected)


def test_layers_of_one_launch_write_the_cache(models):
    def cached(model):
        cache = KVCache(model.config, model.ops, 3, 70)
        texts = random_ids(3, 4)
        x = hidden_states(model, model.ops.xp.asarray(texts[:, :3]), cache)
        y = hidden_states(model, model.ops.xp.asarray(texts[:, 3:]), cache)
        shape = (3, model.config.n_head, 4, model.config.head_size)
        tokens = [tokens_of(model.ops, part, shape) for part in (cache.keys, cache.values)]
        return [model.ops.to_host(part) for part in (x, y)] + tokens

    def tokens_of(ops, panels, shape):
        """Return the first tokens in a layout that does not depend on the device."""
        host, T, D = ops.to_host(panels), shape[2], shape[3]
        if host.shape[-1] == ops.cache_panel and host.shape[-2] == D:  # keys
            host = host.swapaxes(-1, -2)
        return np.ascontiguousarray(host[:, :, :, 0, :T, :D])

    for name in MODELS:
        assert_same(*map(cached, models[name]))


# --- caches --------------------------------------------------------------------------------------


def test_copies_of_caches(models):
    def logits(model):
        ops = model.ops
        first, second = (KVCache(model.config, ops, 3, 70) for _ in range(2))
        forward(model, ops.xp.asarray(random_ids(3, 40)), first, np.array([40, 33, 7]))
        if ops.dtype == "int8":  # the C library only rounds caches in float32 to one in float16
            second.copy_row(0, first, 0, 40)
        else:
            second.sync(first)
        second.copy_row(2, first, 0, 35)
        second.copy_row(1, first, 2, 7)
        both = [first.view(2), second]
        return [
            ops.to_host(forward(model, ops.xp.asarray(random_ids(len(cache.lengths), 2)), cache))
            for cache in both
        ]

    assert_same(*map(logits, models["small"]))


# --- steps of decoding in one launch -------------------------------------------------------------


@pytest.mark.parametrize("name", ["small", "untied"])
@given(
    B=st.sampled_from([1, 2, 3, 4]), steps=st.integers(1, 5), top_k=st.sampled_from([1, 9, 250]),
    top_p=st.sampled_from([0.5, 1.0]), min_p=st.sampled_from([0.0, 0.01]),
    temperature=st.sampled_from([0.01, 0.9, 5.0]), some=st.booleans(), seed=seeds,
)  # fmt: skip
@few
def test_decode(models, name, B, steps, top_k, top_p, min_p, temperature, some, seed):
    random = np.random.default_rng(seed)
    lengths, uniforms = random.integers(1, 50, B), random.random((steps, B))
    banned = np.array([3, 7, 201] if some else [], np.int64)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    results = [decoded(m, lengths, uniforms, banned, params) for m in models[name]]
    assert_same(*results)


def test_decode_of_more_rows_than_a_pass_has(models):
    B = 19 if models["small"][0].ops.dtype == "int8" else 35
    random = np.random.default_rng(1)
    lengths, uniforms = random.integers(1, 9, B), random.random((2, B))
    params, nothing = SamplingParams(top_k=40), np.zeros(0, np.int64)
    assert_same(*[decoded(m, lengths, uniforms, nothing, params) for m in models["small"]])


def test_decode_leaves_to_others_what_it_cannot_do(pair, models):
    (gpu, _), uniforms, nothing = models["small"], np.full((1, 1), 0.5), np.zeros(0, np.int64)
    for top_k in (0, 257, 2000):
        params = SamplingParams(top_k=top_k)
        known = 0 < top_k <= gpu.config.vocab_size
        result = decoded(gpu, np.array([3]), uniforms, nothing, params)
        assert (result is not None) == known


@pytest.mark.parametrize("rows", [1, 20])
def test_decode_of_models_that_no_pass_can_have(models, rows):
    params, nothing = SamplingParams(top_k=5), np.zeros(0, np.int64)
    lengths, uniforms = 1 + np.arange(rows), np.random.default_rng(3).random((3, rows))
    assert_same(*[decoded(m, lengths, uniforms, nothing, params) for m in models["odd"]])


def test_decode_of_damaged_weights(pair):
    gpu, _ = pair.models(**MODELS["small"])
    gpu.ln_f.weight[3] = np.nan
    cache = KVCache(gpu.config, gpu.ops, 1, 9)
    cache.lengths += 1  # of memory that nobody has written
    uniforms, nothing = np.full((2, 1), 0.5), gpu.ops.xp.asarray(np.zeros(0, np.int64))
    last, params = np.array([5]), SamplingParams(top_k=5)
    assert gpu.ops.decode(gpu, cache, last, uniforms, nothing, params) is None


# --- what users see ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0},
        {"temperature": 1, "top_k": 0, "top_p": 1},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.01, "repeat_penalty": 1.2, "top_logprobs": 3},
        {"temperature": 0, "beams": 3},
        {"temperature": 1, "top_k": 0, "top_p": 1, "use_cache": False},
    ],
    ids=["greedy", "all", "filters", "beams", "no cache"],
)
def test_a_seed_gives_the_text_of_the_cpu(models, tokenizer, how):
    how = {"seed": 3, "ignore_eos": True} | how
    rows = [([1, 2, 3], 9), ([4, 5], 3), ([6, 7, 8, 9, 10], 5)]  # prompts, new tokens
    requests = [
        Request(Text(prompt), Options(max_tokens=new, **how), index)
        for index, (prompt, new) in enumerate(rows)
    ]
    texts = [outcomes(completions_of(model, tokenizer, requests)) for model in models["small"]]
    assert texts[0] == texts[1]


@pytest.fixture(scope="module")
def engines(models, tokenizer):
    return [Engine(LoadedModel(model, tokenizer), "m", 0) for model in models["small"]]


def test_scores_and_ranks(engines):
    def measured(engine):
        score = engine.score(
            "The sand\nis hering", bos=True, ranks=True, entropies=True, words=True
        )
        rank = engine.rank("the cat", [" sat", " ran"])
        words = [word.surprisal for word in score.words]
        return [*score.token_logprobs, *score.entropies, *score.ranks, *words, *rank]

    assert measured(engines[0]) == measured(engines[1])


def test_activations_and_edits(engines):
    texts = ["the cat", {"text": "the dog sat", "edits": ["blocks.1.attn.hook_z[2]=0"]}]
    texts += [{"text": "a cat", "edits": ["blocks.1.attn.hook_attn_scores[1]*=0.5"]}]
    texts += [{"text": "a dog", "edits": ["blocks.2.attn.hook_pattern=0.25"]}]
    hooks = ["*hook_resid*", "*hook_z", "*pattern", "*scores", "*mlp.hook_p*"]
    states = [[*engine.activations(texts, hooks)] for engine in engines]
    for found, expected in zip(*states, strict=True):
        assert found.keys() == expected.keys()
        assert_same([*found.values()], [*expected.values()])


def test_what_one_compresses_the_other_decompresses(models, tokenizer):
    codecs = [Codec(model, tokenizer) for model in models["small"]]
    data = b"The cat sat on the mat, and the dog ran.\n"
    packed = [b"".join(codec.compress(io.BytesIO(data), segment=64)) for codec in codecs]
    assert packed[0] == packed[1]
    assert b"".join(codecs[0].decompress(ArchiveReader(io.BytesIO(packed[1])))) == data


# --- other cards ---------------------------------------------------------------------------------

CARDS = {
    "2018": Card(capability=75, shared_memory=65_536),
    "64 KB": Card(shared_memory=65_536, processors=1),
    "2020": Card(capability=80, processors=3, shared_memory=166_912),
    "backwards": Card(backwards=True),
}


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_every_card_has_the_same_bits(native, dtype, card):
    params, nothing = SamplingParams(top_k=9), np.zeros(0, np.int64)
    lengths, uniforms = np.array([5, 40, 33]), np.random.default_rng(2).random((3, 3))
    with pair_on("emulated", dtype, native(dtype), card) as pair:
        both = pair.models(**MODELS["small"])
        assert_same(*[logits_in_chunks(m, random_ids(1, 24), CHUNKS) for m in both])
        assert_same(*[decoded(m, lengths, uniforms, nothing, params) for m in both])
        assert bool(pair.gpu._passes._kernels) == (
            card.capability >= 80
        )  # others cannot copy meanwhile


CHUNKS = [np.array([new]) for new in (20, 1, 3)]
