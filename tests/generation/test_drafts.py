"""Guesses at the next tokens, from the text itself and from a twin."""

import weakref
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt_cli.generation.drafts import _FADING, DraftModel, Record, agreed, ngram_drafts
from gpt_cli.generation.generate import Run
from gpt_cli.generation.loaded import LoadedModel
from gpt_cli.generation.row import BatchRow, Chooser, Request
from gpt_cli.generation.speculator import Speculator, make_draft_model
from gpt_cli.gpt2.kv_cache import KVCache
from gpt_cli.gpt2.memory import weights_bytes
from gpt_cli.gpt2.model import hidden_states
from gpt_cli.gpt2.prefill import right_pad
from gpt_cli.options.request import Options
from support.checkpoints import VOCAB
from support.drafting import FakeRow
from support.models import DTYPES, computing, favouring, model_of, threads_and_levels
from support.sampling_values import sampling_options

SMALL = {"n_head": 2, "n_layer": 2, "n_positions": 60, "eos_token_id": None}


@pytest.fixture(scope="module")
def model(native):
    return model_of(native("float32"), **SMALL)


# --- n-grams -------------------------------------------------------------------------------------

ids_of_few = st.integers(0, 2)  # so that much repeats
pieces = st.lists(st.lists(ids_of_few, max_size=8), min_size=1, max_size=8)


def followed(ids, count):
    """What came after the last earlier place of the final 3 tokens, over and over."""
    ends = [end for end in range(3, len(ids)) if ids[end - 3 : end] == ids[-3:]]
    return (ids[ends[-1] :] * count)[:count] if ends else []


@given(rows=st.lists(pieces, min_size=1, max_size=3), counts=st.lists(st.integers(0, 12)))
def test_an_n_gram_is_followed_as_where_it_was_last(rows, counts):
    """Texts grow in turn, by several tokens at a time."""
    counts = [*counts, 11]
    texts = [FakeRow(number=7 * row, ids=[]) for row in range(len(rows))]
    for turn in range(8):
        for text, pieces in zip(texts, rows, strict=True):
            text.ids += pieces[turn % len(pieces)]
            count = counts[turn % len(counts)]
            assert ngram_drafts(text, count) == followed(text.ids, count)


def test_each_place_of_a_text_is_looked_at_once():
    class Text(list):
        looked_at = 0

        def __getitem__(self, place):
            Text.looked_at += 1
            return super().__getitem__(place)

    row = FakeRow(number=0, ids=Text())
    for id in range(1000):
        row.ids.append(id)
        assert ngram_drafts(row, 3) == []
    assert Text.looked_at < 2500


# --- what came of drafts -------------------------------------------------------------------------

some_ids = st.lists(ids_of_few, max_size=6)


@given(drafts=some_ids, ids=some_ids)
def test_agreed_counts_the_equal_beginning(drafts, ids):
    count = agreed(drafts, ids)
    assert drafts[:count] == ids[:count]
    assert count == min(len(drafts), len(ids)) or drafts[count] != ids[count]


def test_a_record_expects_tokens_up_to_the_first_wrong_draft():
    assert Record(1, 1).expected(0) == 1
    assert Record(3, 1).expected(2) == 1 + 3 / 4 + 9 / 16


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
    record = Record(3, 2)
    record.learn(drafts, ids)
    right, wrong = _FADING * 3 + right, _FADING * 2 + wrong
    assert record.expected(1) == 1 + right / (right + wrong)


def test_a_record_learns_nothing_without_drafts():
    record = Record(3, 1)
    record.learn([], [1])
    assert record.expected(1) == 1.75


def test_a_faded_record_expects_the_same_and_learns_more_from_the_next_result():
    record, faded = Record(6, 2), Record(6, 2)
    faded.fade()
    assert faded.expected(5) == pytest.approx(record.expected(5))
    for each in (record, faded):
        each.learn([1], [2])
    assert faded.expected(1) < 1.5 < record.expected(1)


# --- the twin ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_twin_has_the_model_in_int8_and_shares_the_rest(native, dtype):
    model = model_of(native(dtype), dtype, tie_word_embeddings=False, **SMALL)
    twin = make_draft_model(model)
    if dtype == "int8":
        assert twin is None
        return
    assert (twin.ops.dtype, twin.ops.threads) == ("int8", model.ops.threads)
    assert (twin.wte, twin.wpe, twin.ln_f) == (model.wte, model.wpe, model.ln_f)
    for ours, theirs in zip(twin.h, model.h, strict=True):
        assert (ours.ln_1, ours.ln_2) == (theirs.ln_1, theirs.ln_2)
        for one, other in (
            (ours.attn.c_attn, theirs.attn.c_attn),
            (ours.attn.c_proj, theirs.attn.c_proj),
            (ours.mlp.c_fc, theirs.mlp.c_fc),
            (ours.mlp.c_proj, theirs.mlp.c_proj),
            (twin.lm_head, model.lm_head),
        ):
            assert one.weight.format == "int8"
            assert np.array_equal(one.weight.panels, twin.ops.quantize(other.weight).panels)
            assert one.bias is other.bias


def test_numpy_has_no_twin(make_model):
    model = make_model()
    assert (make_draft_model(model) is None) == (model.ops.name == "numpy")


def test_a_twin_is_made_only_if_half_of_the_memory_suffices(model, monkeypatch):
    needed = weights_bytes(model.config, "int8")
    for free, is_made in ((None, True), (2 * needed, True), (2 * needed - 1, False)):
        monkeypatch.setattr(model.ops, "free_memory", lambda free=free: free)
        assert (make_draft_model(model) is not None) == is_made


def test_there_is_no_twin_if_memory_runs_out(model, monkeypatch):
    def quantize(self, matrix):
        raise MemoryError

    monkeypatch.setattr("gpt_cli.ops.draft_ops.DraftNativeOps.quantize", quantize)
    assert make_draft_model(model) is None


def test_a_twin_that_was_released_is_made_again(model):
    speculator = Speculator(model)
    speculator.release()  # there is none yet
    first = speculator.ensure_draft_model()
    assert speculator.ensure_draft_model() is first is speculator.draft_model
    speculator.release()
    assert (speculator.draft_model, speculator.may_have_draft_model) == (None, True)
    assert speculator.ensure_draft_model() is not first


def following(twin, cache):
    twin.sync(cache)
    return twin


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.5, "top_k": 0}])
def test_a_twin_drafts_what_it_would_generate_and_leaves_the_texts_as_they_were(
    model, tokenizer, sampling
):
    """A model that is its own twin drafts its own text."""
    requests = [
        Request(prompt, Options(**sampling, seed=3, max_tokens=9, repeat_penalty=1.3), index)
        for index, prompt in enumerate([[1, 2, 3], [4, 5]])
    ]
    expected = [[], []]
    for step in Run(LoadedModel(model, tokenizer), requests):
        expected[step.row].append(step.id)

    chooser = Chooser(LoadedModel(model, tokenizer))
    rows = [
        BatchRow(place, each, LoadedModel(model, tokenizer)) for place, each in enumerate(requests)
    ]
    cache = KVCache(model.config, model.ops, 2, 20)
    before = np.array([2, 1])  # the last token of each row is not in the cache
    hidden_states(model, np.array([[1, 2], [4, 0]]), cache, before)
    twin = DraftModel(model, chooser)
    for _ in range(2):  # the second time, over the first drafts
        twin.sync(cache)
        drafts = twin.draft(rows, 9)
        assert drafts == expected
        assert cache.lengths.tolist() == before.tolist()
        assert [row.ids for row in rows] == [[1, 2, 3], [4, 5]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@given(
    sampling=sampling_options,
    others=st.fixed_dictionaries({"ignore_eos": st.booleans(), "seed": st.integers(0, 99)}),
    prompts=st.lists(
        st.lists(st.integers(0, len(VOCAB) - 1), min_size=2, max_size=9), min_size=1, max_size=3
    ),
    threads_and_level=threads_and_levels,
    count=st.integers(1, 12),
)
def test_all_drafts_in_one_call_are_those_of_single_steps(
    native, tokenizer, dtype, sampling, others, prompts, threads_and_level, count
):
    config = {"vocab_size": len(VOCAB) + 70, "eos_token_id": list(range(0, len(VOCAB), 3))}
    model = model_of(native(dtype), dtype, **SMALL | config)
    options = Options(**sampling, **others)
    rows = [
        BatchRow(place, Request(prompt, options, place), LoadedModel(model, tokenizer))
        for place, prompt in enumerate(prompts)
    ]
    cache = KVCache(model.config, model.ops, len(rows), 9 + count)
    ids, lengths = right_pad(prompts)
    hidden_states(model, ids, cache, lengths)
    cache.lengths = cache.lengths - 1  # the last token of each row is not in the cache
    made = make_draft_model(model)
    twin = following(DraftModel(made, Chooser(LoadedModel(model, tokenizer))), cache)
    with computing(made.ops, *threads_and_level):
        steps = twin._by_steps(rows, count)
        before = twin._cache.lengths.tolist()
        call = twin._in_one_call(rows, count)
        assert (call is None) == (options.sampling.changes_logits or not knows(options))
        assert call in (None, steps)
        assert twin._cache.lengths.tolist() == before


def knows(options):
    return options.temperature == 0 or 0 < options.top_k <= len(VOCAB) + 70


@pytest.fixture
def place(model, tokenizer):
    """Return a chooser, a row and a cache for a text of two tokens, of which one is cached."""

    def place(**sampling):
        row = BatchRow(0, Request([1, 2], Options(**sampling)), LoadedModel(model, tokenizer))
        cache = KVCache(model.config, model.ops, 1, 20)
        hidden_states(model, np.array([[1]]), cache)
        return Chooser(LoadedModel(model, tokenizer)), row, cache

    return place


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({"temperature": 0}, "one call"),
        ({"top_k": 40}, "one call"),
        ({"top_k": 0}, "steps"),
        ({"repeat_penalty": 1.3}, "steps"),
    ],
)
def test_the_library_makes_all_drafts_in_one_call_if_it_knows_the_options(
    model, place, monkeypatch, sampling, expected
):
    chooser, row, cache = place(**sampling)
    monkeypatch.setattr(DraftModel, "_by_steps", lambda *_: "steps")
    found = following(DraftModel(make_draft_model(model), chooser), cache).draft([row], 3)
    assert ("steps" if found == "steps" else "one call") == expected


@pytest.mark.parametrize("damage", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("count", [1, 30, len(VOCAB)])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_in_one_call_results_that_are_not_finite_give_some_draft(
    model, place, damage, count, temperature
):
    chooser, row, cache = place(temperature=temperature, top_k=40, top_p=0.9, min_p=0.01)
    twin, bias = make_draft_model(model), np.zeros(len(VOCAB), np.float32)
    bias[np.random.default_rng(1).permutation(len(VOCAB))[:count]] = damage
    twin = replace(twin, lm_head=replace(twin.lm_head, bias=bias))
    (drafts,) = following(DraftModel(twin, chooser), cache)._in_one_call([row], 9)
    assert len(drafts) == 9
    assert all(0 <= id < len(VOCAB) for id in drafts)


def test_in_one_call_more_drafts_than_the_cache_has_room_for_are_refused(model, place):
    chooser, row, cache = place(temperature=0)
    with pytest.raises(IndexError, match="too many tokens for a cache"):
        following(DraftModel(make_draft_model(model), chooser), cache)._in_one_call([row], 40)


def test_a_twin_ends_its_drafts_where_its_results_are_not_finite(model, place):
    chooser, row, cache = place(temperature=0)
    wpe = model.wpe.copy()
    wpe[3] = np.nan
    twin = replace(favouring(model, VOCAB["x"]), wpe=wpe)
    twin = following(DraftModel(twin, chooser), cache)
    assert twin.draft([row], 9) == [[VOCAB["x"]] * 2]
    assert twin._cache.lengths.tolist() == [1]


def test_a_twin_follows_a_cache_until_there_is_another(model, place):
    chooser, row, cache = place(temperature=0)
    twin = following(DraftModel(make_draft_model(model), chooser), cache)
    mine, expected = twin._cache, twin.draft([row], 9)
    twin.sync(cache)
    assert twin._cache is mine
    other = KVCache(model.config, model.ops, 1, 30)
    other.copy_row(0, cache, 0, int(cache.lengths[0]))
    assert following(twin, other).draft([row], 9) == expected
    assert twin._cache.capacity == 30
    assert twin._cache.keys.dtype == np.float16
    gone = weakref.ref(other)
    del other
    assert gone() is None  # the twin keeps no memory of the text's cache
