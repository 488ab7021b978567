"""The answer to a request: how long it counts as unread, and what a client that leaves ends."""

import asyncio
import json

import pytest

pytest.importorskip("uvicorn")
from gpt_cli.serve import answer
from gpt_cli.serve.answer import CompletionAnswer, Service
from gpt_cli.serve.metrics import Metrics
from gpt_cli.serve.protocol import read
from gpt_cli.serve.refusals import QueueFullError, StoppedError
from gpt_cli.serve.scheduler import Scheduler

SCOPE = {"type": "http", "asgi": {"spec_version": "2.3"}}


@pytest.fixture
def service(tiny):
    scheduler = Scheduler(tiny.loaded)
    yield Service(tiny, scheduler, Metrics(scheduler), ["tiny"])
    scheduler.stop()
    scheduler.join()


class Client:
    """A client that reads the answer to a request, from the moment on that `reads` is set."""

    def __init__(self, service, **fields):
        body = {"prompt": "Once", "seed": 1, "max_tokens": 5} | fields
        self.request = read(service.engine, body, service.names)
        self.response = CompletionAnswer(service, self.request)
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
def test_an_answer_counts_until_it_is_read(stream, service):
    async def run():
        client = Client(service, stream=stream, logprobs=3)
        asking = client.ask()
        await asyncio.wait_for(client.has_begun.wait(), 60)
        await asyncio.sleep(0.05)  # the text has ended
        assert service.unread == client.request.entries == 5 * 4
        client.reads.set()
        await asyncio.wait_for(asking, 60)
        return client

    client = asyncio.run(run())
    assert service.unread == 0
    assert client.sent[0]["status"] == 200
    assert client.sent[-1].get("more_body", False) is False
    if not stream:
        assert json.loads(client.body)["usage"]["completion_tokens"] == 5
    else:
        assert client.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_of_a_client_that_leaves_counts_no_more(stream, service):
    async def run():
        client = Client(service, stream=stream, max_tokens=400, ignore_eos=True)
        asking = client.ask()
        await asyncio.sleep(0.05)
        assert service.unread == 400
        client.leaves.set()
        await asyncio.wait_for(asking, 60)
        while service.scheduler.running:
            await asyncio.sleep(0.01)

    asyncio.run(run())
    assert service.unread == 0


def test_an_answer_beyond_the_bound_is_not_computed(service, monkeypatch):
    monkeypatch.setattr(answer, "_MOST_UNREAD", 9)

    async def run():
        client = Client(service, n=2)
        with pytest.raises(QueueFullError, match="try again later"):
            await client.ask()
        assert (client.sent, service.scheduler.running, service.scheduler.waiting) == ([], 0, 0)

    asyncio.run(run())


def test_an_answer_that_cannot_be_queued_counts_no_more(service):
    async def run():
        service.scheduler.stop()
        with pytest.raises(StoppedError):
            await Client(service).ask()

    asyncio.run(run())
    assert service.unread == 0
