"""KVCache: the keys and values of the texts so far, so that a new token computes only its own."""

import numpy as np
from numpy.typing import NDArray

from gpt_cli.config import GPT2Config
from gpt_cli.ops import Array, Ops


class KVCache:
    """Room for `capacity` tokens of `batch` texts, preallocated and written in place.

    Each text has its own length, which grows once per forward pass. Memory:
    2 * n_layer * batch * capacity * n_embd numbers, taken from the system only as it is written.

    Attributes:
        keys, values: (n_layer, B, H, blocks of `ops.cache_block` tokens, ...) in the layout of the
            operations. Of a text, the first `lengths` tokens are valid.
        lengths: (B,) tokens stored of each text, on the host.
        new: (B,) tokens of each text that the layers append in this forward pass.
    """

    def __init__(
        self, config: GPT2Config, ops: Ops, batch: int, capacity: int, layers: int | None = None
    ):
        self._config, self._ops = config, ops
        self.capacity = capacity
        shape = batch, config.n_head, capacity, config.head_size
        self.keys, self.values = ops.new_cache(layers or config.n_layer, *shape)
        self.lengths: NDArray[np.int64] = np.zeros(batch, np.int64)
        self.new = self.lengths

    def reserve(self, new: NDArray[np.int64]) -> None:
        """Announce how many tokens of each text (B,) the layers will append.

        Raises:
            IndexError: there is no room for them.
        """
        most = max((self.lengths + new).tolist(), default=0)
        if most > self.capacity:
            raise IndexError(f"the cache has room for {self.capacity} tokens, not for {most}")
        self.new = new

    def append(self, layer: int, k: Array, v: Array) -> tuple[Array, Array]:
        """Store one layer's k, v (B, H, T, D) of the tokens that were announced.

        Returns:
            All keys and all values of the layer.
        """
        keys, values = self.layer(layer)
        self._ops.store(k, v, keys, values, self.lengths, self.new)
        return keys, values

    def layer(self, layer: int) -> tuple[Array, Array]:
        """Return the room of one layer: keys and values."""
        layer %= len(self.keys)  # without a cache there is room for one layer at a time
        return self.keys[layer], self.values[layer]

    def advance(self) -> None:
        """Count the tokens that every layer has stored in this forward pass."""
        self.lengths = self.lengths + self.new

    def rewind(self, tokens: int) -> None:
        """Forget the last tokens of each text."""
        self.lengths = self.lengths - tokens

    def keep(self, rows: list[int]) -> None:
        """Keep only these texts of the batch, in this order."""
        kept = self._select(rows, self.capacity)
        self.keys, self.values, self.lengths = kept.keys, kept.values, kept.lengths

    def copies(self, batch: int, capacity: int) -> "KVCache":
        """Return a cache of `batch` texts that all begin with the one that this cache holds."""
        return self._select([0] * batch, capacity)

    def _select(self, rows: list[int], capacity: int) -> "KVCache":
        made = KVCache(self._config, self._ops, len(rows), capacity, layers=len(self.keys))
        made.lengths = self.lengths[rows]
        for place, row in enumerate(rows):
            blocks = -(-int(self.lengths[row]) // self._ops.cache_block)
            made.keys[:, place, :, :blocks] = self.keys[:, row, :, :blocks]
            made.values[:, place, :, :blocks] = self.values[:, row, :, :blocks]
        return made
