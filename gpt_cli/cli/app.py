"""The application: join the commands, and turn every error into one line and an exit code."""

import atexit
import os
import signal
import sys
import traceback
from contextlib import suppress
from typing import NoReturn

import typer
from typer.core import TyperGroup
from typer.main import get_command

from gpt_cli import __version__
from gpt_cli.cli.commands import COMMANDS, NAMES, import_command
from gpt_cli.cli.help import HelpFormatter, add_command
from gpt_cli.cli.output import note, verbose
from gpt_cli.cli.parameters import command as with_flags
from gpt_cli.cli.usage import check_flags, usage_error
from gpt_cli.errors import GPTCLIError, ResourceError
from gpt_cli.options.declare import option
from gpt_cli.system.signals import ENDING, interrupt, received
from gpt_cli.system.terminal import silence, use_utf8

_LONGEST = 1000  # characters of a message
_CURE = "use fewer or shorter texts at a time, or a smaller model"
# What the dynamic linker and the threading module say when they get no memory.
_NO_MEMORY = ("failed to map segment", "annot allocate memory", "can't start new thread")


def _print_version(context: typer.Context, value: bool) -> None:
    if value and not context.resilient_parsing:  # a shell completes with TAB
        typer.echo(f"gpt-cli {__version__}")
        raise typer.Exit


def _options(
    version: bool = option(False, "Show the version.", callback=_print_version, is_eager=True),
) -> None:
    pass


def application(name: str | None = None) -> typer.Typer:
    """Return the application: with the command `name` only, which starts sooner, or with all."""
    app = typer.Typer(
        help="GPT-2 in a terminal, without PyTorch.",
        epilog="Begin with: gpt-cli generate --model tiny 'Once upon a time'",
        rich_markup_mode=None,  # plain help needs no import of Rich, and reads well in a pipe
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(with_flags(_options))
    for command in [name] if name in COMMANDS else COMMANDS:
        add_command(app, command, import_command(command))
    if name not in COMMANDS:
        from gpt_cli.cli.show.commands import show

        app.add_typer(show, name="show", short_help=show.info.help)
    TyperGroup.context_class.formatter_class = HelpFormatter  # of every command
    return app


def main() -> NoReturn:
    """Run the command line and exit."""
    use_utf8()
    if "_GPT_CLI_COMPLETE" in os.environ:  # a shell asks for completions
        application()(prog_name="gpt-cli")
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup sets it for SIGHUP
            signal.signal(number, interrupt)
    code = run(sys.argv[1:] or ["--help"])
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)  # nothing is left to interrupt
    if code and received:  # not only 130: a terminal that is closed takes no more output
        code = 128 + received[0]
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # None, or `run` has reported it
            stream.flush()
    atexit._run_exitfuncs()
    os._exit(code)  # without the slow teardown of modules


def _without_help(arguments: list[str]) -> list[str]:
    """Replace `help NAME` by `NAME --help` if the command has no page in the guide."""
    match arguments:
        case ["help", "show", name]:
            return ["show", name, "--help"]
        case ["help", name] if name in NAMES:
            from gpt_cli.cli.guide import find_page

            return arguments if find_page(name) else [name, "--help"]
    return arguments


def run(arguments: list[str]) -> int:
    """Run one command; return its exit code."""
    try:
        arguments = _without_help(arguments)
        command = get_command(application(arguments[0] if arguments else None))
        check_flags(command, arguments)
        with command.make_context("gpt-cli", arguments) as context:
            command.invoke(context)
        if sys.stdout is not None:
            sys.stdout.flush()
    except typer.Exit as finished:
        return finished.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:  # the reader has closed the pipe
        silence(sys.stdout)
        return 141
    except Exception as error:
        if isinstance(error, typer.TyperException):
            error = usage_error(error, command, arguments)
        explained = _explain(error)
        if explained is None:
            if received:  # imports and bodies of classes turn interrupts into other errors
                return 130
            raise
        if verbose():
            note(traceback.format_exc().rstrip())
        # One line of bounded length, whatever a path, a server or a damaged file contributes.
        note(f"gpt-cli: error: {' '.join(str(explained).split())[:_LONGEST]}")
        return explained.exit_code
    return 0


def _explain(error: Exception) -> GPTCLIError | None:
    """Return the error that a user sees for an exception; None for a bug."""
    match error:
        case GPTCLIError():
            return error
        case OSError(filename=None):
            silence(sys.stdout)  # such as the help, on a full disk
            return ResourceError(f"cannot write to standard output: {error.strerror or error}")
        case OSError():
            return ResourceError(f"{error.filename}: {error.strerror or error}")
        case MemoryError() | ImportError() | RuntimeError():
            if isinstance(error, MemoryError) or any(why in str(error) for why in _NO_MEMORY):
                return ResourceError(f"out of memory or threads ({error!r:.120}): {_CURE}")
    return None
