"""The routes: HTTP on one side, `protocol` and `scheduler` on the other."""

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gpt_cli.decode import Step
from gpt_cli.engine import Engine
from gpt_cli.errors import MALFORMED, GPTCLIError, InputError
from gpt_cli.serve.metrics import Metrics
from gpt_cli.serve.prompts import Event, Task
from gpt_cli.serve.protocol import Answer, Completions, Json, RequestError, read
from gpt_cli.serve.scheduler import QueueFullError, Scheduler, StoppedError
from gpt_cli.serve.settings import Settings

_POLICY = (  # the page may talk to its own server only
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_logger = logging.getLogger("gpt_cli")


def application(engine: Engine, settings: Settings) -> tuple[ASGIApp, Scheduler]:
    """Return the ASGI application, and the scheduler that computes for it.

    The engine may not be used by anyone else until the scheduler has stopped.
    """
    limits = {"max_batch": settings.max_batch, "max_queue": settings.max_queue}
    scheduler = Scheduler(engine.model, engine.tokenizer, engine.speculator, **limits)
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
        exception_handlers={
            RequestError: _refuse,
            QueueFullError: routes.refuse_busy,
            GPTCLIError: _fail,
            HTTPException: _no_route,
        },
    )
    paths = frozenset(route.path for route in app.routes if isinstance(route, Route))
    return routes.counted(app, paths), scheduler


def _error(
    message: str, status: int, *, field: str | None = None, code: str | None = None, **headers: str
) -> JSONResponse:
    return JSONResponse(_error_object(message, status, field, code), status, headers)


def _error_object(
    message: str, status: int, field: str | None = None, code: str | None = None
) -> Json:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)  # noqa: S101 (narrows the type)
    code = "model_not_found" if error.status == 404 else None
    return _error(str(error), error.status, field=error.field, code=code)


def _fail(request: Request, error: Exception) -> Response:
    return _error(str(error), 503 if isinstance(error, StoppedError) else 500)


def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 (narrows the type)
    message = f"{request.method} {request.url.path!r:.100}: {error.detail}"
    if request.url.path == "/v1/chat/completions":
        message = "GPT-2 is a base model and cannot chat: use /v1/completions"
    return JSONResponse(_error_object(message, error.status_code), error.status_code, error.headers)


class _Routes:
    """What the routes do."""

    def __init__(self, engine: Engine, scheduler: Scheduler):
        self._engine, self._scheduler = engine, scheduler
        self._metrics = Metrics(scheduler)
        self._created = int(time.time())
        self.counted = self._metrics.counting
        self._page = files("gpt_cli.serve").joinpath("page.html").read_text("utf-8")

    async def page(self, request: Request) -> Response:
        """Answer with the page."""
        return HTMLResponse(self._page, headers={"Content-Security-Policy": _POLICY})

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
            raise RequestError(f"this server has no model {name!r:.80}", "model", 404)
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
        ids = await run_in_threadpool(_naming("prompt", self._engine.encode), text, special=True)
        length = self._engine.model.config.n_positions
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": length})

    async def detokenize(self, request: Request) -> Response:
        """Return the text of ids."""
        ids = (await _json(request)).get("tokens")
        if not isinstance(ids, list) or not all(type(id) is int for id in ids):
            raise RequestError("tokens must be a list of token ids", "tokens")
        text = await run_in_threadpool(_naming("tokens", self._engine.decode), ids)
        return JSONResponse({"prompt": text})

    async def tokenizer_info(self, request: Request) -> Response:
        """Name the special tokens."""
        config, name = self._engine.model.config, self._engine.decode
        ends = [id for id in config.eos_token_id if id < config.vocab_size]
        start = config.bos_token_id
        return JSONResponse(
            {
                "eos_token": name(ends[:1]) if ends else None,
                "bos_token": None if start is None else name([start]),
                "pad_token": None,
                "model_max_length": config.n_positions,
            }
        )

    async def completions(self, request: Request) -> Response:
        """Continue or score the prompts of a request."""
        body = await _json(request)
        # In another thread, since to tokenize a long text takes a while.
        asked = await run_in_threadpool(read, self._engine, body)
        return _Completion(Answer(self._engine, asked), asked, self._scheduler, self._metrics)

    def refuse_busy(self, request: Request, error: Exception) -> Response:
        """Answer that the queue is full."""
        seconds = min(60, max(1, math.ceil(self._metrics.mean_seconds)))
        headers = {"Retry-After": str(seconds)}
        return _error(str(error), 429, code="server_busy", **headers)


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
            raise RequestError(str(error), field) from None

    return call


class _Completion(Response):
    """The answer to a request for completions; its texts are dropped if the client leaves."""

    def __init__(self, answer: Answer, asked: Completions, scheduler: Scheduler, metrics: Metrics):
        self._answer, self._asked, self._metrics = answer, asked, metrics
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()  # at most those of a text
        self._tasks: list[Task] = answer.tasks(self._deliver)
        self._begun, self._begins = time.perf_counter(), False
        scheduler.submit(self._tasks)
        self.background = None

    def _deliver(self, index: int, event: Event) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, until all is sent or the client has left."""
        send_all = self._stream if self._asked.fields.stream else self._whole
        try:
            await _until_gone(send_all(scope, receive, send), receive)
        finally:
            for task in self._tasks:
                task.cancelled = True

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            while not self._answer.finished:
                await self._next_events()
            response: Response = JSONResponse(self._answer.whole())
        except Exception as error:
            response = _error(*_told(error))
        self._count()
        await response(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = b"text/event-stream; charset=utf-8"
        headers = [(b"content-type", kind), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for event in self._server_sent():
            body = f"data: {event}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _server_sent(self) -> AsyncIterator[str]:
        """Yield the data of each event of a stream."""
        try:
            for chunk in self._answer.chunks():
                yield json.dumps(chunk)
            while not self._answer.finished:
                await self._next_events()
                for chunk in self._answer.chunks():
                    yield json.dumps(chunk)
            for chunk in self._answer.last_chunks():
                yield json.dumps(chunk)
        except Exception as error:
            yield json.dumps(_error_object(*_told(error)))
        self._count()
        yield "[DONE]"

    async def _next_events(self) -> None:
        """Wait for an event, and take all that are there; raise the error that one is."""
        events = [await self._events.get()]
        while not self._events.empty():
            events.append(self._events.get_nowait())
        if not self._begins:
            self._begins = True
            self._metrics.add_first(self._seconds)
        for index, event in events:
            if isinstance(event, Exception):
                raise event
            if isinstance(event, Step):
                self._metrics.add_step(event)
            self._answer.choices[index].push(event)

    def _count(self) -> None:
        self._metrics.add_completion(self._answer.usage["prompt_tokens"], self._seconds)

    @property
    def _seconds(self) -> float:
        return time.perf_counter() - self._begun


def _told(error: Exception) -> tuple[str, int]:
    """Return what a client is told of an error, and its status."""
    if isinstance(error, GPTCLIError):
        return str(error), 503
    _logger.error("a bug in a request for completions", exc_info=error)
    return "a bug; standard error of the server has it", 500


async def _until_gone(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Await some work, or cancel it when the client has left."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    both = [asyncio.ensure_future(work), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if both[0].done():
            both[0].result()
    finally:
        for each in both:
            each.cancel()
        await asyncio.gather(*both, return_exceptions=True)
