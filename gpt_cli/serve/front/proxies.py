"""The address of a client behind trusted proxies."""

from collections.abc import Sequence
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from starlette.datastructures import Headers
from starlette.types import Scope

UNIX = "unix"  # any client of a Unix socket


class Proxies:
    """The proxies whose `X-Forwarded-For` is believed."""

    def __init__(self, trusted: Sequence[str]):
        """Trust addresses and networks, and with "unix" the clients of a Unix socket."""
        self._networks = [ip_network(name) for name in trusted if name != UNIX]
        self._trusts_unix = UNIX in trusted

    def client_of(self, scope: Scope) -> str:
        """Return the address of the client, or "unix".

        A trusted proxy appends the address that it was called from, so the client is the rightmost
        address that is not a trusted proxy's: what is before it, anyone may have written.
        """
        peer = scope["client"]
        address = _parsed(peer[0]) if peer else None
        if not (self._trusts(address) if address else self._trusts_unix):
            return str(address or UNIX)
        client = str(address or UNIX)
        for text in reversed(",".join(Headers(scope=scope).getlist("x-forwarded-for")).split(",")):
            address = _parsed(text)
            if address is None:  # nothing is known beyond this proxy
                break
            client = str(address)
            if not self._trusts(address):
                break
        return client

    def _trusts(self, address: IPv4Address | IPv6Address) -> bool:
        return any(address in network for network in self._networks)


def _parsed(text: str) -> IPv4Address | IPv6Address | None:
    """Return an address, that of IPv4 if IPv6 only wraps it; None if there is none."""
    with suppress(ValueError):
        address = ip_address(text.strip())
        return getattr(address, "ipv4_mapped", None) or address
    return None
