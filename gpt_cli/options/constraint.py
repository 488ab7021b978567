"""Constraints: a regular expression, a JSON schema, a grammar or choices that a text must match.

llguidance compiles them all to one kind of grammar; `generation.matcher` follows it token by token.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeAlias, TypeVar

from gpt_cli.errors import ResourceError
from gpt_cli.options.declare import OptionError
from gpt_cli.system.machine import within

T = TypeVar("T")
Kind: TypeAlias = Literal["regex", "json_schema", "grammar", "choices"]

CACHED = 8  # constraints; one of 1 MB takes 60 MB
_LARGEST = 2_000_000  # characters
_MOST_RULES = 5000  # and brackets of a grammar; llguidance needs up to 10 KB of its stack for each
_MOST_LEVELS = 10_000  # of a schema, if each reference leads to another one; the same
_MOST_SYMBOLS = 20_000  # of a grammar; time and memory grow with the square, here to 0.5 GB
_STACK = 64 << 20  # bytes
SECONDS = 10  # a grammar may take years
_SEARCHED = 10_000  # characters of a schema in which the place of an error is looked for
_NAMES: dict[Kind, str] = {
    "regex": "a regular expression",
    "json_schema": "a JSON schema",
    "grammar": "a Lark grammar",
    "choices": "a list of choices",
}


@dataclass(frozen=True)
class Constraint:
    """What a text must match as a whole."""

    kind: Kind  # the name of the option
    text: str  # of choices, a JSON list

    @property
    def grammar(self) -> str:
        """Return llguidance's grammar.

        Raises:
            OptionError: the constraint is not valid; the message names the place in it.
            ResourceError: llguidance is not installed.
        """
        return _grammar(self)

    def error(self, message: str) -> OptionError:
        """Return the error for a message of llguidance, which may have many lines."""
        place, complaint = _EXPLAIN[self.kind](self.text, message)
        for pattern, clearer in _CLEARER.items():
            complaint = re.sub(pattern, clearer, complaint)
        first = complaint.strip().partition("\n")[0]
        return OptionError(self.kind, f"is not valid as {_NAMES[self.kind]}{place}: {first:.500}")


def import_llguidance() -> Any:
    """Return the package llguidance.

    Raises:
        ResourceError: it is not installed.
    """
    try:
        import llguidance
    except ImportError as error:
        raise ResourceError(
            f"a constraint needs llguidance ({error}): pip install llguidance"
        ) from None
    return llguidance


def with_stack(kind: Kind, function: Callable[[], T]) -> T:
    """Call a function of llguidance, which recurses, in a thread with a large stack.

    Raises:
        OptionError: it takes too long, or has a bug.
    """

    def call() -> T:
        try:
            return function()
        except Exception:
            raise
        except BaseException as error:  # a panic in Rust
            complaint = f"fails in llguidance: write it in another way ({error})"
            raise OptionError(kind, complaint) from None

    try:
        return within(SECONDS, call, _STACK)
    except TimeoutError:
        message = f"takes more than {SECONDS} seconds to compile: make it simpler"
        raise OptionError(kind, message) from None


@lru_cache(CACHED)
def _grammar(constraint: Constraint) -> str:
    kind, text = constraint.kind, constraint.text
    if len(text) > _LARGEST:
        raise OptionError(kind, f"must have at most {_LARGEST:,} characters, not {len(text):,}")
    if kind == "grammar" and sum(map(text.count, ":([")) > _MOST_RULES:
        raise OptionError(kind, f"must have at most {_MOST_RULES:,} rules and brackets")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OptionError(kind, f"is not valid Unicode at character {error.start + 1}") from None
    return with_stack(kind, lambda: _compiled(constraint))


def _compiled(constraint: Constraint) -> str:
    llguidance = import_llguidance()
    grammar = _BUILD[constraint.kind](constraint.text)
    limits = llguidance.LLParserLimits(max_grammar_size=_MOST_SYMBOLS)
    if message := llguidance.LLMatcher.validate_grammar(grammar, limits=limits):
        raise constraint.error(message)
    return grammar


# --- the grammar of each kind -----------------------------------------------------------------


def _of_regex(text: str) -> str:
    r"""Return the grammar of a regular expression, in which \d is a digit from 0 to 9."""
    llguidance = import_llguidance()
    as_given = llguidance.LLMatcher.grammar_from_regex(text)
    if llguidance.LLMatcher.validate_grammar(as_given):
        return as_given  # with the error
    return _of_lark(f"start: /{llguidance.regex_to_lark(text, 'd')}/")


def _of_json_schema(text: str) -> str:
    """Return the grammar of a schema, for JSON in the form of Python's `json.dumps`.

    With any white space, a model may draw line ends without end. A schema can ask for it, or for
    another form, in "x-guidance".
    """
    form = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
    try:
        schema = json.loads(text)
        if not isinstance(schema, dict):
            raise OptionError("json_schema", "must be a JSON object, such as {}")
        _check_form(schema.get("x-guidance"))
        references, depth = json.dumps(schema).count('"$ref": '), _depth(schema)
        if references * depth > _MOST_LEVELS:
            shown = f"{references} of them in a schema of {depth} levels"
            raise OptionError("json_schema", f"must have fewer references: {shown} are too many")
        # Unlike Python, it refuses NaN.
        return import_llguidance().LLMatcher.grammar_from_json_schema(text, defaults=form)
    except (ValueError, RecursionError) as error:
        raise OptionError("json_schema", f"must be JSON: {error}") from None


def _depth(value: Any) -> int:
    """Return how many values of JSON lie in one another."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(_depth, inner), default=0)


def _check_form(form: Any) -> None:
    """Raise OptionError unless a form of JSON is JSON; see `_of_grammar` for what else may be."""
    if isinstance(form, dict):
        signs = {"key_separator": ":", "item_separator": ",", "whitespace_pattern": ""}
        for name, sign in signs.items():
            if form.get(name) is not None and str(form[name]).strip(" \t\r\n") != sign:
                shown = f"{sign!r} with white space" if sign else "white space"
                raise OptionError("json_schema", f"must have {shown} as {name} in x-guidance")


def _of_grammar(text: str) -> str:
    """Return a grammar whose texts may go on in any tokens.

    llguidance would find the text that must follow, to have it in the tokenizer's own tokens, but
    that text may have no end: after `A A` with `A: /y*y/`, for which the first A has taken all.
    """
    return _of_lark(f'{text}\n%llguidance {{"no_forcing": true}}')


def _of_lark(text: str) -> str:
    return import_llguidance().LLMatcher.grammar_from_lark(text)


def _of_choices(text: str) -> str:
    either = " | ".join(map(json.dumps, json.loads(text)))
    return _of_lark(f"start: CHOICE\nCHOICE: {either}")


_BUILD: dict[Kind, Callable[[str], str]] = {
    "regex": _of_regex,
    "json_schema": _of_json_schema,
    "grammar": _of_grammar,
    "choices": _of_choices,
}


# --- what llguidance's messages say, and where ------------------------------------------------

_CLEARER = {  # parts of a message, and what replaces them
    r"regex parse error:\n *(.*)\n.*\nerror: ": r"in /\1/: ",
    r"lookarounds not supported yet; Word.*": r"\\b, \\B, \\< and \\> are not supported",
    r"lookarounds not supported yet; .*": "^ and $ are only supported at its ends, without (?m)",
    "schema must be an object or boolean": 'a schema is an object, such as {"type": "string"}',
    r"Unimplemented keys: .*": r'\g<0>; "x-guidance": {"lenient": true} at the top ignores them',
    "Enable 'coerce_one_of'.*": '"x-guidance": {"coerce_one_of": true} at the top takes anyOf',
    r"lexer error": 'unexpected character; texts are in "...", regular expressions in /.../',
}


def _explain_regex(text: str, message: str) -> tuple[str, str]:
    found = re.search(r"parse error:\n    (.*)\n    ( *)\^.*\nerror: (.*)", message)
    if not found:  # such as "... (in regex): lookarounds not supported yet; WordUnicode in ..."
        return "", message.rpartition("(in regex): ")[2]
    shown, spaces, complaint = found.groups()
    before = shown[: len(spaces)]
    # It is shown with \n for a line end, and with \/ for a slash.
    added = before.count("\\/") - text[: len(before)].count("\\/") + text[: len(before)].count("\n")
    return f" at character {len(before) - added + 1}", complaint


def _explain_grammar(text: str, message: str) -> tuple[str, str]:
    found = re.match(r"(?s)(?:at )?(\d+)\((\d+)\): (.*)", message)
    if not found:
        return "", "it is JSON" if text.lstrip().startswith("{") else message
    line, column, complaint = found.groups()
    if "::=" in text:  # of llama.cpp, which vLLM takes, too
        complaint = "a rule is written NAME: ..., the first start: ..., without ::="
    return f" at line {line}, column {column}", complaint


def _explain_schema(text: str, message: str) -> tuple[str, str]:
    complaint = message
    if found := re.match(r"Resource '(.*)' is not present", message):
        complaint = f"it refers to {found[1]}, and only references within it are followed"
    if len(text) > _SEARCHED:
        return "", complaint
    place = _place(json.loads(text), message)
    return (f" at {place}" if place else ""), complaint


def _place(schema: Any, message: str) -> str:
    """Return the JSON pointer of the smallest part of a schema that has the same error."""
    if not isinstance(schema, dict):
        return ""
    matcher = import_llguidance().LLMatcher
    shared = {name: schema[name] for name in ("$defs", "definitions", "$id") if name in schema}

    def search(part: Any, pointer: str) -> str:
        children: Iterator[tuple[Any, Any]] = iter(())
        if isinstance(part, dict):
            children = iter(part.items())
        elif isinstance(part, list):
            children = iter(enumerate(part))
        for key, child in children:
            escaped = str(key).replace("~", "~0").replace("/", "~1")
            if place := search(child, f"{pointer}/{escaped}"):
                return place
        if not isinstance(part, dict) or part is schema:
            return ""
        alone = matcher.grammar_from_json_schema(json.dumps(shared | part))
        return pointer if matcher.validate_grammar(alone) == message else ""

    return search(schema, "#")


_EXPLAIN: dict[Kind, Callable[[str, str], tuple[str, str]]] = {
    "regex": _explain_regex,
    "json_schema": _explain_schema,
    "grammar": _explain_grammar,
    "choices": _explain_grammar,
}
