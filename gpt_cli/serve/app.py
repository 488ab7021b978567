"""The routes: HTTP on one side, `protocol` and `scheduler` on the other."""

import asyncio
import json
import math
import re
import time
from base64 import b64encode
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from hashlib import sha256
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gpt_cli.engine import Engine
from gpt_cli.errors import MALFORMED, GPTCLIError, InputError
from gpt_cli.serve import structured
from gpt_cli.serve.completion import CompletionResponse, described
from gpt_cli.serve.metrics import Metrics
from gpt_cli.serve.protocol import Json, no_such_model, read, token_name
from gpt_cli.serve.refusals import BUG, RequestError, refusal
from gpt_cli.serve.scheduler import QueueFullError, Scheduler, StoppedError
from gpt_cli.serve.settings import Settings

_COMPILED = 2  # constraints at a time; more would leave no threads for other requests


def application(engine: Engine, settings: Settings) -> tuple[ASGIApp, Scheduler]:
    """Return the ASGI application, and the scheduler that computes for it.

    The engine may not be used by anyone else until the scheduler has stopped.
    """
    limits = {"max_batch": settings.max_batch, "max_queue": settings.max_queue}
    scheduler = Scheduler(engine.loaded, **limits)
    routes = _Routes(engine, scheduler)
    app = Starlette(
        routes=[
            Route("/", routes.page),
            Route("/health", routes.health),
            Route("/metrics", routes.metrics),
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/models", routes.models),
            Route("/v1/models/{name:path}", routes.model),
            Route("/tokenize", routes.tokenize, methods=["POST"]),
            Route("/detokenize", routes.detokenize, methods=["POST"]),
            Route("/tokenizer_info", routes.tokenizer_info),
        ],
        exception_handlers={  # asynchronous: others would wait for a thread
            RequestError: _refuse,
            QueueFullError: routes.refuse_busy,
            GPTCLIError: _fail,
            HTTPException: _no_route,
            Exception: _bug,
        },
    )
    app.router.redirect_slashes = False
    paths = frozenset(route.path for route in app.routes if isinstance(route, Route))
    return routes.counted(app, paths), scheduler


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)  # noqa: S101 (narrows the type)
    code = "model_not_found" if error.status == 404 else None
    return refusal(error.status, str(error), code, error.field)


async def _fail(request: Request, error: Exception) -> Response:
    return refusal(*described(error))


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 (narrows the type)
    path, headers = request.url.path, error.headers or {}
    message = f"{request.method} {path!r:.100}: there is no such path"
    if "Allow" in headers:
        message = f"{request.method} {path!r:.100}: use {headers['Allow']}"
    elif path == "/v1/chat/completions":
        message = "GPT-2 is a base model and cannot chat: use /v1/completions"
    elif not path.startswith("/v1/"):
        message += "; OpenAI's begin with /v1"
    return refusal(error.status_code, message, **headers)


def _policy(page: str) -> str:
    """Return the Content-Security-Policy of the page: its own code, and its own server only."""

    def digest(tag: str) -> str:
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return b64encode(sha256(text.encode()).digest()).decode()

    return (
        f"default-src 'none'; style-src 'sha256-{digest('style')}'; "
        f"script-src 'sha256-{digest('script')}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    )


async def _bug(request: Request, error: Exception) -> Response:
    return refusal(500, BUG, "bug")  # Starlette raises the error again, for `guard` to log it


class _Routes:
    """The handlers of the routes."""

    def __init__(self, engine: Engine, scheduler: Scheduler):
        self._engine, self._scheduler = engine, scheduler
        self._metrics = Metrics(scheduler)
        self._created = int(time.time())
        self._compiling = asyncio.Semaphore(_COMPILED)
        # Not the loop's own: to end that starts a thread, for which memory may be missing.
        self._workers = ThreadPoolExecutor()
        self.counted = self._metrics.counting
        self._page = files("gpt_cli.serve").joinpath("page.html").read_text("utf-8")
        self._policy = _policy(self._page)

    async def page(self, request: Request) -> Response:
        """Answer with the page."""
        return HTMLResponse(self._page, headers={"Content-Security-Policy": self._policy})

    async def health(self, request: Request) -> Response:
        """Say whether requests are answered."""
        if self._scheduler.stopped:
            raise StoppedError("the server is shutting down")
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """Answer with counters for Prometheus."""
        return Response(self._metrics.text(), media_type=self._metrics.media_type)

    async def models(self, request: Request) -> Response:
        """List the one model."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """Describe the model."""
        name = request.path_params["name"]
        if name != self._engine.name:
            raise no_such_model(name, self._engine)
        return JSONResponse(self._model())

    def _model(self) -> Json:
        return {
            "id": self._engine.name,
            "object": "model",
            "created": self._created,
            "owned_by": "gpt-cli",
            "max_model_len": self._engine.model.config.n_positions,
        }

    async def tokenize(self, request: Request) -> Response:
        """Return the ids of a text, in which `<|endoftext|>` is the special token."""
        text = (await _json(request)).get("prompt")
        if not isinstance(text, str):
            raise RequestError("prompt must be a text", "prompt")
        ids = await self._in_thread(_naming("prompt", self._engine.encode), text, special=True)
        length = self._engine.model.config.n_positions
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": length})

    async def detokenize(self, request: Request) -> Response:
        """Return the text of ids."""
        ids = (await _json(request)).get("tokens")
        if not isinstance(ids, list) or not all(type(id) is int for id in ids):
            raise RequestError("tokens must be a list of token ids", "tokens")
        text = await self._in_thread(_naming("tokens", self._engine.decode), ids)
        return JSONResponse({"prompt": text})

    async def tokenizer_info(self, request: Request) -> Response:
        """Name the special tokens."""
        config, tokenizer = self._engine.model.config, self._engine.tokenizer
        ends = [id for id in config.eos_token_id if id < config.vocab_size]
        start = config.bos_token_id
        return JSONResponse(
            {
                "eos_token": token_name(tokenizer, ends[0]) if ends else None,
                "bos_token": None if start is None else token_name(tokenizer, start),
                "pad_token": None,
                "model_max_length": config.n_positions,
            }
        )

    async def completions(self, request: Request) -> Response:
        """Continue or score the prompts of a request."""
        body = await _json(request)
        has_constraint = any(body.get(name) is not None for name in structured.FIELDS)
        async with self._compiling if has_constraint else nullcontext():
            # In another thread, since to tokenize a long text takes a while.
            asked = await self._in_thread(read, self._engine, body)
        return CompletionResponse(self._engine, asked, self._scheduler, self._metrics)

    def _in_thread(self, call: Callable[..., Any], *given: Any, **options: Any) -> Awaitable[Any]:
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._workers, partial(call, *given, **options))

    async def refuse_busy(self, request: Request, error: Exception) -> Response:
        """Answer that the queue is full."""
        seconds = min(60, max(1, math.ceil(self._metrics.mean_seconds)))
        headers = {"Retry-After": str(seconds)}
        return refusal(429, str(error), "server_busy", **headers)


async def _json(request: Request) -> Json:
    try:
        body = json.loads(await request.body())
    except MALFORMED as error:
        raise RequestError(f"the body must be JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return body


def _naming(field: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose errors name a field."""

    def call(*given: Any, **options: Any) -> Any:
        try:
            return function(*given, **options)
        except InputError as error:
            raise RequestError(f"{field}: {error}", field) from None

    return call
