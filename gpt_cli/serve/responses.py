"""The responses to requests for completions and embeddings, over HTTP."""

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from gpt_cli.engine import Engine
from gpt_cli.errors import GPTCLIError
from gpt_cli.generation.row import Step
from gpt_cli.serve.answers import Answer, CompletionAnswer, EmbeddingAnswer
from gpt_cli.serve.guard import response_of
from gpt_cli.serve.metrics import Metrics
from gpt_cli.serve.prompts import Computing, Event
from gpt_cli.serve.protocol import MOST_ENTRIES, Completions, Embeddings, Json
from gpt_cli.serve.refusals import QueueFullError, RequestError

_MOST_UNREAD = 4 * MOST_ENTRIES  # 400 MB
_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would keep the events until there are many
}
_logger = logging.getLogger("gpt_cli")


@dataclass
class Service:
    """The parts that all requests share."""

    engine: Engine
    scheduler: Computing
    metrics: Metrics
    names: Sequence[str]  # of the model: the first is shown, and requests may have any
    folder: Path | None = None  # of the files of edits, if requests may have edits
    unread: int = 0  # entries of responses being computed, or not read by their clients


class PendingResponse(StreamingResponse):
    """A response whose texts the scheduler computes; they are dropped if the client leaves."""

    _answer: Answer

    def __init__(self, service: Service, entries: int, stream: AsyncIterator[str] | None = None):
        super().__init__(stream or (), headers=_HEADERS, media_type="text/event-stream")
        self._service = service
        self._entries = entries  # the size of the answer
        self._is_stream = stream is not None
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()  # with indices of texts
        self._start = time.perf_counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, until it is read or the client has left."""
        service = self._service
        if service.unread + self._entries > _MOST_UNREAD:
            raise QueueFullError("too many large answers are computed or unread; try again later")
        service.scheduler.submit(self._answer.texts)
        service.unread += self._entries
        try:
            await super().__call__(scope, receive, send)
        finally:
            # For the access log (`guard`), also if the client has left.
            scope.setdefault("state", {}).update(id=self._answer.id, **self._answer.usage)
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
            response = response_of(_failure(error))
        self._count()
        return response

    @property
    def _seconds(self) -> float:
        return time.perf_counter() - self._start

    def _count(self) -> None:
        self._service.metrics.add_answer(self._answer.usage["prompt_tokens"], self._seconds)


class CompletionResponse(PendingResponse):
    """The response to a request for completions."""

    _answer: CompletionAnswer

    def __init__(self, service: Service, request: Completions):
        super().__init__(
            service, request.entries, self._stream() if request.fields.stream else None
        )
        id = f"cmpl-{uuid.uuid4().hex}"
        engine, model = service.engine, service.names[0]
        self._answer = CompletionAnswer(engine, request, model, id, self._deliver)
        self._include_usage = request.include_usage
        self._has_begun = False

    def _add(self, index: int, event: Any) -> None:
        """Add an event of a text, and count it."""
        metrics = self._service.metrics
        if not self._has_begun:
            self._has_begun = True
            metrics.first_seconds.observe(self._seconds)
        if isinstance(event, Step):
            metrics.add_step(event)
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
            yield _event(_failure(error).json)
        self._count()
        yield "data: [DONE]\n\n"


class EmbeddingResponse(PendingResponse):
    """The response to a request for embeddings."""

    def __init__(self, service: Service, request: Embeddings):
        super().__init__(service, request.entries)
        self._answer = EmbeddingAnswer(request, service.names[0], self._deliver)


def _event(data: Json) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _failure(error: Exception) -> RequestError:
    if not isinstance(error, GPTCLIError):
        _logger.error("a bug in the answer to a request", exc_info=error)
    return RequestError.of(error)
