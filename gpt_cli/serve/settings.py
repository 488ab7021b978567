"""The options of a server."""

import re
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

from gpt_cli.options.declare import AT_LEAST_1, Declared, OptionError, Range, between, option

_HOST = "127.0.0.1"
_PORT = 8000
_ANY_PAGE = {"*", "null"}  # every page can have the origin null: that of a sandboxed frame
_NAME = re.compile(r"[^\s/:]+")
_ORIGIN = re.compile(r"https?://[^\s/?#@]+")
KEY = Range(lambda key: re.fullmatch("[!-~]+", key) is not None, "ASCII without spaces")


@dataclass(frozen=True, kw_only=True, repr=False)  # an error must not show the key
class Settings(Declared):
    """The options of a server; without a key, they must not let everyone use it."""

    host: str = option(
        _HOST,
        "Address to listen on.",
        Range(
            lambda host: is_address(host) or _NAME.fullmatch(host) is not None,
            "an address or a name, without a port",
        ),
        excludes=("--unix-socket",),
    )
    port: int = option(
        _PORT,
        "Port to listen on; 0 takes a free one.",
        between(0, 65535),
        excludes=("--unix-socket",),
    )
    unix_socket: Path | None = option(
        None,
        "Listen on a Unix socket that only this user can open, instead of a port.",
        metavar="PATH",
    )
    unix_socket_mode: str | None = option(
        None,
        "Rights of the Unix socket's file, such as 660; 600 if not set.",
        Range(lambda mode: re.fullmatch("0?[67][0-7]{2}", mode) is not None, "octal, such as 660"),
        metavar="MODE",
        needs="--unix-socket",
    )
    unix_socket_group: str | None = option(
        None,
        "Group of the Unix socket's file, which --unix-socket-mode 660 then lets in.",
        metavar="GROUP",
        needs="--unix-socket",
    )
    api_key: str | None = option(
        None,
        "Key that clients must send; other users of this machine can see a flag, but not the "
        "variable.",
        KEY,
        envvar="GPT_CLI_API_KEY",
        metavar="KEY",
    )
    api_key_file: Path | None = option(
        None,
        "File with the keys that clients may send: KEY NAME in each line. Logs and metrics show "
        "the name. SIGHUP reads the file again.",
        metavar="FILE",
    )
    allow_anyone: bool = option(
        False, "Allow addresses that other machines reach, and --cors '*', without a key."
    )
    name: str | None = option(
        None,
        "Name of a single model for clients; that of --model, or of its folder, if not set.",
        Range(lambda name: name.isprintable() and bool(name), "printable, and not empty"),
        metavar="NAME",
    )
    max_batch: int = option(
        32,
        "Compute at most this many texts side by side.",
        between(1, 10_000),
        flag="--batch-size",
        old_flag="--max-batch",
    )
    max_queue: int = option(
        64, "Let at most this many requests wait; refuse more (429).", AT_LEAST_1
    )
    max_body: int = option(4_000_000, "Refuse longer requests (413).", AT_LEAST_1, metavar="BYTES")
    cors: tuple[str, ...] = option(
        (),
        "Let pages of this origin use the server, such as https://example.com; * is any, null a "
        "page in a file; repeatable.",
        Range(
            lambda pages: all(page in _ANY_PAGE or _ORIGIN.fullmatch(page) for page in pages),
            "origins, such as https://example.com:8080, without a path",
        ),
        metavar="ORIGIN",
    )
    allow_edits: Path | None = option(
        None,
        "Let requests change values of the forward pass, with files in this folder alone.",
        Range(Path.is_dir, "a folder"),
        metavar="DIR",
    )
    access_log: bool = option(
        False,
        "Write lines of JSON to standard error: for the start, the end, and each request, without "
        "its text.",
    )
    trusted_proxy: tuple[str, ...] = option(
        (),
        "Let the access log believe this proxy's X-Forwarded-For: an address, a network such as "
        "10.0.0.0/8, or unix for the clients of a Unix socket; repeatable.",
        Range(
            lambda proxies: all(proxy == "unix" or _is_network(proxy) for proxy in proxies),
            "addresses, networks such as 10.0.0.0/8, or unix",
        ),
        metavar="ADDRESS",
    )
    grace: float = option(
        30.0,
        "Seconds that running requests have to finish after SIGTERM or Ctrl+C.",
        between(0, 86_400),
        metavar="SECONDS",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, default in (("host", _HOST), ("port", _PORT)):
            if self.unix_socket is not None and getattr(self, name) != default:
                raise OptionError(name, "cannot be used with a Unix socket: leave one of them out")
        for name in ("unix_socket_mode", "unix_socket_group"):
            if getattr(self, name) is not None and self.unix_socket is None:
                raise OptionError(name, "is of a Unix socket's file: use --unix-socket, too")
        if self.api_key and self.api_key_file:
            raise OptionError(
                "api_key", "cannot be used with a file of keys: leave one of them out"
            )
        if self.api_key or self.api_key_file or self.allow_anyone:
            return
        cure = "set a key by GPT_CLI_API_KEY or --api-key-file, or use --allow-anyone"
        if self.unix_socket is None and not _is_loopback(self.host):
            find_addresses(self.host, self.port)  # a name without one is no open door
            reason = "other machines may reach this address"
            raise OptionError("host", f"{self.host}: {reason}; {cure}")
        if _ANY_PAGE.intersection(self.cors):
            reason = "any page that a browser of this machine opens could use the server"
            raise OptionError("cors", f"must not be * or null without a key: {reason}; {cure}")

    def check_models(self, count: int) -> None:
        """Raise OptionError if these options do not fit this number of models."""
        if self.name is not None and count > 1:
            raise OptionError("name", "is the name of a single model: leave it out with several")


def find_addresses(host: str, port: int) -> list[tuple[Any, ...]]:
    """Return what `socket.getaddrinfo` returns; raise OptionError for a host without an address."""
    import socket  # takes 2 ms, and `--help` needs none

    try:
        return list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    except (OSError, ValueError) as error:  # the latter from a text that is no name
        reason = getattr(error, "strerror", None) or error
        cure = "name an address of this machine, such as 127.0.0.1"
        raise OptionError("host", f"{host} has no address ({reason}): {cure}") from None


def is_address(host: str) -> bool:
    """Return whether a host is an IP address, and not a name."""
    with suppress(ValueError):
        return bool(ip_address(host))
    return False


def _is_network(text: str) -> bool:
    """Return whether a text is an address or a network."""
    with suppress(ValueError):
        return bool(ip_network(text))
    return False


def _is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address; False for any name but localhost."""
    return ip_address(host).is_loopback if is_address(host) else host.lower() == "localhost"
