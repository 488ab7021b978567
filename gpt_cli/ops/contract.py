"""The operations that the model is written in: the contract of all implementations.

Shapes: B batch, T new tokens, S = past + T, H heads, D head size, C = H * D.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpt_cli.options.request import SamplingParams
from gpt_cli.system.machine import free_memory, readers

Array: TypeAlias = NDArray[Any]  # an array on the device of the ops
Matrix: TypeAlias = Any  # a matrix (n_in, n_out) in the layout of the ops that placed it
# Of the room above, for operations that compute several layers or tokens in one call.
Block: TypeAlias = Any  # `gpt2.model.Block`
Model: TypeAlias = Any  # `gpt2.model.GPT2`
Cache: TypeAlias = Any  # `gpt2.kv_cache.KVCache`


@dataclass(frozen=True)
class LayerNorm:
    """Gain and offset of one layer norm, both (C,), and the epsilon added to the variance."""

    weight: Array
    bias: Array
    epsilon: float


@dataclass(frozen=True, eq=False)  # hashable by identity
class Linear:
    """A matrix (n_in, n_out), as in GPT-2's checkpoints, and a bias (n_out,) or None."""

    weight: Matrix
    bias: Array | None = None


class AttentionSteps(NamedTuple):
    """The steps of attention (B, H, T, S): scaled scores, and their softmax."""

    scores: Array
    pattern: Array
    known_step: Literal["scores", "pattern"] | None = None  # the computation begins with it


class Rows(Protocol):
    """Rows in float32: an array on the host, or a `Tensor`, which is read a slice at a time."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the lengths of the axes."""

    def __getitem__(self, rows: slice, /) -> Array:
        """Return a range of rows."""


class Ops(ABC):
    """The operations of a device; an implementation may fuse steps inside an operation.

    The class has what NumPy and CuPy have in common.
    """

    name: str  # of the implementation, as shown to users
    dtype: str  # of the weights in memory
    cache_type: np.dtype[Any]  # of keys and values in a cache
    cache_panel: int = 1  # number of tokens per index of a cache's fourth axis
    threads: int  # of the CPU
    pass_tokens: int = 1024  # at a time, over all rows of a batch: a limit of the memory
    logits_rows: int = 128  # at a time; a row of GPT-2's takes 200 kB
    xp: ModuleType = np  # or CuPy: for what is exact in any order and no operation below
    batch_invariant: bool = False  # the bits of a token do not depend on what else is in the pass
    one_type: bool = False  # all matrices are in `dtype`; matrices of other types are rounded

    # All layers in one call, with the same bits: (x, h, visible, cache) -> x.
    layers: Callable[[Array, tuple[Block, ...], Array, Cache], Array] | None = None
    # Steps of a draft model in one call: see `NativeOps.draft`.
    draft: Callable[..., Array | None] | None = None
    # Several steps of decoding in one call: see `CuPyOps.decode`.
    decode: Callable[..., tuple[Array, Array] | None] | None = None

    def free_memory(self) -> int | None:
        """Return the free memory of the device in bytes; None if unknown."""
        return free_memory()

    def draft_ops(self) -> "DraftOps | None":
        """Return the operations of the int8 draft model; None if it would not be faster."""
        return None

    @abstractmethod
    def place_matrix(self, rows: Rows, *, transposed: bool = False) -> Matrix:
        """Convert a float32 matrix on the host to the layout that `linear` and `embed` take.

        `rows` is (n_in, n_out), or (n_out, n_in) if `transposed`.
        """

    @contextmanager
    def placing(
        self, matrices: Sequence[tuple[Rows, bool]]
    ) -> Iterator[Callable[[], list[Matrix]]]:
        """Place matrices in the background; yield a function that waits until all are placed.

        `matrices` are pairs: rows, and whether they are transposed, as for `place_matrix`. On exit,
        no more are placed.
        """
        pool = ThreadPoolExecutor(readers())
        try:
            placed = [
                pool.submit(self.place_matrix, rows, transposed=is_transposed)
                for rows, is_transposed in matrices
            ]
            yield lambda: [matrix.result() for matrix in placed]
        finally:
            pool.shutdown(cancel_futures=True)

    def to_host(self, array: Array) -> Array:
        """Copy an array from the device to the host."""
        return np.asarray(array)

    @abstractmethod
    def embed(self, wte: Matrix, wpe: Array, ids: Array, positions: Array) -> Array:
        """Return columns of wte (C, V) plus rows of wpe (n_positions, C).

        ids (B, T), positions (B or 1, T) -> (B, T, C).
        """

    @abstractmethod
    def layer_norm(self, x: Array, ln: LayerNorm) -> Array:
        """Normalize x (..., C) to mean 0 and variance 1, then apply gain and offset: (..., C)."""

    def add(self, x: Array, y: Array) -> Array:
        """Return x + y, elementwise; both have the same shape."""
        return x + y

    @abstractmethod
    def linear(self, x: Array, w: Linear, activation: str | None = None) -> Array:
        """Return activation(x @ weight + bias): x (..., n_in) -> (..., n_out)."""

    def new_cache(
        self, layers: int, batch: int, heads: int, capacity: int, size: int
    ) -> tuple[Array, Array]:
        """Return arrays for keys and values: (layers, B, H, panels of `cache_panel` tokens, ...).

        The remaining axes depend on the implementation; by default, they are D, which is `size`.
        """
        shape = layers, batch, heads, capacity, size
        # Zeros, because elements that are not yet written are multiplied by 0 and must be finite.
        return self.xp.zeros(shape, self.cache_type), self.xp.zeros(shape, self.cache_type)

    @abstractmethod
    def store(
        self, k: Array, v: Array, keys: Array, values: Array, past: Array, lengths: Array
    ) -> None:
        """Append new keys and values to one layer of a cache.

        k, v (B, H, T, D); past (B,) numbers of cached tokens; lengths (B,) numbers of new tokens,
        from 0 to T.
        """

    def copyto(self, to: Array, panels: Array) -> None:
        """Copy panels of the keys or values of a cache to another cache, which may be in float16.

        Both are (layers, B, H, a range of the panels, ...).
        """
        self.xp.copyto(to, panels)

    @abstractmethod
    def attend(self, q: Array, keys: Array, values: Array, scale: float, visible: Array) -> Array:
        """Return softmax(scale * q keysT, over the visible keys) values.

        q (B, H, T, D); keys and values are one layer of a cache; visible (B, T) numbers of keys
        that the queries see, from key 0, at least 1 -> (B, H, T, D).
        """

    def attend_in_steps(
        self,
        q: Array,
        keys: Array,
        values: Array,
        scale: float,
        visible: Array,
        steps: AttentionSteps,
    ) -> Array:
        """Return what `attend` does, and fill in its steps in place.

        If a step is known, the computation begins with it, and fills in only the one after it.
        The scores are scaled, and -inf for keys that are not visible. S is at least the largest of
        `visible`.
        """
        xp = self.xp
        scores, pattern, known_step = steps
        S = scores.shape[-1]
        k = keys[:, :, :S].astype("f4")
        v = values[:, :, :S].astype("f4")
        hidden = xp.arange(S) >= xp.asarray(visible)[:, None, :, None]
        if known_step is None:
            scores[...] = scale * (q @ k.swapaxes(-1, -2))
        if known_step != "pattern":
            scores[...] = xp.where(hidden, -xp.inf, scores)
            exponentials = xp.exp(scores - scores.max(axis=-1, keepdims=True))
            pattern[...] = exponentials / exponentials.sum(axis=-1, keepdims=True)
        return xp.where(hidden, 0, pattern) @ v

    @abstractmethod
    def activate(self, x: Array, activation: str) -> Array:
        """Return the activation of all elements, with the same bits as `linear`."""

    def exp(self, x: Array) -> Array:
        """Return e to the power of x, elementwise."""
        return self.xp.exp(x)

    def choose(self, logits: Array, uniforms: Array, params: SamplingParams) -> Array | None:
        """Return the tokens that `sampling.sample` chooses after its penalties.

        Return None if the operation cannot choose with these options.

        logits (B, V), uniforms (B,) -> ids (B,). The temperature is above 0.
        """
        return None

    @abstractmethod
    def log_normalizer(self, logits: Array) -> Array:
        """Return log(sum(exp(logits))) of the rows: logits (B, V) -> (B,) float64."""

    def cumulative_counts(self, logits: Array) -> Array:
        """Return running sums of counts, the quantized probabilities: logits (B, V) -> int64.

        The count of a token is 1 + floor(2^30 e^(logit - the largest logit)). Sums of integers are
        exact, so their order does not matter.
        """
        weights = self.exp(logits - logits.max(axis=-1, keepdims=True))
        counts = (weights * np.float32(2**30)).astype(np.int64) + 1
        return self.xp.cumsum(counts, axis=-1)


class DraftOps(Ops):
    """The operations of the int8 draft model."""

    @abstractmethod
    def quantize(self, matrix: Matrix) -> Matrix:
        """Convert a matrix of the model to int8."""
