"""Texts that begin alike: what they have in common is computed once, and changes nothing."""

import itertools
import weakref
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt_cli.generation.generate import Run, _batches, working_set
from gpt_cli.generation.row import Request
from gpt_cli.gpt2 import prefill
from gpt_cli.gpt2.memory import prefix_bytes, weights_bytes
from gpt_cli.ops import Ops
from gpt_cli.options.request import Options
from gpt_cli.scoring.score import measure_windows
from gpt_cli.texts import prefix_cache
from gpt_cli.texts.loaded import LoadedModel
from gpt_cli.texts.measures import log_probabilities, moments, ranks
from gpt_cli.texts.prefix_cache import PrefixCache, common_length
from gpt_cli.texts.text import Text
from support.checkpoints import VOCAB
from support.models import DTYPES, completions_of, computing, model_of, outcomes, threads_and_levels
from support.scores import logprobs_of, question, score_ids

SMALL = {"n_head": 2, "n_layer": 2, "n_positions": 60, "eos_token_id": None}

an_id = st.integers(0, len(VOCAB) - 1)
ids = st.lists(an_id, max_size=12)
beginnings = st.lists(st.lists(an_id, max_size=40), min_size=1, max_size=3)


@st.composite
def alike(draw, least=1):
    """Return texts of which several begin alike."""
    begun = draw(beginnings)
    pairs = draw(st.lists(st.tuples(st.sampled_from(begun), ids), max_size=9))
    return [(start + end)[:59] for start, end in pairs if len(start + end) >= least]


@pytest.fixture(scope="module")
def model(native):
    return model_of(native("float32"), **SMALL)


@contextmanager
def limits(least=1, room=1e9, a_pass=1024):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_cache, "_MIN_SAVED_TOKENS", least)
        patch.setattr(prefix_cache, "MIN_PREFIX_TOKENS", min(least, 16))
        patch.setattr(prefix_cache, "_MIN_BUDGET", room)
        patch.setattr(prefix_cache, "_BUDGET_SHARE", 0)
        patch.setattr(Ops, "pass_tokens", a_pass)
        yield


all_limits = st.fixed_dictionaries(
    {
        "least": st.sampled_from([1, 20, 128]),
        "room": st.sampled_from([1, 100_000, 1e9]),
        "a_pass": st.sampled_from([1, 30, 1024]),
    }
)


@pytest.fixture
def counted(monkeypatch):
    """Return a list of the numbers of tokens (B, T) of each pass of `prefill`."""
    shapes, computed = [], prefill.hidden_states

    def hidden_states(model, ids, *others):
        shapes.append(ids.shape)
        return computed(model, ids, *others)

    monkeypatch.setattr(prefill, "hidden_states", hidden_states)
    return shapes


# --- groups --------------------------------------------------------------------------------------


@given(texts=alike(least=0), least=st.integers(1, 40))
def test_every_text_is_in_one_group_whose_texts_begin_alike(model, texts, least):
    with limits(least):
        groups = PrefixCache(model).groups(texts)
    assert sorted(index for _, indices in groups for index in indices) == list(range(len(texts)))
    for n, indices in groups:
        assert n == 0 or (n >= min(least, 16) and n * (len(indices) - 1) >= least)
        assert len({tuple(texts[index][:n]) for index in indices}) == 1
        assert all(len(texts[index]) >= n for index in indices)


def test_texts_with_a_template_are_grouped_by_it(model):
    template, other = list(range(30)), list(range(100, 240))
    texts = [[*template, 7, n % 3, n] for n in range(20)]
    texts += [[*other, n] for n in range(20)] + [[200 + n] * 20 for n in range(5)]
    groups = PrefixCache(model).groups(texts)
    assert [n for n, _ in groups] == [31, 140, 0]
    ranges = range(20), range(20, 40), range(40, 45)
    assert [sorted(indices) for _, indices in groups] == list(map(list, ranges))


def test_one_text_with_the_same_first_word_does_not_prevent_groups(model):
    texts = [[1, 5, 6], *([1, *range(100, 130), n] for n in range(20))]
    assert PrefixCache(model).groups(texts) == [(31, list(range(1, 21))), (0, [0])]


@pytest.mark.parametrize("short", [16, 20, 150])
def test_one_short_text_does_not_take_the_shared_beginning_from_others(model, short):
    template = list(range(200))
    texts = [template[:short], *([*template, 200 + n] for n in range(20))]
    assert PrefixCache(model).groups(texts) == [(200, list(range(1, 21))), (0, [0])]
    # A text that is only the beginning shares it, too.
    (n, indices), _ = PrefixCache(model).groups([*texts, template])
    assert (n, sorted(indices)) == (200, list(range(1, 22)))


@given(texts=alike(least=0), more=ids)
def test_a_text_more_does_not_cost_what_others_save(model, texts, more):
    prefixes = PrefixCache(model)

    def saved(texts):
        return sum(n * (len(indices) - 1) for n, indices in prefixes.groups(texts))

    with limits(20):
        assert saved([*texts, more]) >= saved(texts)


def test_without_equal_bits_nothing_is_shared(make_model):
    model = make_model()
    if model.ops.name == "numpy":
        assert PrefixCache(model).groups([[1] * 200] * 3) == [(0, [0, 1, 2])]
        assert PrefixCache(model).groups([]) == []


@pytest.mark.parametrize(("most", "prefixes"), [(256, 2.5), (2, 9)])
def test_the_prefixes_that_were_used_last_are_kept(model, monkeypatch, most, prefixes):
    monkeypatch.setattr(prefix_cache, "_MAX_PREFIXES", most)
    kept = PrefixCache(model, prefixes * PrefixCache(model).prefix([1] * 20).bytes)
    kept.prefix([1] * 20)
    kept.prefix([2] * 20)
    kept.prefix([2] * 25)  # in place of the one that it begins with
    assert [kept.find([n] * 20)[1] for n in (2, 1)] == [20, 20]
    kept.prefix([3] * 20)
    assert [kept.find([n] * 20)[1] for n in (1, 2, 3)] == [20, 0, 20]


@given(one=ids, other=ids)
def test_the_common_length_ends_at_the_first_difference(one, other):
    n = common_length(one, other)
    assert one[:n] == other[:n]
    assert n in (len(one), len(other)) or one[n] != other[n]


def log_likelihoods(loaded, texts, firsts):
    texts = [Text(ids, first=first) for ids, first in zip(texts, firsts, strict=True)]
    columns = measure_windows(loaded, texts, {"logprobs": log_probabilities})
    return [column["logprobs"] for column in columns]


# --- the same results ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@given(texts=alike(), earlier=alike(), limit=all_limits, way=threads_and_levels)
def test_scores_of_texts_that_begin_alike_are_those_of_each_alone(
    native, tokenizer, dtype, texts, earlier, limit, way
):
    model = model_of(native(dtype), dtype, **SMALL)
    options = {"measures": {"ranks": ranks, "moments": moments}}
    options["layers"] = True
    alone = [score_ids(LoadedModel(model, tokenizer), [text], **options)[0] for text in texts]
    with computing(model.ops, *way), limits(**limit):
        loaded = LoadedModel(model, tokenizer)
        score_ids(loaded, earlier)
        assert score_ids(loaded, texts, **options) == alone


@given(texts=alike(least=2), limit=all_limits, data=st.data())
def test_likelihoods_may_begin_at_any_token(model, tokenizer, texts, limit, data):
    firsts = [data.draw(st.integers(1, len(text) - 1)) for text in texts]
    alone = [score_ids(LoadedModel(model, tokenizer), [text])[0].token_logprobs for text in texts]
    with limits(**limit):
        logprobs = log_likelihoods(LoadedModel(model, None), texts, firsts)
    assert logprobs == [whole[first:] for whole, first in zip(alone, firsts, strict=True)]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@given(
    prompts=alike(), earlier=alike(), limit=all_limits, way=threads_and_levels,
    choices=st.lists(
        st.lists(st.lists(an_id, min_size=1, max_size=4), min_size=1, max_size=4),
        min_size=1, max_size=3,
    ),
)  # fmt: skip
def test_choices_after_prompts_that_begin_alike_are_as_likely_as_in_the_whole_text(
    native, tokenizer, dtype, prompts, earlier, limit, way, choices
):
    model = model_of(native(dtype), dtype, **SMALL)

    def alone(prompt, ids):
        (scored,) = score_ids(LoadedModel(model, tokenizer), [prompt + ids])
        return scored.token_logprobs[len(prompt) :]

    turns = zip(prompts, itertools.cycle(choices), strict=False)
    questions = [question(prompt[:55], answers) for prompt, answers in turns]
    prompts = [one.prompt for one in questions]
    expected = [[alone(text.ids, ids) for ids in text.continuations] for text in prompts]
    with computing(model.ops, *way), limits(**limit):
        loaded = LoadedModel(model, tokenizer)
        score_ids(loaded, earlier)
        assert logprobs_of(loaded, questions) == expected


@given(
    prompts=alike(), limit=all_limits, way=threads_and_levels,
    overflow=st.sampled_from(["truncate", "shift"]), seed=st.integers(0, 9),
)  # fmt: skip
def test_texts_of_prompts_that_begin_alike_are_those_of_each_alone(
    model, tokenizer, prompts, limit, way, overflow, seed
):
    options = Options(max_tokens=9, overflow=overflow, seed=seed)
    requests = [Request(Text(prompt), options, row) for row, prompt in enumerate(prompts)]
    alone = [text for row in requests for text in texts_of(model, tokenizer, [row])]
    with computing(model.ops, *way), limits(**limit):
        assert texts_of(model, tokenizer, requests) == alone


def texts_of(model, tokenizer, requests):
    return outcomes(completions_of(model, tokenizer, requests))


# --- less work -----------------------------------------------------------------------------------

TEMPLATE = [n % 200 for n in range(40)]


def test_a_template_is_computed_once(model, counted):
    questions = [question([*TEMPLATE, 7, n], [[1, 2], [3]]) for n in range(250, 259)]
    loaded = LoadedModel(model, None)
    logprobs_of(loaded, questions)
    assert counted == [(1, 41), (9, 1), (9, 1)]
    counted.clear()
    log_likelihoods(loaded, [[*TEMPLATE, 7, 8, n] for n in range(9)], [42] * 9)
    assert counted == [(1, 1)]  # of the beginning only what is new; of each text nothing
    counted.clear()
    log_likelihoods(loaded, [[*TEMPLATE, n, n, n] for n in range(9)], [1] * 9)
    assert counted == [(9, 2)]


@pytest.mark.parametrize("of_weights", [False, True])
def test_a_budget_or_a_share_of_the_weights_bounds_the_texts_side_by_side(
    model, counted, monkeypatch, of_weights
):
    texts = [[*TEMPLATE, n, n, n] for n in range(9)]
    text_bytes = 2 * 2 * model.config.n_embd * 4 * (40 + 2)
    room = PrefixCache(model).prefix(TEMPLATE).bytes + (4.5 if of_weights else 4) * text_bytes
    counted.clear()
    with limits(room=1 if of_weights else room):
        if of_weights:
            share = room / weights_bytes(model.config, "float32")
            monkeypatch.setattr(prefix_cache, "_BUDGET_SHARE", share)
        log_likelihoods(LoadedModel(model, None), texts, [41] * 9)
    assert counted == [(1, 40), (4, 2), (4, 2), (1, 2)]


@pytest.mark.parametrize("spare", [-1, 0])
def test_a_prefix_is_only_computed_if_memory_is_left(model, tokenizer, monkeypatch, counted, spare):
    requests = [Request(Text([*TEMPLATE, n]), Options(seed=1, max_tokens=2)) for n in range(9)]
    expected = texts_of(model, tokenizer, requests)
    counted.clear()
    needed = working_set(model, requests) + prefix_bytes(model.config, model.ops, len(TEMPLATE))
    monkeypatch.setattr(model.ops, "free_memory", lambda: needed + spare)
    assert texts_of(model, tokenizer, requests) == expected
    assert counted == ([(9, 41)] if spare < 0 else [(1, 40), (9, 1)])


def test_a_batch_leaves_memory_for_its_prefix(model, tokenizer, monkeypatch):
    requests = dict(enumerate(Request(Text([*TEMPLATE, n]), Options(seed=1)) for n in range(8)))
    prefix = prefix_bytes(model.config, model.ops, len(TEMPLATE))
    needed = working_set(model, list(requests.values()))
    loaded = LoadedModel(model, tokenizer)
    for spare, batches in ((0, [8]), (-1, [4, 4])):
        free = 2 * (needed + prefix) + spare
        monkeypatch.setattr(model.ops, "free_memory", lambda free=free: free)
        assert [len(batch) for batch in _batches(loaded, requests, None)] == batches


def test_the_prefixes_to_compute_are_counted_without_those_that_are_kept(model):
    texts = [[first, *TEMPLATE, n] for first in (1, 2, 3) for n in range(9)]
    prefixes = PrefixCache(model)
    # While one is computed, the one before it is kept.
    assert prefixes.new_bytes(texts) == prefix_bytes(model.config, model.ops, 2 * 41)
    prefixes.prefix(texts[0][:41])
    assert prefixes.new_bytes(texts[:9]) == 0


def test_a_prefix_gives_way_to_texts(model, tokenizer, monkeypatch):
    request = Request(Text([1, 2]), Options(seed=1, max_tokens=9))
    loaded = LoadedModel(model, tokenizer)
    kept = weakref.ref(loaded.prefixes.prefix(TEMPLATE))
    room = iter([working_set(model, [request]) - n for n in (1, 0)])
    monkeypatch.setattr(model.ops, "free_memory", lambda: next(room))
    list(Run(loaded, [request]))
    assert kept() is None
