"""The names that docs/stability.md promises to keep, and changes of them."""

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from typer.main import get_command

import gpt_cli
from gpt_cli import jobs
from gpt_cli.cli import app
from gpt_cli.gpt2.hooks import hook_shapes
from gpt_cli.hub.local import SHORT_NAMES
from support.reference import SECTIONS, exit_codes, names_of

MODULES = ["gpt_cli", "gpt_cli.jobs", "gpt_cli.ray", "gpt_cli.serve"]
# Classes that users call; objects of others are results.
_CONSTRUCTORS = {
    "Activations",
    "Classifier",
    "Classifying",
    "Cluster",
    "Edit",
    "Filtering",
    "Generation",
    "Generator",
    "InputRow",
    "Options",
}
_CONSTRUCTORS |= {"Ranker", "Ranking", "Resumed", "Scorer", "Scoring", "Settings", "Template"}
# Dataclasses whose parameters are kept, and no members. (gpt_cli.ray.Activations is none.)
_OPTIONS = {"Activations", "Classifying", "Filtering", "Generation", "Options", "Ranking"}
_OPTIONS |= {"Scoring", "Settings"}
# Members that only the program itself needs.
_INTERNAL = {"Completion.add", "Score.initial_layers", "Score.initial_logprobs", "Trace.model"}
_INTERNAL |= {f"Engine.{name}" for name in ("activation_rows", "check_constraint", "loaded")}
_INTERNAL |= {f"Engine.{name}" for name in ("model", "tokenizer")}
_INTERNAL |= {"Task.layout", "Task.records"}
_INTERNAL |= {"Run.add", "Run.passes"}
_SPECIAL = {"__call__", "__enter__", "__exit__"}


def listing() -> dict[str, Any]:
    """Return all that is kept by name, as nested dictionaries."""
    program = get_command(app.application())
    sections = [name for name in SECTIONS if name != "Exit codes" and names_of(name)]
    tasks = {"batch": jobs.Generation, "score": jobs.Scoring, "rank": jobs.Ranking}
    tasks["classify"] = jobs.Classifying
    return {
        "commands": {"": dict(_flags(program)), **dict(_commands(program))},
        "exit codes": {str(code): _set(names) for code, names in exit_codes().items()},
        "docs/reference.md": {name: _set(names_of(name)) for name in sections},
        "fields of rows": {name: _set(task.fields) for name, task in tasks.items()},
        "names of models": SHORT_NAMES,
        "hook points": _set(hook_shapes(gpt_cli.load("tiny").model.config)),
        "Python": {name: python_names(name) for name in MODULES},
    }


def python_names(module: str) -> dict[str, Any]:
    """Return the names in `__all__` of a module, with their members and parameters."""
    package = importlib.import_module(module)
    return {name: _signature(getattr(package, name)) for name in package.__all__}


def changes(kept: Any, now: Any, same: Callable[[Any, Any], bool], path: str = "") -> Iterator[str]:
    """Yield what is missing in nested values or is not the `same`; dictionaries may have more.

    A new name may not be `required`, since calls without it were complete.
    """
    if isinstance(kept, dict) and isinstance(now, dict):
        for name in kept.keys() - {"required"}:
            inner = f"{path}/{name}"
            if name in now:
                yield from changes(kept[name], now[name], same, inner)
            else:
                yield f"{inner} is missing"
        for name in now.keys() - kept.keys():
            if isinstance(now[name], dict) and now[name].get("required"):
                yield f"{path}/{name} is new and required"
    elif isinstance(kept, list) and isinstance(now, list) and len(kept) == len(now):
        for index, pair in enumerate(zip(kept, now, strict=True)):
            yield from changes(*pair, same, f"{path}/{index}")
    elif not same(kept, now):
        yield f"{path} was {kept!r:.200} and is {now!r:.200}"


def _set(names: Any) -> dict[str, bool]:
    return dict.fromkeys(sorted(names), True)


def _commands(group: Any, above: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the flags of all commands by their names, such as "show tree"."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{above}{name} ")
        else:
            yield above + name, dict(_flags(command))


def _flags(command: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the flags of a command, with the values that they accept if these are few."""
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    for position, param in enumerate(arguments):
        yield str(position), {"many": param.nargs == -1} | _needed(param.required)
    for param in command.params:
        if param in arguments:
            continue
        values = param.metavar.split("|") if param.metavar and param.metavar.islower() else []
        default = param.default
        if param.multiple and default and len(default) == 1:  # as that of a flag with one value
            (default,) = default
        flag = _needed(param.required) or {"default": default}
        flag |= {"variable": param.envvar} if param.envvar else {}
        flag |= {"many": True} if param.multiple else {}
        flag |= {"switch": True} if param.is_flag else {}
        flag |= {"values": _set(values)} if values else {}
        first, *others = [*param.opts, *param.secondary_opts]
        yield first, flag
        yield from ((other, {"of": first}) for other in others)


def _needed(required: bool) -> dict[str, bool]:
    return {"required": True} if required else {}


def _signature(value: Any) -> dict[str, Any]:
    """Return the parameters of a function, or the members of a class."""
    if isinstance(value, type):
        is_called = value.__name__ in _CONSTRUCTORS
        only_parameters = value.__name__ in _OPTIONS and is_dataclass(value)
        called = {"parameters": _parameters(value)} if is_called else {}
        return called | {"members": {} if only_parameters else dict(_members(value))}
    return {"parameters": _parameters(value)} if callable(value) else {}


def _members(cls: type) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the public members of a class that are its own, and the fields of its objects."""
    classes = [kind for kind in cls.__mro__ if kind.__module__.startswith("gpt_cli")]
    names = {name for kind in classes for name in vars(kind)}
    names |= {field.name for field in fields(cls)} if is_dataclass(cls) else set()
    if cls in (gpt_cli.Engine, gpt_cli.Run):
        engine = gpt_cli.load("tiny")
        names |= vars(engine if cls is gpt_cli.Engine else engine.run([], gpt_cli.Options())).keys()
    for name in sorted(names):
        public = not name.startswith("_") or name in _SPECIAL
        if public and f"{cls.__name__}.{name}" not in _INTERNAL:
            value = getattr(cls, name, None)
            is_code = issubclass(cls, Exception) and isinstance(value, int | str)
            yield name, {"value": value} if is_code else _signature(value)


def _parameters(function: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    return {p.name: _parameter(p, position) for position, p in enumerate(parameters)}


def _parameter(parameter: inspect.Parameter, position: int) -> dict[str, Any]:
    if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
        return {}
    described = {"position": position} if parameter.kind != parameter.KEYWORD_ONLY else {}
    if parameter.default is parameter.empty:
        return described | {"required": True}
    default = "a function" if callable(parameter.default) else repr(parameter.default)
    return described | {"default": default}
