"""The parameters of a command as flags.

A command has one parameter for a group, whose annotation is a dataclass of options. A parameter
whose default is an `option` is a single flag. `command` turns both into typer's parameters.
"""

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field
from typing import Annotated, Any

import typer

from gpt_cli.cli.output import note
from gpt_cli.errors import InputError
from gpt_cli.jobs.storage import NO_FILE, exists, is_address, read_text, without_line_end
from gpt_cli.options import declare
from gpt_cli.options.declare import (
    BIASES,
    LIMIT,
    NUMBER,
    SEED,
    WHOLE,
    Declared,
    NamedOptionError,
    Option,
    Range,
)

_POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD
_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_OLD = "old_"
# Settings in the manifest of a job whose flags have other names.
_SETTINGS = {"top_logprobs": "logprobs", "logprobs": "tokens"}


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameters of a command that are a group or an `option` with flags."""
    groups: dict[str, type[Declared]] = {}
    options: dict[str, Option] = {}
    parameters = [inspect.Parameter("context", _POSITIONAL, annotation=typer.Context)]
    for name, parameter in inspect.signature(function).parameters.items():
        annotation = parameter.annotation
        default = parameter.default
        if isinstance(annotation, type) and issubclass(annotation, Declared):
            groups[name] = annotation
            members = annotation.declarations()
        elif isinstance(default, Field):
            members = (declare.declaration(name, annotation, default),)
        else:
            parameters.append(parameter)
            continue
        for declared in members:
            if declared.help:
                options[declared.name] = declared
                parameters.extend(_parameters(declared))

    @functools.wraps(function)
    def run(context: typer.Context, **values: Any) -> None:
        _rename(options, values, context)
        _join_words(options, values, context)
        with _flags_in_errors(options, context):
            for name, declared in options.items():
                if values[name] is not None:
                    values[name] = declared.parse(values[name])
            _check_together(options, values, context)
            for name, group in groups.items():
                values[name] = _filled(group, values)
            function(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


@contextmanager
def _flags_in_errors(options: Mapping[str, Option], context: typer.Context) -> Iterator[None]:
    """Replace the name of an option in an error by the flag or the variable that has set it."""
    flags = dict(_shown_flags(options, context))
    try:
        yield
    except NamedOptionError as error:
        name, complaint = error.args
        setting = _SETTINGS.get(name, name)
        error.args = (flags.get(name) or flags.get(setting, name), complaint)
        raise


def _filled(group: type[Declared], values: dict[str, Any]) -> Declared:
    """Return a group with its options, which are removed from the values."""
    members = {}
    for declared in group.declarations():
        if not declared.help:  # it has no flag; another group may have one of this name
            continue
        value = values.pop(declared.name)
        if value is not None:  # else it has the default of its declaration
            members[declared.name] = value
    filled = group(**members)
    filled.validate()
    return filled


def _flag(declared: Option) -> str:
    return declared.flag or f"--{declared.name.replace('_', '-')}"


def _parameters(declared: Option) -> Iterator[inspect.Parameter]:
    """Yield the parameters of a function for an option: its flag, and its old flag."""
    kind = declared.kind
    metavar = kind.metavar or "|".join(kind.values) or declared.name.upper()
    help = declared.help + _limits(declared)
    more: dict[str, Any] = {"metavar": metavar, "help": help, **declared.typer}
    if kind.values:
        more["autocompletion"] = lambda: [*kind.values]
    if declared.text_form:
        more["callback"] = _reader(declared.text_form)
    default = declared.default
    if kind.flag_type == list[str] and default is not None:  # a repeatable flag
        default = ([default] if isinstance(default, str) else [*default]) or None
    flag = typer.Option(_flag(declared), *declared.aliases, **more)
    yield _parameter(declared.name, default, kind.flag_type, flag)
    if declared.old_flag:
        old_flag = typer.Option(declared.old_flag, hidden=True)
        yield _parameter(_OLD + declared.name, None, kind.flag_type, old_flag)


def _parameter(name: str, default: Any, flag_type: Any, flag: Any) -> inspect.Parameter:
    annotation = Annotated[flag_type, flag]
    return inspect.Parameter(name, _KEYWORD, default=default, annotation=annotation)


def _limits(declared: Option) -> str:
    """Return the sentences about the range of a number, and about flags needed or excluded."""
    text = ""
    if declared.range and declared.kind in (WHOLE, LIMIT, SEED, NUMBER, BIASES):
        text += f" Range: {declared.range.name}."
    if declared.needs:
        text += f" Needs {declared.needs}."
    if declared.excludes:
        *others, last = declared.excludes
        text += f" Not with {', '.join(others)} or {last}." if others else f" Not with {last}."
    return text


def _check_together(
    options: Mapping[str, Option], values: Mapping[str, Any], context: typer.Context
) -> None:
    """Raise InputError for a flag with one that it excludes, or without the one that it needs.

    A flag counts as used if it is on the command line, or if its value is not the default.
    """
    used = {}
    for name, declared in options.items():
        source = context.get_parameter_source(name)
        is_written = source is not None and source.name == "COMMANDLINE"
        if values[name] is not None and (is_written or values[name] != declared.default):
            on, _, off = _flag(declared).partition("/")  # of --cache/--no-cache
            used[off if values[name] is False else on] = declared
    with_values = {f"{flag} {values[declared.name]}" for flag, declared in used.items()}
    for flag, declared in used.items():
        for other in declared.excludes:
            if other in used:
                raise InputError(f"{flag} cannot be used with {other}: leave one of them out")
        needs = declared.needs
        if needs and needs not in used and needs not in with_values:
            raise InputError(f"{flag} needs {needs}")


def _rename(options: Mapping[str, Option], values: dict[str, Any], context: typer.Context) -> None:
    """Give the values of old flags to the flags that replace them, with a note.

    Raise InputError if both are used.
    """
    for declared in options.values():
        value = values.pop(_OLD + declared.name, None)
        if value is not None:
            renamed = f"{declared.old_flag} is now {_flag(declared)}"
            source = context.get_parameter_source(declared.name)
            if source and source.name == "COMMANDLINE":
                raise InputError(f"{renamed}: give only {_flag(declared)}")
            values[declared.name] = value
            if not values["quiet"]:
                note(f"gpt-cli: note: {renamed}")


def _join_words(
    options: Mapping[str, Option], values: dict[str, Any], context: typer.Context
) -> None:
    """Replace the words of a variable by its whole text, such as a path with spaces."""
    for name, declared in options.items():
        source = context.get_parameter_source(name)
        if source and source.name == "ENVIRONMENT" and isinstance(values[name], list):
            values[name] = [os.environ[declared.typer["envvar"]]]


def _shown_flags(
    options: Mapping[str, Option], context: typer.Context
) -> Iterator[tuple[str, str]]:
    """Yield pairs of a name in an error and the flag or the variable that has set the option.

    The name may be that of the flag, too.
    """
    for name, declared in options.items():
        flag = _flag(declared).partition("/")[0]  # of --cache/--no-cache
        source = context.get_parameter_source(name)
        shown = declared.typer["envvar"] if source and source.name == "ENVIRONMENT" else flag
        yield name, shown
        yield flag.removeprefix("--").replace("-", "_"), shown


def _reader(form: Range) -> Callable[..., str | None]:
    """Return a callback that reads the file of a flag, unless its value is a text of this form."""

    def read(
        context: typer.Context, parameter: typer.CallbackParam, value: str | None
    ) -> str | None:
        if value is None or form.contains(value) or context.resilient_parsing:  # by TAB
            return value
        flag = parameter.opts[0]
        if not value:  # such as of a variable that is not set
            raise InputError(f"{flag} is empty: give a file or a text")
        if value != "-" and not is_address(value) and not exists(value):
            raise InputError(f"{flag} {value:.80}: {NO_FILE}, and a text must {form.name}")
        return without_line_end(read_text(value))

    return read
