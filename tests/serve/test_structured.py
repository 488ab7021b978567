"""Constrained texts of a real `gpt-cli serve`: what clients send, equal texts, and refusals."""

import json
import re
import select
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.answers import choices_of, computed, texts_of, told
from support.processes import posix
from support.server_process import COMPLETIONS, answer_on, serving

pytest.importorskip("llguidance")
pytestmark = posix

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
LARK = 'start: " " animal ("," " " animal)*\nanimal: "cat" | "dog" | "fox"'
GBNF = 'root ::= " " animal ("," " " animal)*\nanimal ::= "cat" | "dog" | "fox"'
REGEX, CHOICES = " [a-z]{2,9} [0-9]{4}", [" cat", " dog", " dogs", " caf\u00e9"]
OBJECT = {"type": "object"}
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def server():
    with serving("--max-queue", 1000) as server:
        yield server


def named(schema, **more):
    """Return OpenAI's format for a schema."""
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": schema} | more}


# --- what clients send ---------------------------------------------------------------------------

# The fields of a request, and the options of the engine.
# fmt: off
FIELDS = {
    "text": ({"response_format": {"type": "text"}}, {}),
    "no format": ({"response_format": None, "structured_outputs": None, "guided_json": None}, {}),
    "an object": ({"response_format": {"type": "json_object"}}, {"json_schema": OBJECT}),
    "a schema": ({"response_format": named(SCHEMA)}, {"json_schema": SCHEMA}),
    "a schema of a client": (
        {"response_format": named(SCHEMA, strict=True, description="someone")},
        {"json_schema": SCHEMA},
    ),
    "a schema without strict": (
        {"response_format": named(SCHEMA, strict=None, description=None)}, {"json_schema": SCHEMA}
    ),
    "a schema for llama.cpp": (
        {"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json_schema": SCHEMA}
    ),
    "a flat schema": (
        {"response_format": {"type": "json_schema", "name": "person", "schema": SCHEMA}},
        {"json_schema": SCHEMA},
    ),
    "json": ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
    "json in a text": (
        {"structured_outputs": {"json": json.dumps(SCHEMA)}}, {"json_schema": SCHEMA}
    ),
    "json_object": ({"structured_outputs": {"json_object": True}}, {"json_schema": OBJECT}),
    "regex": ({"structured_outputs": {"regex": REGEX}}, {"regex": REGEX}),
    "choice": ({"structured_outputs": {"choice": CHOICES}}, {"choices": CHOICES}),
    "grammar": ({"structured_outputs": {"grammar": LARK}}, {"grammar": LARK}),
    "grammar of llama.cpp": (
        {"structured_outputs": {"grammar": GBNF}}, {"grammar": GBNF}
    ),
    "all fields of vLLM": (
        {"structured_outputs": {
            "json": None, "regex": REGEX, "choice": None, "grammar": None, "json_object": None,
            "disable_fallback": True, "disable_any_whitespace": False,
            "disable_additional_properties": False, "whitespace_pattern": None,
            "structural_tag": None, "_backend": None, "_backend_was_auto": False,
        }},
        {"regex": REGEX},
    ),
    "guided_json": ({"guided_json": SCHEMA}, {"json_schema": SCHEMA}),
    "guided_json in a text": ({"guided_json": json.dumps(SCHEMA)}, {"json_schema": SCHEMA}),
    "guided_regex": ({"guided_regex": REGEX}, {"regex": REGEX}),
    "guided_choice": ({"guided_choice": CHOICES}, {"choices": CHOICES}),
    "guided_grammar": ({"guided_grammar": LARK}, {"grammar": LARK}),
    "a backend": (
        {"guided_regex": REGEX, "guided_decoding_backend": "xgrammar",
         "guided_whitespace_pattern": None, "guided_json": None},
        {"regex": REGEX},
    ),
    "a text and a regex": (
        {"response_format": {"type": "text"}, "guided_regex": REGEX}, {"regex": REGEX}
    ),
}
# fmt: on


@pytest.mark.parametrize(("fields", "options"), FIELDS.values(), ids=FIELDS)
def test_texts_are_those_of_the_engine_streamed_or_not(fields, options, server, tiny):
    sampling = {"seed": 3, "n": 2, "max_tokens": 14, "logprobs": 2}
    body = {"prompt": PROMPT} | sampling | fields
    expected = computed(tiny, PROMPT, **sampling, **options)
    choices = server.complete(**body)["choices"]
    assert choices_of(server.ask(COMPLETIONS, body | {"stream": True})) == choices
    assert told(choices) == texts_of(expected)
    for choice, completion in zip(choices, expected, strict=True):
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(completion.logprobs, rel=1e-4)


def test_texts_match(server):
    """The forms themselves, without the engine."""
    many = {"prompt": PROMPT, "n": 10, "max_tokens": 60}
    for choice in server.complete(**many, guided_choice=CHOICES)["choices"]:
        assert choice["text"] in CHOICES
        assert choice["finish_reason"] == "stop"
    for choice in server.complete(**many, structured_outputs={"regex": REGEX})["choices"]:
        assert re.fullmatch(REGEX, choice["text"], re.ASCII)
    for choice in server.complete(**many, response_format=named(SCHEMA))["choices"]:
        if choice["finish_reason"] == "stop":
            person = json.loads(choice["text"])
            assert person.keys() == {"name", "age"}
            assert isinstance(person["age"], int)


def test_a_text_that_cannot_go_on_says_so(server):
    stuck = {"prompt": PROMPT, "guided_grammar": 'start: "a" X\nX: /b+/ & /c+/'}
    for answer in (server.ask(COMPLETIONS, stuck | {"stream": s}) for s in (False, True)):
        (choice,) = choices_of(answer)
        assert (choice["text"], choice["finish_reason"]) == ("a", "stuck")


@pytest.mark.parametrize("temperature", [0, 1])
def test_other_fields_go_with_a_constraint(temperature, server, tiny):
    fields = {"temperature": temperature, "stop": ["x"], "logit_bias": {"262": 3}, "top_k": 40}
    more = {"seed": 5, "repeat_penalty": 1.2, "max_tokens": 12, "ignore_eos": True, "n": 2}
    choices = server.complete(prompt=PROMPT, **fields, **more, guided_regex="[a-z ]+")["choices"]
    expected = computed(tiny, PROMPT, **fields, **more, regex="[a-z ]+")
    assert told(choices) == texts_of(expected)


def test_an_echo_and_the_best_may_be_constrained(server):
    fields = {"prompt": PROMPT, "seed": 1, "guided_regex": REGEX, "echo": True}
    (choice,) = server.complete(**fields, best_of=3, max_tokens=30)["choices"]
    assert re.fullmatch(PROMPT + REGEX, choice["text"])
    (choice,) = server.complete(**fields, max_tokens=0, logprobs=1)["choices"]
    assert choice["text"] == PROMPT


# --- company -------------------------------------------------------------------------------------


def test_a_text_is_the_same_in_company(server, tiny):
    """Of texts that are constrained, and others."""
    bodies, expected = [], []
    for index in range(2 * len(FIELDS)):
        fields, options = [*FIELDS.values()][index // 2] if index % 2 else ({}, {})
        sampling = {"seed": index, "max_tokens": 8 + index % 5 * 8}
        expected.append(texts_of(computed(tiny, PROMPT, **sampling, **options)))
        bodies.append({"prompt": PROMPT, "stream": index % 3 == 0} | sampling | fields)
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda body: server.ask(COMPLETIONS, body), bodies)
        assert [told(choices_of(answer)) for answer in answers] == expected
    server.wait_until_idle()


def test_a_schema_that_takes_long_holds_nobody_up(server):
    """A second to compile, in which others have their answers."""
    patterns = {f"^p{index}x.*y": {"type": "string"} for index in range(160)}
    large = {"type": "object", "patternProperties": patterns}
    expected = server.complete(prompt=PROMPT, seed=1)["choices"]
    with server.begin(prompt=PROMPT, seed=1, guided_json=large) as slow:
        assert server.ask("/health").status == 200
        assert server.complete(prompt=PROMPT, seed=1)["choices"] == expected
        readable, _, _ = select.select([slow], [], [], 0)
        assert not readable
        assert answer_on(slow).status == 200


# --- refusals ------------------------------------------------------------------------------------

DEEP = json.loads('{"items":' * 200 + "{}" + "}" * 200)
# fmt: off
BAD = [
    ({"guided_regex": "(a"}, "guided_regex", "at character 1: unclosed group"),
    ({"guided_regex": "(?=a)"}, "guided_regex", "look-around"),
    ({"guided_regex": "\ud800"}, "guided_regex", "not valid Unicode at character 1"),
    ({"guided_regex": ""}, "guided_regex", "must not be empty"),
    ({"guided_regex": 3}, "guided_regex", "must be a string, not 3"),
    ({"guided_regex": False}, "guided_regex", "must be a string, not false"),
    ({"guided_regex": [" a"]}, "guided_regex", "must be a string"),
    ({"guided_regex": r"[^\s\S]"}, "guided_regex", "must match some text"),
    ({"guided_json": {"type": 3}}, "guided_json", "not valid as a JSON schema"),
    ({"guided_json": {"properties": {"a": {"type": "x"}}}}, "guided_json", "at #/properties/a"),
    ({"guided_json": {"$ref": "http://192.0.2.1/x"}}, "guided_json", "refers to http://192.0.2.1/x"),
    ({"guided_json": {"$ref": "file:///etc/passwd"}}, "guided_json", "only references within it"),
    ({"guided_json": {"$ref": "#/$defs/no"}}, "guided_json", "'/$defs/no' does not exist"),
    ({"guided_json": "{"}, "guided_json", "must be JSON"),
    ({"guided_json": ""}, "guided_json", "must not be empty"),
    ({"guided_json": [1]}, "guided_json", "must be a JSON schema, not [1]"),
    ({"guided_json": DEEP}, "guided_json", "recursion limit exceeded"),
    ({"guided_json": {"x-guidance": {"key_separator": "n*n"}}}, "guided_json",
     "':' with white space as key_separator"),
    ({"guided_choice": []}, "guided_choice", "must not be empty"),
    ({"guided_choice": [""]}, "guided_choice", "not empty"),
    ({"guided_choice": [1]}, "guided_choice", "must be a string or a list of strings"),
    ({"guided_choice": ["\udfff"]}, "guided_choice", "not valid Unicode"),
    ({"guided_grammar": "a: b"}, "guided_grammar", "start"),
    ({"guided_grammar": 'start: "a'}, "guided_grammar", "at line 1, column"),
    ({"guided_grammar": 'root ::= yes | "no"'}, "guided_grammar", "Rule 'yes' not found"),
    ({"guided_grammar": {}}, "guided_grammar", "must be a string"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "leave it out"),
    ({"guided_nope": "x"}, "guided_nope", "no such field"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "at character 1"),
    ({"structured_outputs": {"json": {"type": 3}}}, "structured_outputs.json", "JSON schema"),
    ({"structured_outputs": {}}, "structured_outputs", "with one of json, regex, choice, grammar"),
    ({"structured_outputs": {"json": None}}, "structured_outputs", "with one of json"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "with one of json"),
    ({"structured_outputs": "yes"}, "structured_outputs", "must be an object"),
    ({"structured_outputs": [REGEX]}, "structured_outputs", "must be an object"),
    *(
        ({"structured_outputs": {"regex": "a", name: value}}, f"structured_outputs.{name}",
         "is not known here")
        for name, value in {
            "disable_any_whitespace": True, "disable_additional_properties": True,
            "whitespace_pattern": " ", "structural_tag": "{}", "nope": 1, "json_object": 1,
        }.items()
    ),
    ({"response_format": {"type": "regex", "pattern": "a"}}, "response_format", "must be {"),
    ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format", "must be {"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "must be {"),
    ({"response_format": {"type": "json_schema", "json_schema": 3}}, "response_format", "must be"),
    ({"response_format": named(None)}, "response_format", "must be {"),
    ({"response_format": named(True)}, "response_format", "must be {"),
    ({"response_format": named("{}")}, "response_format", "must be {"),
    ({"response_format": named({"type": 3})}, "response_format", "not valid as a JSON schema"),
    ({"response_format": {"type": "json_object", "schema": 3}}, "response_format", "must be {"),
    ({"response_format": {"type": ["text"]}}, "response_format", "must be {"),
    ({"response_format": {}}, "response_format", "must be {"),
    ({"response_format": "json_object"}, "response_format", "must be {"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice",
     "must be the only constraint of a text"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex",
     "must be the only constraint of a text"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice",
     "must be the only constraint of a text"),
]
# fmt: on


@pytest.mark.parametrize(
    ("fields", "param", "says"), BAD, ids=lambda value: repr(value)[:50].replace("\\", "/")
)
def test_what_is_not_valid_is_refused_with_its_field(fields, param, says, server):
    error = server.ask(COMPLETIONS, {"prompt": PROMPT} | fields).error(400)
    assert error["param"] == param
    assert says in error["message"]
    assert len(error["message"]) < 500


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "a" * 2_000_001},
        {"guided_json": {"description": "a" * 2_000_001}},
        {"guided_grammar": "start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(6000))},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_is_too_large_is_refused(fields, server):
    error = server.ask(COMPLETIONS, {"prompt": PROMPT} | fields).error(400)
    assert error["param"] == next(iter(fields))
    assert "must have at most" in error["message"]


def test_there_is_no_chat_with_a_format_either(server):
    body = {"messages": [{"role": "user", "content": "Hi"}], "response_format": named(SCHEMA)}
    assert "cannot chat" in server.ask("/v1/chat/completions", body).error(404)["message"]
