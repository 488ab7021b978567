"""Middleware before the routes: access log and metrics, host, origin, key and body size."""

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpt_cli.serve.front.keys import Keys
from gpt_cli.serve.front.log import write_event
from gpt_cli.serve.front.proxies import Proxies
from gpt_cli.serve.refusals import RequestError
from gpt_cli.serve.settings import Settings, is_address

BODY_SECONDS = 30.0  # to receive a body
OPEN = ("/", "/health")  # paths that need no key

# What the log has of a request (`scope["state"]`), or else null.
_OF_REQUEST = ("id", "prompt_tokens", "completion_tokens", "model", "code", "param")
_HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(:\d*)?")
_LEFT = 499  # as nginx has it: the client left before the end of the answer
_logger = logging.getLogger("gpt_cli")


class _Refusal(Response):
    """The response to a request that is refused; the log has the reason."""

    def __init__(self, error: RequestError):
        # In ASCII: it may quote a text that is not Unicode.
        super().__init__(json.dumps(error.json), error.status, error.headers, "application/json")
        self._reason = error.reason

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        remember(scope, **self._reason)
        await super().__call__(scope, receive, send)


def response_of(refusal: RequestError) -> Response:
    """Return the response to a request that is refused."""
    return _Refusal(refusal)


def remember(scope: Scope, **fields: Any) -> None:
    """Remember fields of a request for the log."""
    scope.setdefault("state", {}).update(fields)


def guarded(
    app: ASGIApp, settings: Settings, keys: Keys, count: Callable[[str, int, str], None]
) -> ASGIApp:
    """Return the application behind the checks that the settings require.

    `count` receives the path and the status of each request, and the name of its key.
    """

    async def with_body(scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            if keys.are_needed and scope["path"] not in OPEN:
                remember(scope, key=_name_of_key(keys, headers))
            receive = await _received(headers, receive, settings.max_body)
        except RequestError as error:
            await response_of(error)(scope, receive, send)
        except ConnectionError:
            return
        else:
            await app(scope, receive, send)

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        # The key also stops pages of a rebound name; through a Unix socket, no page comes.
        if not keys.are_needed and settings.unix_socket is None:
            _check_host(settings.host, headers)
        _check_origin(settings.cors, headers)
        await inner(scope, receive, send)

    inner: ASGIApp = with_body
    if settings.cors:  # outside of the key, which a browser's preflight request does not have
        inner = CORSMiddleware(
            with_body,
            allow_origins=settings.cors,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )
    return _watched(checked, settings, count)


def _check_host(known: str, headers: Headers) -> None:
    """Refuse DNS rebinding: a page with a host name that leads to this server.

    Browsers send the name in the address of the page, so a foreign name is a foreign page.
    """
    host = headers.get("host")
    match = _HOST.fullmatch(host or "")
    name = match[1].strip("[]").lower() if match else ""
    if not is_address(name) and name not in ("localhost", known.lower()):
        if host is None:
            fault, cure = "the request has no header Host", "send the IP address of the server"
        else:
            fault = f"this server does not know the name in Host {host!r:.100}"
            cure = "use its IP address"
        cures = f"{cure} or localhost, or start it with this name as --host, or with --api-key"
        raise RequestError(f"{fault}: {cures}", None, 403, "unknown_host")


def _check_origin(allowed: tuple[str, ...], headers: Headers) -> None:
    """Refuse foreign pages: browsers do not hold back their simplest requests."""
    origin = headers.get("origin")
    host = headers.get("host", "")
    same = (f"http://{host}", f"https://{host}")  # the latter behind a proxy
    if not (origin is None or "*" in allowed or origin in allowed or origin.lower() in same):
        message = (
            f"pages of {origin!r:.100} may not use this server: start it with --cors {origin:.100}"
        )
        raise RequestError(message, None, 403, "unknown_origin")


def _name_of_key(keys: Keys, headers: Headers) -> str:
    """Return the name of the key of a request; raise RequestError if it has none."""
    scheme, _, sent = headers.get("authorization", "").partition(" ")
    name = keys.name_of(sent.strip())
    if name is None or scheme.lower() != "bearer":
        message = "the API key is wrong" if sent else "an API key is needed"
        if scheme and scheme.lower() != "bearer":
            message = "`Bearer` is missing before the API key"
        message += ": send the header `Authorization: Bearer KEY`"
        needed = {"WWW-Authenticate": "Bearer"}
        raise RequestError(message, None, 401, "invalid_api_key", **needed)
    return name


async def _received(headers: Headers, receive: Receive, most: int) -> Receive:
    """Receive a body; return a channel that repeats it as one message, and then continues.

    Raise RequestError if it is too long or too slow, and ConnectionError if the client has left.
    """
    body = bytearray()
    size = int(headers.get("content-length", 0))
    more = True
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while more and size <= most:
                message = await receive()
                if message["type"] != "http.request":
                    raise ConnectionError
                body += message.get("body", b"")
                size = max(size, len(body))  # its length may not have been declared
                more = message.get("more_body", False)
    except TimeoutError:
        complaint = f"the body did not come within {BODY_SECONDS:.0f} seconds"
        raise RequestError(complaint, None, 408, "body_too_slow", Connection="close") from None
    if size > most:
        complaint = f"a body may have up to {most} bytes (--max-body)"
        raise RequestError(complaint, None, 413, "body_too_long")
    messages: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

    async def repeat() -> Message:
        return messages.pop() if messages else await receive()

    return repeat


@dataclass
class _Sent:
    """The response that a client was sent so far; `send` counts it."""

    pass_on: Send
    status: int | None = None
    size: int = 0  # in bytes
    is_complete: bool = False
    is_killed: bool = False  # the server has ended before it was complete

    @property
    def outcome(self) -> int | None:
        """Return the status for the log, or None if the server was killed."""
        if self.is_killed:
            return None
        return self.status if self.is_complete and self.status else _LEFT

    async def send(self, message: Message) -> None:
        """Send a message."""
        self.status = message.get("status", self.status)
        self.size += len(message.get("body", b""))
        await self.pass_on(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.is_complete = True


def _watched(app: ASGIApp, settings: Settings, count: Callable[[str, int, str], None]) -> ASGIApp:
    """Answer refusals and bugs, count requests, and log them if the settings say so."""
    proxies = Proxies(settings.trusted_proxy)

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        start = time.perf_counter()
        sent = _Sent(send)
        try:
            await app(scope, receive, sent.send)
        except Exception as error:
            sent.is_complete = True  # by the server
            if not isinstance(error, RequestError):
                _logger.exception("a bug in the answer to %s %r", scope["method"], scope["path"])
            refusal = RequestError.of(error)
            if sent.status is None:
                await response_of(refusal)(scope, receive, sent.send)
            else:  # it is too late to tell the client
                remember(scope, **refusal.reason)
        except asyncio.CancelledError:
            if not sent.is_complete:
                sent.is_killed = True
                remember(scope, code="killed")
            raise
        finally:
            status = sent.outcome
            state = scope.get("state", {})
            if status is not None:
                count(scope["path"], status, state.get("key", ""))
            if settings.access_log:
                write_event(
                    "request",
                    method=scope["method"],
                    path=scope["path"],
                    status=status,
                    seconds=round(time.perf_counter() - start, 6),
                    bytes=sent.size,
                    **{name: state.get(name) for name in _OF_REQUEST},
                    key=state.get("key") or None,
                    client=proxies.client_of(scope),
                )

    return call
