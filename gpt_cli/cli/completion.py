"""Completion in the shell: what is known of values, the shells' scripts, and where they are kept.

typer answers what can come next. The scripts and their installation are not its own, which print
errors into the prompt, leave the first TAB in zsh without an answer, and write ~/.bashrc anew.
"""

import os
import shlex
from collections.abc import Callable
from glob import escape, glob
from pathlib import Path
from typing import Any, NoReturn

import shellingham
import typer
from typer._completion_classes import completion_init  # the version of typer has a limit

from gpt_cli.cli.text import write
from gpt_cli.errors import InputError, ResourceError

VARIABLE = "_GPT_CLI_COMPLETE"  # by which a script asks, and says in which shell

_SCRIPTS = {
    "bash": """\
_gpt_cli_completion() {
    local IFS=$'\\n'
    COMPREPLY=( $(env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD="$COMP_CWORD" \\
        _GPT_CLI_COMPLETE=complete_bash "${1/#\\~/$HOME}" 2>/dev/null) )
}
complete -o default -F _gpt_cli_completion gpt-cli
""",
    "zsh": """\
_gpt_cli_completion() {
    eval $(env _TYPER_COMPLETE_ARGS="${words[1,$CURRENT]}" \\
        _GPT_CLI_COMPLETE=complete_zsh ${~words[1]} 2>/dev/null)
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i }
compdef _gpt_cli_completion gpt-cli
""",
    "fish": """\
function __gpt_cli_completion
    set --global __gpt_cli_found (env _TYPER_COMPLETE_ARGS=(commandline -cp) \\
        _TYPER_COMPLETE_FISH_ACTION=get-args _GPT_CLI_COMPLETE=complete_fish gpt-cli 2>/dev/null)
    test -n "$__gpt_cli_found"
end
complete --command gpt-cli --no-files --condition __gpt_cli_completion \\
    --arguments '$__gpt_cli_found'
""",
}


def models(incomplete: str) -> list[str]:
    """What `--model` takes: names, what is in the Hub's cache, and folders that begin so."""
    from gpt_cli.hub.local import BUNDLED, CONFIG, SHORT_NAMES, list_models

    names = dict.fromkeys([*BUNDLED, *SHORT_NAMES, *(model.name for model in list_models())])
    found = glob(f"{escape(incomplete)}*/{CONFIG}")  # noqa: PTH207 (leaves ./ as it is)
    folders = [file.removesuffix(f"/{CONFIG}") for file in sorted(found)]
    # bash puts names in as they are; where there is nothing to offer, each shell offers its files.
    return [name for name in [*names, *folders] if shlex.quote(name) == name]


def downloads() -> list[str]:
    """What `download` takes, as far as it is known without asking the Hub."""
    from gpt_cli.hub.local import SHORT_NAMES

    return list(SHORT_NAMES)


def devices() -> list[str]:
    """What `--device` takes."""
    return ["auto", "cpu", "cuda"]


def dtypes() -> list[str]:
    """What `--dtype` takes."""
    return ["auto", "float32", "float16", "int8"]


def answer(command: Callable[..., Any]) -> NoReturn:
    """Print what a script has asked for, and exit."""
    completion_init()
    raise SystemExit(command(prog_name="gpt-cli"))


def show(context: typer.Context, wanted: bool) -> None:
    """Print the script for the shell that this runs in, and exit.

    Raises:
        InputError: there is none for that shell.
    """
    if wanted and not context.resilient_parsing:
        write(_SCRIPTS[_shell()])
        raise typer.Exit


def install(context: typer.Context, wanted: bool) -> None:
    """Write the script for the shell that this runs in to where that reads it, and exit.

    Raises:
        InputError: there is none for that shell.
        ResourceError: a file cannot be written.
    """
    if not wanted or context.resilient_parsing:
        return
    shell = _shell()
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    file = config / "gpt-cli" / f"completion.{shell}"
    if shell == "fish":
        file = config / "fish" / "completions" / "gpt-cli.fish"  # fish reads what is there
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_SCRIPTS[shell], encoding="utf-8")
        if shell == "bash":
            _add_line(Path.home() / ".bashrc", f"source {shlex.quote(str(file))}")
        elif shell == "zsh":
            folder = os.environ.get("ZDOTDIR") or Path.home()
            _add_line(Path(folder, ".zshrc"), f"source {shlex.quote(str(file))}")
    except OSError as error:
        reason = f"{error.filename or file}: {error.strerror}"
        raise ResourceError(f"cannot install the completion: {reason}") from error
    write(f"Completion for {shell} is in {file}: open a new terminal to use it\n")
    raise typer.Exit


def _shell() -> str:
    try:
        shell: str = shellingham.detect_shell()[0]
    except shellingham.ShellDetectionFailure:
        shell = "a shell that is not known"
    if shell not in _SCRIPTS:
        raise InputError(f"this runs in {shell}: there is completion in {', '.join(_SCRIPTS)}")
    return shell


def _add_line(file: Path, line: str) -> None:
    """Add a line to a file that may be there, which is left as it is otherwise."""
    with file.open("a+b") as stream:
        stream.seek(0)
        text = stream.read()
        if line.encode() not in text.splitlines():
            start = "\n" if text and not text.endswith(b"\n") else ""
            stream.write(f"{start}{line}\n".encode())
