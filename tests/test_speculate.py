"""Drafts decide how soon a text is ready, and never what it says."""

import itertools
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from checkpoints import VOCAB
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_values import sampling_options
from test_bits import DTYPES, LEVELS, computing, model_of

import gpt_cli
from gpt_cli.drafts import agreed, make_twin
from gpt_cli.generate import Completion, generate
from gpt_cli.ops import Linear
from gpt_cli.options import Options
from gpt_cli.rows import Request
from gpt_cli.speculate import Drafting, Speculator

pytestmark = pytest.mark.usefixtures("library")

SMALL = {"n_head": 2, "n_layer": 2, "n_positions": 24, "vocab_size": len(VOCAB)}


@contextmanager
def planned(*plans):
    """Draft by plans, over and over: a number of drafts, and whether the twin makes them."""
    following = itertools.cycle(plans)

    def plan(self, rows, room):
        count, by_twin = next(following)
        count = min(count, room)
        return count, count > 0 and by_twin and self._speculator.may_have_twin

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Drafting, "_plan", plan)
        yield patch


def completions(model, tokenizer, requests, speculator=None):
    made = [Completion(len(request.prompt), request.seed) for request in requests]
    for step in generate(model, tokenizer, requests, speculator):
        made[step.row].add(step)
    return made


def outcome(made):
    """Everything but times and drafts."""
    return made.text, made.ids, made.logprobs, made.top_logprobs, made.finish_reason


def outcomes(made):
    return list(map(outcome, made))


@pytest.fixture(scope="module")
def model(native):
    return model_of(native("float32"), **SMALL)


# --- equality ------------------------------------------------------------------------------------

plans = st.lists(st.tuples(st.integers(0, 11), st.booleans()), min_size=1, max_size=8)
rows = st.lists(
    st.tuples(
        st.lists(st.integers(0, len(VOCAB) - 1), min_size=1, max_size=23),
        sampling_options,
        st.fixed_dictionaries(
            {
                "max_tokens": st.integers(1, 40),
                "seed": st.integers(0, 9),
                "ignore_eos": st.booleans(),
                "include_stop": st.booleans(),
                "stop": st.sampled_from([(), ("a", "he"), tuple(chr(33 + n) for n in range(20))]),
                "overflow": st.sampled_from(["error", "truncate", "shift"]),
                "top_logprobs": st.sampled_from([0, 2]),
            }
        ),
    ),
    min_size=1,
    max_size=3,
)


def requests_of(rows):
    return [
        Request(prompt, Options(**sampling, **others), index)
        for index, (prompt, sampling, others) in enumerate(rows)
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@given(rows=rows, plans=plans)
def test_a_text_is_the_same_with_any_drafts(native, tokenizer, dtype, rows, plans):
    model, requests = model_of(native(dtype), dtype, **SMALL), requests_of(rows)
    expected = outcomes(completions(model, tokenizer, requests))
    with planned(*plans):
        assert outcomes(completions(model, tokenizer, requests, Speculator(model))) == expected


@given(rows=rows, plans=plans, seed=st.integers(0, 3))
@settings(max_examples=20)
def test_a_twin_of_another_model_changes_nothing(native, model, tokenizer, rows, plans, seed):
    speculator, requests = Speculator(model), requests_of(rows)
    speculator.twin = make_twin(model_of(native("float32"), seed=9 + seed, **SMALL))
    with planned(*plans):
        found = completions(model, tokenizer, requests, speculator)
    assert outcomes(found) == outcomes(completions(model, tokenizer, requests))


def test_a_twin_whose_results_are_not_finite_changes_nothing(model, tokenizer):
    speculator, request = Speculator(model), Request([1, 2], Options(seed=1, max_tokens=9))
    bias = np.full(model.config.vocab_size, np.nan, np.float32)
    twin = make_twin(model)
    speculator.twin = replace(twin, lm_head=Linear(twin.lm_head.weight, bias))
    with planned((3, True)):
        (found,) = completions(model, tokenizer, [request], speculator)
    assert outcome(found) == outcome(*completions(model, tokenizer, [request]))
    assert found.accepted == 0


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("level", LEVELS)
def test_texts_of_the_bundled_model_are_the_same(native, tiny, level, threads):
    model = make_tiny(native, tiny)
    prompts = ["Once upon a time", "The fox", "A list: one, two, one, two, one", "\n"]
    requests = [
        Request(tiny.encode(prompt), Options(seed=seed, max_tokens=60, temperature=temperature))
        for seed, (prompt, temperature) in enumerate(itertools.product(prompts, [0, 0.8, 1.5]))
    ]
    expected = [outcome(*completions(model, tiny.tokenizer, [request])) for request in requests]
    speculator = Speculator(model)
    with computing(model.ops, threads, level), planned((4, True), (11, False), (2, True)):
        made = [completions(model, tiny.tokenizer, [each], speculator)[0] for each in requests]
    assert outcomes(made) == expected
    accepted, drafted = (sum(getattr(each, name) for each in made) for name in NAMES)
    assert 0.5 < accepted / drafted <= 1


NAMES = "accepted", "drafted"


def make_tiny(native, tiny):
    """Return `tiny`, which is stored in float16, in float32."""
    return gpt_cli.load("tiny", dtype="float32").model


def test_what_was_generated_before_an_interrupt_is_the_same(model, tokenizer):
    request = Request([1, 2], Options(seed=1, max_tokens=20, ignore_eos=True))
    (whole,) = completions(model, tokenizer, [request])
    with planned((5, True)):
        for count in range(1, 20):
            steps = generate(model, tokenizer, [request], Speculator(model))
            some = list(itertools.islice(steps, count))
            steps.close()
            assert [step.id for step in some] == whole.ids[:count]
            assert whole.text.startswith("".join(step.text for step in some))


# --- what is counted -----------------------------------------------------------------------------


def test_drafts_are_counted(model, tokenizer):
    request = Request([1, 2], Options(temperature=0, max_tokens=20, ignore_eos=True))
    speculator = Speculator(model)
    speculator.twin = replace(make_twin(model), lm_head=model.lm_head)  # cannot be used
    speculator.twin = make_twin(model)
    with planned((0, False), (3, True)):
        steps = list(generate(model, tokenizer, [request], speculator))
    firsts = [step for step in steps if not step.accepted or step.drafted]
    assert sum(step.drafted for step in steps) >= sum(step.accepted for step in steps) > 0
    assert all(step.model_seconds > 0 for step in firsts if step.drafted)
    made = Completion(2, 0)
    for step in steps:
        made.add(step)
    assert made.drafted == sum(step.drafted for step in steps)
    assert made.accepted == sum(step.accepted for step in steps)


def test_without_the_cache_nothing_is_drafted(model, tokenizer):
    request = Request([1, 2], Options(max_tokens=9, use_cache=False))
    with planned((3, True)):
        (made,) = completions(model, tokenizer, [request], Speculator(model))
    assert made.drafted == 0


@given(st.lists(st.integers(0, 2), max_size=5), st.lists(st.integers(0, 2), max_size=6))
def test_agreed_counts_the_equal_beginning(drafts, ids):
    count = agreed(drafts, ids)
    assert drafts[:count] == ids[:count]
    assert count == min(len(drafts), len(ids)) or drafts[count] != ids[count]
