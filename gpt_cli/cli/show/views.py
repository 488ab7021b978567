"""The views of `gpt-cli show` as data: for --json, text, pictures and pages."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from gpt_cli import records
from gpt_cli.engine import Engine
from gpt_cli.options.declare import OptionError
from gpt_cli.records import Record
from gpt_cli.scoring.tree import Node
from gpt_cli.system.machine import check_room, free_memory

_JSON_FACTOR = 12  # memory for an array as Python numbers and as text / its bytes, measured


@dataclass(frozen=True)
class View:
    """The data of a view. Its tokens are records; "logprob" is missing if nothing predicts one."""

    kind: ClassVar[str]  # the name of the view
    model: str
    adapter: str | None = field(default=None, kw_only=True)  # in its weights

    def record(self) -> Record:
        """Return the view as a JSON object."""
        return {"view": self.kind, **vars(self)}


@dataclass(frozen=True)
class AttentionView(View):
    """The attention weights of heads, from tokens (rows) to tokens (columns)."""

    kind = "attention"
    tokens: list[Record]
    layers: list[int]
    heads: list[int]
    weights: NDArray[np.float32]  # (layers, heads, T, T)

    def record(self) -> Record:
        """Return the view as a JSON object; raise ResourceError if the memory is too small."""
        cure = "choose a --layer or a --head, or shorten the text"
        check_room("the JSON takes", _JSON_FACTOR * self.weights.nbytes, free_memory(), cure)
        return super().record() | {"weights": self.weights.astype(float).round(6).tolist()}


@dataclass(frozen=True)
class LensView(View):
    """The next tokens that the layers would predict."""

    kind = "lens"
    tokens: list[Record]
    layers: list[str]
    predictions: list[list[list[Record]]]  # (layers, T, likeliest first)


@dataclass(frozen=True)
class SurpriseView(View):
    """The probabilities of the tokens of a text."""

    kind = "surprise"
    tokens: list[Record]
    perplexity: float | None  # None if infinite


@dataclass(frozen=True)
class TreeView(View):
    """The likeliest continuations of a prompt."""

    kind = "tree"
    prompt: str
    branches: list[Record]  # a "token", the "probability" of its path, and "branches" after it


def attention(
    engine: Engine, prompt: str, layer: int | None, head: int | None, *, special: bool
) -> AttentionView:
    """Compute the attention of all heads, of one layer, or of one head."""
    config = engine.model.config
    layers = _indices("layer", layer, config.n_layer)
    heads = _indices("head", head, config.n_head)
    trace = engine.trace(prompt, special=special)
    weights = trace.attention[np.ix_(layers, heads)]
    tokens = _tokens(engine, trace.ids)
    return AttentionView(engine.name, tokens, layers, heads, weights, adapter=engine.adapter)


def pooled(weights: NDArray[np.float32], most: int) -> tuple[NDArray[np.float32], int]:
    """Reduce maps (..., T, T) to at most `most` cells a side; return also the tokens per cell.

    A cell has the maximum of its weights, because a mean would hide single tokens.
    """
    T = weights.shape[-1]
    size = -(-T // most)
    starts = np.arange(0, T, size)
    return np.maximum.reduceat(np.maximum.reduceat(weights, starts, -1), starts, -2), size


def _indices(name: str, index: int | None, count: int) -> list[int]:
    """Return an index, or all indices without one."""
    if index is None:
        return list(range(count))
    if not 0 <= index < count:
        raise OptionError(name, f"must be from 0 to {count - 1} with this model, not {index}")
    return [index]


def lens(engine: Engine, prompt: str, top: int, *, special: bool) -> LensView:
    """Compute the `top` likeliest tokens by every layer after every token."""
    trace = engine.trace(prompt, special=special)
    predictions = [
        [
            [records.of_token(engine, *token) for token in zip(*position, strict=True)]
            for position in zip(*layer, strict=True)
        ]
        for layer in zip(*(array.tolist() for array in trace.lens(top)), strict=True)
    ]
    layers = ["embedding", *(f"h.{layer}" for layer in range(engine.model.config.n_layer))]
    tokens = _tokens(engine, trace.ids)
    return LensView(engine.name, tokens, layers, predictions, adapter=engine.adapter)


def surprise(engine: Engine, text: str) -> SurpriseView:
    """Compute the probabilities of the tokens of a text, which may exceed the context."""
    record = records.of_score(engine, engine.score(text), logprobs=True)
    sums = record["logprobs"], record["perplexity"]
    return SurpriseView(engine.name, *sums, adapter=engine.adapter)


def tree(engine: Engine, prompt: str, top: int, *, special: bool) -> TreeView:
    """Compute the `top` likeliest continuations."""

    def branch(node: Node) -> Record:
        return {
            "token": records.of_token(engine, node.id, node.logprob),
            "probability": math.exp(node.total_logprob),
            "branches": [*map(branch, node.children)],
        }

    branches = [*map(branch, engine.tree(prompt, top, special=special))]
    return TreeView(engine.name, prompt, branches, adapter=engine.adapter)


def _tokens(engine: Engine, ids: list[int]) -> list[Record]:
    """Return records without log-probabilities."""
    tokens = [records.of_token(engine, id, None) for id in ids]
    return [{name: token[name] for name in ("id", "token", "bytes")} for token in tokens]
