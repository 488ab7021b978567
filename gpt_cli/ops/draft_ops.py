"""The operations of the int8 draft model."""

import math
from typing import Any

import numpy as np

from gpt_cli.ops import Array, DraftOps, bindings
from gpt_cli.ops.bindings import FLOAT32, FLOAT64, INT64, Packed, check
from gpt_cli.ops.memory import address
from gpt_cli.ops.native_ops import LARGEST_TOP_K, NativeOps, contiguous
from gpt_cli.options.request import SamplingParams


class DraftNativeOps(NativeOps, DraftOps):
    """The operations with int8 weights that are converted from those of another model."""

    def __init__(self, threads: int):
        super().__init__("int8")
        self.threads = threads

    def quantize(self, matrix: Packed) -> Packed:
        """Convert a matrix of other `NativeOps` to int8, with the bits of `int8.quantize`."""
        check(matrix.format != self.dtype, "the matrix", matrix.panels)
        packed = Packed(matrix.n_in, matrix.n_out, self.dtype, self._weights)
        bindings.Quantize(w=matrix.struct, to=packed.struct).run(self.threads)
        return packed

    def copyto(self, to: Array, panels: Array) -> None:
        """Copy panels of a cache in float32: NumPy takes 15 times as long to round."""
        layers, B, H = to.shape[:3]
        for array, dtype in ((panels, FLOAT32), (to, self.cache_type)):
            alike = array.shape == to.shape and array.dtype == dtype
            runs = array.strides[1] == H * array.strides[2] and array[0, 0, 0].flags.c_contiguous
            check(alike and runs, "a cache", array)
        stride, n = to.strides[2] // 2, math.prod(to.shape[3:])
        check(panels.strides[2] == 4 * stride and n % self.cache_panel == 0, "a cache", panels)
        for layer in range(layers):
            start, target = (address(x) + layer * x.strides[0] for x in (panels, to))
            bindings.Narrow(x=start, y=target, rows=B * H, stride=stride, n=n).run(self.threads)

    def draft(
        self,
        model: Any,
        cache: Any,
        last: Array,
        uniforms: Array,
        banned: Array,
        params: SamplingParams,
    ) -> Array | None:
        """Draft tokens one after the other, or return None for a top-k that C does not have.

        last (B,) last tokens of texts, uniforms (count, B) draws -> ids (count, B). `cache` has the
        tokens of the texts before these. The ids in `banned` are never drafted. The temperature is
        above 0.

        Steps in Python took 1.5 times as long: the weights evict its data from the processor's
        cache. Keys and values are appended beyond the lengths of the cache, which stay. Results
        that are not finite give an arbitrary draft.
        """
        head, C, (count, B) = model.lm_head, model.wte.n_in, uniforms.shape
        V = head.weight.n_out
        if not 0 < params.top_k <= min(V, LARGEST_TOP_K):
            return None
        check(len(cache.keys) == len(cache.values) == len(model.h), "keys", cache.keys)
        check(head.weight.n_in == C, "lm_head", last)
        check(not banned.size or 0 <= banned.min() <= banned.max() < V, "banned", banned)
        check(cache.lengths.shape == last.shape == (B,), "last", last)
        ids = np.empty((count + 1, B), INT64)
        ids[0] = last
        banned, draws = contiguous(banned, INT64), contiguous(uniforms, FLOAT64)
        positions = cache.lengths.astype(INT64)
        visible, x, y = (positions + 1)[:, None], *np.empty((2, B, C), FLOAT32)
        logits = self._workspace.empty((B, head.weight.width), FLOAT32)
        layers = self._all_layers(model.h, x, cache, visible, positions, np.ones(B, INT64))
        layers.point("y", y)
        state = {"positions": positions, "visible": visible, "banned": banned, "count": count}
        call = bindings.Draft(
            embed=self._embed(model.wte, model.wpe, ids[0], positions, x),
            layers=layers,
            ln_f=self._layer_norm(y, model.ln_f, x),
            lm_head=self._linear(x, head, logits),
            choose=self._choose(logits[:, :V], draws, ids[1:], params),
            banned_count=len(banned),
            **state,
        )
        if call.run(self.threads):
            raise IndexError(f"too many tokens for a cache of {cache.keys.shape[3]} panels")
        return ids[1:]
