"""Guesses at the next tokens, from the text itself and from a draft model."""

import weakref
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt_cli.generation.drafts import _FADING, DraftHistory, DraftModel, ngram_drafts
from gpt_cli.generation.row import BatchRow, Request, Sampler
from gpt_cli.gpt2.kv_cache import KVCache
from gpt_cli.gpt2.memory import weights_bytes
from gpt_cli.gpt2.model import hidden_states
from gpt_cli.gpt2.prefill import right_pad
from gpt_cli.gpt2.weights import named_weights
from gpt_cli.options.request import Options
from gpt_cli.texts.loaded import LoadedModel
from gpt_cli.texts.speculator import Speculator, make_draft_model
from gpt_cli.texts.text import Text
from support.checkpoints import VOCAB
from support.drafting import FakeRow
from support.models import (
    DTYPES,
    completions_of,
    computing,
    favouring,
    model_of,
    threads_and_levels,
)
from support.sampling_values import sampling_options

SMALL = {"n_head": 2, "n_layer": 2, "n_positions": 60, "eos_token_id": None}


@pytest.fixture(scope="module")
def model(native):
    return model_of(native("float32"), **SMALL)


# --- n-grams -------------------------------------------------------------------------------------

ids_of_few = st.integers(0, 2)  # so that much repeats
pieces = st.lists(st.lists(ids_of_few, max_size=8), min_size=1, max_size=8)


def followed(ids, count):
    """Return what came after the previous occurrence of the last 3 tokens, over and over."""
    ends = [end for end in range(3, len(ids)) if ids[end - 3 : end] == ids[-3:]]
    return (ids[ends[-1] :] * count)[:count] if ends else []


@given(rows=st.lists(pieces, min_size=1, max_size=3), counts=st.lists(st.integers(0, 12)))
def test_the_last_n_gram_is_followed_as_before(rows, counts):
    """Texts grow in turn, by several tokens at a time."""
    counts = [*counts, 11]
    texts = [FakeRow(ids=[]) for row in range(len(rows))]
    for turn in range(8):
        for text, pieces in zip(texts, rows, strict=True):
            text.ids += pieces[turn % len(pieces)]
            count = counts[turn % len(counts)]
            assert ngram_drafts(text, count) == followed(text.ids, count)


def test_a_text_is_read_once():
    class Text(list):
        reads = 0

        def __getitem__(self, index):
            Text.reads += 1
            return super().__getitem__(index)

    row = FakeRow(ids=Text())
    for id in range(1000):
        row.ids.append(id)
        assert ngram_drafts(row, 3) == []
    assert Text.reads < 2500


# --- the history of drafts ------------------------------------------------------------------------


def test_a_record_expects_tokens_up_to_the_first_wrong_draft():
    assert DraftHistory(1, 1).expected(0) == 1
    assert DraftHistory(3, 1).expected(2) == 1 + 3 / 4 + 9 / 16
    history = DraftHistory(3, 1)
    history.learn([], [1])  # nothing is learned without drafts
    assert history.expected(1) == 1.75


@pytest.mark.parametrize(
    ("drafts", "ids", "right", "wrong"),
    [
        ([1, 2, 3], [1, 2, 3, 9], 3, 0),
        ([1, 2, 3], [1, 2, 9], 2, 1),
        ([1, 2, 3], [9], 0, 1),
        ([1, 2, 3], [1], 1, 0),  # nothing is known of the others
    ],
)
def test_a_record_counts_right_and_wrong_drafts_and_older_ones_less(drafts, ids, right, wrong):
    assert 0 < _FADING < 1
    history = DraftHistory(3, 2)
    history.learn(drafts, ids)
    right, wrong = _FADING * 3 + right, _FADING * 2 + wrong
    assert history.expected(1) == 1 + right / (right + wrong)


def test_a_faded_record_expects_the_same_and_learns_more_from_the_next_result():
    history, faded = DraftHistory(6, 2), DraftHistory(6, 2)
    faded.fade()
    assert faded.expected(5) == pytest.approx(history.expected(5))
    history.learn([1], [2])
    faded.learn([1], [2])
    assert faded.expected(1) < 1.5 < history.expected(1)


# --- the draft model -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_draft_model_has_the_model_in_int8_and_shares_the_rest(native, dtype):
    model = model_of(native(dtype), dtype, tie_word_embeddings=False, **SMALL)
    draft_model = make_draft_model(model)
    if dtype == "int8":
        assert draft_model is None
        return
    assert (draft_model.ops.dtype, draft_model.ops.threads) == ("int8", model.ops.threads)
    weights = dict(named_weights(model))
    for name, weight in named_weights(draft_model):
        if isinstance(weight, np.ndarray) or name == "wte.weight":
            assert weight is weights[name]
        else:
            assert weight.format == "int8"
            assert np.array_equal(weight.panels, draft_model.ops.quantize(weights[name]).panels)


def test_numpy_has_no_draft_model(make_model):
    model = make_model()
    assert (make_draft_model(model) is None) == (model.ops.name == "numpy")


def test_a_draft_model_is_made_only_if_half_of_the_memory_suffices(model, monkeypatch):
    needed = weights_bytes(model.config, "int8")
    for free, is_made in ((None, True), (2 * needed, True), (2 * needed - 1, False)):
        monkeypatch.setattr(model.ops, "free_memory", lambda free=free: free)
        assert (make_draft_model(model) is not None) == is_made


def test_there_is_no_draft_model_if_memory_runs_out(model, monkeypatch):
    def quantize(self, matrix):
        raise MemoryError

    monkeypatch.setattr("gpt_cli.ops.native_ops.NativeOps.quantize", quantize)
    assert make_draft_model(model) is None


def test_a_draft_model_that_was_released_is_made_again(model):
    speculator = Speculator(model)
    speculator.release()  # there is none yet
    first = speculator.ensure_draft_model()
    assert speculator.ensure_draft_model() is first is speculator.draft_model
    speculator.release()
    assert (speculator.draft_model, speculator.may_have_draft_model) == (None, True)
    assert speculator.ensure_draft_model() is not first


def synced(drafting, cache):
    drafting.sync(cache)
    return drafting


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.5, "top_k": 0}])
def test_a_draft_model_drafts_what_it_would_generate_and_leaves_the_texts_as_they_were(
    model, tokenizer, sampling
):
    """A model that is its own draft model drafts its own text."""
    requests = [
        Request(Text(prompt), Options(**sampling, seed=3, max_tokens=9, repeat_penalty=1.3), index)
        for index, prompt in enumerate([[1, 2, 3], [4, 5]])
    ]
    loaded = LoadedModel(model, tokenizer)
    expected = [done.ids for done in completions_of(model, tokenizer, requests)]
    rows = [BatchRow(number, request, loaded) for number, request in enumerate(requests)]
    cache = KVCache(model.config, model.ops, 2, 20)
    before = np.array([2, 1])  # the last token of a row is not in the cache
    hidden_states(model, np.array([[1, 2], [4, 0]]), cache, before)
    drafting = DraftModel(model, Sampler(loaded))
    for _ in range(2):  # the second time, over the first drafts
        drafting.sync(cache)
        drafts = drafting.draft(rows, 9)
        assert drafts == expected
        assert cache.lengths.tolist() == before.tolist()
        assert [row.ids for row in rows] == [[1, 2, 3], [4, 5]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@given(
    sampling=sampling_options, ignore_eos=st.booleans(), seed=st.integers(0, 99),
    prompts=st.lists(
        st.lists(st.integers(0, len(VOCAB) - 1), min_size=2, max_size=9), min_size=1, max_size=3
    ),
    way=threads_and_levels, count=st.integers(1, 12),
)  # fmt: skip
def test_all_drafts_in_one_call_are_those_of_single_steps(
    native, tokenizer, dtype, sampling, ignore_eos, seed, prompts, way, count
):
    config = {"vocab_size": len(VOCAB) + 70, "eos_token_id": list(range(0, len(VOCAB), 3))}
    model = model_of(native(dtype), dtype, **SMALL | config)
    options = Options(**sampling, ignore_eos=ignore_eos, seed=seed)
    loaded = LoadedModel(model, tokenizer)
    requests = [Request(Text(prompt), options, index) for index, prompt in enumerate(prompts)]
    rows = [BatchRow(number, request, loaded) for number, request in enumerate(requests)]
    cache = KVCache(model.config, model.ops, len(rows), 9 + count)
    ids, lengths = right_pad(prompts)
    hidden_states(model, ids, cache, lengths)
    cache.lengths = cache.lengths - 1  # the last token of each row is not in the cache
    draft_model = make_draft_model(model)
    drafting = synced(DraftModel(draft_model, Sampler(loaded)), cache)
    with computing(draft_model.ops, *way):
        steps = drafting._by_steps(rows, count)
        before = drafting._cache.lengths.tolist()
        call = drafting._in_one_call(rows, count)
        known = options.temperature == 0 or 0 < options.top_k <= len(VOCAB) + 70
        others = options.sampling.changes_logits or not options.kernels_filter
        assert (call is None) == (others or not known)
        assert call in (None, steps)
        assert drafting._cache.lengths.tolist() == before


@pytest.fixture
def one_text(model, tokenizer):
    """Return a function: a sampler, a row of two tokens, and a cache with the first of them."""

    def make(**sampling):
        loaded = LoadedModel(model, tokenizer)
        cache = KVCache(model.config, model.ops, 1, 20)
        hidden_states(model, np.array([[1]]), cache)
        return (
            Sampler(loaded),
            BatchRow(0, Request(Text([1, 2]), Options(**sampling)), loaded),
            cache,
        )

    return make


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({"temperature": 0}, "one call"),
        ({"top_k": 40}, "one call"),
        ({"top_k": 0}, "steps"),
        ({"repeat_penalty": 1.3}, "steps"),
        ({"typical_p": 0.9}, "steps"),
    ],
)
def test_the_library_makes_all_drafts_in_one_call_if_it_knows_the_options(
    model, one_text, monkeypatch, sampling, expected
):
    sampler, row, cache = one_text(**sampling)
    monkeypatch.setattr(DraftModel, "_by_steps", lambda *_: "steps")
    drafts = synced(DraftModel(make_draft_model(model), sampler), cache).draft([row], 3)
    assert ("steps" if drafts == "steps" else "one call") == expected


@pytest.mark.parametrize("damage", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("count", [1, 30, len(VOCAB)])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_in_one_call_results_that_are_not_finite_give_some_draft(
    model, one_text, damage, count, temperature
):
    sampler, row, cache = one_text(temperature=temperature, top_k=40, top_p=0.9, min_p=0.01)
    draft_model, bias = make_draft_model(model), np.zeros(len(VOCAB), np.float32)
    bias[np.random.default_rng(1).permutation(len(VOCAB))[:count]] = damage
    draft_model = replace(draft_model, lm_head=replace(draft_model.lm_head, bias=bias))
    (drafts,) = synced(DraftModel(draft_model, sampler), cache)._in_one_call([row], 9)
    assert len(drafts) == 9
    assert all(0 <= id < len(VOCAB) for id in drafts)


def test_in_one_call_more_drafts_than_the_cache_has_room_for_are_refused(model, one_text):
    sampler, row, cache = one_text(temperature=0)
    with pytest.raises(IndexError, match="too many tokens for a cache"):
        synced(DraftModel(make_draft_model(model), sampler), cache)._in_one_call([row], 40)


def test_by_steps_drafts_end_where_results_are_not_finite(model, one_text):
    sampler, row, cache = one_text(temperature=0)
    wpe = model.wpe.copy()
    wpe[3] = np.nan
    draft_model = replace(favouring(model, VOCAB["x"]), wpe=wpe)
    drafting = synced(DraftModel(draft_model, sampler), cache)
    assert drafting._by_steps([row], 9) == [[VOCAB["x"]] * 2]
    assert drafting._cache.lengths.tolist() == [1]


def test_a_draft_model_follows_a_cache_until_there_is_another(model, one_text):
    sampler, row, cache = one_text(temperature=0)
    drafting = synced(DraftModel(make_draft_model(model), sampler), cache)
    first, expected = drafting._cache, drafting.draft([row], 9)
    drafting.sync(cache)
    assert drafting._cache is first
    other = KVCache(model.config, model.ops, 1, 30)
    other.copy_row(0, cache, 0, int(cache.lengths[0]))
    assert synced(drafting, other).draft([row], 9) == expected
    assert drafting._cache.capacity == 30
    assert drafting._cache.keys.dtype == np.float16
    reference = weakref.ref(other)
    del other
    assert reference() is None  # the draft model keeps no memory of the text's cache
