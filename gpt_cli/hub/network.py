"""A test of whether a server accepts connections, which takes less time than an answer of it."""

import errno
import os
import selectors
import socket
import time
from contextlib import ExitStack
from functools import partial
from typing import Any
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

from gpt_cli.hub import messages
from gpt_cli.hub.messages import UnreachableError, first_line
from gpt_cli.system.machine import within

_PORTS = {"http": 80, "https": 443}
_UNDER_WAY = (0, errno.EINPROGRESS, errno.EWOULDBLOCK, getattr(errno, "WSAEWOULDBLOCK", 0))


def reach(address: str, seconds: float) -> None:
    """Raise UnreachableError if nothing accepts connections to a server, or to its proxy.

    A timeout of the client would not cover the name, and would count for each address of a server.
    """
    server, variable = _first_server(urlsplit(address))
    port = server.port or _PORTS.get(server.scheme, 1080)
    host = server.hostname or ""
    # A thread, as nothing else limits the time that a name takes.
    call = partial(_connect, host, port, seconds)
    name = f"{host}:{port}, the proxy of {variable}," if variable else messages.shown(address)
    try:
        within(seconds, call)
    except TimeoutError:
        raise UnreachableError(f"{name} does not answer", is_slow=True) from None
    except (OSError, UnicodeError) as error:
        raise UnreachableError(f"{name} cannot be reached ({_words(error)})") from error


def _first_server(url: SplitResult) -> tuple[SplitResult, str | None]:
    """Return the server to connect to: that of an address, or the proxy in a variable."""
    port = url.port or _PORTS[url.scheme]
    proxies = {} if proxy_bypass(f"{url.hostname}:{port}") else getproxies()
    for scheme in (url.scheme, "all"):
        if proxy := proxies.get(scheme):
            address = proxy if "://" in proxy else f"http://{proxy}"
            return urlsplit(address), f"{scheme.upper()}_PROXY"
    return url, None


def _connect(host: str, port: int, seconds: float) -> None:
    """Connect to a server and leave it: to all of its addresses at once."""
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    deadline = time.monotonic() + seconds
    error = OSError("it has no address")
    with selectors.DefaultSelector() as selector, ExitStack() as stack:
        for family, kind, protocol, _, address in addresses:
            try:
                opened = stack.enter_context(socket.socket(family, kind, protocol))
                opened.setblocking(False)
                code = opened.connect_ex(address)
                if code not in _UNDER_WAY:
                    raise OSError(code, os.strerror(code))
                selector.register(opened, selectors.EVENT_WRITE)
            except OSError as failure:  # the machine has no IPv6, for instance
                error = failure
        while selector.get_map():
            ready = selector.select(deadline - time.monotonic())
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                connection: Any = key.fileobj
                code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if not code:
                    return
                error = OSError(code, os.strerror(code))
                selector.unregister(connection)
    raise error


def _words(error: Exception) -> str:
    if isinstance(error, socket.gaierror):
        return "its name does not resolve"
    return (isinstance(error, OSError) and error.strerror) or first_line(error)
