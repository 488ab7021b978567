"""Measures of logits: log-probabilities and ranks of tokens, and the likeliest tokens.

A measure takes logits (n, V) and the ids of the tokens (n,) that follow. The result of a row
depends on this row alone.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from gpt_cli.gpt2.hooks import NO_HOOK, Hook
from gpt_cli.gpt2.model import GPT2, unembed
from gpt_cli.ops import Array, Ops
from gpt_cli.texts.states import states
from gpt_cli.texts.text import Text, editing_hook

Measure: TypeAlias = Callable[[Ops, Array, Array], Array]  # logits (n, V), ids (n,) -> (n, ...)
Columns: TypeAlias = dict[str, list[Any]]  # name of a measure -> its value for each token
TopLogprobs: TypeAlias = list[tuple[int, float]]  # ids with their log-probabilities


def measure_states(
    model: GPT2,
    x: Array,
    targets: Sequence[Sequence[int]],
    measures: Mapping[str, Measure],
    hook: Hook = NO_HOOK,
) -> list[Columns]:
    """Return the columns of rows of targets, from the states x (N, C) that predict all N of them.

    A value that is nan becomes None. For `hook`, see `unembed`.
    """
    ops = model.ops
    ids = ops.xp.asarray([id for row in targets for id in row], dtype="int64")
    values: Columns = {name: [] for name in measures}  # of all rows
    for begin in range(0, len(x), ops.logits_rows):
        part = slice(begin, begin + ops.logits_rows)
        logits = unembed(model, x[part], hook)
        for name, measure in measures.items():
            numbers = ops.to_host(measure(ops, logits, ids[part]))
            column = numbers.astype(object)
            column[np.isnan(numbers)] = None
            values[name] += column.tolist()
    columns = []
    begin = 0
    for row in targets:
        end = begin + len(row)
        columns.append({name: column[begin:end] for name, column in values.items()})
        begin = end
    return columns


def log_probabilities(ops: Ops, logits: Array, ids: Array) -> Array:
    """Return the log-probability of one token per row: ids (n,) -> (n,) float64."""
    return logits[ops.xp.arange(len(ids)), ids] - ops.log_normalizer(logits)


def ranks(ops: Ops, logits: Array, ids: Array) -> Array:
    """Return the rank of one token per row, 1 for the likeliest: ids (n,) -> (n,).

    It is one more than the number of tokens with higher logits.
    """
    targets = logits[ops.xp.arange(len(ids)), ids]
    return (logits > targets[:, None]).sum(axis=-1) + 1


def gaps(ops: Ops, logits: Array, ids: Array) -> Array:
    """Return how far the log-probability of one token per row is below the largest: (n,)."""
    return logits.max(axis=-1) - logits[ops.xp.arange(len(ids)), ids]


def moments(ops: Ops, logits: Array, ids: Array) -> Array:
    """Return the mean and the standard deviation of log p of a token that p gives: (n, 2) float64.

    They are in nats. The mean is the negative entropy.
    """
    pairs = []
    # Row by row: a row of GPT-2's vocabulary fits in the processor's cache.
    for row, normalizer in zip(logits, ops.log_normalizer(logits), strict=True):
        logprobs = row.astype("float64") - normalizer
        p = ops.to_host(ops.exp(logprobs))
        logprobs = ops.to_host(logprobs)
        mean = (p * logprobs).sum()
        pairs.append([mean, np.sqrt((p * (logprobs - mean) ** 2).sum())])
    return ops.xp.asarray(pairs)


def all_logits(model: GPT2, texts: Sequence[Text]) -> Array:
    """Return the logits (B, T, V) of the next token at all positions of texts of T tokens."""
    x: dict[int, Array] = {}
    for computed in states(model, texts):
        for row in computed.rows:
            x[row.text_index] = row.states
    stacked = model.ops.xp.stack([x[index] for index in range(len(texts))])
    return unembed(model, stacked, editing_hook(texts, model.ops))


def next_tokens(model: GPT2, text: Text, count: int) -> TopLogprobs:
    """Return the ids of the likeliest tokens after a text, best first, with log-probabilities."""
    (computed,) = states(model, [text])
    (row,) = computed.rows
    logits = unembed(model, row.states[-1:], computed.hook)
    (best,) = top_logprobs(model.ops, logits, [count])
    return best


def likeliest(ops: Ops, logits: Array, count: int) -> tuple[Array, Array]:
    """Return the likeliest ids (n, count), best first, and log-probabilities (n, count) float64."""
    xp = ops.xp
    count = min(count, logits.shape[-1])
    bound = xp.partition(logits, -count, axis=-1)[:, -count]
    rows = []
    for row, least in zip(logits, bound, strict=True):
        best = xp.flatnonzero(row >= least)  # of equal logits the lower id comes first
        rows.append(best[xp.argsort(-row[best], kind="stable")[:count]])
    ids = xp.stack(rows)
    best_logits = xp.take_along_axis(logits, ids, axis=-1)
    return ids, best_logits - ops.log_normalizer(logits)[:, None]


def top_logprobs(ops: Ops, logits: Array, counts: Sequence[int]) -> list[TopLogprobs]:
    """Return the likeliest tokens for rows of logits, `counts` of them."""
    if not any(counts):
        return [[] for _ in counts]
    ids, logprobs = likeliest(ops, logits, max(counts))
    columns = ops.to_host(ids).tolist(), ops.to_host(logprobs).tolist()
    top = []
    for row_ids, row_logprobs, count in zip(*columns, counts, strict=True):
        top.append(list(zip(row_ids, row_logprobs, strict=True))[:count])
    return top
