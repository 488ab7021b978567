"""A separate set of folders for a command, and the checks after every fault.

Whatever the fault, the command ends in time, with the documented exit code; standard error has one
line, which says what is wrong and what to do; standard output has only results; and no file is
changed, left over or half-written.
"""

import contextlib
import hashlib
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from support.in_process import finished
from support.processes import COMMAND, LIMIT, LimitedProcess

Suffer = Callable[..., str]


def fault_row(number, name, code, *values, intact, marks=()):
    """Return a row of a parametrized test: its values, with the fault as its name and mark."""
    mark = pytest.mark.fault(number, name, code, intact=intact)
    return pytest.param(*values, id=name, marks=[mark, *marks])


class World:
    """The folders of a process: home, temporary files, cache and working folder.

    Attributes:
        env: the environment variables of its processes.
    """

    def __init__(self, root: Path):
        self.root = root
        folders = {"HOME": "home", "TMPDIR": "tmp", "HF_HOME": "huggingface"}
        self.env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("HF_", "HUGGINGFACE_", "XDG_", "GPT_CLI_MODEL"))
        }
        self.env |= {name: str(root / folder) for name, folder in folders.items()}
        self.place = root / "place"
        for name in ("home", "tmp", "place"):
            (root / name).mkdir(parents=True)

    def start(self, *arguments: object, **options: Any) -> LimitedProcess:
        """Start a command with all three streams piped."""
        pipes = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "env": self.env | options.pop("env", {}),
            "cwd": self.place,
        }
        texts = [value if isinstance(value, bytes) else str(value) for value in arguments]
        command = [*options.pop("before", []), *COMMAND, *texts]
        return LimitedProcess(command, **pipes | options)

    def run(
        self, *arguments: object, stdin: bytes = b"", limit: float = LIMIT, **options: Any
    ) -> "subprocess.CompletedProcess[bytes]":
        """Run a command, which must end in time."""
        with self.start(*arguments, limit=limit, **options) as process:
            out, errors = process.communicate(stdin)
        return subprocess.CompletedProcess(process.args, process.returncode, out, errors)

    def output(self, *arguments: object, **options: Any) -> bytes:
        """Run a command that must succeed; return its standard output."""
        finished = self.run(*arguments, **options)
        assert finished.returncode == 0, finished.stderr
        return finished.stdout

    def run_in_namespace(
        self, script: str, *arguments: object, **options: Any
    ) -> "subprocess.CompletedProcess[bytes]":
        """Run a command in a mount namespace that a script has changed."""
        namespace = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "-r"]
        possible = (
            shutil.which("unshare")
            and not subprocess.run([*namespace, "sh", "-c", script], capture_output=True).returncode
        )
        if not possible:
            pytest.skip(f"not possible here: {script.split()[0]} in a namespace")
        before = [*namespace, "sh", "-c", f'{script} && exec "$@"', "sh"]
        return self.run(*arguments, before=before, **options)

    def run_here(
        self, *arguments: object, stdin: bytes = b"", env: Mapping[str, str] | None = None
    ) -> "subprocess.CompletedProcess[bytes]":
        """Run a command in this process, which takes a tenth of the time."""
        with contextlib.chdir(self.place):
            return finished(*arguments, input=stdin, **env or {})

    def suffer(
        self,
        *arguments: object,
        code: int,
        says: str,
        do: str,
        changes: bool = False,
        run: Callable[..., "subprocess.CompletedProcess[bytes]"] | None = None,
        **options: Any,
    ) -> str:
        """Run a command that must fail as expected; return its message with PATH for this folder.

        Args:
            arguments: of the command.
            code: the exit code.
            says: the part of the message that says what is wrong.
            do: the part that says what to do.
            changes: whether files may change.
            run: `run`, which is the default, or `run_here`.
            options: of `run`.
        """
        before = self.tree()
        message = check_failure((run or self.run)(*arguments, **options), code)
        assert says in message
        assert do in message
        assert changes or self.tree() == before
        return message.removeprefix("gpt-cli: error: ").replace(str(self.root), "PATH")

    def tree(self) -> dict[str, str]:
        """Return the paths in this world, each with its content."""
        return {str(path.relative_to(self.root)): _content(path) for path in self.root.rglob("*")}


def check_failure(finished: "subprocess.CompletedProcess[bytes]", code: int) -> str:
    """Check what is common to all failures; return the line of the error."""
    errors = finished.stderr.decode()
    assert finished.returncode == code, errors
    assert errors.startswith("gpt-cli: error: ")
    assert errors.endswith("\n")
    assert errors[:-1].isprintable(), "one line, without control characters"
    assert len(errors) < 1100
    assert finished.stdout == b""
    return errors[:-1]


def _content(path: Path) -> str:
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        return f"-> {path.readlink()}"
    if stat.S_ISREG(mode) and path.stat().st_size < 2**30:  # and not a sparse file
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    return stat.filemode(mode)
