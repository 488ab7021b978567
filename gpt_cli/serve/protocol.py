"""OpenAI's completions: from the JSON of a request to tasks, and from their events to JSON.

The defaults are OpenAI's, not those of the command line: temperature 1, 16 tokens, no top-k.
https://platform.openai.com/docs/api-reference/completions
"""

import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from gpt_cli.engine import Engine
from gpt_cli.errors import InputError, ResourceError, did_you_mean
from gpt_cli.folder.tokenizer import StreamDecoder, Tokenizer
from gpt_cli.generation.decode import Step, TopLogprobs
from gpt_cli.generation.row import Request
from gpt_cli.gpt2.tokens import check_ids, start_token
from gpt_cli.options.declare import TEXT, WHOLE, Declared, OptionError, Range, option
from gpt_cli.options.request import Options
from gpt_cli.options.sampling_params import COUNTS, SamplingParams
from gpt_cli.serve import structured, trial
from gpt_cli.serve.prompts import Event, PromptScore, Task
from gpt_cli.serve.refusals import RequestError

Json: TypeAlias = dict[str, Any]

_MOST_TEXTS = 2048  # of a request
_MOST_STOPS, _MOST_STOP_CHARACTERS = 64, 4096  # each token is searched for all
_MOST_ENTRIES = 500_000  # of its answer, which takes up to 200 bytes for each
_OPTIONS = {each.name for each in fields(SamplingParams)} | {"seed", "stop", "ignore_eos"}
_DEFAULTS = {"temperature": 1, "top_k": 0, "top_p": 1}
# Values that change nothing, of fields that this server does not have or reads in another way.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "top_k": (-1,),
    "min_tokens": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_special_tokens": (True, False),
    "guided_whitespace_pattern": (),
}


def no_such_model(name: str | None, engine: Engine) -> RequestError:
    """Return the error for a model with another name."""
    message = f"this server has no model {name!r:.80}, only {engine.name!r}"
    return RequestError(message, "model", 404)


@dataclass(frozen=True, kw_only=True)
class Fields(Declared):
    """The fields of a request that are not options of a text."""

    model: str | None = option(None, kind=TEXT)
    max_tokens: int = option(16, range=COUNTS)
    n: int = option(1, range=Range(lambda n: 1 <= n <= 128, "from 1 to 128"))
    best_of: int | None = option(
        None, range=Range(lambda n: 1 <= n <= 128, "from 1 to 128"), kind=WHOLE
    )
    logprobs: int | None = option(
        None, range=Range(lambda count: 0 <= count <= 100, "from 0 to 100"), kind=WHOLE
    )
    echo: bool = option(False)
    stream: bool = option(False)
    user: str | None = option(None, kind=TEXT)


@dataclass(frozen=True)
class Prompt:
    """A prompt: its ids, at least one, and its text if it is to be echoed."""

    ids: list[int]
    text: str


@dataclass(frozen=True)
class Completions:
    """A valid request."""

    prompts: Sequence[Prompt]
    fields: Fields
    options: Options
    include_usage: bool = False

    @property
    def candidates(self) -> int:
        """Return the number of texts for each prompt."""
        return self.fields.best_of or self.fields.n

    @property
    def score(self) -> int | None:
        """Return how many likeliest tokens each place of the prompt has, or None for no scores."""
        return self.fields.logprobs if self.fields.echo else None


def read(engine: Engine, body: Any) -> Completions:
    """Return what the body of a request asks for.

    Raises:
        RequestError: a field is unknown, has the wrong type or is out of range.
    """
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    given = {
        name: value
        for name, value in body.items()
        if value is not None and value not in _NEUTRAL.get(name, ())
    }
    prompt, stream_options = given.pop("prompt", ""), given.pop("stream_options", {})
    constraint = structured.take(given)
    own = {each.name for each in fields(Fields)}
    if unknown := [name for name in given if name not in own | _OPTIONS]:
        known = {"prompt", "stream_options", *structured.FIELDS} | own | _OPTIONS
        if unknown[0] in _NEUTRAL:
            reason = "this server does not have this field: leave it out"
        else:
            near = did_you_mean(unknown[0], known)
            reason = f"there is no such field{near}; there are {', '.join(sorted(known))}"
        raise RequestError(f"{unknown[0]!r:.40}: {reason}", unknown[0])
    try:
        asked = Fields(**{name: value for name, value in given.items() if name in own})
        for option, (_, value) in constraint.items():
            trial.check(option, value)
        options = Options(
            **_DEFAULTS | {name: value for name, value in given.items() if name in _OPTIONS},
            **{option: asked.value for option, asked in constraint.items()},
            max_tokens=max(1, asked.max_tokens),
            top_logprobs=asked.logprobs or 0,
        ).with_seed()
        engine.check_constraint(options)
        check_ids(engine.model.config, [id for id, _ in options.logit_bias])
        if len(options.stop) > _MOST_STOPS or len("".join(options.stop)) > _MOST_STOP_CHARACTERS:
            most = f"{_MOST_STOPS} texts, {_MOST_STOP_CHARACTERS} characters in all"
            raise OptionError("stop", f"must be at most {most}")
    except OptionError as error:
        option, complaint = error.args
        field = constraint[option].field if option in constraint else option
        raise RequestError(f"{field} {complaint}", field) from None
    except ResourceError as error:  # llguidance is not installed
        raise RequestError(str(error), status=501) from None
    except InputError as error:
        raise RequestError(f"logit_bias: {error}", "logit_bias") from None
    if asked.model not in (None, engine.name):
        raise no_such_model(asked.model, engine)
    if asked.best_of is not None and asked.best_of < asked.n:
        raise RequestError(f"best_of must be at least n, which is {asked.n}", "best_of")
    if asked.stream and (asked.best_of or asked.n) > asked.n:
        raise RequestError("best_of: the best of several texts cannot be streamed", "best_of")
    found = _prompts_of(prompt)
    if len(found) * (asked.best_of or asked.n) > _MOST_TEXTS:  # before they take time
        raise RequestError(f"prompt: a request may have up to {_MOST_TEXTS} texts", "prompt")
    prompts = [_prompt(engine, each, asked) for each in found]
    _check_size(prompts, asked, engine.model.config.n_positions)
    return Completions(prompts, asked, options, _include_usage(stream_options, asked))


def _check_size(prompts: Sequence[Prompt], asked: Fields, n_positions: int) -> None:
    """Refuse a request whose answer would be too large."""
    candidates = asked.best_of or asked.n
    echoed = sum(len(prompt.ids) for prompt in prompts) if asked.echo else 0
    tokens = candidates * (echoed + len(prompts) * min(asked.max_tokens, n_positions))
    if tokens * (1 + (asked.logprobs or 0)) > _MOST_ENTRIES:
        raise RequestError(
            f"max_tokens: an answer may have {_MOST_ENTRIES} tokens and log-probabilities in "
            "all: ask for fewer texts, tokens or logprobs at a time",
            "max_tokens",
        )


def _include_usage(given: Any, asked: Fields) -> bool:
    known = isinstance(given, dict) and given.keys() <= {"include_usage", "include_obfuscation"}
    include = given.get("include_usage", False) if known else None
    if not isinstance(include, bool) or (given and not asked.stream):
        raise RequestError(
            'stream_options must be {"include_usage": true or false}, with "stream": true',
            "stream_options",
        )
    return include


def _prompts_of(given: Any) -> list[Any]:
    """Return the prompts of a field: a text, ids, or a list of these."""
    one = isinstance(given, str) or not given or (isinstance(given, list) and _are_ids(given))
    prompts = [given] if one else given
    if not isinstance(prompts, list) or not all(
        isinstance(each, str) or (isinstance(each, list) and _are_ids(each)) for each in prompts
    ):
        raise RequestError("prompt must be a text, token ids, or a list of these", "prompt")
    return prompts


def _are_ids(given: list[Any]) -> bool:
    return all(type(id) is int for id in given)


def _prompt(engine: Engine, given: str | list[int], asked: Fields) -> Prompt:
    try:
        ids = engine.encode(given) if isinstance(given, str) else given
        config = engine.model.config
        ids = check_ids(config, ids) or [start_token(config, "the prompt is empty")]
        most = config.n_positions - (1 if asked.max_tokens else 0)
        if len(ids) > most:
            raise InputError(f"it has {len(ids)} tokens; shorten it to at most {most}")
        if isinstance(given, str):
            return Prompt(ids, given)
        return Prompt(ids, engine.decode(given) if asked.echo else "")
    except InputError as error:
        raise RequestError(f"prompt: {error}", "prompt") from None


class Answer:
    """The answer to a request, which grows with the events of its tasks."""

    def __init__(self, engine: Engine, asked: Completions):
        self._asked = asked
        self._frame = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": engine.name,
        }
        self.choices = [
            Choice(engine, asked, prompt, index)
            for index, prompt in enumerate(
                prompt for prompt in asked.prompts for _ in range(asked.candidates)
            )
        ]

    def tasks(self, deliver: Callable[[int, Event], None]) -> list[Task]:
        """Return what is to be computed; `deliver` takes the index of a choice and its events."""
        asked, decode = self._asked, self._asked.fields.max_tokens > 0

        def task(choice: Choice) -> Task:
            request = Request(choice.prompt.ids, asked.options, choice.index)
            return Task(request, lambda event: deliver(choice.index, event), asked.score, decode)

        return [task(choice) for choice in self.choices if not choice.finish_reason]

    @property
    def finished(self) -> bool:
        """Return whether all texts have ended."""
        return all(choice.finish_reason for choice in self.choices)

    def whole(self) -> Json:
        """Return the object that answers the request, when all texts have ended."""
        asked, texts = self._asked, iter(self.choices)
        best: list[Choice] = []
        for _ in asked.prompts:
            candidates = [next(texts) for _ in range(asked.candidates)]
            if asked.candidates > asked.fields.n:
                candidates.sort(key=lambda each: -each.mean_logprob)
            best += candidates[: asked.fields.n]
        choices = [choice.take() | {"index": index} for index, choice in enumerate(best)]
        return self._frame | {"choices": choices, "usage": self.usage}

    def chunks(self) -> Iterator[Json]:
        """Yield the objects of a stream with what is new."""
        for choice in self.choices:
            if choice.is_new:
                yield self._frame | {"choices": [choice.take()]}

    def last_chunks(self) -> Iterator[Json]:
        """Yield what ends a stream, if anything."""
        if self._asked.include_usage:
            yield self._frame | {"choices": [], "usage": self.usage}

    @property
    def usage(self) -> dict[str, int]:
        """Return the number of tokens read and generated."""
        prompts = sum(len(prompt.ids) for prompt in self._asked.prompts)
        generated = sum(choice.tokens for choice in self.choices)
        return {
            "prompt_tokens": prompts,
            "completion_tokens": generated,
            "total_tokens": prompts + generated,
        }


class Choice:
    """One text of an answer.

    Attributes:
        tokens: the number of generated ones.
        is_new: whether `take` has something to return.
        finish_reason: OpenAI's name, once the text has ended.
    """

    def __init__(self, engine: Engine, asked: Completions, prompt: Prompt, index: int):
        self.prompt, self.index, self.tokens = prompt, index, 0
        self._asked = asked
        self._logprob = 0.0
        self._text = prompt.text if asked.fields.echo else ""  # that was not taken yet
        self._logprobs = Logprobs(engine.tokenizer)
        to_come = asked.fields.max_tokens or asked.score is not None
        self.finish_reason = None if to_come else "length"
        # The text of a prompt comes with its log-probabilities.
        self.is_new = asked.score is None and (asked.fields.echo or not to_come)

    @property
    def mean_logprob(self) -> float:
        """Return the log-probability per generated token."""
        return self._logprob / self.tokens if self.tokens else -math.inf

    def push(self, event: PromptScore | Step) -> None:
        """Take the next event of the text."""
        self.is_new = True
        if isinstance(event, PromptScore):
            first, *ids = self.prompt.ids
            self._logprobs.add(first, None, [])
            if not self.prompt.text:  # the start token stands for an empty prompt
                self._logprobs.offset = 0
            for entry in zip(ids, event.logprobs, event.top_logprobs, strict=True):
                self._logprobs.add(*entry)
            self.finish_reason = None if self._asked.fields.max_tokens else "length"
            return
        self.tokens += 1
        self._logprob += event.logprob
        self._text += event.text
        if self._asked.fields.logprobs is not None:
            self._logprobs.add(event.id, event.logprob, event.top_logprobs)
        if event.finish_reason:
            ended = event.finish_reason in ("stop", "eos", "complete")
            self.finish_reason = "stop" if ended else "length"

    def take(self) -> Json:
        """Return what is new since the last time."""
        wanted = self._asked.fields.logprobs is not None
        taken = {
            "index": self.index,
            "text": self._text,
            "logprobs": self._logprobs.take() if wanted else None,
            "finish_reason": self.finish_reason,
            "seed": self._asked.options.seed,
        }
        self._text, self.is_new = "", False
        return taken


class Logprobs:
    """Tokens with their log-probabilities, as OpenAI writes them.

    Attributes:
        offset: the place of the next token in the text, in characters.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self._decoder = tokenizer, StreamDecoder(tokenizer)
        self.offset = 0
        self._entries: list[tuple[str, float | None, dict[str, float] | None, int]] = []

    def add(self, id: int, logprob: float | None, top: TopLogprobs) -> None:
        """Add a token; the likeliest tokens in its place always include itself."""
        name, likeliest = token_name(self._tokenizer, id), None
        if logprob is not None:
            likeliest = {token_name(self._tokenizer, id): p for id, p in [*top, (id, logprob)]}
        start = self.offset
        self.offset += len(self._decoder.push(id))
        if not name.startswith("bytes:"):  # what was incomplete before it is now U+FFFD
            start = self.offset - len(name)
        self._entries.append((name, logprob, likeliest, start))

    def take(self) -> Json:
        """Return the entries since the last time."""
        names = "tokens", "token_logprobs", "top_logprobs", "text_offset"
        columns = [list(column) for column in zip(*self._entries, strict=True)] or [[], [], [], []]
        self._entries = []
        return dict(zip(names, columns, strict=True))


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
