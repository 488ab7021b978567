"""The responses to requests for completions and embeddings, over HTTP."""

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from gpt_cli.engine import Engine
from gpt_cli.errors import GPTCLIError
from gpt_cli.generation.row import Step
from gpt_cli.serve.answers import Answer, CompletionAnswer, EmbeddingAnswer
from gpt_cli.serve.front.guard import remember, response_of
from gpt_cli.serve.metrics import Metrics
from gpt_cli.serve.prompts import Computing, Event
from gpt_cli.serve.protocol import MOST_ENTRIES, Completions, Embeddings, Json
from gpt_cli.serve.refusals import QueueFullError, RequestError
from gpt_cli.serve.scheduler import Scheduler, Turns
from gpt_cli.serve.settings import Settings

_MOST_UNREAD = 4 * MOST_ENTRIES  # 400 MB
_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would keep the events until there are many
}
_logger = logging.getLogger("gpt_cli")


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A model, and the scheduler that computes with it."""

    name: str  # in answers
    engine: Engine
    scheduler: Computing


@dataclass
class Service:
    """The models of a server, and the parts that all requests share."""

    models: Sequence[ServedModel]
    metrics: Metrics
    folder: Path | None = None  # of the files of edits, if requests may have edits
    schedulers: Sequence[Scheduler] = ()  # of this process
    unread: int = 0  # entries of responses being computed, or not read by their clients

    @classmethod
    def of(
        cls,
        models: Sequence[ServedModel],
        settings: Settings,
        schedulers: Sequence[Scheduler] = (),
    ) -> Self:
        """Return the service of models, whose texts these schedulers compute, or other machines."""
        metrics = Metrics({model.name: model.scheduler for model in models})
        for model in models:
            metrics.add_model(model.name, model.engine.model.ops.dtype)
        return cls(models, metrics, settings.allow_edits, schedulers)

    @classmethod
    def start(cls, engines: Mapping[str, Engine], settings: Settings) -> Self:
        """Start a scheduler for each of the engines, which are by the names of their models."""
        limits = settings.max_batch, settings.max_queue
        turns = Turns(len(engines))
        schedulers = [Scheduler(engine.loaded, *limits, turns) for engine in engines.values()]
        models = [
            ServedModel(name, engine, scheduler)
            for (name, engine), scheduler in zip(engines.items(), schedulers, strict=True)
        ]
        return cls.of(models, settings, schedulers)

    def model(self, name: Any) -> ServedModel:
        """Return the model with a name, or as `load` got it; by default, the first.

        Raise RequestError if there is none.
        """
        if name is None:
            return self.models[0]
        if not isinstance(name, str):
            raise RequestError(f"model must be a string, not {json.dumps(name):.40}", "model")
        by_name = {model.engine.name: model for model in reversed(self.models)}
        by_name |= {model.name: model for model in self.models}
        if name not in by_name:
            names = ", ".join(repr(model.name) for model in self.models)
            message = f"this server has no model {name!r:.80}, only {names}"
            raise RequestError(message, "model", 404, "model_not_found")
        return by_name[name]

    def stop(self) -> None:
        """Stop all schedulers."""
        for scheduler in self.schedulers:
            scheduler.stop()

    def join(self) -> None:
        """Wait until all schedulers have stopped."""
        for scheduler in self.schedulers:
            scheduler.join()


class PendingResponse(StreamingResponse):
    """A response whose texts the scheduler computes; they are dropped if the client leaves."""

    _answer: Answer

    def __init__(
        self,
        service: Service,
        model: ServedModel,
        entries: int,
        stream: AsyncIterator[str] | None = None,
    ):
        super().__init__(stream or (), headers=_HEADERS, media_type="text/event-stream")
        self._service = service
        self._model = model
        self._entries = entries  # the size of the answer
        self._is_stream = stream is not None
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()  # with indices of texts
        self._start = time.perf_counter()
        self._reason: dict[str, str | None] = {}  # of the error that has ended it, if one has

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, until it is read or the client has left."""
        service = self._service
        if service.unread + self._entries > _MOST_UNREAD:
            raise QueueFullError("too many large answers are computed or unread; try again later")
        self._model.scheduler.submit(self._answer.texts)
        service.unread += self._entries
        try:
            await super().__call__(scope, receive, send)
        finally:
            # Also if the client has left.
            answer = self._answer
            remember(scope, id=answer.id, model=answer.model, **self._reason, **answer.usage)
            service.unread -= self._entries
            self._answer.cancel()

    def _deliver(self, index: int, event: Event) -> None:
        """Pass an event of a text to the event loop."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    def _add(self, index: int, event: Any) -> None:
        """Add an event of a text."""
        self._answer.add(index, event)

    async def _next_events(self) -> None:
        """Wait for an event, and add all that have come; raise an error that is one of them."""
        events = [await self._events.get()]
        while not self._events.empty():
            events.append(self._events.get_nowait())
        for index, event in events:
            if isinstance(event, Exception):
                raise event
            self._add(index, event)

    async def stream_response(self, send: Send) -> None:
        """Send a stream, or the whole response, whose status is known at its end."""
        if self._is_stream:
            await super().stream_response(send)
            return
        whole = await self._whole()
        start = "http.response.start"
        await send({"type": start, "status": whole.status_code, "headers": whole.raw_headers})
        await send({"type": "http.response.body", "body": whole.body, "more_body": True})
        await send({"type": "http.response.body"})  # once the client has read what is before it

    async def _whole(self) -> Response:
        try:
            while not self._answer.finished:
                await self._next_events()
            response = Response(self._answer.json, media_type="application/json")
        except Exception as error:
            response = response_of(self._failure(error))
        self._count()
        return response

    def _failure(self, error: Exception) -> RequestError:
        if not isinstance(error, GPTCLIError):
            _logger.error("a bug in the answer to a request", exc_info=error)
        failure = RequestError.of(error)
        self._reason = failure.reason
        return failure

    @property
    def _seconds(self) -> float:
        return time.perf_counter() - self._start

    def _count(self) -> None:
        prompt_tokens = self._answer.usage["prompt_tokens"]
        self._service.metrics.add_answer(self._model.name, prompt_tokens, self._seconds)


class CompletionResponse(PendingResponse):
    """The response to a request for completions."""

    _answer: CompletionAnswer

    def __init__(self, service: Service, model: ServedModel, request: Completions):
        stream = self._stream() if request.fields.stream else None
        super().__init__(service, model, request.entries, stream)
        id = f"cmpl-{uuid.uuid4().hex}"
        self._answer = CompletionAnswer(model.engine, request, model.name, id, self._deliver)
        self._include_usage = request.include_usage
        self._has_begun = False

    def _add(self, index: int, event: Any) -> None:
        """Add an event of a text, and count it."""
        metrics = self._service.metrics
        if not self._has_begun:
            self._has_begun = True
            metrics.add_first(self._model.name, self._seconds)
        if isinstance(event, Step):
            metrics.add_step(self._model.name, event)
        super()._add(index, event)

    async def _stream(self) -> AsyncIterator[str]:
        """Yield server-sent events with the new parts of texts, and at last the usage."""
        answer = self._answer
        try:
            while True:
                for choice in answer.choices:
                    if choice.is_new:
                        yield _event(answer.frame | {"choices": [choice.new_part()]})
                if answer.finished:
                    break
                await self._next_events()
            if self._include_usage:
                yield _event(answer.frame | {"choices": [], "usage": answer.usage})
        except Exception as error:
            yield _event(self._failure(error).json)
        self._count()
        yield "data: [DONE]\n\n"


class EmbeddingResponse(PendingResponse):
    """The response to a request for embeddings."""

    def __init__(self, service: Service, model: ServedModel, request: Embeddings):
        super().__init__(service, model, request.entries)
        self._answer = EmbeddingAnswer(request, model.name, self._deliver)


def _event(data: Json) -> str:
    return f"data: {json.dumps(data)}\n\n"
