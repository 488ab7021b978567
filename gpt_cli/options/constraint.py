"""Constraints: a regular expression, a JSON schema, a grammar or choices that a text must match.

llguidance compiles them all to one kind of grammar; `generation.matcher` follows it token by token.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any, Literal, TypeAlias, TypeVar

from gpt_cli.errors import counted, import_extra
from gpt_cli.options.declare import OptionError
from gpt_cli.options.gbnf import is_gbnf, to_lark
from gpt_cli.options.json_schema import FORM, rewritten
from gpt_cli.system.machine import within

T = TypeVar("T")
ConstraintKind: TypeAlias = Literal["regex", "json_schema", "grammar", "choices"]

CACHED = 8  # constraints; one of 1 MB takes 60 MB
_LARGEST = 2_000_000  # characters
_MOST_RULES = 5000  # and brackets of a grammar; one takes up to 10 KB of llguidance's stack
_MOST_LEVELS = 10_000  # of a schema if every reference leads to the next; for the same reason
_MOST_SYMBOLS = 20_000  # of a grammar; time and memory grow with the square, here to 0.5 GB
_STACK = 64 << 20  # bytes
SECONDS = 10  # a grammar could take years
_SEARCHED = 10_000  # characters of the largest schema in which the position of an error is searched


@dataclass(frozen=True)
class Constraint:
    """A pattern that a whole text must match."""

    kind: ConstraintKind  # the name of the option
    text: str  # of choices, a JSON list

    @property
    def grammar(self) -> str:
        """Return llguidance's grammar.

        OptionError if the constraint is not valid, with the position in it; ResourceError if
        llguidance is not installed.
        """
        return _compile(self)

    def error(self, message: str) -> OptionError:
        """Return the error for a message of llguidance, which may have many lines."""
        syntax = _SYNTAXES[self.kind]
        position, complaint = syntax.explain(self.text, message)
        for pattern, clearer in _CLEARER.items():
            complaint = re.sub(pattern, clearer, complaint)
        line = complaint.strip().partition("\n")[0]
        return OptionError(self.kind, f"is not valid as {syntax.name}{position}: {line:.500}")


def import_llguidance() -> ModuleType:
    """Return the package llguidance; raise ResourceError if it is not installed."""
    return import_extra("a constraint needs llguidance", "llguidance", "llguidance")


def with_stack(kind: ConstraintKind, function: Callable[[], T]) -> T:
    """Call a recursive function of llguidance in a thread with a large stack and a timeout.

    Raise OptionError if it takes too long or panics.
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
        complaint = f"takes more than {SECONDS} seconds to compile: make it simpler"
        raise OptionError(kind, complaint) from None


@lru_cache(CACHED)
def _compile(constraint: Constraint) -> str:
    """Return the valid grammar of a constraint; see `Constraint.grammar`."""
    kind = constraint.kind
    text = constraint.text
    if len(text) > _LARGEST:
        raise OptionError(kind, f"must have at most {_LARGEST:,} characters, not {len(text):,}")
    if kind == "grammar" and sum(map(text.count, ":([")) > _MOST_RULES:
        raise OptionError(kind, f"must have at most {_MOST_RULES:,} rules and brackets")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise OptionError(kind, f"is not valid Unicode at character {error.start + 1}") from None
    llguidance = import_llguidance()

    def build() -> str:
        grammar = _SYNTAXES[kind].grammar(text)
        limits = llguidance.LLParserLimits(max_grammar_size=_MOST_SYMBOLS)
        message = llguidance.LLMatcher.validate_grammar(grammar, limits=limits)
        if message:
            raise constraint.error(message)
        return grammar

    return with_stack(kind, build)


# --- the grammar of each kind -----------------------------------------------------------------


def _from_regex(text: str) -> str:
    r"""Return the grammar of a regular expression, in which \d is a digit from 0 to 9."""
    llguidance = import_llguidance()
    grammar: str = llguidance.LLMatcher.grammar_from_regex(text)
    if llguidance.LLMatcher.validate_grammar(grammar):
        return grammar  # with the error
    return _from_lark(f"start: /{llguidance.regex_to_lark(text, 'd')}/")


def _from_json_schema(text: str) -> str:
    """Return the grammar of a schema, for JSON in the form of Python's `json.dumps`.

    If any white space were allowed, a model could generate endless line ends. A schema can choose
    that, or another form, in "x-guidance".
    """
    try:
        schema = json.loads(text)
        if not isinstance(schema, dict):
            raise OptionError("json_schema", "must be a JSON object, such as {}")
        _check_form(schema.get("x-guidance"))
        references = json.dumps(schema).count('"$ref": ')
        depth = _depth(schema)
        if references * depth > _MOST_LEVELS:
            count = f"{references:,} of them in a schema of {counted(depth, 'level')}"
            raise OptionError("json_schema", f"must have fewer references: {count} are too many")
        # llguidance refuses NaN, which Python accepts.
        text = _rewritten(schema, text)
        return import_llguidance().LLMatcher.grammar_from_json_schema(text, defaults=FORM)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise OptionError("json_schema", f"must be JSON: {reason}") from None


def _rewritten(schema: dict[str, Any], text: str) -> str:
    """Return a schema as llguidance can read it; its text, if that needs no change."""
    new = rewritten(schema)
    if new is False:
        raise OptionError("json_schema", "fits no value: a reference leads back to itself")
    return text if new == schema else json.dumps(new)


def _depth(value: Any) -> int:
    """Return the number of levels of a JSON value."""
    if isinstance(value, dict):
        value = list(value.values())
    inner = value if isinstance(value, list) else []
    return 1 + max(map(_depth, inner), default=0)


def _check_form(form: Any) -> None:
    """Raise OptionError if texts in a form of JSON would not be JSON."""
    if isinstance(form, dict):
        signs = {"key_separator": ":", "item_separator": ",", "whitespace_pattern": ""}
        for name, sign in signs.items():
            if form.get(name) is not None and str(form[name]).strip(" \t\r\n") != sign:
                shown = f"{sign!r} with white space" if sign else "white space"
                raise OptionError("json_schema", f"must have {shown} as {name} in x-guidance")


def _from_grammar(text: str) -> str:
    """Return a grammar, written as for Lark or as GBNF, that allows a text in any tokens.

    Otherwise llguidance searches for the text that must follow, to split it as the tokenizer does.
    The search may not end, as for `A A` with `A: /y*y/`: the first A matches the whole text.
    """
    if is_gbnf(text):
        try:
            text = to_lark(text)
        except (ValueError, RecursionError) as error:
            reason = ": it is nested too deeply" if isinstance(error, RecursionError) else error
            raise OptionError("grammar", f"is not valid as a GBNF grammar{reason}") from None
    return _from_lark(f'{text}\n%llguidance {{"no_forcing": true}}')


def _from_lark(text: str) -> str:
    return import_llguidance().LLMatcher.grammar_from_lark(text)


def _from_choices(text: str) -> str:
    either = " | ".join(map(json.dumps, json.loads(text)))
    return _from_lark(f"start: CHOICE\nCHOICE: {either}")


# --- llguidance's messages: the position of an error, and a complaint ---------------------------

_CLEARER = {  # parts of a message, and what replaces them
    r"regex parse error:\n *(.*)\n.*\nerror: ": r"in /\1/: ",
    r"lookarounds not supported yet; Word.*": r"\\b, \\B, \\< and \\> are not supported",
    r"lookarounds not supported yet; .*": "^ and $ are only supported at its ends, without (?m)",
    "schema must be an object or boolean": 'a schema is an object, such as {"type": "string"}',
    r"Unimplemented keys: .*": r'\g<0>; "x-guidance": {"lenient": true} at the top ignores them',
    r"oneOf constraints are .*": "a value may fit several branches of oneOf; "
    '"x-guidance": {"coerce_one_of": true} at the top takes anyOf',
    r"lexer error": 'unexpected character; texts are in "...", regular expressions in /.../',
}


def _explain_regex(text: str, message: str) -> tuple[str, str]:
    match = re.search(r"parse error:\n    (.*)\n    ( *)\^.*\nerror: (.*)", message)
    if not match:  # such as "... (in regex): lookarounds not supported yet; WordUnicode in ..."
        return "", message.rpartition("(in regex): ")[2]
    shown, spaces, complaint = match.groups()
    before = shown[: len(spaces)]
    # The message shows \n for a line end, and \/ for a slash.
    added = before.count("\\/") - text[: len(before)].count("\\/") + text[: len(before)].count("\n")
    return f" at character {len(before) - added + 1}", complaint


def _explain_grammar(text: str, message: str) -> tuple[str, str]:
    match = re.match(r"(?s)(?:at )?(\d+)\((\d+)\): (.*)", message)
    if not match:
        return "", "it is JSON" if text.lstrip().startswith("{") else message
    line, column, complaint = match.groups()
    if is_gbnf(text):
        return "", complaint  # the position is one in the grammar for Lark
    return f" at line {line}, column {column}", complaint


def _explain_schema(text: str, message: str) -> tuple[str, str]:
    complaint = message
    match = re.match(r"Resource '(.*)' is not present", message)
    if match:
        complaint = f"it refers to {match[1]}, and only references within it are followed"
    if len(text) > _SEARCHED:
        return "", complaint
    pointer = _locate(rewritten(json.loads(text)), message)
    return (f" at {pointer}" if pointer else ""), complaint


def _locate(schema: Any, message: str) -> str:
    """Return the JSON pointer of the smallest part of a schema that has the same error."""
    if not isinstance(schema, dict):
        return ""
    matcher = import_llguidance().LLMatcher
    shared = {name: schema[name] for name in ("$defs", "definitions", "$id") if name in schema}

    def search(part: Any, pointer: str) -> str:
        children: Iterable[tuple[Any, Any]] = ()
        if isinstance(part, list):
            children = enumerate(part)
        elif isinstance(part, dict):
            children = part.items()
        for key, child in children:
            escaped = str(key).replace("~", "~0").replace("/", "~1")
            inner = search(child, f"{pointer}/{escaped}")
            if inner:
                return inner
        if not isinstance(part, dict) or part is schema:
            return ""
        alone = matcher.grammar_from_json_schema(json.dumps(shared | part))
        return pointer if matcher.validate_grammar(alone) == message else ""

    return search(schema, "#")


@dataclass(frozen=True)
class _Syntax:
    """The syntax of a kind of constraints."""

    name: str
    grammar: Callable[[str], str]  # from the text of a constraint
    explain: Callable[[str, str], tuple[str, str]]  # text, message -> position, complaint


_SYNTAXES = {
    "regex": _Syntax("a regular expression", _from_regex, _explain_regex),
    "json_schema": _Syntax("a JSON schema", _from_json_schema, _explain_schema),
    "grammar": _Syntax("a Lark grammar", _from_grammar, _explain_grammar),
    "choices": _Syntax("a list of choices", _from_choices, _explain_grammar),
}
