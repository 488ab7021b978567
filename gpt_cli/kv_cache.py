"""KVCache: the keys and values of the text so far, so that a new token computes only its own."""

from gpt_cli.config import GPT2Config
from gpt_cli.ops import Array, Ops


class KVCache:
    """Room for `capacity` tokens of `batch` texts, preallocated and written in place.

    All layers share one length, which grows once per forward pass. Memory:
    2 * n_layer * batch * capacity * n_embd numbers, taken from the system only as it is written.

    Attributes:
        k, v: (n_layer, B, H, capacity, D), of which the first `length` columns are valid; they have
            the precision of `ops.cache_dtype`.
        length: tokens stored, counting the padding of shorter rows.
    """

    def __init__(self, config: GPT2Config, ops: Ops, batch: int, capacity: int):
        self._config, self._ops = config, ops
        shape = (config.n_layer, batch, config.n_head, capacity, config.head_size)
        self.k: Array = ops.xp.empty(shape, ops.cache_dtype)
        self.v: Array = ops.xp.empty(shape, ops.cache_dtype)
        self.length = 0

    def append(self, ops: Ops, layer: int, k: Array, v: Array) -> tuple[Array, Array]:
        """Store one layer's k, v (B, H, T, D) of the new tokens, with `ops`.

        Returns:
            Views (B, H, S, D) of all keys and values of the layer, the new ones last.

        Raises:
            IndexError: there is no room for them.
        """
        end, capacity = self.length + k.shape[2], self.k.shape[3]
        if end > capacity:
            raise IndexError(f"the cache has room for {capacity} tokens, not for {end}")
        ops.store(k, self.k[layer, :, :, self.length : end])
        ops.store(v, self.v[layer, :, :, self.length : end])
        return self.k[layer, :, :, :end], self.v[layer, :, :, :end]

    def advance(self, tokens: int) -> None:
        """Count the tokens that every layer has stored in this forward pass."""
        self.length += tokens

    def rewind(self, tokens: int) -> None:
        """Forget the last tokens."""
        self.length -= tokens

    def keep(self, rows: list[int]) -> None:
        """Keep only these rows of the batch, in this order."""
        self.k, self.v = self.k[:, rows], self.v[:, rows]

    def copies(self, batch: int, capacity: int) -> "KVCache":
        """Return a cache of `batch` texts that all begin with the one that this cache holds."""
        made = KVCache(self._config, self._ops, batch, capacity)
        made.k[:, :, :, : self.length] = self.k[:, :, :, : self.length]
        made.v[:, :, :, : self.length] = self.v[:, :, :, : self.length]
        made.length = self.length
        return made
