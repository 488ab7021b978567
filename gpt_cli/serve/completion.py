"""The answer to a request for completions, as it is sent: at once or as events."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from gpt_cli.engine import Engine
from gpt_cli.errors import GPTCLIError
from gpt_cli.generation.decode import Step
from gpt_cli.serve.answer import Answer, CompletionChoice
from gpt_cli.serve.metrics import Metrics
from gpt_cli.serve.prompts import Event
from gpt_cli.serve.protocol import MOST_ENTRIES, Completions, Json
from gpt_cli.serve.refusals import QueueFullError, RequestError
from gpt_cli.serve.scheduler import Scheduler

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
    scheduler: Scheduler
    metrics: Metrics
    unread: int = 0  # entries of answers that are being computed, or that clients have not read


class CompletionResponse(StreamingResponse):
    """The answer to a request for completions; its texts are dropped if the client leaves."""

    def __init__(self, service: Service, request: Completions):
        super().__init__(self._server_sent(), headers=_HEADERS, media_type="text/event-stream")
        self._service, self._request = service, request
        self._answer = Answer(service.engine, request)
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[CompletionChoice, Event]] = asyncio.Queue()
        self._start, self._has_begun = time.perf_counter(), False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, until it is read or the client has left."""
        service, entries = self._service, self._request.entries
        if service.unread + entries > _MOST_UNREAD:
            raise QueueFullError("too many large answers are computed or unread; try again later")
        choices = [choice for choice in self._answer.choices if not choice.finish_reason]
        texts = [choice.pending(partial(self._deliver, choice)) for choice in choices]
        service.scheduler.submit(texts)
        service.unread += entries
        try:
            await super().__call__(scope, receive, send)
        finally:
            service.unread -= entries
            for text in texts:
                text.cancelled = True

    def _deliver(self, choice: CompletionChoice, event: Event) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._events.put_nowait, (choice, event))

    async def stream_response(self, send: Send) -> None:
        """Send the events, or the whole answer, whose status is known at its end."""
        if self._request.fields.stream:
            await super().stream_response(send)
            return
        whole = await self._whole()
        head = {"status": whole.status_code, "headers": whole.raw_headers}
        await send({"type": "http.response.start", **head})
        await send({"type": "http.response.body", "body": whole.body, "more_body": True})
        await send({"type": "http.response.body"})  # once the client has read what is before it

    async def _whole(self) -> Response:
        try:
            while not self._answer.finished:
                await self._next_events()
            response: Response = JSONResponse(self._answer.whole())
        except Exception as error:
            response = _failure(error).response
        self._count()
        return response

    async def _server_sent(self) -> AsyncIterator[str]:
        try:
            while True:
                for chunk in self._answer.chunks():
                    yield _event(chunk)
                if self._answer.finished:
                    break
                await self._next_events()
        except Exception as error:
            yield _event(_failure(error).json)
        self._count()
        yield "data: [DONE]\n\n"

    async def _next_events(self) -> None:
        """Wait for an event, and add all that have come; raise an error that is one of them."""
        events = [await self._events.get()]
        while not self._events.empty():
            events.append(self._events.get_nowait())
        if not self._has_begun:
            self._has_begun = True
            self._service.metrics.first_seconds.observe(self._seconds)
        for choice, event in events:
            if isinstance(event, Exception):
                raise event
            if isinstance(event, Step):
                self._service.metrics.add_step(event)
            choice.push(event)

    def _count(self) -> None:
        self._service.metrics.add_completion(self._answer.usage["prompt_tokens"], self._seconds)

    @property
    def _seconds(self) -> float:
        return time.perf_counter() - self._start


def _event(data: Json) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _failure(error: Exception) -> RequestError:
    if not isinstance(error, GPTCLIError):
        _logger.error("a bug in a request for completions", exc_info=error)
    return RequestError.of(error)
