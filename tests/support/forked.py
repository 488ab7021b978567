"""Run many commands `gpt-cli` without starting Python and importing NumPy for each.

A server imports what commands need, and forks for each command. The client takes the place of
`gpt-cli` in a shell: it sends its arguments, environment, folder and standard streams to the
server, and ends with the exit code of the fork. Signals do not reach the fork, so `gpt-cli serve`,
which they end, is a process of its own.
"""

import gc
import marshal
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from tempfile import TemporaryDirectory

from gpt_cli.__main__ import main
from gpt_cli.system.startup import prepare

CLIENT = """
import marshal, os, socket, sys

if sys.argv[2:3] == ["serve"]:
    os.execv(sys.executable, [sys.executable, "-P", "-m", "gpt_cli", *sys.argv[2:]])
server = socket.socket(socket.AF_UNIX)
server.connect(sys.argv[1])
socket.send_fds(server, [b" "], [0, 1, 2])
server.sendall(marshal.dumps((sys.argv[2:], dict(os.environ), os.getcwd())))
server.shutdown(socket.SHUT_WR)
os._exit(server.recv(1)[0])
"""
# What commands import. If a name does not exist here, each fork imports what it needs.
MODULES = [
    "gpt_cli.loading",
    "gpt_cli.jobs",
    "gpt_cli.jobs.parts",
    "gpt_cli.compression.codec",
    "gpt_cli.scoring.rank",
    "gpt_cli.scoring.tree",
    "gpt_cli.cli.show.picture",
    "matplotlib.figure",
    "llguidance",
    "pyarrow.parquet",
]


@contextmanager
def client_of_a_server() -> Iterator[list[str]]:
    """Start a server; yield the command of its client, which takes the arguments of `gpt-cli`."""
    with TemporaryDirectory() as folder:
        address = f"{folder}/socket"  # a short path: an address has at most 104 characters
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            command = [sys.executable, "-P", __file__, str(listener.fileno())]
            server = subprocess.Popen(command, pass_fds=[listener.fileno()])
        try:
            yield [sys.executable, "-IS", "-c", CLIENT, address]
        finally:
            server.kill()
            server.wait()


def serve(listener: socket.socket) -> None:
    """Fork for each client."""
    prepare(None)
    for module in MODULES:
        with suppress(ImportError):
            import_module(module)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    while True:
        client, _ = listener.accept()
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            _, streams, _, _ = socket.recv_fds(client, 1, 3)
            request = client.makefile("rb").read()
            if not (command := os.fork()):
                client.close()
                run(streams, *marshal.loads(request))
            for stream in streams:
                os.close(stream)
            _, status = os.waitpid(command, 0)
            code = os.waitstatus_to_exitcode(status)
            client.sendall(bytes([code if code >= 0 else 128 - code]))
            os._exit(0)
        client.close()


def run(streams: list[int], arguments: list[str], env: dict[str, str], folder: str) -> None:
    """Run one command in this process, and end."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["gpt-cli", *arguments]
    main()


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
