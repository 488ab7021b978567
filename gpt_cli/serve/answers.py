"""The answers to requests for completions and embeddings: from the events of texts to JSON."""

import json
import time
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

from gpt_cli.engine import Engine
from gpt_cli.generation.row import Request, Step
from gpt_cli.options.request import Options
from gpt_cli.serve.choice import Choice
from gpt_cli.serve.prompts import Event, PendingText, PendingVector, PromptScore, Vector
from gpt_cli.serve.protocol import Completions, Embeddings, Json
from gpt_cli.texts.text import Text

Deliver: TypeAlias = Callable[[int, Event], None]  # receives the index of a text, and its event


class Answer(ABC):
    """The answer to a request, which grows with the events of its texts."""

    texts: list[PendingText]  # to be computed

    def __init__(self, request: Completions | Embeddings, model: str, id: str | None = None):
        self._request = request
        self.model = model
        self.id = id  # that a client sees, if it does
        self._ended = 0  # number of texts

    @property
    def usage(self) -> dict[str, int]:
        """Return the numbers of tokens."""
        prompts = sum(len(text.ids) for text in self._request.texts)
        return {"prompt_tokens": prompts, "total_tokens": prompts}

    @property
    def finished(self) -> bool:
        """Return whether all texts have ended."""
        return self._ended == len(self.texts)

    def add(self, index: int, event: Any) -> None:
        """Add an event of a text that is not an error."""
        self._ended += self._add(index, event)

    def cancel(self) -> None:
        """Let no more of its texts be computed."""
        for text in self.texts:
            text.cancelled = True

    @abstractmethod
    def _add(self, index: int, event: Any) -> bool:
        """Add an event of a text; return whether it was the last."""

    @property
    @abstractmethod
    def json(self) -> bytes:
        """The whole answer once all texts have ended, as JSON."""


class CompletionAnswer(Answer):
    """The answer to a request for completions."""

    _request: Completions

    def __init__(self, engine: Engine, request: Completions, model: str, id: str, deliver: Deliver):
        super().__init__(request, model, id)
        self.frame = {
            "id": id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self.choices: list[Choice] = []
        for prompt in request.prompts:
            for _ in range(request.fields.choices):
                index = len(self.choices)
                self.choices.append(Choice(engine.tokenizer, request, prompt, index))
        self.texts = []
        self._choices_of_texts: list[list[Choice]] = []  # several of a beam search, best first
        size = request.fields.choices if request.fields.use_beam_search else 1
        for start in range(0, len(self.choices), size):
            choices = self.choices[start : start + size]
            if not choices[0].finish_reason:
                self.texts.append(choices[0].pending(partial(deliver, len(self.texts))))
                self._choices_of_texts.append(choices)

    def _add(self, index: int, event: PromptScore | Step) -> bool:
        choices = self._choices_of_texts[index]
        if isinstance(event, PromptScore):
            for choice in choices:
                choice.add_score(event)
        elif event.hypothesis < len(choices):  # a search finds more than it returns
            choices[event.hypothesis].add_step(event)
        ended = choices[0].finish_reason is not None
        for choice in choices:
            if ended:
                choice.is_new = choice.finish_reason is not None
            else:  # the texts of a search are sent together, at the end
                choice.is_new = not self._request.fields.use_beam_search
        return ended

    @property
    def json(self) -> bytes:
        """The whole answer once all texts have ended, as JSON."""
        parts = [
            choice.new_part() | {"index": index}
            for index, choice in enumerate(self._best)
            if choice.finish_reason  # a search may not have found all
        ]
        return _encoded(self.frame | {"choices": parts, "usage": self.usage})

    @property
    def _best(self) -> Iterator[Choice]:
        """Yield the `n` likeliest choices of each prompt, or all, in their order."""
        n = self._request.fields.n
        count = self._request.fields.choices
        for start in range(0, len(self.choices), count):
            choices = self.choices[start : start + count]
            if count > n:
                choices.sort(key=lambda choice: -choice.mean_logprob)
            yield from choices[:n]

    @property
    def usage(self) -> dict[str, int]:
        """Return the numbers of tokens."""
        prompts = super().usage["prompt_tokens"]
        generated = sum(choice.tokens for choice in self.choices)
        return {
            "prompt_tokens": prompts,
            "completion_tokens": generated,
            "total_tokens": prompts + generated,
        }


class EmbeddingAnswer(Answer):
    """The answer to a request for embeddings."""

    _request: Embeddings

    def __init__(self, request: Embeddings, model: str, deliver: Deliver):
        super().__init__(request, model)
        self._encoded: dict[int, str] = {}  # JSON of each vector; that of all would take long
        self.texts = [
            self._pending(index, text, partial(deliver, index))
            for index, text in enumerate(request.texts)
        ]

    def _pending(self, index: int, text: Text, deliver: Callable[[Event], None]) -> PendingText:
        """Return the text to compute."""
        fields = self._request.fields
        first = len(text.ids) - 1 if fields.pool == "last" else text.first
        return PendingVector(
            Request(text, Options(), index), deliver, hook=fields.hook, first=first
        )

    def _add(self, index: int, event: Vector) -> bool:
        if self._request.fields.encoding_format == "base64":
            self._encoded[index] = f'"{b64encode(event.astype("<f4").tobytes()).decode()}"'
        else:
            self._encoded[index] = json.dumps(event.ravel().tolist())
        return True

    @property
    def json(self) -> bytes:
        """The whole answer once all texts have ended, as JSON."""
        data = ", ".join(
            f'{{"object": "embedding", "index": {index}, "embedding": {self._encoded[index]}}}'
            for index in range(len(self.texts))
        )
        frame = {"object": "list", "model": self.model, "usage": self.usage}
        return f'{json.dumps(frame)[:-1]}, "data": [{data}]}}'.encode()


def _encoded(data: Json) -> bytes:
    """Return JSON without spaces."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
