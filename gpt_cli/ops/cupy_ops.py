"""The operations on an NVIDIA GPU, with CuPy: launches of the kernels in `cuda/`.

The kernels compute the bits of the compiled CPU library, `native_ops`. Weights are in float32, in
bfloat16 or float16, or in int8; activations and sums are in float32. Keys and values are in
float32, or in float16 beside int8 weights.
"""

import weakref
from functools import lru_cache, partial
from types import ModuleType
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from gpt_cli.errors import CheckpointError
from gpt_cli.ops import Array, LayerNorm, Linear, Ops, Rows, Steps
from gpt_cli.ops.cuda import compiler, decoding, plans, structs
from gpt_cli.ops.cuda.decoding import choice_fields, scratch_fields
from gpt_cli.ops.cuda.launcher import Launcher
from gpt_cli.ops.cuda.layers import ACTIVATIONS, Layers, Tokens, norm_of
from gpt_cli.ops.cuda.placed import Placed
from gpt_cli.ops.int8 import GROUP, LARGEST, Int8Rows, quantize
from gpt_cli.ops.short import round_to
from gpt_cli.options.request import SamplingParams

_PIECE = 4 * 1024 * 1024  # numbers that are read, rounded and copied at a time
_FORMATS = ("float32", "bfloat16", "float16", "int8")  # in the order of `enum format`
_EDITED = (None, "scores", "pattern")  # in the order of `enum edited`
_COMMON = ("device.cu", "arithmetic.cu", "structs.cu")
# Modules that are compiled at the same time: none takes much longer than the others.
_OPERATIONS = (
    (*_COMMON, "pack.cu", "products.cu"),
    (*_COMMON, "attention.cu"),
    (*_COMMON, "rows.cu", "sampling.cu", "tokens.cu"),
)
_PASS = (
    *_COMMON,
    "sampling.cu",
    "pass_memory.cu",
    "pass_weights.cu",
    "pass_rows.cu",
    "pass_chains.cu",
    "pass_products.cu",
    "pass_attention.cu",
    "pass_logits.cu",
    "pass.cu",
)
LARGEST_TOP_K = 1024  # as in `native_ops`
# Rows up to which passes in one launch decode faster than operations one by one, which compute all
# rows together and read the weights once.
_ROWS_IN_PASSES = 16


class CuPyOps(Ops):
    """The operations on a GPU."""

    name = "cupy"
    threads = 1
    xp: ModuleType = cupy
    batch_invariant = one_type = True
    cache_panel = plans.SLOTS

    def __init__(self, dtype: str = "float32"):
        self.dtype = dtype
        self.cache_type = np.dtype("f2" if dtype == "int8" else "f4")
        try:
            properties = runtime.getDeviceProperties(runtime.getDevice())
            self.gpu = plans.Device(
                properties["multiProcessorCount"], properties["sharedMemPerBlockOptin"]
            )
            self._capability = 10 * properties["major"] + properties["minor"]
            self._options = (f"-DFORMAT={_FORMATS.index(dtype)}",)
            modules = compiler.load_all(_OPERATIONS, self._options)
        except Exception as error:  # CuPy raises many types for missing libraries
            raise ImportError(f"{type(error).__name__}: {error}") from error
        self.launch = Launcher(modules, self.gpu)
        self._passes: dict[tuple[int, ...], tuple[Any, compiler.Kernel]] = {}  # with modules
        self._tables: weakref.WeakKeyDictionary[Any, _Table] = weakref.WeakKeyDictionary()

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
        size = plans.padded(n_in, self.dtype) // plans.unit_rows(self.dtype)
        size *= plans.unit_bytes(self.dtype)
        placed = Placed(
            cupy.empty((-(-n_out // plans.PANEL), size), np.uint8), n_in, n_out, self.dtype
        )
        step = max(1, _PIECE // length // GROUP) * GROUP
        for first in range(0, n_rows, step):
            part, scales = self._converted(rows, slice(first, first + step), transposed)
            fields = {"panels": placed.panels, "rows": part, "scales": scales, "first": first}
            fields |= {"n_in": n_in, "n_out": n_out, "units": placed.units}
            fields |= {"count": min(step, n_rows - first), "transposed": transposed}
            self._run(plans.pack(fields["count"], length, self.gpu), "pack", **fields)
        return placed

    def _converted(self, rows: Rows, part: slice, transposed: bool) -> tuple[Array, Array | None]:
        """Return a range of rows in the type in memory, and the scales of their groups."""
        if self.dtype == "float32":
            return cupy.asarray(np.ascontiguousarray(rows[part], np.float32)), None
        if self.dtype != "int8":
            return cupy.asarray(round_to(rows[part], self.dtype)), None
        if not isinstance(rows, Int8Rows):
            rows, part = quantize(rows[part], transposed=transposed), slice(None)
        weight, scale = (np.ascontiguousarray(array) for array in rows.parts(part))
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
        y, C = cupy.empty(x.shape, np.float32), x.shape[-1]
        rows = x.size // C
        if rows:
            launch = plans.layer_norm(rows)
            self._run(launch, "layer_norm", ln=norm_of(ln), x=x, y=y, rows=rows, C=C)
        return y

    def linear(self, x: Array, w: Linear, activation: str | None = None) -> Array:
        matrix: Placed = w.weight
        x = cupy.ascontiguousarray(x, np.float32)
        y = cupy.empty((*x.shape[:-1], matrix.n_out), np.float32)
        rows = x.size // matrix.n_in
        if not rows:
            return y
        fields = {"w": matrix.struct, "bias": w.bias, "x": x, "y": y}
        fields |= {"rows": rows, "activation": ACTIVATIONS.index(activation)}
        if self.dtype == "int8":
            digits = cupy.empty((rows, matrix.units, 2 * GROUP), np.uint8)
            fields |= {"digits": digits, "steps": cupy.empty(rows, np.float32)}
            self._run(plans.round_rows(rows), "linear", **fields)
        launch = plans.linear(rows, matrix.n_in, matrix.n_out, self.dtype, self.gpu)
        self._run(launch, "linear", **fields)
        return y

    def add(self, x: Array, y: Array) -> Array:
        x, y = (cupy.ascontiguousarray(array, np.float32) for array in (x, y))
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
        # Keys (layers, B, H, panels, D, SLOTS), values (layers, B, H, panels, SLOTS, D). What is not
        # yet written is never read.
        shape, slots = (layers, batch, heads, -(-capacity // plans.SLOTS)), plans.SLOTS
        keys = cupy.empty((*shape, size, slots), self.cache_type)
        return keys, cupy.empty((*shape, slots, size), self.cache_type)

    def store(
        self, k: Array, v: Array, keys: Array, values: Array, past: Array, lengths: Array
    ) -> None:
        B, H, T, D = k.shape
        if int((past + lengths).max(initial=0)) > keys.shape[2] * plans.SLOTS:
            raise IndexError(f"the cache has room for {keys.shape[2] * plans.SLOTS} tokens")
        k, v = _alike(k, v)
        fields = {"k": k, "v": v, "past": _on_device(past), "lengths": _on_device(lengths)}
        fields |= _strides(k) | _cache_fields(keys, values)
        if k.size:
            self._run(plans.store(B * H, T), "store", B=B, H=H, T=T, D=D, **fields)

    def attend(self, q: Array, keys: Array, values: Array, scale: float, visible: Array) -> Array:
        return self._attend(q, keys, values, scale, visible)

    def attend_in_steps(
        self, q: Array, keys: Array, values: Array, scale: float, visible: Array, steps: Steps
    ) -> Array:
        scores, pattern = (cupy.ascontiguousarray(array, np.float32) for array in steps[:2])
        edited = _EDITED.index(steps.edited)
        y = self._attend(
            q, keys, values, scale, visible, scores=scores, pattern=pattern, edited=edited
        )
        for array, result in zip(steps[:2], (scores, pattern), strict=True):
            if array is not result:
                array[...] = result
        return y

    def _attend(
        self, q: Array, keys: Array, values: Array, scale: float, visible: Array, **fields: Any
    ) -> Array:
        B, H, T, D = q.shape
        most, capacity = int(visible.max(initial=1)), keys.shape[2] * plans.SLOTS
        if not (1 <= visible.min(initial=1) and most <= capacity):
            raise IndexError(f"visible must be from 1 to {capacity} keys")
        (q,) = _alike(q)
        S = fields["scores"].shape[-1] if fields else most
        y = cupy.empty((B, T, H * D), np.float32)
        if not q.size:
            return y.reshape(B, T, H, D).swapaxes(1, 2)
        launch = plans.attend(B * H, T, D, S, self.gpu)
        scratch = cupy.empty(plans.attend_scratch(launch, S), np.float32)
        fields |= _strides(q) | _cache_fields(keys, values)
        fields |= {"q": q, "visible": _on_device(visible), "y": y, "scratch": scratch}
        self._run(launch, "attend", B=B, H=H, T=T, D=D, S=S, scale=scale, **fields)
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

    def layers(self, x: Array, h: tuple[Any, ...], visible: Array, cache: Any) -> Array:
        B, T, _ = x.shape
        shape = self._pass_shape(h, cache, 0)
        if B * T <= self._most_rows(shape) and (cache.new == T).all():
            result = cupy.array(x, np.float32, order="C")
            positions = (visible - 1).reshape(-1)
            texts = np.repeat(np.arange(B), T)
            firsts = texts * T
            self._pass(shape, h, cache, result, texts, positions, firsts, only_layers=1)
            return result
        result = cupy.array(x, np.float32, order="C")
        if not x.size:
            return result
        past, lengths = _on_device(cache.lengths), _on_device(cache.new)
        places, S = _on_device(visible), int(visible.max())
        tokens = Tokens(past.data.ptr, lengths.data.ptr, places.data.ptr, S)
        Layers(self, h, cache, B, T, S).run(result.data.ptr, tokens)
        return result

    def decode(
        self,
        model: Any,
        cache: Any,
        last: Array,
        uniforms: Array,
        banned: Array,
        params: SamplingParams,
    ) -> tuple[Array, Array] | None:
        B, V = len(last), model.lm_head.weight.n_out
        if not 0 < params.top_k <= min(V, LARGEST_TOP_K):
            return None
        in_passes = B <= _ROWS_IN_PASSES and self._most_rows(self._pass_shape(model.h, cache, V))
        decode = self._decode_in_passes if in_passes else partial(decoding.decode, self)
        results = decode(model, cache, last, uniforms, banned, params)
        ids, logprobs, is_finite = (self.to_host(array) for array in results)
        return (ids, logprobs) if is_finite.all() else None

    def _decode_in_passes(
        self,
        model: Any,
        cache: Any,
        last: Array,
        uniforms: Array,
        banned: Array,
        params: SamplingParams,
    ) -> tuple[Array, Array, Array]:
        """Do what `decoding.decode` does, in one launch for as many rows as it can have."""
        B, V = len(last), model.lm_head.weight.n_out
        shape = self._pass_shape(model.h, cache, V)
        most = self._most_rows(shape)
        jobs = []
        for start in range(0, B, most):
            part = slice(start, start + most)
            texts, positions = np.arange(B)[part], cache.lengths[part]
            fields = self._steps_fields(model, last[part], uniforms[:, part], banned, params)
            x = cupy.empty((len(texts), model.wte.n_in), np.float32)
            firsts = np.arange(len(texts))
            self._pass(shape, model.h, cache, x, texts, positions, firsts, **fields)
            jobs.append((fields["ids"][1:], fields["logprobs"], fields["is_finite"]))
        ids, logprobs, is_finite = (
            arrays[0] if len(arrays) == 1 else cupy.concatenate(arrays, axis=-1)
            for arrays in zip(*jobs, strict=True)
        )
        return ids, logprobs, is_finite

    def _steps_fields(
        self, model: Any, last: Array, uniforms: Array, banned: Array, params: SamplingParams
    ) -> dict[str, Any]:
        """Return the fields of `struct pass` for tokens that are chosen one after the other."""
        (steps, rows), head, V = uniforms.shape, model.lm_head, model.lm_head.weight.n_out
        ids = np.zeros((steps + 1, rows), np.int64)
        ids[0] = last
        return {
            "ln_f": norm_of(model.ln_f), "lm_head": head.weight.struct, "wte": model.wte.struct,
            "lm_head_bias": head.bias, "wpe": model.wpe, "ids": cupy.asarray(ids),
            "logits": cupy.empty((rows, V), np.float32),
            "maxima": cupy.empty((rows, -(-V // plans.SPAN)), np.float32),
            "sums": cupy.empty((rows, -(-V // plans.LOG_SUM_STEP), 16), np.float32),
            "logprobs": cupy.empty((steps, rows), np.float64),
            "is_finite": cupy.asarray(np.ones(rows, np.int32)),
            "uniforms": cupy.asarray(np.ascontiguousarray(uniforms, np.float64)),
            "banned": banned, "banned_count": len(banned), "steps": steps,
            **choice_fields(params), **scratch_fields(cupy, rows, V),
        }  # fmt: skip

    def _pass_shape(self, h: tuple[Any, ...], cache: Any, V: int) -> plans.PassShape:
        C, inner = h[0].attn.c_attn.weight.n_in, h[0].mlp.c_fc.weight.n_out
        panels = cache.keys.shape[3]
        return plans.PassShape(self.dtype, len(h), C, inner, C // h[0].attn.n_head, V, panels)

    @lru_cache(maxsize=64)  # noqa: B019 (operations live as long as their model)
    def _most_rows(self, shape: plans.PassShape) -> int:
        """Return the most rows of a pass in one launch; 0 if this GPU cannot do it."""
        return plans.most_pass_rows(shape, self.gpu) if self._capability >= 80 else 0

    def _pass(
        self,
        shape: plans.PassShape,
        h: tuple[Any, ...],
        cache: Any,
        x: Array,
        texts: Array,
        positions: Array,
        firsts: Array,
        **fields: Any,
    ) -> None:
        """Launch the kernel of pass.cu for x (rows, C)."""
        rows, C, step = len(texts), shape.C, len(cache.keys) > 1
        plan = plans.pass_plan(rows, shape, self.gpu)
        assert plan  # noqa: S101 (rows are at most `_most_rows`)
        places = cupy.asarray(np.stack([texts, positions, firsts]).astype(np.int64))
        size = cache.keys.dtype.itemsize
        job = {"layers": self._table(h), "x": x, "steps": 1} | fields
        job |= {
            "mid": cupy.empty((rows, C), np.float32), "qkv": cupy.empty((rows, 3 * C), np.float32),
            "z": cupy.empty((rows, C), np.float32),
            "hidden": cupy.empty((rows, shape.inner), np.float32),
            "keys": cache.keys, "values": cache.values,
            "keys_step": step * cache.keys.strides[0] // size,
            "values_step": step * cache.values.strides[0] // size,
            "texts": places[0], "positions": places[1], "firsts": places[2],
            "barrier": cupy.zeros(1, np.uint32), "n_layer": len(h), "rows": rows,
            "C": C, "H": h[0].attn.n_head, "D": shape.D, "inner": shape.inner,
            "cache_panels": shape.cache_panels, "stages": plan.stages, "chunk": plan.chunk,
        }  # fmt: skip
        macros = plan.most_rows, plan.stage_units, plan.tiles
        module, kernel = self._passes.get(macros) or self._load_pass(macros)
        compiler.set_constant(module, "job", structs.pack("pass", **job))
        kernel.launch_together(self.gpu.processors, plans.PASS_THREADS, plan.shared)

    def _load_pass(self, macros: tuple[int, ...]) -> tuple[Any, compiler.Kernel]:
        """Return the module and the kernel of passes with these macros, and keep them."""
        names = zip(("ROWS", "STAGE_UNITS", "TILES"), macros, strict=True)
        options = (*self._options, *(f"-D{name}={value}" for name, value in names))
        module = compiler.load(_PASS, options)
        self._passes[macros] = module, compiler.Kernel(module, "pass", self.gpu.shared)
        return self._passes[macros]

    def _table(self, h: tuple[Any, ...]) -> Array:
        """Return the layers of a model as structs on the device, which are kept for the next pass."""
        table = self._tables.get(h[0])
        if table is None or table.h != [weakref.ref(b) for b in h]:
            table = self._tables[h[0]] = _Table(h)
        return table.structs

    def _run(self, launch: plans.Launch, struct: str, **fields: Any) -> None:
        """Launch a kernel with a struct of these fields; the others are 0."""
        self.launch(launch, structs.pack(struct, **fields))


class _Table:
    """The layers of a model (`model.Block`s) as an array of `struct layer` on the device."""

    def __init__(self, h: tuple[Any, ...]):
        self.h = [weakref.ref(b) for b in h]
        layers = b"".join([self._layer(b) for b in h])
        self.structs = cupy.asarray(np.frombuffer(layers, np.uint8))

    def _layer(self, b: Any) -> bytes:
        linears = {
            "c_attn": b.attn.c_attn, "attn_c_proj": b.attn.c_proj,
            "c_fc": b.mlp.c_fc, "mlp_c_proj": b.mlp.c_proj,
        }  # fmt: skip
        fields = {name: w.weight.struct for name, w in linears.items()}
        fields |= {f"{name}_bias": w.bias for name, w in linears.items()}
        fields |= {"ln_1": norm_of(b.ln_1), "ln_2": norm_of(b.ln_2), "scale": b.attn.scale}
        fields["activation"] = ACTIVATIONS.index(b.mlp.activation)
        return structs.pack("layer", **fields)


def _check_int8(weight: Array, scale: Array) -> None:
    """Raise CheckpointError for int8 that `gpt-cli quantize` does not write."""
    rest = np.ascontiguousarray(scale, np.float32).view(np.uint32) & 0xFFFF
    if (weight < -LARGEST).any() or (rest[np.isfinite(scale)] != 0).any():
        raise CheckpointError(
            "a matrix: int8 weights must be from -127 to 127, with scales that bfloat16 can hold: "
            "make the folder again with `gpt-cli quantize`"
        )


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


def _strides(x: Array) -> dict[str, int]:
    """Return the strides of x (B, H, T, D) in elements, by their names in structs.cu."""
    names = "b_stride", "h_stride", "t_stride"
    return {name: stride // 4 for name, stride in zip(names, x.strides[:3], strict=True)}


def _cache_fields(keys: Array, values: Array) -> dict[str, Any]:
    """Return the fields of one layer of a cache."""
    if not (keys.flags.c_contiguous and values.flags.c_contiguous):
        raise ValueError("a layer of the cache must be contiguous")
    return {"keys": keys, "values": values, "cache_panels": keys.shape[2]}


def _on_device(counts: Array) -> Array:
    """Copy integers from the host to the device, once for all layers of a pass."""
    return _copied(counts.shape, np.asarray(counts, np.int64).tobytes())


@lru_cache(maxsize=8)
def _copied(shape: tuple[int, ...], numbers: bytes) -> Array:
    return cupy.asarray(np.frombuffer(numbers, np.int64).reshape(shape))
