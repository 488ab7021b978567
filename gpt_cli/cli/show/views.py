"""The views of `gpt-cli show` as data: for --json, text, pictures and pages."""

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpt_cli import records
from gpt_cli.engine import Engine
from gpt_cli.errors import InputError
from gpt_cli.scoring.tree import Node
from gpt_cli.system.machine import check_room, free_memory

# A record of `records.of_token`, without "logprob" if nothing predicts the token.
Token: TypeAlias = dict[str, Any]
# A "token", the "probability" of its path from the prompt, and the "branches" after it.
Branch: TypeAlias = dict[str, Any]

_JSON_FACTOR = 12  # memory for an array as Python numbers and as text / its bytes, measured


@dataclass(frozen=True)
class View:
    """The data of a view."""

    model: str

    @property
    def kind(self) -> str:
        """Return the name of the view."""
        return type(self).__name__.lower()

    def record(self) -> dict[str, Any]:
        """Return the view as a JSON object."""
        return {"view": self.kind, **vars(self)}


@dataclass(frozen=True)
class Attention(View):
    """Attention weights of some heads in some layers, from each token (row) to each (column)."""

    tokens: list[Token]
    layers: list[int]
    heads: list[int]
    weights: NDArray[np.float32]  # (layers, heads, T, T)

    def record(self) -> dict[str, Any]:
        """Return the view as a JSON object; raise ResourceError if the memory is too small."""
        cure = "choose a --layer or a --head, or shorten the text"
        check_room("the JSON takes", _JSON_FACTOR * self.weights.nbytes, free_memory(), cure)
        return super().record() | {"weights": self.weights.astype(float).round(6).tolist()}


@dataclass(frozen=True)
class Lens(View):
    """The predictions after each token if the model ended after a layer."""

    tokens: list[Token]
    layers: list[str]
    predictions: list[list[list[Token]]]  # (layers, T, likeliest first)


@dataclass(frozen=True)
class Surprise(View):
    """The probability of each token of a text."""

    tokens: list[Token]
    perplexity: float | None  # None if infinite


@dataclass(frozen=True)
class Tree(View):
    """The likeliest continuations of a prompt."""

    prompt: str
    branches: list[Branch]


def attention(
    engine: Engine, prompt: str, layer: int | None, head: int | None, *, special: bool
) -> Attention:
    """Compute the attention of all heads, of one layer, or of one head.

    Raises:
        InputError: the layer or head does not exist, or the prompt does not fit the context.
    """
    config = engine.model.config
    layers = _chosen("layer", layer, config.n_layer)
    heads = _chosen("head", head, config.n_head)
    found = engine.trace(prompt, special=special)
    weights = found.attention[np.ix_(layers, heads)]
    return Attention(engine.name, _tokens(engine, found.ids), layers, heads, weights)


def pooled(weights: NDArray[np.float32], most: int) -> tuple[NDArray[np.float32], int]:
    """Reduce (..., T, T) to at most `most` blocks each way; return them and the size of a block.

    A block has the maximum of its weights, because a mean would hide single tokens.
    """
    T = weights.shape[-1]
    size = -(-T // most)
    n = -(-T // size)
    padding = [(0, 0)] * (weights.ndim - 2) + [(0, n * size - T)] * 2
    blocks = np.pad(weights, padding).reshape(*weights.shape[:-2], n, size, n, size)
    return blocks.max((-3, -1)), size


def _chosen(flag: str, number: int | None, count: int) -> list[int]:
    if number is None:
        return list(range(count))
    if not 0 <= number < count:
        raise InputError(f"--{flag} must be from 0 to {count - 1} with this model, not {number}")
    return [number]


def lens(engine: Engine, prompt: str, top: int, *, special: bool) -> Lens:
    """Compute the `top` likeliest tokens that each layer would predict after each token.

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
    """Compute the probability of each token of a text of any length.

    Raises:
        InputError: the text has fewer than 2 tokens.
    """
    record = records.of_score(engine, engine.score(text), logprobs=True)
    return Surprise(engine.name, record["logprobs"], record["perplexity"])


def tree(engine: Engine, prompt: str, top: int, *, special: bool) -> Tree:
    """Compute the `top` likeliest continuations.

    Raises:
        InputError: the prompt does not fit the context.
    """

    def branch(node: Node) -> Branch:
        return {
            "token": records.of_token(engine, node.id, node.logprob),
            "probability": math.exp(node.total_logprob),
            "branches": [*map(branch, node.children)],
        }

    return Tree(engine.name, prompt, [*map(branch, engine.tree(prompt, top, special=special))])


def _tokens(engine: Engine, ids: list[int]) -> list[Token]:
    tokens = [records.of_token(engine, id, None) for id in ids]
    return [{key: token[key] for key in token if key != "logprob"} for token in tokens]
