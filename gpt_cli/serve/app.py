"""The routes: HTTP on one side, `protocol` and `scheduler` on the other."""

import asyncio
import json
import math
import re
import time
from base64 import b64encode
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from hashlib import sha256
from importlib.resources import files
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gpt_cli.engine import Engine
from gpt_cli.errors import MALFORMED, GPTCLIError, InputError
from gpt_cli.hub import shown_name
from gpt_cli.serve.choice import token_name
from gpt_cli.serve.front.guard import guarded, response_of
from gpt_cli.serve.front.keys import Keys
from gpt_cli.serve.metrics import Metrics
from gpt_cli.serve.protocol import (
    Json,
    detokenize,
    read_completions,
    read_embeddings,
    tokenize,
)
from gpt_cli.serve.refusals import RequestError, no_route
from gpt_cli.serve.responses import (
    CompletionResponse,
    EmbeddingResponse,
    ServedModel,
    Service,
)
from gpt_cli.serve.settings import Settings
from gpt_cli.serve.structured import CONSTRAINT_FIELDS

Parsed = TypeVar("Parsed")

_COMPILED = 2  # constraints at a time; more would leave no threads for other requests


def application(
    engines: Engine | Mapping[str, Engine], settings: Settings, keys: Keys
) -> tuple[ASGIApp, Service]:
    """Return the ASGI application, and the service whose schedulers compute for it.

    The engines may not be used by anyone else until the schedulers have stopped. OptionError if one
    has functions of `Engine.with_hooks`.
    """
    if not isinstance(engines, Mapping):
        engines = {shown_name(engines.name): engines}
    if not engines:
        raise InputError("a server needs a model: there is none")
    for engine in engines.values():
        engine.loaded.refuse_functions("are functions, which a server does not call")
    settings.check_models(len(engines))
    if settings.name is not None:
        engines = dict.fromkeys([settings.name], *engines.values())
    service = Service.start(engines, settings)
    return application_of(service, settings, keys), service


def application_of(service: Service, settings: Settings, keys: Keys) -> ASGIApp:
    """Return the ASGI application of a service."""
    handlers = _Handlers(service)
    get = partial(Route, methods=["GET"])
    post = partial(Route, methods=["POST"])
    routes = [
        get("/", _page()),
        get("/health", handlers.health),
        get("/metrics", handlers.metrics),
        get("/v1/models", handlers.models),
        get("/v1/models/{model:path}", handlers.model),
        get("/tokenizer_info", handlers.tokenizer_info),
        post("/v1/completions", handlers.completions),
        post("/v1/embeddings", handlers.embeddings),
        post("/tokenize", partial(handlers.compute, tokenize)),
        post("/detokenize", partial(handlers.compute, detokenize)),
    ]

    def count(path: str, status: int, key: str) -> None:
        known = (route.path_format for route in routes if route.path_regex.match(path))
        service.metrics.requests.labels(next(known, "other"), status, key).inc()

    errors = {  # the handlers are asynchronous: others would wait for a thread
        HTTPException: _no_route,
        GPTCLIError: handlers.refuse,
        Exception: handlers.refuse,  # Starlette raises the error again, for `guard` to log it
    }
    app = Starlette(routes=routes, exception_handlers=errors)
    app.router.redirect_slashes = False
    return guarded(app, settings, keys, count)


async def _no_route(request: Request, error: Exception) -> Response:
    """Return the error of a path or a method without a route."""
    assert isinstance(error, HTTPException)  # noqa: S101 (narrows the type)
    headers = error.headers or {}
    refusal = no_route(request.method, request.url.path, headers.get("Allow"))
    refusal.status = error.status_code
    refusal.headers.update(headers)
    return response_of(refusal)


def _page() -> Response:
    """Return the page, which may only run its own code and connect to this server."""
    page = files("gpt_cli.serve").joinpath("page.html").read_text("utf-8")

    def digest(tag: str) -> str:
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return b64encode(sha256(text.encode()).digest()).decode()

    policy = (
        f"default-src 'none'; style-src 'sha256-{digest('style')}'; "
        f"script-src 'sha256-{digest('script')}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    )
    return HTMLResponse(page, headers={"Content-Security-Policy": policy})


def _special_tokens(engine: Engine) -> Json:
    """Return the special tokens and the context length, as lm-evaluation-harness reads them."""
    config = engine.model.config
    tokenizer = engine.tokenizer
    start = config.bos_token_id
    ends = config.eos_token_id
    return {
        "eos_token": token_name(tokenizer, ends[0]) if ends else None,
        "bos_token": None if start is None else token_name(tokenizer, start),
        "pad_token": None,
        "model_max_length": config.n_positions,
    }


class _Handlers:
    """The handlers of the routes that compute their answers."""

    def __init__(self, service: Service):
        self._service = service
        self._created = int(time.time())
        self._compiling = asyncio.Semaphore(_COMPILED)
        # Not the loop's executor: its shutdown starts a thread, and memory may be short.
        self._workers = ThreadPoolExecutor()

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics.text(), media_type=Metrics.media_type)

    async def models(self, request: Request) -> Response:
        data = [self._described(model) for model in self._service.models]
        return JSONResponse({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        return JSONResponse(self._described(self._service.model(request.path_params["model"])))

    def _described(self, model: ServedModel) -> Json:
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "gpt-cli",
            "max_model_len": model.engine.model.config.n_positions,
            "adapter": model.engine.adapter,
        }

    async def tokenizer_info(self, request: Request) -> Response:
        model = self._service.model(request.query_params.get("model"))
        return JSONResponse(_special_tokens(model.engine))

    async def compute(self, function: Callable[[Engine, Json], Json], request: Request) -> Response:
        """Answer with what a function returns for the body of a request."""
        body = await _json(request)
        model = self._service.model(body.get("model"))
        return JSONResponse(await self._in_thread(function, model, body))

    async def _in_thread(
        self, function: Callable[[Engine, Json], Parsed], model: ServedModel, body: Json
    ) -> Parsed:
        """Call a function in another thread, since a long text takes a while to tokenize."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._workers, function, model.engine, body)

    async def completions(self, request: Request) -> Response:
        """Continue or score the prompts of a request."""
        body = await _json(request)
        model = self._service.model(body.get("model"))
        parse = partial(read_completions, folder=self._service.folder)
        has_constraint = any(body.get(name) is not None for name in CONSTRAINT_FIELDS)
        async with self._compiling if has_constraint else nullcontext():
            parsed = await self._in_thread(parse, model, body)
        return CompletionResponse(self._service, model, parsed)

    async def embeddings(self, request: Request) -> Response:
        """Return vectors of the texts of a request."""
        body = await _json(request)
        model = self._service.model(body.get("model"))
        parsed = await self._in_thread(read_embeddings, model, body)
        return EmbeddingResponse(self._service, model, parsed)

    async def refuse(self, request: Request, error: Exception) -> Response:
        refusal = RequestError.of(error)
        if refusal.status == 429:
            seconds = min(60, max(1, math.ceil(self._service.metrics.mean_seconds)))
            refusal.headers["Retry-After"] = str(seconds)
        return response_of(refusal)


def _fault(error: Exception) -> str:
    """Return what is wrong with a body that cannot be parsed."""
    match error:
        case json.JSONDecodeError():
            return f"{error.msg} at character {error.pos}"
        case UnicodeDecodeError():
            return f"it is not UTF-8 at byte {error.start}"
        case RecursionError():
            return "it is nested too deeply"
    return "a number has too many digits"  # Python's limit is 4300


async def _json(request: Request) -> Json:
    """Return the JSON object that is the body of a request; raise RequestError if it is none."""
    try:
        body = json.loads(await request.body())
    except MALFORMED as error:
        raise RequestError(f"the body must be JSON: {_fault(error)}") from None
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return body
