"""The responses to requests for completions and embeddings: from the events of texts to JSON."""

import asyncio
import json
import logging
import time
import uuid
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from gpt_cli.engine import Engine
from gpt_cli.errors import GPTCLIError, counted
from gpt_cli.generation.row import Request, Step
from gpt_cli.options.request import Options
from gpt_cli.serve.choice import Choice
from gpt_cli.serve.metrics import Metrics
from gpt_cli.serve.prompts import Event, PendingText, PendingVector, PromptScore, Vector
from gpt_cli.serve.protocol import MOST_ENTRIES, Completions, Embeddings, Json
from gpt_cli.serve.refusals import QueueFullError, RequestError
from gpt_cli.serve.scheduler import Scheduler
from gpt_cli.texts.text import Text

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
    names: Sequence[str]  # of the model: the first is shown, and requests may have any
    folder: Path | None = None  # of the files of edits, if requests may have edits
    unread: int = 0  # entries of responses being computed, or not read by their clients


class PendingResponse(StreamingResponse, ABC):
    """A response whose texts the scheduler computes; they are dropped if the client leaves."""

    id: str | None = None
    texts: list[PendingText]

    def __init__(
        self,
        service: Service,
        request: Completions | Embeddings,
        stream: AsyncIterator[str] | None = None,
    ):
        super().__init__(stream or (), headers=_HEADERS, media_type="text/event-stream")
        self._service = service
        self._request = request
        self._is_stream = stream is not None
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()  # with indices of texts
        self._ended = 0  # number of texts
        self._start = time.perf_counter()

    @property
    def usage(self) -> dict[str, int]:
        """Return the numbers of tokens."""
        prompts = sum(len(text.ids) for text in self._request.texts)
        return {"prompt_tokens": prompts, "total_tokens": prompts}

    @abstractmethod
    def complete(self) -> Response:
        """Return the whole response once all texts have ended."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, until it is read or the client has left."""
        service = self._service
        entries = self._request.entries
        if service.unread + entries > _MOST_UNREAD:
            raise QueueFullError("too many large answers are computed or unread; try again later")
        service.scheduler.submit(self.texts)
        service.unread += entries
        try:
            await super().__call__(scope, receive, send)
        finally:
            # For the access log (`guard`), also if the client has left.
            scope.setdefault("state", {}).update(id=self.id, **self.usage)
            service.unread -= entries
            for text in self.texts:
                text.cancelled = True

    def _deliver(self, index: int, event: Event) -> None:
        """Pass an event of a text to the event loop."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    @abstractmethod
    def _add(self, index: int, event: Any) -> bool:
        """Add an event of a text; return whether it was the last."""

    async def _next_events(self) -> None:
        """Wait for an event, and add all that have come; raise an error that is one of them."""
        events = [await self._events.get()]
        while not self._events.empty():
            events.append(self._events.get_nowait())
        for index, event in events:
            if isinstance(event, Exception):
                raise event
            if self._add(index, event):
                self._ended += 1

    @property
    def _finished(self) -> bool:
        return self._ended == len(self.texts)

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
            while not self._finished:
                await self._next_events()
            response = self.complete()
        except Exception as error:
            response = _failure(error).response
        self._count()
        return response

    @property
    def _seconds(self) -> float:
        return time.perf_counter() - self._start

    def _count(self) -> None:
        self._service.metrics.add_answer(self.usage["prompt_tokens"], self._seconds)


class CompletionResponse(PendingResponse):
    """The response to a request for completions."""

    _request: Completions

    def __init__(self, service: Service, request: Completions):
        rows = service.scheduler.max_batch
        if (request.options.beams or 1) > rows:
            message = f"best_of: this server has room for {counted(rows, 'beam')} at a time"
            raise RequestError(message, "best_of")
        super().__init__(service, request, self._stream() if request.fields.stream else None)
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self._frame = {
            "id": self.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.names[0],
        }
        self._choices: list[Choice] = []
        for prompt in request.prompts:
            for _ in range(request.fields.choices):
                index = len(self._choices)
                self._choices.append(Choice(service.engine.tokenizer, request, prompt, index))
        self.texts = []
        self._choices_of_texts: list[list[Choice]] = []  # several of a beam search, best first
        size = request.fields.choices if request.fields.use_beam_search else 1
        for start in range(0, len(self._choices), size):
            choices = self._choices[start : start + size]
            if not choices[0].finish_reason:
                self.texts.append(choices[0].pending(partial(self._deliver, len(self.texts))))
                self._choices_of_texts.append(choices)
        self._has_begun = False

    def _add(self, index: int, event: PromptScore | Step) -> bool:
        """Add an event of a text; return whether it was the last."""
        choices = self._choices_of_texts[index]
        if not self._has_begun:
            self._has_begun = True
            self._service.metrics.first_seconds.observe(self._seconds)
        if isinstance(event, PromptScore):
            for choice in choices:
                choice.add_score(event)
        else:
            self._service.metrics.add_step(event)
            if event.hypothesis < len(choices):  # a search finds more than it returns
                choices[event.hypothesis].add_step(event)
        ended = choices[0].finish_reason is not None
        for choice in choices:
            if ended:
                choice.is_new = choice.finish_reason is not None
            else:  # the texts of a search are sent together, at the end
                choice.is_new = not self._request.fields.use_beam_search
        return ended

    def complete(self) -> Response:
        """Return the whole response once all texts have ended."""
        parts = [
            choice.new_part() | {"index": index}
            for index, choice in enumerate(self._best)
            if choice.finish_reason  # a search may not have found all
        ]
        return JSONResponse(self._frame | {"choices": parts, "usage": self.usage})

    @property
    def _best(self) -> Iterator[Choice]:
        """Yield the `n` likeliest choices of each prompt, or all, in their order."""
        n = self._request.fields.n
        count = self._request.fields.choices
        for start in range(0, len(self._choices), count):
            choices = self._choices[start : start + count]
            if count > n:
                choices.sort(key=lambda choice: -choice.mean_logprob)
            yield from choices[:n]

    async def _stream(self) -> AsyncIterator[str]:
        """Yield server-sent events with the new parts of texts, and at last the usage."""
        try:
            while True:
                for choice in self._choices:
                    if choice.is_new:
                        yield _event(self._frame | {"choices": [choice.new_part()]})
                if self._finished:
                    break
                await self._next_events()
            if self._request.include_usage:
                yield _event(self._frame | {"choices": [], "usage": self.usage})
        except Exception as error:
            yield _event(_failure(error).json)
        self._count()
        yield "data: [DONE]\n\n"

    @property
    def usage(self) -> dict[str, int]:
        """Return the numbers of tokens."""
        prompts = super().usage["prompt_tokens"]
        generated = sum(choice.tokens for choice in self._choices)
        return {
            "prompt_tokens": prompts,
            "completion_tokens": generated,
            "total_tokens": prompts + generated,
        }


class EmbeddingResponse(PendingResponse):
    """The response to a request for embeddings."""

    _request: Embeddings

    def __init__(self, service: Service, request: Embeddings):
        super().__init__(service, request)
        self._encoded: dict[int, str] = {}  # JSON of each vector; that of all would take long
        self.texts = [self._pending(index, text) for index, text in enumerate(request.texts)]

    def _pending(self, index: int, text: Text) -> PendingText:
        """Return the text to compute."""
        fields = self._request.fields
        deliver = partial(self._deliver, index)
        first = len(text.ids) - 1 if fields.pool == "last" else text.first
        row = Request(text, Options(), index)
        return PendingVector(row, deliver, hook=fields.hook, first=first)

    def _add(self, index: int, vector: Vector) -> bool:
        if self._request.fields.encoding_format == "base64":
            self._encoded[index] = f'"{b64encode(vector.astype("<f4").tobytes()).decode()}"'
        else:
            self._encoded[index] = json.dumps(vector.ravel().tolist())
        return True

    def complete(self) -> Response:
        """Return the whole response once all texts have ended."""
        data = ", ".join(
            f'{{"object": "embedding", "index": {index}, "embedding": {self._encoded[index]}}}'
            for index in range(len(self.texts))
        )
        frame = {"object": "list", "model": self._service.names[0], "usage": self.usage}
        content = f'{json.dumps(frame)[:-1]}, "data": [{data}]}}'
        return Response(content, media_type="application/json")


def _event(data: Json) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _failure(error: Exception) -> RequestError:
    if not isinstance(error, GPTCLIError):
        _logger.error("a bug in the answer to a request", exc_info=error)
    return RequestError.of(error)
