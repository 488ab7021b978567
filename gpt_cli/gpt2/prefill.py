"""Prefill: compute the known tokens of texts, a pass at a time."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from gpt_cli.gpt2.hooks import NO_HOOK, Hook
from gpt_cli.gpt2.kv_cache import KVCache
from gpt_cli.gpt2.model import GPT2, Counts, hidden_states, unembed
from gpt_cli.ops import Array


def right_pad(rows: Sequence[Sequence[int]]) -> tuple[Array, Counts]:
    """Pad rows with zeros on the right: return ids (B, T) and the lengths of the rows (B,)."""
    lengths = np.array([len(row) for row in rows])
    ids = np.zeros((len(rows), lengths.max()), np.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row
    return ids, lengths


def prefill(
    model: GPT2,
    rows: Sequence[Sequence[int]],
    cache: KVCache | None,
    max_tokens: Callable[[], int] | None = None,
    hook: Hook = NO_HOOK,
) -> Iterator[list[Array]]:
    """Append rows of ids to a cache; yield the states (t, C) of the t tokens per row of a pass.

    Before each pass, `max_tokens` returns the most tokens that it may have, by default
    `ops.pass_tokens`. Without a cache, one pass has all.
    """
    ids, lengths = right_pad(rows)
    start = 0
    while start < ids.shape[1]:
        most = max_tokens() if max_tokens else model.ops.pass_tokens
        width = max(1, most // len(rows)) if cache else ids.shape[1]
        part = ids[:, start : start + width]
        new = np.clip(lengths - start, 0, part.shape[1])
        x = hidden_states(model, model.ops.xp.asarray(part), cache, new, hook)
        yield [x[row, :length] for row, length in enumerate(new.tolist())]
        start += width


def row_states(
    model: GPT2,
    rows: Sequence[Sequence[int]],
    cache: KVCache | None = None,
    hook: Hook = NO_HOOK,
) -> list[Array]:
    """Append rows of ids to a cache; return the states (t, C) of the t tokens per row."""
    xp = model.ops.xp
    passes = list(prefill(model, rows, cache, hook=hook))
    if not passes:  # no row has ids
        return [xp.empty((0, model.config.n_embd), "f4") for _ in rows]
    if len(passes) == 1:
        return passes[0]
    return [xp.concatenate(parts) for parts in zip(*passes, strict=True)]


def next_logits(
    model: GPT2,
    rows: Sequence[Sequence[int]],
    cache: KVCache | None = None,
    hook: Hook = NO_HOOK,
) -> Array:
    """Append rows of ids to a cache; return the logits (B, V) of the next token per row."""
    last: dict[int, Array] = {}  # by row, the state (C,) at its last token
    for states in prefill(model, rows, cache, hook=hook):
        for row, x in enumerate(states):
            if len(x):
                last[row] = x[-1].copy()  # a view would keep the states of all tokens
    states = model.ops.xp.stack([last[row] for row in range(len(rows))])
    return unembed(model, states, hook)
