"""The operations on the CPU, by the C library in `native/`: layouts, checks and calls.

This module checks everything that the C code relies on: shapes, types, strides. The result for a
row depends only on that row, so its bits are the same in any batch, with any number of threads, and
at any level of the processor.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from gpt_cli.folder.dtypes import GROUP, WEIGHT_TYPES
from gpt_cli.ops import bindings, packing
from gpt_cli.ops.bindings import FLOAT32, INT64, Struct, check, contiguous, readable
from gpt_cli.ops.contract import (
    Array,
    AttentionSteps,
    Block,
    Cache,
    DraftOps,
    LayerNorm,
    Linear,
    Model,
    Rows,
)
from gpt_cli.ops.kernels import ACTIVATIONS, KNOWN_STEPS, LARGEST_TOP_K, strides
from gpt_cli.ops.memory import Arena, Workspace, address
from gpt_cli.ops.packing import Packed
from gpt_cli.options.request import SamplingParams
from gpt_cli.system.machine import MOST_THREADS, threads

_BYTE = np.dtype("u1")
_CACHE_LINE = 64  # bytes


class NativeOps(DraftOps):
    """The operations on the CPU.

    Weights are in float32, in bfloat16 or float16 (see `gpt_cli.ops.short`), or in int8.
    """

    name = "native"
    batch_invariant = True

    def __init__(self, dtype: str = "float32"):
        layout = bindings.layout()
        self.level = bindings.choose_level()
        self.dtype = dtype
        self._kind = WEIGHT_TYPES[dtype]
        self.cache_type = np.dtype(f"f{self._kind.cache_itemsize}")
        self._half = self.cache_type != FLOAT32
        self.cache_panel: int = layout.columns
        self._tile_rows = layout.max_tile_rows
        self._row_padding = layout.row_padding
        self._digits_bytes = layout.digits_bytes  # of a group of numbers
        self.threads = min(threads(), MOST_THREADS)
        self._weights = Arena()
        self._workspace = Workspace()

    def free_memory(self) -> int | None:
        free = super().free_memory()
        return None if free is None else free + self._workspace.free_bytes()

    def draft_ops(self) -> DraftOps | None:
        if self._kind.has_groups:
            return None
        ops = NativeOps("int8")
        ops.threads = self.threads
        return ops

    # --- weights ---------------------------------------------------------------------------------

    def place_matrix(self, rows: Rows, *, transposed: bool = False) -> Packed:
        return packing.pack(rows, self.dtype, self._weights, transposed=transposed)

    @contextmanager
    def placing(
        self, matrices: Sequence[tuple[Rows, bool]]
    ) -> Iterator[Callable[[], list[Packed]]]:
        with packing.packing(matrices, self.dtype, self._weights, self.threads) as wait:
            yield wait

    def quantize(self, matrix: Packed) -> Packed:
        # The results have the bits of `int8.quantize`.
        right = self._kind.has_groups and not matrix.has_groups
        check(right, "the matrix", matrix.panels)
        packed = Packed(matrix.n_in, matrix.n_out, self.dtype, self._weights)
        bindings.Quantize(w=matrix.struct, to=packed.struct).run(self.threads)
        return packed

    # --- operations ------------------------------------------------------------------------------

    def embed(self, wte: Packed, wpe: Array, ids: Array, positions: Array) -> Array:
        ids = contiguous(ids, INT64)
        if positions.shape != ids.shape:
            positions = np.broadcast_to(positions, ids.shape)
        x = self._workspace.empty((*ids.shape, wte.n_in), FLOAT32)
        if self._embed(wte, wpe, ids, contiguous(positions, INT64), x).run(self.threads):
            raise IndexError(f"an id or a position is out of range: {wte.n_out}, {len(wpe)}")
        return x

    def _embed(self, wte: Packed, wpe: Array, ids: Array, positions: Array, x: Array) -> Struct:
        wpe = contiguous(wpe, FLOAT32)
        check(wpe.ndim == 2 and wpe.shape[1] == wte.n_in, "wpe", wpe)
        return bindings.Embed(
            wte=wte.struct, wpe=wpe, ids=ids, positions=positions, x=x,
            tokens=ids.size, n_positions=len(wpe),
        )  # fmt: skip

    def layer_norm(self, x: Array, ln: LayerNorm) -> Array:
        rows = _rows_of(x)
        y = self._empty_rows(*rows.shape)
        self._layer_norm(rows, ln, y).run(self.threads)
        return y.reshape(x.shape)

    def _layer_norm(self, x: Array, ln: LayerNorm, y: Array) -> Struct:
        rows, C = x.shape
        return bindings.LayerNormRows(norm=bindings.norm_of(ln, C), x=x, y=y, rows=rows, C=C)

    def linear(self, x: Array, w: Linear, activation: str | None = None) -> Array:
        rows = _rows_of(x)
        packed: Packed = w.weight
        y = self._empty_rows(len(rows), packed.width)
        self._linear(rows, w, y, activation).run(self.threads)
        return y[:, : packed.n_out].reshape(*x.shape[:-1], packed.n_out)

    def _linear(self, x: Array, w: Linear, y: Array, activation: str | None = None) -> Struct:
        packed: Packed = w.weight
        has_groups = self._kind.has_groups
        check(packed.has_groups == has_groups, "the weight", packed.panels)
        check(x.shape[1] == packed.n_in, "x", x)
        scratch = None
        if has_groups:
            size = len(x) * (-(-packed.n_in // GROUP) * self._digits_bytes + 4)
            scratch = self._workspace.empty((size,), _BYTE)
        bias = None if w.bias is None else bindings.vector_of(w.bias, packed.n_out)
        return bindings.LinearRows(
            w=packed.struct, bias=bias, x=x, y=y, scratch=scratch, rows=len(x),
            activation=ACTIVATIONS.index(activation),
        )  # fmt: skip

    def new_cache(
        self, layers: int, batch: int, heads: int, capacity: int, size: int
    ) -> tuple[Array, Array]:
        # Keys (layers, B, H, panels, D, COLUMNS), values (layers, B, H, panels, COLUMNS, width), as
        # `struct store` in native/kernels.h says; `width` is D padded to whole panels.
        columns = self.cache_panel
        shape = layers, batch, heads, -(-capacity // columns)
        keys_shape = (*shape, size, columns)
        values_shape = (*shape, columns, self._padded(size))
        keys = self._workspace.empty(keys_shape, self.cache_type, waste=2)
        return keys, self._workspace.empty(values_shape, self.cache_type, waste=2)

    def store(
        self, k: Array, v: Array, keys: Array, values: Array, past: Array, lengths: Array
    ) -> None:
        B, H, T, D = k.shape
        k, v = readable(k), readable(v)
        if k.strides != v.strides:
            k, v = np.ascontiguousarray(k), np.ascontiguousarray(v)
        cache = self._cache(keys, values, B, H, D)
        past, lengths = _counts_of(past, (B,)), _counts_of(lengths, (B,))
        check(v.shape == k.shape, "v", v)
        call = bindings.Store(k=k, v=v, past=past, lengths=lengths, T=T, **strides(k), **cache)
        if call.run(self.threads):
            raise IndexError(f"the cache has room for {_capacity(keys)} tokens")

    def attend(self, q: Array, keys: Array, values: Array, scale: float, visible: Array) -> Array:
        return self._attend(q, keys, values, visible, scale=scale)

    def attend_in_steps(
        self,
        q: Array,
        keys: Array,
        values: Array,
        scale: float,
        visible: Array,
        steps: AttentionSteps,
    ) -> Array:
        scores, pattern = steps.scores, steps.pattern
        for array in (scores, pattern):
            right = array.shape[:3] == q.shape[:3] and array.shape == scores.shape
            check(right and array.dtype == FLOAT32 and array.flags.c_contiguous, "steps", array)
        return self._attend(
            q, keys, values, visible, scale=scale, S=scores.shape[3], scores=scores,
            pattern=pattern, known_step=KNOWN_STEPS.index(steps.known_step),
        )  # fmt: skip

    def _attend(self, q: Array, keys: Array, values: Array, visible: Array, **fields: Any) -> Array:
        B, H, T, D = q.shape
        q = readable(q)
        cache = self._cache(keys, values, B, H, D)
        y = self._empty_rows(B * T, H * D)
        shape = self.threads, min(T, self._tile_rows), _capacity(keys) + self._row_padding
        scratch = self._workspace.empty(shape, FLOAT32)
        call = bindings.Attend(
            q=q, visible=_counts_of(visible, (B, T)), T=T, y=y, scratch=scratch,
            **strides(q), **cache, **fields,
        )  # fmt: skip
        if call.run(self.threads):
            raise IndexError(f"visible must be from 1 to {_capacity(keys)} keys")
        return y.reshape(B, T, H, D).swapaxes(1, 2)

    def _cache(self, keys: Array, values: Array, B: int, H: int, D: int) -> dict[str, Any]:
        """Check one layer of a cache; return its fields of `struct store` and `struct attend`."""
        panels, columns = keys.shape[2], self.cache_panel
        for array, shape in ((keys, (D, columns)), (values, (columns, self._padded(D)))):
            right = array.shape == (B, H, panels, *shape) and array.dtype == self.cache_type
            check(right and array.flags.c_contiguous, "a layer of the cache", array)
        fields = {"keys": keys, "values": values, "cache_panels": panels, "half": self._half}
        return fields | {"B": B, "H": H, "D": D}

    def copyto(self, to: Array, panels: Array) -> None:
        if not self._half:
            super().copyto(to, panels)
            return
        # A draft model copies from a cache in float32: NumPy takes 15 times as long to round.
        layers, B, H = to.shape[:3]
        for array, dtype in ((panels, FLOAT32), (to, self.cache_type)):
            alike = array.shape == to.shape and array.dtype == dtype
            runs = array.strides[1] == H * array.strides[2] and array[0, 0, 0].flags.c_contiguous
            check(alike and runs, "a cache", array)
        stride = to.strides[2] // 2
        n = math.prod(to.shape[3:])
        check(panels.strides[2] == 4 * stride and n % self.cache_panel == 0, "a cache", panels)
        for layer in range(layers):
            start = address(panels) + layer * panels.strides[0]
            target = address(to) + layer * to.strides[0]
            bindings.Narrow(x=start, y=target, rows=B * H, stride=stride, n=n).run(self.threads)

    def layers(self, x: Array, h: tuple[Block, ...], visible: Array, cache: Cache) -> Array:
        B, T, C = x.shape
        past, lengths = _counts_of(cache.lengths, (B,)), _counts_of(cache.new, (B,))
        seen = _counts_of(visible, (B, T))
        call = self._all_layers(h, _rows_of(x), cache, seen, past, lengths)
        # After the scratch, which is larger and could not reuse the memory of y.
        y = self._empty_rows(B * T, C)
        call.point("y", y)
        if call.run(self.threads):
            capacity = _capacity(cache.keys[0])
            raise IndexError(f"too many tokens for a cache of {capacity}, or a pass of {T}")
        return y.reshape(x.shape)

    def _all_layers(
        self,
        h: tuple[Block, ...],
        x: Array,
        cache: Cache,
        visible: Array,
        past: Array,
        lengths: Array,
    ) -> Struct:
        """Return all layers as one operation on x (B * T, C); its y must be set."""
        layers = bindings.layers_of(h)
        keys, values = cache.keys, cache.values
        B, T = visible.shape
        C, H = layers.width, h[0].attn.n_head
        check(x.shape[1] == C, "x", x)
        check(len(keys) == len(values) and len(keys) in (1, len(h)), "keys", keys)
        has_layers = len(keys) > 1  # else all layers use the same memory, one after the other
        call = bindings.AllLayers(
            blocks=layers.struct, x=x, visible=visible, past=past, lengths=lengths,
            n_layer=len(h), T=T, keys_bytes=keys.strides[0] if has_layers else 0,
            values_bytes=values.strides[0] if has_layers else 0,
            **self._cache(keys[0], values[0], B, H, C // H),
        )  # fmt: skip
        size = bindings.layers_scratch(call, self.threads) + _CACHE_LINE
        scratch = self._workspace.empty((size,), _BYTE)
        call.point("scratch", scratch[-address(scratch) % _CACHE_LINE :])
        return call

    def activate(self, x: Array, activation: str) -> Array:
        x = np.ascontiguousarray(x, FLOAT32)
        y = self._workspace.empty(x.shape, FLOAT32)
        kind = ACTIVATIONS.index(activation)
        bindings.Activate(x=x, y=y, n=x.size, activation=kind).run(self.threads)
        return y

    def exp(self, x: Array) -> Array:
        # Accurate to one ulp; 0 below -87.
        x = np.ascontiguousarray(x, FLOAT32)
        y = np.empty(x.shape, FLOAT32)
        bindings.Exp(x=x, y=y, n=x.size).run(self.threads)
        return y

    def log_normalizer(self, logits: Array) -> Array:
        rows = _rows_of(logits)
        normalizer = np.empty(len(rows))
        bindings.LogSumExp(x=rows, y=normalizer, rows=len(rows), n=rows.shape[1]).run(self.threads)
        return normalizer

    def cumulative_counts(self, logits: Array) -> Array:
        rows = _rows_of(logits)
        sums = self._workspace.empty(rows.shape, INT64)
        bindings.Cumulate(logits=rows, sums=sums, rows=len(rows), n=rows.shape[1]).run(self.threads)
        return sums

    def choose(self, logits: Array, uniforms: Array, params: SamplingParams) -> Array | None:
        n = logits.shape[-1]
        if not 0 < params.top_k <= min(n, LARGEST_TOP_K):
            return None
        rows = _rows_of(logits)
        draws = contiguous(uniforms, bindings.FLOAT64)
        check(draws.shape == (len(rows),), "uniforms", draws)
        ids = np.empty(len(rows), INT64)
        self._choose(rows, draws, ids, params).run(self.threads)
        return ids

    def _choose(self, logits: Array, uniforms: Array, ids: Array, params: SamplingParams) -> Struct:
        rows, n = logits.shape
        scratch = self._workspace.empty((self.threads, 4 * n), FLOAT32)
        return bindings.Choose(
            logits=logits, uniforms=uniforms, ids=ids, scratch=scratch, rows=rows, n=n,
            top_k=params.top_k, top_p=params.top_p, log_min_p=params.log_min_p,
            temperature=params.temperature,
        )  # fmt: skip

    def draft(
        self,
        model: Model,
        cache: Cache,
        last: Array,
        uniforms: Array,
        banned: Array,
        params: SamplingParams,
    ) -> Array | None:
        """Draft tokens one after the other; return None if C cannot draw with this top-k.

        last (B,) last tokens of texts, uniforms (count, B) draws -> ids (count, B). `cache` has the
        tokens of the texts before these. The ids in `banned` are never drafted. The temperature is
        above 0. Keys and values are appended beyond the lengths of the cache, which stay. Results
        that are not finite give an arbitrary draft. (Steps in Python took 1.5 times as long.)
        """
        head = model.lm_head
        C, V = model.wte.n_in, head.weight.n_out
        count, B = uniforms.shape
        if not 0 < params.top_k <= min(V, LARGEST_TOP_K):
            return None
        check(len(cache.keys) == len(cache.values) == len(model.h), "keys", cache.keys)
        check(not banned.size or 0 <= banned.min() <= banned.max() < V, "banned", banned)
        check(cache.lengths.shape == last.shape == (B,), "last", last)
        ids = np.empty((count + 1, B), INT64)
        ids[0] = last
        banned = contiguous(banned, INT64)
        draws = contiguous(uniforms, bindings.FLOAT64)
        positions = cache.lengths.astype(INT64)
        visible = (positions + 1)[:, None]
        x, y = np.empty((2, B, C), FLOAT32)
        logits = self._workspace.empty((B, head.weight.width), FLOAT32)
        layers = self._all_layers(model.h, x, cache, visible, positions, np.ones(B, INT64))
        layers.point("y", y)
        call = bindings.Draft(
            embed=self._embed(model.wte, model.wpe, ids[0], positions, x),
            layers=layers,
            ln_f=self._layer_norm(y, model.ln_f, x),
            lm_head=self._linear(x, head, logits),
            choose=self._choose(logits[:, :V], draws, ids[1:], params),
            positions=positions, visible=visible, count=count,
            banned=banned, banned_count=len(banned),
        )  # fmt: skip
        if call.run(self.threads):
            raise IndexError(f"too many tokens for a cache of {cache.keys.shape[3]} panels")
        return ids[1:]

    def _empty_rows(self, count: int, width: int) -> Array:
        """Return an uninitialized array (count, width), with padding between rows."""
        if count == 1:
            return np.empty((1, width), FLOAT32)
        return self._workspace.empty((count, width + self._row_padding), FLOAT32)[:, :width]

    def _padded(self, width: int) -> int:
        """Return a width padded to whole panels."""
        return -(-width // self.cache_panel) * self.cache_panel


def _capacity(keys: Array) -> int:
    """Return the capacity in tokens of one layer of a cache."""
    return keys.shape[2] * keys.shape[4]


def _rows_of(x: Array) -> Array:
    """Return x (..., width) as float32 (n, width) with contiguous rows."""
    return readable(x.reshape(-1, x.shape[-1]))


def _counts_of(x: Array, shape: tuple[int, ...]) -> Array:
    """Return integers of this shape as contiguous int64."""
    check(x.shape == shape, "counts", x)
    return contiguous(x, INT64)
