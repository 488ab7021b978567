"""A decode step as a list of what to do: recorded once, then done in one call for each token.

A token is a hundred operations, and Python takes as long for each as a small matrix takes to be
read. So the model is run once with a `Recorder` for its operations, which computes nothing, but
notes what to compute and where. `kernels.repeat_int8` does it then. What a step is stands in
model.py and nowhere else.
"""

import numpy as np

from gpt_cli.ops import Array, LayerNorm, Linear, kernels
from gpt_cli.ops.numba_ops import Int8NumbaOps, Packed


class Recorder(Int8NumbaOps):
    """The operations of int8 weights, for one new token of one text after a cache.

    The arrays that they return stay where they are; what is in them changes with each `step`.
    """

    def __init__(self, ops: Int8NumbaOps, past: int):
        self.threads = ops.threads
        self._past = past  # tokens, when it is recorded
        self._rows: list[list[int]] = []
        self._numbers: list[float] = []
        self._kept: list[Array] = []  # the arrays whose addresses the rows have

    def finish(self, result: Array) -> None:
        """Take what the model has returned: the recording is at its end."""
        self._result = result
        self._program = np.zeros((len(self._rows), max(map(len, self._rows))), np.int64)
        for row, recorded in zip(self._program, self._rows, strict=True):
            row[: len(recorded)] = recorded
        self._epsilons_and_scales = np.array(self._numbers, np.float32)

    def step(self, ids: Array, past: int) -> Array:
        """Compute for a token ids (1, 1) after `past` others what was recorded; return the result.

        It is the same array each time.

        Raises:
            IndexError: the id is none of the model's, or the cache is full.
        """
        if past >= self._capacity:
            raise IndexError(f"the cache has room for {self._capacity} tokens")
        self._x[:] = super().embed(self._wte, self._wpe, ids, np.array([[past]]))
        kernels.repeat_int8(self._program, self._epsilons_and_scales, past)
        return self._result

    def embed(self, wte: Packed, wpe: Array, ids: Array, positions: Array) -> Array:
        """Note the tables: a step begins with them."""
        self._wte, self._wpe = wte, wpe
        self._x = np.empty((1, 1, wpe.shape[1]), np.float32)
        return self._x

    def layer_norm(self, x: Array, ln: LayerNorm) -> Array:
        """Record it."""
        y = np.empty_like(x)
        self._note(kernels.LAYER_NORM, x, y, x.size, ln.weight, ln.bias, number=ln.epsilon)
        return y

    def linear(self, x: Array, w: Linear, activation: str | None = None) -> Array:
        """Record it."""
        panels = w.weight.panels
        y = np.empty((1, 1, len(panels) * kernels.COLUMNS), np.float32)
        bias = np.empty(0, np.float32) if w.bias is None else w.bias
        sizes = len(panels), len(bias), activation == "gelu_new"
        self._note(kernels.LINEAR, x, y, x.size, panels, bias, *sizes)
        return y[..., : w.weight.n_out]

    def add(self, x: Array, y: Array) -> Array:
        """Record it."""
        total = np.empty_like(x)
        self._note(kernels.ADD, x, total, x.size, y)
        return total

    def store(self, x: Array, place: Array) -> None:
        """Record it, of a place that moves on with each token."""
        _, H, _, D = x.shape
        self._kept.append(place)
        self._capacity = _capacity(place)
        first = place.ctypes.data - self._past * place.strides[2]
        self._note(kernels.STORE, x, first, D, H, self._capacity)

    def attend(
        self, q: Array, keys: Array, values: Array, scale: float, visible: Array | None
    ) -> Array:
        """Record it, of keys and values that become more with each token."""
        _, H, _, D = q.shape
        y = np.empty((1, H, 1, D), np.float32)
        self._note(kernels.ATTEND, q, y, D, keys, values, H, _capacity(keys), number=scale)
        return y

    def _note(self, what: int, *arguments: Array | int, number: float = 0) -> None:
        """Add a row to the program, with the addresses of arrays."""
        self._kept += (x for x in arguments if isinstance(x, np.ndarray))
        places = (x.ctypes.data if isinstance(x, np.ndarray) else int(x) for x in arguments)
        self._rows.append([what, *places])
        self._numbers.append(number)


def _capacity(cached: Array) -> int:
    """Return for how many tokens the cache has room that these keys or values are a view of."""
    return int(cached.strides[1] // cached.strides[2])
