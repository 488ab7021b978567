"""Passes of the whole model over few rows, each or several in one launch: see pass.cu."""

import weakref
from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType
from typing import Any

import numpy as np

from gpt_cli.ops.contract import Array, Block, Cache, Model
from gpt_cli.ops.cuda import compiler, plans, structs
from gpt_cli.ops.cuda.decoding import CHOICE_ARRAYS, choice_fields, scratch_size
from gpt_cli.ops.cuda.layers import Memory, norm_of
from gpt_cli.ops.kernels import ACTIVATIONS
from gpt_cli.options.request import SamplingParams

FILES = (
    "logits.cu",
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
_MACROS = "ROWS", "STAGE_UNITS", "TILES"
_OLDEST = 80  # compute capability: older devices have no asynchronous copies


@dataclass(frozen=True)
class Places:
    """The text and the position of each row of a pass. All arrays are (rows,)."""

    texts: Array  # rows of the cache
    positions: Array  # of the tokens
    firsts: Array  # the rows of the first tokens of their texts


class Passes:
    """The kernels of passes for one type of weights, compiled on first use."""

    def __init__(
        self,
        xp: ModuleType,
        device: plans.Device,
        capability: int,
        dtype: str,
        files: tuple[str, ...],
        options: tuple[str, ...],
    ):
        """Take the source files that come before FILES, and the options of the compiler."""
        self._xp = xp
        self._device = device
        self._capability = capability
        self._dtype = dtype
        self._files = files + FILES
        self._options = options
        self._kernels: dict[tuple[int, ...], tuple[Any, compiler.Kernel]] = {}  # with modules
        self._tables: weakref.WeakKeyDictionary[Any, _Table] = weakref.WeakKeyDictionary()

    def most_rows(self, h: tuple[Block, ...], cache: Cache, V: int = 0) -> int:
        """Return the most rows of a pass, with logits of V tokens; 0 if this GPU can have none."""
        if self._capability < _OLDEST:
            return 0
        return plans.most_pass_rows(self._shape(h, cache, V), self._device)

    def layers(self, x: Array, h: tuple[Block, ...], cache: Cache, places: Places) -> None:
        """Replace x (rows, C) by the output of the last of the layers."""
        numbers = _Upload(self._xp, _arrays_of(places))
        fields = numbers.addresses | {"x": x, "steps": 1, "only_layers": 1}
        self._launch(self._shape(h, cache, 0), h, cache, len(places.texts), fields)

    def decode(
        self,
        model: Model,
        cache: Cache,
        last: Array,
        uniforms: Array,
        banned: Array,
        params: SamplingParams,
    ) -> tuple[Array, Array, Array]:
        """Do what `decoding.decode` does, in one launch; the results are on the host."""
        steps, rows = uniforms.shape
        head = model.lm_head
        V = head.weight.n_out
        ids = np.zeros((steps + 1, rows), np.int64)
        ids[0] = last
        results = {
            "ids": ids,
            "logprobs": np.empty((steps, rows)),
            "is_finite": np.ones(rows, np.int32),
        }
        places = Places(np.arange(rows), cache.lengths, np.arange(rows))
        draws = {"uniforms": np.ascontiguousarray(uniforms, np.float64)}
        numbers = _Upload(self._xp, results | draws | _arrays_of(places))
        size = scratch_size(V)
        spans = -(-V // plans.SPAN)
        sums = -(-V // plans.LOG_SUM_STEP) * plans.PARTIAL_SUMS
        counts = model.wte.n_in, V, spans, sums, CHOICE_ARRAYS * size
        memory = Memory(self._xp, *(4 * rows * count for count in counts))
        names = "x", "logits", "maxima", "sums", "scratch"
        fields = {
            **numbers.addresses, **dict(zip(names, memory.addresses, strict=True)),
            "ln_f": norm_of(model.ln_f), "lm_head": head.weight.struct, "lm_head_bias": head.bias,
            "wte": model.wte.struct, "wpe": model.wpe, "banned": banned,
            "banned_count": len(banned), "scratch_size": size, "steps": steps,
            **choice_fields(params),
        }  # fmt: skip
        self._launch(self._shape(model.h, cache, V), model.h, cache, rows, fields)
        new, logprobs, is_finite = numbers.read(*results)
        return new[1:], logprobs, is_finite

    def _shape(self, h: tuple[Block, ...], cache: Cache, V: int) -> plans.PassShape:
        C, inner = h[0].attn.c_attn.weight.n_in, h[0].mlp.c_fc.weight.n_out
        D = C // h[0].attn.n_head
        panels = cache.keys.shape[3]
        return plans.PassShape(self._dtype, len(h), C, inner, D, V, panels)

    def _launch(
        self,
        shape: plans.PassShape,
        h: tuple[Block, ...],
        cache: Cache,
        rows: int,
        fields: dict[str, Any],
    ) -> None:
        """Launch the kernel with these fields, and the fields of the layers and of the cache."""
        plan = plans.pass_plan(rows, shape, self._device)
        assert plan  # noqa: S101 (rows are at most `most_rows`)
        C = shape.C
        keys, values = cache.keys, cache.values
        memory = Memory(self._xp, *(4 * rows * width for width in (C, 3 * C, C, shape.inner)))
        names = "mid", "qkv", "z", "hidden"
        has_layers = len(keys) > 1  # else all layers use the same memory, one after the other
        size = keys.dtype.itemsize
        fields = {
            **fields, **dict(zip(names, memory.addresses, strict=True)),
            "layers": self._table(h), "keys": keys, "values": values,
            "keys_step": keys.strides[0] // size if has_layers else 0,
            "values_step": values.strides[0] // size if has_layers else 0,
            "n_layer": len(h), "rows": rows, "C": C, "H": h[0].attn.n_head, "D": shape.D,
            "inner": shape.inner, "cache_panels": shape.cache_panels,
            "stages": plan.stages, "chunk": plan.chunk,
        }  # fmt: skip
        macros = plan.most_rows, plan.stage_units, plan.tiles
        module, kernel = self._kernels.get(macros) or self._load(macros)
        compiler.set_constant(module, "job", structs.pack("pass", **fields))
        kernel.launch_together(self._device.processors, plans.PASS_THREADS, plan.shared)

    def _load(self, macros: tuple[int, ...]) -> tuple[Any, compiler.Kernel]:
        """Return the module and the kernel of passes with these macros, and keep them."""
        pairs = zip(_MACROS, macros, strict=True)
        defined = tuple(f"-D{name}={value}" for name, value in pairs)
        module = compiler.load(self._files, self._options + defined)
        self._kernels[macros] = module, compiler.Kernel(module, "pass", self._device.shared)
        return self._kernels[macros]

    def _table(self, h: tuple[Block, ...]) -> Array:
        """Return the layers of a model as structs on the device; they are kept."""
        table = self._tables.get(h[0])
        if table is None or table.h != [weakref.ref(b) for b in h]:
            table = _Table(self._xp, h)
            self._tables[h[0]] = table
        return table.structs


class _Upload:
    """Arrays that are copied to the device together, with a counter for barriers that is 0."""

    def __init__(self, xp: ModuleType, arrays: dict[str, Array]):
        """Copy the arrays; `addresses` has their addresses on the device, by name."""
        self._arrays = arrays | {"barrier": np.zeros(1, np.int64)}
        padded = (-(-array.nbytes // 8) * 8 for array in self._arrays.values())
        *starts, end = accumulate(padded, initial=0)
        self._starts = dict(zip(self._arrays, starts, strict=True))
        together = np.empty(end, np.uint8)
        for name, array in self._arrays.items():
            start = self._starts[name]
            together[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        self._device = xp.asarray(together)
        address = self._device.data.ptr
        self.addresses = {name: address + start for name, start in self._starts.items()}

    def read(self, *names: str) -> list[Array]:
        """Return arrays as they are on the device now; `names` are the first ones, in order."""
        last = names[-1]
        together = self._device[: self._starts[last] + self._arrays[last].nbytes].get()
        results = []
        for name in names:
            array = self._arrays[name]
            start = self._starts[name]
            numbers = together[start : start + array.nbytes].view(array.dtype)
            results.append(numbers.reshape(array.shape))
        return results


class _Table:
    """The layers of a model (`model.Block`s) as an array of `struct layer` on the device."""

    def __init__(self, xp: ModuleType, h: tuple[Block, ...]):
        self.h = [weakref.ref(b) for b in h]
        layers = b"".join([self._layer(b) for b in h])
        self.structs = xp.asarray(np.frombuffer(layers, np.uint8))

    def _layer(self, b: Block) -> bytes:
        linears = {
            "c_attn": b.attn.c_attn, "attn_c_proj": b.attn.c_proj,
            "c_fc": b.mlp.c_fc, "mlp_c_proj": b.mlp.c_proj,
        }  # fmt: skip
        matrices = {name: w.weight.struct for name, w in linears.items()}
        biases = {f"{name}_bias": w.bias for name, w in linears.items()}
        return structs.pack(
            "layer", ln_1=norm_of(b.ln_1), ln_2=norm_of(b.ln_2), scale=b.attn.scale,
            activation=ACTIVATIONS.index(b.mlp.activation), **matrices, **biases,
        )  # fmt: skip


def _arrays_of(places: Places) -> dict[str, Array]:
    """Return the arrays of places, in the type that the kernel takes."""
    return {name: np.ascontiguousarray(array, np.int64) for name, array in vars(places).items()}
