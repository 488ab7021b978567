"""Middleware before the routes, in pure ASGI: host, origin, API key, body size and access log."""

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

# Takes a path and headers; returns an answer that refuses the request, or None.
Check: TypeAlias = Callable[[str, Headers], Response | None]


def guarded(app: ASGIApp, settings: Settings) -> ASGIApp:
    """Return the application with everything that the settings ask for before it."""
    app = _Body(app, settings.max_body)
    if settings.api_key is not None:
        app = _Checked(app, _key_check(settings.api_key))
    if settings.cors:  # outside of the key, which a browser's preflight request does not have
        app = CORSMiddleware(
            app,
            settings.cors,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )
    app = _Checked(app, _origin_check(settings.cors))
    # The key stops pages of a rebound name, too; through a Unix socket, no page comes.
    if settings.api_key is None and settings.unix_socket is None:
        app = _Checked(app, _host_check(settings.host))
    return _Outermost(app, settings.access_log)


class _Checked:
    """Answer requests that a check refuses."""

    def __init__(self, app: ASGIApp, check: Check):
        self._app = app
        self._check = check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._check(scope["path"], Headers(scope=scope)) or self._app
        await answer(scope, receive, send)


def _host_check(own: str) -> Check:
    """Return a check against DNS rebinding: pages whose own name is made to lead to this server.

    Browsers send the name in the address of the page, so a foreign name is a foreign page.
    """

    def check(path: str, headers: Headers) -> Response | None:
        host = headers.get("host", "")
        found = _HOST.fullmatch(host)
        name = found[1].strip("[]").lower() if found else ""
        if name in ("localhost", own.lower()):
            return None
        with suppress(ValueError):
            ip_address(name)
            return None
        message = (
            f"this server does not know the name in Host {host!r:.100}: use its IP address or "
            "localhost, or start it with this name as --host, or with --api-key"
        )
        return refusal(403, message, "unknown_host")

    return check


def _origin_check(allowed: tuple[str, ...]) -> Check:
    """Return a check against foreign pages, whose simplest requests browsers do not hold back."""

    def check(path: str, headers: Headers) -> Response | None:
        origin, host = headers.get("origin"), headers.get("host", "")
        own = (f"http://{host}", f"https://{host}")  # the latter behind a proxy
        if origin is None or "*" in allowed or origin in allowed or origin.lower() in own:
            return None
        message = (
            f"pages of {origin!r:.100} may not use this server: start it with --cors {origin:.100}"
        )
        return refusal(403, message, "unknown_origin")

    return check


def _key_check(key: str) -> Check:
    def check(path: str, headers: Headers) -> Response | None:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(given.strip().encode(), key.encode())
        if path in OPEN or (right and scheme.lower() == "bearer"):
            return None
        message = "the API key is wrong" if given else "an API key is needed"
        message += ": send the header `Authorization: Bearer KEY`"
        return refusal(401, message, "invalid_api_key", **{"WWW-Authenticate": "Bearer"})

    return check


class _Body:
    """Receive the whole body, up to a size and for some time, before the application is called."""

    def __init__(self, app: ASGIApp, most: int):
        self._app = app
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await self._receive(Headers(scope=scope), receive)
        except TimeoutError:
            message = f"the body did not come within {BODY_SECONDS:.0f} seconds"
            answer = refusal(408, message, "body_too_slow", Connection="close")
            await answer(scope, receive, send)
        except OverflowError:
            message = f"a body may have up to {self._most} bytes (--max-body)"
            await refusal(413, message, "body_too_long")(scope, receive, send)
        else:
            if body is not None:
                await self._app(scope, _again(body, receive), send)

    async def _receive(self, headers: Headers, receive: Receive) -> bytes | None:
        """Return the body, or None if the client leaves; raise OverflowError if it is too long."""
        if int(headers.get("content-length", 0)) > self._most:
            raise OverflowError
        body = bytearray()
        while (event := await receive())["type"] == "http.request":
            body += event.get("body", b"")
            if len(body) > self._most:  # its length was not declared
                raise OverflowError
            if not event.get("more_body", False):
                return bytes(body)
        return None


def _again(body: bytes, receive: Receive) -> Receive:
    """Return a channel that gives a body, and then what comes after it."""
    events: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def give() -> Message:
        return events.pop() if events else await receive()

    return give


class _Outermost:
    """Log requests if asked, and answer a request that has met a bug."""

    def __init__(self, app: ASGIApp, log: bool):
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun, status, sent = time.perf_counter(), None, 0

        async def watched(message: Message) -> None:
            nonlocal status, sent
            status = message.get("status", status)
            sent += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            _logger.exception("a bug in the answer to %s %r", scope["method"], scope["path"])
            if status is None:
                answer = refusal(500, BUG, "bug")
                await answer(scope, receive, watched)
        finally:
            if self._log:
                _write_line(
                    time=datetime.now(UTC).isoformat(timespec="milliseconds"),
                    method=scope["method"],
                    path=scope["path"],
                    status=status,  # null: the client left first
                    seconds=round(time.perf_counter() - begun, 6),
                    bytes=sent,
                )


def _write_line(**fields: object) -> None:
    if sys.stderr is not None:
        with suppress(OSError, ValueError):  # it is closed, or its disk is full
            print(json.dumps(fields), file=sys.stderr, flush=True)
