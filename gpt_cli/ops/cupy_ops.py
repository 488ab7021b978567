"""The operations on an NVIDIA GPU, with CuPy: launches of the kernels in `cuda/`.

The kernels compute the bits of the compiled CPU library, `native_ops`. Weights are in float32, in
bfloat16 or float16, or in int8; activations and sums are in float32. Keys and values are in
float32, or in float16 beside int8 weights.
"""

from functools import lru_cache
from types import ModuleType
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from gpt_cli.folder.dtypes import GROUP, NAMES, WEIGHT_TYPES
from gpt_cli.ops.contract import (
    Array,
    AttentionSteps,
    Block,
    Cache,
    LayerNorm,
    Linear,
    Model,
    Ops,
    Rows,
)
from gpt_cli.ops.cuda import compiler, decoding, plans, structs
from gpt_cli.ops.cuda.decoding import choice_fields, scratch_fields
from gpt_cli.ops.cuda.launcher import Launcher
from gpt_cli.ops.cuda.layers import Layers, Tokens, norm_of
from gpt_cli.ops.cuda.passes import Passes, Places
from gpt_cli.ops.cuda.placed import Placed
from gpt_cli.ops.int8 import LARGEST, Int8Rows, invalid, quantize
from gpt_cli.ops.kernels import ACTIVATIONS, KNOWN_STEPS, LARGEST_TOP_K, strides
from gpt_cli.ops.short import round_to
from gpt_cli.options.request import SamplingParams

_PIECE = 4 * 1024 * 1024  # numbers that are read, rounded and copied at a time
_COMMON = ("device.cu", "arithmetic.cu", "structs.cu")
# Modules that are compiled at the same time. The first one has what comes before the layers, and
# takes the least time: the kernel of a pass is then compiled beside the others.
_OPERATIONS = (
    (*_COMMON, "pack.cu", "rows.cu"),
    (*_COMMON, "products.cu"),
    (*_COMMON, "attention.cu"),
    (*_COMMON, "logits.cu", "sampling.cu", "tokens.cu"),
)


class CuPyOps(Ops):
    """The operations on a GPU."""

    name = "cupy"
    threads = 1
    pass_tokens = 4096  # fewer do not keep all processors busy
    logits_rows = 1024
    xp: ModuleType = cupy
    batch_invariant = one_type = True
    cache_panel = plans.SLOTS

    def __init__(self, dtype: str = "float32"):
        self.dtype = dtype
        self._kind = WEIGHT_TYPES[dtype]
        self.cache_type = np.dtype(f"f{self._kind.cache_itemsize}")
        try:
            properties = runtime.getDeviceProperties(runtime.getDevice())
            self.gpu = plans.Device(
                properties["multiProcessorCount"], properties["sharedMemPerBlockOptin"]
            )
            options = (f"-DFORMAT={NAMES.index(dtype)}",)
            modules = compiler.load_all(_OPERATIONS, options)
            modules["pack"].result()  # raises the error of CuPy that all would have
        except Exception as error:  # CuPy raises many types for missing libraries
            raise ImportError(f"{type(error).__name__}: {error}") from error
        self.launch = Launcher(modules, self.gpu)
        capability = 10 * properties["major"] + properties["minor"]
        self._passes = Passes(cupy, self.gpu, capability, dtype, _COMMON, options)

    def free_memory(self) -> int:
        return int(runtime.memGetInfo()[0] + cupy.get_default_memory_pool().free_bytes())

    def to_host(self, array: Array) -> Array:
        return array if isinstance(array, np.ndarray) else cupy.asnumpy(array)

    # --- weights ---------------------------------------------------------------------------------

    def place_matrix(self, rows: Rows, *, transposed: bool = False) -> Placed:
        n_rows, length = rows.shape
        n_in, n_out = (length, n_rows) if transposed else (n_rows, length)
        if not n_in or not n_out:
            raise ValueError("a matrix must have rows and columns")
        layout = plans.LAYOUTS[self.dtype]
        shape = -(-n_out // plans.PANEL), layout.units(n_in) * layout.unit_bytes
        placed = Placed(cupy.empty(shape, np.uint8), n_in, n_out, self.dtype)
        step = max(1, _PIECE // length // GROUP) * GROUP
        for first in range(0, n_rows, step):
            part, scales = self._converted(rows, slice(first, first + step), transposed)
            count = min(step, n_rows - first)
            self._run(
                plans.pack(count, length, self.gpu), "pack", panels=placed.panels, rows=part,
                scales=scales, n_in=n_in, n_out=n_out, units=placed.units, first=first,
                count=count, transposed=transposed,
            )  # fmt: skip
        return placed

    def _converted(self, rows: Rows, part: slice, transposed: bool) -> tuple[Array, Array | None]:
        """Return a range of rows in the type in memory, and the scales of their groups."""
        if self._kind.is_short:
            return cupy.asarray(round_to(rows[part], self.dtype)), None
        if not self._kind.has_groups:
            return cupy.asarray(np.ascontiguousarray(rows[part], np.float32)), None
        if isinstance(rows, Int8Rows):
            weight, scale = rows.parts(part)
        else:
            weight, scale = quantize(rows[part], transposed=transposed).parts(slice(None))
        weight = np.ascontiguousarray(weight)
        scale = np.ascontiguousarray(scale)
        _check_int8(weight, scale)
        return cupy.asarray(weight), cupy.asarray(scale, np.float32)

    # --- operations ------------------------------------------------------------------------------

    def embed(self, wte: Placed, wpe: Array, ids: Array, positions: Array) -> Array:
        ids = cupy.ascontiguousarray(ids, np.int64)
        positions = _on_device(np.broadcast_to(positions, ids.shape))
        wpe = cupy.ascontiguousarray(wpe, np.float32)
        x = cupy.empty((*ids.shape, wte.n_in), np.float32)
        tokens = {"ids": ids, "positions": positions, "tokens": ids.size, "n_positions": len(wpe)}
        self._run(plans.embed(ids.size), "embed", wte=wte.struct, wpe=wpe, x=x, **tokens)
        return x

    def layer_norm(self, x: Array, ln: LayerNorm) -> Array:
        x = cupy.ascontiguousarray(x, np.float32)
        y = cupy.empty(x.shape, np.float32)
        C = x.shape[-1]
        rows = x.size // C
        if rows:
            launch = plans.layer_norm(rows, C)
            self._run(launch, "layer_norm", ln=norm_of(ln), x=x, y=y, rows=rows, C=C)
        return y

    def linear(self, x: Array, w: Linear, activation: str | None = None) -> Array:
        matrix: Placed = w.weight
        x = cupy.ascontiguousarray(x, np.float32)
        y = cupy.empty((*x.shape[:-1], matrix.n_out), np.float32)
        rows = x.size // matrix.n_in
        if not rows:
            return y
        fields = {"w": matrix.struct, "bias": w.bias, "x": x, "y": y, "rows": rows}
        if self._kind.has_groups:
            fields["digits"] = cupy.empty((rows, matrix.units, 2 * GROUP), np.uint8)
            fields["steps"] = cupy.empty(rows, np.float32)
        job = structs.pack("linear", activation=ACTIVATIONS.index(activation), **fields)
        if self._kind.has_groups:
            self.launch(plans.round_rows(rows), job)
        shape = rows, matrix.n_in, matrix.n_out
        self.launch(plans.linear(*shape, self.dtype, self.gpu), job)
        return y

    def add(self, x: Array, y: Array) -> Array:
        x = cupy.ascontiguousarray(x, np.float32)
        y = cupy.ascontiguousarray(y, np.float32)
        total = cupy.empty(x.shape, np.float32)
        if x.size:
            launch = plans.elementwise("add", x.size, self.gpu)
            self._run(launch, "add", x=x, y=y, total=total, n=x.size)
        return total

    def activate(self, x: Array, activation: str) -> Array:
        return self._elementwise("activations", x, ACTIVATIONS.index(activation))

    def exp(self, x: Array) -> Array:
        return self._elementwise("exponentials", x)

    def _elementwise(self, kernel: str, x: Array, activation: int = 0) -> Array:
        x = cupy.ascontiguousarray(x, np.float32)
        y = cupy.empty(x.shape, np.float32)
        if x.size:
            launch = plans.elementwise(kernel, x.size, self.gpu)
            self._run(launch, "elementwise", x=x, y=y, n=x.size, activation=activation)
        return y

    def new_cache(
        self, layers: int, batch: int, heads: int, capacity: int, size: int
    ) -> tuple[Array, Array]:
        # Keys (layers, B, H, panels, D, SLOTS), values (layers, B, H, panels, SLOTS, D). What is
        # not yet written is never read.
        slots = plans.SLOTS
        shape = layers, batch, heads, -(-capacity // slots)
        keys = cupy.empty((*shape, size, slots), self.cache_type)
        return keys, cupy.empty((*shape, slots, size), self.cache_type)

    def store(
        self, k: Array, v: Array, keys: Array, values: Array, past: Array, lengths: Array
    ) -> None:
        B, H, T, D = k.shape
        if int((past + lengths).max(initial=0)) > keys.shape[2] * plans.SLOTS:
            raise IndexError(f"the cache has room for {keys.shape[2] * plans.SLOTS} tokens")
        k, v = _alike(k, v)
        if k.size:
            self._run(
                plans.store(B * H, T), "store", k=k, v=v, past=_on_device(past),
                lengths=_on_device(lengths), B=B, H=H, T=T, D=D, **strides(k),
                **_cache_fields(keys, values),
            )  # fmt: skip

    def attend(self, q: Array, keys: Array, values: Array, scale: float, visible: Array) -> Array:
        return self._attend(q, keys, values, scale, visible)

    def attend_in_steps(
        self,
        q: Array,
        keys: Array,
        values: Array,
        scale: float,
        visible: Array,
        steps: AttentionSteps,
    ) -> Array:
        scores = cupy.ascontiguousarray(steps.scores, np.float32)
        pattern = cupy.ascontiguousarray(steps.pattern, np.float32)
        known_step = KNOWN_STEPS.index(steps.known_step)
        y = self._attend(
            q, keys, values, scale, visible, scores=scores, pattern=pattern, known_step=known_step
        )
        if scores is not steps.scores:
            steps.scores[...] = scores
        if pattern is not steps.pattern:
            steps.pattern[...] = pattern
        return y

    def _attend(
        self, q: Array, keys: Array, values: Array, scale: float, visible: Array, **fields: Any
    ) -> Array:
        B, H, T, D = q.shape
        most = int(visible.max(initial=1))
        capacity = keys.shape[2] * plans.SLOTS
        if visible.min(initial=1) < 1 or most > capacity:
            raise IndexError(f"visible must be from 1 to {capacity} keys")
        (q,) = _alike(q)
        S = fields["scores"].shape[-1] if fields else most
        y = cupy.empty((B, T, H * D), np.float32)
        if not q.size:
            return y.reshape(B, T, H, D).swapaxes(1, 2)
        launch = plans.attend(B * H, T, D, S, self.gpu)
        scratch = cupy.empty(plans.attend_scratch(launch, S), np.float32)
        self._run(
            launch, "attend", q=q, visible=_on_device(visible), y=y, scratch=scratch, B=B, H=H,
            T=T, D=D, S=S, scale=scale, **strides(q), **_cache_fields(keys, values), **fields,
        )  # fmt: skip
        return y.reshape(B, T, H, D).swapaxes(1, 2)

    def log_normalizer(self, logits: Array) -> Array:
        logits = cupy.ascontiguousarray(logits, np.float32)
        rows, n = logits.shape
        y = cupy.empty(rows, np.float64)
        if rows:
            self._run(
                plans.of_rows("log_sum_exp", rows, n), "log_sum_exp", x=logits, y=y, rows=rows, n=n
            )
        return y

    def cumulative_counts(self, logits: Array) -> Array:
        logits = cupy.ascontiguousarray(logits, np.float32)
        rows, n = logits.shape
        sums = cupy.empty((rows, n), np.int64)
        if rows:
            launch = plans.of_rows("cumulate", rows, n)
            self._run(launch, "cumulate", logits=logits, sums=sums, rows=rows, n=n)
        return sums

    def choose(self, logits: Array, uniforms: Array, params: SamplingParams) -> Array | None:
        rows, n = logits.shape
        if not 0 < params.top_k <= min(n, LARGEST_TOP_K):
            return None
        logits = cupy.ascontiguousarray(logits, np.float32)
        ids = cupy.empty(rows, np.int64)
        arrays = {"logits": logits, "uniforms": cupy.asarray(uniforms, np.float64), "ids": ids}
        self._run(
            plans.of_rows("choose", rows, n), "choose", rows=rows, n=n, **arrays,
            **choice_fields(params), **scratch_fields(cupy, rows, n),
        )  # fmt: skip
        return ids

    # --- several operations in one launch --------------------------------------------------------

    def layers(self, x: Array, h: tuple[Block, ...], visible: Array, cache: Cache) -> Array:
        B, T, _ = x.shape
        result = cupy.array(x, np.float32, order="C")
        if self._passes.most_rows(h, cache) >= B * T and (cache.new == T).all():
            texts = np.repeat(np.arange(B), T)
            places = Places(texts, (visible - 1).reshape(-1), texts * T)
            self._passes.layers(result, h, cache, places)
        elif x.size:
            past, lengths = _on_device(cache.lengths), _on_device(cache.new)
            seen = _on_device(visible)
            S = int(visible.max())
            tokens = Tokens(past.data.ptr, lengths.data.ptr, seen.data.ptr, S)
            Layers(self, h, cache, B, T, S).run(result.data.ptr, tokens)
        return result

    def decode(
        self,
        model: Model,
        cache: Cache,
        last: Array,
        uniforms: Array,
        banned: Array,
        params: SamplingParams,
    ) -> tuple[Array, Array] | None:
        B, V = len(last), model.lm_head.weight.n_out
        if not 0 < params.top_k <= min(V, LARGEST_TOP_K):
            return None
        arguments = model, cache, last, uniforms, banned, params
        if self._passes.most_rows(model.h, cache, V) >= B:
            ids, logprobs, is_finite = self._passes.decode(*arguments)
        else:
            ids, logprobs, is_finite = map(self.to_host, decoding.decode(self, *arguments))
        return (ids, logprobs) if is_finite.all() else None

    def _run(self, launch: plans.Launch, struct: str, **fields: Any) -> None:
        """Launch a kernel with a struct of these fields; the others are 0."""
        self.launch(launch, structs.pack(struct, **fields))


def _check_int8(weight: Array, scale: Array) -> None:
    """Raise CheckpointError for int8 that `gpt-cli quantize` does not write."""
    rest = np.ascontiguousarray(scale, np.float32).view(np.uint32) & 0xFFFF
    if (weight < -LARGEST).any() or (rest[np.isfinite(scale)] != 0).any():
        raise invalid("a matrix")


def _alike(*arrays: Array) -> tuple[Array, ...]:
    """Return arrays (B, H, T, D) in float32 with equal strides and a contiguous last axis.

    In the model they have these already, as views of one array, and are not copied.
    """
    first = arrays[0]
    if all(
        x.dtype == np.float32 and x.strides == first.strides and x.strides[-1] == 4 for x in arrays
    ):
        return arrays
    return tuple(cupy.ascontiguousarray(x, np.float32) for x in arrays)


def _cache_fields(keys: Array, values: Array) -> dict[str, Any]:
    """Return the fields of one layer of a cache."""
    if not (keys.flags.c_contiguous and values.flags.c_contiguous):
        raise ValueError("a layer of the cache must be contiguous")
    return {"keys": keys, "values": values, "cache_panels": keys.shape[2]}


def _on_device(counts: Array) -> Any:
    """Copy integers from the host to the device, once for all layers of a pass."""
    return _copied(counts.shape, np.asarray(counts, np.int64).tobytes())


@lru_cache(maxsize=8)
def _copied(shape: tuple[int, ...], numbers: bytes) -> Any:
    return cupy.asarray(np.frombuffer(numbers, np.int64).reshape(shape))
