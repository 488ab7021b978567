import inspect
from dataclasses import fields, replace
from typing import get_type_hints

import numpy as np
import pytest

import gpt_cli
import gpt_cli.jobs
from gpt_cli.errors import GPTCLIError, InputError
from gpt_cli.generation.generate import Completion
from gpt_cli.gpt2.model import forward
from gpt_cli.options.request import OptionFields, Options
from gpt_cli.scoring.score import ScoreOptions
from gpt_cli.texts.loaded import LoadedModel
from support.checkpoints import END, END_ID, VOCAB
from support.data_frames import DataFrame

PROMPT = "the sand and "
SAMPLED = {"temperature": 1.3, "top_k": 0, "top_p": 1.0, "seed": 11, "max_tokens": 30}


def configured(engine, **changes):
    """Return an engine of the same weights with another configuration."""
    model = replace(engine.model, config=replace(engine.model.config, **changes))
    return gpt_cli.Engine(LoadedModel(model, engine.tokenizer), engine.name, engine.load_seconds)


@pytest.fixture(scope="module")
def without_ends(engine):
    return configured(engine, bos_token_id=None, eos_token_id=())


def test_the_public_names_are_the_promised_ones():
    assert {"Engine", "load", "Completion", "Score", "Step"} <= set(gpt_cli.__all__)
    for package in (gpt_cli, gpt_cli.jobs):
        assert dir(package) == sorted(package.__all__)
        assert all(getattr(package, name).__module__.startswith("gpt_cli") for name in dir(package))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = gpt_cli.nothing


def test_load_has_defaults():
    parameters = inspect.signature(gpt_cli.load).parameters
    defaults = {"model": "gpt2", "device": "auto", "dtype": "auto", "threads": None}
    assert {name: parameters[name].default for name in defaults} == defaults


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("case", "dtype", "held"),
    [
        ("saved", "auto", "float32"),
        ("f16", "auto", "float16"),
        ("bf16", "auto", "bfloat16"),
        ("bf16", "bfloat16", "bfloat16"),
        ("bf16", "float32", "float32"),
        ("bf16", "int8", "int8"),
    ],
)
def test_weights_are_held_as_they_are_stored_unless_another_type_is_chosen(
    case_folder, monkeypatch, case, dtype, held
):
    def held_by(ops):
        monkeypatch.setenv("GPT_CLI_OPS", ops)
        engine = gpt_cli.load(str(case_folder(case)), device="cpu", dtype=dtype)
        assert engine.model.ops.name == ops
        return engine.model.ops.dtype

    assert held_by("native") == held
    if dtype == "auto":
        assert held_by("numpy") == "float32"


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_load_takes_a_number_of_threads(case_folder, dtype):
    engines = [
        gpt_cli.load(str(case_folder("saved")), device="cpu", dtype=dtype, threads=threads)
        for threads in (1, 3)
    ]
    assert [engine.model.ops.threads for engine in engines] == [1, 3]
    one, three = (engine.logits([list(range(60))]) for engine in engines)
    assert np.array_equal(one, three)


@pytest.mark.parametrize("threads", [0, -1, 257, 2**31, 2**32])
def test_a_number_of_threads_that_cannot_be_is_refused(case_folder, threads):
    with pytest.raises(InputError, match="threads must be from 1 to 256"):
        gpt_cli.load(str(case_folder("saved")), threads=threads)


def test_a_folder_can_be_loaded(case_folder):
    engine = gpt_cli.load(model=case_folder("saved"))
    assert engine.name == str(case_folder("saved"))
    assert engine.model.config.n_layer == 3
    assert engine.load_seconds > 0


def test_every_error_has_its_exit_code():
    codes = {
        kind.__name__: kind.exit_code
        for kind in map(gpt_cli.__getattr__, gpt_cli.__all__)
        if isinstance(kind, type) and issubclass(kind, GPTCLIError)
    }
    assert codes == {
        "GPTCLIError": 1,
        "InputError": 2,
        "ContextError": 2,
        "ModelNotFoundError": 3,
        "CheckpointError": 4,
        "ResourceError": 5,
        "RowsError": 6,
        "MismatchError": 1,
    }


# --- text and ids --------------------------------------------------------------------------------


def test_encode_and_decode_are_inverse(engine):
    ids = engine.encode(PROMPT)
    assert all(isinstance(id, int) for id in ids)
    assert engine.decode(ids) == PROMPT
    assert END_ID not in engine.encode(END)
    assert engine.encode(END, special=True) == [END_ID]
    for special in (False, True):
        (done,) = engine.generate([END], max_tokens=1, special=special)
        assert done.prompt_tokens == len(engine.encode(END, special=special))


# --- logits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_logits_are_those_of_every_position(engine, kind):
    ids = [[1, 2, 3], [4, 5, 6]]
    logits = engine.logits(kind(ids))
    assert isinstance(logits, np.ndarray)
    assert logits.shape == (2, 3, len(VOCAB))
    assert logits.dtype == np.float32
    assert np.array_equal(logits, forward(engine.model, np.array(ids)))


@pytest.mark.parametrize("ids", [[], [[]], [[1], [1, 2]], [[1], []], [[1] * 81]])
def test_rows_that_are_ragged_empty_or_too_long_have_no_logits(engine, ids):
    with pytest.raises(InputError, match="all rows must have the same length, from 1 to 80"):
        engine.logits(ids)


@pytest.mark.parametrize("id", [-1, len(VOCAB), 10**12])
def test_an_id_outside_the_vocabulary_is_refused(engine, id):
    with pytest.raises(InputError, match=f"the model has no token {id}"):
        engine.logits([[1, 2], [3, id]])


# --- generation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("options", [{"temperature": 0.0, "seed": 1}, SAMPLED])
def test_the_pieces_of_a_stream_are_the_text_of_the_completion(engine, options, use_cache):
    pieces = list(engine.stream(PROMPT, use_cache=use_cache, **options))
    (alone,) = engine.generate([PROMPT], **options)
    among_others = engine.generate([PROMPT, "a", "in the ring"], **options)[0]
    assert "" not in pieces
    assert "".join(pieces) == alone.text == among_others.text
    assert alone.ids == among_others.ids


def test_a_completion_has_its_tokens_and_its_reason(engine):
    (done,) = engine.generate([PROMPT], temperature=0, max_tokens=5, ignore_eos=True, seed=3)
    assert isinstance(done, Completion)
    assert done.prompt_tokens == len(engine.encode(PROMPT))
    assert done.text == engine.decode(done.ids)
    assert len(done.ids) == len(done.logprobs) == 5
    assert done.finish_reason == "length"
    assert done.seed == 3


def test_an_empty_prompt_is_the_start_token_if_the_model_has_one(engine, without_ends):
    (done,) = engine.generate([""], temperature=0, max_tokens=1)
    assert done.prompt_tokens == 1
    assert done.ids == [int(engine.logits([[END_ID]])[0, -1].argmax())]
    for without in (without_ends, configured(engine, bos_token_id=50256)):
        with pytest.raises(InputError, match="the prompt is empty"):
            without.generate([PROMPT, ""])


OPENAI = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"presence_penalty": -0.5, "frequency_penalty": 2, "repeat_penalty": 1.2},
    {"logit_bias": {VOCAB["e"]: 3.5, VOCAB["h"]: -100}},
    {"logit_bias": [f"{VOCAB['e']}=2.5"], "presence_penalty": 2},
]


@pytest.mark.parametrize("options", OPENAI)
def test_penalties_and_biases_are_those_of_openai(without_ends, options):
    """logit + bias - presence * (n > 0) - frequency * n, where n counts generated tokens."""
    options = {"max_tokens": 30, "temperature": 0} | options
    (done, _) = without_ends.generate([PROMPT, "a"], **options)
    params = Options(**options)
    ids, new = without_ends.encode(PROMPT), []
    for _ in range(params.max_tokens):
        logits = without_ends.logits([ids + new])[0, -1].astype(float)
        for id, bias in params.logit_bias:
            logits[id] += bias
        for id in {*ids, *new}:
            factor = params.repeat_penalty
            logits[id] = logits[id] / factor if logits[id] > 0 else logits[id] * factor
        for id in set(new):
            logits[id] -= params.presence_penalty + params.frequency_penalty * new.count(id)
        new.append(int(logits.argmax()))
    assert done.ids == new
    assert done.ids != without_ends.generate([PROMPT], temperature=0, max_tokens=30)[0].ids


def test_a_bias_may_name_a_token_by_its_text(without_ends):
    options = {"max_tokens": 20, "seed": 1, "temperature": 1.5}
    e = VOCAB["e"]
    (by_id,) = without_ends.generate([PROMPT], logit_bias={e: -100, VOCAB["h"]: 2}, **options)
    for biases in ({"e": -100, "h": 2}, ["e=-100", f"{VOCAB['h']}=2"], [("e", -100), ("h", 2)]):
        (done,) = without_ends.generate([PROMPT], logit_bias=biases, **options)
        assert done.ids == by_id.ids
    row = {"prompt": PROMPT, "logit_bias": {"e": -100, "h": 2}}
    (done,) = without_ends.batch([row], Options(**options))
    assert done.ids == by_id.ids
    assert e not in done.ids


@pytest.mark.parametrize(
    ("biases", "message"),
    [
        ({"qz": 1}, 'logit_bias must be one token, not "q" "z"; a word usually begins with'),
        ({"e": 1, VOCAB["e"]: 2}, f"logit_bias has 'e' and {VOCAB['e']}, the same token"),
        ({len(VOCAB): 1}, f"logit_bias has token {len(VOCAB)}, and the ids of this model are from"),
    ],
)
def test_a_bias_of_no_token_is_refused(engine, biases, message):
    with pytest.raises(InputError, match=f"^{message}"):
        engine.generate([PROMPT], logit_bias=biases)


@pytest.mark.parametrize("others", [(), ("never written",)])
def test_a_stop_string_ends_the_text_and_can_be_kept(without_ends, others):
    options = {"max_tokens": 40, "temperature": 0}
    (whole,) = without_ends.generate([PROMPT], **options)
    stop = whole.text[5:8]
    (kept, cut) = (
        without_ends.generate([PROMPT], stop=[*others, stop], include_stop=include, **options)[0]
        for include in (True, False)
    )
    assert kept.text == cut.text + stop == whole.text[: whole.text.index(stop) + 3]
    assert kept.finish_reason == cut.finish_reason == "stop"


def test_overflow_is_an_error_before_any_work_unless_chosen_otherwise(without_ends):
    with pytest.raises(InputError, match="the prompt has 100 tokens"):
        without_ends.run(["a" * 100], Options())
    (done,) = without_ends.generate(["a" * 100], overflow="truncate", max_tokens=50)
    assert (done.prompt_tokens, done.finish_reason) == (40, "context")


def test_unknown_options_and_one_prompt_without_a_list_are_refused(engine):
    with pytest.raises(InputError, match=r"^temperature must be"):
        engine.generate([PROMPT], temperature=1e-7)
    assert engine.generate([]) == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda engine: engine.generate(PROMPT), "prompts must be a list, not 'the"),
        (lambda engine: engine.generate(5), "prompts must be a list, not 5"),
        (lambda engine: engine.generate(["a", 5]), r"prompts\[1\] must be a string, not 5"),
        (lambda engine: engine.generate(["a"], max_tokens=True), "a whole number, not True"),
        (lambda engine: engine.generate(["a"], max_tokens="x"), "max_tokens must be a whole"),
        (lambda engine: engine.generate(["a"], logit_bias="7=1"), "logit_bias must be a number"),
        (
            lambda engine: engine.generate(["a"], choices="yes,no"),
            "choices must be a list or None, not",
        ),
        (lambda engine: engine.generate(["a"], temprature=0), r"\(did you mean temperature\?\)$"),
        (lambda engine: engine.trace("a", x=1), "keyword x: the keywords are text, special$"),
        (lambda engine: engine.stream(["a"]), "prompt must be a string, not"),
        (lambda engine: engine.batch(["a"], {"seed": 1}), "options must be Options or None, not"),
        (lambda engine: engine.score(5), "text must be a string, not 5"),
        (lambda engine: engine.score("a b", stride="x"), "stride must be a whole number or None"),
        (lambda engine: engine.score("a b", strid=9), r"\(did you mean stride\?\)$"),
        (lambda engine: engine.rank("a", ["b", 5]), r"choices\[1\] must be a string, not 5"),
        (lambda engine: engine.rank_many("ab"), "rows must be a list, not 'ab'"),
        (lambda engine: engine.batch("ab"), "rows must be a list, not 'ab'"),
        (lambda engine: engine.score("a b", bos="yes"), "bos must be true or false, not 'yes'"),
        (lambda engine: engine.logits([[1.5]]), r"ids\[0\]\[0\] must be a whole number, not 1.5"),
        (lambda engine: engine.logits([1, 2]), r"ids\[0\] must be a list, not 1"),
        (lambda engine: engine.logits("Once"), "ids must be a list, not 'Once'"),
        (lambda engine: engine.decode("a"), "ids must be a list, not 'a'"),
        (lambda engine: engine.compress("a"), "data must be bytes or .*, not 'a'"),
        (lambda engine: engine.decompress("a"), "data must be bytes or .*, not 'a'"),
        (lambda engine: engine.next_tokens("a", "x"), "count must be a whole number, not 'x'"),
        (lambda engine: engine.encode(b"a"), "text must be a string, not"),
        (lambda engine: gpt_cli.load("tiny", devise="cpu"), r"\(did you mean device\?\)$"),
        (
            lambda engine: gpt_cli.load("tiny", threads="2"),
            "threads must be a whole number or None, not",
        ),
        (lambda engine: gpt_cli.load("tiny", threads=True), "threads must be a .*, not True"),
        (lambda engine: Options(temprature=0), r"\(did you mean temperature\?\)$"),
    ],
)
def test_wrong_types_and_unknown_keywords_are_type_errors(engine, call, message):
    with pytest.raises(TypeError, match=message):
        call(engine)


MANY = {
    "generate": lambda engine, texts: [row.text for row in engine.generate(texts, seed=1)],
    "batch": lambda engine, texts: [row.text for row in engine.batch(texts, Options(seed=1))],
    "score_many": lambda engine, texts: [row.total_logprob for row in engine.score_many(texts)],
    "activations": lambda engine, texts: [
        values["hook_embed"].tolist() for values in engine.activations(texts, ["hook_embed"])
    ],
}


@pytest.mark.parametrize("method", [*MANY, "classify", "rank_many"])
def test_a_data_frame_is_refused_and_its_column_or_rows_are_taken(engine, method):
    column = "prompt" if method in ("batch", "rank_many") else "text"
    df = DataFrame({column: ["a b", "b"]})
    with pytest.raises(TypeError, match=r'cannot be a DataFrame.*such as df\["text"\]'):
        getattr(engine, method)(df, *([["hook_embed"]] if method == "activations" else []))
    if method in MANY:
        results = MANY[method](engine, df[column])
        assert MANY[method](engine, np.array(df[column])) == results
    if method in ("batch", "score_many", "activations"):
        rows = df.to_dict("records")
        assert MANY[method](engine, (row for row in rows)) == results


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("a", 5), "choices must be a list, not 5"),
        (("a", ["b", 5]), "choices[1] must be a string, not 5"),
        (("a",), "a row must be a prompt and its choices, not ('a',)"),
        ("ab", "row must be a list, not 'ab'"),
    ],
)
def test_a_wrong_type_in_a_row_is_the_error_of_this_row(engine, row, message):
    wrong, (right, _) = engine.rank_many(iter([row, (PROMPT, ["a", "b"])]))
    assert isinstance(wrong, InputError)
    assert str(wrong) == message
    assert right.text in "ab"


def test_an_engine_and_its_weights_are_shown_on_one_line(engine):
    ops = engine.model.ops
    assert repr(engine) == f"<Engine {engine.name}: {ops.dtype}, {ops.name}, 3 layers x 32>"
    edited = engine.with_edits(["hook_embed=0", "*.hook_mlp_out=0"])
    assert repr(edited).endswith(" x 32, 2 edits>")
    hooked = edited.with_hooks({"hook_embed": print}).with_hooks({"hook_*": print})
    assert repr(hooked).endswith(" x 32, 2 edits, hooks at 2 points>")
    assert repr(engine.weights) == "<40 weights: wte.weight, wpe.weight, h.0.ln_1.weight, ...>"


def test_the_keywords_are_the_fields_of_the_options(engine):
    for method, own in ((engine.stream, []), (engine.generate, ["progress"])):
        _, *keywords = inspect.signature(method).parameters
        assert keywords == own + [field.name for field in fields(Options)]


def test_type_checkers_see_the_keywords(engine):
    """`make check` tests what type checkers say of wrong ones: see tests/typed_calls.py."""
    assert get_type_hints(OptionFields).keys() == {field.name for field in fields(Options)}
    _, *keywords = inspect.signature(engine.score_many).parameters
    assert [*get_type_hints(ScoreOptions)] == keywords


def test_an_engine_with_other_weights_computes_with_them_everywhere(engine):
    name, text = "h.0.attn.c_proj.weight", "Once upon a time"
    changed = engine.with_weights({name: 0 * engine.weights[name]})
    assert changed.score(text) != engine.score(text)
    assert changed.with_weights(engine.weights).score(text) == engine.score(text)
    assert not changed.weights[name].any()


def test_an_error_of_one_text_among_several_names_it(engine):
    hook = "hook_embed"
    for compute, message in (
        (lambda: [*engine.activations(["a", ""], [hook])], r"^texts\[1\]: the text is empty"),
        (lambda: engine.vector(["a", "b"], ["c", ""], hook), r"^negative\[1\]: the text is empty"),
        (lambda: engine.generate(["a", "a" * 99]), r"^prompts\[1\]: the prompt has 99 tokens"),
        (lambda: engine.generate(["a" * 99]), "^the prompt has 99 tokens"),
    ):
        with pytest.raises(InputError, match=message):
            compute()


def test_half_of_a_surrogate_pair_is_refused(engine):
    for use in (engine.encode, engine.score, lambda text: engine.generate([text])):
        with pytest.raises(InputError, match="not valid Unicode"):
            use("a\ud800")


def test_a_token_that_the_model_lacks_is_refused_when_it_is_used(engine):
    smaller = configured(engine, vocab_size=280)
    for use in (smaller.score, lambda text: smaller.generate([text])):
        with pytest.raises(InputError, match=r"the model has no token 28\d"):
            use("they're here")
