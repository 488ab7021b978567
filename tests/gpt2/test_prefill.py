"""Texts that are computed a pass at a time are those of one pass."""

import numpy as np
import pytest

from gpt_cli.gpt2.kv_cache import KVCache
from gpt_cli.gpt2.model import forward, hidden_states
from gpt_cli.gpt2.prefill import next_logits, prefill, row_states
from gpt_cli.ops import Ops

ROWS = [[1, 2, 3, 4, 5, 6, 7], [8], [9, 10, 11]]


def cache_of(model):
    return KVCache(model.config, model.ops, len(ROWS), 10)


@pytest.mark.parametrize("tokens", [1, 6, 9, 1000])
def test_a_pass_has_so_many_tokens_and_the_states_are_those_of_each_row(make_model, tokens):
    model = make_model()
    passes = list(prefill(model, ROWS, cache_of(model), lambda: tokens))
    width = max(1, min(7, tokens // 3))
    assert len(passes) == -(-7 // width)
    assert [sum(len(states[row]) for states in passes) for row in range(3)] == [7, 1, 3]
    for row, ids in enumerate(ROWS):
        found = np.concatenate([states[row] for states in passes])
        assert np.allclose(found, hidden_states(model, np.array([ids]))[0], atol=1e-5)


@pytest.mark.parametrize("a_pass", [3, 1000])
@pytest.mark.parametrize("cached", [True, False])
def test_the_next_logits_follow_the_last_token_of_each_row(make_model, monkeypatch, a_pass, cached):
    model = make_model()
    monkeypatch.setattr(Ops, "pass_tokens", a_pass)
    logits = next_logits(model, ROWS, cache_of(model) if cached else None)
    states = row_states(model, ROWS, cache_of(model) if cached else None)
    for row, ids in enumerate(ROWS):
        expected = forward(model, np.array([ids]))[0]
        assert np.allclose(logits[row], expected[-1], atol=1e-4)
        assert states[row].shape == (len(ids), model.config.n_embd)


def test_rows_without_ids_have_no_states(make_model):
    model = make_model()
    assert [x.shape for x in row_states(model, [[], []])] == [(0, model.config.n_embd)] * 2
