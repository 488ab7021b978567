"""The layers of many rows: the operations one by one, in memory that is allocated once.

Python takes some 5 microseconds for a launch, a GPU some 10 for the kernel. So nothing is allocated
between launches, and this module computes addresses instead of making views of arrays.
"""

from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType
from typing import Protocol

import numpy as np

from gpt_cli.folder.dtypes import WEIGHT_TYPES
from gpt_cli.ops.contract import Block, Cache, LayerNorm, Linear
from gpt_cli.ops.cuda import plans, structs
from gpt_cli.ops.cuda.launcher import Launcher
from gpt_cli.ops.kernels import ACTIVATIONS

_ALIGNMENT = 256  # bytes


@dataclass(frozen=True)
class Tokens:
    """The new tokens (B, T) of a pass. Numbers of tokens are int64, at these addresses."""

    past: int  # (B,) cached tokens
    lengths: int  # (B,) new tokens of the texts
    visible: int  # (B, T) keys that the tokens see
    S: int  # the largest number in `visible`


class DeviceOps(Protocol):
    """The part of `CuPyOps` that a pass needs."""

    launch: Launcher
    gpu: plans.Device
    xp: ModuleType
    dtype: str


class Memory:
    """Arrays on the device in one allocation, which are not initialized."""

    def __init__(self, xp: ModuleType, *sizes: int):
        """Allocate arrays of these sizes in bytes; `addresses` has their addresses."""
        aligned = (-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)
        *starts, end = accumulate(aligned, initial=0)
        self._memory = xp.empty(end, np.uint8)
        self.addresses = [self._memory.data.ptr + start for start in starts]


class Layers:
    """The layers `h` for B texts of T new tokens, each of up to S tokens in all."""

    def __init__(self, ops: DeviceOps, h: tuple[Block, ...], cache: Cache, B: int, T: int, S: int):
        self._launch = ops.launch
        self._device = ops.gpu
        self._dtype = ops.dtype
        self._h = h
        self._cache = cache
        self._norms = [(norm_of(b.ln_1), norm_of(b.ln_2)) for b in h]
        H = h[0].attn.n_head
        C, inner = h[0].attn.c_attn.weight.n_in, h[0].mlp.c_fc.weight.n_out
        self._B, self._T, self._H, self._C, self._D = B, T, H, C, C // H
        self.rows = B * T
        launch = plans.attend(B * H, T, C // H, S, self._device)
        self._rounds = WEIGHT_TYPES[self._dtype].has_groups  # activations to integers
        digits = 2 * plans.LAYOUTS[self._dtype].padded(max(C, inner)) if self._rounds else 0
        self._memory = Memory(
            ops.xp, 4 * self.rows * C, 4 * self.rows * max(3 * C, inner),
            4 * plans.attend_scratch(launch, S), self.rows * digits, 4 * self.rows,
        )  # fmt: skip
        # (rows, C): layer norms, and results of attention; (rows, 3C) or (rows, inner)
        addresses = self._memory.addresses
        self.normalized, self._wide, self._scratch, self._digits, self._steps = addresses

    def run(self, x: int, tokens: Tokens) -> None:
        """Replace x (rows, C), at this address, by the output of the last layer."""
        for layer, (b, norms) in enumerate(zip(self._h, self._norms, strict=True)):
            self._block(x, b, norms, layer, tokens)

    def _block(
        self, x: int, b: Block, norms: tuple[bytes, bytes], layer: int, tokens: Tokens
    ) -> None:
        """Compute one layer, as `block` in model.py does."""
        normalized, wide = self.normalized, self._wide
        self.layer_norm(x, norms[0])
        self.linear(normalized, b.attn.c_attn, wide)
        self._attention(b, layer, tokens)
        self.linear(normalized, b.attn.c_proj, x, residual=x)
        self.layer_norm(x, norms[1])
        self.linear(normalized, b.mlp.c_fc, wide, b.mlp.activation)
        self.linear(wide, b.mlp.c_proj, x, residual=x)

    def layer_norm(self, x: int, ln: bytes) -> None:
        """Normalize x (rows, C) to `normalized`."""
        job = structs.pack("layer_norm", ln=ln, x=x, y=self.normalized, rows=self.rows, C=self._C)
        self._launch(plans.layer_norm(self.rows, self._C), job)

    def linear(
        self, x: int, w: Linear, y: int, activation: str | None = None, residual: int = 0
    ) -> None:
        """Write residual + activation(x @ weight + bias) to y, which may be the residual."""
        matrix = w.weight
        rows = self.rows
        job = structs.pack(
            "linear", w=matrix.struct, bias=w.bias, x=x, residual=residual, y=y, rows=rows,
            digits=self._digits, steps=self._steps, activation=ACTIVATIONS.index(activation),
        )  # fmt: skip
        if self._rounds:
            self._launch(plans.round_rows(rows), job)
        shape = rows, matrix.n_in, matrix.n_out
        self._launch(plans.linear(*shape, self._dtype, self._device), job)

    def _attention(self, b: Block, layer: int, tokens: Tokens) -> None:
        """Store keys and values, and attend: (rows, 3C) -> (rows, C), `normalized`."""
        B, H, T, D, C = self._B, self._H, self._T, self._D, self._C
        qkv = self._wide
        shape = {
            "b_stride": 3 * C * T, "h_stride": D, "t_stride": 3 * C, "B": B, "H": H, "T": T, "D": D,
            **cache_fields(self._cache, layer),
        }  # fmt: skip
        job = structs.pack(
            "store", k=qkv + 4 * C, v=qkv + 8 * C, past=tokens.past, lengths=tokens.lengths, **shape
        )
        self._launch(plans.store(B * H, T), job)
        job = structs.pack(
            "attend", q=qkv, visible=tokens.visible, S=tokens.S, scale=b.attn.scale,
            scratch=self._scratch, y=self.normalized, **shape,
        )  # fmt: skip
        self._launch(plans.attend(B * H, T, D, tokens.S, self._device), job)


def norm_of(ln: LayerNorm) -> bytes:
    """Return a `struct norm`. The arrays are the model's, and contiguous."""
    return structs.pack("norm", weight=ln.weight, bias=ln.bias, epsilon=ln.epsilon)


def cache_fields(cache: Cache, layer: int) -> dict[str, int]:
    """Return the fields of one layer of a cache. If it has one layer, all layers use that."""
    keys, values = cache.keys, cache.values
    layer %= len(keys)
    return {
        "keys": keys.data.ptr + layer * keys.strides[0],
        "values": values.data.ptr + layer * values.strides[0],
        "cache_panels": keys.shape[3],
    }
