"""Completion in bash, zsh and fish: real shells, on a terminal, in a new home."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from typer.main import get_command

from gpt_cli.cli import app
from gpt_cli.hub.local import bundled
from gpt_cli.ops.select import _IMPLEMENTATIONS
from support.processes import path_with_command, posix

SHELLS = ["bash", "zsh", "fish"]
RC = {"bash": ".bashrc", "zsh": ".zshrc", "fish": ".config/fish/config.fish"}
# The lines of the documentation.
READ = {
    "bash": 'eval "$(gpt-cli --show-completion)"',
    "zsh": 'autoload -Uz compinit && compinit; eval "$(gpt-cli --show-completion)"',
    "fish": "gpt-cli --show-completion | source",
}
# A pseudo-terminal for a shell, which reads its keys from a pipe.
ON_TERMINAL = [sys.executable, "-c", "import pty, sys; pty.spawn(sys.argv[1:])"]

pytestmark = posix


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Make an empty home the working directory, with the script `gpt-cli` on the PATH."""
    home = tmp_path / "ann home"
    for name in RC.values():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
    for name in [*os.environ]:
        if name.startswith(("HF_", "XDG_", "ZDOTDIR", "GPT_CLI_MODEL")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("PATH", path_with_command(tmp_path / "bin"))
    monkeypatch.chdir(home)
    return home


@pytest.fixture(params=SHELLS)
def shell(request):
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return request.param


def press_tab(shell, *lines):
    """Type lines with a TAB after them; return the completed lines and the whole output."""
    # Then put `echo` before the line to print it.
    keys = "".join(f'{line}\t\x01echo "<\x05>"\r' for line in lines) + "exit\r"
    finished = subprocess.run(
        [*ON_TERMINAL, shell, "-i"], input=keys.encode(), capture_output=True, timeout=60
    )
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", finished.stdout.decode())
    return [line.rstrip() for line in re.findall(r"[\r\n]<(.*?)>\r", shown)], shown


def asking(line):
    """Return the variables by which bash asks for the completions of a line."""
    words = line.split(" ")
    variables = {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
    return variables | {"_GPT_CLI_COMPLETE": "complete_bash"}


@pytest.fixture
def answers(monkeypatch, capsys):
    """Return a function that returns the completions of a line for bash."""

    def answers(line):
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            for name, value in asking(line).items():
                patch.setenv(name, value)
            app.main()
        return capsys.readouterr().out.split()

    return answers


# --- in the shells -------------------------------------------------------------------------------


def test_tab_completes_names_values_and_files(home, shell):
    (home / RC[shell]).write_text(READ[shell], encoding="utf-8")
    (home / "gpt2-own").mkdir()
    (home / "gpt2-own" / "config.json").touch()
    (home / "notes.txt").touch()
    completed = {
        "gpt-cli gen": "gpt-cli generate",
        "gpt-cli generate --dt": "gpt-cli generate --dtype",
        "gpt-cli rank --by tok": "gpt-cli rank --by token",
        "gpt-cli generate --dtype i": "gpt-cli generate --dtype int8",
        "gpt-cli next -m ti": "gpt-cli next -m tiny",
        "gpt-cli bench --model gpt2-ow": "gpt-cli bench --model gpt2-own",
        "gpt-cli download dis": "gpt-cli download distilgpt2",
        "gpt-cli score not": "gpt-cli score notes.txt",
        # Without completions, the line is unchanged.
        "gpt-cli --version ": "gpt-cli --version",
        "gpt-cli nosuch --x": "gpt-cli nosuch --x",
        "gpt-cli generate --seed abc": "gpt-cli generate --seed abc",
    }
    lines, shown = press_tab(shell, *completed)
    assert lines == list(completed.values())
    assert "rror" not in shown.replace("error  ", "")


def test_completion_can_be_installed(home, shell):
    # Without `exit`, the shell would exec gpt-cli, which could not detect its name then.
    command = [shell, "-c", "gpt-cli --install-completion; exit"]
    subprocess.run(command, capture_output=True, timeout=60, check=True)
    lines, _ = press_tab(shell, "gpt-cli ", "gpt-cli gen")  # zsh reads the script at the first TAB
    assert lines[1] == "gpt-cli generate"


# --- completions ---------------------------------------------------------------------------------


def test_models_are_bundled_published_and_local_ones(home, answers):
    cached = home / ".cache/huggingface/hub/models--ann--mine/snapshots" / ("0" * 40)
    cached.parent.mkdir(parents=True)
    cached.symlink_to(bundled("tiny"))
    for folder in ("own", "two words", "empty"):
        (home / folder).mkdir()
    (home / "own" / "config.json").touch()
    (home / "two words" / "config.json").touch()
    names = ["tiny", "distilgpt2", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"]
    assert answers("gpt-cli generate --model ") == [*names, "ann/mine", "own"]
    assert answers("gpt-cli quantize ann/") == ["ann/mine"]
    assert answers("gpt-cli download ") == names[1:]


def test_commands_types_and_devices_are_the_implemented_ones(answers):
    kinds = _IMPLEMENTATIONS.values()
    devices = {kind.device for kind in kinds}
    dtypes = {dtype for kind in kinds for dtype in kind.dtypes}
    assert set(answers("gpt-cli score --device ")) == {"auto", *devices}
    assert set(answers("gpt-cli score --dtype ")) == {"auto", *dtypes}
    assert sorted(answers("gpt-cli ")) == sorted(get_command(app.application()).commands)


def test_completion_reads_no_file_that_a_flag_names(tmp_path, answers):
    os.mkfifo(tmp_path / "pipe")  # to open it would wait
    assert answers(f"gpt-cli generate --grammar {tmp_path}/pipe --reg") == ["--regex"]


@pytest.mark.parametrize("line", ["gpt-cli ", "gpt-cli bench --", "gpt-cli next --model "])
def test_completion_imports_no_slow_packages(line):
    code = (
        "import atexit, sys; from gpt_cli.__main__ import main;"
        "heavy = ('numpy', 'huggingface_hub', 'tiktoken', 'rich');"
        "atexit.register(lambda: print(*(name for name in heavy if name in sys.modules)));"
        "main()"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **asking(line)},
        capture_output=True,
        timeout=60,
    )
    assert finished.stderr == b""
    *offered, loaded = finished.stdout.decode().splitlines()
    assert offered
    assert loaded == ""
