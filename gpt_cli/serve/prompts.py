"""Pending texts, and the computation of their prompts, a chunk of tokens at a time."""

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpt_cli.errors import CheckpointError
from gpt_cli.generation.row import Request, Step
from gpt_cli.gpt2.hooks import FINAL, Recorder, hook_shapes, rows_of
from gpt_cli.gpt2.kv_cache import KVCache
from gpt_cli.gpt2.model import GPT2, unembed
from gpt_cli.gpt2.prefill import prefill
from gpt_cli.gpt2.weights import check_finite
from gpt_cli.ops import Array
from gpt_cli.scoring.activations import mean
from gpt_cli.texts.measures import TopLogprobs, log_probabilities, top_logprobs
from gpt_cli.texts.prefix_cache import PrefixCache
from gpt_cli.texts.text import editing_hook

CHUNK = 72  # tokens to score at a time
_PASS_SECONDS = 0.07  # of prompts, while other texts wait for their next token
_LEAST_TOKENS = 12  # of a pass: fewer hardly save time
_OLDER = 0.7  # weight of earlier rates

Vector: TypeAlias = NDArray[np.float32]


class Pace:
    """The number of tokens of prompts in a pass: as many as this machine computes in its time."""

    def __init__(self, most: int):
        self.tokens = CHUNK  # of the next pass
        self._most = most
        self._rate = 0.0  # tokens per second

    def learn(self, tokens: int, seconds: float) -> None:
        """Learn from the time of a pass."""
        rate = tokens / max(seconds, 1e-9)
        self._rate = _OLDER * self._rate + (1 - _OLDER) * rate if self._rate else rate
        self.tokens = min(max(_LEAST_TOKENS, int(_PASS_SECONDS * self._rate)), self._most)


@dataclass
class PromptScore:
    """The log-probabilities of the tokens of a prompt after its first."""

    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[TopLogprobs] = field(default_factory=list)


Event: TypeAlias = PromptScore | Vector | Step | Exception


@dataclass(eq=False)
class PendingText:
    """A prompt to continue.

    `deliver` receives the events of the text; an error ends it. It is called in the scheduler's
    thread and must return at once. If the first tokens are known, as they are of a text that was
    begun elsewhere, they are `generated`, and the events are those of the tokens after them. A text
    that is `streamed` is read while it grows.
    """

    request: Request  # the prompt and its options
    deliver: Callable[[Event], None]
    generated: Sequence[int] = field(default=(), kw_only=True)
    streamed: bool = field(default=False, kw_only=True)
    decode: bool = field(default=True, init=False)  # whether tokens are generated
    hook: str = field(default=FINAL, init=False)  # the hook point whose values are needed
    cancelled: bool = field(default=False, init=False)  # the caller no longer needs the text

    @property
    def prefill_ids(self) -> list[int]:
        """Return the tokens that `Prompts` computes: all but the last, which `Batch` computes."""
        return [*self.request.prompt, *self.generated][:-1]

    @property
    def cacheable_ids(self) -> list[int]:
        """Return the tokens that may be in the prefix cache, which only holds unedited states."""
        return self.prefill_ids if self.hook == FINAL and self.request.text.is_plain else []

    def fail(self, error: Exception) -> None:
        """End the text with an error."""
        self.cancelled = True
        self.deliver(error)


class Computing(Protocol):
    """An object that computes texts for a server, such as `Scheduler`."""

    @property
    def running(self) -> int:
        """Return the number of texts that are being computed."""

    @property
    def waiting(self) -> int:
        """Return the number of texts that wait."""

    @property
    def reused(self) -> int:
        """Return the number of tokens of prompts that were not computed again."""

    @property
    def hits(self) -> int:
        """Return the number of texts with such tokens."""

    def submit(self, texts: Sequence[PendingText]) -> None:
        """Compute the texts of one request; raise QueueFullError or StoppedError."""


@dataclass(eq=False)
class MeasuredText(PendingText, ABC):
    """A text whose prompt is measured once it is computed."""

    @abstractmethod
    def measure(self, model: GPT2, values: Array) -> bool:
        """Measure the next tokens, by the values at the hook point; return whether all are done."""


@dataclass(eq=False)
class PendingScore(MeasuredText):
    """A prompt to score, and then to continue if `decode`; the score is its first event."""

    decode: bool = True
    prompt_logprobs: int = field(kw_only=True)  # likeliest tokens at each position
    _score: PromptScore = field(default_factory=PromptScore, init=False)  # of the tokens so far

    def measure(self, model: GPT2, values: Array) -> bool:
        """Score the next tokens; deliver the score once it is complete."""
        ops = model.ops
        score = self._score
        start = len(score.logprobs)
        states = values[start : start + CHUNK]
        count = len(states)
        if count:
            logits = unembed(model, states, editing_hook([self.request.text], ops))
            targets = ops.xp.asarray(self.request.prompt[start + 1 : start + 1 + count])
            score.logprobs += ops.to_host(log_probabilities(ops, logits, targets)).tolist()
            score.top_logprobs += top_logprobs(ops, logits, [self.prompt_logprobs] * count)
        complete = len(score.logprobs) == len(self.prefill_ids)
        if complete:
            self.deliver(score)
        return complete


@dataclass(eq=False)
class PendingVector(MeasuredText):
    """A text whose event is a vector: the mean at a hook point over tokens from `first` on."""

    decode: bool = field(default=False, init=False)
    hook: str = field(kw_only=True)
    first: int = field(kw_only=True)

    @property
    def prefill_ids(self) -> list[int]:
        """Return all tokens."""
        return self.request.prompt

    def measure(self, model: GPT2, values: Array) -> bool:
        """Deliver the mean."""
        check_finite(model, values, editing_hook([self.request.text], model.ops))
        self.deliver(mean(model.ops, values, self.first))
        return True


class Prompts:
    """Prompts that are computed side by side, a chunk at a time, and then measured."""

    def __init__(
        self, model: GPT2, texts: Sequence[PendingText], prefixes: PrefixCache, pace: Pace
    ):
        self._model = model
        self._pace = pace
        self.texts = texts
        prefill_ids = [text.prefill_ids for text in texts]
        self.cache = KVCache(model.config, model.ops, len(texts), max(map(len, prefill_ids)))
        shapes = hook_shapes(model.config)
        # Of the n tokens of each text so far: the states (n, C), or the values at its hook point.
        self.states = [model.ops.xp.empty((0, *shapes[text.hook][1:]), "f4") for text in texts]
        for row, text in enumerate(texts):
            prefix, length = prefixes.find(text.cacheable_ids)
            if prefix:
                self.cache.copy_row(row, prefix.cache, 0, length)
                self.states[row] = prefix.states[:length].copy()
        self.reused = int(self.cache.lengths.sum())
        self.hits = int((self.cache.lengths > 0).sum())
        rests = [ids[n:] for ids, n in zip(prefill_ids, self.cache.lengths, strict=True)]
        hook = editing_hook([text.request.text for text in texts], model.ops)
        self._hook = Recorder({text.hook for text in texts} - {FINAL}, hook)
        self._passes = prefill(model, rests, self.cache, lambda: pace.tokens, self._hook)
        self._tokens_left = max(map(len, rests))  # of the longest text
        self._unmeasured = deque(
            (row, text) for row, text in enumerate(texts) if isinstance(text, MeasuredText)
        )

    def advance(self) -> bool:
        """Compute the next chunk; return whether all is done."""
        if self._tokens_left:
            self._compute_states()
        elif self._unmeasured:
            self._measure(*self._unmeasured[0])
        return not self._tokens_left and not self._unmeasured

    def _compute_states(self) -> None:
        """Append the states of the next pass, or else the values that a text needs."""
        began = time.perf_counter()
        states = next(self._passes)
        width = max(map(len, states))
        self._pace.learn(width * len(states), time.perf_counter() - began)
        self._tokens_left -= width
        values = rows_of(self._hook.values, [len(x) for x in states])
        for row, text in enumerate(self.texts):
            new = values[row].get(text.hook, states[row])
            self.states[row] = self._model.ops.xp.concatenate((self.states[row], new))

    def _measure(self, row: int, text: MeasuredText) -> None:
        """Measure the next tokens of the first text that is not complete."""
        complete = False
        try:
            complete = text.measure(self._model, self.states[row])
        except CheckpointError as error:  # damaged weights that perhaps only this text uses
            text.fail(error)
        if complete or text.cancelled:
            self._unmeasured.popleft()
