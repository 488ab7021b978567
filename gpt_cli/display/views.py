"""The views of `gpt-cli show` as data, for JSON, text, pages and pictures.

A view is drawn from a result of an engine, by the function of its name.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gpt_cli import records
from gpt_cli.display.labels import in_quotation_marks, token_data, token_label
from gpt_cli.errors import counted
from gpt_cli.options.declare import OptionError
from gpt_cli.records import Record, Source, json_line
from gpt_cli.scoring.attribution import Ablation, Attribution, OfAnswer, Patching
from gpt_cli.scoring.score import Score
from gpt_cli.scoring.trace import Trace
from gpt_cli.scoring.tree import Node, Tree


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
    perplexity: float | None  # None if infinite, or if no token is scored

    @property
    def summary(self) -> str:
        """Return the number of tokens, their mean bits and their perplexity, in words."""
        bits = [-t["logprob"] / math.log(2) for t in self.tokens if t["logprob"] is not None]
        size = f"{counted(len(self.tokens), 'token')} ({len(bits):,} scored)"
        if not bits:
            return size
        perplexity = "infinite" if self.perplexity is None else _number(self.perplexity)
        return f"{size}, {math.fsum(bits) / len(bits):.2f} bits each, perplexity {perplexity}"


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
    source: Source, trace: Trace, layer: int | None = None, head: int | None = None
) -> AttentionView:
    """Show the attention of all heads, of one layer, or of one head of a layer."""
    if head is not None and layer is None:
        raise OptionError("head", "needs layer: give both")
    n_layer, n_head = trace.attention.shape[:2]
    layers = _indices("layer", layer, n_layer)
    heads = _indices("head", head, n_head)
    weights = trace.attention[np.ix_(layers, heads)]
    tokens = _tokens(source, trace.ids)
    return AttentionView(source.name, tokens, layers, heads, weights, adapter=source.adapter)


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


def lens(source: Source, trace: Trace, count: int = 5) -> LensView:
    """Show the `count` likeliest tokens after every token, by the prediction of every layer."""
    ids, logprobs = trace.lens(count)  # (layers, T, count)
    depth, T, _ = ids.shape

    def likeliest(layer: int, position: int) -> list[Record]:
        pairs = zip(ids[layer, position].tolist(), logprobs[layer, position].tolist(), strict=True)
        return [records.of_token(source, id, logprob) for id, logprob in pairs]

    predictions = [[likeliest(layer, t) for t in range(T)] for layer in range(depth)]
    layers = ["embedding"] + [f"h.{layer}" for layer in range(depth - 1)]
    tokens = _tokens(source, trace.ids)
    return LensView(source.name, tokens, layers, predictions, adapter=source.adapter)


def surprise(source: Source, score: Score) -> SurpriseView:
    """Show the probabilities of the tokens of a text, which may exceed the context."""
    record = records.of_score(source, score, logprobs=True)
    return SurpriseView(
        source.name, record["logprobs"], record["perplexity"], adapter=source.adapter
    )


def _number(value: float) -> str:
    """Return a number with 4 significant digits, such as 9.711 or 42,910."""
    return f"{value:.3e}" if value >= 1e10 else f"{float(f'{value:.4g}'):,.11g}"


def characters(tokens: Sequence[Record]) -> Iterator[tuple[bytes, float | None]]:
    """Yield tokens and their bits; tokens that share a character are merged."""
    data = b""
    bits = 0.0
    for token in tokens:
        data += token_data(token)
        bits -= (token["logprob"] or 0.0) / math.log(2)
        try:
            data.decode()
        except UnicodeDecodeError:
            continue
        yield data, None if token["logprob"] is None else bits
        data = b""
        bits = 0.0


def tree(source: Source, tree: Tree) -> TreeView:
    """Show the likeliest continuations."""

    def branch(node: Node) -> Record:
        return {
            "token": records.of_token(source, node.id, node.logprob),
            "probability": math.exp(node.total_logprob),
            "branches": [branch(child) for child in node.children],
        }

    branches = [branch(node) for node in tree]
    return TreeView(source.name, tree.prompt, branches, adapter=source.adapter)


def attribution(source: Source, added: Attribution) -> GridView:
    """Show what each part of the model adds to the logit of an answer."""
    constants = {"embedding": added.embedding, "position": added.position, "bias": added.bias}
    sums = {"attn and mlp": added.attention.sum() + added.mlp.sum()} | constants
    terms = ", ".join(f"{name} {value:+z.2f}" for name, value in sums.items())
    facts = _common(source, added, len(added.heads))
    return GridView(
        view="attribution",
        **facts,
        columns=[*_heads(added.heads), "attn", "mlp"],
        values=np.column_stack([added.heads, added.attention, added.mlp]).tolist(),
        measures=constants | {"total": added.total},
        title=f"what each head (column) of each layer (row) adds to {_measure(facts)}",
        notes=[
            _after(added.prompts[0], added.total),
            f"{terms} add up to it within {added.error:.1e}",
        ],
    )


def patch(source: Source, result: Patching) -> GridView:
    """Show what each patch from a clean text recovers in a corrupt one."""
    clean, corrupt = result.prompts
    facts = _common(source, result, len(result.patched))
    recovered = result.recovered  # (layers, heads or tokens)
    patched = result.patched
    if result.what == "z":
        parts = "head (column) of each layer (row)"
        columns = _heads(recovered)
    else:  # tokens have long names, so they are rows
        parts = "token (row) and layer (column)"
        columns = facts["rows"]
        tokens = _tokens(source, result.ids)
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
        title=f"the share of {_measure(facts)} that {result.what} of each {parts} recovers",
        notes=[
            f"clean: {_after(clean, result.clean)}",
            f"corrupt: {_after(corrupt, result.corrupt)}",
        ],
    )


def ablate(source: Source, without: Ablation) -> GridView:
    """Show how the logit of an answer changes without each head, and each MLP."""
    logits = np.column_stack([without.heads, without.mlp])
    facts = _common(source, without, len(without.heads))
    return GridView(
        view="ablate",
        **facts,
        columns=[*_heads(without.heads), "mlp"],
        values=(logits - without.whole).tolist(),
        measures={"total": without.whole},
        title=f"the change of {_measure(facts)} without each head (column) of each layer (row)",
        notes=[_after(without.prompts[0], without.whole)],
    )


# Each view by its name: the method of the engine that computes its result, and its function.
VIEWS: dict[str, tuple[str, Callable[..., View]]] = {
    "attention": ("trace", attention),
    "lens": ("trace", lens),
    "surprise": ("score", surprise),
    "tree": ("tree", tree),
    "attribution": ("attribution", attribution),
    "patch": ("patch", patch),
    "ablate": ("ablate", ablate),
}


def _common(source: Source, result: OfAnswer, layers: int) -> Record:
    """Return the fields that grids of heads have in common."""
    first, *others = _tokens(source, result.answers)
    return {
        "model": source.name,
        "adapter": source.adapter,
        "answer": first,
        "wrong": others[0] if others else None,
        "prompts": result.prompts,
        "axes": ["layer", "head"],
        "rows": [str(layer) for layer in range(layers)],
    }


def _heads(grid: NDArray[np.float64]) -> list[str]:
    """Return the names of the heads of a grid (layers, heads)."""
    return [str(head) for head in range(grid.shape[1])]


def _measure(facts: Record) -> str:
    """Return what a grid measures, such as `logit “ a” - logit “ b”`."""
    answers = [facts["answer"], facts["wrong"]]
    return " - ".join(f"logit {in_quotation_marks(x['token'])}" for x in answers if x)


def _after(prompt: str, measure: float) -> str:
    return f"after {in_quotation_marks(prompt)}: {measure:+z.4f}"


def _tokens(source: Source, ids: Sequence[int]) -> list[Record]:
    """Return records without log-probabilities."""
    tokens = [records.of_token(source, id, None) for id in ids]
    return [{name: token[name] for name in ("id", "token", "bytes")} for token in tokens]
