"""GPT-2: the whole transformer, from its parts to the forward pass, written in `ops`.

Shapes: B batch, T new tokens, S = past + T, H heads, D head size, C = H * D width, V vocabulary.
Names are the checkpoint's. The architecture: Radford et al., "Language Models are Unsupervised
Multitask Learners", 2019; each block normalizes its input, not its output.
"""

from dataclasses import dataclass, replace

from gpt_cli.config import GPT2Config
from gpt_cli.kv_cache import KVCache
from gpt_cli.ops import Array, LayerNorm, Linear, Matrix, Ops

PASS = 1024  # tokens, in all rows, that callers compute at a time: what is held grows with them

# --- the weights: plain data ---------------------------------------------------------------------


@dataclass(frozen=True)
class Attention:
    """Causal self-attention of H heads."""

    c_attn: Linear  # (C, 3C): queries, keys and values in one product
    c_proj: Linear  # (C, C)
    n_head: int
    scale: float  # of the scores: 1 / sqrt(D), unless the configuration says otherwise


@dataclass(frozen=True)
class MLP:
    """Two layers with an activation between them."""

    c_fc: Linear  # (C, 4C)
    c_proj: Linear  # (4C, C)
    activation: str


@dataclass(frozen=True)
class Block:
    """One of the n_layer layers."""

    ln_1: LayerNorm
    attn: Attention
    ln_2: LayerNorm
    mlp: MLP


@dataclass(frozen=True)
class GPT2:
    """A checkpoint in memory, with the operations of the device that it lies on."""

    config: GPT2Config
    ops: Ops
    wte: Matrix  # (C, V) token embedding: a column for each token
    wpe: Array  # (n_positions, C) position embedding
    h: tuple[Block, ...]
    ln_f: LayerNorm
    lm_head: Linear  # (C, V), in most checkpoints wte again


# --- the computation, leaf to whole --------------------------------------------------------------


def split_heads(qkv: Array, n_head: int) -> Array:
    """(B, T, 3C) -> (3, B, H, T, D): the queries, keys and values of each head."""
    B, T, width = qkv.shape
    return qkv.reshape(B, T, 3, n_head, width // (3 * n_head)).transpose(2, 0, 3, 1, 4)


def merge_heads(x: Array) -> Array:
    """(B, H, T, D) -> (B, T, C)."""
    B, H, T, D = x.shape
    return x.swapaxes(1, 2).reshape(B, T, H * D)


def attention(
    ops: Ops, x: Array, attn: Attention, visible: Array | None, cache: KVCache | None, layer: int
) -> Array:
    """Each token gathers from those before it and from itself: x (B, T, C) -> (B, T, C)."""
    qkv = ops.linear(x, attn.c_attn)  # (B, T, 3C)
    q, k, v = split_heads(qkv, attn.n_head)  # (B, H, T, D)
    if cache is not None:
        k, v = cache.append(ops, layer, k, v)  # (B, H, S, D)
    gathered = ops.attend(q, k, v, attn.scale, visible)  # (B, H, T, D)
    return ops.linear(merge_heads(gathered), attn.c_proj)


def mlp(ops: Ops, x: Array, m: MLP) -> Array:
    """Each token by itself: x (B, T, C) -> (B, T, C)."""
    hidden = ops.linear(x, m.c_fc, activation=m.activation)  # (B, T, 4C)
    return ops.linear(hidden, m.c_proj)


def block(
    ops: Ops, x: Array, b: Block, visible: Array | None, cache: KVCache | None, layer: int
) -> Array:
    """One layer: attention and MLP, each reading a normalized x and adding to x (B, T, C)."""
    x = ops.add(x, attention(ops, ops.layer_norm(x, b.ln_1), b.attn, visible, cache, layer))
    return ops.add(x, mlp(ops, ops.layer_norm(x, b.ln_2), b.mlp))


def visibility(ops: Ops, T: int, S: int, padding: Array | None) -> Array | None:
    """Which of S keys each of the last T tokens may see: (B or 1, 1, T, S), None if all.

    A token sees itself and what is before it, but never the padding (B,) on the left of its row.
    """
    if padding is None and T == 1:
        return None
    keys = ops.xp.arange(S)
    visible: Array = keys <= keys[S - T :, None]  # (T, S)
    if padding is None:
        return visible[None, None]
    return (visible & (keys >= padding[:, None, None]))[:, None]


def hidden_states(
    model: GPT2, ids: Array, cache: KVCache | None = None, *, padding: Array | None = None
) -> Array:
    """Compute what the last layer says at each token: ids (B, T) -> (B, T, C).

    Args:
        model: the weights.
        ids: the whole text, or what is new since the last pass with `cache`.
        cache: the keys and values of the tokens before; the new ones are added to it.
        padding: (B,) how many of a row's first tokens, in all S, are only there to make the
            rows equally long; None where there are none.
    """
    ops = model.ops
    T = ids.shape[1]
    past = 0 if cache is None else cache.length
    positions = ops.xp.arange(past, past + T)[None]  # (1, T)
    if padding is not None:
        positions = ops.xp.maximum(positions - padding[:, None], 0)  # (B, T)
    visible = visibility(ops, T, past + T, padding)

    x = ops.embed(model.wte, model.wpe, ids, positions)  # (B, T, C)
    for layer, b in enumerate(model.h):
        x = block(ops, x, b, visible, cache, layer)
    if cache is not None:
        cache.advance(T)
    return x


def unembed(model: GPT2, x: Array) -> Array:
    """Compute the logits of what follows: hidden states x (..., C) -> (..., V), float32."""
    return model.ops.linear(model.ops.layer_norm(x, model.ln_f), model.lm_head)


def forward(
    model: GPT2, ids: Array, cache: KVCache | None = None, *, padding: Array | None = None
) -> Array:
    """The whole transformer: ids (B, T) -> logits (B, T, V) of what follows each token, float32."""
    return unembed(model, hidden_states(model, ids, cache, padding=padding))


class Decoder:
    """`forward`, one new token at a time, of a single text after a cache.

    Where the operations can record a pass, it is recorded here, and repeated for each token.
    """

    def __init__(self, model: GPT2, cache: KVCache):
        self._model, self._cache = model, cache
        self._recorder = model.ops.recorder(cache.length, model.config.activation_function)
        if self._recorder is not None:
            recording = replace(model, ops=self._recorder)
            self._recorder.finish(forward(recording, model.ops.xp.zeros((1, 1), int), cache))
            cache.rewind(1)  # nothing has been computed yet

    def __call__(self, ids: Array) -> Array:
        """Compute the logits of what follows: ids (1, 1) -> (1, 1, V), good until the next call."""
        if self._recorder is None:
            return forward(self._model, ids, self._cache)
        logits = self._recorder.step(ids, self._cache.length)
        self._cache.advance(1)
        return logits
