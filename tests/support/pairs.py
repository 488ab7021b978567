"""The operations on a GPU, or on `emulated_cuda`, beside those of the C library."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from gpt_cli.folder.dtypes import SHORT
from gpt_cli.gpt2.kv_cache import KVCache
from gpt_cli.gpt2.model import forward, hidden_states, unembed
from gpt_cli.ops import Array, LayerNorm, Linear, Ops, get_ops
from gpt_cli.ops.short import RoundedRows
from gpt_cli.options.request import SamplingParams
from gpt_cli.system import gpu
from support import emulated_cuda
from support.emulated_kernels import Card
from support.models import DTYPES, model_of
from support.native_arrays import array, assert_same_bits

DEVICES = [
    *(("emulated", dtype) for dtype in DTYPES),
    *(pytest.param(("gpu", dtype), marks=pytest.mark.gpu) for dtype in DTYPES),
]


@dataclass(frozen=True)
class Pair:
    """The operations of a GPU and of the CPU, with weights of one dtype."""

    gpu: Ops
    cpu: Ops

    def assert_same(self, compute: Callable[[Ops], Any]) -> None:
        """Compare what a function computes with both, to the last bit."""
        assert_same(compute(self.gpu), compute(self.cpu))

    def models(self, **changes: Any) -> list[Any]:
        """Return the same model on the GPU and on the CPU."""
        return [model_of(ops, weights_of=ops.dtype, **changes) for ops in (self.gpu, self.cpu)]


def assert_same(found: Any, expected: Any) -> None:
    """Compare arrays, on any device, or tuples and lists of them."""
    if isinstance(expected, tuple | list):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            assert_same(*pair)
    elif isinstance(expected, np.ndarray):
        host = found if isinstance(found, np.ndarray) else found.get()
        assert_same_bits(host, expected)
    else:
        assert found == expected


@contextmanager
def pair_on(device: str, dtype: str, cpu: Ops, card: Card | None = None) -> Iterator[Pair]:
    """Yield the operations of a GPU, or of an emulated card, beside those of the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GPT_CLI_OPS", raising=False)
        if device == "emulated":
            emulated_cuda.install(patch, card or Card())
        elif problem := gpu.problem():
            pytest.exit(f"nothing was tested: {problem}", returncode=1)
        yield Pair(get_ops("cuda", dtype), cpu)


# --- arguments of the operations -----------------------------------------------------------------


def placed(ops: Ops, rows: Array, *, transposed: bool = False) -> Any:
    """Return a matrix in the dtype of the operations; 16-bit ones round float32."""
    rounded = RoundedRows(rows, ops.dtype) if ops.dtype in SHORT else rows
    return ops.place_matrix(rounded, transposed=transposed)


def linear_of(
    ops: Ops, rows: Array, bias: Array | None = None, *, transposed: bool = False
) -> Linear:
    """Return a linear layer on the device of the operations."""
    matrix = placed(ops, rows, transposed=transposed)
    return Linear(matrix, None if bias is None else ops.xp.asarray(bias))


def norm_of(ops: Ops, C: int, seed: int) -> LayerNorm:
    """Return a layer norm of random weights."""
    weight, bias = (ops.xp.asarray(array(name, C, seed=seed)) for name in ("weight", "bias"))
    return LayerNorm(weight, bias, 1e-5)


def stored(ops: Ops, k: Array, v: Array, counts: list[Array], capacity: int) -> list[Array]:
    """Return a layer of a cache with keys and values (B, H, S, D), stored some at a time.

    A row stores `counts[i][row]` of them in step i. What is not stored is NaN.
    """
    B, H, _, D = k.shape
    layer = [layers[0] for layers in ops.new_cache(1, B, H, capacity, D)]
    for part in layer:
        part[...] = np.nan
    past = np.zeros(B, np.int64)
    for count in counts:
        T = int(count.max())
        new = np.full((2, B, T, H, D), np.nan, np.float32)
        for row in range(B):
            for to, source in zip(new, (k, v), strict=True):
                rows = source[row, :, past[row] : past[row] + count[row]]
                to[row, : count[row]] = rows.swapaxes(0, 1)
        views = ops.xp.asarray(new).transpose(0, 1, 3, 2, 4)
        ops.store(views[0], views[1], *layer, past, count)
        past = past + count
    return layer


# --- whole models --------------------------------------------------------------------------------


def random_ids(B: int, T: int, seed: int = 0) -> Array:
    """Return ids (B, T) of tokens that every vocabulary here has."""
    return np.random.default_rng(seed).integers(0, 256, (B, T))


def logits_in_chunks(model: Any, ids: Array, chunks: list[Array]) -> list[Array]:
    """Return the logits of the real tokens of each chunk, on the host.

    A row takes `chunks[i][row]` of its ids in chunk i.
    """
    ops = model.ops
    cache = KVCache(model.config, ops, *ids.shape)
    past, logits = np.zeros(len(ids), np.int64), []
    for new in chunks:
        part = np.zeros((len(ids), int(new.max())), np.int64)
        for row, count in enumerate(new):
            part[row, :count] = ids[row, past[row] : past[row] + count]
        x = hidden_states(model, ops.xp.asarray(part), cache, new)
        logits += [ops.to_host(unembed(model, x[row, :n])) for row, n in enumerate(new) if n]
        past = past + new
    return logits


def decoded(
    model: Any, lengths: Array, uniforms: Array, banned: Array, params: SamplingParams
) -> tuple[Array, ...] | None:
    """Return what `decode` does for texts of these lengths, and the logits of the next pass."""
    ops, (steps, B) = model.ops, uniforms.shape
    cache = KVCache(model.config, ops, B, int(lengths.max()) + steps + 2)
    ids = random_ids(B, int(lengths.max()) + 1)
    hidden_states(model, ops.xp.asarray(ids[:, :-1]), cache, lengths)
    last = ids[:, -1]
    if ops.decode is not None:
        chosen = ops.decode(model, cache, last, uniforms, ops.xp.asarray(banned), params)
        if chosen is None:
            return None
        cache.lengths = cache.lengths + steps
    else:
        chosen = _one_by_one(model, cache, last, uniforms, banned, params)
    return *chosen, ops.to_host(forward(model, ops.xp.asarray(chosen[0][-1:].T), cache))


def _one_by_one(
    model: Any,
    cache: KVCache,
    last: Array,
    uniforms: Array,
    banned: Array,
    params: SamplingParams,
) -> tuple[Array, Array]:
    """Return the tokens that `decode` chooses, and the logarithms of their probabilities."""
    ids, logprobs, ops = [], [], model.ops
    for draws in uniforms:
        logits = forward(model, last[:, None], cache)[:, -1]
        masked = logits.copy()
        masked[:, banned] = -np.inf
        last = ops.choose(masked, draws, params)
        rows = np.arange(len(last))
        ids.append(last)
        logprobs.append(logits[rows, last] - ops.log_normalizer(logits))
    return np.array(ids), np.array(logprobs)
