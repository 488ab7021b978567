"""Declare an option once: name, type, default, range and help.

A group of options is a frozen dataclass that derives from `Declared`; its fields are `option`s.
The keywords of the Python API, the fields of a JSON row (`Declared.with_row`) and the flags of
commands (`gpt_cli.cli.parameters`) all come from its fields.
"""

import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from functools import cache, partial
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, Literal, Self, TypeAlias, get_args, get_origin

from gpt_cli.errors import GPTCLIError, InputError, ResourceError, brief, did_you_mean
from gpt_cli.system.machine import MOST_THREADS

Token: TypeAlias = int | str  # an id, or the text of one token

_NO_LIMIT = sys.maxsize
EXACT = 2**53  # floats represent every integer up to this one
_as_json = partial(json.dumps, default=str, skipkeys=True)


class NamedOptionError(GPTCLIError):
    """An error about an option; `args` are its name and a complaint.

    A command replaces the name by the flag: see `gpt_cli.cli.parameters.command`.
    """

    def __str__(self) -> str:
        return " ".join(self.args)


class OptionError(NamedOptionError, InputError):
    """An option has the wrong type, is out of range or does not fit the other options."""


class OptionTypeError(OptionError, TypeError):
    """An option or an argument has the wrong type."""


class OptionResourceError(NamedOptionError, ResourceError):
    """An option needs a device, a package or a file that is not available."""


@dataclass(frozen=True)
class Kind:
    """The type of an option."""

    name: str  # in messages
    flag_type: Any  # the type that typer parses
    convert: Callable[[Any], Any]  # from a Python or JSON value; raises for other types
    parse: Callable[[str], Any] = str  # the text of a flag; raises ValueError
    metavar: str = ""  # of the flag
    values: tuple[str, ...] = ()  # all of them, if they are few


@dataclass(frozen=True)
class Range:
    """The valid values of an option."""

    contains: Callable[[Any], bool]
    name: str  # completes "must be ..."


def at_least(least: float) -> Range:
    """Return the range of numbers from `least` on."""
    return Range(lambda value: value >= least, f"{least} or more")


def between(least: float, most: float) -> Range:
    """Return the range of numbers from `least` to `most`."""
    return Range(lambda value: least <= value <= most, f"from {least} to {most}")


AT_LEAST_0 = at_least(0)
AT_LEAST_1 = at_least(1)
ABOVE_0 = Range(lambda number: number > 0, "above 0")
THREADS = between(1, MOST_THREADS)
PERCENT = Range(lambda number: 0 < number <= 100, "above 0 and at most 100")


def check(name: str, value: Any, range: Range) -> None:
    """Raise OptionError if the value of an option is out of range."""
    if not range.contains(value):
        raise OptionError(name, f"must be {range.name}")


@dataclass(frozen=True)
class Option:
    """The declaration of one option."""

    default: Any
    help: str  # of its flag; an option without help has no flag
    range: Range | None
    row: bool  # a JSON row may have it
    flag: str | None  # by default --name
    aliases: tuple[str, ...]  # of the flag
    old_flag: str | None  # its earlier name, which still works
    text_form: Range | None  # the flag names a file with the value, unless its text has this form
    excludes: tuple[str, ...]  # flags that cannot be used with this one, such as "--no-cache"
    needs: str | None  # a flag without which this one cannot be used, such as "--engine ray"
    typer: Mapping[str, Any]  # more keywords of typer.Option
    name: str
    kind: Kind

    def convert(self, value: Any, show: Callable[[Any], str] = repr) -> Any:
        """Return a valid value in the type of the option; raise OptionError for another value."""
        if value is None and self.default is None:
            return None
        converted = self._try(self.kind.convert, value, show)
        if self.range and converted is not None:
            check(self.name, converted, self.range)
        return converted

    def parse(self, value: Any) -> Any:
        """Return the valid value of a flag, which is a text or a list; raise OptionError."""
        if isinstance(value, list):
            entries = [self._try(self.kind.parse, text, _as_json) for text in value]
            for text, entry in zip(value, entries, strict=True):
                if self.range and not self.range.contains([entry]):
                    shown = brief(text, show=_as_json)
                    raise OptionError(self.name, f"must be {self.range.name}, not {shown}")
            value = entries
        elif isinstance(value, str):
            value = self._try(self.kind.parse, value, _as_json)
        return self.convert(value, _as_json)

    def _try(self, function: Callable[[Any], Any], value: Any, show: Callable[[Any], str]) -> Any:
        try:
            return function(value)
        except (TypeError, ValueError, OverflowError) as error:
            kind = OptionTypeError if isinstance(error, TypeError) else OptionError
            shown = brief(value, show=show)
            raise kind(self.name, f"must be {self.kind.name}, not {shown}") from None


def option(
    default: Any,
    help: str = "",
    range: Range | None = None,
    *,
    kind: Kind | None = None,
    row: bool = True,
    flag: str | None = None,
    aliases: tuple[str, ...] = (),
    old_flag: str | None = None,
    text_form: Range | None = None,
    excludes: tuple[str, ...] = (),
    needs: str | None = None,
    **typer: Any,
) -> Any:
    """Return a dataclass field with a declaration; see `declaration`."""
    names = flag, aliases, old_flag
    unnamed = partial(Option, default, help, range, row, *names, text_form, excludes, needs, typer)
    return field(default=default, metadata={"option": unnamed, "kind": kind})


def declaration(name: str, annotation: Any, member: Field[Any]) -> Option:
    """Return the option that a field declares; by default, the annotation gives its kind."""
    kind = member.metadata["kind"] or _kind_of(annotation)
    return member.metadata["option"](name, kind)


def check_keywords(keywords: Iterable[str], known: Collection[str]) -> None:
    """Raise TypeError for an unknown keyword, with the nearest known one; else with all of them."""
    for name in keywords:
        if name not in known:
            hint = did_you_mean(name, known) or f": the keywords are {', '.join(known)}"
            raise TypeError(f"unknown keyword {name}{hint}")


class Declared:
    """Base of a group of options, a dataclass; its constructor raises OptionError or TypeError."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Return a new group; raise TypeError for an option that it does not have."""
        check_keywords(options, cls.__dataclass_fields__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for declared in self.declarations():
            value = declared.convert(getattr(self, declared.name))
            object.__setattr__(self, declared.name, value)  # it is frozen

    def validate(self) -> None:
        """Check what takes too long for the constructor; raise OptionError."""

    @classmethod
    @cache
    def declarations(cls) -> tuple[Option, ...]:
        """Return the options of the group."""
        return tuple(declaration(member.name, member.type, member) for member in fields(cls))

    @classmethod
    def parse_json(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the valid values of JSON fields; an OptionError shows a value as JSON."""
        declared = {option.name: option for option in cls.declarations()}
        return {name: declared[name].convert(value, _as_json) for name, value in values.items()}

    @classmethod
    def row_fields(cls) -> tuple[str, ...]:
        """Return the names of the options that a JSON row may have."""
        return tuple(declared.name for declared in cls.declarations() if declared.row)

    def with_row(self, row: Mapping[str, Any]) -> Self:
        """Return these options, replaced by those of a JSON row that are not null.

        Raise InputError if a field is unknown or not valid.
        """
        values = {name: value for name, value in row.items() if value is not None}
        known = self.row_fields()
        for name in values:
            if name not in known:
                near = did_you_mean(f"{name!s:.40}", known)
                options = f"the options of a row are {', '.join(known)}"
                raise InputError(f"unknown field {brief(name)}{near}; {options}")
        return replace(self, **self.parse_json(values)) if values else self


def _require(value: Any, kind: type) -> Any:
    """Return a value of a type; raise TypeError for another. A bool is not a number."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError
    return value


def _convert_texts(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else _require(value, Sequence)
    return tuple(_require(text, str) for text in texts)


def _convert_whole(value: Any) -> int:
    """Convert a whole number; tables write it as 4.0 if a cell of its column is empty."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= EXACT:
        return int(value)
    return int(_require(value, Integral))


def _convert_limit(value: Any) -> int:
    """Convert a number of tokens; -1 stands for any number, as in llama.cpp."""
    limit = _convert_whole(value)
    return _NO_LIMIT if limit == -1 else limit


def _convert_seed(value: Any) -> int | None:
    """Convert a seed; -1 stands for a random one, as in llama.cpp."""
    seed = _convert_whole(value)
    return None if seed == -1 else seed


def _convert_ids(value: Any) -> tuple[int, ...]:
    if isinstance(value, str):
        raise TypeError
    return tuple(int(_require(id, Integral)) for id in value)


def _parse_bias(text: str) -> tuple[Token, float]:
    token, _, bias = text.rpartition("=")
    return _convert_token(token), float(bias)


def _convert_token(value: Any) -> Token:
    """Convert the id of a token, which may be digits, or its text; ValueError if that is empty."""
    if not isinstance(value, str):
        return int(_require(value, Integral))
    if not value:
        raise ValueError
    return int(value) if re.fullmatch("-?[0-9]+", value) else value


def _convert_biases(value: Any) -> tuple[tuple[Token, float], ...]:
    """Convert a mapping, pairs or texts TOKEN=BIAS to sorted pairs, which are hashable."""
    if isinstance(value, str):
        raise TypeError
    entries = value.items() if isinstance(value, Mapping) else value
    pairs = [_parse_bias(entry) if isinstance(entry, str) else entry for entry in entries]
    biases = {_convert_token(token): float(_require(bias, Real)) for token, bias in pairs}
    return tuple(sorted(biases.items(), key=lambda pair: (isinstance(pair[0], str), pair[0])))


def _convert_path(value: Any) -> Path:
    if value == "":  # such as of a variable that is not set; Path takes it for the current folder
        raise ValueError
    return Path(value)


def _convert_schema(value: Any) -> str:
    """Return a JSON schema as JSON."""
    return value if isinstance(value, str) else json.dumps(_require(value, Mapping))


def split_commas(values: list[str] | None) -> list[str] | None:
    """Return the texts, separated by commas, in the values of a repeatable flag."""
    return [text for value in values for text in value.split(",")] if values else None


WHOLE = Kind("a whole number", str, _convert_whole, int, "N")
LIMIT = Kind("a whole number", str, _convert_limit, int, "N")
SEED = Kind("a whole number", str, _convert_seed, int, "N")
NUMBER = Kind("a number", str, lambda value: _require(value, Real), float, "X")
SWITCH = Kind("true or false", bool, lambda value: _require(value, bool))
TEXT = Kind("a string", str, lambda value: _require(value, str))
SCHEMA = Kind("a JSON schema", str, _convert_schema)
IDS = Kind("a list of token ids", list[str], _convert_ids)
PATH = Kind("a path", str, _convert_path)
TEXTS = Kind("a string or a list of strings", list[str], _convert_texts)
BIASES = Kind(
    "a number for each token, an id or a text (such as 452=-100)",
    list[str],
    _convert_biases,
    _parse_bias,
)
_KINDS = {
    int: WHOLE,
    float: NUMBER,
    bool: SWITCH,
    str: TEXT,
    Path: PATH,
    Sequence: TEXTS,
    tuple: TEXTS,
}


def _kind_of(annotation: Any) -> Kind:
    """Return the kind of an option with an annotation, such as `int | None` or a `Literal`."""
    arguments = get_args(annotation)
    if NoneType in arguments:
        return _kind_of(arguments[0])
    origin = get_origin(annotation) or annotation
    if origin is not Literal:
        return _KINDS[origin]
    by_text = {value if isinstance(value, str) else _as_json(value): value for value in arguments}

    def convert(value: Any) -> Any:
        if not isinstance(value, tuple(map(type, arguments))):  # 1 is not true
            raise TypeError
        return arguments[arguments.index(value)]

    def parse(text: str) -> Any:
        return by_text.get(text.lower(), text)  # typer passes a default as False

    return Kind(f"one of {', '.join(by_text)}", str, convert, parse, values=tuple(by_text))
