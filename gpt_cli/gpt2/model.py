"""GPT-2: the whole transformer, from its parts to the forward pass, written in `ops`.

Shapes: B batch, T new tokens, S = past + T, H heads, D head size, C = H * D width, V vocabulary.
4C is the inner width of the MLP, unless the configuration says otherwise. Names are the
checkpoint's. The architecture is that of Radford et al., "Language Models are Unsupervised
Multitask Learners", 2019: a block normalizes its input (pre-norm).

`hook` gets each named value and may replace it; the names are TransformerLens's. By default nobody
listens.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpt_cli.folder.config import GPT2Config
from gpt_cli.gpt2.hooks import NO_HOOK, Hook
from gpt_cli.gpt2.kv_cache import KVCache
from gpt_cli.gpt2.run_state import RunState, in_one_call
from gpt_cli.gpt2.weights import check_finite
from gpt_cli.ops import Array, LayerNorm, Linear, Matrix, Ops

Counts: TypeAlias = NDArray[np.int64]  # numbers of tokens, on the host


# --- the weights ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attention:
    """Causal self-attention of H heads."""

    c_attn: Linear  # (C, 3C): queries, keys and values in one product
    c_proj: Linear  # (C, C)
    n_head: int
    scale: float  # factor of the scores: 1 / sqrt(D), unless the configuration says otherwise


@dataclass(frozen=True)
class MLP:
    """Two linear layers with an activation between them."""

    c_fc: Linear  # (C, 4C)
    c_proj: Linear  # (4C, C)
    activation: str


@dataclass(frozen=True, eq=False)  # hashable by identity: the library keeps what it makes of one
class Block:
    """One of the n_layer layers: attention, then an MLP."""

    ln_1: LayerNorm
    attn: Attention
    ln_2: LayerNorm
    mlp: MLP


@dataclass(frozen=True)
class GPT2:
    """A checkpoint in memory, with the operations of its device."""

    config: GPT2Config
    ops: Ops
    wte: Matrix  # (C, V) token embedding, one column per token: the checkpoint's is (V, C)
    wpe: Array  # (n_positions, C) position embedding
    h: tuple[Block, ...]
    ln_f: LayerNorm
    lm_head: Linear  # (C, V), tied to wte in most checkpoints


# --- the computation, bottom-up ------------------------------------------------------------------


def split_heads(qkv: Array, n_head: int) -> Array:
    """Split into queries, keys and values by head: (B, T, 3C) -> (3, B, H, T, D)."""
    B, T, width = qkv.shape
    return qkv.reshape(B, T, 3, n_head, width // (3 * n_head)).transpose(2, 0, 3, 1, 4)


def merge_heads(x: Array) -> Array:
    """Concatenate the heads: (B, H, T, D) -> (B, T, C)."""
    B, H, T, D = x.shape
    return x.swapaxes(1, 2).reshape(B, T, H * D)


def embed(model: GPT2, ids: Array, positions: Array, hook: Hook) -> Array:
    """Add the embeddings of tokens and positions: ids, positions (B, T) -> (B, T, C)."""
    ops = model.ops
    if not hook.listens("hook_embed", "hook_pos_embed"):
        return ops.embed(model.wte, model.wpe, ids, positions)
    zero = ops.xp.full_like(model.wpe[:1], -0.0)  # x + -0.0 is x
    of_tokens = ops.embed(model.wte, zero, ids, np.zeros_like(positions))
    of_tokens = hook("hook_embed", of_tokens)
    of_positions = hook("hook_pos_embed", model.wpe[ops.xp.asarray(positions)])
    return ops.add(of_tokens, of_positions)


def attention(x: Array, attn: Attention, layer: int, run: RunState) -> Array:
    """Mix every token with the tokens before it and itself: x (B, T, C) -> (B, T, C)."""
    ops, hook = run.ops, run.hook.at(layer)
    qkv = ops.linear(x, attn.c_attn)  # (B, T, 3C)
    q, k, v = split_heads(qkv, attn.n_head)  # (B, H, T, D)
    q = hook("attn.hook_q", q)
    k = hook("attn.hook_k", k)
    v = hook("attn.hook_v", v)
    keys, values = run.cache.append(layer, k, v)  # of all S tokens
    z = run.attend(q, keys, values, attn.scale, layer)  # (B, H, T, D)
    z = hook("attn.hook_z", z)
    return hook("hook_attn_out", ops.linear(merge_heads(z), attn.c_proj))


def mlp(x: Array, m: MLP, layer: int, run: RunState) -> Array:
    """Transform every token by itself: x (B, T, C) -> (B, T, C)."""
    ops, hook = run.ops, run.hook.at(layer)
    if hook.listens("mlp.hook_pre"):
        pre = hook("mlp.hook_pre", ops.linear(x, m.c_fc))  # (B, T, 4C)
        post = ops.activate(pre, m.activation)
    else:  # the same in one operation
        post = ops.linear(x, m.c_fc, activation=m.activation)
    post = hook("mlp.hook_post", post)
    return hook("hook_mlp_out", ops.linear(post, m.c_proj))


def block(x: Array, b: Block, layer: int, run: RunState) -> Array:
    """Run one layer: attention and MLP read the normalized x and add to x (B, T, C)."""
    ops, hook = run.ops, run.hook.at(layer)
    x = hook("hook_resid_pre", x)
    normalized = hook("ln1.hook_normalized", ops.layer_norm(x, b.ln_1))
    x = ops.add(x, attention(normalized, b.attn, layer, run))
    x = hook("hook_resid_mid", x)
    normalized = hook("ln2.hook_normalized", ops.layer_norm(x, b.ln_2))
    x = ops.add(x, mlp(normalized, b.mlp, layer, run))
    return hook("hook_resid_post", x)


@in_one_call  # the library may compute the layers instead, with the same bits
def blocks(x: Array, h: tuple[Block, ...], first: int, run: RunState) -> Array:
    """Run layers, one after the other, from number `first` on: x (B, T, C) -> (B, T, C)."""
    for layer, b in enumerate(h, first):
        x = block(x, b, layer, run)
    return x


@np.errstate(all="ignore")  # `unembed` reports damaged weights
def hidden_states(
    model: GPT2,
    ids: Array,
    cache: KVCache | None = None,
    new: Counts | None = None,
    hook: Hook = NO_HOOK,
) -> Array:
    """Compute the last layer's normalized output for all tokens: ids (B, T) -> (B, T, C).

    IndexError if the cache is full, or an id or a position is out of range.

    Args:
        model: the weights.
        ids: the whole texts, or with a cache the tokens to append to its texts.
        cache: the keys and values of the previous tokens.
        new: (B,) the number of tokens in each row, by default T. The rest of a row is padding on
            the right; its results are undefined.
        hook: is called with each value, in the order of computation.
    """
    ops = model.ops
    B, T = ids.shape
    if cache is None:  # make one with room for one layer, which the next layer overwrites
        cache = KVCache(model.config, ops, B, T, layers=1)
    if new is None:
        new = np.full(B, T)
    cache.reserve(new)
    positions = cache.lengths[:, None] + np.minimum(np.arange(T), new[:, None] - 1)  # (B, T)
    positions = np.maximum(positions, 0)  # a row of only padding would be at -1
    visible = positions + 1  # the causal mask: how many keys each token sees, up to its own

    hook = hook.begin(positions, new)
    x = embed(model, ids, positions, hook)  # (B, T, C)
    x = blocks(x, model.h, 0, RunState(ops, visible, cache, hook))
    cache.advance()
    return hook("ln_final.hook_normalized", ops.layer_norm(x, model.ln_f))


@np.errstate(all="ignore")  # the error replaces NumPy's warnings
def unembed(model: GPT2, x: Array, hook: Hook = NO_HOOK) -> Array:
    """Compute the logits of the next token: hidden states x (..., C) -> (..., V), float32.

    Raise NotFiniteError if a logit is not finite: the weights are damaged, or values overflow that
    the hook of the pass has changed.
    """
    logits = model.ops.linear(x, model.lm_head)
    check_finite(model, logits, hook)
    return logits


def forward(
    model: GPT2, ids: Array, cache: KVCache | None = None, new: Counts | None = None
) -> Array:
    """Run the transformer: ids (B, T) -> logits (B, T, V) of the next tokens, float32."""
    return unembed(model, hidden_states(model, ids, cache, new))
