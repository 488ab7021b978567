"""The arguments of public functions: wrong types and unknown keywords are TypeErrors."""

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from numbers import Integral
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args

from gpt_cli.options.declare import Declared, check_keywords

F = TypeVar("F", bound=Callable[..., Any])
_WORDS = {str: "a string", int: "a whole number", NoneType: "None"}


def checks_arguments(*groups: type[Declared]) -> Callable[[F], F]:
    """Raise TypeError for an unknown keyword, and for an argument that is not of its type.

    Whoever gets `**options` checks them. The signature shows the options of `groups` instead.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        named = [p for p in signature.parameters.values() if p.kind != p.VAR_KEYWORD]
        types = {p.name: _classes(p.annotation) for p in named if p.annotation is not p.empty}
        options = [p for group in groups for p in inspect.signature(group).parameters.values()]
        known = [parameter.name for parameter in named]
        passes_on = len(named) < len(signature.parameters)

        @wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            if not passes_on:
                check_keywords(keywords, known)
            for name, value in signature.bind(*arguments, **keywords).arguments.items():
                _check_type(name, value, types.get(name, ()))
            return function(*arguments, **keywords)

        if groups:
            shown = signature.replace(parameters=[*named, *options])
            call.__signature__ = shown  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return decorate


def check_texts(name: str, texts: Sequence[str]) -> None:
    """Raise TypeError for anything else than a list of texts."""
    if isinstance(texts, str):
        raise TypeError(f"{name} must be a list of texts, not one text")
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"{name} must be texts, not {text!r:.40}")


def _classes(annotation: Any) -> tuple[type, ...]:
    """Return the classes of an annotation; none if it is not made of classes only."""
    classes = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    return classes if all(isinstance(c, type) and c is not bool for c in classes) else ()


def _check_type(name: str, value: Any, classes: tuple[type, ...]) -> None:
    numbers = (Integral,) if int in classes else ()  # such as NumPy's
    if classes and not isinstance(value, (*classes, *numbers)):
        kinds = " or ".join(_WORDS.get(c, c.__name__) for c in classes)
        raise TypeError(f"{name} must be {kinds}, not {value!r:.40}")
