"""What happens inside the model, laid open: each layer's state, attention and prediction."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpt_cli.config import GPT2Config
from gpt_cli.finite import checked
from gpt_cli.model import GPT2, Block, block, split_heads, unembed, visibility
from gpt_cli.ops import Array, Ops


@dataclass(frozen=True)
class Trace:
    """One pass over a text, on the host. L is n_layer; index 0 of L + 1 is before the first layer.

    Attributes:
        ids: (T,) the tokens.
        residual: (L + 1, T, C) the residual stream: the embedding, and what each layer made of it.
        attention: (L, H, T, T) how much each token (row) takes from each (column): rows sum to 1.
        logits: (L + 1, T, V) what would follow each token if the model ended behind that layer;
            the last are the model's own. (The "logit lens" of nostalgebraist, 2020.)
    """

    ids: list[int]
    residual: NDArray[np.float32]
    attention: NDArray[np.float32]
    logits: NDArray[np.float32]


def size(config: GPT2Config, T: int) -> int:
    """Bytes of the trace of a text of T tokens."""
    states = (config.n_layer + 1) * T * (config.n_embd + config.vocab_size)
    return 4 * (states + config.n_layer * config.n_head * T * T)


def trace(model: GPT2, ids: list[int]) -> Trace:
    """Compute the text of `ids`, 1 to n_positions of them, and keep what is usually passed on.

    Raises:
        CheckpointError: the weights are damaged.
    """
    ops, xp = model.ops, model.ops.xp
    T = len(ids)
    visible = visibility(ops, T, T, None)
    x = ops.embed(model.wte, model.wpe, xp.asarray([ids]), xp.arange(T)[None])
    residual, attention = [x], []
    with np.errstate(all="ignore"):  # of damaged weights `checked` tells
        for layer, b in enumerate(model.h):
            attention.append(_pattern(ops, x, b, visible))
            x = block(ops, x, b, visible, None, layer)
            residual.append(x)
    stream = xp.concatenate(residual)  # (L + 1, T, C)
    return Trace(
        ids,
        ops.to_host(stream),
        ops.to_host(xp.concatenate(attention)),
        ops.to_host(checked(unembed, model, stream)),
    )


def _pattern(ops: Ops, x: Array, b: Block, visible: Array | None) -> Array:
    """Compute what `attend` does not give: its weights (B, H, T, T), of x (B, T, C)."""
    q, k, _ = split_heads(ops.linear(ops.layer_norm(x, b.ln_1), b.attn.c_attn), b.attn.n_head)
    scores = b.attn.scale * (q @ k.swapaxes(-1, -2))
    if visible is not None:
        scores = ops.xp.where(visible, scores, -ops.xp.inf)
    weights = ops.xp.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)
