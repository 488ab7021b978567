"""Declare an option once: name, default, range and help.

A group of options is a frozen dataclass that derives from `Declared`, with fields made by `option`.
The keywords of the Python API, the fields of a JSON row (`Declared.with_row`) and the flags of
commands (`gpt_cli.cli.options`) all come from its fields.
"""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, get_args

from gpt_cli.errors import GPTCLIError, InputError, ResourceError, did_you_mean

F = TypeVar("F", bound=Callable[..., Any])


class NamedOptionError(GPTCLIError):
    """An error about an option; `args` are its name and a complaint.

    A command replaces the name by the flag: see `gpt_cli.cli.options.command`.
    """

    def __str__(self) -> str:
        return " ".join(self.args)


class OptionError(NamedOptionError, InputError):
    """An option has the wrong type, is out of range or does not fit the other options."""


class OptionResourceError(NamedOptionError, ResourceError):
    """An option needs a device, a package or a file that is not available."""


@dataclass(frozen=True)
class Kind:
    """The type of an option."""

    name: str  # in messages
    flag_type: Any  # the type that typer parses
    convert: Callable[[Any], Any]  # from a flag or a JSON value; raises for other types


@dataclass(frozen=True)
class Range:
    """The valid values of an option."""

    contains: Callable[[Any], bool]
    name: str  # completes "must be ..."


@dataclass(frozen=True)
class Option:
    """The declaration of one option; its name and default are those of the field."""

    kind: Kind
    help: str  # of its flag; an option without help has no flag
    range: Range | None
    row: bool  # whether a JSON row may have it
    flag: str | None  # in place of --name
    aliases: tuple[str, ...]  # of the flag
    from_file: bool  # whether the flag names a file with the value, unless it begins with {
    typer: Mapping[str, Any]  # more keywords of typer.Option


def option(
    default: Any,
    help: str = "",
    range: Range | None = None,
    *,
    kind: Kind | None = None,
    row: bool = True,
    flag: str | None = None,
    aliases: tuple[str, ...] = (),
    from_file: bool = False,
    **typer: Any,
) -> Any:
    """Return a dataclass field with a declaration; its kind by default is that of its default."""
    made = Option(kind or _KINDS[type(default)], help, range, row, flag, aliases, from_file, typer)
    return field(default=default, metadata={"option": made})


def declarations(group: "type[Declared]") -> Iterator[tuple[Field[Any], Option]]:
    """Yield the fields of a group with their declarations."""
    for each in fields(group):
        yield each, each.metadata["option"]


class Declared:
    """Base of a group of options, which is a dataclass.

    Raises:
        InputError: a value has the wrong type or is out of range.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __post_init__(self) -> None:
        for each, declaration in declarations(type(self)):
            if (value := getattr(self, each.name)) is None and each.default is None:
                continue
            try:
                value = declaration.kind.convert(value)
            except (TypeError, ValueError, OverflowError):
                given = json.dumps(value, default=str, skipkeys=True)
                complaint = f"must be {declaration.kind.name}, not {given:.40}"
                raise OptionError(each.name, complaint) from None
            if declaration.range and not declaration.range.contains(value):
                raise OptionError(each.name, f"must be {declaration.range.name}")
            object.__setattr__(self, each.name, value)  # the dataclass is frozen

    @classmethod
    def row_fields(cls) -> tuple[str, ...]:
        """Return the names of the options that a JSON row may have."""
        return tuple(each.name for each, declaration in declarations(cls) if declaration.row)

    def with_row(self, row: Mapping[str, Any]) -> Self:
        """Return these options, replaced by those of a JSON row where it has any that is not null.

        Raises:
            InputError: a field is unknown, or a value has the wrong type or is out of range.
        """
        own = {name: value for name, value in row.items() if value is not None}
        if unknown := [name for name in own if name not in self.row_fields()]:
            known = self.row_fields()
            near = did_you_mean(f"{unknown[0]!s:.40}", known)
            raise InputError(
                f"unknown field {unknown[0]!r:.40}{near}; the options of a row are "
                + ", ".join(known)
            )
        return replace(self, **own)


def takes(group: type[Declared]) -> Callable[[F], F]:
    """Show the options of a group in the signature of a function that has `**options`."""

    def show(function: F) -> F:
        signature = inspect.signature(function)
        own = [each for each in signature.parameters.values() if each.kind != each.VAR_KEYWORD]
        shown = inspect.signature(group).parameters.values()
        function.__signature__ = signature.replace(parameters=[*own, *shown])  # type: ignore[attr-defined]
        return function

    return show


def _checked(value: Any, kind: type) -> Any:
    """Return a value of this type; a bool is not a number."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError
    return value


def _texts(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else _checked(value, Sequence)
    return tuple(_checked(text, str) for text in texts)


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    """Convert a mapping, pairs or texts ID=BIAS to sorted pairs, which are hashable."""
    if isinstance(value, Mapping):
        value = value.items()
    pairs = [each.split("=", 1) if isinstance(each, str) else each for each in value]
    return tuple(sorted({int(id): float(bias) for id, bias in pairs}.items()))


def _schema(value: Any) -> str:
    """Return a JSON schema as JSON."""
    return value if isinstance(value, str) else json.dumps(_checked(value, Mapping))


def split_commas(given: list[str] | None) -> list[str] | None:
    """Return the texts of a repeatable flag, which are separated by commas in each, if any."""
    return [text for each in given for text in each.split(",")] if given else None


WHOLE = Kind("a whole number", int, lambda value: int(_checked(value, Integral)))
NUMBER = Kind("a number", float, lambda value: _checked(value, Real))
SWITCH = Kind("true or false", bool, lambda value: _checked(value, bool))
TEXT = Kind("a string", str, lambda value: _checked(value, str))
SCHEMA = Kind("a JSON schema", str, _schema)
PATH = Kind("a path", Path, Path)
TEXTS = Kind("a string or a list of strings", list[str], _texts)
BIASES = Kind("a number for each token id (such as 452=-100)", list[str], _biases)
_KINDS = {int: WHOLE, float: NUMBER, bool: SWITCH, str: TEXT, tuple: TEXTS}


def choice(literal: Any) -> Kind:
    """Return the kind of an option with the values of a `Literal`."""
    names = get_args(literal)
    return Kind(f"one of {', '.join(names)}", literal, lambda value: names[names.index(value)])
