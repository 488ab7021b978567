import json
import math
import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gpt_cli.errors import InputError
from gpt_cli.generation.sampling import (
    SamplingParams,
    ban_repeats,
    cumulated_weights,
    generated_penalty,
    likely_columns,
    min_p,
    repeat_penalty,
    sample,
    top_k,
    top_p,
    typical_p,
    uniforms,
)
from support.checkpoints import noise

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
GREEDY = SamplingParams(temperature=0)
LAST_UNIFORM = 1 - 2**-53
PAGE = Path(__file__).parents[2] / "docs" / "generate.md"

rows_of_logits = arrays(
    np.float32, (2, 9), elements=st.floats(-60, 60, width=32, allow_subnormal=False)
)

# Equal logits, and some that have been removed; every row has one that has not.
rows_with_ties = arrays(
    np.float32,
    st.tuples(st.integers(1, 3), st.integers(1, 60)),
    elements=st.one_of(
        st.just(-np.inf), st.integers(-3, 3), st.floats(-60, 60, width=32, allow_subnormal=False)
    ),
).map(lambda logits: np.hstack([logits, np.ones((len(logits), 1), np.float32)]))


def params(**changes) -> SamplingParams:
    return SamplingParams(**OFF | changes)


def softmax(logits):
    """The probabilities (B, V) in float64."""
    weights = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def draw_all(ops, logits, places, params, text=()):
    """Draw from one row of logits at each place of [0, 1)."""
    rows = np.repeat(np.atleast_2d(np.asarray(logits, np.float32)), len(places), axis=0)
    return sample(ops, rows, np.array(places), params, [text] * len(places)).tolist()


# --- against transformers ------------------------------------------------------------------------


@pytest.mark.parametrize("case", range(35))
def test_the_survivors_and_their_probabilities_are_those_of_transformers(ops, case, golden):
    reference = golden("sampling.json")
    case = reference["cases"][case]
    for logits, text, survivors, probabilities in zip(
        reference["logits"],
        reference["texts"],
        case["survivors"],
        case["probabilities"],
        strict=True,
    ):
        ends = np.cumsum(probabilities)
        for place in (0.1, 0.5, 0.9):  # near both ends of each token's share, and in the middle
            places = ends - np.array(probabilities) * (1 - place)
            assert draw_all(ops, logits, places, params(**case["params"]), text) == survivors


def test_rows_are_filtered_each_by_itself(ops, golden):
    reference = golden("sampling.json")
    assert len(reference["cases"]) == 35  # each is tested above
    case = reference["cases"][-1]
    logits, texts = np.array(reference["logits"], np.float32), reference["texts"]
    for place in np.linspace(0, 0.999, 20):
        together = sample(ops, logits, np.full(3, place), params(**case["params"]), texts)
        alone = [
            draw_all(ops, row, [place], params(**case["params"]), text)[0]
            for row, text in zip(logits, texts, strict=True)
        ]
        assert together.tolist() == alone


# --- each filter ---------------------------------------------------------------------------------


@given(
    logits=rows_of_logits,
    k=st.integers(1, 12),
    p=st.floats(0, 1, exclude_min=True),
    temperature=st.floats(0.01, 10),
)
def test_the_most_likely_token_always_survives(ops, logits, k, p, temperature):
    filtered = logits / np.float32(temperature)
    filtered = min_p(np, top_p(ops, top_k(np, filtered, k), p), p)
    best = logits.argmax(axis=-1)
    assert np.isfinite(np.take_along_axis(filtered, best[:, None], axis=-1)).all()


@given(logits=rows_of_logits, k=st.integers(1, 12))
def test_top_k_keeps_the_k_largest(logits, k):
    kept = np.isfinite(top_k(np, logits, k))
    for row, mask in zip(logits, kept, strict=True):
        kth = sorted(row)[-min(k, len(row))]
        assert mask.tolist() == (row >= kth).tolist()


@pytest.mark.parametrize("count", range(1, 9))
def test_top_p_keeps_the_fewest_that_reach_p(ops, count):
    row = np.float32(np.round(1024 * noise("top-p", 9)) / 1024)  # exact also with 1000 less
    reached = np.sort(softmax(row[None])[0])[::-1][:count].sum()
    for p, kept in ((reached - 1e-6, count), (reached + 1e-6, count + 1)):
        for found in top_p(ops, np.stack([row, row - 1000]), p):  # each row by itself
            assert np.flatnonzero(np.isfinite(found)).tolist() == sorted(np.argsort(-row)[:kept])


def test_a_token_of_exactly_p_is_enough_for_top_p(ops):
    logits = np.log(np.array([[0.25, 0.5, 0.25]], np.float32))
    assert np.isfinite(top_p(ops, logits, 0.5)).tolist() == [[False, True, False]]


@given(logits=rows_of_logits, p=st.floats(0.001, 1))
def test_min_p_keeps_by_the_ratio_to_the_best(logits, p):
    ratios = np.exp((logits - logits.max(axis=-1, keepdims=True)).astype(np.float64))
    kept = np.isfinite(min_p(np, logits, p))
    assert kept[ratios > p * 1.0001].all()
    assert not kept[ratios < p * 0.9999].any()


def test_tokens_of_equal_logits_stay_or_go_together(ops):
    logits = np.array([[1, 2, 2, 2, 0]], np.float32)
    for kept in (top_k(np, logits, 2), top_p(ops, logits, 0.4), min_p(np, logits, 1.0)):
        assert np.isfinite(kept).tolist() == [[False, True, True, True, False]]


def test_the_penalty_divides_positive_and_multiplies_negative_logits_once():
    logits = np.array([[2, -2, 0, 4], [2, -2, 0, 4]], np.float32)
    penalized = repeat_penalty(np, logits, [[0, 1, 0, 1], [3]], 2.0)
    assert penalized.tolist() == [[1, -4, 0, 4], [2, -2, 0, 2]]
    assert logits[0, 0] == 2


def test_the_penalty_comes_before_the_greedy_choice(ops):
    text = [0]
    assert draw_all(ops, [2.0, 1.5], [0.5], GREEDY, text) == [0]
    greedy = SamplingParams(temperature=0, repeat_penalty=2)
    assert draw_all(ops, [2.0, 1.5], [0.5], greedy, text) == [1]


def test_a_ban_that_would_leave_no_token_is_none():
    logits = np.array([[1, 2, -np.inf], [1, 2, 3], [1, 2, 3]], np.float32)
    banned = ban_repeats(np, logits, [[0, 1], [0, 1, 1], []], 1)
    assert banned.tolist() == [[1, 2, -np.inf], [-np.inf, -np.inf, 3], [1, 2, 3]]
    assert ban_repeats(np, logits, [[2, 2, 1, 2], [1, 1], [0]], 3).tolist() == logits.tolist()


def test_the_typical_token_may_be_less_likely_than_others(ops):
    logits = np.log(np.array([[0.5, 0.25, 0.125, 0.125]], np.float32))  # an entropy of 1.75 bits
    for p, kept in ((0.2, [1]), (0.5, [0, 1]), (0.8, [0, 1, 2, 3])):
        assert np.flatnonzero(np.isfinite(typical_p(ops, logits, p))).tolist() == kept


def test_greedy_ignores_every_filter_and_draw(ops):
    greedy = SamplingParams(temperature=0, top_k=1, top_p=0.01, min_p=1)
    assert draw_all(ops, [0.0, 3.0, 1.0], [0, 0.5, LAST_UNIFORM], greedy) == [1, 1, 1]


# --- the columns in which the largest are looked for ---------------------------------------------


@given(logits=rows_with_ties, k=st.integers(1, 61), group=st.integers(1, 8))
def test_the_likely_columns_hold_the_k_largest_and_their_equals(logits, k, group):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpt_cli.generation.sampling.BAND", group)
        columns = likely_columns(np, logits, min(k, logits.shape[1])).tolist()
    assert columns == sorted(set(columns))
    for row in logits:
        kth = sorted(row)[-min(k, len(row))]
        assert set(np.flatnonzero(row >= kth)) <= set(columns)


def test_of_many_columns_few_are_likely():
    logits = noise("likely", 3, 50257).astype(np.float32)
    assert 40 <= len(likely_columns(np, logits, 40)) <= 3 * 60


@given(
    logits=rows_with_ties,
    k=st.integers(1, 61),
    group=st.integers(1, 8),
    p=st.sampled_from([1.0, 0.9, 0.3]),
    place=st.floats(0, 1, exclude_max=True),
)
def test_to_look_in_few_columns_changes_no_draw(ops, logits, k, group, p, place):
    draw = (ops, logits, np.full(len(logits), place), params(top_k=k, top_p=p), [[]] * len(logits))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gpt_cli.generation.sampling.BAND", group)
        ids = sample(*draw)
        patch.setattr(
            "gpt_cli.generation.sampling.likely_columns",
            lambda xp, logits, k: xp.arange(logits.shape[1]),
        )
        assert ids.tolist() == sample(*draw).tolist()


# --- the draw ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [100, 1000, 4099])
def test_frequencies_follow_the_probabilities(ops, n):
    logits = noise("frequencies", 30).astype(np.float32)
    grid = (np.arange(n) + 0.5) / n
    counts = np.bincount(draw_all(ops, logits, grid, params()), minlength=30)
    assert abs(counts - n * softmax(logits[None])[0]).max() <= 1


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.5}])
def test_the_ends_of_the_unit_interval_draw_the_first_and_last_survivor(ops, filters):
    logits = [-np.inf, -9, 1, 0.9, -9, 0.8, -9, -np.inf]
    first, last = draw_all(ops, logits, [0, LAST_UNIFORM], params(**filters))
    assert (first, last) == ((2, 5) if filters else (1, 6))


def test_a_constant_added_to_a_row_changes_no_draw_however_cold(ops):
    row = np.arange(8, dtype=np.float32) / 2**13  # exact also with 1024 added
    places, cold = np.linspace(0, 0.999, 200), params(temperature=1e-4)
    expected = draw_all(ops, row, places, cold)
    assert len(set(expected)) > 4
    for place, id in zip(places, expected, strict=True):
        rows = np.stack([row, row + 1024, row - 1024])
        assert sample(ops, rows, np.full(3, place), cold, [()] * 3).tolist() == [id] * 3


@given(logits=rows_of_logits, place=st.floats(0, 1, exclude_max=True))
def test_a_token_of_no_probability_is_never_drawn(ops, logits, place):
    logits[:, ::2] = -np.inf
    ids = sample(ops, logits, np.array([place] * 2), params(), [[], []])
    assert (ids % 2 == 1).all()


def test_a_single_token_that_is_left_is_drawn_whatever_the_place(ops):
    logits = np.full(50, -np.inf)
    logits[17] = -5
    for choice in (params(), params(top_k=3, top_p=0.5, min_p=0.1), GREEDY):
        assert draw_all(ops, logits, [0, 0.5, LAST_UNIFORM], choice) == [17, 17, 17]


# --- the numbers that the draws are made with ----------------------------------------------------


@given(seed=st.integers(0, 2**64 - 1), row=st.integers(0, 1000), step=st.integers(0, 1_000_000))
def test_a_uniform_is_the_first_of_the_generator_keyed_by_seed_row_and_step(seed, row, step):
    bits = np.random.Philox(key=np.array([seed, row], np.uint64), counter=step).random_raw()
    assert uniforms((seed, row), step, 1).tolist() == [(int(bits) >> 11) * 2.0**-53]


def test_a_uniform_does_not_depend_on_those_made_with_it():
    together = uniforms((5, 3), 9, 40)
    assert [uniforms((5, 3), step, 1).item() for step in range(9, 49)] == together.tolist()
    assert together.dtype == np.float64


def test_uniforms_are_the_same_for_ever():
    assert uniforms((42, 0), 0, 1).tolist() == [0.8201981478608876]
    assert uniforms((42, 1), 0, 1).tolist() == [0.443746921343274]
    assert uniforms((42, 0), 1, 1).tolist() != uniforms((42, 0), 0, 1).tolist()


def test_uniforms_are_spread_evenly():
    values = np.array([uniforms((1, row), 0, 100) for row in range(20)])
    assert len(np.unique(values)) == values.size
    assert abs(np.histogram(values, bins=10, range=(0, 1))[0] - 200).max() < 60


def test_weights_over_a_large_vocabulary_keep_their_last_digits(ops):
    logits = noise("large", 1, 50257).astype(np.float32)
    cumulated = cumulated_weights(ops, logits)
    assert cumulated.dtype == np.float64
    exact = np.cumsum(softmax(logits)[0])
    assert abs(cumulated[0] / cumulated[0, -1] - exact).max() < 1e-7


# --- parameters ----------------------------------------------------------------------------------


OUT_OF_RANGE = {
    "temperature": [-0.1, 9e-7, 1000000.1, math.inf, math.nan],
    "top_k": [-1, math.nan],
    "top_p": [0, 1.01, math.nan],
    "min_p": [-0.01, 1.01, math.nan],
    "typical_p": [0, 1.01, math.nan],
    "repeat_penalty": [0, -1, 9e-7, 1000000.1, math.inf, math.nan],
    "presence_penalty": [-2.01],
    "frequency_penalty": [2.01],
    "no_repeat_ngram": [-1, 1.5],
    "logit_bias": [{-1: 0}, {1: 100.5}, {1: -100.5}, {1: math.nan}, ["1"], ["=1"], {"x": 101}, 7],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name in OUT_OF_RANGE for value in OUT_OF_RANGE[name]]
)
def test_a_value_out_of_range_is_refused_by_its_name(name, value):
    with pytest.raises(InputError, match=f"^{name} must be (?!None)"):
        SamplingParams(**{name: value})


def test_a_logit_falls_by_presence_and_by_frequency_times_its_count():
    logits = np.array([[1.0, 2, 3], [1, 2, 3]], np.float32)
    lower = generated_penalty(logits, [[2, 0, 2], []], 0.5, 0.25)
    assert lower.tolist() == [[0.25, 2.0, 2.0], [1.0, 2.0, 3.0]]
    assert logits.tolist() == [[1.0, 2.0, 3.0]] * 2


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({}, 1),
        ({"logit_bias": {0: 1.5}}, 0),
        ({"logit_bias": {1: -1.5}}, 0),
        ({"logit_bias": {0: -1.5, 2: 99}}, 2),
        ({"presence_penalty": 1.5}, 0),
        ({"frequency_penalty": 0.75}, 0),
        ({"frequency_penalty": 0.25}, 1),
    ],
)
def test_biases_and_penalties_change_what_is_likeliest(ops, options, chosen):
    logits = ops.xp.asarray([[1.0, 2.0, -3.0]], dtype="float32")
    greedy = SamplingParams(temperature=0, **options)
    assert sample(ops, logits, np.zeros(1), greedy, [[1, 1]], [[1, 1]]).tolist() == [chosen]
    assert logits.tolist() == [[1.0, 2.0, -3.0]]


@pytest.mark.parametrize(
    "limits", [{"top_k": 0, "top_p": 1, "min_p": 0}, {"top_p": 1e-9, "min_p": 1}]
)
@pytest.mark.parametrize("temperature", [0, 1e-6, 1e6])
@pytest.mark.parametrize(("penalty", "text"), [(1e-6, [2]), (1e6, [0, 1])])
def test_the_ends_of_the_ranges_can_be_used(ops, limits, temperature, penalty, text):
    choice = SamplingParams(temperature=temperature, repeat_penalty=penalty, **limits)
    assert draw_all(ops, [1.0, 2.0, 3.0], [LAST_UNIFORM], choice, text) == [2]


def test_the_defaults_are_those_of_the_guide():
    text = PAGE.read_text(encoding="utf-8")
    shown = dict(re.findall(r"^\| `--([a-z-]+)(?: N)?` \| ([\d.]+) \|", text, re.MULTILINE))
    named = {name.replace("-", "_"): json.loads(value) for name, value in shown.items()}
    numbers = {each.name: each.default for each in fields(SamplingParams) if each.default != ()}
    assert named == numbers
