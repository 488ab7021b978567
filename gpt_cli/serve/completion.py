"""The answer to a request for completions, as it is sent: at once or as events."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from gpt_cli.engine import Engine
from gpt_cli.errors import GPTCLIError, ResourceError
from gpt_cli.generation.decode import Step
from gpt_cli.serve.metrics import Metrics
from gpt_cli.serve.prompts import Event, Task
from gpt_cli.serve.protocol import Answer, Completions
from gpt_cli.serve.refusals import BUG, error_object, refusal
from gpt_cli.serve.scheduler import Scheduler, StoppedError

_logger = logging.getLogger("gpt_cli")


class CompletionResponse(Response):
    """The answer to a request for completions; its texts are dropped if the client leaves."""

    def __init__(self, engine: Engine, asked: Completions, scheduler: Scheduler, metrics: Metrics):
        self._answer, self._asked, self._metrics = Answer(engine, asked), asked, metrics
        self._loop = asyncio.get_running_loop()
        # Without a limit of its own: `protocol.read` bounds an answer.
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._tasks: list[Task] = self._answer.tasks(self._deliver)
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
            response = refusal(*described(error))
        self._count()
        await response(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = b"text/event-stream; charset=utf-8"
        headers = [
            (b"content-type", kind),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # nginx would keep the events until there are many
        ]
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
            yield json.dumps(error_object(*described(error)))
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


def described(error: Exception) -> tuple[int, str]:
    """Return the status of an error, 503 if a client may try again, and what it is told."""
    if isinstance(error, GPTCLIError):
        return 503 if isinstance(error, StoppedError | ResourceError) else 500, str(error)
    _logger.error("a bug in a request for completions", exc_info=error)
    return 500, BUG


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
