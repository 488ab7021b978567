"""Rewrite a JSON schema that llguidance refuses, or leads to a place where nothing fits.

- `oneOf` is `anyOf` if no value fits two of its branches, which llguidance sees only in types.
- A pattern in `patternProperties` that only matches names of `properties` or `required` becomes a
  part of theirs. llguidance would begin another property, for which no name is left.
- A reference to what no finite value fits, such as an object that requires itself, is `false`.
"""

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import combinations
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import unquote

if TYPE_CHECKING:
    from llguidance import LLTokenizer

Schema: TypeAlias = Any  # a dict or a bool; anything else is an error that llguidance finds

# The form of JSON: that of Python's `json.dumps`.
FORM: Any = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
# To find out what no value fits: parts that are looked at, and schemas within schemas. Beyond them,
# a value is taken to fit.
_MOST_STEPS = 200_000
_MOST_LEVELS = 50
_MOST_NAMES = 100  # of an object whose patterns are rewritten
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("const", "enum", "default", "examples")
_NUMBERS = frozenset({"integer", "fraction"})
_TYPES = _NUMBERS | {"null", "boolean", "string", "array", "object"}


def rewritten(root: dict[str, Any]) -> Schema:
    """Return a schema that the same values fit; `false` if none does."""
    return _Rewriting(root).of(root)


class _Rewriting:
    """The rewriting of a schema and of what it refers to."""

    def __init__(self, root: dict[str, Any]):
        self._root = root
        self._steps = 0
        self._asked: list[frozenset[int]] = []  # the ids of parts, from the outermost question on
        self._parts_of: dict[tuple[int, tuple[str, ...]], dict[str, Any]] = {}  # see `_without`
        self._endless: dict[str, bool] = {}  # by reference

    def of(self, schema: Any) -> Any:
        """Return a schema, or any part of it, rewritten."""
        if isinstance(schema, list):
            return [self.of(item) for item in schema]
        if not isinstance(schema, dict):
            return schema
        if self._is_endless(schema):
            return False
        new: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
                new[key] = {name: self.of(inner) for name, inner in value.items()}
            else:
                new[key] = value if key in _VALUES else self.of(value)
        if self._has_exclusive_branches(schema):
            branches = new.pop("oneOf")
            key = "allOf" if "anyOf" in new else "anyOf"
            new[key] = [*new.get("allOf", []), {"anyOf": branches}] if key == "allOf" else branches
        return _without_patterns_of_names(new)

    def _is_endless(self, schema: dict[str, Any]) -> bool:
        """Return whether a schema is a reference to what no finite value fits."""
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return False
        if reference not in self._endless:
            self._endless[reference] = self._is_empty([self._target(reference)])
        return self._endless[reference]

    def _has_exclusive_branches(self, schema: dict[str, Any]) -> bool:
        """Return whether a schema has `oneOf`, and no value fits two of its branches."""
        branches = schema.get("oneOf")
        if not isinstance(branches, list):
            return False
        others = self._without(schema, "oneOf")
        return all(self._is_empty([others, *pair]) for pair in combinations(branches, 2))

    def _is_empty(self, schemas: Sequence[Schema]) -> bool:
        """Return whether it is certain that no finite value fits all schemas."""
        parts = list(self._parts(schemas))
        key = frozenset(map(id, parts))
        if False in parts or key in self._asked:  # a value would contain itself
            return True
        self._steps += len(parts)
        if self._steps > _MOST_STEPS or len(self._asked) == _MOST_LEVELS:
            return False
        self._asked.append(key)
        try:
            return self._has_no_value(parts)
        finally:
            self._asked.pop()

    def _parts(self, schemas: Sequence[Schema]) -> Iterator[Schema]:
        """Yield all schemas that a value must fit: these, those that they refer to, and allOf.

        None of them refers to others, or has allOf.
        """
        waiting = list(schemas)
        known = set()
        while waiting:
            schema = waiting.pop()
            if id(schema) in known or schema is True:
                continue
            known.add(id(schema))
            if schema is False:
                yield False
            elif isinstance(schema, dict):
                yield self._without(schema, "$ref", "allOf")
                waiting.append(self._target(schema.get("$ref")))
                all_of = schema.get("allOf")
                waiting += all_of if isinstance(all_of, list) else []

    def _target(self, reference: Any) -> Schema:
        """Return the schema that a reference names; True, which anything fits, if not known."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return True
        target: Any = self._root
        for key in unquote(reference[1:]).split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and key.isdecimal() and int(key) < len(target):
                target = target[int(key)]
            elif isinstance(target, dict) and key in target:
                target = target[key]
            else:
                return True
        return target if reference in ("#", "") or "/" in reference else True

    def _has_no_value(self, parts: Sequence[dict[str, Any]]) -> bool:
        types = frozenset.intersection(*(_types(part) for part in parts), _TYPES)
        values = [_values(part) for part in parts if "const" in part or "enum" in part]
        if values:
            types &= {type for type, _ in frozenset.intersection(*values)}
        if not types:
            return True
        for part in parts:
            others = [other for other in parts if other is not part]
            for key in ("anyOf", "oneOf"):
                branches = part.get(key)
                if isinstance(branches, list):
                    rest = [*others, self._without(part, key)]
                    if all(self._is_empty([*rest, branch]) for branch in branches):
                        return True
        names = {name for part in parts for name in _strings(part.get("required"))}
        return types == {"object"} and any(
            self._is_empty([_property(part, name) for part in parts]) for name in sorted(names)
        )

    def _without(self, schema: dict[str, Any], *keys: str) -> dict[str, Any]:
        """Return a schema without some keys: the same object each time."""
        if not schema.keys() & {*keys}:
            return schema
        known = self._parts_of
        if (id(schema), keys) not in known:
            part = {key: value for key, value in schema.items() if key not in keys}
            known[id(schema), keys] = part
        return known[id(schema), keys]


def _types(part: dict[str, Any]) -> frozenset[str]:
    """Return the types that a schema allows; a number is an integer or a fraction."""
    names = part.get("type", [*_TYPES])
    names = {names} if isinstance(names, str) else {*_strings(names)}
    if not names <= _TYPES | {"number"}:  # an error that llguidance finds
        return _TYPES
    return frozenset(names | _NUMBERS if "number" in names else names)


def _values(part: dict[str, Any]) -> frozenset[tuple[str, Any]]:
    """Return the values that `const` and `enum` of a schema allow."""
    enum = part.get("enum")
    values = [frozenset(map(_frozen, enum))] if isinstance(enum, list) else []
    if "const" in part:
        values.append(frozenset({_frozen(part["const"])}))
    return frozenset.intersection(*values) if values else frozenset()


def _frozen(value: Any) -> tuple[str, Any]:
    """Return the type of a JSON value, and the value in a form that can be compared."""
    match value:
        case None | bool():
            return ("null" if value is None else "boolean"), value
        case int() | float():
            return ("integer" if value % 1 == 0 else "fraction"), value
        case str():
            return "string", value
        case list():
            return "array", tuple(map(_frozen, value))
    return "object", frozenset((name, _frozen(inner)) for name, inner in value.items())


def _strings(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _property(part: dict[str, Any], name: str) -> Schema:
    """Return what a schema demands of a property; True if that is not known."""
    properties = part.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    return True if "patternProperties" in part else part.get("additionalProperties", True)


# --- patterns of names ---------------------------------------------------------------------------


def _without_patterns_of_names(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose patterns match names besides those that it has."""
    patterns = schema.get("patternProperties")
    properties = schema.get("properties", {})
    if not isinstance(patterns, dict) or not isinstance(properties, dict):
        return schema
    names = [*dict.fromkeys([*properties, *_strings(schema.get("required"))])]
    if not names or len(names) > _MOST_NAMES:
        return schema
    properties = dict(properties)
    left = {}
    for pattern, inner in patterns.items():
        if _matches_more(pattern, names):
            left[pattern] = inner
            continue
        for name in names:
            if _matches_more(pattern, [other for other in names if other != name]):
                properties[name] = {"allOf": [properties.get(name, True), inner]}
    return schema | {"properties": properties, "patternProperties": left}


def _matches_more(pattern: str, names: Sequence[str]) -> bool:
    """Return whether a pattern matches a name that is not one of these: llguidance finds out.

    That is whether a property may follow in an object that has all these.
    """
    from llguidance import LLMatcher

    any_value = {"const": 0}
    schema = {
        "type": "object",
        "properties": dict.fromkeys(names, any_value),
        "required": names,
        "patternProperties": {pattern: any_value},
        "additionalProperties": False,
    }
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=FORM)
    matcher = LLMatcher(_bytes_as_tokens(), grammar, log_level=0)
    text = "{" + "".join(f"{json.dumps(name, ensure_ascii=False)}: 0, " for name in names)
    if not matcher.consume_tokens(list(text.encode())):
        return True  # it is not valid, which the whole schema will say
    quote = ord('"')
    return bool(matcher.compute_bitmask()[quote // 8] >> quote % 8 & 1)


@lru_cache(1)
def _bytes_as_tokens() -> "LLTokenizer":
    from llguidance import LLTokenizer

    return LLTokenizer("byte")
