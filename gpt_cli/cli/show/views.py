"""The views of `gpt-cli show` as data: for --json, text, pictures and pages."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from gpt_cli import records
from gpt_cli.engine import Engine
from gpt_cli.options.declare import OptionError
from gpt_cli.records import Record, json_line
from gpt_cli.scoring.tree import Node


@dataclass(frozen=True)
class View:
    """The data of a view. Its tokens are records; "logprob" is missing if nothing predicts one."""

    kind: ClassVar[str]  # the name of the view
    model: str
    adapter: str | None = field(default=None, kw_only=True)  # in its weights

    def record(self) -> Record:
        """Return the view as an object; its values are those of JSON, or arrays."""
        return {"view": self.kind, **vars(self)}

    def json(self) -> Iterator[str]:
        """Yield the pieces of a line of JSON."""
        yield json_line(self.record())


@dataclass(frozen=True)
class AttentionView(View):
    """The attention weights of heads, from tokens (rows) to tokens (columns)."""

    kind = "attention"
    tokens: list[Record]
    layers: list[int]
    heads: list[int]
    weights: NDArray[np.float32]  # (layers, heads, T, T)

    def json(self) -> Iterator[str]:
        """Yield the pieces of a line of JSON, one per head: the whole may have gigabytes."""
        before, after = json_line(self.record() | {"weights": None}).rsplit("null", 1)
        yield before
        for layer, heads in enumerate(self.weights):
            yield "," if layer else "["
            for head, weights in enumerate(heads):
                yield ("," if head else "[") + _triangle(weights)
            yield "]"
        yield f"]{after}"


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


def _triangle(weights: NDArray[np.float32]) -> str:
    """Return weights (T, T), which are 0 above the diagonal, as JSON with 6 decimal places.

    `json.dumps` would take ten times as long.
    """
    T = len(weights)
    rest = np.rint(weights[np.tri(T, dtype=bool)].astype(float) * 1e6).astype(np.uint32)
    characters = np.empty((9, len(rest)), np.uint8)  # a column is a weight, such as `0.012345,`
    characters[1], characters[8] = b".,"
    for place in (7, 6, 5, 4, 3, 2, 0):
        rest, digits = np.divmod(rest, 10)
        characters[place] = digits + ord("0")
    text = characters.T.tobytes().decode()
    starts = 9 * np.arange(T + 1).cumsum()
    rows = [text[starts[i] : starts[i + 1]] + (T - 1 - i) * "0.0," for i in range(T)]
    return "[" + ",".join(f"[{row[:-1]}]" for row in rows) + "]"


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
    layers = ["embedding", *(f"h.{layer}" for layer in range(len(predictions) - 1))]
    tokens = _tokens(engine, trace.ids)
    return LensView(engine.name, tokens, layers, predictions, adapter=engine.adapter)


def surprise(
    engine: Engine, text: str, *, special: bool = False, bos: bool = False
) -> SurpriseView:
    """Compute the probabilities of the tokens of a text, which may exceed the context."""
    score = engine.score(text, special=special, bos=bos)
    record = records.of_score(engine, score, logprobs=True)
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
