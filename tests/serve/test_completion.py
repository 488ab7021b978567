"""The answer to a request: how long its room is reserved, and what a client that leaves ends."""

import asyncio
import json

import pytest

pytest.importorskip("uvicorn")
from gpt_cli.serve import completion
from gpt_cli.serve.completion import CompletionResponse, Room
from gpt_cli.serve.metrics import Metrics
from gpt_cli.serve.protocol import read
from gpt_cli.serve.refusals import QueueFullError, StoppedError
from gpt_cli.serve.scheduler import Scheduler

SCOPE = {"type": "http", "asgi": {"spec_version": "2.3"}}


@pytest.fixture
def scheduler(tiny):
    running = Scheduler(tiny.model, tiny.tokenizer)
    yield running
    running.stop()
    running.join()


class Client:
    """A client that reads the answer to a request, from the moment on that `reads` is set."""

    def __init__(self, tiny, scheduler, room, **fields):
        self.request = read(tiny, {"prompt": "Once", "seed": 1, "max_tokens": 5} | fields)
        self.response = CompletionResponse(tiny, self.request, scheduler, Metrics(scheduler), room)
        self.reads, self.leaves, self.sent = asyncio.Event(), asyncio.Event(), []
        self.has_begun = asyncio.Event()

    async def send(self, message):
        """Wait as a server does: until the client has read what was sent before."""
        if self.sent and self.sent[-1].get("body"):
            await self.reads.wait()
        self.sent.append(message)
        if message.get("body"):
            self.has_begun.set()

    async def receive(self):
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    def ask(self):
        return asyncio.create_task(self.response(SCOPE, self.receive, self.send))

    @property
    def body(self):
        return b"".join(message.get("body", b"") for message in self.sent)


@pytest.mark.parametrize("stream", [False, True])
def test_room_is_reserved_until_the_answer_is_read(stream, tiny, scheduler):
    async def run():
        room = Room()
        total = room._left
        client = Client(tiny, scheduler, room, stream=stream, logprobs=3)
        asking = client.ask()
        await asyncio.wait_for(client.has_begun.wait(), 60)
        await asyncio.sleep(0.05)  # the text has ended
        assert total - room._left == client.request.entries == 5 * 4
        client.reads.set()
        await asyncio.wait_for(asking, 60)
        assert room._left == total
        return client

    client = asyncio.run(run())
    assert client.sent[0]["status"] == 200
    assert client.sent[-1].get("more_body", False) is False
    if not stream:
        assert json.loads(client.body)["usage"]["completion_tokens"] == 5
    else:
        assert client.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_gives_its_room_back(stream, tiny, scheduler):
    async def run():
        room = Room()
        total = room._left
        client = Client(tiny, scheduler, room, stream=stream, max_tokens=400, ignore_eos=True)
        asking = client.ask()
        await asyncio.sleep(0.05)
        assert room._left < total
        client.leaves.set()
        await asyncio.wait_for(asking, 60)
        assert room._left == total
        while scheduler.running:
            await asyncio.sleep(0.01)

    asyncio.run(run())


def test_without_room_nothing_is_computed(tiny, scheduler, monkeypatch):
    monkeypatch.setattr(completion, "_MOST_UNREAD", 9)

    async def run():
        client = Client(tiny, scheduler, Room(), n=2)
        with pytest.raises(QueueFullError, match="try again later"):
            await client.ask()
        assert (client.sent, scheduler.running, scheduler.waiting) == ([], 0, 0)

    asyncio.run(run())


def test_a_request_that_cannot_be_queued_gives_its_room_back(tiny, scheduler):
    async def run():
        room = Room()
        scheduler.stop()
        total = room._left
        with pytest.raises(StoppedError):
            await Client(tiny, scheduler, room).ask()
        assert room._left == total

    asyncio.run(run())
