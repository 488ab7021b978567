"""Tokens of several passes in one call are those of one pass after the other."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpt_cli
from gpt_cli.errors import CheckpointError
from gpt_cli.generation import decode
from gpt_cli.generation.generate import Run
from gpt_cli.generation.row import BatchRow, Request, Sampler
from gpt_cli.generation.speculate import DraftPolicy
from gpt_cli.gpt2.edits import ModelEdit, bind
from gpt_cli.ops import get_ops
from gpt_cli.options.request import Options
from gpt_cli.texts.loaded import LoadedModel
from gpt_cli.texts.speculator import Speculator
from gpt_cli.texts.text import Text
from support import emulated_cuda
from support.checkpoints import VOCAB
from support.decoding import decoding_ahead
from support.drafting import SMALL, options, planned, plans, prompts, requests_of
from support.models import completions_of, favouring, model_of, outcomes
from support.sampling_values import VALUES, sampling_options

WIDE = {"n_layer": 1, "n_head": 2, "n_positions": 60, "eos_token_id": None}
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def cuda():
    """Return a function that returns the emulated operations of a GPU for a dtype."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GPT_CLI_OPS", raising=False)
        emulated_cuda.install(patch)
        yield lambda dtype: get_ops("cuda", dtype)


@pytest.fixture
def model(native):
    return model_of(native("float32"), **WIDE)


def requests(*prompts, **options):
    return [
        Request(Text(prompt), Options(**{"max_tokens": 20, "seed": row} | options), row)
        for row, prompt in enumerate(prompts)
    ]


# --- the same texts ------------------------------------------------------------------------------

rows = st.lists(st.tuples(prompts, sampling_options, options), min_size=1, max_size=4)
known = st.fixed_dictionaries(
    {name: st.sampled_from(VALUES[name]) for name in ("temperature", "top_k", "top_p", "min_p")}
)


@st.composite
def alike(draw):
    """Return rows whose next tokens one call may choose."""
    shared = draw(known), draw(options)
    return [
        (prompt, shared[0], shared[1] | {"seed": seed, "max_tokens": size, "top_logprobs": 0})
        for prompt, seed, size in draw(
            st.lists(
                st.tuples(prompts, st.integers(0, 9), st.sampled_from([1, 5, 17, 40])),
                min_size=1, max_size=4,
            )
        )
    ]  # fmt: skip


@given(rows=rows | alike(), plans=st.none() | plans, ends=st.booleans())
def test_texts_are_the_same_in_fewer_calls(native, tokenizer, rows, plans, ends):
    ends = list(range(0, len(VOCAB), 9)) if ends else None
    model = model_of(native("float32"), **SMALL | {"eos_token_id": ends})
    requests = requests_of(rows)
    expected = outcomes(completions_of(model, tokenizer, requests))
    with decoding_ahead(model.ops), planned(*plans or [(0, False)]):
        speculator = Speculator(model) if plans else None
        actual = completions_of(model, tokenizer, requests, speculator)
    assert outcomes(actual) == expected


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@settings(max_examples=4)
@given(rows=alike())
def test_texts_of_a_gpu_are_those_of_a_cpu(cuda, native, tokenizer, dtype, rows):
    config = SMALL | {"n_layer": 1, "eos_token_id": list(range(0, len(VOCAB), 19))}
    expected, actual = (
        outcomes(completions_of(model_of(ops, **config), tokenizer, requests_of(rows)))
        for ops in (native(dtype), cuda(dtype))
    )
    assert actual == expected


@pytest.mark.parametrize("sampling", [{}, GREEDY, {"top_k": 5, "min_p": 0.01, "seed": 3}])
def test_a_gpu_decodes_ahead_with_the_bits_of_a_cpu(cuda, native, tokenizer, monkeypatch, sampling):
    rows = requests([1, 2, 3], [4], [*range(20)], max_tokens=40, **sampling)
    expected = completions_of(model_of(native("float32"), **WIDE), tokenizer, rows)
    model, sizes = model_of(cuda("float32"), **WIDE), []
    decode_there = model.ops.decode

    def counted(*arguments):
        sizes.append(arguments[3].shape)
        return decode_there(*arguments)

    monkeypatch.setattr(model.ops, "decode", counted)
    assert outcomes(completions_of(model, tokenizer, rows)) == outcomes(expected)
    assert sizes == [(16, 3), (16, 3), (7, 3)]


def test_the_bundled_model_on_a_gpu(cuda, tiny):
    on_gpu = gpt_cli.load("tiny", device="cuda")
    assert on_gpu.model.ops.name == "cupy"
    choices = {"max_tokens": 12, "seed": 5, "stop": ["\n\n"]}
    texts = ["Once upon a time", "The moon"]
    for completion, expected in zip(
        on_gpu.generate(texts, **choices), tiny.generate(texts, **choices), strict=True
    ):
        assert (completion.text, completion.logprobs) == (expected.text, expected.logprobs)
    assert [*on_gpu.stream("A girl", max_tokens=3, seed=1)] == [
        *tiny.stream("A girl", max_tokens=3, seed=1)
    ]


# --- calls ---------------------------------------------------------------------------------------


def test_one_call_has_sixteen_passes(model, tokenizer):
    rows = requests([1, 2], [3], max_tokens=40, ignore_eos=True)
    with decoding_ahead(model.ops) as calls:
        run = Run(LoadedModel(model, tokenizer), rows)
        passes = [Counter(step.row for step in steps) for steps in run.passes]
    assert calls == [(16, 2), (16, 2), (7, 2)]
    assert passes == [{0: n, 1: n} for n in (1, 16, 16, 7)]


@pytest.mark.parametrize(("first", "count"), [(0, 1), (5, 16), (120, 16), (127, 1), (128, 300)])
def test_draws_ahead_are_those_of_the_steps(model, tokenizer, first, count):
    row = BatchRow(0, requests([1])[0], LoadedModel(model, tokenizer))
    expected = [row.draw(step) for step in range(first, first + count)]
    assert row.draws(first, count).tolist() == expected


def test_a_row_that_has_few_tokens_left_makes_calls_short(model, tokenizer):
    rows = [*requests([1], max_tokens=5), *requests([1], max_tokens=30)]
    with decoding_ahead(model.ops) as calls:
        completions_of(model, tokenizer, rows)
    assert calls == [(4, 2), (16, 1), (9, 1)]


def test_tokens_behind_the_end_of_a_row_are_dropped(model, tokenizer):
    rows = requests([1], [2, 3], max_tokens=12, temperature=0)
    texts = [done.ids for done in completions_of(model, tokenizer, rows)]
    model = replace(model, config=replace(model.config, eos_token_id=(texts[0][5],)))
    expected = completions_of(model, tokenizer, rows)
    assert [done.finish_reason for done in expected] == ["eos", "length"]
    with decoding_ahead(model.ops) as calls:
        assert outcomes(completions_of(model, tokenizer, rows)) == outcomes(expected)
    assert calls == [(11, 2)]


def test_steps_share_the_time_of_their_call(model, tokenizer, monkeypatch):
    clock = itertools.count()
    with decoding_ahead(model.ops), monkeypatch.context() as patch:
        patch.setattr(decode.time, "perf_counter", lambda: float(next(clock)))
        steps = list(Run(LoadedModel(model, tokenizer), requests([1], max_tokens=9)))
    seconds = [step.seconds for step in steps]
    assert seconds == sorted({*seconds})
    assert np.allclose(np.diff(seconds[1:]), steps[1].model_seconds / 8)
    assert [step.model_seconds > 0 for step in steps] == [True, True] + [False] * 7
    assert not any(step.drafted or step.accepted for step in steps)


@pytest.mark.parametrize(
    "options",
    [
        {"top_logprobs": 1},
        {"beams": 2, "temperature": 0},
        {"repeat_penalty": 1.1},
        {"typical_p": 0.9},
        {"logit_bias": ((3, 1.0),)},
        {"use_cache": False},
    ],
)
def test_rows_that_need_more_take_a_pass_after_the_other(model, tokenizer, options):
    rows = requests([1, 2], [3], max_tokens=4, **options)
    expected = outcomes(completions_of(model, tokenizer, rows))
    with decoding_ahead(model.ops) as calls:
        assert outcomes(completions_of(model, tokenizer, rows)) == expected
    assert calls == []


def test_constrained_rows_take_a_pass_after_the_other(model, tokenizer):
    pytest.importorskip("llguidance", reason="the extra constrain is not installed")
    with decoding_ahead(model.ops) as calls:
        completions_of(model, tokenizer, requests([1, 2], regex="[a-z]{9}"))
    assert calls == []


def test_rows_with_other_options_than_their_neighbours_take_a_pass_after_the_other(
    model, tokenizer
):
    for other in ({"top_k": 3}, {"ignore_eos": True}):
        rows = [*requests([1], max_tokens=4), *requests([1], max_tokens=4, **other)]
        with decoding_ahead(model.ops) as calls:
            completions_of(model, tokenizer, rows)
        assert calls == []


def test_rows_with_edits_take_a_pass_after_the_other(model, tokenizer):
    edits = bind([ModelEdit.of("blocks.0.hook_mlp_out=0", model.config)], 2, 8)
    rows = [
        replace(row, text=replace(row.text, edits=edits)) for row in requests([1, 2], max_tokens=4)
    ]
    with decoding_ahead(model.ops) as calls:
        completions_of(model, tokenizer, rows)
    assert calls == []


def test_an_edited_model_takes_a_pass_after_the_other(model, tokenizer, monkeypatch):
    monkeypatch.setattr(decode, "is_modified", lambda: True)
    with decoding_ahead(model.ops) as calls:
        completions_of(model, tokenizer, requests([1, 2]))
    assert calls == []


def test_options_that_the_operations_do_not_know_take_a_pass_after_the_other(model, tokenizer):
    rows = requests([1, 2], max_tokens=4, top_k=0)
    expected = outcomes(completions_of(model, tokenizer, rows))
    with decoding_ahead(model.ops) as calls:
        assert outcomes(completions_of(model, tokenizer, rows)) == expected
    assert calls == [(3, 1), (2, 1), (1, 1)]


# --- results that are not finite -----------------------------------------------------------------


def damaged_from(model, position):
    """Return a model whose results from a position on are not finite."""
    wpe = model.ops.to_host(model.wpe).copy()
    wpe[position:] = np.nan
    return replace(model, wpe=model.ops.xp.asarray(wpe))


def until_an_error(model, tokenizer, rows):
    run = Run(LoadedModel(model, tokenizer), rows)
    with pytest.raises(CheckpointError) as caught:
        list(run)
    return outcomes(run.completions), str(caught.value)


def test_results_that_are_not_finite_give_the_tokens_before_and_the_error_of_a_cpu(
    cuda, native, tokenizer
):
    rows = requests([1, 2], [3], max_tokens=12)
    expected, actual = (
        until_an_error(damaged_from(model_of(ops, **WIDE), 6), tokenizer, rows)
        for ops in (native("float32"), cuda("float32"))
    )
    assert actual == expected
    assert [len(ids) for _, ids, *_ in expected[0]] == [5, 5]


def test_weights_that_only_a_dropped_token_uses_are_not_missed(model, tokenizer):
    damaged = damaged_from(favouring(model, VOCAB["x"]), 6)
    rows = requests([1, 2], max_tokens=20, temperature=0, stop=["xxx"])
    expected = outcomes(completions_of(damaged, tokenizer, rows))
    with decoding_ahead(damaged.ops):
        assert outcomes(completions_of(damaged, tokenizer, rows)) == expected


# --- beside drafts -------------------------------------------------------------------------------


def test_calls_go_on_where_there_are_no_drafts(model, tokenizer, monkeypatch):
    rows = requests([1, 2], max_tokens=30, ignore_eos=True)
    expected = outcomes(completions_of(model, tokenizer, rows))
    learned, learn = [], DraftPolicy.learn

    def learning(policy, rows, new, passes=1):
        learned.append(passes)
        learn(policy, rows, new, passes)

    monkeypatch.setattr(DraftPolicy, "learn", learning)
    with decoding_ahead(model.ops) as calls, planned((0, False), (3, True)):
        actual = completions_of(model, tokenizer, rows, Speculator(model))
    assert outcomes(actual) == expected
    assert calls[0] == (16, 1)
    assert actual[0].drafted
    assert sum(passes for passes, _ in calls) < 29
    assert learned[:3] == [1, 16, 1]  # the first token, a call, a pass with drafts


def test_the_policy_learns_the_seconds_of_a_pass(model, tokenizer, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr("gpt_cli.generation.speculate.time.perf_counter", lambda: 8.0 * next(clock))
    loaded = LoadedModel(model, tokenizer)
    policy = DraftPolicy(Speculator(model), Sampler(loaded))
    row = BatchRow(0, requests([1, 2])[0], loaded)
    policy.draft([row], type("Cache", (), {"capacity": 60}))
    policy.learn([row], [[5] * 16], 16)
    assert policy._pass_seconds == 0.5


def test_a_gpu_has_its_own_times_of_passes_with_drafts(model, tokenizer):
    policy = DraftPolicy(Speculator(model), Sampler(LoadedModel(model, tokenizer)))
    one_call_each = policy._times(16)
    with decoding_ahead(model.ops):
        assert policy._times(1) == 1 < policy._times(8) < policy._times(16)
        assert policy._times(16) != one_call_each


def test_many_rows_have_no_drafts(model, tokenizer):
    loaded = LoadedModel(model, tokenizer)
    policy = DraftPolicy(Speculator(model), Sampler(loaded))
    rows = [BatchRow(0, request, loaded) for request in requests(*[[1, 2, 3, 1, 2, 3]] * 25)]
    policy.draft(rows, type("Cache", (), {"capacity": 60}))
    assert not any(row.drafts or row.ngrams for row in rows)
