"""The protocol of systemd: a socket by environment variables, and notifications."""

import os
import socket
from contextlib import suppress

from gpt_cli.errors import ResourceError

_FIRST = 3  # the descriptor of the first socket: see sd_listen_fds(3)


def inherited() -> int | None:
    """Return the descriptor of the socket that systemd has opened for this process, if any.

    The variables are removed: they say nothing to other processes. Raise ResourceError if there
    are several sockets.
    """
    process = os.environ.pop("LISTEN_PID", None)
    count = os.environ.pop("LISTEN_FDS", "0")
    if process != str(os.getpid()) or count == "0":
        return None
    if count != "1":
        raise ResourceError(f"LISTEN_FDS is {count}: give one socket, by one ListenStream=")
    return _FIRST


def notify(state: str) -> None:
    """Tell the supervisor a state, such as READY=1, if it wants to know (sd_notify(3))."""
    name = os.environ.get("NOTIFY_SOCKET")
    if name:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
            supervisor.connect(name.replace("@", "\0", 1) if name[0] == "@" else name)
            supervisor.send(state.encode())
