"""The sockets that a server listens on."""

import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from gpt_cli.errors import ResourceError
from gpt_cli.options.declare import OptionError, OptionResourceError
from gpt_cli.serve.settings import Settings, find_addresses


def bind(settings: Settings) -> AbstractContextManager[socket.socket]:
    """Listen at the address of the settings; a client that connects waits for an answer."""
    path = settings.unix_socket
    return _bind_path(path) if path else _bind_port(settings.host, settings.port)


def _bind_port(host: str, port: int) -> socket.socket:
    addresses = find_addresses(host, port)
    # A name such as localhost has several addresses; every client tries that of IPv4.
    family, _, _, _, address = min(addresses, key=lambda entry: entry[0] != socket.AF_INET)
    both = host == "::" and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(address, family=family, dualstack_ipv6=both)
    except OSError as error:
        message = f"cannot listen on {host} port {port}: {os.strerror(error.errno or 0)}"
        raise ResourceError(f"{message}; choose another port or another host") from None


@contextmanager
def _bind_path(path: Path) -> Iterator[socket.socket]:
    if not hasattr(socket, "AF_UNIX"):
        raise OptionError("unix_socket", "is not possible on this system; use host and port")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        try:
            with _locked(path.parent):
                _remove_dead(path)
                mask = os.umask(0o177)  # so that the file is never open to others
                try:
                    listening.bind(str(path))
                finally:
                    os.umask(mask)
                listening.listen()
                created = path.stat()
        except OSError as error:
            reason = f"{path}: cannot listen there: {error.strerror or error}; choose another path"
            raise OptionError("unix_socket", reason) from None
        try:
            yield listening
        finally:
            with suppress(OSError), _locked(path.parent):
                if os.path.samestat(created, path.stat()):
                    path.unlink()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder: another start may find our socket before it listens, and remove it."""
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # such as of NFS, which has no locks of folders
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_dead(path: Path) -> None:
    """Remove the socket of a server that was killed."""
    if os.path.lexists(path):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise OptionError("unix_socket", f"{path} exists and is not a socket; choose another")
        if _answers(path):
            cure = "stop it, or choose another path"
            raise OptionResourceError(
                "unix_socket", f"{path}: another server listens there; {cure}"
            )
        path.unlink()


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        # Another error means that the server is busy, or belongs to another user.
        return probe.connect_ex(str(path)) != errno.ECONNREFUSED


def address_of(listening: socket.socket) -> str:
    """Return the address of a socket as a client writes it."""
    name = listening.getsockname()
    if listening.family == socket.AF_INET6:
        return f"http://[{name[0]}]:{name[1]}"
    return f"http://{name[0]}:{name[1]}" if isinstance(name, tuple) else f"unix:{name}"
