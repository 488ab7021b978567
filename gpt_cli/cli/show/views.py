"""The views of `gpt-cli show` as data, for JSON, text, pages and pictures."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gpt_cli import records
from gpt_cli.cli.output import in_quotation_marks, token_label
from gpt_cli.engine import Engine
from gpt_cli.options.declare import OptionError
from gpt_cli.records import Record, json_line
from gpt_cli.scoring.attribution import What
from gpt_cli.scoring.tree import Node


@dataclass(frozen=True)
class View:
    """The data of a view. Its tokens are records; "logprob" is missing if nothing predicts one."""

    view: str = field(init=False)  # its name, set by the class or, for a grid, by each object
    model: str
    adapter: str | None = field(default=None, kw_only=True)  # in its weights

    def record(self) -> Record:
        """Return the view as a JSON object, in which arrays are not converted yet."""
        return {"view": self.view, **vars(self)}

    def json(self) -> Iterator[str]:
        """Yield the pieces of a line of JSON."""
        yield json_line(self.record())


@dataclass(frozen=True)
class AttentionView(View):
    """The attention weights of heads, from tokens (rows) to tokens (columns)."""

    view = "attention"
    tokens: list[Record]
    layers: list[int]
    heads: list[int]
    weights: NDArray[np.float32]  # (layers, heads, T, T)

    def json(self) -> Iterator[str]:
        """Yield the pieces of a line of JSON, one per head, because the line may have gigabytes."""
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

    view = "lens"
    tokens: list[Record]
    layers: list[str]
    predictions: list[list[list[Record]]]  # (layers, T, likeliest first)


@dataclass(frozen=True)
class SurpriseView(View):
    """The probabilities of the tokens of a text."""

    view = "surprise"
    tokens: list[Record]
    perplexity: float | None  # None if infinite


@dataclass(frozen=True)
class TreeView(View):
    """The likeliest continuations of a prompt."""

    view = "tree"
    prompt: str
    branches: list[Record]  # a "token", the "probability" of its path, and "branches" after it


@dataclass(frozen=True, kw_only=True)
class GridView(View):
    """The effects of parts of a model on a measure: a logit, or the difference of two."""

    view: str  # "attribution", "patch" or "ablate"
    answer: Record
    wrong: Record | None
    prompts: list[str]  # one, or the clean and the corrupt one
    axes: list[str]  # rows and columns: layers and heads, or tokens and layers
    rows: list[str]
    columns: list[str]  # heads may be followed by "attn" and "mlp"
    values: list[list[float]]  # by row and column
    patched: list[list[float]] | None = None  # the measure of the corrupt text with each patch
    measures: dict[str, float]  # of the whole model, and what does not depend on a layer
    title: str  # what the values are
    notes: list[str]


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
    columns = np.maximum.reduceat(weights, starts, axis=-1)
    return np.maximum.reduceat(columns, starts, axis=-2), size


def _triangle(weights: NDArray[np.float32]) -> str:
    """Return weights (T, T), which are 0 above the diagonal, as JSON with 6 decimal places.

    `json.dumps` would take ten times as long.
    """
    T = len(weights)
    rest = np.rint(weights[np.tri(T, dtype=bool)].astype(float) * 1e6).astype(np.uint32)
    characters = np.empty((9, len(rest)), np.uint8)  # a column is a weight, such as `0.012345,`
    characters[1] = ord(".")
    characters[8] = ord(",")
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
    """Compute the `top` likeliest tokens after every token, by the prediction of every layer."""
    trace = engine.trace(prompt, special=special)
    ids, logprobs = trace.lens(top)  # (layers, T, top)
    depth, T, _ = ids.shape

    def likeliest(layer: int, position: int) -> list[Record]:
        pairs = zip(ids[layer, position].tolist(), logprobs[layer, position].tolist(), strict=True)
        return [records.of_token(engine, id, logprob) for id, logprob in pairs]

    predictions = [[likeliest(layer, t) for t in range(T)] for layer in range(depth)]
    layers = ["embedding"] + [f"h.{layer}" for layer in range(depth - 1)]
    tokens = _tokens(engine, trace.ids)
    return LensView(engine.name, tokens, layers, predictions, adapter=engine.adapter)


def surprise(
    engine: Engine, text: str, *, special: bool = False, bos: bool = False
) -> SurpriseView:
    """Compute the probabilities of the tokens of a text, which may exceed the context."""
    score = engine.score(text, special=special, bos=bos)
    record = records.of_score(engine, score, logprobs=True)
    return SurpriseView(
        engine.name, record["logprobs"], record["perplexity"], adapter=engine.adapter
    )


def tree(engine: Engine, prompt: str, top: int, *, special: bool) -> TreeView:
    """Compute the `top` likeliest continuations."""

    def branch(node: Node) -> Record:
        return {
            "token": records.of_token(engine, node.id, node.logprob),
            "probability": math.exp(node.total_logprob),
            "branches": [branch(child) for child in node.children],
        }

    branches = [branch(node) for node in engine.tree(prompt, top, special=special)]
    return TreeView(engine.name, prompt, branches, adapter=engine.adapter)


def attribution(
    engine: Engine, prompt: str, answer: str, wrong: str | None, *, special: bool
) -> GridView:
    """Compute what each part of the model adds to the logit of an answer."""
    added = engine.attribution(prompt, answer, wrong, special=special)
    constants = {"embedding": added.embedding, "position": added.position, "bias": added.bias}
    sums = {"attn and mlp": added.attention.sum() + added.mlp.sum()} | constants
    terms = ", ".join(f"{name} {value:+z.2f}" for name, value in sums.items())
    heads = [str(head) for head in range(added.heads.shape[1])]
    return GridView(
        view="attribution",
        **_common(engine, [prompt], answer, wrong),
        columns=[*heads, "attn", "mlp"],
        values=np.column_stack([added.heads, added.attention, added.mlp]).tolist(),
        measures=constants | {"total": added.total},
        title=f"what each head (column) of each layer (row) adds to {_measure(answer, wrong)}",
        notes=[_after(prompt, added.total), f"{terms} add up to it within {added.error:.1e}"],
    )


def patch(
    engine: Engine, texts: list[str], answer: str, wrong: str | None, what: What, *, special: bool
) -> GridView:
    """Compute what each patch from a clean text recovers in a corrupt one."""
    clean, corrupt = texts
    result = engine.patch(clean, corrupt, answer, wrong, what=what, special=special)
    facts = _common(engine, texts, answer, wrong)
    recovered = result.recovered  # (layers, heads or tokens)
    patched = result.patched
    if what == "z":
        parts = "head (column) of each layer (row)"
        columns = [str(head) for head in range(recovered.shape[1])]
    else:  # tokens have long names, so they are rows
        parts = "token (row) and layer (column)"
        columns = facts["rows"]
        tokens = _tokens(engine, engine.loaded.prompt(clean, special=special).ids)
        facts["axes"] = ["token", "layer"]
        facts["rows"] = [
            f"{position} {token_label(token)}" for position, token in enumerate(tokens)
        ]
        recovered = recovered.T
        patched = patched.T
    return GridView(
        view="patch",
        **facts,
        columns=columns,
        values=recovered.tolist(),
        patched=patched.tolist(),
        measures={"clean": result.clean, "corrupt": result.corrupt},
        title=f"the share of {_measure(answer, wrong)} that {what} of each {parts} recovers",
        notes=[
            f"clean: {_after(clean, result.clean)}",
            f"corrupt: {_after(corrupt, result.corrupt)}",
        ],
    )


def ablate(
    engine: Engine, prompt: str, answer: str, wrong: str | None, *, special: bool
) -> GridView:
    """Compute how the logit of an answer changes without each head, and each MLP."""
    without = engine.ablate(prompt, answer, wrong, special=special)
    heads = [str(head) for head in range(without.heads.shape[1])]
    logits = np.column_stack([without.heads, without.mlp])
    measure = _measure(answer, wrong)
    return GridView(
        view="ablate",
        **_common(engine, [prompt], answer, wrong),
        columns=[*heads, "mlp"],
        values=(logits - without.whole).tolist(),
        measures={"total": without.whole},
        title=f"the change of {measure} without each head (column) of each layer (row)",
        notes=[_after(prompt, without.whole)],
    )


def _common(engine: Engine, prompts: list[str], answer: str, wrong: str | None) -> Record:
    """Return the fields that grids of heads have in common."""
    ids = [engine.loaded.text_ids(text)[0] for text in (answer, wrong) if text is not None]
    first, *others = _tokens(engine, ids)
    return {
        "model": engine.name,
        "adapter": engine.adapter,
        "answer": first,
        "wrong": others[0] if others else None,
        "prompts": prompts,
        "axes": ["layer", "head"],
        "rows": [str(layer) for layer in range(engine.model.config.n_layer)],
    }


def _measure(answer: str, wrong: str | None) -> str:
    """Return what a grid measures, such as `logit “ a” - logit “ b”`."""
    answers = (text for text in (answer, wrong) if text is not None)
    return " - ".join(f"logit {in_quotation_marks(text)}" for text in answers)


def _after(prompt: str, measure: float) -> str:
    return f"after {in_quotation_marks(prompt)}: {measure:+z.4f}"


def _tokens(engine: Engine, ids: list[int]) -> list[Record]:
    """Return records without log-probabilities."""
    tokens = [records.of_token(engine, id, None) for id in ids]
    return [{name: token[name] for name in ("id", "token", "bytes")} for token in tokens]
