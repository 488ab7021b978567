"""KVCache: the keys and values of previous tokens, so that a pass computes only new tokens."""

from copy import copy

import numpy as np
from numpy.typing import NDArray

from gpt_cli.folder.config import GPT2Config
from gpt_cli.ops import Array, Ops


class KVCache:
    """A cache for `batch` texts of up to `capacity` tokens, preallocated and written in place.

    The lengths of texts differ, and grow once per forward pass. Memory takes no pages until it is
    written.

    Attributes:
        keys, values: (n_layer, B, H, panels of `ops.cache_panel` slots, ...) in the layout of the
            operations. The first `lengths` tokens of a text are valid.
        lengths: (B,) numbers of stored tokens of the texts, on the host.
        new: (B,) numbers of tokens that the layers append in this forward pass.
    """

    def __init__(
        self, config: GPT2Config, ops: Ops, batch: int, capacity: int, layers: int | None = None
    ):
        self._ops = ops
        self.capacity = capacity
        shape = batch, config.n_head, capacity, config.head_size
        self.keys, self.values = ops.new_cache(layers or config.n_layer, *shape)
        self.lengths: NDArray[np.int64] = np.zeros(batch, np.int64)
        self.new = self.lengths

    def reserve(self, new: NDArray[np.int64]) -> None:
        """Set `new`; raise IndexError if a text would exceed the capacity."""
        needed = max((self.lengths + new).tolist(), default=0)
        if needed > self.capacity:
            raise IndexError(f"the cache has room for {self.capacity} tokens, not for {needed}")
        self.new = new

    def append(self, layer: int, k: Array, v: Array) -> tuple[Array, Array]:
        """Store the k, v (B, H, T, D) of one layer; return all its keys and values."""
        layer %= len(self.keys)  # a pass without a cache has only one, which all layers share
        keys, values = self.keys[layer], self.values[layer]
        self._ops.store(k, v, keys, values, self.lengths, self.new)
        return keys, values

    def advance(self) -> None:
        """Count the tokens that the layers have stored in this forward pass."""
        self.lengths = self.lengths + self.new

    def rewind(self, lengths: NDArray[np.int64]) -> None:
        """Keep the first `lengths` (B,) tokens of the texts; later ones are overwritten."""
        self.lengths = lengths

    def sync(self, other: "KVCache") -> None:
        """Copy the tokens of another cache, of the same capacity, that are not in this one."""
        size = self._ops.cache_panel
        start = min(self.lengths.tolist()) // size
        stop = -(-max(other.lengths.tolist()) // size)
        if start < stop:
            self._ops.copyto(self.keys[:, :, :, start:stop], other.keys[:, :, :, start:stop])
            self._ops.copyto(self.values[:, :, :, start:stop], other.values[:, :, :, start:stop])
        self.lengths = other.lengths

    def view(self, rows: int) -> "KVCache":
        """Return a cache of the first rows, which uses the memory of this one."""
        view = copy(self)
        view.keys, view.values = self.keys[:, :rows], self.values[:, :rows]
        view.lengths = self.lengths[:rows]
        return view

    def of_layers(self, start: int, stop: int) -> "KVCache":
        """Return a cache of some layers, which uses the memory of this one."""
        if len(self.keys) == 1:  # which all layers share
            return self
        view = copy(self)
        view.keys, view.values = self.keys[start:stop], self.values[start:stop]
        return view

    def copy_row(
        self, row: int, other: "KVCache", other_row: int, tokens: int, start: int = 0
    ) -> None:
        """Replace a row by the first tokens of a row of a cache; it has those before `start`."""
        size = self._ops.cache_panel
        part = slice(start // size, -(-tokens // size))
        self.keys[:, row, :, part] = other.keys[:, other_row, :, part]
        self.values[:, row, :, part] = other.values[:, other_row, :, part]
        self.lengths = self.lengths.copy()
        self.lengths[row] = tokens
