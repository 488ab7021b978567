"""Real processes of `gpt-cli` that start in a tenth of the time: a prepared process forks them.

It has imported what commands need; it has opened no file and started no thread. A command has its
own arguments, working folder, environment, and the standard streams of its caller, which waits for
its exit code. Tests of the start, of signals and of limits need `processes.COMMAND`.
"""

import importlib
import marshal
import os
import pkgutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# These read variables of the environment while they are imported, or need what is not installed.
_LATER = ("__main__", "hub", "serve", "ray", "lm_eval")
_ALSO = ("numpy.random", "rich.console", "rich.text", "safetensors", "tiktoken")

# What a shell starts: without `site`, which takes most of the start of Python. A server, which ends
# by a signal, is a process as usual.
_CLIENT = """
import _socket, marshal, posix, sys
if sys.argv[2:3] == ["serve"]:
    posix.execv(sys.executable, [sys.executable, "-P", "-m", "gpt_cli", *sys.argv[2:]])
environment = {name.decode("utf-8", "surrogateescape"): value.decode("utf-8", "surrogateescape")
               for name, value in posix.environ.items()}
request = marshal.dumps((sys.argv[2:], posix.getcwd(), environment))
server = _socket.socket(_socket.AF_UNIX)
server.connect(sys.argv[1])
streams = b"".join(number.to_bytes(4, sys.byteorder) for number in range(3))
passed = _socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams
server.sendmsg([len(request).to_bytes(8, "big")], [passed])
server.sendall(request)
code = server.recv(1)
posix._exit(code[0] if code else 1)
"""


@contextmanager
def prepared(path: Path) -> Iterator[list[str]]:
    """Start the process that forks others, with a socket at this path; yield the command."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        command = [sys.executable, "-P", str(Path(__file__)), str(server.fileno())]
        threads = {"OPENBLAS_NUM_THREADS": "1"}  # no thread would survive the fork
        options = {"pass_fds": [server.fileno()], "env": os.environ | threads}
        process = subprocess.Popen(command, **options)
    with process:
        try:
            yield [sys.executable, "-I", "-S", "-c", _CLIENT, str(path)]
        finally:
            process.terminate()


def _import_all() -> None:
    import gpt_cli

    for module in pkgutil.walk_packages(gpt_cli.__path__, "gpt_cli."):
        room, *_ = module.name.split(".")[1:]
        if room not in _LATER:
            with suppress(ModuleNotFoundError):  # CuPy
                importlib.import_module(module.name)
    for name in _ALSO:
        importlib.import_module(name)


def _serve(server: socket.socket) -> None:
    """Fork for each request until a signal ends this process."""
    _import_all()
    while True:
        connection, _ = server.accept()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # the clients have received the exit codes
                pass
        header, streams, *_ = socket.recv_fds(connection, 8, 3)
        if os.fork() == 0:
            server.close()
            _run(connection, int.from_bytes(header, "big"), streams)
        connection.close()
        for stream in streams:
            os.close(stream)


def _run(connection: socket.socket, size: int, streams: list[int]) -> None:
    """Be a command, which sends its exit code when it ends."""
    with connection.makefile("rb") as file:
        arguments, folder, environment = marshal.loads(file.read(size))
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["gpt-cli", *arguments]
    leave = os._exit

    def leave_with(code: int) -> None:
        connection.send(bytes([code]))
        leave(code)

    os._exit = leave_with
    from gpt_cli.__main__ import main

    try:
        main()
    except BaseException as error:  # as the interpreter ends
        sys.excepthook(type(error), error, error.__traceback__)
    leave_with(1)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
