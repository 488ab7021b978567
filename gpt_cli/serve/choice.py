"""A choice, OpenAI's name for one text of a completion: from its events to JSON."""

from collections.abc import Callable, Sequence
from typing import Any

from gpt_cli.errors import InputError
from gpt_cli.folder.tokenizer import Tokenizer
from gpt_cli.generation.row import Request, Step
from gpt_cli.serve.prompts import Event, PendingScore, PendingText, PromptScore
from gpt_cli.serve.protocol import Completions, Json, Prompt
from gpt_cli.texts.measures import TopLogprobs

# The names of reasons, as OpenAI has them; "stuck" is an error that it does not have.
_REASONS = {"eos": "stop", "complete": "stop", "context": "length"}
_COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class Choice:
    """One text of a response, which grows with its events."""

    def __init__(self, tokenizer: Tokenizer, request: Completions, prompt: Prompt, index: int):
        self._request = request
        self._prompt = prompt
        self._index = index
        self._fields = request.fields
        self._text = prompt.written if self._fields.echo else ""  # the new part
        is_scored = request.prompt_logprobs is not None
        self._logprobs = _Logprobs(tokenizer, [] if is_scored else prompt.text.ids)
        self.tokens = 0  # of the generated text
        self._logprob = 0.0  # of the generated text
        self._score: float | None = None
        self._stop_reason: str | int | None = None  # vLLM's name
        is_complete = not (self._fields.max_tokens or is_scored)
        self.finish_reason = "length" if is_complete else None  # OpenAI's name
        # The text of a prompt comes with its log-probabilities, and in a search with all the rest.
        echoes = self._fields.echo and not is_scored and not self._fields.use_beam_search
        self.is_new = echoes or is_complete

    @property
    def mean_logprob(self) -> float:
        """Return the mean log-probability of the generated tokens."""
        return self._logprob / max(1, self.tokens)

    def pending(self, deliver: Callable[[Event], None]) -> PendingText:
        """Return the text to compute."""
        row = Request(self._prompt.text, self._request.options, self._index)
        count = self._request.prompt_logprobs
        if count is None:
            return PendingText(row, deliver, streamed=self._fields.stream)
        return PendingScore(
            row,
            deliver,
            self._fields.max_tokens > 0,
            prompt_logprobs=count,
            streamed=self._fields.stream,
        )

    def add_score(self, score: PromptScore) -> None:
        """Add the log-probabilities of the prompt."""
        first, *others = self._prompt.text.ids
        self._logprobs.add(first, None, [])
        if self._prompt.text.first:
            self._logprobs.restart([] if self._prompt.written else [first])
        for id, logprob, top in zip(others, score.logprobs, score.top_logprobs, strict=True):
            self._logprobs.add(id, logprob, top)
        self.finish_reason = None if self._fields.max_tokens else "length"

    def add_step(self, step: Step) -> None:
        """Add the next token."""
        self.tokens += 1
        self._logprob += step.logprob
        self._text += step.text
        if self._fields.logprobs is not None:
            self._logprobs.add(step.id, step.logprob, step.top_logprobs)
        if step.finish_reason:
            self._score = step.score
            self._stop_reason = step.stop_reason
            self.finish_reason = _REASONS.get(step.finish_reason, step.finish_reason)

    def new_part(self) -> Json:
        """Return the part of the text since the last call."""
        part = {
            "index": self._index,
            "text": self._text,
            "logprobs": None if self._fields.logprobs is None else self._logprobs.new_entries(),
            "finish_reason": self.finish_reason,
            "stop_reason": self._stop_reason,
            "seed": self._request.options.seed,
        }
        if self._fields.use_beam_search:
            part["score"] = self._score
        self._text = ""
        self.is_new = False
        return part


class _Logprobs:
    """Tokens with their log-probabilities, as OpenAI writes them."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]):
        self._tokenizer = tokenizer
        self.restart(before)
        self._entries: dict[str, list[Any]] = {name: [] for name in _COLUMNS}

    def restart(self, before: Sequence[int]) -> None:
        """Begin the text after these ids."""
        self._decoder = self._tokenizer.stream(before)
        self.offset = 0  # of the next token in the text, in characters

    def add(self, id: int, logprob: float | None, top: TopLogprobs) -> None:
        """Add a token; the likeliest tokens at its position always include the token itself."""
        name = token_name(self._tokenizer, id)
        likeliest = None
        if logprob is not None:
            likeliest = {token_name(self._tokenizer, id): p for id, p in [*top, (id, logprob)]}
        start = self.offset
        self.offset += len(self._decoder.push(id))
        if not name.startswith("bytes:"):  # an incomplete character before it is now U+FFFD
            start = max(start, self.offset - len(name))
        self._entries["tokens"].append(name)
        self._entries["token_logprobs"].append(logprob)
        self._entries["top_logprobs"].append(likeliest)
        self._entries["text_offset"].append(start)

    def new_entries(self) -> Json:
        """Return the entries since the last call."""
        entries = self._entries
        self._entries = {name: [] for name in _COLUMNS}
        return entries


def token_name(tokenizer: Tokenizer, id: int) -> str:
    r"""Return a token as text, or as `bytes:\xf0\x9f` if it is not whole characters."""
    try:
        data = tokenizer.token_bytes(id)
        if data is None:
            return tokenizer.token_name(id)
    except InputError:  # the model has more ids than its tokenizer
        return f"<{id}>"
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
