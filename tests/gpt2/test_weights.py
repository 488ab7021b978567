"""The walk over a model meets each weight by its name in the checkpoint; damage is noticed."""

import numpy as np
import pytest

from gpt_cli.errors import CheckpointError
from gpt_cli.folder.config import GPT2Config
from gpt_cli.gpt2 import checkpoint
from gpt_cli.gpt2.model import forward
from gpt_cli.gpt2.weights import check_finite, damaged_weight, named_weights
from support.checkpoints import CONFIG, make_weights


def test_the_names_are_those_of_the_checkpoint_in_its_order(ops):
    weights = make_weights(CONFIG)
    model = checkpoint.assemble(GPT2Config.from_dict(CONFIG), ops, weights)
    found = dict(named_weights(model))
    assert found.keys() == weights.keys() | {"lm_head.weight"}
    assert found["lm_head.weight"] is found["wte.weight"]  # it is tied
    assert np.array_equal(found["h.1.ln_2.bias"], weights["h.1.ln_2.bias"])


def test_a_model_is_built_from_its_weights(make_model):
    model = make_model()
    again = checkpoint.build(model.config, model.ops, dict(named_weights(model)))
    pairs = zip(named_weights(model), named_weights(again), strict=True)
    assert all(one == other and a is b for (one, a), (other, b) in pairs)


@pytest.mark.parametrize("damage", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_noticed_wherever_it_is(damage, make_model):
    assert damaged_weight(make_model()) is None
    logits = np.zeros((2, 3), np.float32)
    check_finite(make_model(), logits)
    logits[1, 1] = damage
    with np.errstate(invalid="ignore"), pytest.raises(CheckpointError, match="damaged"):
        check_finite(make_model(), logits)


@pytest.mark.parametrize(
    "name", ["wte.weight", "wpe.weight", "h.0.ln_1.bias", "h.1.attn.c_attn.weight", "ln_f.weight"]
)
def test_the_weight_that_is_damaged_is_named(name, ops, caplog):
    weights = make_weights(CONFIG)
    weights[name].flat[3] = np.nan
    model = checkpoint.assemble(GPT2Config.from_dict(CONFIG), ops, weights)
    assert damaged_weight(model) == name
    with caplog.at_level("INFO", "gpt_cli"), pytest.raises(CheckpointError, match="-v names one"):
        forward(model, np.array([[0, 1, 2]]))
    assert caplog.messages == [f"not finite: {name}"]
