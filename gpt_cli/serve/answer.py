"""The answer to a request for completions: from the events of its texts to JSON."""

import time
import uuid
from collections.abc import Callable, Iterator

from gpt_cli.engine import Engine
from gpt_cli.errors import InputError
from gpt_cli.folder.tokenizer import StreamDecoder, Tokenizer
from gpt_cli.generation.decode import Step, TopLogprobs
from gpt_cli.generation.row import Request
from gpt_cli.serve.prompts import Event, PendingText, PromptScore
from gpt_cli.serve.protocol import Completions, Json, Prompt

_STOPPED = ("stop", "eos", "complete")  # "stop" for OpenAI; the other reasons are "length"
_COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class Answer:
    """The answer to a request, which grows with the events of its texts."""

    def __init__(self, engine: Engine, request: Completions):
        self._request = request
        self._frame = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": engine.name,
        }
        prompts = (prompt for prompt in request.prompts for _ in range(request.fields.candidates))
        self.choices = [
            CompletionChoice(engine, request, prompt, index) for index, prompt in enumerate(prompts)
        ]

    @property
    def finished(self) -> bool:
        """Return whether all texts have ended."""
        return all(choice.finish_reason for choice in self.choices)

    def whole(self) -> Json:
        """Return the whole answer, when all texts have ended."""
        n, candidates = self._request.fields.n, self._request.fields.candidates
        best: list[CompletionChoice] = []
        for start in range(0, len(self.choices), candidates):
            choices = self.choices[start : start + candidates]
            if candidates > n:
                choices.sort(key=lambda choice: -choice.mean_logprob)
            best += choices[:n]
        parts = [choice.new_part() | {"index": index} for index, choice in enumerate(best)]
        return self._frame | {"choices": parts, "usage": self.usage}

    def chunks(self) -> Iterator[Json]:
        """Yield the objects of a stream that have the new parts of texts, and then the usage."""
        for choice in self.choices:
            if choice.is_new:
                yield self._frame | {"choices": [choice.new_part()]}
        if self.finished and self._request.include_usage:
            yield self._frame | {"choices": [], "usage": self.usage}

    @property
    def usage(self) -> dict[str, int]:
        """Return the number of tokens read and generated."""
        prompts = sum(len(prompt.ids) for prompt in self._request.prompts)
        generated = sum(choice.tokens for choice in self.choices)
        counts = {"prompt_tokens": prompts, "completion_tokens": generated}
        return counts | {"total_tokens": prompts + generated}


class CompletionChoice:
    """One text of an answer."""

    def __init__(self, engine: Engine, request: Completions, prompt: Prompt, index: int):
        self._request, self._prompt, self._index = request, prompt, index
        self._fields = request.fields
        self._text = prompt.text if self._fields.echo else ""  # the new part
        self._logprobs = Logprobs(engine.tokenizer)
        self.tokens, self._logprob = 0, 0.0  # of the generated text
        to_come = self._fields.max_tokens or request.score is not None
        self.finish_reason = None if to_come else "length"  # OpenAI's name
        # The text of a prompt comes with its log-probabilities.
        self.is_new = request.score is None and (self._fields.echo or not to_come)

    def pending(self, deliver: Callable[[Event], None]) -> PendingText:
        """Return the text to compute."""
        row = Request(self._prompt.ids, self._request.options, self._index)
        return PendingText(row, deliver, self._request.score, self._fields.max_tokens > 0)

    @property
    def mean_logprob(self) -> float:
        """Return the log-probability per generated token."""
        return self._logprob / max(1, self.tokens)

    def push(self, event: PromptScore | Step) -> None:
        """Add the next event of the text."""
        self.is_new = True
        if isinstance(event, PromptScore):
            first, *ids = self._prompt.ids
            self._logprobs.add(first, None, [])
            if not self._prompt.text:  # the start token stands for an empty prompt
                self._logprobs.offset = 0
            for entry in zip(ids, event.logprobs, event.top_logprobs, strict=True):
                self._logprobs.add(*entry)
            self.finish_reason = None if self._fields.max_tokens else "length"
            return
        self.tokens += 1
        self._logprob += event.logprob
        self._text += event.text
        if self._fields.logprobs is not None:
            self._logprobs.add(event.id, event.logprob, event.top_logprobs)
        if event.finish_reason:
            self.finish_reason = "stop" if event.finish_reason in _STOPPED else "length"

    def new_part(self) -> Json:
        """Return the part of the text since the last call."""
        part = {
            "index": self._index,
            "text": self._text,
            "logprobs": None if self._fields.logprobs is None else self._logprobs.new_entries(),
            "finish_reason": self.finish_reason,
            "seed": self._request.options.seed,
        }
        self._text, self.is_new = "", False
        return part


class Logprobs:
    """Tokens with their log-probabilities, as OpenAI writes them."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self._decoder = tokenizer, StreamDecoder(tokenizer)
        self.offset = 0  # of the next token in the text, in characters
        self._entries: list[tuple[str, float | None, dict[str, float] | None, int]] = []

    def add(self, id: int, logprob: float | None, top: TopLogprobs) -> None:
        """Add a token; the likeliest tokens at its position always include the token itself."""
        name, likeliest = token_name(self._tokenizer, id), None
        if logprob is not None:
            likeliest = {token_name(self._tokenizer, id): p for id, p in [*top, (id, logprob)]}
        start = self.offset
        self.offset += len(self._decoder.push(id))
        if not name.startswith("bytes:"):  # an incomplete character before it is now U+FFFD
            start = self.offset - len(name)
        self._entries.append((name, logprob, likeliest, start))

    def new_entries(self) -> Json:
        """Return the entries since the last call."""
        entries, self._entries = self._entries, []
        return {name: [entry[i] for entry in entries] for i, name in enumerate(_COLUMNS)}


def token_name(tokenizer: Tokenizer, id: int) -> str:
    r"""Return a token as text, or as `bytes:\xf0\x9f` if it is not whole characters."""
    try:
        piece = tokenizer.token_bytes(id)
    except InputError:  # the model has more ids than its tokenizer
        return f"<{id}>"
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
