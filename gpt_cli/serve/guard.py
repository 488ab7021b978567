"""Middleware before the routes: access log and metrics, host, origin, API key and body size."""

import asyncio
import hmac
import json
import logging
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from ipaddress import ip_address
from typing import TypeAlias

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpt_cli.serve.refusals import BUG, refusal
from gpt_cli.serve.settings import Settings

BODY_SECONDS = 30.0  # to receive a body
OPEN = ("/", "/health")  # without a key

_HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(:\d*)?")
_logger = logging.getLogger("gpt_cli")

# Receives a path and headers; returns an answer that refuses the request, or None.
Check: TypeAlias = Callable[[str, Headers], Response | None]
# Receives the path and the status of a request; None if the client left before an answer.
Count: TypeAlias = Callable[[str, int | None], None]


def guarded(app: ASGIApp, settings: Settings, count: Count = lambda path, status: None) -> ASGIApp:
    """Return the application behind the checks that the settings ask for, logged and counted."""
    app = _with_body(app, settings.max_body)
    if settings.api_key is not None:
        app = _checked(app, _key_check(settings.api_key))
    if settings.cors:  # outside of the key, which a browser's preflight request does not have
        app = CORSMiddleware(
            app,
            settings.cors,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )
    app = _checked(app, _origin_check(settings.cors))
    # The key also stops pages of a rebound name; through a Unix socket, no page comes.
    if settings.api_key is None and settings.unix_socket is None:
        app = _checked(app, _host_check(settings.host))
    return _watched(app, settings.access_log, count)


def _checked(app: ASGIApp, check: Check) -> ASGIApp:
    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        answer = check(scope["path"], Headers(scope=scope)) or app
        await answer(scope, receive, send)

    return call


def _host_check(known: str) -> Check:
    """Return a check against DNS rebinding: a page whose host name leads to this server.

    Browsers send the name in the address of the page, so a foreign name is a foreign page.
    """

    def check(path: str, headers: Headers) -> Response | None:
        host = headers.get("host", "")
        match = _HOST.fullmatch(host)
        name = match[1].strip("[]").lower() if match else ""
        if name in ("localhost", known.lower()):
            return None
        with suppress(ValueError):
            ip_address(name)
            return None
        message = (
            f"this server does not know the name in Host {host!r:.100}: use its IP address or "
            "localhost, or start it with this name as host, or with an api_key"
        )
        return refusal(403, message, "unknown_host")

    return check


def _origin_check(allowed: tuple[str, ...]) -> Check:
    """Return a check against foreign pages, whose simplest requests browsers do not hold back."""

    def check(path: str, headers: Headers) -> Response | None:
        origin, host = headers.get("origin"), headers.get("host", "")
        same = (f"http://{host}", f"https://{host}")  # the latter behind a proxy
        if origin is None or "*" in allowed or origin in allowed or origin.lower() in same:
            return None
        message = (
            f"pages of {origin!r:.100} may not use this server: start it with cors {origin:.100}"
        )
        return refusal(403, message, "unknown_origin")

    return check


def _key_check(key: str) -> Check:
    def check(path: str, headers: Headers) -> Response | None:
        scheme, _, sent = headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(sent.strip().encode(), key.encode())
        if path in OPEN or (is_right and scheme.lower() == "bearer"):
            return None
        message = "the API key is wrong" if sent else "an API key is needed"
        message += ": send the header `Authorization: Bearer KEY`"
        return refusal(401, message, "invalid_api_key", **{"WWW-Authenticate": "Bearer"})

    return check


def _with_body(app: ASGIApp, most: int) -> ASGIApp:
    """Receive the whole body, up to a size and for a time, before the application is called."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        answer = app
        try:
            async with asyncio.timeout(BODY_SECONDS):
                receive = await _received(Headers(scope=scope), receive, most)
        except TimeoutError:
            message = f"the body did not come within {BODY_SECONDS:.0f} seconds"
            answer = refusal(408, message, "body_too_slow", Connection="close")
        except OverflowError:
            answer = refusal(413, f"a body may have up to {most} bytes (max_body)", "body_too_long")
        except ConnectionError:
            return
        await answer(scope, receive, send)

    return call


async def _received(headers: Headers, receive: Receive, most: int) -> Receive:
    """Receive a body; return a channel that repeats it, and then continues.

    Raises:
        OverflowError: it is too long.
        ConnectionError: the client has left.
    """
    if int(headers.get("content-length", 0)) > most:
        raise OverflowError
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise ConnectionError
        body += message.get("body", b"")
        if len(body) > most:  # its length was not declared
            raise OverflowError
        more = message.get("more_body", False)
    messages: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

    async def repeat() -> Message:
        return messages.pop() if messages else await receive()

    return repeat


def _watched(app: ASGIApp, log: bool, count: Count) -> ASGIApp:
    """Count requests, log them if the settings ask for it, and answer one that meets a bug."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        start, status, sent = time.perf_counter(), None, 0

        async def watched(message: Message) -> None:
            nonlocal status, sent
            status = message.get("status", status)
            sent += len(message.get("body", b""))
            await send(message)

        try:
            await app(scope, receive, watched)
        except Exception:
            _logger.exception("a bug in the answer to %s %r", scope["method"], scope["path"])
            if status is None:
                await refusal(500, BUG, "bug")(scope, receive, watched)
        finally:
            count(scope["path"], status)
            if log:
                _write_line(
                    time=datetime.now(UTC).isoformat(timespec="milliseconds"),
                    method=scope["method"],
                    path=scope["path"],
                    status=status,  # null: the client left first
                    seconds=round(time.perf_counter() - start, 6),
                    bytes=sent,
                )

    return call


def _write_line(**fields: object) -> None:
    if sys.stderr is not None:
        with suppress(OSError, ValueError):  # it is closed, or its disk is full
            print(json.dumps(fields), file=sys.stderr, flush=True)
