"""The sockets that a server listens on."""

import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from gpt_cli.errors import ResourceError
from gpt_cli.options.declare import OptionError, OptionResourceError
from gpt_cli.serve.front import systemd
from gpt_cli.serve.settings import Settings, find_addresses
from gpt_cli.system.machine import error_text

_QUEUE = 500  # connections that wait in the system
_PLACE = ("host", "port", "unix_socket")  # options that say where to listen


class Listener:
    """A socket that listens until `end`.

    Attributes:
        socket: the socket.
        is_inherited: whether it is that of a supervisor, which gives it to the next server, too.
    """

    def __init__(self, listening: socket.socket, path: Path | None = None, inherited: bool = False):
        """Take over a socket; `path` is that of its file, if this server has made it."""
        self.socket = _Socket(fileno=listening.detach())
        self.socket.setblocking(False)
        self.is_inherited = inherited
        self._file = (path, path.stat()) if path else None

    @property
    def address(self) -> str:
        """Return the address as a client writes it."""
        name = self.socket.getsockname()
        if self.socket.family == socket.AF_INET6:
            return f"http://[{name[0]}]:{name[1]}"
        return f"http://{name[0]}:{name[1]}" if isinstance(name, tuple) else f"unix:{_text(name)}"

    def described(self, settings: Settings) -> Settings:
        """Return the settings with the address; raise OptionError if it is too open for them."""
        if not self.is_inherited:
            return settings
        name = self.socket.getsockname()
        if isinstance(name, tuple):
            return replace(settings, host=name[0], port=name[1])
        return replace(settings, unix_socket=Path(_text(name)))

    def end(self) -> list[socket.socket]:
        """Stop listening; return the connections that wait, unless the next server gets them."""
        if self.socket.fileno() == -1:
            return []
        if self._file:
            path, created = self._file
            with suppress(OSError), _locked(path.parent):
                if os.path.samestat(created, path.stat()):
                    path.unlink()  # first, so that no more come
        waiting = []
        # These clients have connected, and closing would lose their requests. The queue of an
        # inherited socket stays: here, only a descriptor is closed.
        while not self.is_inherited:
            try:
                waiting.append(self.socket.accept()[0])
            except ConnectionAbortedError:
                continue
            except OSError:  # BlockingIOError: no more wait; or too many files are open
                break
        self.socket.close()
        return waiting


class _Socket(socket.socket):
    """A socket that listens already: asyncio would shorten its queue for a moment."""

    def listen(self, backlog: int = 0, /) -> None:
        """Leave the queue as it is."""


@contextmanager
def bind(settings: Settings) -> Iterator[Listener]:
    """Listen at the address of the settings, or on the socket that systemd has opened.

    A client that connects waits for an answer.
    """
    listener = _inherit(settings) or (
        _bind_path(settings.unix_socket, settings)
        if settings.unix_socket
        else _bind_port(settings.host, settings.port)
    )
    try:
        yield listener
    finally:
        for connection in listener.end():
            connection.close()


def _inherit(settings: Settings) -> Listener | None:
    descriptor = systemd.inherited()
    if descriptor is None:
        return None
    for declared in settings.declarations():
        if declared.name in _PLACE and getattr(settings, declared.name) != declared.default:
            raise OptionError(
                declared.name, "cannot be used with a socket of systemd (LISTEN_FDS): leave it out"
            )
    try:
        listening = socket.socket(fileno=descriptor)
        listens = listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ResourceError(f"LISTEN_FDS: there is no socket ({error.strerror})") from None
    if not listens:
        listening.close()
        raise ResourceError("the socket of LISTEN_FDS does not listen: use ListenStream=")
    listening.set_inheritable(False)
    return Listener(listening, inherited=True)


def _bind_port(host: str, port: int) -> Listener:
    addresses = find_addresses(host, port)
    # A name such as localhost has several addresses; every client tries that of IPv4.
    family, _, _, _, address = min(addresses, key=lambda entry: entry[0] != socket.AF_INET)
    both = host == "::" and socket.has_dualstack_ipv6()
    try:
        return Listener(
            socket.create_server(address, family=family, backlog=_QUEUE, dualstack_ipv6=both)
        )
    except OSError as error:
        message = f"cannot listen on {host} port {port}: {error_text(error.errno or 0)}"
        raise ResourceError(f"{message}; choose another port or another host") from None


def _bind_path(path: Path, settings: Settings) -> Listener:
    if not hasattr(socket, "AF_UNIX"):
        raise OptionError("unix_socket", "is not possible on this system; use host and port")
    group = _group_id(settings.unix_socket_group)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        try:
            with _locked(path.parent):
                _remove_dead(path)
                mask = os.umask(0o177)  # so that the file is never open to others
                try:
                    listening.bind(str(path))
                finally:
                    os.umask(mask)
                _set_rights(path, group, settings.unix_socket_mode)
                listening.listen(_QUEUE)
                return Listener(listening, path)
        except OSError as error:
            reason = f"{path}: cannot listen there: {error.strerror or error}; choose another path"
            raise OptionError("unix_socket", reason) from None


def _group_id(name: str | None) -> int:
    """Return the number of a group; -1, which changes nothing, for None."""
    import grp

    if name is None:
        return -1
    try:
        return int(name) if name.isdecimal() else grp.getgrnam(name).gr_gid
    except KeyError:
        raise OptionError("unix_socket_group", f"{name}: there is no such group") from None


def _set_rights(path: Path, group: int, mode: str | None) -> None:
    """Set the group, and then the mode: no other group may use the socket in between."""
    try:
        os.chown(path, -1, group)
        if mode is not None:
            path.chmod(int(mode, 8))
    except (OSError, OverflowError) as error:
        path.unlink()
        reason = f"{group}: this user cannot give the socket's file to it: {error}"
        raise OptionError("unix_socket_group", reason) from None


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


def _text(name: str | bytes) -> str:
    """Return the name of a Unix socket; an abstract one, without a file, begins with @."""
    return os.fsdecode(name).replace("\0", "@", 1)
