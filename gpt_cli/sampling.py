"""Logits to a token: penalty, temperature, top-k, top-p, min-p, in this order, then one draw.

The order and the meaning of each are those of transformers. Every filter is a bound: it removes
(sets to -inf) the logits below it, so tokens of equal logits stay or go together, and the most
likely token always stays.

The functions take the array namespace `xp` (NumPy's or CuPy's) of their logits (B, V).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from gpt_cli.errors import CheckpointError, InputError
from gpt_cli.ops import Array


@dataclass(frozen=True)
class SamplingParams:
    """How to choose a token.

    Raises:
        InputError: a value is outside its range.
    """

    temperature: float = 0.8  # above 0; 0 is greedy: always the most likely token
    top_k: int = 40  # keep the k most likely; 0 keeps all
    top_p: float = 0.95  # keep the fewest that together have this probability; 1 keeps all
    min_p: float = 0.0  # keep those at least this many times as likely as the most likely one
    repeat_penalty: float = 1.0  # above 1 makes what the text already has less likely

    def __post_init__(self) -> None:
        checks = {
            "temperature": 0 <= self.temperature < math.inf,
            "top-k": self.top_k >= 0,
            "top-p": 0 < self.top_p <= 1,
            "min-p": 0 <= self.min_p <= 1,
            "repeat-penalty": 0 < self.repeat_penalty < math.inf,
        }
        ranges = {
            "temperature": "0 or more",
            "top-k": "0 or more",
            "top-p": "above 0 and at most 1",
            "min-p": "between 0 and 1",
            "repeat-penalty": "above 0",
        }
        for name, valid in checks.items():
            if not valid:
                raise InputError(f"{name} must be {ranges[name]}")


def uniforms(seed: int, rows: Sequence[int], step: int) -> Array:
    """Return one number in [0, 1) for each row of the batch, float64 (B,) on the host.

    A counter-based generator keyed by (seed, row, step): a number depends on nothing else, not
    on the other rows, the device, streaming or the cache.
    """
    keys = [np.array([seed, row], np.uint64) for row in rows]
    # NumPy keeps the raw output the same for ever, but not what its distributions make of it.
    raw = [np.random.Philox(key=key, counter=step).random_raw() for key in keys]
    return np.array([bits >> 11 for bits in raw]) * 2.0**-53


def repeat_penalty(
    xp: ModuleType, logits: Array, texts: Sequence[Sequence[int]], penalty: float
) -> Array:
    """Divide the logits of the tokens of each row's text by `penalty`, or multiply negative ones.

    Keskar et al., "CTRL", 2019, section 4.1.
    """
    logits = logits.copy()
    for row, text in enumerate(texts):
        ids = xp.asarray(sorted(set(text)))
        seen = logits[row, ids]
        logits[row, ids] = xp.where(seen > 0, seen / penalty, seen * penalty)
    return logits


def keep_from(xp: ModuleType, logits: Array, bound: Array) -> Array:
    """Remove the logits below bound (B, 1)."""
    return xp.where(logits >= bound, logits, -xp.inf)


def top_k(xp: ModuleType, logits: Array, k: int) -> Array:
    """Keep the k largest of each row."""
    k = min(k, logits.shape[-1])
    return keep_from(xp, logits, xp.partition(logits, -k, axis=-1)[:, [-k]])


def top_p(xp: ModuleType, logits: Array, p: float) -> Array:
    """Keep the fewest tokens, the most likely first, whose probabilities add up to p or more."""
    descending = xp.sort(logits, axis=-1)[:, ::-1]
    cumulated = xp.cumsum(softmax(xp, descending), axis=-1)
    last = (cumulated[:, :-1] < p).sum(axis=-1, keepdims=True)
    return keep_from(xp, logits, xp.take_along_axis(descending, last, axis=-1))


def min_p(xp: ModuleType, logits: Array, p: float) -> Array:
    """Keep the tokens at least p times as likely as the most likely one."""
    return keep_from(xp, logits, logits.max(axis=-1, keepdims=True) + math.log(p))


def softmax(xp: ModuleType, logits: Array) -> Array:
    """Probabilities (B, V) in float64: sums over the vocabulary must keep their last digits."""
    weights = xp.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True, dtype=xp.float64)


def check_finite(xp: ModuleType, logits: Array) -> None:
    """Raise CheckpointError if logits are infinite or no numbers: then the weights are too."""
    if not xp.isfinite(logits.max()):
        raise CheckpointError("the model computes no finite numbers: its weights are damaged")


def log_probabilities(xp: ModuleType, logits: Array, ids: Array) -> Array:
    """Natural logarithms of the probabilities of one token a row: ids (B,) -> (B,) float64."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    chosen = xp.take_along_axis(shifted, ids[:, None], axis=-1)[:, 0]
    return chosen - xp.log(xp.exp(shifted).sum(axis=-1, dtype=xp.float64))


def sample(
    xp: ModuleType,
    logits: Array,
    uniforms: Array,
    params: SamplingParams,
    texts: Sequence[Sequence[int]],
) -> Array:
    """Choose the next token of each row.

    Args:
        xp: the array namespace of `logits` and `uniforms`.
        logits: (B, V); -inf is never chosen.
        uniforms: (B,) in [0, 1), the place of the draw in the cumulated probabilities.
        params: the filters.
        texts: the ids of each row's text so far, for the repeat penalty.

    Returns:
        ids (B,).
    """
    if params.repeat_penalty != 1:
        logits = repeat_penalty(xp, logits, texts, params.repeat_penalty)
    if params.temperature == 0:
        return xp.argmax(logits, axis=-1)
    logits = logits / params.temperature
    ids = xp.arange(logits.shape[-1])
    if 0 < params.top_k < len(ids):
        logits = top_k(xp, logits, params.top_k)
        ids = xp.flatnonzero((logits > -xp.inf).any(axis=0))  # what any row has kept: a few of
        logits = logits[:, ids]  # 50257, which makes the rest cheap
    if params.top_p < 1:
        logits = top_p(xp, logits, params.top_p)
    if params.min_p > 0:
        logits = min_p(xp, logits, params.min_p)
    cumulated = xp.cumsum(softmax(xp, logits), axis=-1)
    below = cumulated[:, :-1] <= (uniforms * cumulated[:, -1])[:, None]
    return ids[below.sum(axis=-1)]
