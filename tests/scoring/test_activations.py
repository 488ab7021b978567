"""Values at hook points of many texts."""

import numpy as np
import pytest

from gpt_cli.errors import CheckpointError
from gpt_cli.gpt2.hooks import hook_shapes, select_hooks
from gpt_cli.scoring import activations as module
from gpt_cli.scoring.activations import activations, value_bytes

TEXTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [1, 2], *([7] * n for n in range(1, 30))]


@pytest.mark.parametrize("budget", [64e6, 1])
def test_texts_come_in_order_with_the_values_of_a_text_alone(make_model, monkeypatch, budget):
    monkeypatch.setattr(module, "_BYTES", budget)
    model = make_model()
    names = select_hooks(model.config, ["*"])
    values = list(activations(model, TEXTS, names))
    assert len(values) == len(TEXTS)
    for ids, row in zip(TEXTS, values, strict=True):
        (alone,) = activations(model, [ids], names)
        assert [*row] == names == [*hook_shapes(model.config)]
        assert sum(array.nbytes for array in row.values()) == value_bytes(
            model.config, names, len(ids)
        )
        for name in names:
            assert np.allclose(row[name], alone[name], atol=1e-5)
            same = model.ops.batch_invariant
            assert not same or np.array_equal(row[name], alone[name])


def test_spans_are_averaged(make_model):
    model = make_model()
    names = ["blocks.0.hook_resid_post", "blocks.1.attn.hook_z"]

    def spans(ids):
        return [(0, len(ids)), (len(ids) - 1, len(ids))]

    whole, pooled = (list(activations(model, TEXTS, names, *rest)) for rest in ((), (spans,)))
    for array, means in zip(whole, pooled, strict=True):
        for name in names:
            assert np.array_equal(means[name][1], array[name][-1])
            assert np.allclose(means[name][0], array[name].mean(axis=0), atol=1e-6)


def test_nothing_is_computed_before_it_is_needed(make_model):
    def texts():
        yield from ([1] * 30 for _ in range(10_000))
        raise AssertionError

    values = activations(make_model(), texts(), ["hook_embed"])
    assert next(values)["hook_embed"].shape == (30, 32)


def test_damaged_weights_are_an_error(make_model):
    model = make_model()
    model.ln_f.weight[:] = np.nan
    with pytest.raises(CheckpointError, match="not finite"):
        list(activations(model, TEXTS, ["hook_embed"]))
