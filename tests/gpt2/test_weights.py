"""The walk over a model meets each weight, by its name in the checkpoint."""

import numpy as np

from gpt_cli.folder.config import GPT2Config
from gpt_cli.gpt2 import checkpoint
from gpt_cli.gpt2.weights import named_weights
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
