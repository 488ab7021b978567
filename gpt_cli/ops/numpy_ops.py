"""The reference implementation: the operations as their formulas say, in float32.

Operations modify only arrays that they have created.
"""

import math
from collections.abc import Callable

import numpy as np

from gpt_cli.folder.dtypes import WEIGHT_TYPES
from gpt_cli.ops.contract import Array, LayerNorm, Linear, Ops, Rows
from gpt_cli.ops.int8 import Int8Rows, quantize, round_activations
from gpt_cli.system.machine import blas_threads

QUERIES = 64  # per group in `attend`
MASKED = np.finfo(np.float32).min


def softmax(x: Array) -> Array:
    """Compute the softmax over the last axis, in x."""
    x -= x.max(axis=-1, keepdims=True)
    np.exp(x, out=x)
    x /= x.sum(axis=-1, keepdims=True)
    return x


def gelu_new(x: Array) -> Array:
    """Return x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), as GPT-2 was trained."""
    y = x * x
    y *= 0.044715
    y += 1
    y *= x
    y *= math.sqrt(2 / math.pi)
    np.tanh(y, out=y)
    y += 1
    y *= x
    y *= 0.5
    return y


# erfc by Chebyshev fitting, relative error below 1.2e-7 everywhere: W. H. Press et al., Numerical
# Recipes, section 6.2 ("erfcc"). NumPy has no erf.
_ERFC = (
    0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807,
    -0.18628806, 0.09678418, 0.37409196, 1.00002368, -1.26551223,
)  # fmt: skip


def erfc(x: Array) -> Array:
    """Return 1 - erf(x)."""
    z = np.abs(x)
    t = 1 / (1 + 0.5 * z)
    series = np.zeros_like(x)
    for coefficient in _ERFC:
        series = series * t + coefficient
    y = t * np.exp(series - z * z)
    return np.where(x >= 0, y, 2 - y)


def gelu(x: Array) -> Array:
    """Return x times the standard normal CDF of x."""
    return 0.5 * x * erfc(x * -math.sqrt(0.5))


def silu(x: Array) -> Array:
    """Return x times the logistic function of x, by tanh, which cannot overflow."""
    return 0.5 * x * (1 + np.tanh(0.5 * x))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu_new": gelu_new,
    "gelu": gelu,
    "relu": lambda x: np.maximum(x, 0),
    "silu": silu,
    "tanh": np.tanh,
}


class NumPyOps(Ops):
    """The reference operations on the CPU.

    With int8 weights, they round weights and activations, and multiply in float32.
    """

    name = "numpy"

    def __init__(self, dtype: str = "float32"):
        self.dtype = dtype
        self.threads = blas_threads()
        self.cache_type = np.dtype(f"f{WEIGHT_TYPES[dtype].cache_itemsize}")
        self._has_groups = WEIGHT_TYPES[dtype].has_groups

    def place_matrix(self, rows: Rows, *, transposed: bool = False) -> Array:
        if self._has_groups and not isinstance(rows, Int8Rows):
            rows = quantize(rows[:], transposed=transposed)
        return rows[:].T if transposed else rows[:]

    def embed(self, wte: Array, wpe: Array, ids: Array, positions: Array) -> Array:
        x: Array = wte.T[ids]
        x += wpe[positions]
        return x

    def layer_norm(self, x: Array, ln: LayerNorm) -> Array:
        y: Array = x - x.mean(axis=-1, keepdims=True)
        y /= np.sqrt(np.square(y).mean(axis=-1, keepdims=True) + ln.epsilon)
        y *= ln.weight
        y += ln.bias
        return y

    def linear(self, x: Array, w: Linear, activation: str | None = None) -> Array:
        if self._has_groups:
            x = round_activations(x)
        y = x.reshape(-1, x.shape[-1]) @ w.weight
        if w.bias is not None:
            y += w.bias
        if activation is not None:
            y = ACTIVATIONS[activation](y)
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def activate(self, x: Array, activation: str) -> Array:
        return ACTIVATIONS[activation](x)

    def store(
        self, k: Array, v: Array, keys: Array, values: Array, past: Array, lengths: Array
    ) -> None:
        for row, (start, new) in enumerate(zip(past.tolist(), lengths.tolist(), strict=True)):
            keys[row, :, start : start + new] = k[row, :, :new]
            values[row, :, start : start + new] = v[row, :, :new]

    def attend(self, q: Array, keys: Array, values: Array, scale: float, visible: Array) -> Array:
        T = q.shape[2]
        attended: Array = np.empty(q.shape, np.float32)
        # In groups of queries: the scores stay in the processor's cache, and keys that come after
        # all queries of a group are skipped.
        for start in range(0, T, QUERIES):
            group = slice(start, start + QUERIES)
            seen = visible[:, group]  # (B, <T)
            S = int(seen.max(initial=0))
            k = keys[:, :, :S].astype(np.float32, copy=False)
            v = values[:, :, :S].astype(np.float32, copy=False)
            scores = q[:, :, group] @ k.swapaxes(-1, -2)
            scores *= scale  # (B, H, <T, S)
            if seen.min(initial=S) < S:
                np.copyto(scores, MASKED, where=np.arange(S) >= seen[:, None, :, None])
            np.matmul(softmax(scores), v, out=attended[:, :, group])
        return attended

    def log_normalizer(self, logits: Array) -> Array:
        peaks = logits.max(axis=-1)
        # Row by row: a row of GPT-2's vocabulary fits in the processor's cache.
        rows = zip(logits, peaks, strict=True)
        return peaks + np.log([np.exp(row - peak).sum(dtype=np.float64) for row, peak in rows])
