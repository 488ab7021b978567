"""Texts that replicas of Ray Serve compute; if one dies, another goes on."""

import asyncio
import copy
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from gpt_cli.errors import GPTCLIError, ResourceError, counted
from gpt_cli.generation.row import Step
from gpt_cli.jobs.cluster import Model
from gpt_cli.serve.prompts import Event, PendingText, PromptScore
from gpt_cli.serve.refusals import QueueFullError, StoppedError
from gpt_cli.serve.scheduler import Scheduler

# Ray takes 2 to 4 milliseconds of CPUs for a message with events of a text.
_STREAMED = 50  # such messages a second from a replica, for all texts that are streamed
_WHOLE = 2.0  # seconds between those of another text, which tell how far it is
_MOST_FAILURES = 8  # of replicas that compute a text, without a new token
_PAUSE = 0.25  # seconds after a failure, times their number


class Replica:
    """A process with the model, which computes texts of many requests side by side."""

    def __init__(self, model: Model, max_batch: int):
        # Ray Serve lets at most `max_batch` texts be there.
        self._scheduler = Scheduler(model.load().loaded, max_batch, max_queue=max_batch)

    async def compute(self, text: PendingText) -> AsyncIterator[list[Event]]:
        """Yield the events of a text, some at a time."""
        loop = asyncio.get_running_loop()
        events: deque[Event] = deque()
        has_ended = asyncio.Event()

        def deliver(event: Event) -> None:
            events.append(event)
            if _is_last(event, text):
                loop.call_soon_threadsafe(has_ended.set)

        text.deliver = deliver
        try:
            self._scheduler.submit([text])
            ended = False
            while not ended:
                with suppress(TimeoutError):
                    seconds = max(1, self._scheduler.running) / _STREAMED
                    await asyncio.wait_for(has_ended.wait(), seconds if text.streamed else _WHOLE)
                ended = has_ended.is_set()  # before the events are read, among them the last
                if events:
                    yield [events.popleft() for _ in range(len(events))]
        except GPTCLIError as error:  # raised here, Ray would change its type
            yield [error]
        finally:
            text.cancelled = True


class Replicas:
    """Computes texts on replicas, as a `Scheduler` does in its process.

    A text that a replica has begun and not finished is continued by another from the tokens that
    have been delivered. All replicas compute the same bits, so it stays the same text.
    """

    waiting = reused = hits = 0  # only Ray Serve and the replicas know

    def __init__(self, deployment: Any, max_requests: int):
        """Use a handle of a deployment of `Replica`, for up to `max_requests` at a time."""
        self._deployment = deployment.options(stream=True)
        self._max_requests = max_requests
        self._requests: set[asyncio.Task[None]] = set()
        self.running = 0  # texts, and those that wait for a replica

    def submit(self, texts: Sequence[PendingText]) -> None:
        """Compute the texts of one request until the present task ends; raise QueueFullError."""
        if len(self._requests) >= self._max_requests:
            waiting = counted(self._max_requests, "request")
            raise QueueFullError(f"there are {waiting} already; try again later")
        request = asyncio.create_task(self._compute_all(texts))
        self._requests.add(request)
        request.add_done_callback(self._requests.discard)
        answer = asyncio.current_task()
        assert answer  # noqa: S101 (narrows the type)
        answer.add_done_callback(lambda _: request.cancel())  # the client may have left

    async def _compute_all(self, texts: Sequence[PendingText]) -> None:
        await asyncio.gather(*map(self._compute, texts))

    async def _compute(self, text: PendingText) -> None:
        """Deliver the events of a text, by one replica after the other if some die."""
        progress = _Progress(text)
        self.running += 1
        try:
            failures = 0
            while not progress.has_ended:
                events = self._deployment.compute.remote(progress.rest())
                try:
                    async for new in events:
                        progress.add(new)
                        failures = 0
                except asyncio.CancelledError:
                    if not progress.has_ended:
                        events.cancel()
                    raise
                except RayTaskError:  # a bug in `Replica`
                    raise
                except (RayError, RayServeException, ResourceError, StoppedError) as error:
                    failures += 1
                    if failures == _MOST_FAILURES:
                        raise _last_failure(error) from error
                    await asyncio.sleep(_PAUSE * failures)
        except Exception as error:
            text.fail(error)
        finally:
            self.running -= 1


class _Progress:
    """The part of a text that was delivered."""

    def __init__(self, text: PendingText):
        self._text = text
        self._ids: list[int] = []
        self._delivered = 0  # events
        self._repeated = 0  # events that come again, and are not delivered again
        self.has_ended = False

    def rest(self) -> PendingText:
        """Return the text for a replica: from the next token on, or a search from its beginning."""
        if self._delivered and not self._text.request.options.beams:
            known = tuple(self._ids)
            streamed = self._text.streamed
            return PendingText(self._text.request, _nowhere, generated=known, streamed=streamed)
        self._repeated = self._delivered
        whole = copy.copy(self._text)
        whole.deliver = _nowhere
        return whole

    def add(self, events: Sequence[Event]) -> None:
        """Deliver new events; raise an error after which another replica may go on."""
        for event in events:
            if isinstance(event, ResourceError | StoppedError):
                raise event
            if self._repeated:
                self._repeated -= 1
                continue
            self._delivered += 1
            if isinstance(event, Step):
                self._ids.append(event.id)
            self.has_ended = _is_last(event, self._text)
            self._text.deliver(event)


def _is_last(event: Event, text: PendingText) -> bool:
    """Return whether an event ends a text."""
    match event:
        case Step():
            return event.finish_reason is not None and not event.hypothesis
        case PromptScore():
            return not text.decode
    return True  # a vector, or an error


def _nowhere(event: Event) -> None:
    """Stand for the delivery of a text that goes to another process, and gets its own there."""


def _last_failure(error: Exception) -> GPTCLIError:
    if isinstance(error, GPTCLIError):
        return error
    return ResourceError(f"{_MOST_FAILURES} replicas died with this text: try again later")
