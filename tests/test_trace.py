"""What is inside a pass: as transformers has it, and in agreement with the model itself."""

import numpy as np
import pytest

import gpt_cli
from gpt_cli.errors import CheckpointError, InputError, ResourceError
from gpt_cli.trace import size, trace

IDS = [72, 5, 258, 286, 199]


@pytest.mark.parametrize("name", ["residual", "attention", "logits"])
def test_everything_inside_is_that_of_transformers(load_case, golden, name):
    found, expected = getattr(trace(load_case("saved"), IDS), name), golden("inner.npz")[name]
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 1e-4 * expected.std()


def test_the_last_lens_is_the_model_itself(engine):
    inner = engine.trace("the answer is 中")
    assert np.allclose(inner.logits[-1], engine.logits([inner.ids])[0], atol=1e-5)
    assert engine.tokenizer.decode(inner.ids) == "the answer is 中"


@pytest.mark.parametrize("text", ["t", "the sand and the ring"])
def test_attention_is_of_what_is_before_and_sums_to_one(engine, text):
    inner = engine.trace(text)
    T = len(inner.ids)
    assert inner.attention.shape == (3, 4, T, T)
    assert np.allclose(inner.attention.sum(axis=-1), 1, atol=1e-5)
    assert not np.triu(inner.attention, 1).any()


def test_text_that_cannot_be_traced_is_refused(engine):
    with pytest.raises(InputError, match="shorten it"):
        engine.trace("!" * 81)


def test_the_size_is_that_of_the_arrays_and_must_be_free(engine, monkeypatch):
    inner = engine.trace("the sand and the ring")
    arrays = (inner.residual, inner.attention, inner.logits)
    assert size(engine.model.config, len(inner.ids)) == sum(array.nbytes for array in arrays)
    monkeypatch.setattr(engine.model.ops, "free_memory", lambda: 1000, raising=False)
    with pytest.raises(ResourceError, match="shorten the text"):
        engine.trace("the sand and the ring")


def test_damaged_weights_are_noticed(make_model, tokenizer):
    model = make_model()
    model.ln_f.bias[3] = np.nan
    model.h[0].ln_1.bias[3] = np.nan
    with pytest.raises(CheckpointError, match="damaged"):
        gpt_cli.Engine(model, tokenizer, "x", 0.0).trace("the")
