"""Pending texts, and the computation of their prompts, a piece at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gpt_cli.errors import CheckpointError
from gpt_cli.generation.decode import Step, TopLogprobs, top_logprobs
from gpt_cli.generation.prefix_cache import PrefixCache
from gpt_cli.generation.row import Request
from gpt_cli.generation.sampling import log_probabilities
from gpt_cli.gpt2.edits import editor
from gpt_cli.gpt2.kv_cache import KVCache
from gpt_cli.gpt2.model import GPT2, unembed
from gpt_cli.gpt2.prefill import prefill

PIECE = 72  # tokens of prompts in a pass, or tokens to score: 0.07 s of a CPU with 124M parameters


@dataclass
class PromptScore:
    """The log-probabilities of the tokens of a prompt after its first."""

    logprobs: list[float]
    top_logprobs: list[TopLogprobs]


Event: TypeAlias = PromptScore | Step | Exception


@dataclass(eq=False)
class PendingText:
    """One text to compute.

    `deliver` receives the score of the prompt if requested, then the steps, or an error that ends
    the text. It is called in the scheduler's thread and must return at once.
    """

    request: Request  # the prompt and its options
    deliver: Callable[[Event], None]
    score: int | None = None  # likeliest tokens at each position of the prompt; None: no score
    decode: bool = True  # whether tokens are generated
    cancelled: bool = False  # set by the caller when the text is no longer needed

    @property
    def known(self) -> list[int]:
        """Return the tokens of the prompt but the last, which `Batch` computes."""
        return self.request.prompt[:-1]

    @property
    def shared(self) -> list[int]:
        """Return the tokens whose keys and values other texts may share: none with edits."""
        return [] if self.request.edits else self.known

    def fail(self, error: Exception) -> None:
        """End the text with an error."""
        self.cancelled = True
        self.deliver(error)


class Prompts:
    """Prompts that are computed side by side, a piece at a time, and then scored if requested."""

    def __init__(self, model: GPT2, texts: Sequence[PendingText], prefixes: PrefixCache):
        self._model, self.texts = model, texts
        known = [text.known for text in texts]
        self.cache = KVCache(model.config, model.ops, len(texts), max(map(len, known)))
        empty = model.ops.xp.empty((0, model.config.n_embd), "f4")
        self.states = [empty] * len(texts)  # (n, C) of the tokens of each text so far
        for row, text in enumerate(texts):
            prefix, length = prefixes.find(text.shared)
            if prefix:
                self.cache.copy_row(row, prefix.cache, 0, length)
                self.states[row] = prefix.states[:length].copy()
        self.reused = int(self.cache.lengths.sum())
        rests = [ids[n:] for ids, n in zip(known, self.cache.lengths, strict=True)]
        hook = editor([text.request.edits for text in texts], model.ops.xp)
        self._passes = prefill(model, rests, self.cache, PIECE, hook)
        self._passes_left = -(-max(map(len, rests)) // max(1, PIECE // len(texts)))
        self._scores = {text: PromptScore([], []) for text in texts if text.score is not None}

    def advance(self) -> bool:
        """Compute the next piece; return whether all is done."""
        if self._passes_left:
            parts = zip(self.states, next(self._passes), strict=True)
            self.states = list(map(self._model.ops.xp.concatenate, parts))
            self._passes_left -= 1
        elif self._scores:
            text, score = next(iter(self._scores.items()))
            try:
                self._score(text, score)
            except CheckpointError as error:  # damaged weights that perhaps only this text uses
                text.fail(error)
            if text.cancelled or len(score.logprobs) == len(text.known):
                del self._scores[text]
        return not self._passes_left and not self._scores

    def _score(self, text: PendingText, score: PromptScore) -> None:
        """Score the next tokens of a text; deliver the score when it is complete."""
        ops, done = self._model.ops, len(score.logprobs)
        states = self.states[self.texts.index(text)][done : done + PIECE]
        if len(states):
            logits = unembed(self._model, states)
            targets = ops.xp.asarray(text.request.prompt[done + 1 : done + 1 + len(states)])
            score.logprobs += ops.to_host(log_probabilities(ops, logits, targets)).tolist()
            score.top_logprobs += top_logprobs(ops, logits, [text.score or 0] * len(states))
        if len(score.logprobs) == len(text.known):
            text.deliver(score)
