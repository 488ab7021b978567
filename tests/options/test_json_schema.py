"""Schemas are rewritten so that the same values fit them, and more of them can be read."""

import json

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpt_cli.errors import InputError
from gpt_cli.options.json_schema import rewritten
from gpt_cli.options.request import Options

pytest.importorskip("llguidance", reason="the extra constrain is not installed")


def tagged(tag, **more):
    """Return the schema of an object with a tag."""
    return {"type": "object", "properties": {"tag": {"const": tag}, **more}, "required": ["tag"]}


DEFINITIONS = {
    "a": tagged("a"),
    "b": {"allOf": [tagged("b"), {"properties": {"n": {"type": "integer"}}}]},
    "either": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]},
    "word": {"type": "string"},
    "a/b~c": {"enum": ["x", "y"]},
}
A, B, A_OR_B, WORD = ({"$ref": f"#/$defs/{name}"} for name in ("a", "b", "either", "word"))
NULL = {"type": "null"}


@pytest.mark.parametrize(
    "branches",
    [
        [A, NULL],
        [NULL, A, B],
        [A_OR_B, NULL, WORD],
        [{"$ref": "#/$defs/%65ither"}, {"$ref": "#/$defs/a~1b~0c"}],
        [{"const": 1}, {"const": 2}, {"enum": [3, "x"]}],
        [{"type": "integer"}, {"type": ["string", "boolean"]}],
        [{"type": "number"}, {"enum": [True, "1"]}],
        [{"const": 1.5}, {"type": "integer"}],
        [tagged("a"), {"properties": {"tag": {"const": "b"}}, "type": "object"}],
        [tagged("a"), {"type": "object", "properties": {}, "additionalProperties": False}],
        [tagged("a"), {"type": "object", "properties": {"tag": False}}],
        [tagged("a", n={"$ref": "#"}), tagged("b", n={"$ref": "#"})],
        [{"allOf": [{"type": ["string", "null"]}, {"type": ["null", "array"]}]}, {"minimum": 1,
         "type": "number"}],
        [{"type": "integer"}, False],
        [{"type": "integer"}],
    ],
)  # fmt: skip
def test_branches_without_a_common_value_become_any_of(branches):
    schema = {"$defs": DEFINITIONS, "properties": {"x": {"oneOf": branches}}}
    new = rewritten(schema)
    assert new == schema | {"properties": {"x": {"anyOf": branches}}}
    Options(json_schema=schema).validate()


@pytest.mark.parametrize(
    "branches",
    [
        [{"required": ["a"]}, {"required": ["b"]}],  # {"a": 1, "b": 1}
        [{"type": "object", "required": ["a"]}, {"type": "object", "required": ["b"]}],
        [{"type": "integer"}, {"type": "number"}],
        [{"const": 1}, {"const": 1.0}],
        [{"const": [1, {"a": 2}]}, {"enum": [[1.0, {"a": 2.0}]]}],
        [A, A_OR_B],
        [A, {"$ref": "https://example.com/schema"}],
        [A, {"$ref": "#anchor"}],
        [A, {"$ref": "#/$defs/none"}],
        [{"properties": {"tag": {"const": 1}}}, {"properties": {"tag": {"const": 2}}}],  # {}
        # Of another type, the tag says nothing.
        [{"properties": {"tag": {"const": 1}}, "required": ["tag"]},
         {"properties": {"tag": {"const": 2}}, "required": ["tag"]}],
        [tagged("a"), {"type": "object", "patternProperties": {"tag": {}},
                       "additionalProperties": False}],
        [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "b"}],
        [{"type": "array", "items": {"type": "null"}}, {"type": "array", "items": WORD}],  # []
    ],
)  # fmt: skip
def test_branches_that_may_have_a_common_value_stay(branches):
    schema = {"$defs": DEFINITIONS, "oneOf": branches}
    assert rewritten(schema) == schema
    with pytest.raises(InputError):
        Options(json_schema=schema).validate()


def test_what_is_beside_one_of_counts():
    branches = [{"properties": {"tag": {"const": tag}}} for tag in "ab"]
    schema = {"type": "object", "required": ["tag"], "oneOf": branches}
    assert rewritten(schema)["anyOf"] == branches
    both = schema | {"anyOf": [{"required": ["x"]}], "allOf": [{}]}
    assert rewritten(both) == {
        "type": "object", "required": ["tag"], "anyOf": [{"required": ["x"]}],
        "allOf": [{}, {"anyOf": branches}],
    }  # fmt: skip


def test_names_and_values_are_no_keywords():
    one_of = [{"type": "integer"}, {"type": "null"}]
    for schema in (
        {"properties": {"oneOf": {"type": "integer"}, "$ref": {"type": "null"}}},
        {"enum": [{"oneOf": one_of}], "default": {"oneOf": one_of}},
        {"const": {"$ref": "#"}},
    ):
        assert rewritten(schema) == schema


# --- what no finite value fits -------------------------------------------------------------------

ENDLESS = {"type": "object", "properties": {"next": {"$ref": "#/$defs/endless"}}}
ENDLESS["required"] = ["next"]


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/endless", "$defs": {"endless": ENDLESS}},
        {"$ref": "#/$defs/x", "$defs": {"endless": ENDLESS, "x": {"anyOf": [
            {"$ref": "#/$defs/x"}, {"$ref": "#/$defs/endless"}
        ]}}},
    ],
)  # fmt: skip
def test_a_value_without_end_is_refused(schema):
    with pytest.raises(InputError, match="json_schema fits no value: a reference leads back"):
        Options(json_schema=schema).validate()


def test_a_way_that_has_no_end_is_not_taken():
    schema = {
        "$defs": {"endless": ENDLESS},
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/endless"}},
        "additionalProperties": False,
    }
    assert rewritten(schema)["properties"] == {"a": {"type": "integer"}, "b": False}
    with pytest.raises(InputError, match="'b' is unsatisfiable"):
        Options(json_schema=schema | {"required": ["b"]}).validate()


def test_a_value_that_may_contain_itself_stays():
    tree = {"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}}
    either = {"anyOf": [NULL, tree | {"required": ["left"]}]}
    for schema in (tree, either):
        assert rewritten(schema) == schema


# --- patterns of names ---------------------------------------------------------------------------


def closed(**more):
    return {"type": "object", "additionalProperties": False} | more


@pytest.mark.parametrize(
    ("pattern", "names"), [("^a$", "a"), ("^(a|b)$", "ab"), ("^b?a?$", ["a", "b", "ba", ""])]
)
def test_a_pattern_that_matches_no_other_name_is_a_part_of_these(pattern, names, tiny):
    integer = {"type": "integer", "maximum": 9}
    schema = closed(
        properties={"a": {"minimum": 5}},
        required=[*names],
        patternProperties={pattern: integer, "^x+$": {"type": "boolean"}},
    )
    new = rewritten(schema)
    assert [*new["patternProperties"]] == ["^x+$"]
    assert {*new["properties"]} == {*names}
    for value in (dict.fromkeys(names, 7), dict.fromkeys(names, 3), {"a": "x"}, {"c": 1}):
        assert is_valid(new, value) == is_valid(schema, value)
    for done in tiny.generate(["Say:\n"] * 5, json_schema=schema, seed=1, max_tokens=99):
        assert done.finish_reason in ("complete", "length")
        if done.finish_reason == "complete":
            assert is_valid(schema, json.loads(done.text))


@pytest.mark.parametrize(
    "schema",
    [
        closed(properties={"a": {}}, patternProperties={"^[ab]$": {}}),
        closed(properties={"a": {}}, patternProperties={"a": {}}),
        closed(properties={}, patternProperties={"^a$": {}}),
        closed(properties={"a": {}}, patternProperties={"(": {}}),
    ],
)
def test_other_patterns_stay(schema):
    assert rewritten(schema) == schema


# --- any schema ----------------------------------------------------------------------------------


def is_valid(schema, value):
    return jsonschema.Draft202012Validator(schema).is_valid(value)


names = st.sampled_from("abc")
values = st.recursive(
    st.sampled_from([None, True, False, 0, 1, 1.0, 1.5, "a", "b"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=2),
    max_leaves=4,
)
TYPES = ["null", "boolean", "integer", "number", "string", "array", "object"]
simple_schemas = st.one_of(
    st.booleans(),
    st.builds(lambda value: {"const": value}, values),
    st.builds(lambda some: {"enum": some}, st.lists(values, min_size=1, max_size=3)),
    st.builds(lambda some: {"type": some}, st.sampled_from(TYPES) | st.lists(st.sampled_from(TYPES),
              min_size=1, max_size=3, unique=True)),
)  # fmt: skip


def larger(inner):
    some = st.lists(inner, min_size=1, max_size=3)
    return st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["object", ["object", "null"]]),
            "properties": st.dictionaries(names, inner, max_size=2),
            "required": st.lists(names, max_size=2, unique=True),
            "additionalProperties": inner,
            "patternProperties": st.dictionaries(
                st.sampled_from(["^a$", "^[ab]$", "b"]), inner, max_size=1
            ),
            "oneOf": some,
            "anyOf": some,
            "allOf": some,
            "items": inner,
        },
    )


references = st.builds(lambda name: {"$ref": f"#/$defs/{name}"}, names)
schemas = st.recursive(simple_schemas | references, larger, max_leaves=8)
# A definition leads to others only by properties: jsonschema cannot read any other circle.
definitions = st.fixed_dictionaries(
    dict.fromkeys(
        "abc",
        st.builds(
            lambda part, links, required: {
                "allOf": [part, {"properties": links, "required": required}]
            },
            st.recursive(simple_schemas, larger, max_leaves=4),
            st.dictionaries(names, references, max_size=2),
            st.lists(names, max_size=1),
        ),
    )
)


@given(
    root=larger(schemas),
    definitions=definitions,
    some=st.lists(values, min_size=5, max_size=10),
)
@example(
    root={"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]},
    definitions={"a": {"$ref": "#/$defs/b"}, "b": {"type": "array"}, "c": True},
    some=[None, [], 1],
)
@settings(max_examples=3 * settings.default.max_examples)
def test_the_same_values_fit(root, definitions, some):
    schema = root | {"$defs": definitions}
    new = rewritten(schema)
    for value in some:
        assert is_valid(new, value) == is_valid(schema, value)
