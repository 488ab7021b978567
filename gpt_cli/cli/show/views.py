"""What `gpt-cli show` shows, as data: --json prints it, and every picture is made of it."""

import math
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpt_cli import records
from gpt_cli.engine import Engine
from gpt_cli.errors import InputError
from gpt_cli.machine import check_room, free_memory
from gpt_cli.tree import Node

# As `records.of_token` makes it; without "logprob" where nothing has predicted it.
Token: TypeAlias = dict[str, Any]

# Times its bytes is what an array takes as numbers of Python and as text, as measured.
_IN_JSON = 12


@dataclass(frozen=True)
class Attention:
    """How much each token (row) takes from each (column), by these heads of these layers."""

    model: str
    tokens: list[Token]
    layers: list[int]
    heads: list[int]
    weights: NDArray[np.float32]  # (layers, heads, T, T)

    def record(self) -> dict[str, Any]:
        """Return it as JSON has it.

        Raises:
            ResourceError: there is not enough memory.
        """
        cure = "choose a --layer or a --head, or shorten the text"
        check_room("the JSON takes", _IN_JSON * self.weights.nbytes, free_memory(), cure)
        weights = self.weights.astype(float).round(6).tolist()
        return {"view": "attention", **vars(self), "weights": weights}


@dataclass(frozen=True)
class Lens:
    """What would follow each token if the model ended after a layer."""

    model: str
    tokens: list[Token]
    layers: list[str]
    predictions: list[list[list[Token]]]  # (layers, T, the likeliest first)

    def record(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {"view": "lens", **vars(self)}


@dataclass(frozen=True)
class Surprise:
    """How likely each token of a text is after those before it."""

    model: str
    tokens: list[Token]
    perplexity: float | None

    def record(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {"view": "surprise", **vars(self)}


@dataclass(frozen=True)
class Branch:
    """A token that may come next; the probability is that of all since the prompt."""

    token: Token
    probability: float
    branches: list["Branch"]


@dataclass(frozen=True)
class Tree:
    """The likeliest continuations of a prompt."""

    model: str
    prompt: str
    branches: list[Branch]

    def record(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {"view": "tree", **asdict(self)}


View: TypeAlias = Attention | Lens | Surprise | Tree


def attention(
    engine: Engine, prompt: str, layer: int | None, head: int | None, *, special: bool
) -> Attention:
    """Compute the attention of all heads, or of a layer's, or of one.

    Raises:
        InputError: there is no such layer or head, or the prompt does not fit the context.
    """
    config = engine.model.config
    layers = _chosen("layer", layer, config.n_layer)
    heads = _chosen("head", head, config.n_head)
    found = engine.trace(prompt, special=special)
    weights = found.attention[np.ix_(layers, heads)]
    return Attention(engine.name, _tokens(engine, found.ids), layers, heads, weights)


def pooled(weights: NDArray[np.float32], most: int) -> tuple[NDArray[np.float32], int]:
    """Return (..., T, T) in at most `most` blocks of tokens each way, and how many are in a block.

    A block is the most that any of them takes: the mean would hide what few tokens do.
    """
    T = weights.shape[-1]
    together = -(-T // most)
    n = -(-T // together)
    padded = np.zeros((*weights.shape[:-2], n * together, n * together), np.float32)
    padded[..., :T, :T] = weights
    return padded.reshape(*weights.shape[:-2], n, together, n, together).max((-3, -1)), together


def _chosen(what: str, number: int | None, count: int) -> list[int]:
    if number is None:
        return list(range(count))
    if not 0 <= number < count:
        raise InputError(f"--{what} must be from 0 to {count - 1} with this model, not {number}")
    return [number]


def lens(engine: Engine, prompt: str, top: int, *, special: bool) -> Lens:
    """Compute what each layer would predict after each token, the `top` likeliest.

    Raises:
        InputError: the prompt does not fit the context.
    """
    found = engine.trace(prompt, special=special)
    ids, logprobs = (array.tolist() for array in found.lens(top))
    predictions = [
        [
            [records.of_token(engine, *pair) for pair in zip(*place, strict=True)]
            for place in zip(*layer, strict=True)
        ]
        for layer in zip(ids, logprobs, strict=True)
    ]
    layers = ["embedding", *(f"h.{layer}" for layer in range(engine.model.config.n_layer))]
    return Lens(engine.name, _tokens(engine, found.ids), layers, predictions)


def surprise(engine: Engine, text: str) -> Surprise:
    """Compute how likely each token of a text is, of any length.

    Raises:
        InputError: the text has fewer than 2 tokens.
    """
    score = engine.score(text)
    pairs = zip(score.ids, score.token_logprobs, strict=True)
    tokens = [records.of_token(engine, *pair) for pair in pairs]
    perplexity = None if score.perplexity == math.inf else score.perplexity
    return Surprise(engine.name, tokens, perplexity)


def tree(engine: Engine, prompt: str, top: int, *, special: bool) -> Tree:
    """Compute the `top` likeliest continuations.

    Raises:
        InputError: the prompt does not fit the context.
    """

    def branch(node: Node) -> Branch:
        return Branch(
            records.of_token(engine, node.id, node.logprob),
            math.exp(node.total_logprob),
            [branch(child) for child in node.children],
        )

    return Tree(engine.name, prompt, [*map(branch, engine.tree(prompt, top, special=special))])


def _tokens(engine: Engine, ids: list[int]) -> list[Token]:
    tokens = [records.of_token(engine, id, None) for id in ids]
    return [{key: token[key] for key in token if key != "logprob"} for token in tokens]
