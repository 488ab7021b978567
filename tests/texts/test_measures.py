"""Measures of logits: probabilities, ranks, gaps, and the likeliest tokens."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gpt_cli.texts.measures import (
    gaps,
    likeliest,
    log_probabilities,
    measure_states,
    moments,
    ranks,
)

rows_of_logits = arrays(
    np.float32, (2, 9), elements=st.floats(-60, 60, width=32, allow_subnormal=False)
)


def softmax(logits):
    logits = logits.astype(np.float64)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


@given(logits=rows_of_logits)
def test_log_probabilities_are_the_logarithms_of_the_probabilities(ops, logits):
    ids = np.array([3, 8])
    exact = [
        float(row[id]) - max(row) - math.log(math.fsum(np.exp(row - max(row)).tolist()))
        for row, id in zip(logits.astype(np.float64), ids, strict=True)
    ]
    np.testing.assert_allclose(log_probabilities(ops, logits, ids), exact, rtol=1e-6, atol=1e-5)


def test_a_rank_counts_higher_logits_only(ops):
    logits = np.array([[0, 3, 1, 3, 2], [0, 0, 0, 0, 0], [5, 4, 3, 2, 1]], np.float32)
    found = [ranks(ops, logits, np.full(3, id)).tolist() for id in range(5)]
    assert found == [[5, 1, 1], [1, 1, 2], [4, 1, 3], [1, 1, 4], [3, 1, 5]]


@given(logits=rows_of_logits)
def test_moments_are_those_of_the_log_probabilities(ops, logits):
    p = softmax(logits)
    logprobs = np.log(np.maximum(p, 1e-99))
    means = np.sum(p * logprobs, axis=-1)
    deviations = np.sqrt(np.sum(p * (logprobs - means[:, None]) ** 2, axis=-1))
    found = moments(ops, logits, None)
    np.testing.assert_allclose(found, np.stack([means, deviations], 1), rtol=1e-5, atol=1e-6)
    assert found.tolist() == [moments(ops, row[None], None)[0].tolist() for row in logits]


def test_a_gap_is_the_distance_to_the_largest_logit(ops):
    logits = np.array([[0, 3, 1], [5, 4, 2.5]], np.float32)
    found = [gaps(ops, logits, np.full(2, id)).tolist() for id in range(3)]
    assert found == [[3, 0], [0, 1], [2, 2.5]]


def test_a_row_without_targets_has_empty_columns(make_model):
    model = make_model()
    x = np.zeros((2, model.config.n_embd), np.float32)
    columns = measure_states(model, x, [[], [3, 4], []], {"ranks": ranks})
    assert [len(column["ranks"]) for column in columns] == [0, 2, 0]


@given(logits=rows_of_logits, count=st.integers(1, 12))
def test_the_likeliest_are_those_of_a_full_sort(ops, logits, count):
    ids, logprobs = likeliest(ops, logits, count)
    assert ids.shape == logprobs.shape == (2, min(count, 9))
    for row, found, values in zip(logits, ids, logprobs, strict=True):
        assert len(set(found.tolist())) == len(found)
        assert row[found].tolist() == sorted(row.tolist(), reverse=True)[:count]
        each = log_probabilities(ops, np.tile(row, (len(found), 1)), found)
        np.testing.assert_allclose(values, each, rtol=1e-12)


def test_of_equally_likely_tokens_the_first_comes_first(ops):
    ids, _ = likeliest(ops, np.array([[0, 3, 1, 3, 3, 2]], np.float32), 4)
    assert ids.tolist() == [[1, 3, 4, 5]]
    # Which of equal numbers NumPy's partition takes depends on the processor.
    row = np.arange(5000) * 7919 % 11
    ids, _ = likeliest(ops, row[None].astype(np.float32), 1000)
    assert ids[0].tolist() == sorted(range(5000), key=lambda id: (-row[id], id))[:1000]
