"""The likeliest texts of a search, their scores, and what happens beside it."""

import gc
import math
import re
import weakref
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt_cli.generation.beams import new_row
from gpt_cli.generation.decode import Batch
from gpt_cli.generation.row import Request
from gpt_cli.gpt2.kv_cache import KVCache
from gpt_cli.options.declare import OptionError
from gpt_cli.options.request import Options
from gpt_cli.texts.loaded import LoadedModel
from gpt_cli.texts.speculator import Speculator
from gpt_cli.texts.text import Text
from support.checkpoints import VOCAB
from support.drafting import planned
from support.models import (
    completions_of,
    computing,
    exact_logprobs,
    outcomes,
    threads_and_levels,
)

CASES = 50  # in the golden file
SMALL = {"n_head": 2, "n_layer": 2, "n_embd": 16}


def hypotheses(completion):
    """Return the texts of a search, the best first, or the text of a row without a search."""
    return [completion, *completion.others]


def search(model, tokenizer, prompt, **options):
    (best,) = completions_of(model, tokenizer, [Request(Text(prompt), Options(**options))])
    return hypotheses(best)


# --- against transformers ------------------------------------------------------------------------


@pytest.mark.parametrize("case", range(CASES))
def test_ids_and_scores_are_those_of_transformers(load_case, tokenizer, golden, case):
    cases = golden("beams.json")
    assert len(cases) == CASES
    options = dict(cases[case])
    if "regex" in options:
        pytest.importorskip("llguidance")
    model, ends, prompt, expected = map(options.pop, ("model", "ends", "prompt", "hypotheses"))
    model = load_case(model)
    model = replace(model, config=replace(model.config, eos_token_id=tuple(ends)))
    texts = search(model, tokenizer, prompt, **options)
    assert [text.ids for text in texts] == [text["ids"] for text in expected]
    scores = [text["score"] for text in expected]
    np.testing.assert_allclose([text.score for text in texts], scores, rtol=2e-5)


# --- against all texts ---------------------------------------------------------------------------


def adjusted(logprobs, options, text, generated):
    """Return log-probabilities of what follows a text, after bias and penalties."""
    logprobs = logprobs.copy()
    for id, bias in options.logit_bias:
        logprobs[id] += bias
    logprobs[sorted({*text})] *= options.repeat_penalty
    for id in range(len(logprobs)):
        if (count := generated.count(id)) > 0:
            logprobs[id] -= options.presence_penalty + count * options.frequency_penalty
    return logprobs


def all_texts(model, prompt, options):
    """Return all texts that can follow a prompt, with their scores, the best first."""
    texts, begun = [], [([], 0.0)]
    for length in range(1, options.max_tokens + 1):
        longer = []
        for ids, total in begun:
            logprobs = exact_logprobs(model, [*prompt, *ids])[-1]
            for id, logprob in enumerate(adjusted(logprobs, options, [*prompt, *ids], ids)):
                is_end = id in model.config.eos_token_id or length == options.max_tokens
                (texts if is_end else longer).append(([*ids, id], total + logprob))
        begun = longer
    scored = [(total / len(ids) ** options.length_penalty, ids) for ids, total in texts]
    return sorted(scored, reverse=True)


@given(
    size=st.integers(2, 5), ends=st.integers(0, 2), length=st.integers(1, 3),
    seed=st.integers(0, 99), options=st.fixed_dictionaries({
        "length_penalty": st.sampled_from([-2, -0.5, 0, 0.7, 1, 2.5, 10]),
        "repeat_penalty": st.sampled_from([1.0, 1.0, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 0.5]),
        "frequency_penalty": st.sampled_from([0.0, 1.5]),
        "logit_bias": st.sampled_from([(), ((1, -0.7),)]),
    }),
)  # fmt: skip
def test_a_search_as_wide_as_the_tree_finds_the_best_of_all_texts(
    make_model, tokenizer, size, ends, length, seed, options
):
    model = make_model(seed, vocab_size=size, eos_token_id=[*range(ends)], **SMALL)
    width = max((size - ends) ** (length - 1) * size, 1)
    options = Options(max_tokens=length, beams=width, early_stopping="never", **options)
    expected = all_texts(model, [1, 0], options)[:width]
    (best,) = completions_of(model, tokenizer, [Request(Text([1, 0]), options)])
    texts = hypotheses(best)
    assert len(texts) == len(expected)
    scores = np.array([score for score, _ in expected])
    np.testing.assert_allclose([text.score for text in texts], scores, rtol=1e-4, atol=1e-5)
    if (np.diff(scores) < -1e-4 * abs(scores[1:])).all():
        assert [text.ids for text in texts] == [ids for _, ids in expected]


def test_of_equally_likely_texts_those_with_the_lower_ids_come_first(make_model, tokenizer):
    model = make_model()
    model.ln_f.weight[:] = model.ln_f.bias[:] = 0  # so that all logits are equal
    texts = search(model, tokenizer, [5], beams=3, max_tokens=3)
    assert [text.ids for text in texts] == [[0, 0, 0], [1, 0, 0], [2, 0, 0]]
    np.testing.assert_allclose([text.score for text in texts], [-math.log(len(VOCAB))] * 3)


# --- a search depends on nothing but its request -------------------------------------------------

EDIT = ["blocks.1.hook_mlp_out*=0.5", "blocks.0.attn.hook_v[1]@2:=0"]

shared = st.fixed_dictionaries({
    "max_tokens": st.integers(1, 12),
    "min_tokens": st.sampled_from([0, 0, 1]),
    "ignore_eos": st.booleans(),
    "stop": st.sampled_from([(), ("a", "he"), tuple(map(chr, range(33, 127)))]),
    "bad_words": st.sampled_from([(), (), ("a", "he")]),
    "top_logprobs": st.sampled_from([0, 0, 3]),
    "repeat_penalty": st.sampled_from([1.0, 1.3]),
    "no_repeat_ngram": st.sampled_from([0, 2]),
    "regex": st.sampled_from([None, None, "[a-d]{1,3}|[x-z]{2,9}", "aa|bb|c{9}|d{9}"]),
    "edits": st.sampled_from([(), (), EDIT]),
})  # fmt: skip
searched = st.fixed_dictionaries({
    "beams": st.sampled_from([1, 2, 3, 5, 8]),
    "length_penalty": st.sampled_from([-1, 0, 1.0, 2]),
    "early_stopping": st.sampled_from([False, True, "never"]),
})  # fmt: skip
drawn = st.fixed_dictionaries({
    "temperature": st.sampled_from([0, 1.5]),
    "overflow": st.sampled_from(["error", "shift"]),
    "typical_p": st.sampled_from([0.7, 1.0]),
    "seed": st.integers(0, 9),
})  # fmt: skip
prompts = st.lists(st.integers(0, len(VOCAB) - 1), min_size=3, max_size=23)
beginnings = st.sampled_from([0, 7, 16])  # of a text that the prompts of a batch share
rows = st.lists(
    st.tuples(prompts, beginnings, shared, st.one_of(searched, searched, drawn)),
    min_size=1, max_size=4,
)  # fmt: skip


def requests_of(loaded, rows, **changes):
    requests = []
    for index, (prompt, begun, *options) in enumerate(rows):
        prompt = [*range(begun), *prompt][:23]
        options = Options(**options[0] | options[1] | changes)
        if options.overflow == "shift":
            options = replace(options, edits=())
        edits = loaded.bound_edits(options.edits, len(prompt), 24)
        requests.append(Request(Text(prompt, edits=edits), options, index))
    return requests


def results(completions):
    texts = [hypotheses(row) for row in completions]
    return [(outcomes(row), [text.score for text in row]) for row in texts]


@pytest.fixture(scope="module")
def model(make_model):
    """Return a model with a context of 24."""
    return make_model(n_positions=24, **SMALL)


@given(
    rows=rows, way=threads_and_levels, use_cache=st.booleans(), least=st.sampled_from([1, 10**9]),
    drafts=st.integers(0, 3), ends=st.sampled_from([(), (0, 50, 100), range(0, len(VOCAB), 9)]),
)  # fmt: skip
def test_hypotheses_are_the_same_alone_and_beside_others(
    model, tokenizer, rows, way, use_cache, least, drafts, ends
):
    pytest.importorskip("llguidance")
    model = replace(model, config=replace(model.config, eos_token_id=tuple(ends)))
    loaded = LoadedModel(model, tokenizer)
    alone = [
        result
        for request in requests_of(loaded, rows)
        for result in results(completions_of(model, tokenizer, [request]))
    ]
    requests = requests_of(loaded, rows, use_cache=use_cache)
    speculator = Speculator(model) if drafts else None
    is_native = model.ops.name == "native"
    computed = computing(model.ops, *way) if is_native else nullcontext()
    with computed, planned((drafts, False)), pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpt_cli.texts.prefix_cache._MIN_SAVED_TOKENS", least)
        together = results(completions_of(model, tokenizer, requests, speculator))
    if is_native:  # all bits
        assert together == alone
    assert [ids_of(row) for row in together] == [ids_of(row) for row in alone]


def ids_of(result):
    return [(text, ids, reason) for text, ids, *_, reason in result[0]]


@pytest.mark.parametrize(
    "length", [4, 8, 9, *range(13, 18)]
)  # of a text whose rows move in the cache
def test_a_search_that_gets_narrower_changes_no_other(model, tokenizer, length):
    pytest.importorskip("llguidance")
    narrower = Options(beams=4, regex="aa|bb|c{9}|d{9}", max_tokens=6)
    other = Options(beams=3, max_tokens=5)
    requests = [Request(Text([1]), narrower), Request(Text([*range(length)]), other)]
    together = completions_of(model, tokenizer, requests)
    for request, row in zip(requests, together, strict=True):
        assert len(hypotheses(row)) == request.options.beams
        alone = completions_of(model, tokenizer, [request])
        assert ids_of(results(alone)[0]) == ids_of(results([row])[0])
        np.testing.assert_allclose(row.score, alone[0].score, rtol=1e-5)


def test_a_text_that_shifts_leaves_the_searches_beside_it_their_memory(
    make_model, tokenizer, monkeypatch
):
    rows, model = [], make_model(n_positions=24, eos_token_id=None, **SMALL)

    def counted(config, ops, batch, capacity):
        rows.append(batch)
        return KVCache(config, ops, batch, capacity)

    monkeypatch.setattr("gpt_cli.generation.decode.KVCache", counted)
    shifting = Request(Text([*range(16)]), Options(max_tokens=20, temperature=0, overflow="shift"))
    searching = Request(Text([1, 2]), Options(max_tokens=15, beams=6))
    together = completions_of(model, tokenizer, [shifting, searching])
    assert rows == [7, 7]  # for the second time when the context is full
    alone = [completions_of(model, tokenizer, [row])[0] for row in (shifting, searching)]
    assert [ids_of(row) for row in results(together)] == [ids_of(row) for row in results(alone)]


def test_a_beam_that_has_ended_leaves_the_batch_and_the_best_text_comes_last(model, tokenizer):
    pytest.importorskip("llguidance")
    loaded = LoadedModel(model, tokenizer)
    narrower = Options(beams=4, regex="aa|bb|c{9}|d{9}", max_tokens=4)
    batch = Batch(loaded)
    batch.fill([new_row(0, Request(Text([1]), narrower), loaded)])
    for rows in (4, 2, 2):
        assert batch.step() == []
        assert len(batch.rows) == rows
    steps = batch.step()
    assert [step.hypothesis for step in steps if step.finish_reason] == [3, 2, 1, 0]
    scores = [step.score for step in steps if step.finish_reason]
    assert scores == sorted(scores)


def test_a_search_that_has_ended_keeps_nothing(model, tokenizer):
    loaded = LoadedModel(model, tokenizer)
    searching = Request(Text([1, 2]), Options(max_tokens=2, beams=5))
    drawing = Request(Text([3]), Options(max_tokens=5, seed=1, ignore_eos=True))
    (alone,) = completions_of(model, tokenizer, [drawing])
    batch = Batch(loaded)
    batch.fill([new_row(0, searching, loaded), new_row(1, drawing, loaded)])
    search, ids = weakref.ref(batch.rows[0].search), []
    for rows in (6, 1, 1, 1, 0):
        steps = batch.step()
        assert len(batch.rows) == (len(batch.cache.lengths) if batch.cache else 0) == rows
        ids += [step.id for step in steps if step.row == 1]
    assert ids == alone.ids
    del steps
    gc.collect()
    assert search() is None


# --- hypotheses ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choices", "width"), [(["ab", "b", "cd"], 8), (["ab", "b", "cd"], 2), (["x"], 3)]
)
def test_of_fewer_texts_than_beams_there_are_fewer_hypotheses(model, tokenizer, choices, width):
    pytest.importorskip("llguidance")
    texts = search(model, tokenizer, [7, 8], beams=width, choices=choices, length_penalty=0)
    logprobs = {}
    for choice in choices:
        ids = [VOCAB[letter] for letter in choice]
        exact = exact_logprobs(model, [7, 8, *ids])[1:-1]
        logprobs[choice] = exact[range(len(ids)), ids].sum()
    best = sorted(choices, key=logprobs.__getitem__, reverse=True)
    if width >= len(choices):
        assert [text.text for text in texts] == best
    assert {text.text for text in texts} <= {*choices}
    assert {text.finish_reason for text in texts} == {"complete"}
    scores = [logprobs[text.text] for text in texts]
    np.testing.assert_allclose([text.score for text in texts], scores, rtol=1e-5)


@pytest.mark.parametrize("pattern", ["[a-d]{1,3}", "yes|no|maybe later", r"\d{2}(:\d{2}){0,2}"])
def test_all_hypotheses_match_a_constraint(tiny, pattern):
    pytest.importorskip("llguidance")
    (best,) = tiny.generate(["The answer is "], beams=6, regex=pattern, max_tokens=12)
    finished = [text for text in hypotheses(best) if text.finish_reason != "length"]
    assert finished
    assert all(re.fullmatch(pattern, text.text) for text in finished)
    scores = [text.score for text in hypotheses(best)]
    assert scores == sorted(scores, reverse=True)


def test_a_stream_is_the_best_text(tiny):
    (best,) = tiny.generate(["Once upon a time"], beams=3, max_tokens=9)
    assert "".join(tiny.stream("Once upon a time", beams=3, max_tokens=9)) == best.text


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_a_hypothesis(tiny, include):
    options = {"beams": 5, "max_tokens": 30, "stop": [" and", "."], "include_stop": include}
    (best,) = tiny.generate(["Once upon a time"], **options)
    stopped = [text for text in hypotheses(best) if text.finish_reason == "stop"]
    assert stopped
    for text in stopped:
        before = text.text
        if include:
            before, _, after = re.split(r"( and|\.)", text.text, maxsplit=1)
            assert not after
        assert " and" not in before and "." not in before
        assert tiny.decode(text.ids).startswith(text.text)
        np.testing.assert_allclose(text.score, sum(text.logprobs) / len(text.ids), rtol=1e-6)


def test_a_score_is_of_the_adjusted_log_probabilities_and_a_logprob_is_not(make_model, tokenizer):
    model = make_model(**SMALL)
    biased = {"logit_bias": [(9, 5.0)], "presence_penalty": 0.5, "top_logprobs": 2}
    (text,) = search(model, tokenizer, [1, 2], beams=1, max_tokens=2, length_penalty=2, **biased)
    exact = exact_logprobs(model, [1, 2, *text.ids])[1:-1]
    np.testing.assert_allclose(text.logprobs, exact[range(2), text.ids], rtol=1e-5)
    options = Options(**biased)
    first = adjusted(exact[0], options, [], [])[text.ids[0]]
    second = adjusted(exact[1], options, [], text.ids[:1])[text.ids[1]]
    np.testing.assert_allclose(text.score, (first + second) / 4, rtol=1e-5)
    assert [len(top) for top in text.top_logprobs] == [2, 2]


def test_a_prompt_that_is_too_long_is_truncated(model, tokenizer):
    loaded, text = LoadedModel(model, tokenizer), "The old woman looked at the sea."
    request = Request.of_prompt(
        loaded, text, Options(beams=3, max_tokens=5, overflow="truncate"), 0
    )
    assert request.prompt == tokenizer.encode(text)[-19:]
    (best,) = completions_of(model, tokenizer, [request])
    texts = search(model, tokenizer, request.prompt, beams=3, max_tokens=5)
    assert [text.ids for text in hypotheses(best)] == [text.ids for text in texts]
    assert len(best.ids) == 5


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"temperature": 0.7}, "temperature cannot be set in a beam search"),
        ({"top_k": 5}, "top_k cannot"),
        ({"top_p": 0.5}, "top_p cannot"),
        ({"min_p": 0.5}, "min_p cannot"),
        ({"typical_p": 0.5}, "typical_p cannot"),
        ({"overflow": "shift"}, "overflow cannot be shift in a beam search"),
        ({"beams": None, "length_penalty": 2}, "length_penalty applies only to a beam search"),
        ({"beams": None, "early_stopping": True}, "early_stopping applies only to a beam search"),
        ({"early_stopping": "sometimes"}, "early_stopping must be one of false, true, never"),
        ({"early_stopping": 1}, "early_stopping must be one of false, true, never"),
        ({"length_penalty": 11}, "length_penalty must be from -10 to 10"),
        ({"length_penalty": math.nan}, "length_penalty must be"),
    ],
)
def test_what_a_search_cannot_have_is_an_error(options, complaint):
    with pytest.raises(OptionError, match=f"^{complaint}"):
        Options(**{"beams": 3} | options)


def test_what_changes_nothing_may_be_set_with_beams():
    Options(beams=3, temperature=0, top_k=0, top_p=1, min_p=0, typical_p=1)
    Options(temperature=0.7, length_penalty=1, early_stopping=False)
