"""Logits to a token: penalty, temperature, top-k, top-p, min-p, in this order, then one draw.

The order and the meaning of each are those of transformers. Every filter is a bound: it removes
(sets to -inf) the logits below it, so tokens of equal logits stay or go together, and the most
likely token always stays.

Sums over the vocabulary are running sums, one number after the other: numbers that are left out, or
that other rows of a batch bring in as zeros, do not change their bits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from gpt_cli.errors import InputError
from gpt_cli.ops import Array, Ops

# Of what logits are divided by: beyond, float32 soon knows it no more from 0 or from infinity.
_SMALLEST, _LARGEST = 1e-6, 1e6
GROUP = 64  # columns, of which only the largest is looked at first


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose a token.

    Raises:
        InputError: a value is outside its range.
    """

    temperature: float = 0.8  # above 0; 0 is greedy: always the most likely token
    top_k: int = 40  # keep the k most likely; 0 keeps all
    top_p: float = 0.95  # keep the fewest that together have this probability; 1 keeps all
    min_p: float = 0.0  # keep those at least this many times as likely as the most likely one
    repeat_penalty: float = 1.0  # above 1, tokens that the text already has get less likely

    def __post_init__(self) -> None:
        t, penalty = self.temperature, self.repeat_penalty
        between = f"from {_SMALLEST:g} to {_LARGEST:g}"
        check(t == 0 or _SMALLEST <= t <= _LARGEST, f"temperature must be 0, or {between}")
        check(self.top_k >= 0, "top-k must be 0 or more")
        check(0 < self.top_p <= 1, "top-p must be above 0 and at most 1")
        check(0 <= self.min_p <= 1, "min-p must be from 0 to 1")
        check(_SMALLEST <= penalty <= _LARGEST, f"repeat-penalty must be {between}")


def check(valid: bool, complaint: str) -> None:
    """Raise InputError unless `valid`."""
    if not valid:
        raise InputError(complaint)


def uniforms(keys: Sequence[tuple[int, int]], step: int) -> Array:
    """Return one number in [0, 1) for each row of the batch, float64 (B,) on the host.

    A counter-based generator: a number depends on the row's key, which is its seed and its index,
    and on the step, and on nothing else: not on other rows, the device, streaming or the cache.
    """
    # NumPy keeps the raw output the same for ever, but not what its distributions make of it.
    raw = [
        np.random.Philox(key=np.array(key, np.uint64), counter=step).random_raw() for key in keys
    ]
    return np.array([bits >> 11 for bits in raw]) * 2.0**-53


def repeat_penalty(
    xp: ModuleType, logits: Array, seen: Sequence[Sequence[int]], penalty: float
) -> Array:
    """Divide the logits of the ids that each row has seen by `penalty`, or multiply negative ones.

    Keskar et al., "CTRL", 2019, section 4.1.
    """
    logits = logits.copy()
    for row, text in enumerate(seen):
        ids = xp.asarray(sorted(set(text)))
        old = logits[row, ids]
        logits[row, ids] = xp.where(old > 0, old / penalty, old * penalty)
    return logits


def keep_from(xp: ModuleType, logits: Array, bound: Array) -> Array:
    """Remove the logits below bound (B, 1)."""
    return xp.where(logits >= bound, logits, -xp.inf)


def likely_columns(xp: ModuleType, logits: Array, k: int) -> Array:
    """Columns in which the k largest of each row are, and few others: cheaper than to sort a row.

    In groups of columns, k groups have a largest number that is no smaller than the k-th largest
    of these: so the k-th largest of all is no smaller, either.
    """
    B, V = logits.shape
    groups = V // GROUP
    if groups < k:
        return xp.arange(V)
    largest = logits[:, : groups * GROUP].reshape(B, GROUP, groups).max(axis=1)
    bound = xp.partition(largest, -k, axis=-1)[:, -k, None]
    return xp.flatnonzero((logits >= bound).any(axis=0))


def top_k(xp: ModuleType, logits: Array, k: int) -> Array:
    """Keep the k largest of each row."""
    k = min(k, logits.shape[-1])
    return keep_from(xp, logits, xp.partition(logits, -k, axis=-1)[:, -k, None])


def top_p(ops: Ops, logits: Array, p: float) -> Array:
    """Keep the fewest tokens, the most likely first, whose probabilities add up to p or more."""
    xp = ops.xp
    descending = xp.sort(logits, axis=-1)[:, ::-1]
    cumulated = cumulated_weights(ops, descending)
    last = (cumulated[:, :-1] < p * cumulated[:, -1:]).sum(axis=-1, keepdims=True)
    return keep_from(xp, logits, xp.take_along_axis(descending, last, axis=-1))


def min_p(xp: ModuleType, logits: Array, p: float) -> Array:
    """Keep the tokens at least p times as likely as the most likely one."""
    return keep_from(xp, logits, logits.max(axis=-1, keepdims=True) + math.log(p))


def cumulated_weights(ops: Ops, logits: Array) -> Array:
    """Running sums (B, V), float64, of weights proportional to the probabilities."""
    weights = ops.exp(logits - logits.max(axis=-1, keepdims=True))
    return ops.xp.cumsum(weights, axis=-1, dtype=np.float64)


def log_probabilities(ops: Ops, logits: Array, ids: Array) -> Array:
    """Natural logarithms of the probabilities of one token a row: ids (B,) -> (B,) float64."""
    return logits[ops.xp.arange(len(ids)), ids] - ops.log_normalizer(logits)


def likeliest(ops: Ops, logits: Array, count: int) -> tuple[Array, Array]:
    """The `count` likeliest tokens of each row, best first, and their logarithms.

    Returns:
        ids (B, count), and natural logarithms of their probabilities (B, count) float64.
    """
    xp = ops.xp
    count = min(count, logits.shape[-1])
    bound = xp.partition(logits, -count, axis=-1)[:, -count]
    rows = []
    for row, least in zip(logits, bound, strict=True):
        best = xp.flatnonzero(row >= least)  # of equal logits the lower id comes first
        rows.append(best[xp.argsort(-row[best], kind="stable")[:count]])
    ids = xp.stack(rows)
    found = xp.take_along_axis(logits, ids, axis=-1)
    return ids, found - ops.log_normalizer(logits)[:, None]


def sample(
    ops: Ops,
    logits: Array,
    uniforms: Array,
    params: SamplingParams,
    seen: Sequence[Sequence[int]],
) -> Array:
    """Choose the next token of each row.

    Args:
        ops: the operations of the device that `logits` and `uniforms` lie on.
        logits: (B, V); -inf is never chosen.
        uniforms: (B,) in [0, 1), the place of the draw in the cumulated probabilities. Not used
            where the temperature is 0.
        params: the filters.
        seen: the ids of each row so far, for the repeat penalty.

    Returns:
        ids (B,).
    """
    xp = ops.xp
    if params.repeat_penalty != 1:
        logits = repeat_penalty(xp, logits, seen, params.repeat_penalty)
    if params.temperature == 0:
        return xp.argmax(logits, axis=-1)
    logits = (logits - logits.max(axis=-1, keepdims=True)) / params.temperature
    if 0 < params.top_k < logits.shape[-1]:
        ids = likely_columns(xp, logits, params.top_k)
        logits = top_k(xp, logits[:, ids], params.top_k)
    else:
        ids = xp.arange(logits.shape[-1])
    if params.top_p < 1:
        logits = top_p(ops, logits, params.top_p)
    if params.min_p > 0:
        logits = min_p(xp, logits, params.min_p)
    cumulated = cumulated_weights(ops, logits)
    below = cumulated[:, :-1] <= (uniforms * cumulated[:, -1])[:, None]
    return ids[below.sum(axis=-1)]
