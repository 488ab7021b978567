"""Values at hook points of many texts."""

import re

import numpy as np
import pytest

from gpt_cli.errors import CheckpointError, InputError
from gpt_cli.gpt2.hooks import hook_shapes, select_hooks
from gpt_cli.scoring import activations as module
from gpt_cli.scoring.activations import activations
from gpt_cli.texts.states import value_bytes
from gpt_cli.texts.text import Text, Word

ROWS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [1, 2], *([7] * n for n in range(1, 30))]
TEXTS = [Text(ids) for ids in ROWS]


@pytest.mark.parametrize("budget", [64e6, 1])
def test_texts_come_in_order_with_the_values_of_a_text_alone(make_model, monkeypatch, budget):
    monkeypatch.setattr(module, "_MAX_BYTES", budget)
    model = make_model()
    names = select_hooks(model.config, ["*"])
    values = list(activations(model, TEXTS, names))
    assert len(values) == len(TEXTS)
    for text, row in zip(TEXTS, values, strict=True):
        (alone,) = activations(model, [text], names)
        assert [*row] == names == [*hook_shapes(model.config)]
        size = sum(array.nbytes for array in row.values())
        assert size == value_bytes(model, names, len(text.ids))
        for name in names:
            assert np.allclose(row[name], alone[name], atol=1e-5)
            same = model.ops.batch_invariant
            assert not same or np.array_equal(row[name], alone[name])


def test_spans_are_averaged(make_model):
    model = make_model()
    names = ["blocks.0.hook_resid_post", "blocks.1.attn.hook_z"]

    def spans(text):
        end = len(text.ids)
        return [(0, end), (end - 1, end)]

    whole, pooled = (list(activations(model, TEXTS, names, *rest)) for rest in ((), (spans,)))
    for array, means in zip(whole, pooled, strict=True):
        for name in names:
            assert np.array_equal(means[name][1], array[name][-1])
            assert np.allclose(means[name][0], array[name].mean(axis=0), atol=1e-6)


def test_nothing_is_computed_before_it_is_needed(make_model):
    def texts():
        yield from (Text([1] * 30) for _ in range(10_000))
        raise AssertionError

    values = activations(make_model(), texts(), ["hook_embed"])
    assert next(values)["hook_embed"].shape == (30, 32)


def test_damaged_weights_are_an_error(make_model):
    model = make_model()
    model.ln_f.weight[:] = np.nan
    with pytest.raises(CheckpointError, match="not finite"):
        list(activations(model, TEXTS, ["hook_embed"]))


# --- Engine.activations --------------------------------------------------------------------------

HOOKS = ["blocks.1.hook_resid_post", "blocks.0.attn.hook_z"]


@pytest.mark.parametrize("bos", [False, True])
def test_a_pool_averages_what_the_tokens_have(engine, bos):
    text = " Once  upon\na time "
    (whole,) = engine.activations([text], [*HOOKS, "*pattern"], bos=bos)
    last, mean, words = (
        next(engine.activations([text], HOOKS, pool=pool, bos=bos))
        for pool in ("last", "mean", "word")
    )
    scored = engine.score(text, words=True, bos=True).words
    assert words["word"].tolist() == [word.text for word in scored]
    assert words["start"].tolist() == [word.start for word in scored]
    assert words["end"].tolist() == [word.end for word in scored]
    for name in HOOKS:
        tokens = whole[name][bos:]
        assert np.allclose(last[name], tokens[-1], atol=1e-5)
        assert np.allclose(mean[name], tokens.mean(axis=0), atol=1e-5)
        ends = np.cumsum([word.tokens for word in scored])
        assert ends[-1] == len(tokens)
        for value, word, end in zip(words[name], scored, ends, strict=True):
            assert np.allclose(value, tokens[end - word.tokens : end].mean(axis=0), atol=1e-5)


def test_a_word_without_a_token_has_no_mean(engine, monkeypatch):
    words = [Word("a", 0, 1, 1, None), Word("b", 1, 2, 0, None)]
    monkeypatch.setattr(module, "split_words", lambda *_: words)
    (values,) = engine.activations(["a"], HOOKS, pool="word")
    assert [np.isnan(value).any() for value in values[HOOKS[0]]] == [False, True]


@pytest.mark.parametrize(
    ("text", "pool", "says"),
    [("", None, "is empty"), (" ", "word", "has no words"), ("x " * 600, "last", "the text has ")],
)
def test_a_text_without_values_is_an_error_at_its_turn(engine, text, pool, says):
    values = engine.activations(iter(["a", text, "b"]), HOOKS, pool=pool, bos=True)
    assert HOOKS[0] in next(values)
    with pytest.raises(InputError, match=says):
        next(values)
    first, error, last = engine.activation_rows(["a", text, "b"], HOOKS, pool)
    assert isinstance(error, InputError)
    assert len(first.ids) == len(last.ids) == 1


@pytest.mark.parametrize(
    ("hooks", "pool", "says"),
    [
        (["*"], "mean", "pool must not be set for blocks.0.attn.hook_attn_scores"),
        (["hook_embed"], "max", "pool must be one of last, mean, word, not 'max'"),
        (["resid"], None, "'resid' is not a hook point"),
        ("hook_embed", None, "hooks must be a list"),
    ],
)
def test_wrong_options_are_refused_before_any_text(engine, hooks, pool, says):
    with pytest.raises(InputError, match=re.escape(says)):
        engine.activations(["a"], hooks, pool=pool)
