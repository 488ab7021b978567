"""Test whether a server accepts connections, which takes less time than a request."""

import errno
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
from gpt_cli.system.machine import error_text, within

_PORTS = {"http": 80, "https": 443}
_UNDER_WAY = (0, errno.EINPROGRESS, errno.EWOULDBLOCK, getattr(errno, "WSAEWOULDBLOCK", 0))


def reach(address: str, seconds: float) -> None:
    """Raise UnreachableError if a server, or its proxy, does not accept connections.

    A timeout of the client would not cover the resolution of the name, and would count for each
    address of the server.
    """
    server, variable = _first_server(urlsplit(address))
    port = server.port or _PORTS.get(server.scheme, 1080)
    host = server.hostname or ""
    # In a thread, because nothing else limits how long the resolution of a name takes.
    call = partial(_connect, host, port, seconds)
    name = (
        f"{host}:{port}, the proxy of {variable},"
        if variable
        else messages.without_password(address)
    )
    try:
        within(seconds, call)
    except TimeoutError:
        raise UnreachableError(f"{name} does not answer", is_slow=True) from None
    except (OSError, UnicodeError) as error:
        raise UnreachableError(f"{name} cannot be reached ({_reason(error)})") from error


def _first_server(url: SplitResult) -> tuple[SplitResult, str | None]:
    """Return the server to connect to: that of an address, or the proxy in a variable."""
    port = url.port or _PORTS[url.scheme]
    proxies = {} if proxy_bypass(f"{url.hostname}:{port}") else getproxies()
    for scheme in (url.scheme, "all"):
        proxy = proxies.get(scheme)
        if proxy:
            address = proxy if "://" in proxy else f"http://{proxy}"
            return urlsplit(address), f"{scheme.upper()}_PROXY"
    return url, None


def _connect(host: str, port: int, seconds: float) -> None:
    """Connect to all addresses of a server at once, until one accepts; then disconnect."""
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
                    raise OSError(code, error_text(code))
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
                error = OSError(code, error_text(code))
                selector.unregister(connection)
    raise error


def _reason(error: Exception) -> str:
    """Return why a server cannot be reached."""
    if isinstance(error, socket.gaierror):
        return "its name does not resolve"
    reason = error.strerror if isinstance(error, OSError) else None
    return reason or first_line(error)
