"""Results outside the operations have the bits of the CPU on a GPU, too: see `strict_cuda`."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt_cli.compression.archive import ArchiveReader
from gpt_cli.compression.codec import Codec
from gpt_cli.engine import Engine
from gpt_cli.generation.row import Request
from gpt_cli.gpt2.edits import Editor, FunctionEdit, ModelEdit, bind
from gpt_cli.gpt2.hooks import FINAL, Hook, Recorder, hook_shapes, rows_of
from gpt_cli.gpt2.prefill import right_pad, row_states
from gpt_cli.gpt2.run_state import RunState
from gpt_cli.ops import get_ops
from gpt_cli.options.request import Options
from gpt_cli.scoring.activations import activations
from gpt_cli.serve.prompts import Pace, PendingScore, PendingVector, Prompts
from gpt_cli.texts.loaded import LoadedModel
from gpt_cli.texts.prefix_cache import PrefixCache
from gpt_cli.texts.text import Text
from support import emulated_cuda, strict_cuda
from support.drafting import planned, speculating
from support.edits import EDITS, PROMPTS, edits_of, write_files
from support.models import completions_of, model_of, outcomes
from support.sampling_values import sampling_options

TEXT = "The cat sat on the mat, and the dog ran.\n\nThen the cat ran to the old man."
TEXTS = ["the cat", "the dog and the man", "He said that it was"]
EDITED = {"text": "the cat sat", "edits": ["blocks.1.attn.hook_z[2]=0", "*.hook_resid_mid*=1.5"]}


@pytest.fixture(scope="module", params=["library", "kernels"])
def both(request, native):
    """Return a model on the device, and the same on the CPU.

    The device computes by the C library, or by the emulated kernels.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GPT_CLI_OPS", raising=False)
        if request.param == "library":
            ops = strict_cuda.StrictOps(native("float32"), strict_cuda.install(patch))
        else:
            emulated_cuda.install(patch)
            ops = get_ops("cuda", "float32")
            ops.xp = strict_cuda.install(patch)
        yield model_of(ops), model_of(native("float32"))


@pytest.fixture(scope="module")
def engines(both, tokenizer):
    return [Engine(LoadedModel(model, tokenizer), "m", 0) for model in both]


def assert_equal(one, other):
    """Compare results of any form to the last bit."""
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert np.ascontiguousarray(one).tobytes() == np.ascontiguousarray(other).tobytes()
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        assert_equal([*one.values()], [*other.values()])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_equal(*pair)
    else:
        assert one == other or repr(one) == repr(other) == "nan"


def assert_same(both, compute):
    """Compare what a function computes on the device and on the CPU."""
    assert_equal(*map(compute, both))


def fields(result):
    """Return the fields of a result without the model that some have."""
    return {
        name: value for name, value in vars(result).items() if name not in ("model", "_display")
    }


# --- generation ----------------------------------------------------------------------------------


def generated(model, tokenizer, prompts, speculator=None, **options):
    """Return completions of prompts, each with its own number of tokens."""
    requests = [
        Request(Text(prompt), Options(max_tokens=12 - 3 * row, seed=5, **options), row)
        for row, prompt in enumerate(prompts)
    ]
    return outcomes(completions_of(model, tokenizer, requests, speculator))


@given(
    sampling=sampling_options,
    others=st.fixed_dictionaries(
        {"ignore_eos": st.booleans(), "use_cache": st.booleans(), "top_logprobs": st.just(3)}
    ),
)
@settings(max_examples=6)
def test_texts(both, tokenizer, sampling, others):
    shared = list(range(40, 60))
    prompts = [PROMPTS[0], [*shared, 3], [*shared, 7, 1]]
    assert_same(both, lambda model: generated(model, tokenizer, prompts, **sampling, **others))


@pytest.mark.parametrize("temperature", [1e-3, 1, 1e6])
@pytest.mark.parametrize(
    "options", [{"top_p": 0.9}, {"typical_p": 0.5}, {"min_p": 0.2}, {"top_k": 7, "top_p": 0.5}]
)
def test_filters(both, tokenizer, options, temperature):
    options = {"top_k": 0, "top_p": 1, "temperature": temperature} | options
    assert_same(both, lambda model: generated(model, tokenizer, PROMPTS, **options))


@pytest.mark.parametrize(
    "penalties",
    [
        {},
        {"repeat_penalty": 1.3, "no_repeat_ngram": 2},
        {"presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": ((3, 4.5), (5, -100))},
    ],
)
def test_beams(both, tokenizer, penalties):
    options = {"beams": 3, "temperature": 0, "top_k": 0, "top_p": 1, "top_logprobs": 2} | penalties
    assert_same(both, lambda model: generated(model, tokenizer, PROMPTS, **options))


def test_texts_under_a_constraint(engines):
    pytest.importorskip("llguidance")
    options = {"max_tokens": 20, "seed": 3, "regex": "the (cat|dog|man)( and the (cat|dog))*"}
    assert_same(engines, lambda engine: [text.ids for text in engine.generate(TEXTS, **options)])


def test_texts_with_edits(engines):
    rows = [{"prompt": "the cat", "edits": EDITED["edits"]}, {"prompt": "the dog"}]
    options = Options(max_tokens=8, seed=3, temperature=1, top_k=0, top_p=0.9)
    assert_same(engines, lambda engine: outcomes(engine.batch(rows, options)))


def test_speculation(both, tokenizer):
    def texts(model):
        with planned((3, True), (2, False)):
            speculator = speculating(model, model)
            return generated(model, tokenizer, PROMPTS, speculator, typical_p=0.8)

    assert_same(both, texts)


# --- scores --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [False, True])
@pytest.mark.parametrize("text", [TEXT, TEXT * 4, EDITED])
def test_scores(engines, layers, text):
    measures = dict.fromkeys(["bos", "ranks", "entropies", "gaps", "words"], True)

    def score(engine):
        (scored,) = engine.score_many([text], **measures, layers=layers)
        return fields(scored) | {"min": [scored.min_k(20), scored.min_k_plus_plus(20)]}

    assert_same(engines, score)


def test_ranked_choices(engines):
    rows = [(TEXT, ["the cat", "a dog", "them"]), (TEXT, [" he", " it was"]), ("a", ["b"])]

    def ranked(engine):
        likeliest = [engine.next_tokens(text, 9) for text in TEXTS]
        edited = engine.with_edits(EDITED["edits"])
        return [
            *engine.rank_many(rows),
            *(engine.rank(*row) for row in rows),
            edited.rank(*rows[1]),
            likeliest,
        ]

    assert_same(engines, ranked)


def test_a_tree(engines):
    def nodes(children):
        return [(node.id, node.total_logprob, nodes(node.children)) for node in children]

    assert_same(engines, lambda engine: nodes(engine.tree("the cat", 15)))


def test_a_trace(engines):
    def traced(engine):
        trace = engine.trace(TEXTS[2])
        return [trace.residual, trace.attention, trace.logits, trace.lens(4)]

    assert_same(engines, traced)


# --- the inner state -----------------------------------------------------------------------------


@pytest.mark.parametrize("pool", [None, "last", "mean", "word"])
def test_activations(engines, pool):
    hooks = ["*hook_resid*", "*hook_z", "*embed"] + ([] if pool else ["*pattern", "*scores"])
    texts = [*TEXTS, EDITED]
    assert_same(engines, lambda engine: [*engine.activations(texts, hooks, pool=pool)])


@pytest.mark.parametrize("part", [slice(None, 14), slice(14, None)])
def test_edits_of_every_kind(both, part, tmp_path):
    write_files("saved", tmp_path)

    def values(model):
        ids, bounds = [], []
        for number, edits in EDITS[part]:
            parsed = [ModelEdit.of(x, model.config, tmp_path) for x in edits_of("saved", edits)]
            ids.append(PROMPTS[number])
            bounds.append(bind(parsed, len(PROMPTS[number]), len(PROMPTS[number])))
        recorder = Recorder(hook_shapes(model.config), Editor(bounds, model.ops))
        states = row_states(model, ids, None, recorder)
        rows = rows_of(recorder.values, right_pad(ids)[1].tolist())
        arrays = [*states, *(value for row in rows for value in row.values())]
        return [model.ops.to_host(array) for array in arrays]

    assert_same(both, values)


def test_an_edit_may_give_tiny_numbers(both):
    """CuPy would round them to 0."""
    edit, name = "blocks.1.attn.hook_pattern[1]@3*=1e-38", "blocks.1.attn.hook_pattern"

    def pattern(model):
        function = FunctionEdit([name], lambda value, positions: value * np.float32(0.5))
        bounds = bind([ModelEdit.of(edit, model.config), function], 5, 5)
        recorder = Recorder([name], Editor([bounds], model.ops))
        row_states(model, [[1, 2, 3, 4, 5]], None, recorder)
        return model.ops.to_host(recorder.values[name])

    assert 0 < pattern(both[0])[0, 1, 3, 0] < np.finfo(np.float32).tiny
    assert_same(both, pattern)


def test_a_tiny_change_of_a_pattern_counts(both):
    """In comparisons, a GPU would take it for 0."""

    class Change(Hook):
        names = ("blocks.0.attn.hook_pattern",)

        def take(self, name, value):
            edited = value.copy()
            edited[..., 1] = np.float32(1e-39)  # it is 0
            return edited

    def mixed(model):
        ops = model.ops
        q, k, v = (np.zeros((1, 1, n, 8), np.float32) for n in (1, 2, 2))
        q[...], k[:, :, 0], v[:, :, 1] = 10, 10, 3e38
        keys, values = (layers[0] for layers in ops.new_cache(1, 1, 1, 2, 8))
        q, k, v = map(ops.xp.asarray, (q, k, v))
        ops.store(k, v, keys, values, np.array([0]), np.array([2]))
        run = RunState(ops, np.array([[2]]), None, Change())
        return ops.to_host(run.attend(q, keys, values, 1.0, 0))

    assert mixed(both[0]).min() > 0.2
    assert_same(both, mixed)


def test_attribution_patching_and_ablation(engines):
    def parts(engine):
        clean, corrupt, answers = "the cat", "the dog", ("a", "e")
        return [
            fields(engine.attribution(clean, *answers)),
            fields(engine.patch(clean, corrupt, *answers)),
            fields(engine.patch(clean, corrupt, *answers, what="z")),
            fields(engine.ablate(clean, *answers)),
        ]

    assert_same(engines, parts)


@pytest.mark.parametrize("pca", [False, True])
def test_a_vector(engines, pca):
    hook, others = "blocks.1.hook_resid_pre", ["a b", "c d e", "f"]
    assert_same(engines, lambda engine: fields(engine.vector(TEXTS, others, hook, pca=pca)))


def test_weights(engines):
    assert_same(engines, lambda engine: dict(engine.weights))


# --- compression, the server ---------------------------------------------------------------------


def test_what_one_compresses_the_other_decompresses(both, tokenizer):
    device, cpu = (Codec(model, tokenizer) for model in both)
    data = TEXT.encode() * 5
    packed = [b"".join(codec.compress(io.BytesIO(data), segment=64)) for codec in (device, cpu)]
    assert packed[0] == packed[1]
    for codec in (device, cpu):
        assert b"".join(codec.decompress(ArchiveReader(io.BytesIO(packed[0])))) == data


def test_prompts_of_the_server(engines):
    def events(engine):
        model, delivered = engine.model, []
        options = Options(max_tokens=1, seed=1)
        first, second, third = (
            Request.of_prompt(engine.loaded, text, options, 0) for text in TEXTS
        )
        pending = [
            PendingScore(first, delivered.append, prompt_logprobs=3),
            PendingVector(second, delivered.append, hook=FINAL, first=0),
            PendingVector(third, delivered.append, hook="blocks.1.hook_resid_pre", first=1),
        ]
        prompts = Prompts(model, pending, PrefixCache(model), Pace(100))
        while not prompts.advance():
            pass
        return [x if isinstance(x, np.ndarray) else fields(x) for x in delivered]

    assert_same(engines, events)


# --- the device of these tests -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "compute"),
    [
        ("sum", lambda xp, x: x.sum()),
        ("sum", lambda xp, x: xp.sum(x)),
        ("sum", lambda xp, x: (x > 0).sum(dtype="float32")),
        ("mean", lambda xp, x: x.mean(axis=-1)),
        ("mean", lambda xp, x: (x > 0).mean()),
        ("cumsum", lambda xp, x: xp.cumsum(x, axis=-1)),
        ("exp", lambda xp, x: xp.exp(x)),
        ("log", lambda xp, x: xp.log(x)),
        ("sqrt", lambda xp, x: xp.sqrt(x)),
        ("tanh", lambda xp, x: xp.tanh(x)),
        ("var", lambda xp, x: x.var()),
        ("std", lambda xp, x: xp.std(x)),
        ("dot", lambda xp, x: x.dot(x)),
        (r"linalg\.\*", lambda xp, x: xp.linalg.norm(x)),
        ("einsum", lambda xp, x: xp.einsum("ij,kj", x, x)),
        ("matmul", lambda xp, x: x @ x),
        ("matmul", lambda xp, x: xp.matmul(x, x)),
        ("pow", lambda xp, x: x**2),
    ],
)
def test_what_is_not_exact_is_refused(both, name, compute):
    xp = both[0].ops.xp
    with pytest.raises(strict_cuda.InexactError, match=f"^{name} of floats on a GPU"):
        compute(xp, xp.asarray(np.ones((3, 3), np.float32)))
    xp.asarray([1, 2]).sum()


def test_activations_of_the_model_are_on_the_host(both):
    for model in both:
        (values,) = activations(model, [Text([1, 2, 3])], [FINAL])
        assert isinstance(values[FINAL], np.ndarray)
