"""Texts of models match their constraints, as other parsers than llguidance see them."""

import pytest

pytest.importorskip("llguidance")

from collections import Counter

import gpt_cli
from gpt_cli.folder.config import GPT2Config
from gpt_cli.gpt2 import assembly
from gpt_cli.ops import get_ops
from gpt_cli.options.request import Options
from gpt_cli.texts.loaded import LoadedModel
from support.checkpoints import CONFIG, make_weights
from support.constraints import CONSTRAINTS

# The defaults, the model's own distribution, and one in which strings of `tiny` end, too.
SAMPLING = [
    {},
    {"temperature": 1, "top_k": 0, "top_p": 1.0},
    {"temperature": 3, "top_k": 0, "top_p": 1.0},
]
PROMPTS = ["Once upon a time", "A list:\n"]


@pytest.fixture(scope="module")
def random(tokenizer):
    """Return a model of random weights, with room for long texts."""
    config = CONFIG | {"n_positions": 200}
    ops = get_ops("cpu", "float32")
    model = assembly.assemble(GPT2Config.from_dict(config), ops, make_weights(config))
    return gpt_cli.Engine(LoadedModel(model, tokenizer), "random", 0.0)


@pytest.fixture(params=["tiny", "random"])
def either(request):
    """Return each model."""
    return request.getfixturevalue(request.param)


def finished(engine, case, count, max_tokens):
    """Check texts of a constraint; return how many ended by themselves."""
    rows = [
        {"prompt": PROMPTS[row % len(PROMPTS)]} | SAMPLING[row % len(SAMPLING)]
        for row in range(count)
    ]
    options = Options(max_tokens=max_tokens, seed=1, **case.options)
    reasons = Counter()
    for done in engine.batch(rows, options, batch_size=64):
        reasons[done.finish_reason] += 1
        if done.finish_reason in ("complete", "eos"):
            assert case.accepts(done.text), done.text
        else:
            assert done.finish_reason == "length"
            assert case.begins(done.text.removesuffix("\ufffd")), done.text
    return reasons["complete"] + reasons["eos"]


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_finished_texts_match_and_others_begin_as_if_they_did(either, name):
    assert finished(either, CONSTRAINTS[name], 5, max_tokens=100)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_a_thousand_texts_match(either, name):
    """The bundled model begins strings and lists that it seldom ends."""
    assert finished(either, CONSTRAINTS[name], 1000, max_tokens=100) > 50
