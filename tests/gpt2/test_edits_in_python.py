"""Edits from memory, and functions: they have the bits of the same edits as text."""

import re
from dataclasses import replace

import numpy as np
import pytest

import gpt_cli
from gpt_cli import Direction, Edit, InputError, Options, jobs
from gpt_cli.checks.compare import compare
from gpt_cli.engine import Engine
from gpt_cli.gpt2.edits import EditError, Editor, ModelEdit, bind
from gpt_cli.gpt2.hooks import Recorder, hook_shapes
from gpt_cli.gpt2.model import hidden_states
from gpt_cli.texts.speculator import Speculator

IDS = [3, 1, 4, 1, 5, 9, 2]
PROMPT = 5  # tokens of IDS; the others are new
SCORES, PATTERN, Z = (f"blocks.1.attn.hook_{name}" for name in ("attn_scores", "pattern", "z"))
RESID, NORM = "blocks.1.hook_resid_post", "ln_final.hook_normalized"
TEXTS = ["Once upon a time", "The cat sat on the mat. It was"]
HOOKS = {"hook_embed": (32,), RESID: (32,), Z: (4, 8)}

rng = np.random.default_rng(0)
STORED = {name: rng.normal(size=(7, *shape)).astype("f4") for name, shape in HOOKS.items()}
VECTORS = {name: array.astype(float).mean(axis=0) for name, array in STORED.items()}
DIRECTION = Direction(RESID, STORED[RESID][0], None, 0)
KEYS = rng.random((7, 4, 7)).astype("f4")  # of scores, or of a pattern


@pytest.fixture
def model(make_model):
    return make_model()


@pytest.fixture
def folder(tmp_path):
    np.savez(tmp_path / "stored.npz", **STORED, **dict.fromkeys((SCORES, PATTERN), KEYS))
    for name, vector in VECTORS.items():
        np.save(tmp_path / f"{name}.npy", vector)
    np.save(tmp_path / "direction.npy", DIRECTION.vector)
    return tmp_path


def recorded(model, edit, folder=None):
    """Return the values at all hook points of a text with an edit, by name."""
    bound = bind([ModelEdit.of(edit, model.config, folder)], PROMPT, len(IDS))
    recorder = Recorder([*hook_shapes(model.config)], Editor([bound], model.ops))
    hidden_states(model, np.array([IDS]), hook=recorder)
    return recorder.values


@pytest.mark.parametrize(
    ("text", "edit"),
    [
        ("*.hook_mlp_out@generated*=0.5", Edit("*.hook_mlp_out", 0.5, None, "generated", "*=")),
        ("hook_embed[3,5]@-1=2", Edit("hook_embed", np.int64(2), (3, 5), -1)),
        (f"{NORM}[0:4]@1,4=-3", Edit(NORM, -3, "0:4", np.array([1, 4]))),
        (f"{RESID}@2:-1=stored.npz", Edit(RESID, STORED[RESID], positions=slice(2, -1))),
        (f"{RESID}@:3=mean:stored.npz", Edit(RESID, VECTORS[RESID], positions=":3")),
        (f"{Z}[1,3]@-2:=stored.npz", Edit(Z, STORED[Z], [1, 3], slice(-2, None))),
        (f"{Z}[0:2]@prompt+=0.5*{Z}.npy", Edit(Z, 0.5 * VECTORS[Z], slice(0, 2), "prompt", "+=")),
        (f"{Z}@0,6,2+={Z}.npy", Edit(Z, VECTORS[Z].tolist(), None, [2, 0, 2, 6], op="+=")),
        (f"{PATTERN}[2]=stored.npz", Edit(PATTERN, KEYS, 2)),
        (f"{SCORES}@1:=stored.npz", Edit(SCORES, KEYS, positions="1:")),
        (f"{RESID}@-1+=2*direction.npy", Edit(RESID, "2*direction.npy", positions=-1, op="+=")),
        (f"{RESID}+=direction.npy", DIRECTION),
        (f"{RESID}+=2.1*direction.npy", np.float64(2.1) * DIRECTION),
        (f"{RESID}@4:+=-3*direction.npy", replace(DIRECTION * -3, positions=slice(4, None))),
        (f"hook_embed=mean:stored.npz:{RESID}", Edit("hook_embed", VECTORS[RESID].astype("f4"))),
        (f"{RESID}+=-1*direction.npy", -DIRECTION),
        (f"{RESID}+=0.25*direction.npy", DIRECTION / 4),
        ("hook_embed+=direction.npy", Edit("hook_embed", DIRECTION, op="+=")),
    ],
)
def test_an_edit_from_memory_has_the_bits_of_its_text(model, folder, text, edit):
    expected, values = (recorded(model, source, folder) for source in (text, edit))
    assert not np.array_equal(expected[NORM], recorded(model, "hook_embed*=1")[NORM])
    for name, value in expected.items():
        assert np.array_equal(value.view("i4"), values[name].view("i4")), name


@pytest.mark.parametrize("op", ["+=", "*=", "="])
def test_arrays_of_tokens_are_added_multiplied_and_set(model, op):
    before = recorded(model, "hook_embed*=1")["hook_embed"][0]
    array = STORED["hook_embed"]
    after = recorded(model, Edit("hook_embed", array, slice(0, 9), [1, -1], op))["hook_embed"][0]
    expected = before.copy()
    for at in (1, PROMPT - 1):
        old, new = before[at, :9], array[at, :9]
        expected[at, :9] = {"+=": old + new, "*=": old * new, "=": new}[op]
    assert np.array_equal(after, expected)


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (
            Edit("hook_embed", np.ones(3)),
            "<array (3,)>): its value has the shape (3,), and hook_em",
        ),
        (Edit("hook_embed", np.ones((2, 32))), "the activations have 2 positions: use only these"),
        (Edit("*", np.ones(32)), "(32,), and blocks.0.attn.hook_q needs (4, 8)"),
        (Edit("hook_embed", np.full(32, np.nan)), "hook_embed in its value is not finite"),
        (Edit("hook_embed", np.full(32, 1e39)), "hook_embed in its value is not finite"),
        (Edit("hook_embed", -1e39), "its value, -1e+39, is not finite in float32"),
        (Edit("hook_embed", float("nan")), "its value, nan, is not finite in float32"),
        (Edit("hook_embed", None), "its value is None: give a number, an array of numbers or"),
        (Edit("hook_embed", True), "its value holds bool: give a number, an array of numbers"),
        (
            Edit("hook_embed", [[1], [2, 3]] * 9),
            "[[1], [2, 3], [1], [2, 3], [1], [2, 3], ...]): its value is no array",
        ),
        (Edit("hook_embed", "x.npy"), "x.npy does not exist"),
        (Edit("hook_embed", 0, op="-="), "op='-='): its op must be one of =, *=, +="),
        (Edit(7, 0), "its hook must be a string"),
        (Edit("hook_embed", 0, -1), "[-1] must be numbers such as 3, 3,5 or 0:4"),
        (Edit("hook_embed", 0, 1.5), "[1.5] must be numbers"),
        (Edit("hook_embed", 0, []), "[] must be numbers"),
        (Edit(Z, 0, [0, 4]), "index=[0, 4]): [0,4] must be heads from 0 to 3"),
        (Edit("hook_embed", 0, positions=slice(0, 4, 2)), "slice(0, 4, 2) has a step: give a list"),
        (Edit("hook_embed", 0, positions=[1, 7]), "positions=[1, 7]): @1,7 is not in a text of 5"),
        (Edit("hook_embed", 0, positions="end"), "@end must be such as"),
        (Edit(PATTERN, KEYS, op="+="), f"{PATTERN} can be a number or the activations of a row"),
        (Edit(SCORES, np.ones(4)), f"{SCORES} can be a number or the activations of a row"),
    ],
)
def test_a_wrong_edit_is_refused_by_name(model, edit, problem):
    with pytest.raises(EditError, match=re.escape(problem)):
        recorded(model, edit)


def test_all_of_the_api_takes_edits_from_memory(tiny):
    vector = tiny.vector(["a", "the"], ["one", "two"], RESID)
    edits = ["blocks.0.hook_attn_out=0", Edit(RESID, vector, positions=-1, op="+="), -3 * vector]
    edited, options = tiny.with_edits(edits), {"max_tokens": 4, "seed": 1}
    (expected,) = edited.generate(TEXTS[:1], **options)
    row = {"prompt": TEXTS[0], "edits": edits}
    for rows in (
        gpt_cli.load("tiny", edits=edits).generate(TEXTS[:1], **options),
        tiny.generate(TEXTS[:1], edits=edits, **options),
        tiny.batch([row], Options(**options)),
        tiny.with_edits(edits[:1]).batch(
            [row | {"edits": edits[2]}], Options(edits=edits[1], **options)
        ),
    ):
        assert [completion.logprobs for completion in rows] == [expected.logprobs]
    text = {"text": TEXTS[0], "edits": edits}
    assert tiny.score_many([text]) == edited.score_many(TEXTS[:1])
    choices = {"choices": [" a", " b"]}
    row, plain = row | choices, {"prompt": TEXTS[0]} | choices
    assert tiny.rank_many([row]) == edited.rank_many([plain]) != tiny.rank_many([plain])
    (values,), (same_values,) = (
        tiny.activations([text], [NORM]),
        edited.activations(TEXTS[:1], [NORM]),
    )
    assert np.array_equal(values[NORM], same_values[NORM])
    with pytest.raises(TypeError, match="edits must be a string, an Edit, or a list of these"):
        tiny.generate(TEXTS, edits=[3])
    with pytest.raises(TypeError, match=r"edits\[1\] must be a string or Edit or Vector, not 3"):
        tiny.with_edits([vector, 3])


def test_what_cannot_be_kept_or_called_is_refused_by_name(tiny, tmp_path):
    edit, hooked = Edit("hook_embed", np.ones(192)), tiny.with_hooks({"hook_embed": np.negative})
    strings = re.escape("edits of a job must be strings, not Edit('hook_embed', <array (192,)>)")
    with pytest.raises(TypeError, match=strings):
        jobs.Generation(Options(edits=[edit]))
    with pytest.raises(TypeError, match=strings):
        jobs.run(jobs.Scoring(), "in.txt", tmp_path / "out.jsonl", model="tiny", edits=[edit])
    with pytest.raises(InputError, match="hooks cannot change how data is compressed"):
        hooked.compress(b"Once")
    with pytest.raises(InputError, match="edits cannot change how data is compressed"):
        tiny.with_edits([edit]).compress(b"Once")
    with pytest.raises(InputError, match="hooks cannot be used in a comparison"):
        compare(tiny, hooked, TEXTS)


def test_a_server_does_not_call_functions(tiny):
    pytest.importorskip("uvicorn")
    from gpt_cli.serve import Settings
    from gpt_cli.serve.app import application
    from gpt_cli.serve.front.keys import Keys

    with pytest.raises(InputError, match="hooks are functions, which a server does not call"):
        application(tiny.with_hooks({"hook_embed": np.negative}), Settings(), Keys(None, None))


# --- functions -----------------------------------------------------------------------------------


def outcomes(engine):
    """Return results of the methods that run the model, as arrays."""
    answers = " boy", " girl"
    clean, corrupt = "There was a boy", "There was a girl"
    patching = engine.patch(clean, corrupt, *answers, what="z")
    ablation = engine.ablate(clean, *answers)
    added = engine.attribution(clean, *answers)
    values = engine.activations(TEXTS, [RESID, "*.attn.hook_*"])
    rows = [
        row
        for more in ({}, {"use_cache": False}, {"beams": 2, "temperature": 0, "top_k": 0})
        for row in engine.generate(TEXTS, **{"max_tokens": 4, "seed": 1, "top_p": 1} | more)
    ]
    return {
        "generate": [np.array([row.ids, row.logprobs]) for row in rows],
        "score": [score.token_logprobs[1:] for score in engine.score_many(TEXTS)],
        "rank": [choice.token_logprobs for choice in engine.rank(clean, [" and", " who was"])],
        "next": engine.next_tokens(clean),
        "tree": [[node.id, node.total_logprob] for node in engine.tree(clean, 5)],
        "trace": [engine.trace(clean).residual],
        "logits": engine.logits([engine.encode(clean)]),
        "activations": [array for row in values for array in row.values()],
        "patch": [patching.clean, patching.corrupt, patching.patched],
        "ablate": [ablation.whole, ablation.heads, ablation.mlp],
        "attribution": [added.heads, added.mlp, added.total],
        "vector": [engine.vector([clean, "One day"], [corrupt, TEXTS[0]], RESID).vector],
    }


def differing(results, others):
    """Return the names of results whose bits are not those of others."""
    pairs = {name: zip(results[name], others[name], strict=True) for name in results}
    return [name for name, rows in pairs.items() if not all(np.array_equal(*row) for row in rows)]


def ablated(value, positions):
    value[:, 2] = 0  # in place


def halved(value, positions):
    new = value.copy()
    new[positions >= 2, 1] *= np.float32(0.5)
    return new


def zeroed(value, positions):
    return np.zeros_like(value)  # for later keys, too


def test_a_function_has_the_bits_of_the_edit_that_does_the_same(tiny):
    vector = rng.normal(size=192).astype("f4")
    edits = [f"{Z}[2]=0", "*.hook_resid_mid*=0.9", f"{PATTERN}[1]@2:*=0.5"]
    edits += ["blocks.2.attn.hook_attn_scores=0", Edit(RESID, vector, op="+=")]
    functions = {
        Z: ablated,
        "*.hook_resid_mid": lambda value, positions: value * np.float32(0.9),
        PATTERN: halved,
        "blocks.2.attn.hook_attn_scores": zeroed,
        RESID: lambda value, positions: value + vector,
    }
    none = tiny.with_hooks({})  # drafts nothing, either
    expected = outcomes(none.with_edits(edits))
    assert differing(outcomes(tiny.with_hooks(functions)), expected) == []
    plain = outcomes(none)
    assert differing(plain, expected) == [*plain]
    assert differing(outcomes(tiny.with_hooks({"*": lambda value, positions: None})), plain) == []
    tripled = tiny.with_edits(["hook_embed=2"]).with_hooks(
        {"hook_embed": lambda value, _: 3 * value}
    )
    (values,) = tripled.with_edits([Edit("hook_embed", np.ones(192), op="+=")]).activations(
        ["a"], ["hook_embed"]
    )
    assert (values["hook_embed"] == 7).all()  # in the order given


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_function_gets_each_text_alone_and_each_token_of_it(tiny, use_cache):
    calls = []
    pattern = "blocks.3.attn.hook_pattern"
    drafting = Engine(replace(tiny.loaded, speculator=Speculator(tiny.model)), "tiny", 0.0)
    engine = drafting.with_hooks(
        {
            pattern: lambda value, positions: calls.append((positions.tolist(), value.shape)),
            Z: lambda value, positions: calls.append((positions.tolist(), value.shape)),
        }
    )
    assert engine.loaded.speculator is None  # no token may be wrong
    rows = engine.generate(TEXTS, max_tokens=3, temperature=0, use_cache=use_cache)
    expected = []
    for new in range(3):
        ends = [len(tiny.encode(text)) + new for text in TEXTS]
        starts = [end - 1 if use_cache and new else 0 for end in ends]
        for shape in ((4, 48), (4,)):
            for start, end in zip(starts, ends, strict=True):
                shown = (*shape, end) if shape == (4,) else shape
                expected.append(([*range(start, end)], (end - start, *shown)))
    assert calls == expected
    plain = tiny.generate(TEXTS, max_tokens=3, temperature=0)
    assert [row.ids for row in rows] == [row.ids for row in plain]


@pytest.mark.parametrize(
    ("hook", "function", "problem"),
    [
        (RESID, lambda value, _: value[:1], f"{RESID} must return float32 (3, 192), not float32 ("),
        (
            RESID,
            lambda value, _: value * np.float64(2),
            "not float64 (3, 192): add .astype(np.float32)",
        ),
        (RESID, lambda value, _: 0, "must return float32 (3, 192), not 0"),
        (RESID, lambda value, _: [1.0] * 99, "not [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1..."),
        (RESID, lambda value, _: value + np.inf, f"{RESID} has returned numbers that are not fin"),
        (PATTERN, lambda value, _: -value / 0, f"{PATTERN} has returned numbers that are not fin"),
        (SCORES, lambda value, _: value * np.float32("nan"), f"{SCORES} has returned numbers"),
        ("*mid", lambda value, _: value.fill(np.nan), "blocks.0.hook_resid_mid has returned"),
    ],
)
def test_a_wrong_value_of_a_function_is_refused(tiny, hook, function, problem):
    with pytest.raises(InputError, match=re.escape(problem)):
        tiny.with_hooks({hook: function}).score("Once upon a time")


def test_what_a_function_raises_passes_through_and_wrong_functions_are_refused(tiny):
    with pytest.raises(ZeroDivisionError):
        tiny.with_hooks({RESID: lambda value, positions: 1 // 0}).generate(TEXTS)
    knocked_out = tiny.with_hooks(
        {SCORES: lambda value, _: value.__setitem__(np.s_[1:, :, 0], -np.inf)}
    )
    (values,) = knocked_out.activations(TEXTS[:1], [PATTERN])
    assert not values[PATTERN][:, 1:, 0].any() and values[PATTERN][:, 1:].sum(-1) == pytest.approx(
        1
    )
    for hooks, error, problem in (
        ([ablated], TypeError, "hooks must be a mapping of names to functions"),
        ({RESID: 3}, TypeError, f"hooks['{RESID}'] must be a function, not 3"),
        ({"hook_resid_post": ablated}, InputError, "give blocks.0.hook_resid_post"),
    ):
        with pytest.raises(error, match=re.escape(problem)):
            tiny.with_hooks(hooks)
