"""The operations on the CPU, compiled: what NumPy does in several passes is one, on all cores.

The loops are in `kernels`; here is what they work on. `numpy_ops` is the reference.
"""

import os
from dataclasses import dataclass

import numba
import numpy as np

from gpt_cli.errors import ResourceError
from gpt_cli.machine import blas_threads, cores
from gpt_cli.ops import Array, LayerNorm, Linear, Rows
from gpt_cli.ops.numpy_ops import ACTIVATIONS
from gpt_cli.ops.tile import COLUMNS

try:
    from gpt_cli.ops import kernels
except RuntimeError as error:  # numba found no folder for what it compiles
    raise ImportError(f"{error}; set NUMBA_CACHE_DIR to a folder that can be written") from error

# Rows lie this many floats further apart than they are long. Where they were a power of two apart,
# the processor's cache would have to keep all rows of a tile in the same few places.
_GAP = 16
_PIECE = 256 * 1024  # numbers that are read and packed at a time: 1 MB, which stays in a cache
_NO_BIAS = np.empty(0, np.float32)


@dataclass(frozen=True)
class Packed:
    """A matrix (n_in, n_out) in panels (P, n_in, COLUMNS) of columns that lie side by side."""

    panels: Array
    n_out: int


class NumbaOps:
    """The operations of `gpt_cli.ops.Ops` on the CPU."""

    name = "numba"
    xp = np

    def __init__(self) -> None:
        self.threads = min(cores(), blas_threads(), numba.get_num_threads())
        numba.set_num_threads(self.threads)
        self._process = os.getpid()

    def place(self, array: Array) -> Array:
        """Return the array itself: it is where it belongs."""
        return array

    def place_matrix(self, rows: Rows, *, transposed: bool = False) -> Packed:
        """Cut a matrix (n_in, n_out) into panels, some rows at a time while they are in cache."""
        n_rows, length = rows.shape
        n_in, n_out = (length, n_rows) if transposed else (n_rows, length)
        panels = np.empty((-(-n_out // COLUMNS), n_in, COLUMNS), np.float32)
        panels[-1] = 0  # its last columns may be none of the matrix
        pack = kernels.pack_columns if transposed else kernels.pack_rows
        step = max(1, _PIECE // length)
        for start in range(0, n_rows, step):
            pack(rows[start : start + step], panels, start)
        return Packed(panels, n_out)

    def to_host(self, array: Array) -> Array:
        """Return the array itself."""
        return array

    def embed(self, wte: Packed, wpe: Array, ids: Array, positions: Array) -> Array:
        """Columns of wte and rows of wpe, added: (B, T, C). Every pass begins with it.

        Raises:
            ResourceError: OpenMP's threads were left behind in the process that this is a fork of.
        """
        if os.getpid() != self._process:
            raise ResourceError(
                "compiled operations cannot be used in a fork of the process that loaded the "
                "model: start it by multiprocessing's 'spawn', or set GPT_CLI_OPS=numpy"
            )
        x = np.empty((*ids.shape, wpe.shape[1]), np.float32)
        columns = ids.astype(np.int64).ravel()
        rows = np.broadcast_to(positions, ids.shape).astype(np.int64).ravel()
        kernels.embed(wte.panels, wpe, columns, rows, x.reshape(-1, x.shape[-1]))
        return x

    def layer_norm(self, x: Array, ln: LayerNorm) -> Array:
        """(x - mean) / sqrt(variance + epsilon) * weight + bias, over the last axis."""
        C = x.shape[-1]
        rows = np.ascontiguousarray(x).reshape(-1, C)
        y = np.empty((len(rows), C + _GAP), np.float32)
        kernels.layer_norm(rows, ln.weight, ln.bias, ln.epsilon, y)
        return y[:, :C].reshape(x.shape)

    def linear(self, x: Array, w: Linear, activation: str | None = None) -> Array:
        """activation(x @ weight + bias), each panel of the weight read once for all rows."""
        packed: Packed = w.weight
        rows = x.reshape(-1, x.shape[-1])
        y = np.empty((len(rows), len(packed.panels) * COLUMNS + _GAP), np.float32)
        gelu = activation == "gelu_new"
        kernels.linear(rows, packed.panels, w.bias if w.bias is not None else _NO_BIAS, gelu, y)
        y = y[:, : packed.n_out]
        if activation is not None and not gelu:
            y = ACTIVATIONS[activation](y)
        return y.reshape(*x.shape[:-1], packed.n_out)

    def attend(
        self, q: Array, keys: Array, values: Array, scale: float, visible: Array | None
    ) -> Array:
        """softmax(scale * q keysT) values, with nothing taken from keys that are not visible."""
        B, H, T, D = q.shape
        y = np.empty((B, T, H * D + _GAP), np.float32)
        if visible is None:
            visible = np.ones((1, 1, 1, keys.shape[2]), np.bool_)
        attend = kernels.attend_one if T == 1 else kernels.attend_many
        attend(q, keys, values, scale, np.ascontiguousarray(visible), y)
        return y[:, :, : H * D].reshape(B, T, H, D).swapaxes(1, 2)

    def log_normalizer(self, logits: Array) -> Array:
        """The logarithm of the sum of exp(logits), over the last axis, in float64."""
        normalizer = np.empty(len(logits))
        kernels.log_normalizer(logits, normalizer)
        return normalizer
