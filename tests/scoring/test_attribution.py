"""The effects of parts of a model on an answer: attribution, patching and ablation."""

import numpy as np
import pytest

from gpt_cli.errors import InputError
from gpt_cli.scoring.activations import activations
from gpt_cli.texts.text import Text
from support.scores import same

FRIENDS = "There was a boy named Leo. His best friend was a girl named Emma."
CLEAN, CORRUPT = (f'{FRIENDS} {name} was hungry. "I am," said' for name in ("Emma", "Leo"))
NAMES = " Emma", " Leo"


def measure(engine, prompt, answers=NAMES):
    """Return the logit of the first answer, minus that of the second, to compare with."""
    logits = engine.logits([engine.encode(prompt)])[0, -1].astype(float)
    first, *others = (logits[engine.encode(answer)[0]] for answer in answers)
    return same(engine.model, first - sum(others))


@pytest.mark.parametrize("answers", [NAMES, NAMES[:1]])
@pytest.mark.parametrize("edits", [[], ["blocks.1.attn.hook_z[2]=0", "blocks.2.hook_mlp_out*=2"]])
def test_the_parts_add_up_to_the_logit(tiny, answers, edits):
    engine = tiny.with_edits(edits)
    added = engine.attribution(CLEAN, *answers)
    assert added.total == pytest.approx(measure(engine, CLEAN, answers), abs=1e-5)
    assert added.error < 1e-4
    assert added.heads.shape == (4, 4)
    assert (added.heads[1, 2] == 0) == bool(edits)


def test_an_ablation_is_an_edit(tiny):
    edited = tiny.with_edits(["blocks.1.hook_resid_mid*=0.9"])
    without = edited.ablate(CLEAN, *NAMES)
    assert without.whole == measure(edited, CLEAN)
    for layer in range(4):
        for head in range(4):
            engine = edited.with_edits([f"blocks.{layer}.attn.hook_z[{head}]=0"])
            assert without.heads[layer, head] == measure(engine, CLEAN)
        assert without.mlp[layer] == measure(
            edited.with_edits([f"blocks.{layer}.hook_mlp_out=0"]), CLEAN
        )


@pytest.mark.parametrize("what", ["resid_pre", "attn_out", "mlp_out", "z"])
def test_a_patch_is_an_edit_with_activations_of_the_clean_text(tiny, what, tmp_path):
    patching = tiny.patch(CLEAN, CORRUPT, *NAMES, what=what)
    assert patching.clean == measure(tiny, CLEAN)
    assert patching.corrupt == measure(tiny, CORRUPT)
    hook = "attn.hook_z" if what == "z" else f"hook_{what}"
    names = [f"blocks.{layer}.{hook}" for layer in range(4)]
    (values,) = activations(tiny.model, [Text(tiny.encode(CLEAN))], names)
    T = len(tiny.encode(CLEAN))
    for layer, name in enumerate(names):
        np.save(tmp_path / "clean.npy", values[name])
        for index in range(4 if what == "z" else T):
            at = f"[{index}]" if what == "z" else f"@{index}"
            engine = tiny.with_edits([f"{name}{at}={tmp_path}/clean.npy"])
            assert patching.patched[layer, index] == measure(engine, CORRUPT)
    assert patching.patched.shape == (4, 4 if what == "z" else T)


def test_shares_are_0_for_the_corrupt_text_and_1_for_the_clean_one(tiny):
    ids = zip(tiny.encode(CLEAN), tiny.encode(CORRUPT), strict=True)
    (name,) = (position for position, (a, b) in enumerate(ids) if a != b)
    shares = tiny.patch(CLEAN, CORRUPT, *NAMES).recovered
    assert shares[0, name] == same(tiny.model, 1.0)
    others = [*shares[:, :name].flat, *np.delete(shares[0], name)]
    assert others == same(tiny.model, [0.0] * len(others))
    whole = tiny.with_edits(["blocks.0.hook_mlp_out=0"]).patch(CLEAN, CORRUPT, *NAMES)
    assert whole.recovered[0, name] == same(tiny.model, 1.0)  # edits apply to both texts


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("attribution", [CLEAN, "Emma"], r'^answer must be one token, not "E" "mma"; a word .* sp'),
        ("ablate", [CLEAN, ""], "^answer must be one token, not empty; "),
        ("ablate", [CLEAN, " Emma", " Emmas"], "^wrong must be one token, not "),
        ("attribution", [CLEAN, " Emma", " Emma"], "^wrong must be another token than the answer"),
        ("patch", [CLEAN, CLEAN + " so", *NAMES], r"^the texts have \d+ tokens and \d+: they must"),
        ("patch", [CLEAN, CLEAN, *NAMES], r"^both texts give \d+\.\d{4}: there is nothing to rec"),
    ],
)
def test_what_cannot_be_measured_is_refused(tiny, method, arguments, message):
    with pytest.raises(InputError, match=message):
        getattr(tiny, method)(*arguments)


def test_an_unknown_activation_is_refused(tiny):
    with pytest.raises(InputError, match=r"^what must be one of resid_pre, attn_out, mlp_out, z"):
        tiny.patch(CLEAN, CORRUPT, *NAMES, what="q")
