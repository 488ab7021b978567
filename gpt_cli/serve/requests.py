"""The task to answer requests in files, such as OpenAI's batch files, as the server answers them.

https://platform.openai.com/docs/api-reference/batch/request-input
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import sha256
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from gpt_cli import hub
from gpt_cli.errors import InputError, ResourceError
from gpt_cli.jobs import storage
from gpt_cli.jobs.layout import InputRow, Layout
from gpt_cli.jobs.task import Rows, Task
from gpt_cli.options.request import draw_seed
from gpt_cli.records import Record, Schema
from gpt_cli.serve.refusals import RequestError, no_route

if TYPE_CHECKING:  # they bring NumPy
    from gpt_cli.engine import Engine
    from gpt_cli.serve.answers import Answer
    from gpt_cli.serve.prompts import Event
    from gpt_cli.serve.scheduler import Scheduler

_MOST_TEXTS = 64  # computed side by side by default
_URLS = ("/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize")
_ID = "batch_req_"  # OpenAI's ids of answers begin with it

Reply: TypeAlias = tuple[int, Any]  # the status of an answer, and its JSON


class _RequestLayout(Layout):
    """The fields of requests and of answers, whose id is a digest of the request."""

    def id_of(self, fields: dict[str, Any]) -> str:
        """Return the id of the answer to a request."""
        return _ID + sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]

    def line_start(self, index: int) -> str:
        """Return how the line of an answer begins."""
        return f'{{"id": "{_ID}'

    def error_of(self, record: Record) -> Record | None:
        """Return the error of an answer, or of the request."""
        return record["error"] or record["response"]["body"].get("error")


@dataclass(frozen=True)
class Requests(Task):
    """Answer requests as the server does: the body of a row has the fields and defaults of a URL.

    The records are the lines of OpenAI's batch outputs. Any name of a model stands for the one that
    is loaded, and a request without a seed has one that depends on its row and the seed here.
    """

    seed: int | None = None
    batch_size: int | None = None  # texts that are computed side by side

    fields = ("custom_id", "method", "url", "body")
    endings = (".jsonl",)
    schema: ClassVar[Schema] = {}

    @cached_property
    def layout(self) -> Layout:
        """The fields of requests and answers."""
        return _RequestLayout(self.fields)

    @property
    def settings(self) -> dict[str, Any]:
        return {"seed": self.seed}

    def with_seed(self, seed: int | None) -> "Requests":
        if self.seed is not None:
            return self
        return replace(self, seed=draw_seed() if seed is None else seed)

    def prepare(self, row: InputRow) -> InputRow:
        """Return the row; raise InputError, with its line, if it is no request."""
        try:
            row = super().prepare(row)
            for name in ("method", "url"):
                if not isinstance(row.fields.get(name), str):
                    raise InputError(f'a request needs a string "{name}"')
            if "body" not in row.fields:
                raise InputError('a request needs a "body"')
        except InputError as error:
            file = "" if row.file is None else f"{storage.label(row.file)}, "
            raise InputError(f"{file}line {row.line}: {error}") from None
        return row

    def results(self, engine: "Engine", rows: Rows) -> Iterator[Reply]:
        from gpt_cli.serve.scheduler import Scheduler

        task = self.with_seed(None)
        scheduler = Scheduler(engine.loaded, self.batch_size or _MOST_TEXTS, max_queue=len(rows))
        try:
            yield from _Replies(engine, scheduler, task._seed_of).of(rows)
        finally:
            scheduler.stop()
            scheduler.join()

    def _seed_of(self, row: InputRow) -> int:
        """Return the seed of a request that has none: other rows and other jobs have others."""
        digest = sha256(f"{self.seed} {row.index}".encode()).digest()
        return int.from_bytes(digest[:6], "little")  # 48 bits: every JSON parser reads them

    def record(self, engine: "Engine", row: InputRow, result: Reply) -> Record:
        status, body = result
        request_id = str(row.id).removeprefix(_ID)
        response = {"status_code": status, "request_id": request_id, "body": body}
        return {"response": response, "error": None}

    def identity(self, row: InputRow, *, is_error: bool = False) -> Record:
        identity = {
            "id": row.id or f"{_ID}{row.index:032x}",  # of a line that is not JSON
            "custom_id": row.fields.get("custom_id"),
        }
        return identity | {"response": None} if is_error else identity

    def tokens(self, record: Record) -> int:
        return int(record["response"]["body"].get("usage", {}).get("completion_tokens", 0))


class _Replies:
    """The answers to requests, whose texts a scheduler computes side by side."""

    def __init__(
        self, engine: "Engine", scheduler: "Scheduler", seed_of: Callable[[InputRow], int]
    ):
        self._engine = engine
        self._scheduler = scheduler
        self._seed_of = seed_of
        # Numbers of requests and of their texts, with events.
        self._events: SimpleQueue[tuple[int, int, Event]] = SimpleQueue()
        self._answers: dict[int, Answer] = {}  # that are not complete, by numbers of requests
        self._replies: dict[int, Reply] = {}

    def of(self, rows: Sequence[InputRow]) -> Iterator[Reply]:
        """Yield the replies in order, each as soon as it and all before are complete."""
        for number, row in enumerate(rows):
            try:
                self._begin(number, row)
            except Exception as error:
                self._replies[number] = _refused(error)
        for number in range(len(rows)):
            while number not in self._replies:
                self._add(*self._events.get())
            yield self._replies.pop(number)

    def _begin(self, number: int, row: InputRow) -> None:
        """Read a request, and let its texts be computed."""
        from gpt_cli.serve.protocol import detokenize, tokenize

        method, url, body = (row.fields[name] for name in ("method", "url", "body"))
        if url not in _URLS:
            raise no_route(method, url)
        if method != "POST":
            raise no_route(method, url, "POST")
        if not isinstance(body, dict):
            raise RequestError("the body must be a JSON object")
        if url in ("/tokenize", "/detokenize"):
            read = tokenize if url == "/tokenize" else detokenize
            self._replies[number] = 200, read(self._engine, body)
            return
        answer = self._answer(number, row, url, body)
        self._scheduler.submit(answer.texts)
        self._answers[number] = answer
        self._complete(number)

    def _answer(self, number: int, row: InputRow, url: str, body: dict[str, Any]) -> "Answer":
        """Return the answer to a request, before any of its texts is computed."""
        from gpt_cli.serve import protocol
        from gpt_cli.serve.answers import CompletionAnswer, EmbeddingAnswer

        engine = self._engine
        name = hub.shown_name(engine.name)
        deliver = partial(self._deliver, number)
        if url == "/v1/embeddings":
            return EmbeddingAnswer(protocol.read_embeddings(engine, body), name, deliver)
        request = protocol.read_completions(engine, body, seed=self._seed_of(row))
        if request.fields.stream:
            raise RequestError("stream must be left out: an answer is one line", "stream")
        id = str(row.id).replace(_ID, "cmpl-")
        return CompletionAnswer(engine, request, name, id, deliver)

    def _deliver(self, number: int, index: int, event: "Event") -> None:
        """Pass an event of a text on to the thread that waits for answers."""
        self._events.put((number, index, event))

    def _add(self, number: int, index: int, event: "Event") -> None:
        """Add an event of a text to its answer, if that has not failed."""
        answer = self._answers.get(number)
        if answer is None:
            return
        if isinstance(event, Exception):
            answer.cancel()
            del self._answers[number]
            self._replies[number] = _refused(event)
        else:
            answer.add(index, event)
            self._complete(number)

    def _complete(self, number: int) -> None:
        """Reply to a request if all of its texts have ended."""
        answer = self._answers[number]
        if answer.finished:
            del self._answers[number]
            self._replies[number] = 200, json.loads(answer.json)


def _refused(error: Exception) -> Reply:
    """Return the reply to a request with an error; raise one that is not the request's fault."""
    refusal = RequestError.of(error)
    if refusal.status >= 500:
        raise ResourceError(str(error)) if isinstance(error, RequestError) else error
    content = refusal.json
    for name, value in content["error"].items():
        if isinstance(value, str):  # it may quote a text that is not Unicode
            content["error"][name] = value.encode(errors="backslashreplace").decode()
    return refusal.status, content
