"""Constraints decide which tokens may follow, and nothing else."""

import gc
import itertools
import json
import re
import weakref
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpt_cli
from gpt_cli.errors import InputError
from gpt_cli.generation.generate import Run
from gpt_cli.generation.matcher import Matcher, _guide
from gpt_cli.generation.row import Request
from gpt_cli.options.constraint import Constraint
from gpt_cli.options.declare import OptionError
from gpt_cli.options.request import Options
from gpt_cli.texts.loaded import LoadedModel
from gpt_cli.texts.speculator import Speculator, make_draft_model
from gpt_cli.texts.text import Text
from support.checkpoints import ALPHABET, END_ID, VOCAB
from support.drafting import (
    SMALL,
    options,
    planned,
    plans,
    prompts,
    requests_of,
    speculating,
)
from support.models import (
    GREEDY,
    completions_of,
    exact_logprobs,
    favouring,
    ids_of,
    model_of,
    outcomes,
    run,
)
from support.sampling_values import sampling_options

pytest.importorskip("llguidance", reason="the extra constrain is not installed")

FREE = {"temperature": 1, "top_k": 0, "top_p": 1.0}
A = ids_of("a")[0]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "é": {"enum": ["x", None, [1]]}},
    "required": ["a"],
    "additionalProperties": False,
}
VARIOUS = [  # no more than are cached
    {"regex": "[a-z ]{3,9}"},
    {"regex": r"(?s).*"},
    {"regex": r"\d\d(\.\d+)?"},
    {"json_schema": json.dumps(SCHEMA)},
    {"grammar": 'start: "(" start ")" start | "x"?'},
    {"choices": ["a", "and", "é", "😀"]},
]


def matcher_of(model, tokenizer, option, ids=()):
    """Return the state of a text that has these tokens."""
    matcher = Matcher(tokenizer, model.config, Options(**option).constraint)
    for id in ids:
        matcher.push(id)
    return matcher


# --- errors --------------------------------------------------------------------------------------


def refused(option, value):
    """Return the error of a constraint, without the name of its option."""
    with pytest.raises(OptionError) as caught:
        Options(**{option: value}).validate()
    name, complaint = caught.value.args
    assert name == option
    assert "\n" not in complaint
    return complaint


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("a(b", " at character 2: unclosed group"),
        ("a\n\n/é(b", " at character 6: unclosed group"),
        ("[z-a]", " at character 2: invalid character class range"),
        ("(?=a)b", " at character 1: look-around, including look-ahead and look-behind"),
        (r"\p{Nope}", " at character 1: Unicode property not found"),
        (r"a\bb", r": \b, \B, \< and \> are not supported"),
        ("a$b", ": ^ and $ are only supported at its ends"),
    ],
)
def test_an_error_in_a_regular_expression_names_its_position(pattern, says):
    assert refused("regex", pattern).startswith(f"is not valid as a regular expression{says}")


def test_a_constructor_compiles_no_grammar(tiny):
    options = Options(regex="(")
    for use in (
        options.validate,
        lambda: tiny.run(["Once"], options),
        lambda: tiny.generate(["Once"], regex="("),
        lambda: tiny.stream("Once", regex="("),
    ):
        with pytest.raises(OptionError, match=r"^regex is not valid as a regular expression"):
            use()
    (error,) = tiny.batch([{"prompt": "Once", "regex": "("}])
    assert str(error).startswith("regex is not valid as a regular expression")


def test_a_bug_of_llguidance_is_an_error_of_the_option():
    """llguidance 1.9 cannot compile this; its exception is none that `except Exception` catches."""
    try:
        Options(regex=r"\pL|(é|\w)").validate()
    except OptionError as error:
        assert str(error).startswith("regex fails in llguidance: write it in another way")


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "strng"}, ": Invalid type: strng"),
        (
            {"properties": {"a/b": {"items": {"anyOf": [{}, {"properties": {"~": {"type": 1}}}]}}}},
            " at #/properties/a~1b/items/anyOf/1/properties/~0: ",
        ),
        ({"properties": {"a": {"pattern": "a(b"}}}, " at #/properties/a: in /a(b/: unclosed group"),
        ({"items": {"items": "string"}}, " at #/items: a schema is an object, such as {"),
        ({"items": {"format": "nope"}}, " at #/items: Unknown format: nope"),
        (
            {"items": {"uniqueItems": True}},
            ' at #/items: Unimplemented keys: ["uniqueItems"]; "x-guid',
        ),
        (
            {"oneOf": [{"minimum": 0}, {"maximum": 5}]},
            ': a value may fit several branches of oneOf; "x-guidance": {"coerce_one_of": true}',
        ),
        ({"items": {"$ref": "#/nope"}}, " at #/items: Pointer '/nope' does not exist"),
        (
            {"items": {"$ref": "https://example.com/x"}},
            " at #/items: it refers to https://example.com/x, and only references within it are",
        ),
        ({"$ref": "file:///etc/x"}, ": it refers to file:///etc/x, and only references within it"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, ": Unsatisfiable schema: minimum (3)"),
    ],
)
def test_an_error_in_a_schema_names_its_position(schema, says):
    for written in (schema, json.dumps(schema)):
        assert refused("json_schema", written).startswith(f"is not valid as a JSON schema{says}")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("start: a", ' at line 1, column 8: unknown name: "a"'),
        ('start: "a" \n  | ) ', " at line 2, column 5: expecting rule, token or statement"),
        ("start: A\nA: /a(b/", ' at line 2, column 4: invalid regex "a(b"'),
        ("start: A\nA: A", " at line 2, column 4: circular reference"),
        ('start: %json {"type": "nope"}', " at line 1, column 8: failed to compile JSON schema"),
        ('begin: "a"', ": no start rule found"),
        ("start: 'a'", ' at line 1, column 8: unexpected character; texts are in "..."'),
        ('{"type": "object"}', ": it is JSON"),
        ("", ": no start rule found"),
    ],
)
def test_an_error_in_a_grammar_names_its_position(text, says):
    assert refused("grammar", text).startswith(f"is not valid as a Lark grammar{says}")


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("regex", "x" * 2_000_001, "must have at most 2,000,000 characters, not 2,000,001"),
        ("regex", "a\ud800", "is not valid Unicode at character 2"),
        ("regex", ["a"], "must be a string, not ['a']"),
        ("grammar", "a:" * 5001, "must have at most 5,000 rules and brackets"),
        ("grammar", 'start: "\ud800"', "is not valid Unicode at character 9"),
        ("choices", ["\ud800"], "is not valid Unicode"),
        ("choices", ["a", ""], "must be one or more texts that are not empty"),
        ("choices", [], "must be one or more texts that are not empty"),
        ("choices", [1], "must be a string or a list of strings, not [1]"),
        ("json_schema", "{", "must be JSON: Expecting property name"),
        ("json_schema", '{"a": NaN}', "must be JSON: "),
        ("json_schema", "[" * 100_000 + "]" * 100_000, "must be "),
        ("json_schema", r'{"const": "\ud800"}', "must be JSON: unexpected end of hex escape"),
        ("json_schema", "[1]", "must be a JSON object"),
        ("json_schema", "true", "must be a JSON object"),
        ("json_schema", '{"a": "\udfff"}', "is not valid Unicode at character 8"),
        ("json_schema", 3, "must be a JSON schema, not 3"),
        (
            "json_schema",
            {"anyOf": [{"$ref": "#"}] * 5001},
            "must have fewer references: 5,001 of them in a schema of 4 levels",
        ),
    ],
)
def test_what_cannot_be_a_constraint_is_refused(option, value, says):
    assert refused(option, value).startswith(says)


def test_a_text_has_one_constraint():
    for first, last in itertools.combinations(["regex", "json_schema", "grammar", "choices"], 2):
        with pytest.raises(OptionError, match=f"^{last} must be the only constraint of a text$"):
            Options(**{last: ["a"] if last == "choices" else "a", first: "b"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("regex", ""),
        ("regex", r"[^\s\S]"),
        ("grammar", 'start: ""'),
        ("grammar", "start: start"),
        ("grammar", 'start: a\na: b\nb: a "x"'),
        ("grammar", "start: <|endoftext|>"),
    ],
)
def test_a_constraint_that_only_the_empty_text_matches_or_none_is_refused(tiny, name, value):
    with pytest.raises(OptionError, match=f"^{name} must match some text, and matches none"):
        tiny.generate(["Once"], **{name: value})


def test_a_special_token_that_the_tokenizer_does_not_have_is_refused(tiny):
    grammar = 'start: "a" b\nb: <|im_end|>'
    says = r"grammar .* at line 2, column 4: unknown special token: .*im_end"
    with pytest.raises(OptionError, match=says):
        tiny.generate(["Once"], grammar=grammar)


# --- options and rows ----------------------------------------------------------------------------


def test_a_constraint_is_known_by_its_option():
    assert Options().constraint is None
    assert Options(regex="a").constraint == Constraint("regex", "a")
    assert Options(choices=["é"]).constraint == Constraint("choices", '["é"]')
    schema = {"enum": ["é"]}
    assert json.loads(Options(json_schema=schema).constraint.text) == schema


def test_the_constraint_of_a_row_replaces_that_of_all():
    default = Options(regex="a", seed=3)
    options = default.with_row({"choices": ["b"], "regex": None})
    assert (options.constraint.kind, options.seed) == ("choices", 3)
    for row in ({}, {"seed": 4}, {"choices": None}):
        assert default.with_row(row).constraint == default.constraint
    with pytest.raises(OptionError, match="choices must be the only constraint"):
        default.with_row({"choices": ["b"], "regex": "c"})


def test_rows_have_constraints_of_their_own(tiny):
    rows = [
        "Once",
        {"prompt": "Once", "choices": ["x", "y"]},
        {"prompt": "Once", "regex": "(", "seed": 1},
        {"prompt": "Once", "grammar": 'start: ""'},
        {"prompt": "Once", "choices": []},
        {"prompt": "Once", "json_schema": {"const": 1}},
    ]
    first, second, bad, empty, none, third = tiny.batch(rows, Options(regex=r"\d{2}", seed=1))
    assert re.fullmatch("[0-9]{2}", first.text)
    assert second.text in ("x", "y")
    assert all(isinstance(error, InputError) for error in (bad, empty, none))
    assert third.text == "1"


def test_json_has_the_form_that_python_gives_it_or_that_of_the_schema(tiny):
    digits = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 3}
    schema = {"type": "object", "properties": {"a": digits, "b": {"type": "null"}}}
    schema |= {"required": ["a", "b"], "additionalProperties": False}
    options = {"max_tokens": 60, "seed": 1} | FREE
    for done in tiny.generate(["Once"] * 4, json_schema=schema, **options):
        assert json.dumps(json.loads(done.text)) == done.text
    schema["x-guidance"] = {"key_separator": ":", "item_separator": ","}
    for done in tiny.generate(["Once"] * 4, json_schema=schema, **options):
        assert json.dumps(json.loads(done.text), separators=(",", ":")) == done.text


# --- how a text ends -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(make_model):
    return make_model(n_layer=2)


def finish(model, tokenizer, *favoured, **options):
    """Return the end of a text of a model that favours some tokens."""
    (done,) = run(favouring(model, *favoured), tokenizer, [[1]], **options)
    return done.text, done.finish_reason


EMPTY = 'start: "a" X\nX: /b+/ & /c+/'
BUT_THE_END = (END_ID, *ids_of("stuvwxyz"), A)  # the last far less


@pytest.mark.parametrize(
    ("favoured", "options", "text", "reason"),
    [
        # Nothing more may follow.
        ([A], {"regex": "a{3}"}, "aaa", "complete"),
        ([A], {"regex": "a{3}", "max_tokens": 3}, "aaa", "complete"),
        ([A], {"regex": "a{3}", "ignore_eos": True}, "aaa", "complete"),
        ([A], {"choices": ["b"]}, "b", "complete"),
        # The end token ends a text where it matches, and only there.
        (BUT_THE_END, {"regex": "a*"}, "", "eos"),
        (BUT_THE_END, {"regex": "a{2,}"}, "aa", "eos"),
        (BUT_THE_END, {"regex": "(ab)+"}, "ab", "eos"),
        # An end token to ignore is not chosen where the text may go on.
        ([END_ID, A], {"regex": "a{2,9}", "ignore_eos": True}, "a" * 9, "complete"),
        ([END_ID, A], {"regex": "a+", "ignore_eos": True, "max_tokens": 5}, "aaaaa", "length"),
        # A stop string ends a text before it matches.
        ([A], {"regex": "a{9}", "stop": ["aaa"]}, "", "stop"),
        ([A], {"regex": "ba{9}", "stop": ["aa"], "include_stop": True}, "baa", "stop"),
        ([A], {"regex": "a{3}", "stop": ["aaa"]}, "", "stop"),
        ([A], {"regex": "a{2}", "stop": ["aaa"]}, "aa", "complete"),
        # More must follow.
        ([A], {"regex": "a{9}", "max_tokens": 4}, "aaaa", "length"),
        ([A], {"regex": "a{9}ß", "max_tokens": 10}, 9 * "a" + "\ufffd", "length"),
        # More must follow, and nothing can.
        ([A], {"grammar": EMPTY}, "a", "stuck"),
        # A ban holds within a constraint, and a constraint within a ban.
        ([], {"regex": "[ab]{3}", "logit_bias": {A: -100}}, "bbb", "complete"),
        ([], {"regex": "a{3}", "logit_bias": {A: -100}}, "aaa", "complete"),
    ],
)
def test_a_text_ends_with_a_reason(model, tokenizer, favoured, options, text, reason):
    assert finish(model, tokenizer, *favoured, **options) == (text, reason)


def test_an_object_may_have_as_many_properties_as_are_compiled(model, tokenizer):
    names = {f"p{n}": {"type": "null"} for n in range(1000)}
    schema = {"type": "object", "properties": names, "additionalProperties": False}
    text, reason = finish(model, tokenizer, *ids_of("}{"), json_schema=schema)
    assert (text, reason) == ("{}", "complete")


# --- the same text, however it is computed -------------------------------------------------------

constrained = st.builds(
    lambda *parts: dict(itertools.chain(*map(dict.items, parts))),
    options,
    st.sampled_from([{}, *VARIOUS]),
)
rows = st.lists(st.tuples(prompts, sampling_options, constrained), min_size=1, max_size=4)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@given(rows=rows, plans=plans)
@settings(max_examples=15)
def test_a_text_is_the_same_in_any_batch_without_the_cache_and_with_any_drafts(
    native, tokenizer, dtype, rows, plans
):
    model, requests = model_of(native(dtype), dtype, **SMALL), requests_of(rows)
    alone = [outcomes(completions_of(model, tokenizer, [request]))[0] for request in requests]
    assert outcomes(completions_of(model, tokenizer, requests)) == alone
    uncached = [
        replace(request, options=replace(request.options, use_cache=False)) for request in requests
    ]
    assert outcomes(completions_of(model, tokenizer, uncached)) == alone
    wrong = replace(model, wpe=np.roll(model.wpe, 3, axis=0))
    for speculator in (Speculator(model), speculating(model, wrong)):
        with planned(*plans):
            drafted = completions_of(model, tokenizer, requests, speculator)
        assert outcomes(drafted) == alone


@pytest.mark.parametrize("params", [{}, FREE])  # the library drafts in one call with the first
@pytest.mark.parametrize("option", VARIOUS)
def test_drafts_of_the_twin_follow_the_constraint(native, tokenizer, option, params):
    model = model_of(native("float32"), **SMALL | {"n_positions": 70})
    options = Options(**params, **option, ignore_eos=True, seed=1, max_tokens=60)
    requests = [Request(Text([1, 2]), options, row) for row in range(8)]
    with planned((3, True), (2, True)):
        drafting = speculating(model, make_draft_model(model))
        rows = completions_of(model, tokenizer, requests, drafting)
    assert outcomes(rows) == outcomes(completions_of(model, tokenizer, requests))
    assert sum(row.accepted for row in rows) > 0.8 * sum(row.drafted for row in rows) > 0


def test_drafts_are_cut_before_what_the_constraint_does_not_allow(native, tokenizer):
    """After "abc" in the prompt is "de1ab", of which the constraint allows "de"."""
    model = model_of(native("float32"), **SMALL | {"n_positions": 70})
    request = Request(Text(ids_of("abcde1abcde1ab")), Options(regex="c[a-z]{9}", temperature=0))
    with planned((5, False)):
        steps = list(Run(LoadedModel(model, tokenizer, Speculator(model)), [request]))
    assert [step.drafted for step in steps][:2] == [0, 2]


def test_tokens_that_the_constraint_forces_are_drafted(native, tokenizer):
    model = model_of(native("float32"), **SMALL | {"n_positions": 70})
    request = Request(Text([1]), Options(regex="[ab]zyxwvu[ab]", seed=1))
    steps = list(Run(LoadedModel(model, tokenizer, Speculator(model)), [request]))
    assert [step.drafted for step in steps] == [0, 6, 0, 0, 0, 0, 0, 0]
    assert [step.accepted for step in steps] == [False, *[True] * 6, False]
    (expected,) = completions_of(model, tokenizer, [request])
    assert [step.id for step in steps] == expected.ids


@pytest.mark.parametrize("option", VARIOUS)
def test_a_streamed_text_is_the_same(tiny, option):
    for seed in range(3):
        options = {"seed": seed, "max_tokens": 20} | option
        (done,) = tiny.generate(["Once"], **options)
        assert "".join(tiny.stream("Once", **options)) == done.text


# Also what is not UTF-8, but for the byte 255: llguidance marks special tokens with it.
EVERYTHING = "start: A\nA: ~/x{999}y/"


@pytest.mark.parametrize("params", [GREEDY, FREE, {}, {"temperature": 2, "ignore_eos": True}])
@pytest.mark.parametrize("name", ["tiny", "engine"])
def test_a_constraint_that_allows_everything_changes_nothing(request, name, params):
    engine = request.getfixturevalue(name)
    prompts, (last,) = (
        ["Once upon a time", "The", "é", "\n"],
        engine.tokenizer.encode_bytes(b"\xff"),
    )
    options = {"max_tokens": 40, "seed": 5, "top_logprobs": 2, "logit_bias": {last: -100}} | params
    free, constrained = (engine.generate(prompts, **options, grammar=g) for g in (None, EVERYTHING))
    assert outcomes(constrained) == outcomes(free)


# --- probabilities -------------------------------------------------------------------------------


@pytest.mark.parametrize("option", VARIOUS)
def test_logprobs_are_those_without_the_constraint(model, tokenizer, option):
    (done,) = run(model, tokenizer, [[1, 2]], FREE, max_tokens=8, top_logprobs=3, **option)
    exact = exact_logprobs(model, [1, 2, *done.ids])[1:-1]
    np.testing.assert_allclose(done.logprobs, exact[range(len(done.ids)), done.ids], rtol=1e-4)
    for step, top in enumerate(done.top_logprobs):
        assert [id for id, _ in top] == np.argsort(-exact[step])[:3].tolist()


@pytest.mark.parametrize("params", [FREE, {"temperature": 0.5, "top_k": 6, "top_p": 1.0}])
def test_draws_have_the_masked_distribution(engine, params):
    """First the mask, then the filters; each number of draws is within 5 sigma."""
    option, count = {"regex": "[a-z ]{1,2}"}, 2000
    rows = engine.batch(["The"] * count, Options(**params, **option, seed=1, max_tokens=1))
    drawn = np.bincount([row.ids[0] for row in rows], minlength=engine.model.config.vocab_size)
    allowed = matcher_of(engine.model, engine.tokenizer, option).allowed()
    logits = engine.logits([engine.encode("The")])[0, -1].astype(np.float64)
    logits[~allowed] = -np.inf
    if params["top_k"]:
        logits[logits < np.sort(logits)[-params["top_k"]]] = -np.inf
    weights = np.exp(logits / params["temperature"])
    expected = count * weights / weights.sum()
    assert not drawn[expected == 0].any()
    drawn, expected = drawn[expected > 0], expected[expected > 0]
    assert len(expected) == (params["top_k"] or allowed.sum())
    assert (abs(drawn - expected) < 5 * np.sqrt(expected)).all()
    freedom = len(expected) - 1
    assert ((drawn - expected) ** 2 / expected).sum() < freedom + 5 * np.sqrt(2 * freedom)


# --- models --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": len(VOCAB) + 70},  # more ids than tokens
        {"vocab_size": len(VOCAB) - 5},  # and fewer; the end token is the last
        {"eos_token_id": None},
        {"eos_token_id": [END_ID, A, 999]},
        {"eos_token_id": len(VOCAB)},
    ],
)
def test_the_ids_of_a_model_may_differ_from_those_of_its_tokenizer(make_model, tokenizer, changes):
    model = make_model(n_layer=1, **changes)
    prompts = [[1], [2], [3], [4]]
    for done in run(model, tokenizer, prompts, FREE, regex="[b-d]{2,4}e"):
        assert re.fullmatch("[b-d]{2,4}e", done.text)
        assert done.finish_reason == "complete"
    ends = {id for id in model.config.eos_token_id if id < model.config.vocab_size}
    for done in run(model, tokenizer, prompts, FREE, regex="[b-d]*", max_tokens=60):
        assert re.fullmatch("[b-d]*", done.text)
        assert done.finish_reason == ("eos" if ends else "length")
        assert bool(ends) == (done.ids[-1] in ends)


def test_any_of_several_end_tokens_may_end_a_text(make_model, tokenizer):
    model = make_model(n_layer=1, eos_token_id=[END_ID, A])
    for end in (END_ID, A):
        (done,) = run(favouring(model, end), tokenizer, [[1]], regex="b{2,}")
        assert (done.text, done.finish_reason, done.ids[-1]) == ("bb", "eos", end)
        assert len(done.ids) == 3


def test_an_end_token_that_other_models_have_as_text_is_none(make_model, tokenizer):
    model = make_model(n_layer=1, eos_token_id=[END_ID, A])
    rows = run(favouring(model, A), tokenizer, [[1], [2]], regex="[ab]{3}b?")
    assert [(row.text, row.finish_reason) for row in rows] == [("bbb", "eos")] * 2
    assert finish(model, tokenizer, A, regex="ba") == ("b", "stuck")


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_texts_of_any_weights_match(case_folder, dtype, request):
    if dtype == "int8":
        request.getfixturevalue("library")
    engine = gpt_cli.load(str(case_folder("saved")), device="cpu", dtype=dtype)
    for done in engine.generate(["Once", "é"], regex="[a-f]{8}é", seed=1):
        assert re.fullmatch("[a-f]{8}é", done.text)


# --- masks ---------------------------------------------------------------------------------------


def test_the_tables_of_llguidance_for_a_model_are_cached(engine):
    first, second = (_guide(engine.tokenizer, engine.model.config) for _ in range(2))
    assert first is second


def test_a_tokenizer_is_released_with_its_model():
    engine = gpt_cli.load("tiny")
    _guide(engine.tokenizer, engine.model.config)
    tokenizer = weakref.ref(engine.tokenizer)
    del engine
    gc.collect()
    assert tokenizer() is None


@given(option=st.sampled_from(VARIOUS), data=st.data())
def test_the_mask_after_drafts_is_that_of_the_text_with_them(engine, option, data):
    matcher = matcher_of(engine.model, engine.tokenizer, option)
    ids = []
    while len(ids) < 12 and not matcher.end:
        choices = np.flatnonzero(matcher.allowed())
        id = int(choices[data.draw(st.integers(0, len(choices) - 1))])
        if id == END_ID:
            break
        matcher.push(id)
        ids.append(id)
    cut = data.draw(st.integers(0, len(ids)))
    earlier = matcher_of(engine.model, engine.tokenizer, option, ids[:cut])
    before = earlier.allowed().copy()
    assert np.array_equal(earlier.allowed(ids[cut:]), matcher.allowed())
    assert earlier.fitting(ids[cut:]) == ids[cut:]
    wrong = VOCAB[ALPHABET[0]]  # none has this byte but the one that allows all
    if option != VARIOUS[1]:
        assert earlier.fitting([*ids[cut:], wrong, A]) == ids[cut:]
        assert not earlier.allowed([*ids[cut:], wrong]).any()
    forced = earlier.forced()
    for index, id in enumerate(forced):
        assert np.flatnonzero(earlier.allowed(forced[:index])).tolist() == [id]
    assert np.array_equal(earlier.allowed(), before)


@pytest.mark.parametrize(
    ("pattern", "characters", "longest"),  # the longest text has this length
    [
        ("[ab ]{1,4}", "ab ", 4),
        ("(he|[hel ]){2,3}", "hel ", 6),
        ("0{0,5}", "0", 5),
        ("a?( a){0,2}|b", "ab ", 5),
        ("[é😀中]{1,2}", "é😀中", 2),
        ("(t|h|e| ){1,3}( the)?", "the ", 7),
    ],
)
def test_the_mask_has_the_tokens_with_which_a_match_can_begin(engine, pattern, characters, longest):
    texts = (
        "".join(text)
        for length in range(longest + 1)
        for text in itertools.product(characters, repeat=length)
    )
    matches = {text.encode() for text in texts if re.fullmatch(pattern, text)}
    tokens = {id: engine.tokenizer.token_bytes(id) for id in VOCAB.values() if id != END_ID}
    todo, seen = [[]], {b""}
    while todo:
        ids = todo.pop()
        prefix = b"".join(tokens[id] for id in ids)
        rests = {match[len(prefix) :] for match in matches if match.startswith(prefix)}
        expected = {id for id, token in tokens.items() if any(r.startswith(token) for r in rests)}
        expected |= {END_ID} if b"" in rests and expected else set()
        matcher = matcher_of(engine.model, engine.tokenizer, {"regex": pattern}, ids)
        allowed = set(np.flatnonzero(matcher.allowed()).tolist())
        if len({rest[:1] for rest in rests}) > 1:
            assert allowed == expected
        else:  # only one character may follow, so only the token that it has after all
            assert len(allowed) == len(expected & allowed) == bool(expected)
        assert matcher.end == (None if expected else "complete")
        for id in allowed - {END_ID}:
            if (longer := prefix + tokens[id]) not in seen:
                seen.add(longer)
                todo.append([*ids, id])
    assert len(seen) > 5
