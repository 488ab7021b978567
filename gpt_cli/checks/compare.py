"""Compare what two models predict after the same texts, such as one model in two dtypes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt_cli.engine import Engine
from gpt_cli.errors import InputError
from gpt_cli.gpt2.model import unembed
from gpt_cli.scoring.score import perplexity, windows
from gpt_cli.texts.states import states
from gpt_cli.texts.text import Text

_WORST = 10  # tokens that are reported
_CONTEXT = 8  # tokens before them
_TOKEN = np.dtype(
    [("text", "i8"), ("position", "i8"), ("kl", "f8"), ("logprobs", "f8", 2), ("tops", "i8", 2)]
)


@dataclass(frozen=True)
class Difference:
    """The predictions of models A and B for a token."""

    text: int  # the number of the text, from 0
    position: int  # of the token in it
    before: str  # the end of the text before it
    token: str
    kl: float
    logprobs: list[float]  # of the token, by A and B
    likeliest: list[str]  # tokens


@dataclass(frozen=True)
class Comparison:
    """The differences between the predictions of models A and B; KL(A || B) is in nats."""

    tokens: int  # all but the first of each text
    kl: dict[str, float]  # mean, median, p99 (99% of the tokens have no more) and max
    same_likeliest: float  # fraction of the tokens
    perplexities: list[float]  # of A and B
    perplexity_ratio: float  # B / A
    worst: list[Difference]  # the tokens with the largest divergences, largest first


def compare(
    a: Engine,
    b: Engine,
    texts: Iterable[str],
    observe: Callable[[int], None] = lambda tokens: None,
    *,
    special: bool = False,
) -> Comparison:
    """Compare two models at all tokens but the first of each text.

    A text longer than the context is read in windows, as by `score`. `observe` gets the number of
    tokens so far. With `special`, names of special tokens in texts are these tokens. Raise
    InputError if the models have different tokens, or no text has two.
    """
    for engine in (a, b):
        engine.loaded.refuse_edits("cannot be used in a comparison")
    if _vocabulary(a) != _vocabulary(b):
        cure = "models with the same tokenizer can be compared"
        raise InputError(f"{a.name} and {b.name} have different tokens: only {cure}")
    rows = [a.loaded.start + a.loaded.text_ids(text, special=special) for text in texts]
    tokens = np.fromiter(_compare(a, b, rows, observe), _TOKEN)
    if not len(tokens):
        raise InputError("a text needs at least 2 tokens: the first has nothing before it")
    kl = tokens["kl"]
    median, p99, largest = np.percentile(kl, [50, 99, 100]).tolist()
    sum_a, sum_b = tokens["logprobs"].sum(axis=0).tolist()
    perplexity_a, perplexity_b, ratio = (
        perplexity(total, len(kl)) or 0.0 for total in (sum_a, sum_b, sum_b - sum_a)
    )
    worst = tokens[np.argsort(-kl)[:_WORST]]
    return Comparison(
        tokens=len(kl),
        kl={"mean": float(kl.mean()), "median": median, "p99": p99, "max": largest},
        same_likeliest=float((tokens["tops"][:, 0] == tokens["tops"][:, 1]).mean()),
        perplexities=[perplexity_a, perplexity_b],
        perplexity_ratio=ratio,
        worst=[_difference(a, rows, token) for token in worst],
    )


def _vocabulary(engine: Engine) -> list[str | None]:
    """Return the tokens by their ids; None for an id without one."""
    size = engine.model.config.vocab_size
    tokenizer = engine.tokenizer
    missing = set(tokenizer.missing_ids(size))
    return [None if id in missing else tokenizer.token_name(id) for id in range(size)]


def _compare(
    a: Engine, b: Engine, rows: Sequence[Sequence[int]], observe: Callable[[int], None]
) -> Iterator[tuple[Any, ...]]:
    """Yield the fields of `_TOKEN` for all tokens but the first of each text; `rows` are ids."""
    n_positions = min(engine.model.config.n_positions for engine in (a, b))
    tokens = count(1)
    for text, ids in enumerate(rows):
        for start, first, end in windows(len(ids), n_positions, max(1, n_positions // 2)):
            of_a = _logprobs(a, ids[start : end - 1], first - start - 1)
            of_b = _logprobs(b, ids[start : end - 1], first - start - 1)
            for position, (p, q) in enumerate(zip(of_a, of_b, strict=True), first):
                kl = max(0.0, (np.exp(p) * (p - q)).sum())  # rounding can make it negative
                id = ids[position]
                yield text, position, kl, (p[id], q[id]), (p.argmax(), q.argmax())
                observe(next(tokens))


def _logprobs(engine: Engine, ids: Sequence[int], first: int) -> Iterator[NDArray[np.float64]]:
    """Yield the log-probabilities (V,) of the tokens after the ids from `first` on."""
    model = engine.model
    ops = model.ops
    (computed,) = states(model, [Text(list(ids))])
    (row,) = computed.rows
    for begin in range(first, len(row.states), ops.logits_rows):
        logits = unembed(model, row.states[begin : begin + ops.logits_rows])
        normalizers = ops.to_host(ops.log_normalizer(logits))
        for of_token, normalizer in zip(ops.to_host(logits), normalizers, strict=True):
            yield of_token.astype(np.float64) - normalizer


def _difference(a: Engine, rows: Sequence[Sequence[int]], token: np.void) -> Difference:
    """Return the difference at a token, a value of `_TOKEN`; model A decodes it."""
    text = int(token["text"])
    position = int(token["position"])
    ids = rows[text]
    return Difference(
        text=text,
        position=position,
        before=a.decode(ids[max(0, position - _CONTEXT) : position]),
        token=a.decode([ids[position]]),
        kl=float(token["kl"]),
        logprobs=token["logprobs"].tolist(),
        likeliest=[a.decode([id]) for id in token["tops"].tolist()],
    )
