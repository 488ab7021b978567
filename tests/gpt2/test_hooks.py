"""Hook points: their names, and the values that they give."""

import re

import numpy as np
import pytest

from gpt_cli.errors import InputError
from gpt_cli.gpt2.hooks import Recorder, hook_shapes, rows_of, select_hooks
from gpt_cli.gpt2.model import hidden_states
from support.checkpoints import CONFIG, HOOKED

TOLERANCE = 1e-4  # in standard deviations of the reference
T = 5
IDS = np.arange(T)[None]


def recorded(model, ids=IDS, globs=("*",), lengths=None):
    recorder = Recorder(frozenset(select_hooks(model.config, globs)))
    x = hidden_states(model, ids, None, lengths, recorder)
    return x, recorder.values


def test_all_values_come_in_order_with_the_shapes_that_are_listed(make_model):
    model = make_model(n_inner=20)
    x, values = recorded(model)
    (row,) = rows_of(values, [T])
    sizes = {name: tuple(T if axis == "T" else axis for axis in shape)
             for name, shape in hook_shapes(model.config).items()}  # fmt: skip
    assert {name: value.shape for name, value in row.items()} == sizes
    assert [*row] == [*sizes]
    assert len(sizes) == 15 * CONFIG["n_layer"] + 3
    assert all(value.dtype == np.float32 for value in row.values())
    assert np.array_equal(row["ln_final.hook_normalized"], x[0])


@pytest.mark.parametrize("case", HOOKED)
def test_all_values_are_those_of_transformers(case, load_case, golden):
    """Its modules' inputs and results; the file has them in the order of their names."""
    reference = golden("hooks.npz")
    model, ids = load_case(case), reference["ids"]
    (row,) = rows_of(recorded(model, ids[None])[1], [len(ids)])
    sizes = [row[name].size for name in sorted(row)]
    assert sum(sizes) == reference[case].size
    parts = np.split(reference[case], np.cumsum(sizes)[:-1])
    for name, part in zip(sorted(row), parts, strict=True):
        expected = part.reshape(row[name].shape)
        visible = np.isfinite(expected)  # the others are scores of later tokens
        assert np.array_equal(row[name][~visible], expected[~visible]), name
        difference = abs(row[name][visible] - expected[visible]).max()
        assert difference <= TOLERANCE * expected[visible].std(), name


def test_hooks_change_nothing(make_model):
    model = make_model()
    x, _ = recorded(model)
    expected = hidden_states(model, IDS)  # with the library, all layers in one call
    assert np.allclose(x, expected, atol=1e-5)
    assert np.array_equal(x, expected) or model.ops.name == "numpy"
    only, values = recorded(model, globs=["blocks.1.mlp.hook_post"])
    assert np.array_equal(only, x)
    assert [*values] == ["blocks.1.mlp.hook_post"]


def test_values_follow_from_each_other(make_model):
    model = make_model()
    (row,) = rows_of(recorded(model)[1], [T])
    last = row["hook_embed"] + row["hook_pos_embed"]
    for layer in range(CONFIG["n_layer"]):
        of = {name: row[f"blocks.{layer}.{name}"] for name in (
            "hook_resid_pre", "hook_attn_out", "hook_resid_mid", "hook_mlp_out", "hook_resid_post",
            "attn.hook_q", "attn.hook_k", "attn.hook_v", "attn.hook_z", "attn.hook_attn_scores",
            "attn.hook_pattern", "mlp.hook_pre", "mlp.hook_post",
        )}  # fmt: skip
        assert np.array_equal(of["hook_resid_pre"], last)
        assert np.array_equal(of["hook_resid_mid"], last + of["hook_attn_out"])
        last = of["hook_resid_mid"] + of["hook_mlp_out"]
        assert np.array_equal(of["hook_resid_post"], last)
        scores, pattern = of["attn.hook_attn_scores"], of["attn.hook_pattern"]
        future = np.triu(np.ones((T, T), bool), 1)
        assert np.isneginf(scores[:, future]).all() and not pattern[:, future].any()
        products = np.einsum("qhd,khd->hqk", of["attn.hook_q"], of["attn.hook_k"])
        scale = model.h[layer].attn.scale
        assert np.allclose(scores[:, ~future], scale * products[:, ~future], atol=1e-5)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        assert np.allclose(pattern, weights / weights.sum(-1, keepdims=True), atol=1e-6)
        z = np.einsum("hqk,khd->qhd", pattern, of["attn.hook_v"])
        assert np.allclose(of["attn.hook_z"], z, atol=1e-5)
        post = model.ops.activate(of["mlp.hook_pre"], model.h[layer].mlp.activation)
        assert np.array_equal(of["mlp.hook_post"], post)


def test_globs_cross_dots_and_keep_the_order_of_computation(make_model):
    config = make_model().config
    assert select_hooks(config, ["*.2.*post", "hook_*", "blocks.?.attn.hook_q"]) == [
        "hook_embed", "hook_pos_embed", "blocks.0.attn.hook_q", "blocks.1.attn.hook_q",
        "blocks.2.attn.hook_q", "blocks.2.mlp.hook_post", "blocks.2.hook_resid_post",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("glob", "hint"),
    [
        ("blocks.0.hook_resid_pots", "did you mean blocks.0.hook_resid_post"),
        ("hook_resid_post", "give blocks.0.hook_resid_post, or "),
        ("blocks.3.*", "the last one is blocks.2.hook_resid_post"),
        ("hook_q", "is not a hook point without its submodule: give *.attn.hook_q"),
        (
            "hook_normalized",
            "give *.ln1.hook_normalized or *.ln2.hook_normalized or ln_final.hook_normalized",
        ),
        ("hook_embedd", "did you mean hook_embed"),
        ("[", "`gpt-cli activations --hooks -m MODEL` lists them"),
    ],
)
def test_a_glob_without_a_match_names_the_nearest(make_model, glob, hint):
    with pytest.raises(InputError, match=re.escape(hint)):
        select_hooks(make_model().config, [glob])


def test_no_glob_is_refused(make_model):
    with pytest.raises(InputError, match="hook is not set: give at least one hook point"):
        select_hooks(make_model().config, [])
