"""Errors of the command line itself, such as an unknown option."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from gpt_cli.cli.help import GROUPS
from gpt_cli.errors import InputError, did_you_mean

_TEXT = re.compile(r"-(?!-?[a-z][a-z-]*(=|$))")  # begins with - and does not look like a flag


def usage_error(error: typer.TyperException, program: Any, arguments: Sequence[str]) -> InputError:
    """Return the error to show for an error of typer. It names the help of the command."""
    command = program
    path = ["gpt-cli"]
    for word in arguments:
        if word not in _commands(command):
            break
        command = _commands(command)[word]
        path.append(word)
    return InputError(f"{_complaint(error, command, arguments)}; see `{' '.join(path)} --help`")


def _commands(command: Any) -> Mapping[str, Any]:
    return getattr(command, "commands", {})


def _complaint(error: Any, command: Any, arguments: Sequence[str]) -> str:
    message = error.format_message()
    match type(error).__name__:
        case "NoSuchOption":
            return _no_option(error.option_name, command, arguments)
        case "BadOptionUsage":
            return f"{error.option_name} {'needs a' if 'requires' in message else 'takes no'} value"
        case "MissingParameter":
            param = error.param
            name = param.metavar if param.param_type_name == "argument" else param.opts[0]
            return f"{name} is missing"
    no_command = re.match(r"No such command (['\"])(.*?)\1", message)
    if no_command:
        name = no_command[2]
        near = did_you_mean(name, _commands(command))
        cure = "; to continue a text, use generate" if "generate" in _commands(command) else ""
        return f"there is no command {name}{near or cure}"
    extra = re.match(r"(?s)Got unexpected extra argument\S* \((.*)\)", message)
    if extra:
        return f"unexpected argument {extra[1]}"
    return "a command is missing" if message == "Missing command." else message


def _no_option(name: str, command: Any, arguments: Sequence[str]) -> str:
    """Return the message for an unknown option: the nearest known one, or what to do."""
    flags = []
    for param in command.params:
        if not param.hidden:
            flags += [*param.opts, *param.secondary_opts]
    # The name of another command's flag is not a misspelling.
    is_known = name.removeprefix("--") in " ".join(GROUPS.values()).split()
    near = "" if is_known else did_you_mean(name, flags)
    where = _where(name, arguments)
    cure = ""
    if any(word in _commands(command) for word in arguments):
        cure = "; options come after the command"
    elif where or any(map(_TEXT.match, arguments)):
        cure = "; put -- before a text that begins with -"
    return f"there is no option {name}{where}{near}{cure}"


def _where(name: str, arguments: Sequence[str]) -> str:
    """Return " in -abc" for the flag -b of the argument -abc; "" if it stands alone."""
    words = [word for word in arguments if re.match(f"-[^-]*{re.escape(name[1:])}", word)]
    return f" in {words[0]:.40}" if len(name) == 2 and words and words[0] != name else ""
