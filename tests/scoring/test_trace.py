"""Traces of a pass: compared with transformers and with the model itself."""

import numpy as np
import pytest

import gpt_cli
from gpt_cli.errors import CheckpointError, ResourceError
from gpt_cli.scoring.trace import trace
from gpt_cli.texts.loaded import LoadedModel
from gpt_cli.texts.text import Text

IDS = [72, 5, 258, 286, 199]


@pytest.mark.parametrize("name", ["residual", "attention", "logits"])
def test_a_trace_is_that_of_transformers(load_case, golden, name):
    values, expected = (
        getattr(trace(load_case("saved"), Text(IDS)), name),
        golden("inner.npz")[name],
    )
    assert values.shape == expected.shape
    assert np.abs(values - expected).max() < 1e-4 * expected.std()


def test_the_last_lens_is_the_model_itself(engine):
    inner = engine.trace("the answer is 中")
    logits = engine.logits([inner.ids])[0]
    if engine.model.ops.name == "native":
        assert np.array_equal(inner.logits[-1], logits)
    assert np.allclose(inner.logits[-1], logits, atol=1e-5)
    assert engine.tokenizer.decode(inner.ids) == "the answer is 中"


@pytest.mark.parametrize("count", [1, 3])
def test_the_lens_has_the_likeliest_tokens_by_the_logits(engine, count):
    inner = engine.trace("the sand and the ring")
    ids, logprobs = inner.lens(count)
    assert ids.shape == logprobs.shape == (4, len(inner.ids), count)
    logits = inner.logits.reshape(-1, inner.logits.shape[-1]).astype(np.float64)
    exact = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    best = np.argsort(-exact, kind="stable")[:, :count]
    assert np.array_equal(ids.reshape(-1, count), best)
    assert np.allclose(logprobs.reshape(-1, count), np.take_along_axis(exact, best, 1), atol=1e-5)


def test_a_trace_and_its_logits_need_free_memory(engine, monkeypatch):
    inner = engine.trace("the sand and the ring")
    kept = inner.residual.nbytes + inner.attention.nbytes
    logits = inner.logits.nbytes
    assert logits > kept

    def free(bytes):
        monkeypatch.setattr(engine.model.ops, "free_memory", lambda: bytes, raising=False)

    free(2 * kept)
    again = engine.trace("the sand and the ring")
    with pytest.raises(ResourceError, match=r"the logits .* shorten the text"):
        again.logits  # noqa: B018
    free(2 * logits)
    assert np.array_equal(again.logits, inner.logits)
    free(2 * kept - 1)
    with pytest.raises(ResourceError, match="shorten the text"):
        engine.trace("the sand and the ring")


def test_damaged_weights_are_detected(make_model, tokenizer):
    model = make_model()
    model.ln_f.bias[3] = np.nan
    model.h[0].ln_1.bias[3] = np.nan
    with pytest.raises(CheckpointError, match="damaged"):
        gpt_cli.Engine(LoadedModel(model, tokenizer), "x", 0.0).trace("the")
