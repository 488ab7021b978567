"""Edits: what they change, where, and which are refused."""

import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from gpt_cli.engine import Engine
from gpt_cli.errors import CheckpointError, InputError
from gpt_cli.gpt2.edits import EditError, Editor, ModelEdit, bind, with_absolute_path
from gpt_cli.gpt2.hooks import Recorder, hook_shapes, rows_of
from gpt_cli.gpt2.kv_cache import KVCache
from gpt_cli.gpt2.model import hidden_states
from gpt_cli.gpt2.prefill import right_pad, row_states
from support.models import DTYPES, model_of

IDS = [[3, 1, 4, 1, 5, 9, 2], [2, 7, 1], [8, 2, 8, 1, 8]]


@pytest.fixture
def model(make_model):
    return make_model()


def recorded(model, edits, ids=IDS[0], n=None, folder=None):
    """Return the values at all hook points of a text with edits, by name."""
    parsed = [ModelEdit.of(text, model.config, folder) for text in edits]
    bound = bind(parsed, len(ids) if n is None else n, len(ids))
    names = frozenset(hook_shapes(model.config))
    recorder = Recorder(names, Editor([bound], model.ops))
    hidden_states(model, np.array([ids]), hook=recorder)
    return rows_of(recorder.values, [len(ids)])[0]


@pytest.mark.parametrize(
    ("edit", "hook", "changed"),
    [
        ("blocks.1.attn.hook_z[2]=0", "blocks.1.attn.hook_z", np.s_[:, 2]),
        ("blocks.1.attn.hook_z[1:3]=0", "blocks.1.attn.hook_z", np.s_[:, 1:3]),
        ("*.1.hook_mlp_out@2:4=0", "blocks.1.hook_mlp_out", np.s_[2:4]),
        ("blocks.0.mlp.hook_post[3,5]@-1=0", "blocks.0.mlp.hook_post", np.s_[3, [3, 5]]),
        ("hook_embed@prompt=0", "hook_embed", np.s_[:4]),
        ("hook_embed@0, 2:4,5,-1=0", "hook_embed", np.s_[[0, 2, 3, 5]]),
        ("hook_embed@generated=0", "hook_embed", np.s_[4:]),
        ("ln_final.hook_normalized@-3:=0", "ln_final.hook_normalized", np.s_[1:]),
        (" blocks.2.hook_resid_post [ 0 ] @1 = 0 ", "blocks.2.hook_resid_post", np.s_[1, 0]),
    ],
)
def test_a_number_replaces_the_values_of_its_heads_and_positions(model, edit, hook, changed):
    edit = re.sub(r" (?=[\[@=])|(?<=[\[=0]) ", "", edit)
    before, after = (recorded(model, edits, n=4)[hook] for edits in ([], [edit]))
    expected = before.copy()
    expected[changed] = 0
    assert np.array_equal(after, expected)


def test_an_edit_changes_what_is_computed_from_it_and_nothing_else(model):
    before, after = recorded(model, []), recorded(model, ["blocks.1.attn.hook_q[0]@3*=2"])
    changed = [name for name in before if not np.array_equal(before[name], after[name])]
    assert changed[0] == "blocks.1.attn.hook_q"
    assert "blocks.1.attn.hook_k" not in changed and "blocks.2.attn.hook_k" in changed
    assert np.array_equal(before["blocks.1.hook_resid_post"][:3],
                          after["blocks.1.hook_resid_post"][:3])  # fmt: skip


def test_edited_scores_and_patterns_stay_masked_and_are_used(model):
    scores, pattern = "blocks.0.attn.hook_attn_scores", "blocks.0.attn.hook_pattern"
    future = np.triu(np.ones((7, 7), bool), 1)
    even = recorded(model, ["blocks.0.attn.hook_attn_scores[1]=0"])
    assert np.isneginf(even[scores][1, future]).all()
    uniform = np.tril(np.ones((7, 7))) / np.arange(1, 8)[:, None]
    assert np.allclose(even[pattern][1], uniform, atol=1e-6)
    same = recorded(model, [])
    assert np.array_equal(even[pattern][0], same[pattern][0])
    first = recorded(model, ["blocks.0.attn.hook_pattern[1]=0"])
    assert not first["blocks.0.attn.hook_z"][:, 1].any()
    assert np.allclose(first["blocks.0.attn.hook_z"][:, 0], same["blocks.0.attn.hook_z"][:, 0])
    ones = recorded(model, ["blocks.0.attn.hook_pattern=1"])
    assert not ones[pattern][:, future].any()
    v = same["blocks.0.attn.hook_v"]
    assert np.allclose(ones["blocks.0.attn.hook_z"], v.cumsum(0), atol=1e-5)


def test_edits_apply_in_the_order_given(model):
    embed = recorded(model, [])["hook_embed"]
    assert np.allclose(recorded(model, ["hook_embed=2", "hook_embed*=3"])["hook_embed"], 6)
    assert np.array_equal(recorded(model, ["hook_embed*=3", "hook_embed*=0.5"])["hook_embed"],
                          embed * 3 * np.float32(0.5))  # fmt: skip


def test_files_add_vectors_patch_and_give_means(model, tmp_path):
    C, hook = model.config.n_embd, "blocks.1.hook_resid_pre"
    vector = np.arange(C, dtype=np.float32)
    other = recorded(model, [], IDS[2])
    stored = {hook: other[hook].copy(), "position": np.arange(len(other[hook]))}  # as `activations`
    save_file(stored, tmp_path / "other.safetensors")
    np.savez(tmp_path / "other.npz", **{hook: other[hook], "v": vector})
    np.save(tmp_path / "v.npy", vector)
    before = recorded(model, [])[hook]
    for value in ("v.npy", "other.npz:v"):
        steered = recorded(model, [f"{hook}@2:+=0.5*{value}"], folder=tmp_path)[hook]
        assert np.array_equal(steered[2:], before[2:] + np.float32(0.5) * vector)
        assert np.array_equal(steered[:2], before[:2])
    for file in ("other.safetensors", "other.npz"):
        patched = recorded(model, [f"{hook}[0:5]@1:3={file}"], folder=tmp_path)[hook]
        expected = before.copy()
        expected[1:3, :5] = other[hook][1:3, :5]
        assert np.array_equal(patched, expected)
        mean = recorded(model, [f"{hook}=mean:{file}"], folder=tmp_path)[hook]
        assert np.allclose(mean, other[hook].mean(0), atol=1e-6)


def test_stored_attention_is_patched(model, tmp_path):
    hook = "blocks.1.attn.hook_pattern"
    other = recorded(model, [], IDS[2])[hook]
    save_file({hook: other.swapaxes(0, 1).copy()}, tmp_path / "p.safetensors")
    for ids in (IDS[0], IDS[2], [1] * 40):
        patched = recorded(model, [f"{hook}[2]@:5=p.safetensors"], ids, folder=tmp_path)[hook]
        assert np.array_equal(patched[2, :5, :5], other[2])
        assert not patched[2, :5, 5:].any()


edits_of_rows = st.lists(
    st.lists(
        st.builds(
            "{}{}@{}{}".format,
            st.builds(
                "{}.attn.hook_{}".format,
                st.sampled_from(["*", "blocks.1", "*.0"]),
                st.sampled_from(["q", "k", "v", "z", "attn_scores", "pattern"]),
            )
            | st.sampled_from(["hook_embed", "*.hook_resid_mid", "*.mlp.hook_pre", "ln_final.*",
                               "blocks.1.hook_mlp_out", "*.ln2.hook_normalized"]),
            st.sampled_from(["", "[0]", "[1,2]", "[0:2]"]),
            st.sampled_from(["-1", "0", ":2", "1:", "prompt", "-3:-1", ":"]),
            st.sampled_from(["=0", "=0.25", "*=0", "*=-1.5"]),
        ),
        max_size=3,
    ),
    min_size=3, max_size=3,
)  # fmt: skip


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dtype", DTYPES)
@given(edits=edits_of_rows, chunk=st.integers(1, 7))
def test_a_row_has_the_same_bits_alone_in_a_batch_and_in_chunks(native, dtype, edits, chunk):
    model = model_of(native(dtype), dtype, n_head=3, head_size=17, n_layer=2)
    parsed = [[ModelEdit.of(text, model.config) for text in texts] for texts in edits]
    bounds = [bind(row, max(len(ids), 4), 80) for row, ids in zip(parsed, IDS, strict=True)]
    alone = [
        row_states(model, [ids], None, Editor([bound], model.ops))[0]
        for ids, bound in zip(IDS, bounds, strict=True)
    ]
    whole = row_states(model, IDS, None, Editor(bounds, model.ops))
    cache, pieces = KVCache(model.config, model.ops, 3, 80), [[], [], []]
    ids, lengths = right_pad(IDS)
    for start in range(0, ids.shape[1], chunk):
        new = np.clip(lengths - start, 0, min(chunk, ids.shape[1] - start))
        part = ids[:, start : start + chunk]
        x = hidden_states(model, part, cache, new, Editor(bounds, model.ops))
        for row, length in enumerate(new):
            pieces[row].append(x[row, :length])
    for one, other, parts in zip(alone, whole, pieces, strict=True):
        assert np.array_equal(one.view(np.uint32), other.view(np.uint32))
        assert np.array_equal(one, np.concatenate(parts), equal_nan=True)


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        ("blocks.0.hook_resid_pre", "it must be HOOK[INDEX]@POSITIONS, then =, *= or +=,"),
        ("*=1", "it must be HOOK[INDEX]@POSITIONS, then =, *= or +=,"),  # not: * is 1
        ("hook_resid_pre=0", "give blocks.0.hook_resid_pre"),
        ("blocks.9.hook_resid_pre=0", "the last one is blocks.2.hook_resid_post"),
        ("blocks.0.hook_resid_pree=0", "did you mean blocks.0.hook_resid_pre"),
        ("blocks.0.attn.hook_z[4]=0", "[4] must be heads from 0 to 3"),
        ("blocks.0.attn.hook_z[-1]=0", "[-1] must be numbers such as 3, 3,5 or 0:4"),
        ("blocks.0.attn.hook_z[]=0", "[] must be numbers"),
        ("blocks.0.attn.hook_z[2:2]=0", "[2:2] must be heads from 0 to 3"),
        ("*.mlp.hook_post[128]=0", "[128] must be neurons from 0 to 127"),
        ("hook_*[32]=0", "[32] must be dimensions from 0 to 31"),
        ("hook_embed@end=0", "@end must be such as @-1, @4, @2:7, @1,4, @prompt or @generated"),
        ("hook_embed@=0", "@ must be such as"),
        ("hook_embed@-8=0", "@-8 is not in a text of 7 tokens"),
        ("hook_embed@7=0", "@7 is not in a text of 7 tokens"),
        ("hook_embed@1,=0", "@1, must be such as"),
        ("hook_embed@1,5:9=0", "@1,5:9 is not in a text of 7 tokens"),
        ("hook_embed@0:-9=0", "@0:-9 is not in a text of 7 tokens"),
        ("hook_embed@5:3=0", "@5:3 ends before it begins"),
        ("hook_embed*=mean:v.npy", "'mean:v.npy' is not a number"),
        ("hook_embed+=4", "+= adds the vector of a file, not a number: give one, as +=4*FILE"),
        ("hook_embed+=x*v.npy", "'x' is not a number"),
        ("hook_embed+=1e39*v.npy", "1e39 is too large"),
        ("hook_embed=nan", "'nan' must end with .safetensors"),
        ("hook_embed=v.txt", "'v.txt' must end"),
        ("hook_embed=", "it must be HOOK"),
        ("hook_embed=missing.npy", "missing.npy is not a file in the folder for edits"),
        ("hook_embed+=short.npy", "short.npy has the shape (3,), and hook_embed needs (32,)"),
        ("hook_embed+=nan.npy", "hook_embed in nan.npy is not finite"),
        ("hook_embed=objects.npy", "objects.npy cannot be read: Object arrays cannot be loaded"),
        ("hook_embed=texts.npy", "texts.npy holds <U1, not numbers"),
        ("hook_embed=v.npy", "v.npy has the shape (32,), and hook_embed needs (32, 32)"),
        ("hook_embed=two.npy", "the activations have 2 positions: use only these"),
        ("hook_embed=two.npy@1", "'two.npy@1' must end"),
        ("hook_embed=rows.npz", "rows.npz has several rows"),
        ("hook_embed=rows.npz:other", "rows.npz has no other: it has hook_embed, position"),
        ("blocks.0.attn.hook_pattern+=v.npy", "can be a number or the activations of a row"),
    ],
)
def test_a_wrong_edit_is_refused_with_the_part_that_is_wrong(model, tmp_path, edit, problem):
    C = model.config.n_embd
    for name, array in {
        "v": np.ones(C), "short": np.ones(3), "nan": np.full(C, np.nan), "texts": np.array(["a"]),
        "objects": np.array([None]), "two": np.ones((2, C)),
    }.items():  # fmt: skip
        np.save(tmp_path / f"{name}.npy", array)
    np.savez(tmp_path / "rows.npz", hook_embed=np.ones((4, C)), position=np.array([0, 1, 0, 1]))
    with pytest.raises(EditError, match=re.escape(problem)):
        recorded(model, [edit], folder=tmp_path)


@pytest.mark.parametrize("edit", ["hook_embed=3e38", "ln_final.hook_normalized*=3e38"])
def test_an_edit_that_makes_values_overflow_is_named_and_not_the_weights(tiny, edit):
    edited = tiny.with_edits([edit])
    for compute in (
        lambda: edited.score("Once upon"),
        lambda: edited.score("Once upon", layers=True),
        lambda: edited.rank("Once", [" a", " b"]),
        lambda: edited.next_tokens("Once"),
        lambda: edited.tree("Once"),
        lambda: edited.trace("Once"),
        lambda: edited.logits([[1, 2]]),
        lambda: edited.generate(["Once"], max_tokens=2),
    ):
        with pytest.raises(InputError, match="edits make values overflow"):
            compute()
    ln_f = replace(tiny.model.ln_f, bias=np.full_like(tiny.model.ln_f.bias, np.nan))
    loaded = replace(edited.loaded, model=replace(tiny.model, ln_f=ln_f))
    with pytest.raises(CheckpointError, match="weights are damaged"):
        Engine(loaded, "tiny", 0.0).score("Once upon")


@pytest.mark.parametrize(
    "edit", ["hook_embed+=4*{}v.npy", "hook_embed@0=mean:{}a b.npz:x", "h={}v.npy"]
)
def test_the_file_of_an_edit_gets_an_absolute_path(tmp_path, monkeypatch, edit):
    monkeypatch.chdir(tmp_path)
    for name in ("v.npy", "a b.npz"):
        Path(name).touch()
    assert with_absolute_path(edit.format("")) == edit.format(f"{tmp_path}{os.sep}")
    for number in ("0", "3"):  # files that have the names of values
        Path(number).touch()
    for other in ("h=0", "h*=3", "h", "h+=gone.npy"):
        assert with_absolute_path(other) == other


@pytest.mark.parametrize(
    "name", ["../v.npy", "/etc/v.npy", "link.npy", "sub/../../v.npy", "gone.npy"]
)
def test_files_outside_of_the_folder_are_as_if_missing(model, tmp_path, name):
    (tmp_path / "inside" / "sub").mkdir(parents=True)
    np.save(tmp_path / "v.npy", np.ones(model.config.n_embd))
    (tmp_path / "inside" / "link.npy").symlink_to(tmp_path / "v.npy")
    with pytest.raises(EditError, match="is not a file in the folder for edits"):
        ModelEdit.of(f"hook_embed+={name}", model.config, tmp_path / "inside")
