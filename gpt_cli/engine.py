"""The public Python API: `load` a model, then generate with it and score with it."""

import time
from collections.abc import Iterator, Sequence
from typing import TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from gpt_cli import checkpoint, hub
from gpt_cli.errors import InputError
from gpt_cli.generate import Completion, Options, Overflow, Step, fit, generate
from gpt_cli.model import GPT2, checked_forward
from gpt_cli.ops import get_ops
from gpt_cli.score import Score, score
from gpt_cli.tokenizer import Tokenizer


class OptionKeywords(TypedDict, total=False):
    """The fields of `Options` as keyword arguments; their defaults and meanings are there."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    seed: int
    stop: Sequence[str]
    use_cache: bool
    ignore_eos: bool
    special: bool
    overflow: Overflow


class Run(Iterator[Step]):
    """Generation under way: iterate to advance it; `completions` holds what there is so far."""

    def __init__(self, steps: Iterator[Step], completions: list[Completion]):
        self.completions = completions
        self._steps = steps

    def __next__(self) -> Step:
        step = next(self._steps)
        self.completions[step.row].add(step)
        return step


class Engine:
    """A model with its tokenizer. Get one from `load`."""

    def __init__(self, model: GPT2, tokenizer: Tokenizer, name: str, load_seconds: float):
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self.load_seconds = load_seconds

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the token ids of a text.

        Names of special tokens, such as `<|endoftext|>`, are ordinary text unless `special`.

        Raises:
            InputError: the text is not valid Unicode.
        """
        return self.tokenizer.encode(text, special=special)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; U+FFFD stands where their bytes form no character."""
        return self.tokenizer.decode(ids)

    def logits(self, ids: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Compute the logits of what follows each token.

        Args:
            ids: (B, T) token ids, rows of one length from 1 to n_positions.

        Returns:
            (B, T, V) float32, on the host.

        Raises:
            InputError: the rows differ in length, or an id or a length is out of range.
            CheckpointError: the weights are damaged.
        """
        config = self.model.config
        if len({len(row) for row in ids}) != 1 or not 1 <= len(ids[0]) <= config.n_positions:
            raise InputError(f"rows of one length from 1 to {config.n_positions} are needed")
        for row in ids:
            self._check_ids(row)
        ops = self.model.ops
        return ops.to_host(checked_forward(self.model, ops.xp.asarray(np.array(ids))))

    def run(self, prompts: Sequence[str], options: Options) -> Run:
        """Begin to continue prompts side by side, and return the iterator that does the work.

        An empty prompt starts at the token that begins a text.

        Raises:
            InputError: a prompt does not fit the context, or is empty where no token can begin.
            CheckpointError: while iterating; the weights are damaged.
        """
        if isinstance(prompts, str):
            raise TypeError("prompts must be a list of texts, not one text")
        n_positions = self.model.config.n_positions
        ids = [
            fit(self._prompt_ids(prompt, options.special), n_positions, options)
            for prompt in prompts
        ]
        steps = generate(self.model, self.tokenizer, ids, options)
        return Run(steps, [Completion(len(row), options.seed) for row in ids])

    def stream(self, prompt: str, **options: Unpack[OptionKeywords]) -> Iterator[str]:
        """Continue a prompt: an iterator of the pieces of text, each as soon as it is certain.

        Raises:
            InputError: an option is out of range, or the prompt does not fit the context.
            CheckpointError: while iterating; the weights are damaged.
        """
        run = self.run([prompt], Options(**options))
        return (step.text for step in run if step.text)

    def generate(
        self, prompts: Sequence[str], **options: Unpack[OptionKeywords]
    ) -> list[Completion]:
        """Continue each prompt; a row's result does not depend on its neighbours.

        Raises:
            InputError: an option is out of range, or a prompt does not fit the context.
            CheckpointError: the weights are damaged.
        """
        run = self.run(prompts, Options(**options))
        for _ in run:
            pass
        return run.completions

    def score(self, text: str) -> Score:
        """Return how likely a text is, token by token.

        Raises:
            InputError: the text has fewer than 2 tokens, or more than the context.
            CheckpointError: the weights are damaged.
        """
        ids = self.encode(text)
        self._check_ids(ids)
        return score(self.model, self.tokenizer, ids)

    def _prompt_ids(self, prompt: str, special: bool) -> list[int]:
        ids = self.encode(prompt, special=special)
        if not ids:
            bos = self.model.config.bos_token_id
            if bos is None or bos >= self.model.config.vocab_size:
                raise InputError("the prompt is empty, and this model has no token to begin with")
            ids = [bos]
        self._check_ids(ids)
        return ids

    def _check_ids(self, ids: Sequence[int]) -> None:
        size = self.model.config.vocab_size
        if bad := [id for id in ids if not 0 <= id < size]:
            raise InputError(f"the model has no token {bad[0]}; its ids are from 0 to {size - 1}")


def load(
    name: str = "gpt2",
    *,
    device: str = "auto",
    dtype: str = "float32",
    revision: str | None = None,
    offline: bool = False,
    quiet: bool = True,
) -> Engine:
    """Load a model.

    Args:
        name: "tiny" (bundled), a short name such as "gpt2", a Hub id "owner/name", or a folder.
        device: "cpu", or "auto" for the best that can compute `dtype`.
        dtype: the type that the weights are computed in.
        revision: a branch, tag or commit on the Hub.
        offline: use only what is on this machine.
        quiet: print no notice and no bar while downloading.

    Raises:
        GPTCLIError: one of its subclasses, whose message says what to do.
    """
    ops = get_ops(device, dtype)
    folder = hub.resolve(name, revision=revision, offline=offline, quiet=quiet)
    start = time.perf_counter()
    model = checkpoint.load(folder, ops)
    tokenizer = Tokenizer.from_folder(folder)
    return Engine(model, tokenizer, name, time.perf_counter() - start)
