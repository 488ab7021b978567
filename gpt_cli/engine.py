"""The public Python API: `load` a model, then generate with it and score with it."""

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import TypedDict, Unpack, get_args

import numpy as np
from numpy.typing import NDArray

from gpt_cli import checkpoint, hub
from gpt_cli.errors import InputError
from gpt_cli.generate import Completion, Overflow, Step, fit, generate
from gpt_cli.model import GPT2, forward
from gpt_cli.ops import get_ops
from gpt_cli.sampling import SamplingParams
from gpt_cli.score import Score, score
from gpt_cli.tokenizer import Tokenizer


class Options(TypedDict, total=False):
    """Keyword arguments of `Engine.run`, `Engine.stream` and `Engine.generate`."""

    max_tokens: int  # how many new tokens at most; 128
    temperature: float  # 0 is greedy; 0.8
    top_k: int  # 0 is off; 40
    top_p: float  # 1 is off; 0.95
    min_p: float  # 0 is off; 0
    repeat_penalty: float  # 1 is off; 1
    seed: int | None  # from 0 to 2**64 - 1; None draws one, which Completion.seed reports
    stop: Sequence[str]  # strings that end the text and are not part of it; one may stand alone
    use_cache: bool  # False computes the whole text again for each token; True
    ignore_eos: bool  # never choose the end token; False
    overflow: Overflow  # for texts beyond the context: "error", "truncate" or "shift"; "error"


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

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text; names of special tokens in it are ordinary text."""
        return self.tokenizer.encode(text)

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
        """
        config = self.model.config
        if len({len(row) for row in ids}) != 1 or not 1 <= len(ids[0]) <= config.n_positions:
            raise InputError(f"rows of one length from 1 to {config.n_positions} are needed")
        for row in ids:
            self._check_ids(row)
        ops = self.model.ops
        return ops.to_host(forward(self.model, ops.xp.asarray(np.array(ids))))

    def run(self, prompts: Sequence[str], **options: Unpack[Options]) -> Run:
        """Begin to continue prompts side by side, and return the iterator that does the work.

        An empty prompt starts at the token that begins a text.

        Raises:
            InputError: an option is out of range, or a prompt does not fit the context.
        """
        if unknown := options.keys() - Options.__annotations__.keys():
            raise TypeError(f"there is no option {', '.join(sorted(unknown))}")
        names = {field.name for field in fields(SamplingParams)}
        params = SamplingParams(**{k: v for k, v in options.items() if k in names})  # type: ignore[arg-type]
        max_tokens = options.get("max_tokens", 128)
        overflow = options.get("overflow", "error")
        if (seed := options.get("seed")) is None:
            seed = secrets.randbits(32)
        if not 0 <= seed < 2**64:
            raise InputError("seed must be from 0 to 2**64 - 1")
        if max_tokens < 1:
            raise InputError("max-tokens must be 1 or more")
        if overflow not in get_args(Overflow):
            raise InputError(f"overflow must be one of {', '.join(get_args(Overflow))}")
        stop = options.get("stop", ())
        stops = [stop] if isinstance(stop, str) else stop
        if "" in stops:
            raise InputError("a stop string must not be empty")
        n_positions = self.model.config.n_positions
        ids = [
            fit(self._prompt_ids(prompt), n_positions, max_tokens, overflow) for prompt in prompts
        ]
        steps = generate(
            self.model,
            self.tokenizer,
            ids,
            params,
            seed=seed,
            max_tokens=max_tokens,
            stop=stops,
            use_cache=options.get("use_cache", True),
            ignore_eos=options.get("ignore_eos", False),
            shift=overflow == "shift",
        )
        return Run(steps, [Completion(len(row), seed) for row in ids])

    def stream(self, prompt: str, **options: Unpack[Options]) -> Iterator[str]:
        """Yield the text that follows a prompt, each piece as soon as it is certain."""
        for step in self.run([prompt], **options):
            if step.text:
                yield step.text

    def generate(self, prompts: Sequence[str], **options: Unpack[Options]) -> list[Completion]:
        """Return what follows each prompt. A row's result does not depend on its neighbours."""
        run = self.run(prompts, **options)
        for _ in run:
            pass
        return run.completions

    def score(self, text: str) -> Score:
        """Return how likely a text is, token by token."""
        ids = self.encode(text)
        self._check_ids(ids)
        return score(self.model, self.tokenizer, ids)

    def _prompt_ids(self, prompt: str) -> list[int]:
        bos = self.model.config.bos_token_id
        ids = self.encode(prompt) or ([] if bos is None else [bos])
        if not ids:
            raise InputError("the prompt is empty, and this model has no token to begin with")
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
    folder = hub.resolve(name, revision=revision, offline=offline, quiet=quiet)
    start = time.perf_counter()
    ops = get_ops(device, dtype)
    tokenizer = Tokenizer.from_folder(folder)
    model = checkpoint.load(folder, ops)
    return Engine(model, tokenizer, name, time.perf_counter() - start)
