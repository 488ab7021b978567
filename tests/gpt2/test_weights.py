"""The walk over a model meets each weight by its name in the checkpoint; damage is noticed."""

import numpy as np
import pytest

from gpt_cli.errors import CheckpointError, InputError
from gpt_cli.folder.config import GPT2Config
from gpt_cli.gpt2 import assembly
from gpt_cli.gpt2.model import forward
from gpt_cli.gpt2.weights import Weights, check_finite, damaged_weight, named_weights
from support.checkpoints import CONFIG, make_weights
from support.models import model_of


def test_the_names_are_those_of_the_checkpoint_in_its_order(ops):
    weights = make_weights(CONFIG)
    model = assembly.assemble(GPT2Config.from_dict(CONFIG), ops, weights)
    found = dict(named_weights(model))
    assert found.keys() == weights.keys() | {"lm_head.weight"}
    assert found["lm_head.weight"] is found["wte.weight"]  # it is tied
    assert np.array_equal(found["h.1.ln_2.bias"], weights["h.1.ln_2.bias"])


def test_a_model_is_built_from_its_weights(make_model):
    model = make_model()
    again = assembly.build(model.config, model.ops, dict(named_weights(model)))
    pairs = zip(named_weights(model), named_weights(again), strict=True)
    assert all(one == other and a is b for (one, a), (other, b) in pairs)


@pytest.mark.parametrize("head", [False, True])
def test_weights_are_copies_in_the_layout_of_the_checkpoint(ops, head):
    config = CONFIG | {"tie_word_embeddings": not head}
    weights = make_weights(config)
    weights["h.0.mlp.c_fc.weight"][1, 2] = -0.0
    model = assembly.assemble(GPT2Config.from_dict(config), ops, weights)
    arrays = Weights(model)
    assert list(arrays) == list(dict(named_weights(model)))[: len(weights)]
    for name, array in arrays.items():
        assert (array.dtype, array.shape) == (np.float32, weights[name].shape)
        assert array.flags.c_contiguous and array.tobytes() == weights[name].tobytes()
        array[:] = 0
    assert arrays["ln_f.weight"].any()
    assert ("lm_head.weight" in arrays) == head


@pytest.mark.parametrize("dtype", ["int8", "float16", "bfloat16"])
def test_weights_have_the_values_that_the_model_computes_with(native, dtype):
    model = model_of(native(dtype), dtype)
    embedded = model.ops.embed(model.wte, model.wpe * 0, np.arange(9)[None], np.zeros((1, 1), int))
    assert np.array_equal(Weights(model)["wte.weight"][:9], embedded[0])


def test_other_weights_are_used_and_the_rest_is_shared(make_model):
    model, ids = make_model(), np.array([[1, 2, 3]])
    bias = np.arange(model.config.n_embd)
    changed = assembly.with_weights(model, {"h.1.mlp.c_proj.bias": bias})
    assert changed.h[0].attn.c_attn.weight is model.h[0].attn.c_attn.weight
    assert np.array_equal(Weights(changed)["h.1.mlp.c_proj.bias"], bias)
    assert not np.array_equal(forward(changed, ids), forward(model, ids))
    bias[:] = 0  # it was copied
    again = assembly.with_weights(changed, {"h.1.mlp.c_proj.bias": model.h[1].mlp.c_proj.bias})
    assert np.array_equal(forward(again, ids), forward(model, ids))


def test_a_tied_head_follows_wte_and_another_head_does_not(make_model):
    model, ids = make_model(), np.array([[1, 2, 3]])
    wte = Weights(model)["wte.weight"]
    both = assembly.with_weights(model, {"wte.weight": 2 * wte})
    assert both.lm_head.weight is both.wte is not model.wte
    head = assembly.with_weights(model, {"lm_head.weight": 2 * wte})
    assert np.array_equal(forward(head, ids), 2 * forward(model, ids))
    assert np.array_equal(Weights(head)["wte.weight"], wte)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_changed_weights_of_a_16_bit_model_stay_float32(native, dtype):
    model, ids = model_of(native(dtype), dtype), np.array([[1, 2, 3, 4] * 8])
    name = "h.0.attn.c_attn.weight"
    array = Weights(model)[name] + np.float32(1e-7)
    changed = assembly.with_weights(model, {name: array})
    assert np.array_equal(Weights(changed)[name], array)
    wide = assembly.assemble(model.config, native("float32"), dict(Weights(changed)))
    assert np.array_equal(forward(changed, ids), forward(wide, ids))


@pytest.mark.parametrize(
    ("name", "values", "kind", "error"),
    [
        ("h.0.ln_1.wieght", 1, InputError, r"wieght \(did you mean h.0.ln_1.weight\?\)"),
        (5, 1, InputError, "no weight 5"),
        ("ln_f.bias", np.zeros(3), InputError, r"must have the shape \[\d+\], not \[3\]"),
        ("ln_f.bias", "x", TypeError, "must be an array of real numbers"),
        ("ln_f.bias", np.ones(CONFIG["n_embd"]) * 1j, TypeError, "must be an array of real"),
        ("ln_f.bias", np.full(CONFIG["n_embd"], 1e300), InputError, "not finite in float32"),
    ],
)
def test_weights_that_cannot_be_are_refused(make_model, name, values, kind, error):
    with pytest.raises(kind, match=error):
        assembly.with_weights(make_model(), {name: values})


def test_an_unknown_name_has_the_nearest_one(make_model):
    with pytest.raises(KeyError, match=r"did you mean ln_f\.bias"):
        Weights(make_model())["ln_f.bia"]


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
    model = assembly.assemble(GPT2Config.from_dict(CONFIG), ops, weights)
    assert damaged_weight(model) == name
    with caplog.at_level("INFO", "gpt_cli"), pytest.raises(CheckpointError, match="-v names one"):
        forward(model, np.array([[0, 1, 2]]))
    assert caplog.messages == [f"not finite: {name}"]
