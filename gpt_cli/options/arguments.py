"""The arguments of public functions: wrong types and unknown keywords are TypeErrors."""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from numbers import Integral
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin

from gpt_cli.errors import brief
from gpt_cli.options.declare import SWITCH, TEXT, WHOLE, Declared, OptionTypeError, check_keywords

F = TypeVar("F", bound=Callable[..., Any])
_WORDS = {str: TEXT.name, int: WHOLE.name, bool: SWITCH.name, NoneType: "None"}
_LISTS: dict[Any, Any] = {Sequence: Collection, Iterable: Iterable}  # such as NumPy's arrays


def checks_arguments(*groups: type[Declared]) -> Callable[[F], F]:
    """Raise TypeError for an unknown keyword, and for an argument that is not of its type.

    A function that takes `**options` passes them on, and they are checked there. Its signature
    shows the options of `groups` instead.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        named = [p for p in signature.parameters.values() if p.kind != p.VAR_KEYWORD]
        types = {p.name: p.annotation for p in named if p.annotation is not p.empty}
        options = [p for group in groups for p in inspect.signature(group).parameters.values()]
        known = [parameter.name for parameter in named if parameter.name != "self"]
        passes_on = len(named) < len(signature.parameters)

        @wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            if not passes_on:
                check_keywords(keywords, known)
            for name, value in signature.bind(*arguments, **keywords).arguments.items():
                check_type(name, value, types.get(name, Any))
            return function(*arguments, **keywords)

        if groups:
            shown = signature.replace(parameters=[*named, *options])
            call.__signature__ = shown  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return decorate


def check_type(name: str, value: Any, annotation: Any) -> None:
    """Raise OptionTypeError for a value that is not of the type of an annotation.

    Checked are classes, unions, `Sequence` with its items, and `Iterable` without them: such rows
    may have errors of their own. Neither is a table. Other annotations allow any value.
    """
    kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    if not any(_is_of(value, kind) for kind in kinds):
        names = " or ".join(_name(kind) for kind in kinds)
        raise OptionTypeError(name, f"must be {names}, not {brief(value)}")
    if any(get_origin(kind) in _LISTS for kind in kinds) and _is_table(value):
        table = f"cannot be a {type(value).__name__}, whose items are columns"
        cure = 'give one column, such as df["text"], or its rows, such as df.to_dict("records")'
        raise OptionTypeError(name, f"{table}: {cure}")
    if get_origin(annotation) is Sequence:
        (inner,) = get_args(annotation)
        for index, item in enumerate(value):
            check_type(f"{name}[{index}]", item, inner)


def _is_of(value: Any, kind: Any) -> bool:
    if kind is int:
        return isinstance(value, Integral) and not isinstance(value, bool)  # such as NumPy's
    list_kind = _LISTS.get(get_origin(kind))
    if list_kind:
        return isinstance(value, list_kind) and not isinstance(value, str | bytes | Mapping)
    return kind is Any or not isinstance(kind, type) or isinstance(value, kind)


def _is_table(value: Any) -> bool:
    """Return whether a value is a table by columns, such as a DataFrame, whose items are no rows.

    A list of mappings may have columns, too. An iterator is not looked into.
    """
    has_columns = isinstance(getattr(value, "columns", None), Iterable)
    if not has_columns or isinstance(value, Iterator):
        return False
    return not isinstance(next(iter(value), None), Mapping)


def _name(kind: Any) -> str:
    return "a list" if get_origin(kind) in _LISTS else _WORDS.get(kind, kind.__name__)
