"""Logits to a token: bias, penalties, temperature, top-k, top-p, min-p, typical-p, then one draw.

The filters have the meaning and the order of transformers. Each sets the logits below a bound to
-inf, so tokens of equal logits stay or go together, and the most likely token always stays.
Sums over the vocabulary are running sums: a removed token and a probability of zero give the same
bits. (A filter must not use `ops.log_normalizer`, whose sums have another order.)

What runs on a GPU gives the CPU's bits: `xp` only compares, sorts, selects, counts, and adds,
multiplies or divides elementwise. `ops` computes exponentials, and NumPy sums of fractions.

CONTRIBUTING.md says how to add an option.
"""

import math
from collections import Counter
from collections.abc import Sequence
from types import ModuleType

import numpy as np

from gpt_cli.ops import Array, Ops
from gpt_cli.options.request import SamplingParams

BAND = 64  # columns of logits: see `likely_columns`


def uniforms(key: tuple[int, int], first: int, count: int) -> Array:
    """Return the random numbers of a row from step `first` on: float64 in [0, 1), on the host.

    The generator is counter-based: a number depends only on the row's key, (seed, index), and on
    its step, not on other rows, the device or the cache.
    """
    # NumPy guarantees that the raw output stays the same, but not that of its distributions. A step
    # has one counter, which gives four numbers.
    raw = np.random.Philox(key=np.array(key, np.uint64), counter=first).random_raw(4 * count)
    return (raw[::4] >> 11) * 2.0**-53


def repeat_penalty(
    xp: ModuleType, logits: Array, seen: Sequence[Sequence[int]], penalty: float
) -> Array:
    """Divide the logits of the ids that a row has seen by `penalty`, or multiply negative ones.

    Keskar et al., "CTRL", 2019, section 4.1.
    """
    logits = logits.copy()
    for row, text in enumerate(seen):
        ids = xp.asarray(sorted(set(text)))
        old = logits[row, ids]
        logits[row, ids] = xp.where(old > 0, old / penalty, old * penalty)
    return logits


def generated_penalty(
    logits: Array, generated: Sequence[Sequence[int]], presence: float, frequency: float
) -> Array:
    """Lower the logits of the ids that a row has generated, as OpenAI's completions do.

    The logit of a token that was generated n times falls by `presence` + n * `frequency`.
    """
    logits = logits.copy()
    for row, ids in enumerate(generated):
        for id, count in Counter(ids).items():
            logits[row, id] -= presence + count * frequency
    return logits


def ban_repeats(xp: ModuleType, logits: Array, seen: Sequence[Sequence[int]], size: int) -> Array:
    """Remove the ids that would end `size` ids that a text has already, unless no other may."""
    logits = logits.copy()
    for row, text in zip(logits, seen, strict=True):
        last = tuple(text[len(text) - size + 1 :])
        ngrams = zip(*(text[start:] for start in range(size)), strict=False)
        banned = xp.asarray([ngram[-1] for ngram in ngrams if ngram[:-1] == last], "int64")
        kept = row.copy()
        kept[banned] = -xp.inf
        if kept.max() > -xp.inf:
            row[:] = kept
    return logits


def keep_from(xp: ModuleType, logits: Array, bound: Array) -> Array:
    """Remove the logits below bound (B, 1)."""
    return xp.where(logits >= bound, logits, -xp.inf)


def likely_columns(xp: ModuleType, logits: Array, k: int) -> Array:
    """Return the columns that hold the k largest of every row, and few others, without a sort.

    The columns form bands. The k-th largest of the bands' largest numbers is at most the k-th
    largest of the row.
    """
    B, V = logits.shape
    bands = V // BAND
    if bands < k:
        return xp.arange(V)
    largest = logits[:, : bands * BAND].reshape(B, BAND, bands).max(axis=1)
    bound = xp.partition(largest, -k, axis=-1)[:, -k, None]
    return xp.flatnonzero((logits >= bound).any(axis=0))


def top_k(xp: ModuleType, logits: Array, k: int) -> Array:
    """Keep the k largest of every row."""
    k = min(k, logits.shape[-1])
    return keep_from(xp, logits, xp.partition(logits, -k, axis=-1)[:, -k, None])


def top_p(ops: Ops, logits: Array, p: float) -> Array:
    """Keep the fewest tokens, the most likely first, whose probabilities add up to p or more."""
    xp = ops.xp
    descending = xp.sort(logits, axis=-1)[:, ::-1]
    last = xp.asarray(last_needed(cumulated_weights(ops, descending), p))
    return keep_from(xp, logits, xp.take_along_axis(descending, last, axis=-1))


def min_p(xp: ModuleType, logits: Array, p: float) -> Array:
    """Keep the tokens at least p times as likely as the most likely one."""
    return keep_from(xp, logits, logits.max(axis=-1, keepdims=True) + math.log(p))


def typical_p(ops: Ops, logits: Array, p: float) -> Array:
    """Keep the fewest tokens, of nearly the expected surprise, whose probabilities add up to p.

    Meister et al., "Locally Typical Sampling", 2022.
    """
    xp = ops.xp
    shifted = logits - logits.max(axis=-1, keepdims=True)
    weights = ops.exp(shifted).astype("float64")
    weighted = weights * xp.where(weights > 0, shifted, 0)
    mean = running_sums(ops, weighted)[:, -1:] / running_sums(ops, weights)[:, -1:]
    # The surprise is the normalizer - shifted, and its mean, the entropy, the normalizer - mean.
    distance = xp.abs(shifted - xp.asarray(mean))
    order = xp.argsort(distance, axis=-1, kind="stable")
    ordered = xp.take_along_axis(weights, order, axis=-1)
    last = xp.asarray(last_needed(running_sums(ops, ordered), p))
    bound = xp.take_along_axis(distance, xp.take_along_axis(order, last, axis=-1), axis=-1)
    return xp.where(distance <= bound, logits, -xp.inf)


def last_needed(cumulated: Array, p: float) -> Array:
    """Return where running sums (B, V) reach the share p of the last: indices (B, 1), on the host.

    `cumulated` is on the host, too.
    """
    return (cumulated[:, :-1] < p * cumulated[:, -1:]).sum(axis=-1, keepdims=True)


def cumulated_weights(ops: Ops, logits: Array) -> Array:
    """Return `running_sums` of weights proportional to the probabilities: (B, V)."""
    return running_sums(ops, ops.exp(logits - logits.max(axis=-1, keepdims=True)))


def running_sums(ops: Ops, weights: Array) -> Array:
    """Return running sums (B, V), float64, on the host: those of CuPy have another order."""
    return np.cumsum(ops.to_host(weights), axis=-1, dtype=np.float64)


def adjust(
    xp: ModuleType,
    logits: Array,
    params: SamplingParams,
    seen: Sequence[Sequence[int]],
    generated: Sequence[Sequence[int]],
) -> Array:
    """Apply bias, penalties and bans to the logits or log-probabilities (B, V) of rows.

    `seen` are the ids of the rows so far, and `generated` are those that were generated.
    """
    if params.logit_bias:
        columns, biases = zip(*params.logit_bias, strict=True)
        logits = logits.copy()
        logits[:, list(columns)] += xp.asarray(biases, logits.dtype)
    if params.repeat_penalty != 1:
        logits = repeat_penalty(xp, logits, seen, params.repeat_penalty)
    if params.no_repeat_ngram:
        logits = ban_repeats(xp, logits, seen, params.no_repeat_ngram)
    presence = params.presence_penalty
    frequency = params.frequency_penalty
    if presence or frequency:
        logits = generated_penalty(logits, generated, presence, frequency)
    return logits


def sample(
    ops: Ops,
    logits: Array,
    uniforms: Array,
    params: SamplingParams,
    seen: Sequence[Sequence[int]],
    generated: Sequence[Sequence[int]] = (),
) -> Array:
    """Sample the next tokens of rows: logits (B, V) -> ids (B,). -inf is never chosen.

    `uniforms` (B,) in [0, 1) are the draws, as fractions of the cumulated probabilities; they are
    not used if the temperature is 0. For `seen` and `generated`, see `adjust`.
    """
    xp = ops.xp
    logits = adjust(xp, logits, params, seen, generated)
    if params.temperature == 0:
        return xp.argmax(logits, axis=-1)
    chosen = ops.choose(logits, uniforms, params) if params.kernels_filter else None
    if chosen is not None:
        return chosen
    # Top-k comes first, since the other steps are cheaper for few columns. The temperature does not
    # change which are largest.
    if 0 < params.top_k < logits.shape[-1]:
        ids = likely_columns(xp, logits, params.top_k)
        logits = top_k(xp, logits[:, ids], params.top_k)
    else:
        ids = xp.arange(logits.shape[-1])
    logits = (logits - logits.max(axis=-1, keepdims=True)) / params.temperature
    if params.top_p < 1:
        logits = top_p(ops, logits, params.top_p)
    if params.min_p > 0:
        logits = min_p(xp, logits, params.min_p)
    if params.typical_p < 1:
        logits = typical_p(ops, logits, params.typical_p)
    cumulated = cumulated_weights(ops, logits)
    below = cumulated[:, :-1] <= (ops.to_host(uniforms) * cumulated[:, -1])[:, None]
    return ids[xp.asarray(below.sum(axis=-1))]
