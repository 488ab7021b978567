"""Answers: how long they count as unread, what a client that leaves ends, and those of searches."""

import asyncio
import json
import re

import pytest

pytest.importorskip("uvicorn")
from gpt_cli.serve import responses
from gpt_cli.serve.protocol import read_completions
from gpt_cli.serve.refusals import QueueFullError, RequestError, StoppedError
from gpt_cli.serve.responses import CompletionResponse, Service
from gpt_cli.serve.settings import Settings
from support.answers import REASONS, computed, texts_of, told

SCOPE = {"type": "http", "asgi": {"spec_version": "2.3"}}


@pytest.fixture
def service(tiny):
    service = Service.start({"tiny": tiny}, Settings())
    yield service
    service.stop()
    service.join()


class Client:
    """A client that reads the answer to a request, from the moment on that `reads` is set."""

    def __init__(self, service, **fields):
        body = {"prompt": "Once", "seed": 1, "max_tokens": 5} | fields
        (model,) = service.models
        self.request = read_completions(model.engine, body)
        self.response = CompletionResponse(service, model, self.request)
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
        while service.models[0].scheduler.running:
            await asyncio.sleep(0.01)

    asyncio.run(run())
    assert service.unread == 0


def test_an_answer_beyond_the_bound_is_not_computed(service, monkeypatch):
    monkeypatch.setattr(responses, "_MOST_UNREAD", 9)

    async def run():
        client = Client(service, n=2)
        with pytest.raises(QueueFullError, match="try again later"):
            await client.ask()
        scheduler = service.models[0].scheduler
        assert (client.sent, scheduler.running, scheduler.waiting) == ([], 0, 0)

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_the_server_cuts_off_says_so_to_the_client_and_to_the_log(stream, service):
    scope = SCOPE | {"state": {}}

    async def run():
        client = Client(service, stream=stream, max_tokens=400, ignore_eos=True)
        client.reads.set()
        asking = asyncio.create_task(client.response(scope, client.receive, client.send))
        await asyncio.sleep(0.05)
        service.stop()
        await asyncio.wait_for(asking, 60)
        return client

    client = asyncio.run(run())
    *_, last = re.findall(rb"{.*}", client.body)
    assert json.loads(last)["error"]["code"] == "stopped"
    assert client.sent[0]["status"] == (200 if stream else 503)
    assert (scope["state"]["code"], scope["state"]["param"]) == ("stopped", None)


def test_an_answer_that_cannot_be_queued_counts_no_more(service):
    async def run():
        service.stop()
        with pytest.raises(StoppedError) as refused:
            await Client(service).ask()
        assert RequestError.of(refused.value).json["error"]["code"] == "stopped"

    asyncio.run(run())
    assert service.unread == 0


# --- searches ------------------------------------------------------------------------------------


def answers(service, bodies):
    """Return the answers, or the chunks of streams, of requests that are computed side by side."""

    async def ask(body):
        client = Client(service, **body)
        client.reads.set()
        await asyncio.wait_for(client.ask(), 60)
        if not body.get("stream"):
            return json.loads(client.body)
        *events, _ = client.body.decode().removesuffix("\n\n").split("\n\n")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    async def everything():
        return await asyncio.gather(*map(ask, bodies))

    return asyncio.run(everything())


# fmt: off
SEARCHES = [
    {"prompt": "Once upon a time", "best_of": 4},
    {"prompt": ["Once", "The fox"], "n": 2, "best_of": 3, "temperature": 0, "top_k": -1},
    {"prompt": "Once", "n": 3, "length_penalty": -1, "early_stopping": True, "temperature": 1},
    {"prompt": "Once", "n": 2, "best_of": 5, "early_stopping": "never", "no_repeat_ngram": 2},
    {"prompt": "The end", "n": 2, "stop": " a", "max_tokens": 30, "length_penalty": 0},
    {"prompt": "The", "n": 4, "max_tokens": 1, "repeat_penalty": 1.3, "logit_bias": {"11": -5}},
]
# fmt: on


@pytest.mark.parametrize("stream", [False, True])
def test_searches_are_the_engines_beside_other_requests(stream, service, tiny):
    searches = [{"use_beam_search": True, "logprobs": 1, "stream": stream} | s for s in SEARCHES]
    other = {"prompt": "Once upon", "seed": 5, "max_tokens": 60}
    results = answers(service, [*searches, other])
    assert told(results.pop()["choices"]) == texts_of(computed(tiny, **other))
    for body, result in zip(searches, results, strict=True):
        n, options = body.get("n", 1), {"max_tokens": 5} | body
        rows = computed(
            tiny, **options | {"n": 1, "temperature": 0, "top_k": 0}, beams=body.get("best_of", n)
        )
        expected = [done for row in rows for done in [row, *row.others][:n]]
        choices = [chunk["choices"][0] for chunk in result] if stream else result["choices"]
        choices.sort(key=lambda choice: choice["index"])  # prompts may end in any order
        assert [choice["index"] for choice in choices] == list(range(len(expected)))
        for choice, done in zip(choices, expected, strict=True):
            actual = choice["text"], choice["finish_reason"]
            assert actual == (done.text, REASONS[done.finish_reason])
            scores = [choice["score"], *choice["logprobs"]["token_logprobs"]]
            if not tiny.model.ops.batch_invariant:
                scores = pytest.approx(scores, abs=1e-4)
            assert scores == [done.score, *done.logprobs]
        if not stream:
            tokens = sum(len(done.ids) for done in expected)
            assert result["usage"]["completion_tokens"] == tokens


def test_each_text_of_a_search_has_the_entries_of_its_prompt(service, tiny):
    body = {"prompt": "Once upon a time", "use_beam_search": True, "n": 3, "echo": True}
    (answer, scored, plain, streamed) = answers(
        service,
        [body | {"logprobs": 1}, body | {"logprobs": 1, "max_tokens": 0}, body,
         body | {"logprobs": 1, "stream": True}],
    )  # fmt: skip
    entries = tiny.score(body["prompt"]).token_logprobs
    assert [chunk["choices"][0] for chunk in streamed] == [
        choice | {"seed": 1} for choice in answer["choices"]
    ]
    for choice, bare, only in zip(*(a["choices"] for a in (answer, plain, scored)), strict=True):
        assert choice["text"].startswith(body["prompt"]) and bare["text"] == choice["text"]
        assert only["text"] == body["prompt"] and only["score"] is None
        for logprobs in (only["logprobs"], choice["logprobs"]):
            assert logprobs["token_logprobs"][: len(entries)] == pytest.approx(entries, abs=1e-4)
        assert len(choice["logprobs"]["tokens"]) == len(entries) + 5


@pytest.mark.parametrize("stream", [False, True])
def test_a_search_may_find_fewer_texts_than_were_asked_for(stream, service):
    pytest.importorskip("llguidance")
    body = {"prompt": ["A", "The"], "n": 3, "best_of": 4, "use_beam_search": True, "echo": True,
            "structured_outputs": {"regex": "[xy]"}, "max_tokens": 9,
            "stream": stream}  # fmt: skip
    (answer,) = answers(service, [body])
    choices = [chunk["choices"][0] for chunk in answer] if stream else answer["choices"]
    assert sorted(choice["index"] for choice in choices) == [0, 1, 3, 4]
    assert {choice["text"] for choice in choices} == {"Ax", "Ay", "Thex", "They"}


def test_a_search_has_no_more_beams_than_the_server_has_rows(service):
    with pytest.raises(RequestError, match="best_of: there is room for 32 beams") as error:
        answers(service, [{"use_beam_search": True, "best_of": 33}])
    assert (error.value.status, error.value.field) == (400, "best_of")
    answers(service, [{"n": 33, "max_tokens": 1}])  # other texts wait for each other


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", 0.8), ("top_k", 40), ("top_p", 0.95), ("min_p", 0.1), ("typical_p", 0.5)],
)
def test_a_search_draws_nothing(field, value, tiny):
    with pytest.raises(RequestError, match=f"{field} cannot be set in a beam search") as error:
        read_completions(tiny, {"use_beam_search": True, "n": 2, field: value})
    assert (error.value.status, error.value.field) == (400, field)


@pytest.mark.parametrize(
    ("field", "value"),
    [("length_penalty", 2), ("early_stopping", True), ("early_stopping", "never")],
)
def test_fields_of_a_search_need_one(field, value, tiny):
    with pytest.raises(RequestError, match=f"{field} applies only to a beam search") as error:
        read_completions(tiny, {field: value})
    assert (error.value.status, error.value.field) == (400, field)
    search = {"use_beam_search": True, "best_of": 1}
    assert read_completions(tiny, {field: value} | search).options.beams == 1
