"""The answer to a request for completions, as it is sent: at once or as events."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress

from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from gpt_cli.engine import Engine
from gpt_cli.errors import GPTCLIError
from gpt_cli.generation.decode import Step
from gpt_cli.serve.answer import Answer
from gpt_cli.serve.metrics import Metrics
from gpt_cli.serve.prompts import Event
from gpt_cli.serve.protocol import MOST_ENTRIES, Completions, Json
from gpt_cli.serve.refusals import QueueFullError, described, error_object, refusal
from gpt_cli.serve.scheduler import Scheduler

_MOST_UNREAD = 4 * MOST_ENTRIES  # of all answers that are not read to their end: 400 MB
_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would keep the events until there are many
}
_logger = logging.getLogger("gpt_cli")


class Room:
    """Bounds the memory of all answers that clients have not read to their end."""

    def __init__(self) -> None:
        self._left = _MOST_UNREAD

    @contextmanager
    def reserved(self, entries: int) -> Iterator[None]:
        """Reserve room for an answer; raise QueueFullError if there is not enough."""
        if entries > self._left:
            raise QueueFullError("too many large answers are computed or unread; try again later")
        self._left -= entries
        try:
            yield
        finally:
            self._left += entries


class CompletionResponse(StreamingResponse):
    """The answer to a request for completions; its texts are dropped if the client leaves."""

    def __init__(
        self,
        engine: Engine,
        request: Completions,
        scheduler: Scheduler,
        metrics: Metrics,
        room: Room,
    ):
        super().__init__(self._server_sent(), headers=_HEADERS, media_type="text/event-stream")
        self._answer, self._request = Answer(engine, request), request
        self._scheduler, self._metrics, self._room = scheduler, metrics, room
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()  # bounded by `room`
        self._start, self._has_begun = time.perf_counter(), False

    def _deliver(self, index: int, event: Event) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, until it is read or the client has left."""
        texts = self._answer.pending(self._deliver)
        with self._room.reserved(self._request.entries):
            self._scheduler.submit(texts)
            try:
                await super().__call__(scope, receive, send)
            finally:
                for text in texts:
                    text.cancelled = True

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
            response = refusal(*_described(error))
        self._count()
        return response

    async def _server_sent(self) -> AsyncIterator[str]:
        try:
            for chunk in self._answer.chunks():
                yield _event(chunk)
            while not self._answer.finished:
                await self._next_events()
                for chunk in self._answer.chunks():
                    yield _event(chunk)
            for chunk in self._answer.last_chunks():
                yield _event(chunk)
        except Exception as error:
            yield _event(error_object(*_described(error)))
        self._count()
        yield "data: [DONE]\n\n"

    async def _next_events(self) -> None:
        """Wait for an event, and add all that have come; raise an error that is one of them."""
        events = [await self._events.get()]
        while not self._events.empty():
            events.append(self._events.get_nowait())
        if not self._has_begun:
            self._has_begun = True
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
        return time.perf_counter() - self._start


def _event(data: Json) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _described(error: Exception) -> tuple[int, str, str | None, str | None]:
    if not isinstance(error, GPTCLIError):
        _logger.error("a bug in a request for completions", exc_info=error)
    return described(error)
