"""TAB in bash, zsh and fish, as a user has it: in real shells, on a terminal, in a new home."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import shellingham
from processes import COMMAND, path_with_command, posix
from typer.main import get_command

from gpt_cli.cli import app
from gpt_cli.hub.local import bundled
from gpt_cli.ops import _IMPLEMENTATIONS

SHELLS = ["bash", "zsh", "fish"]
RC = {"bash": ".bashrc", "zsh": ".zshrc", "fish": ".config/fish/config.fish"}
SHOWN = {
    "bash": "source <(gpt-cli --show-completion)",
    "zsh": "source <(gpt-cli --show-completion)",
    "fish": "gpt-cli --show-completion | source",
}
# A terminal of its own for a shell, which reads its keys from a pipe.
ON_TERMINAL = [sys.executable, "-c", "import pty, sys; pty.spawn(sys.argv[1:])"]

pytestmark = posix


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Make an empty home the working directory, with the script `gpt-cli` on the PATH."""
    home = tmp_path / "ann's home"
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
    """Type each line and TAB; return what has become of the lines, and all that was shown."""
    # The line is then shown by `echo`, which is put before it.
    keys = "".join(f'{line}\t\x01echo "<\x05>"\r' for line in lines) + "exit\r"
    finished = subprocess.run(
        [*ON_TERMINAL, shell, "-i"], input=keys.encode(), capture_output=True, timeout=60
    )
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", finished.stdout.decode())
    return [line.rstrip() for line in re.findall(r"[\r\n]<(.*?)>\r", shown)], shown


def install(shell):
    # A shell becomes the last of its commands, and would be gone when gpt-cli asks what it is.
    return subprocess.run(
        [shell, "-c", "gpt-cli --install-completion; exit"], capture_output=True, timeout=60
    )


def answers(line):
    """What can come next, as bash is told."""
    words = line.split(" ")
    env = {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
    env["_GPT_CLI_COMPLETE"] = "complete_bash"
    finished = subprocess.run(
        COMMAND, env={**os.environ, **env}, capture_output=True, timeout=60, check=True
    )
    return finished.stdout.decode().split()


# --- in the shells -------------------------------------------------------------------------------


def test_tab_completes_names_values_and_files(home, shell):
    (home / RC[shell]).touch()
    assert install(shell).returncode == 0
    (home / "gpt2-own").mkdir()
    (home / "gpt2-own" / "config.json").touch()
    (home / "notes.txt").touch()
    completed = {
        "gpt-cli gen": "gpt-cli generate",
        "gpt-cli --inst": "gpt-cli --install-completion",
        "gpt-cli generate --dt": "gpt-cli generate --dtype",
        "gpt-cli generate 'a b' --samp": "gpt-cli generate 'a b' --samples",
        "gpt-cli rank --by tok": "gpt-cli rank --by token",
        "gpt-cli score --device cu": "gpt-cli score --device cuda",
        "gpt-cli generate --dtype i": "gpt-cli generate --dtype int8",
        "gpt-cli next -m ti": "gpt-cli next -m tiny",
        "gpt-cli bench --model gpt2-ow": "gpt-cli bench --model gpt2-own",
        "gpt-cli info ./gpt2": "gpt-cli info ./gpt2-own",
        "gpt-cli verify gpt2-me": "gpt-cli verify gpt2-medium",
        "gpt-cli download dis": "gpt-cli download distilgpt2",
        "gpt-cli score not": "gpt-cli score notes.txt",
        "gpt-cli generate --file not": "gpt-cli generate --file notes.txt",
        # What cannot be completed stays as it is.
        "gpt-cli --version ": "gpt-cli --version",
        "gpt-cli nosuch --x": "gpt-cli nosuch --x",
        "gpt-cli generate --seed abc": "gpt-cli generate --seed abc",
    }
    found, shown = press_tab(shell, *completed)
    assert found == list(completed.values())
    assert "rror" not in shown.replace("error  ", "")


def test_a_shell_may_read_the_script_itself(home, shell):
    (home / RC[shell]).write_text(SHOWN[shell], encoding="utf-8")
    assert press_tab(shell, "gpt-cli gen")[0] == ["gpt-cli generate"]


def test_where_the_command_does_not_work_tab_says_nothing_of_it(home, shell):
    (home / RC[shell]).touch()
    install(shell)
    script = Path(shutil.which("gpt-cli"))
    for text in ("#!/bin/sh\necho Traceback >&2; exit 1\n", "#!/nowhere/python\n"):
        script.write_text(text, encoding="utf-8")
        found, shown = press_tab(shell, "gpt-cli gen")
        assert found == ["gpt-cli gen"]
        assert "Traceback" not in shown
        assert "o such file" not in shown


# --- installing ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "before", [b"", b"alias ll='ls -l'  # caf\xe9, and no line end", b"# mine\n"]
)
def test_installing_twice_adds_one_line_to_what_is_there(home, shell, before):
    rc = home / RC[shell]
    rc.write_bytes(before)
    rc.chmod(0o640)
    for _ in range(2):
        finished = install(shell)
        assert (finished.returncode, finished.stderr) == (0, b"")
        assert finished.stdout.count(b"\n") == 1
    after = rc.read_bytes()
    assert after.startswith(before)
    added = after.removeprefix(before).strip()
    assert bool(added) == (shell != "fish")
    assert b"\n" not in added
    assert rc.stat().st_mode & 0o777 == 0o640


def test_a_place_of_its_own_for_the_configuration_is_taken(home, shell, monkeypatch):
    place = home / "place"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(place))
    monkeypatch.setenv("ZDOTDIR", str(home))
    (home / ".zshrc").touch()
    assert install(shell).returncode == 0
    (file,) = (path for path in place.rglob("*") if path.is_file())
    assert file.name in ("completion.bash", "completion.zsh", "gpt-cli.fish")
    assert press_tab(shell, "gpt-cli gen")[0] == ["gpt-cli generate"]


def test_what_cannot_be_written_is_one_line_and_exit_code_5(home, shell):
    (home / ".config" / "gpt-cli").touch()
    shutil.rmtree(home / ".config" / "fish")
    (home / ".config" / "fish").touch()
    finished = install(shell)
    assert finished.returncode == 5
    assert finished.stdout == b""
    assert finished.stderr.startswith(b"gpt-cli: error: cannot install the completion: ")
    assert finished.stderr.count(b"\n") == 1


@pytest.mark.parametrize("flag", ["--install-completion", "--show-completion"])
@pytest.mark.parametrize("found", ["tcsh", None])
def test_in_another_shell_is_one_line_and_exit_code_2(home, flag, found, monkeypatch, capsys):
    def detect():
        if found is None:
            raise shellingham.ShellDetectionFailure
        return found, f"/bin/{found}"

    monkeypatch.setattr(shellingham, "detect_shell", detect)
    assert app.run([flag]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("gpt-cli: error: ")
    assert "bash, zsh, fish" in printed.err
    assert printed.err.count("\n") == 1


# --- what is answered ----------------------------------------------------------------------------


def test_models_are_those_that_are_known_here(home):
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


def test_types_and_devices_are_those_that_can_be_computed():
    devices, dtypes = zip(*_IMPLEMENTATIONS, strict=True)
    assert set(answers("gpt-cli score --device ")) == {"auto", *devices}
    assert set(answers("gpt-cli score --dtype ")) == {"auto", *dtypes}


def test_every_command_is_offered():
    assert sorted(answers("gpt-cli ")) == sorted(get_command(app.app).commands)


@pytest.mark.parametrize("line", ["gpt-cli ", "gpt-cli bench --", "gpt-cli next --model "])
def test_an_answer_needs_no_numpy_and_no_client_of_the_hub(line):
    words = line.split(" ")
    env = {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    env["_GPT_CLI_COMPLETE"] = "complete_bash"
    code = (
        "import atexit, sys; from gpt_cli.__main__ import main;"
        "heavy = ('numpy', 'huggingface_hub', 'tiktoken', 'rich');"
        "atexit.register(lambda: print(*(name for name in heavy if name in sys.modules)));"
        "main()"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, timeout=60
    )
    assert finished.stderr == b""
    *offered, loaded = finished.stdout.decode().splitlines()
    assert offered
    assert loaded == ""
