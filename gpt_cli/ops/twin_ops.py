"""The operations of a model's int8 twin, which drafts tokens."""

import math
from ctypes import addressof
from typing import Any

import numpy as np

from gpt_cli.ops import Array
from gpt_cli.ops.bindings import COLUMNS, FLOAT32, Draft, Norm, Packed, check, readable, vector_of
from gpt_cli.ops.memory import address
from gpt_cli.ops.native_ops import LARGEST_TOP_K, Int8NativeOps, contiguous

_INT64, _FLOAT64 = np.dtype("i8"), np.dtype("f8")


class TwinNativeOps(Int8NativeOps):
    """The operations with int8 weights that are converted from those of another model."""

    def __init__(self, threads: int):
        super().__init__()
        self.threads = threads

    def quantize(self, matrix: Packed) -> Packed:
        """Convert a matrix of other `NativeOps` to int8, with the bits of `int8.quantize`."""
        check(matrix.format != self.dtype, "the matrix", matrix.panels)
        panels = self._empty_panels(len(matrix.panels), matrix.n_in)
        self._lib.gpt2_quantize(matrix.struct, address(panels), self.threads)
        return Packed(panels, matrix.n_in, matrix.n_out, self.dtype)

    def copyto(self, to: Array, blocks: Array) -> None:
        """Copy blocks of a cache in float32: NumPy takes 15 times as long to round."""
        layers, B, H = to.shape[:3]
        for array, dtype in ((blocks, FLOAT32), (to, self._cache_type)):
            alike = array.shape == to.shape and array.dtype == dtype
            head = array.strides[2]
            runs = array.strides[1] == H * head and array[0, 0, 0].flags.c_contiguous
            check(alike and runs, "a cache", array)
        stride, n = to.strides[2] // 2, math.prod(to.shape[3:])
        check(blocks.strides[2] == 4 * stride and n % COLUMNS == 0, "a cache", blocks)
        start, result = address(blocks), address(to)
        for layer in range(layers):
            given = start + layer * blocks.strides[0], B * H, stride, n
            self._lib.gpt2_narrow(*given, result + layer * to.strides[0], self.threads)

    def draft(
        self,
        model: Any,
        cache: Any,
        last: Array,
        uniforms: Array,
        banned: Array,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
    ) -> Array | None:
        """Draft tokens one after the other, or return None for a top-k that C does not have.

        Steps in Python took 1.5 times as long: the weights evict its data from the processor's
        cache. Keys and values are appended beyond the lengths of the cache, which stay. Results
        that are not finite give some draft.

        Args:
            model: the twin.
            cache: the keys and values of all tokens of each text but its last.
            last: (B,) the last token of each text.
            uniforms: (count, B) the draws of the drafts.
            banned: ids that may not be drafted.
            temperature: above 0; this and the others as in `SamplingParams`.
            top_k: the number of tokens to keep.
            top_p: the probability to keep.
            min_p: the smallest fraction of the likeliest to keep.

        Returns:
            ids (count, B).
        """
        count, B = uniforms.shape
        head, wpe = model.lm_head, readable(model.wpe)
        C, V, H = model.wte.n_in, head.weight.n_out, model.h[0].attn.n_head
        if not 0 < top_k <= min(V, LARGEST_TOP_K):
            return None
        layers, keys, values = self._described(model.h), cache.keys, cache.values
        blocks = self._check_cache(keys[0], values[0], B, H, C // H)
        check(len(keys) == len(values) == len(model.h), "keys", keys)
        check(head.weight.format == self.dtype and head.weight.n_in == C, "lm_head", last)
        check(not banned.size or 0 <= banned.min() <= banned.max() < V, "banned", banned)
        check(wpe.ndim == 2 and wpe.shape[1] == C == layers.width, "wpe", wpe)
        check(cache.lengths.shape == last.shape == (B,), "last", last)
        ids = np.empty((count + 1, B), _INT64)
        ids[0] = last
        draws, banned = contiguous(uniforms, _FLOAT64), contiguous(banned, _INT64)
        positions, others = cache.lengths.astype(_INT64), np.empty((2, B), _INT64)
        weight, bias = vector_of(model.ln_f.weight, C), vector_of(model.ln_f.bias, C)
        head_bias = None if head.bias is None else vector_of(head.bias, V)
        rows = np.empty((2, B, C), FLOAT32)
        logits = self._workspace.empty((B, head.weight.width), FLOAT32)
        size = self._lib.gpt2_layers_scratch(layers.struct, B, 1, blocks, self.threads)
        scratch = self._workspace.empty((size + 16,), FLOAT32)
        choice = self._workspace.empty((self.threads, 4 * V), FLOAT32)
        digits = self._scratch(B, C)
        job = Draft(
            blocks=layers.struct,
            wte=model.wte.struct,
            lm_head=head.weight.struct,
            wpe=address(wpe),
            lm_head_bias=None if head_bias is None else address(head_bias),
            ln_f=Norm(address(weight), address(bias), model.ln_f.epsilon),
            n_layer=len(model.h),
            n_positions=len(wpe),
            keys=address(keys),
            values=address(values),
            keys_stride=keys.strides[0],
            values_stride=values.strides[0],
            cache_blocks=blocks,
            half=self._half,
            banned=address(banned),
            banned_count=len(banned),
            temperature=temperature,
            log_min_p=math.log(min_p) if min_p > 0 else -math.inf,
            top_k=top_k,
            top_p=top_p,
            uniforms=address(draws),
            positions=address(positions),
            visible=address(others[0]),
            new=address(others[1]),
            ids=address(ids),
            B=B,
            count=count,
            x=address(rows[0]),
            normed=address(rows[1]),
            logits=address(logits),
            layers=-(-address(scratch) // 64) * 64,
            choice=address(choice),
            digits=address(digits),
            threads=self.threads,
        )
        if self._lib.gpt2_draft(addressof(job)):
            raise IndexError(f"too many tokens for a cache of {blocks} blocks")
        return ids[1:]
