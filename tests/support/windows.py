r"""Some rules of Windows, in a process on Linux: `python -m support.windows COMMANDS`.

It lacks what Python for Windows lacks; `select` takes only sockets; no file can be replaced,
renamed or removed while it is open; `\` separates folders; standard streams are not in UTF-8. Other
packages are imported before, so that they see their own platform.
"""

import asyncio  # noqa: F401 (as the packages below)
import errno
import importlib
import io
import json
import mmap
import os
import select
import shutil
import signal
import socket
import sys
from pathlib import Path

MODULES = ("fcntl", "grp", "pwd", "resource", "termios")
MISSING = {
    os: "fork geteuid getuid mkfifo posix_fadvise pread register_at_fork sched_getaffinity sysconf",
    mmap: "MADV_HUGEPAGE MAP_ANONYMOUS MAP_PRIVATE MAP_SHARED",
    signal: "SIGHUP SIGALRM SIGKILL",
    socket: "AF_UNIX",
}
PACKAGES = (
    *("numpy", "safetensors.numpy", "tiktoken", "typer", "rich.console", "rich.markdown", "fsspec"),
    *("fsspec.implementations.local", "tempfile", "webbrowser", "zipfile"),
)
BREAK = 21  # the number of SIGBREAK
OPEN = Path("/proc/self/fd")
MAPPED = Path("/proc/self/maps")


def pretend() -> None:
    """Change this process; call it before gpt_cli is imported."""
    for package in PACKAGES:
        importlib.import_module(package)
    for module in MODULES:
        sys.modules[module] = None
    for module, names in MISSING.items():
        for name in names.split():
            delattr(module, name)
    sys.platform = "win32"
    os.sep = "\\"
    signal.SIGBREAK = BREAK
    shutil._use_fd_functions = False  # so that rmtree calls the functions below
    select.select = _select
    for name in ("replace", "rename", "remove", "unlink"):
        setattr(os, name, _refusing(getattr(os, name)))


def _select(*arguments):
    raise OSError(10038, "An operation was attempted on something that is not a socket")


def _refusing(function):
    """Return a function of `os` that raises PermissionError for files that are open here."""

    def call(*paths, **options):
        used = {os.path.realpath(link) for link in OPEN.iterdir()}
        used |= {line.split(maxsplit=5)[-1] for line in MAPPED.read_text().splitlines()}
        for path in paths:
            if Path(path).is_file() and os.path.realpath(path) in used:
                raise PermissionError(errno.EACCES, "The file is in use", str(path))
        return function(*paths, **options)

    return call


def main() -> None:
    """Run commands, given as JSON, and print their exit codes and outputs as JSON."""
    commands = json.loads(sys.argv[1])
    pretend()
    from gpt_cli.cli import app
    from gpt_cli.system import library, signals

    assert signals.ENDING == [signal.SIGINT, signal.SIGTERM, BREAK]
    library.LIBRARIES["win32"] = library.LIBRARIES["linux"]  # that of this machine
    results, usual = [], (sys.stdout, sys.stderr)
    for variables, arguments in commands:
        os.environ |= variables
        streams = [io.TextIOWrapper(io.BytesIO(), "cp1252", "strict") for _ in usual]
        sys.stdout, sys.stderr = streams
        app.use_utf8()
        code = app.run(arguments)
        for stream in streams:
            stream.flush()
        results.append([code, *(stream.buffer.getvalue().decode() for stream in streams)])
        sys.stdout, sys.stderr = usual
    print(json.dumps(results))


if __name__ == "__main__":
    main()
