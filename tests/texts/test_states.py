"""The states of texts, of their continuations, and values at hook points: those of each alone."""

import weakref
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt_cli.gpt2.edits import ModelEdit, bind
from gpt_cli.gpt2.model import hidden_states
from gpt_cli.ops import Ops
from gpt_cli.texts.prefix_cache import PrefixCache
from gpt_cli.texts.states import passes, states
from gpt_cli.texts.text import Text
from support.checkpoints import VOCAB
from support.models import model_of

SMALL = {"n_head": 2, "n_layer": 2, "n_positions": 60, "eos_token_id": None}
HOOKS = ["blocks.0.hook_mlp_out", "blocks.1.attn.hook_pattern"]
BEGINNING = [n % 100 for n in range(30)]

an_id = st.integers(0, len(VOCAB) - 1)


@st.composite
def texts(draw, continued=False):
    """Return texts, of which some begin alike and some have edits, which `bound` makes."""
    ids = draw(st.lists(an_id, min_size=1, max_size=20))
    ids = BEGINNING * draw(st.booleans()) + ids
    edited = draw(st.booleans())
    continuations = []
    if continued:
        one = st.lists(an_id, min_size=1, max_size=5)
        continuations = draw(st.lists(one, max_size=4))
    return Text(ids, edits=edited, continuations=continuations)


@pytest.fixture(scope="module")
def model(native):
    return model_of(native("float32"), **SMALL)


def bound(model, text):
    edits = [ModelEdit.of("blocks.0.hook_mlp_out@0:1*=2", model.config)] if text.edits else []
    return replace(text, edits=bind(edits, len(text.ids), len(text.ids)))


def alone(model, text, names=()):
    """Return the states and values of a text by itself."""
    text = replace(text, continuations=())
    ((row,),) = [computed.rows for computed in states(model, [text], names)]
    return row.states, row.values


@given(
    batch=st.lists(texts(continued=True), max_size=8),
    shared=st.booleans(),
    a_pass=st.sampled_from([1, 50]),
)
def test_each_text_has_the_states_that_it_has_alone(model, batch, shared, a_pass):
    batch = [bound(model, text) for text in batch]
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ops, "pass_tokens", a_pass)
        prefixes = PrefixCache(model) if shared else None
        for computed in states(model, batch, prefixes=prefixes):
            of_pass = [batch[row.text_index] for row in computed.rows]
            assert computed.hook.changes_values == any(text.edits for text in of_pass)
            for row in computed.rows:
                if row.continuation_index is not None:
                    continue
                text = batch[row.text_index]
                n = len(computed.prefix.ids)
                assert computed.prefix.ids == text.ids[:n]
                expected, _ = alone(model, text)
                whole = np.concatenate([computed.prefix.states, row.states])
                assert np.array_equal(whole, expected)
                seen.append(row.text_index)
    assert sorted(seen) == list(range(len(batch)))


def test_states_are_those_of_the_model(model):
    (computed,) = states(model, [Text(BEGINNING)])
    assert np.array_equal(computed.rows[0].states, hidden_states(model, np.array([BEGINNING]))[0])


@given(batch=st.lists(texts(), min_size=1, max_size=5), most=st.sampled_from([None, 1]))
def test_values_at_hook_points_are_those_of_a_text_alone(model, batch, most):
    batch = [bound(model, text) for text in batch]
    for computed in states(model, batch, HOOKS, max_bytes=most):
        assert most is None or len(computed.rows) == 1
        for row in computed.rows:
            _, expected = alone(model, batch[row.text_index], HOOKS)
            assert row.values.keys() == set(HOOKS)
            for name in HOOKS:
                assert np.array_equal(row.values[name], expected[name])


@given(batch=st.lists(texts(continued=True), max_size=5), shared=st.booleans())
def test_the_states_that_predict_continuations_are_those_of_the_whole_texts(model, batch, shared):
    batch = [bound(model, text) for text in batch]
    seen = set()
    for computed in states(model, batch, prefixes=PrefixCache(model) if shared else None):
        for row in computed.rows:
            if row.continuation_index is not None:
                text = batch[row.text_index]
                ids = text.ids + text.continuations[row.continuation_index][:-1]
                expected, _ = alone(model, replace(text, ids=ids))
                assert np.array_equal(row.states, expected[len(text.ids) - 1 :])
                seen.add((row.text_index, row.continuation_index))
    counts = [len(text.continuations) for text in batch]
    assert seen == {(index, n) for index, count in enumerate(counts) for n in range(count)}


@given(
    lengths=st.lists(st.integers(0, 40), max_size=20),
    most=st.integers(1, 9),
    a_pass=st.integers(1, 99),
)
def test_passes_have_similar_lengths_and_limits(lengths, most, a_pass):
    texts_of_passes = list(passes(lengths, most, a_pass))
    for indices in texts_of_passes:
        assert len(indices) <= most
        assert len(indices) == 1 or sum(lengths[index] for index in indices) <= a_pass
    order = [index for indices in texts_of_passes for index in indices]
    assert sorted(order) == list(range(len(lengths)))
    assert [lengths[index] for index in order] == sorted(lengths, reverse=True)


def test_values_of_continuations_are_not_computed(model):
    with pytest.raises(ValueError, match="of continuations"):
        list(states(model, [Text([1], continuations=[[2]])], HOOKS))


@pytest.mark.parametrize("edited", [False, True])
def test_many_continuations_are_computed_side_by_side(model, edited):
    text = bound(model, Text([1, 2, 3], edits=edited, continuations=[[n, n] for n in range(20)]))
    computed = list(states(model, [text], prefixes=PrefixCache(model)))
    assert [len(one.rows) for one in computed] == [1, 20]
    assert {row.continuation_index for row in computed[1].rows} == set(range(20))
    assert computed[1].hook.changes_values == edited


def test_a_limit_of_values_without_values_is_no_limit(model):
    (computed,) = states(model, [Text([1, 2])] * 3, max_bytes=1)
    assert len(computed.rows) == 3


def test_values_of_a_pass_are_not_kept_in_the_next(model):
    kept = []
    for computed in states(model, [Text([1, 2])] * 3, HOOKS, max_bytes=1):
        assert [ref for ref in kept if ref() is not None] == []
        kept = [weakref.ref(computed.rows[0].values[HOOKS[0]])]
        del computed
