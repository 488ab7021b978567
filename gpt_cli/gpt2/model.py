"""GPT-2: the whole transformer, from its parts to the forward pass, written in `ops`.

Shapes: B batch, T new tokens, S = past + T, H heads, D head size, C = H * D width, V vocabulary.
Names are the checkpoint's. The architecture is that of Radford et al., "Language Models are
Unsupervised Multitask Learners", 2019: a block normalizes its input (pre-norm).

`hook` gets values of the pass by their names in TransformerLens. By default nobody listens.
"""

from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpt_cli.folder.config import GPT2Config
from gpt_cli.gpt2.hooks import NO_HOOK, Hook
from gpt_cli.gpt2.kv_cache import KVCache
from gpt_cli.gpt2.source import is_edited
from gpt_cli.gpt2.weights import check_finite
from gpt_cli.ops import Array, LayerNorm, Linear, Matrix, Ops, Steps

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


@dataclass(frozen=True, eq=False)  # hashable by identity
class Block:
    """One of the n_layer layers."""

    ln_1: LayerNorm
    attn: Attention
    ln_2: LayerNorm
    mlp: MLP


@dataclass(frozen=True)
class GPT2:
    """A checkpoint in memory, with the operations of its device."""

    config: GPT2Config
    ops: Ops
    wte: Matrix  # (C, V) token embedding, one column per token
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
    ops, wte, wpe = model.ops, model.wte, model.wpe
    if not hook.listens("hook_embed", "hook_pos_embed"):
        return ops.embed(wte, wpe, ids, positions)
    nowhere = ops.xp.full_like(wpe[:1], -0.0)  # changes no bit
    tokens = ops.embed(wte, nowhere, ids, np.zeros_like(positions))
    tokens = hook("hook_embed", tokens)
    return ops.add(tokens, hook("hook_pos_embed", wpe[ops.xp.asarray(positions)]))


def attend(
    ops: Ops, q: Array, keys: Array, values: Array, scale: float, visible: Array, hook: Hook
) -> Array:
    """Return the means of the values, weighted by the attention: q (B, H, T, D) -> (B, H, T, D)."""
    if not hook.listens("attn.hook_attn_scores", "attn.hook_pattern"):
        return ops.attend(q, keys, values, scale, visible)
    shape = *q.shape[:3], int(visible.max())  # (B, H, T, S)
    scores, pattern = ops.xp.empty(shape, "f4"), ops.xp.empty(shape, "f4")
    z = ops.attend_in_steps(q, keys, values, scale, visible, Steps(scores, pattern))
    edited = hook("attn.hook_attn_scores", scores)
    if edited is not scores:
        steps = Steps(edited, pattern, "scores")
        z = ops.attend_in_steps(q, keys, values, scale, visible, steps)
    edited = hook("attn.hook_pattern", pattern)
    if edited is not pattern:
        steps = Steps(scores, edited, "pattern")
        other = ops.attend_in_steps(q, keys, values, scale, visible, steps)
        # As bits, since a GPU takes tiny numbers for 0 in comparisons.
        changed = (edited.view("i4") != pattern.view("i4")).any(axis=-1, keepdims=True)
        z = ops.xp.where(changed, other, z)
    return z


def attention(
    ops: Ops, x: Array, attn: Attention, visible: Array, cache: KVCache, layer: int, hook: Hook
) -> Array:
    """Mix every token with the tokens before it and itself: x (B, T, C) -> (B, T, C)."""
    qkv = ops.linear(x, attn.c_attn)  # (B, T, 3C)
    q, k, v = split_heads(qkv, attn.n_head)  # (B, H, T, D)
    q, k, v = hook("attn.hook_q", q), hook("attn.hook_k", k), hook("attn.hook_v", v)
    keys, values = cache.append(layer, k, v)  # of all S tokens
    z = hook("attn.hook_z", attend(ops, q, keys, values, attn.scale, visible, hook))
    return hook("hook_attn_out", ops.linear(merge_heads(z), attn.c_proj))


def expand(ops: Ops, x: Array, m: MLP, hook: Hook) -> Array:
    """Widen every token, and apply the activation: x (B, T, C) -> (B, T, 4C)."""
    if not hook.listens("mlp.hook_pre"):
        return ops.linear(x, m.c_fc, activation=m.activation)
    return ops.activate(hook("mlp.hook_pre", ops.linear(x, m.c_fc)), m.activation)


def mlp(ops: Ops, x: Array, m: MLP, hook: Hook) -> Array:
    """Transform every token by itself: x (B, T, C) -> (B, T, C)."""
    post = hook("mlp.hook_post", expand(ops, x, m, hook))  # (B, T, 4C)
    return hook("hook_mlp_out", ops.linear(post, m.c_proj))


def block(
    ops: Ops, x: Array, b: Block, visible: Array, cache: KVCache, layer: int, hook: Hook
) -> Array:
    """Run one layer: attention and MLP read the normalized x and add to x (B, T, C)."""
    x = hook("hook_resid_pre", x)
    normalized = hook("ln1.hook_normalized", ops.layer_norm(x, b.ln_1))
    x = ops.add(x, attention(ops, normalized, b.attn, visible, cache, layer, hook))
    x = hook("hook_resid_mid", x)
    normalized = hook("ln2.hook_normalized", ops.layer_norm(x, b.ln_2))
    return hook("hook_resid_post", ops.add(x, mlp(ops, normalized, b.mlp, hook)))


def blocks(model: GPT2, x: Array, visible: Array, cache: KVCache, hook: Hook) -> Array:
    """Run all layers, one after the other: x (B, T, C) -> (B, T, C)."""
    ops = model.ops
    in_one_call = None if ops.layers is None or is_edited() else ops.layers
    for listens, run in groupby(range(len(model.h)), lambda layer: hook.at(layer).listens()):
        layers = [*run]
        if in_one_call and not listens:  # the same, faster
            first, end = layers[0], layers[-1] + 1
            x = in_one_call(x, model.h[first:end], visible, cache.of_layers(first, end))
        else:
            for layer in layers:
                x = block(ops, x, model.h[layer], visible, cache, layer, hook.at(layer))
    return x


@np.errstate(all="ignore")  # `unembed` reports damaged weights
def hidden_states(
    model: GPT2,
    ids: Array,
    cache: KVCache | None = None,
    lengths: Counts | None = None,
    hook: Hook = NO_HOOK,
) -> Array:
    """Compute the last layer's normalized output for all tokens: ids (B, T) -> (B, T, C).

    IndexError if the cache is full, or an id or a position is out of range.

    Args:
        model: the weights.
        ids: the whole texts, or the tokens that follow those in `cache`, which are added to it.
        cache: the keys and values of the previous tokens.
        lengths: (B,) numbers of real ids in the rows, by default T. The rest of a row is padding on
            the right; its results are undefined.
        hook: gets the values at hook points in turn.
    """
    ops = model.ops
    B, T = ids.shape
    if cache is None:  # of one layer, which the next overwrites
        cache = KVCache(model.config, ops, B, T, layers=1)
    new = np.full(B, T) if lengths is None else lengths
    cache.reserve(new)
    positions = cache.lengths[:, None] + np.minimum(np.arange(T), new[:, None] - 1)  # (B, T)
    positions = np.maximum(positions, 0)  # -1 is the padding of a text without any token yet
    visible = positions + 1  # the causal mask: a token sees itself and the tokens before it

    hook = hook.begin(positions, new)
    x = embed(model, ids, positions, hook)  # (B, T, C)
    x = blocks(model, x, visible, cache, hook)
    cache.advance()
    return hook("ln_final.hook_normalized", ops.layer_norm(x, model.ln_f))


@np.errstate(all="ignore")  # the error replaces NumPy's warnings
def unembed(model: GPT2, x: Array, *, edited: bool = False) -> Array:
    """Compute the logits of the next token: hidden states x (..., C) -> (..., V), float32.

    CheckpointError if they are not finite: the weights are damaged, or `edited` by a hook, values
    overflow.
    """
    logits = model.ops.linear(x, model.lm_head)
    check_finite(model, logits, edited=edited)
    return logits


def forward(
    model: GPT2, ids: Array, cache: KVCache | None = None, lengths: Counts | None = None
) -> Array:
    """Run the transformer: ids (B, T) -> logits (B, T, V) of the next tokens, float32."""
    return unembed(model, hidden_states(model, ids, cache, lengths))
