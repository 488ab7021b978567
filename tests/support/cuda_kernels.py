"""The kernels of gpt_cli/ops/cuda, launched in the emulation on arrays of the host."""

from functools import cache

import numpy as np

from gpt_cli.ops.cuda import plans, structs
from gpt_cli.ops.kernels import ACTIVATIONS, KNOWN_STEPS
from support.emulated_kernels import Card, compile_kernels, read_source

FORMATS = ["float32", "bfloat16", "float16", "int8"]
# In the order of `cupy_ops`, whose tests use the same library.
_COMMON = "device", "arithmetic", "structs"
_NAMES = *_COMMON, "pack", "rows", "products", "attention", "logits", "sampling", "tokens"
FILES = tuple(f"{name}.cu" for name in _NAMES)
_UNITS = {"float32": (32, 1024), "bfloat16": (32, 512), "float16": (32, 512), "int8": (64, 528)}
_H100 = Card()
_GUARD = 256  # bytes after a result that a kernel must not touch


@cache
def kernels(dtype, card=_H100):
    return compile_kernels(read_source(FILES), (f"-DFORMAT={FORMATS.index(dtype)}",), card)


def struct_of(name, **fields):
    """Return an argument of a kernel. Arrays become their addresses, dicts structs."""
    job = np.zeros((), structs.types()[name])
    for field, value in fields.items():
        if isinstance(value, np.ndarray) and value.ndim:
            value = value.ctypes.data
        job[field] = 0 if value is None else value
    return job


def result(shape, dtype=np.float32):
    """Return an array for results, and the larger one that it is part of."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.full(size + _GUARD, 0xAB, np.uint8)
    start = -memory.ctypes.data % 16
    return memory[start : start + size].view(dtype).reshape(shape), memory


def assert_guarded(array, memory):
    """Check that no kernel has written after the array."""
    end = array.ctypes.data - memory.ctypes.data + array.nbytes
    assert (memory[end:] == 0xAB).all()


class Matrix:
    """A matrix in panels, packed in pieces of `step` stored rows."""

    def __init__(self, rows, scales, dtype, *, transposed, device, step=1 << 30, card=_H100):
        count, length = rows.shape
        self.n_in, self.n_out = (length, count) if transposed else (count, length)
        unit_rows, unit_bytes = _UNITS[dtype]
        self.units = -(-self.n_in // unit_rows)
        size = -(-self.n_out // plans.PANEL) * self.units * unit_bytes
        self.panels, memory = result((size,), np.uint8)
        for first in range(0, count, step):
            part = np.ascontiguousarray(rows[first : first + step])
            groups = None
            if scales is not None:
                groups = scales[first : first + step] if transposed else scales[first // 64 :]
                groups = np.ascontiguousarray(groups)
            job = struct_of(
                "pack", panels=self.panels, rows=part, scales=groups, n_in=self.n_in,
                n_out=self.n_out, units=self.units, first=first, count=len(part),
                transposed=transposed,
            )  # fmt: skip
            launch(dtype, plans.pack(len(part), length, device), job, card)
        assert_guarded(self.panels, memory)

    @property
    def struct(self):
        sizes = {"n_in": self.n_in, "n_out": self.n_out, "units": self.units}
        return struct_of("matrix", panels=self.panels, **sizes)


def launch(dtype, plan, job, card=_H100):
    kernel = kernels(dtype, card).get_function(plan.kernel)
    kernel.max_dynamic_shared_size_bytes = max(plan.shared, 48 * 1024)
    kernel(plan.grid, (plan.threads,), (job,), shared_mem=plan.shared)


def linear(x, matrix, dtype, *, tile, bias=None, residual=None, activation=None, card=_H100):
    """Return residual + activation(bias + x @ matrix), by a tile of `plans`."""
    rows, n_out = len(x), matrix.n_out
    y, memory = result((rows, n_out))
    digits, steps = result((rows, matrix.units, 128), np.int8)[0], result((rows,))[0]
    job = struct_of(
        "linear", w=matrix.struct, bias=bias, x=x, residual=residual, y=y, digits=digits,
        steps=steps, rows=rows, activation=ACTIVATIONS.index(activation),
    )  # fmt: skip
    if dtype == "int8":
        launch(dtype, plans.round_rows(rows), job, card)
    grid = -(-n_out // tile.columns), -(-rows // tile.rows)
    launch(dtype, plans.Launch(tile.kernel, grid, tile.threads, tile.shared), job, card)
    assert_guarded(y, memory)
    return y


def attend(
    q, keys, values, scale, visible, dtype, plan, *, steps=None, known_step=None, card=_H100
):
    """Return attention (B, H, T, D) of q, with any strides, to a cache."""
    B, H, T, D = q.shape
    S = steps[0].shape[3] if steps else int(visible.max())
    y, memory = result((B, T, H * D))
    scores, pattern = steps or (None, None)
    strides = {
        f"{axis}_stride": stride // 4 for axis, stride in zip("bht", q.strides[:3], strict=True)
    }
    job = struct_of(
        "attend", q=q, keys=keys, values=values, visible=visible, y=y, scores=scores,
        pattern=pattern, B=B, H=H, T=T, D=D, cache_panels=keys.shape[2], S=S, scale=scale,
        scratch=result((max(1, plans.attend_scratch(plan, S)),))[0],
        known_step=KNOWN_STEPS.index(known_step), **strides,
    )  # fmt: skip
    launch(dtype, plan, job, card)
    assert_guarded(y, memory)
    return y.reshape(B, T, H, D).swapaxes(1, 2)
