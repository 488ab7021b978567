"""Pending texts, and the computation of their prompts, a piece at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpt_cli.errors import CheckpointError
from gpt_cli.generation.row import Request, Step
from gpt_cli.gpt2.edits import editor
from gpt_cli.gpt2.hooks import FINAL, Recorder, hook_shapes, rows_of
from gpt_cli.gpt2.kv_cache import KVCache
from gpt_cli.gpt2.model import GPT2, unembed
from gpt_cli.gpt2.prefill import prefill
from gpt_cli.gpt2.weights import check_finite
from gpt_cli.scoring.activations import mean
from gpt_cli.texts.measures import TopLogprobs, log_probabilities, top_logprobs
from gpt_cli.texts.prefix_cache import PrefixCache

PIECE = 72  # tokens of prompts in a pass, or tokens to score: 0.07 s of a CPU with 124M parameters

Vector: TypeAlias = NDArray[np.float32]


@dataclass
class PromptScore:
    """The log-probabilities of the tokens of a prompt after its first."""

    logprobs: list[float]
    top_logprobs: list[TopLogprobs]


@dataclass(frozen=True)
class Pooling:
    """The value at a hook point to return for a text: the mean over tokens from `first` on."""

    hook: str
    first: int


Event: TypeAlias = PromptScore | Vector | Step | Exception


@dataclass(eq=False)
class PendingText:
    """One text to compute.

    `deliver` receives the score of the prompt or a vector if requested, then the steps, or an error
    that ends the text. It is called in the scheduler's thread and must return at once.
    """

    request: Request  # the prompt and its options
    deliver: Callable[[Event], None]
    # Likeliest tokens at each position of the prompt, or a vector instead; None: neither.
    score: int | Pooling | None = None
    decode: bool = True  # whether tokens are generated
    cancelled: bool = False  # set by the caller when the text is no longer needed

    @property
    def known(self) -> list[int]:
        """Return all tokens for a vector, else all but the last, which `Batch` computes."""
        prompt = self.request.prompt
        return prompt if isinstance(self.score, Pooling) else prompt[:-1]

    @property
    def at(self) -> str:
        """Return the hook point whose values are needed."""
        return self.score.hook if isinstance(self.score, Pooling) else FINAL

    @property
    def shared(self) -> list[int]:
        """Return the tokens that may be in the prefix cache, which only holds unedited states."""
        return self.known if self.at == FINAL and not self.request.text.edits else []

    def fail(self, error: Exception) -> None:
        """End the text with an error."""
        self.cancelled = True
        self.deliver(error)


class Prompts:
    """Prompts that are computed side by side, a piece at a time, and then scored or averaged."""

    def __init__(self, model: GPT2, texts: Sequence[PendingText], prefixes: PrefixCache):
        self._model, self.texts = model, texts
        known = [text.known for text in texts]
        self.cache = KVCache(model.config, model.ops, len(texts), max(map(len, known)))
        shapes = hook_shapes(model.config)
        # Of the n tokens of each text so far: the states (n, C), or the values at its hook point.
        self.states = [model.ops.xp.empty((0, *shapes[text.at][1:]), "f4") for text in texts]
        for row, text in enumerate(texts):
            prefix, length = prefixes.find(text.shared)
            if prefix:
                self.cache.copy_row(row, prefix.cache, 0, length)
                self.states[row] = prefix.states[:length].copy()
        self.reused = int(self.cache.lengths.sum())
        rests = [ids[n:] for ids, n in zip(known, self.cache.lengths, strict=True)]
        hook = editor([text.request.text.edits for text in texts], model.ops)
        self._hook = Recorder({text.at for text in texts} - {FINAL}, hook)
        self._passes = prefill(model, rests, self.cache, PIECE, self._hook)
        self._passes_left = -(-max(map(len, rests)) // max(1, PIECE // len(texts)))
        self._scores = {text: PromptScore([], []) for text in texts if text.score is not None}

    def advance(self) -> bool:
        """Compute the next piece; return whether all is done."""
        if self._passes_left:
            new = next(self._passes)  # states, or else the values that a text needs
            rows = rows_of(self._hook.values, [len(x) for x in new])
            for number, (text, row, x) in enumerate(zip(self.texts, rows, new, strict=True)):
                parts = self.states[number], row.get(text.at, x)
                self.states[number] = self._model.ops.xp.concatenate(parts)
            self._passes_left -= 1
        elif self._scores:
            text, score = next(iter(self._scores.items()))
            try:
                complete = self._score(text, score)
            except CheckpointError as error:  # damaged weights that perhaps only this text uses
                text.fail(error)
            if text.cancelled or complete:
                del self._scores[text]
        return not self._passes_left and not self._scores

    def _score(self, text: PendingText, score: PromptScore) -> bool:
        """Score the next tokens of a text, or average all; deliver what is complete."""
        ops, done = self._model.ops, len(score.logprobs)
        states = self.states[self.texts.index(text)]
        if isinstance(text.score, Pooling):
            check_finite(self._model, states, edited=bool(text.request.text.edits))
            text.deliver(mean(ops, states, text.score.first))
            return True
        states = states[done : done + PIECE]
        if len(states):
            logits = unembed(self._model, states, edited=self._hook.edits)
            targets = ops.xp.asarray(text.request.prompt[done + 1 : done + 1 + len(states)])
            score.logprobs += ops.to_host(log_probabilities(ops, logits, targets)).tolist()
            score.top_logprobs += top_logprobs(ops, logits, [text.score or 0] * len(states))
        if complete := len(score.logprobs) == len(text.known):
            text.deliver(score)
        return complete
