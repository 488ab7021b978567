"""Constraints, each with a check of texts that is not by llguidance.

Where llguidance and the check understand a constraint differently, it is written so that they do
not. These are the differences that we know:

- A property of `patternProperties` and `additionalProperties` may come twice, and `json` keeps the
  last; so `minProperties` is at most 1.
- Python's first year is 1, and that of dates in JSON is 0.
- In a regular expression, `\\w` and `\\S` follow other tables of Unicode than Python's.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from functools import cache
from string import ascii_lowercase
from typing import Any

import jsonschema
import lark
import regex


@dataclass(frozen=True)
class Case:
    """A constraint.

    Attributes:
        options: of a row.
        accepts: whether a text matches it as a whole.
        begins: whether more text can make it match; of JSON, whether the text can become JSON.
    """

    options: dict[str, Any]
    accepts: Callable[[str], bool]
    begins: Callable[[str], bool]


def of_regex(pattern: str) -> Case:
    is_ascii = r"\d" in pattern  # in a constraint, a digit is ASCII, and white space is not

    def accepts(text: str) -> bool:
        return re.fullmatch(pattern, text, re.ASCII if is_ascii else 0) is not None

    def begins(text: str) -> bool:
        flags = regex.ASCII if is_ascii else 0
        return regex.fullmatch(pattern, text, flags, partial=True) is not None

    return Case({"regex": pattern}, accepts, begins)


def of_choices(*choices: str) -> Case:
    def begins(text: str) -> bool:
        return any(choice.startswith(text) for choice in choices)

    return Case({"choices": choices}, choices.__contains__, begins)


def of_grammar(grammar: str, reference: str | None = None) -> Case:
    """Return a grammar; Lark reads the reference, in which each terminal is one character."""
    parser = cache(lambda: lark.Lark(reference or grammar))

    def accepts(text: str) -> bool:
        try:
            parser().parse(text)
        except lark.UnexpectedInput:
            return False
        return True

    def begins(text: str) -> bool:
        try:
            parser().parse(text)
        except lark.UnexpectedEOF:
            return True
        except lark.UnexpectedInput:
            return False
        return True

    return Case({"grammar": grammar}, accepts, begins)


_JSON = of_grammar(r"""
    start: value
    value: object | array | string | number | name
    name: "t" "r" "u" "e" | "f" "a" "l" "s" "e" | "n" "u" "l" "l"
    object: "{" s "}" | "{" member ("," member)* "}"
    member: s string s ":" s value s
    array: "[" s "]" | "[" s value s ("," s value s)* "]"
    string: "\"" (/[^"\\\x00-\x1f]/ | "\\" /["\\\/bfnrt]/ | "\\" "u" HEX HEX HEX HEX)* "\""
    number: "-"? ("0" | /[1-9]/ DIGIT*) ("." DIGIT+)? (/[eE]/ /[+-]/? DIGIT+)?
    s: /[ \t\r\n]/*
    HEX: /[0-9a-fA-F]/
    DIGIT: /[0-9]/
""")


def _exact(number: str) -> Decimal | float:
    try:
        return Decimal(number)
    except InvalidOperation:  # its exponent has dozens of digits
        return float(number)


def of_schema(schema: Any) -> Case:
    """Return a JSON schema, which may be written already."""
    written = schema if isinstance(schema, str) else json.dumps(schema)
    exact = json.loads(written, parse_float=_exact)
    jsonschema.Draft202012Validator.check_schema(exact)
    formats = jsonschema.Draft202012Validator.FORMAT_CHECKER
    validator = jsonschema.Draft202012Validator(exact, format_checker=formats)

    def accepts(text: str) -> bool:
        return validator.is_valid(json.loads(text, parse_float=_exact))

    return Case({"json_schema": written}, accepts, _JSON.begins)


def an_object(required: list[str], **properties: Any) -> dict[str, Any]:
    """Return the schema of an object with these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def an_array(items: Any, least: int, most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
WORD = {"type": "string", "pattern": "^[a-z]{1,6}$"}


def no_empty_line(text: str) -> bool:
    return set(text) <= {*ascii_lowercase, " ", "\n"} and len(text) <= 20 and "\n\n" not in text


REGEXES = {
    "year": of_regex(r"\d{4}"),
    "date": of_regex(r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"),
    "words": of_regex(r"yes|no|maybe later"),
    "in either case": of_regex(r"(?i)yes|no( thanks)?"),
    "number": of_regex(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?"),
    "sentence": of_regex(r"[A-Z][a-z]*( [a-z]{1,8}){2,8}[.!?]"),
    "colour": of_regex(r"#[\da-fA-F]{6}"),
    "accents": of_regex(r"[éèêàç]{1,5}"),
    "emoji": of_regex(r"[😀-😏]{2,4}"),
    "ideographs": of_regex(r"[一-龥]{1,6}。"),
    "any line": of_regex(r".{0,12}"),
    "any characters": of_regex(r"(?s).{3,9}"),
    "quoted": of_regex(r'"([^"\\\n]|\\["\\n]){0,10}"'),
    "address": of_regex(r"((25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(25[0-5]|2[0-4]\d|1?\d?\d)"),
    "space": of_regex(r"[a-z]{1,5}\s[a-z]{1,5}"),
    "maybe nothing": of_regex(r"(ab|cd)*"),
}

CHOICES = {
    "beginnings": of_choices("yes", "yes, certainly", "no", "nothing", "n"),
    "unusual": of_choices("é", "éé", "日本", "日本語", "😀", 'say "\\n"\n', "a/b"),
}

SCHEMAS = {
    "person": of_schema(
        an_object(
            ["name", "address"],
            name=WORD,
            age={"type": "integer", "minimum": 0, "maximum": 120},
            address=an_object(["city"], city=WORD, zip={"type": "string", "pattern": r"^\d{5}$"}),
        )
    ),
    "array": of_schema(an_array(DIGIT, 2, 5)),
    "nested arrays": of_schema(an_array(an_array({"type": ["boolean", "null"]}, 0, 2), 1, 3)),
    "tuple": of_schema(
        {"type": "array", "prefixItems": [DIGIT, WORD], "items": {"const": "é"}, "maxItems": 4}
    ),
    "enum": of_schema({"enum": ["red", "redder", 1, 12, -1.5, None, True, {"a": [1, "b"]}, []]}),
    "unicode": of_schema({"enum": ["é", "日本語", "😀", 'a"b\\c\n', "\u2028", "\x7f"]}),
    "escapes": of_schema(r'{"enum": ["\ud83d\ude00\u00e9", "\uD83D\uDC68"]}'),
    "unicode keys": of_schema(an_object(["é"], **{"é": DIGIT, '"\\😀': DIGIT, "日/~": DIGIT})),
    "integers": of_schema({"type": "integer", "minimum": -20, "exclusiveMaximum": 305}),
    "multiples": of_schema({"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 1000}),
    "decimals": of_schema({"type": "number", "exclusiveMinimum": 0, "maximum": 1.25}),
    "numbers": of_schema({"type": "number"}),
    "quarters": of_schema({"type": "number", "multipleOf": 0.25, "minimum": -2, "maximum": 9}),
    "tree": of_schema(
        an_object(["value"], value=DIGIT, children=an_array({"$ref": "#"}, 0, 2)),
    ),
    "list": of_schema(
        {
            "$ref": "#/$defs/pair",
            "$defs": {
                "node": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/pair"}]},
                "pair": an_object(["head", "tail"], head=DIGIT, tail={"$ref": "#/$defs/node"}),
            },
        }
    ),
    "options": of_schema(an_object([], a=DIGIT, b={"type": "boolean"}, c={"type": "null"})),
    "other keys": of_schema(
        {
            "type": "object",
            "properties": {"id": DIGIT},
            "required": ["id"],
            "additionalProperties": {"type": "boolean"},
            "maxProperties": 2,
        }
    ),
    "keys by pattern": of_schema(
        {
            "type": "object",
            "patternProperties": {"^[a-z]{1,3}$": DIGIT, "^[A-Z]$": {"type": "boolean"}},
            "additionalProperties": False,
            "minProperties": 1,
            "maxProperties": 3,
        }
    ),
    "lengths": of_schema({"type": "string", "minLength": 2, "maxLength": 8}),
    "dates": of_schema(
        an_object(["on"], on={"type": "string", "format": "date", "pattern": "^[12]"})
    ),
    "uuid": of_schema({"type": "string", "format": "uuid"}),
    "any of": of_schema(
        {"anyOf": [an_object(["a"], a=DIGIT), an_object(["a", "b"], a=WORD, b=DIGIT), WORD]}
    ),
    "all of": of_schema(
        {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 40}, {"multipleOf": 3}]}
    ),
    "any JSON": of_schema({}),
}

GRAMMARS = {
    "parentheses": of_grammar('start: "(" start ")" | "x"'),
    "equally many": of_grammar('start: ("a" start "b")?'),
    "palindromes": of_grammar('start: "a" start "a" | "b" start "b" | "a" | "b" | "c"'),
    "sums": of_grammar(
        r"""
        start: term (("+" | "-") term)*
        term: factor (("*" | "/") factor)*
        factor: NUMBER | "(" start ")"
        NUMBER: /[0-9]{1,3}/
        """,
        r"""
        start: term (("+" | "-") term)*
        term: factor (("*" | "/") factor)*
        factor: DIGIT DIGIT? DIGIT? | "(" start ")"
        DIGIT: /[0-9]/
        """,
    ),
    "ambiguous sums": of_grammar('start: start "+" start | "1"'),
    "table": of_grammar(
        r"""
        start: row{1,3}
        row: CELL ("," CELL){0,2} "\n"
        CELL: /[a-z]{0,4}/ | "\"" /[^"]{0,4}/ "\""
        """,
        r"""
        start: row | row row | row row row
        row: cell ("," cell)~0..2 "\n"
        cell: LETTER~0..4 | "\"" OTHER~0..4 "\""
        LETTER: /[a-z]/
        OTHER: /[^"]/
        """,
    ),
    "lists": of_grammar(
        r"""
        start: "(" (item (" " item){0,3})? ")"
        item: SYMBOL | start
        SYMBOL: /[a-z][a-z0-9]{0,4}/
        """,
        r"""
        start: "(" (item (" " item)~0..3)? ")"
        item: LETTER OTHER~0..4 | start
        LETTER: /[a-z]/
        OTHER: /[a-z0-9]/
        """,
    ),
    "settings": of_grammar(
        r"""
        start: (KEY " "? "=" " "? value ";"){1,3}
        value: "true" | "false" | INT | "é" | "日本"
        KEY: /[a-z_]{1,8}/
        INT: "-"? /[0-9]{1,4}/
        """,
        r"""
        start: setting~1..3
        setting: LETTER~1..8 " "? "=" " "? value ";"
        value: "t" "r" "u" "e" | "f" "a" "l" "s" "e" | "-"? DIGIT~1..4 | "é" | "日" "本"
        LETTER: /[a-z_]/
        DIGIT: /[0-9]/
        """,
    ),
    "ignored spaces": of_grammar(
        r"""
        start: "[" INT ("," INT)? "]"
        INT: /[0-9]{1,2}/
        %ignore / /
        """,
        r"""
        start: s "[" s int s ("," s int s)? "]" s
        int: DIGIT DIGIT?
        DIGIT: /[0-9]/
        s: " "*
        """,
    ),
    "elements": of_grammar(
        r"""
        start: "<b>" inner "</b>" | "<i>" inner "</i>" | "<br>"
        inner: (start | TEXT){0,3}
        TEXT: /[^<>]{1,8}/
        """,
        r"""
        start: bold | italic | "<" "b" "r" ">"
        bold: "<" "b" ">" inner "<" "/" "b" ">"
        italic: "<" "i" ">" inner "<" "/" "i" ">"
        inner: part~0..3
        part: start | TEXT~1..8
        TEXT: /[^<>]/
        """,
    ),
    "without two line ends": Case(
        {"grammar": r"start: LINES" "\n" r"LINES: /[a-z \n]{0,20}/ & ~/(?s:.*)\n\n(?s:.*)/"},
        no_empty_line,
        no_empty_line,
    ),
}

CONSTRAINTS = {
    f"{kind}: {name}": case
    for kind, cases in (
        ("regex", REGEXES),
        ("choices", CHOICES),
        ("schema", SCHEMAS),
        ("grammar", GRAMMARS),
    )
    for name, case in cases.items()
}
