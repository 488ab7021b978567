"""Tasks, and the computation of their prompts, a piece at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gpt_cli.generation.decode import Step, TopLogprobs, top_logprobs
from gpt_cli.generation.prefix_cache import PrefixCache
from gpt_cli.generation.row import Request
from gpt_cli.generation.sampling import log_probabilities
from gpt_cli.gpt2.kv_cache import KVCache
from gpt_cli.gpt2.model import GPT2, unembed
from gpt_cli.gpt2.prefill import prefill
from gpt_cli.ops import Array

PIECE = 72  # tokens of prompts in a pass, or tokens to score: 0.07 s of a CPU with 124M parameters


@dataclass(frozen=True)
class PromptScore:
    """The log-probabilities of the tokens of a prompt after its first."""

    logprobs: list[float]
    top_logprobs: list[TopLogprobs]


Event: TypeAlias = PromptScore | Step | Exception


@dataclass(eq=False)
class Task:
    """One text that somebody wants.

    Attributes:
        request: its prompt and options.
        deliver: takes the score of the prompt if that is wanted, each step, or an error that ends
            the text. It is called in the scheduler's thread, and must return at once.
        score: also return the log-probabilities of the prompt's tokens, with so many likeliest.
        decode: whether tokens are generated.
        cancelled: set it if the text is no longer wanted.
    """

    request: Request
    deliver: Callable[[Event], None]
    score: int | None = None
    decode: bool = True
    cancelled: bool = False

    @property
    def known(self) -> list[int]:
        """Return the tokens to compute before the first new one: the last is left to `Batch`."""
        return self.request.prompt[:-1]


class Prompts:
    """Prompts that are computed side by side, a piece at a time, and then scored if wanted."""

    def __init__(self, model: GPT2, tasks: Sequence[Task], prefixes: PrefixCache):
        self._model, self.tasks = model, tasks
        texts = [task.known for task in tasks]
        self.cache = KVCache(model.config, model.ops, len(tasks), max(map(len, texts)))
        self._states: list[list[Array]] = []  # of each text
        for place, text in enumerate(texts):
            found, n = prefixes.find(text)
            self._states.append([model.ops.xp.empty((0, model.config.n_embd), "f4")])
            if found:
                self.cache.copy_row(place, found.cache, 0, n)
                self._states[place].append(found.states[:n])
        self.reused = int(self.cache.lengths.sum())
        rests = [text[n:] for text, n in zip(texts, self.cache.lengths, strict=True)]
        self._passes = prefill(model, rests, self.cache, PIECE)
        self._left = -(-max(map(len, rests)) // max(1, PIECE // len(tasks)))  # passes
        self._unscored = [task for task in tasks if task.score is not None]
        self._logprobs: list[float] = []  # of the first unscored
        self._top: list[TopLogprobs] = []

    @property
    def cancelled(self) -> bool:
        """Return whether no text is wanted any more."""
        return all(task.cancelled for task in self.tasks)

    def advance(self) -> bool:
        """Compute the next piece; return whether all is done."""
        if self._left:
            for states, new in zip(self._states, next(self._passes), strict=True):
                states.append(new)
            self._left -= 1
        elif self._unscored:
            self._score()
        return not self._left and not self._unscored

    def _score(self) -> None:
        """Score the next tokens of the first unscored prompt."""
        task, ops, done = self._unscored[0], self._model.ops, len(self._logprobs)
        states = self.states(self.tasks.index(task))[done : done + PIECE]
        if len(states):
            logits = unembed(self._model, states)
            targets = ops.xp.asarray(task.request.prompt[done + 1 : done + 1 + len(states)])
            self._logprobs += ops.to_host(log_probabilities(ops, logits, targets)).tolist()
            self._top += top_logprobs(ops, logits, [task.score or 0] * len(states))
        if len(self._logprobs) == len(task.known):
            task.deliver(PromptScore(self._logprobs, self._top))
            self._logprobs, self._top = [], []
            del self._unscored[0]

    def states(self, place: int) -> Array:
        """Return the states (n, C) of a text's tokens so far."""
        self._states[place] = [self._model.ops.xp.concatenate(self._states[place])]
        return self._states[place][0]
