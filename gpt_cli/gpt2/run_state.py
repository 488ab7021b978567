"""The state of one pass: what all layers share besides the weights."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from itertools import groupby
from typing import Any, TypeAlias

from gpt_cli.gpt2.hooks import Hook
from gpt_cli.gpt2.kv_cache import KVCache
from gpt_cli.gpt2.source import is_modified
from gpt_cli.ops import Array, AttentionSteps, Ops


@dataclass(frozen=True)
class RunState:
    """The state of a pass over B texts of T new tokens.

    Attributes:
        ops: the operations of the device.
        visible: (B, T) the causal mask: the number of keys, from the first on, that a token sees.
        cache: the keys and values of all S tokens so far.
        hook: gets the values at hook points.
    """

    ops: Ops
    visible: Array
    cache: KVCache
    hook: Hook

    def attend(self, q: Array, keys: Array, values: Array, scale: float, layer: int) -> Array:
        """Return the means of the values, weighted by the attention: q (B, H, T, D) -> the same.

        `keys` and `values` are one layer of the cache. A hook that listens to scores or the pattern
        gets them. If it changes them, the means are computed again from what it returns.
        """
        ops, hook = self.ops, self.hook.at(layer)
        if not hook.listens("attn.hook_attn_scores", "attn.hook_pattern"):
            return ops.attend(q, keys, values, scale, self.visible)

        def z_of(steps: AttentionSteps) -> Array:
            return ops.attend_in_steps(q, keys, values, scale, self.visible, steps)

        shape = *q.shape[:3], int(self.visible.max())  # (B, H, T, S)
        scores = ops.xp.empty(shape, "f4")
        pattern = ops.xp.empty(shape, "f4")
        z = z_of(AttentionSteps(scores, pattern))  # fills both in place
        new_scores = hook("attn.hook_attn_scores", scores)
        if new_scores is not scores:
            z = z_of(AttentionSteps(new_scores, pattern, "scores"))  # fills the pattern
        new_pattern = hook("attn.hook_pattern", pattern)
        if new_pattern is not pattern:
            other = z_of(AttentionSteps(scores, new_pattern, "pattern"))
            # Queries with an unchanged pattern keep their bits. Patterns are compared as bits,
            # since a GPU takes tiny numbers for 0 in comparisons.
            changed = (new_pattern.view("i4") != pattern.view("i4")).any(axis=-1, keepdims=True)
            z = ops.xp.where(changed, other, z)
        return z


RunBlocks: TypeAlias = Callable[[Array, tuple[Any, ...], int, RunState], Array]


def in_one_call(blocks: RunBlocks) -> RunBlocks:
    """Let `ops.layers` compute consecutive layers to which nobody listens: the same bits, faster.

    If model.py or this file was modified, they run layer by layer: the modified code is what runs.
    """

    @wraps(blocks)
    def run_layers(x: Array, h: tuple[Any, ...], first: int, run: RunState) -> Array:
        layers = run.ops.layers
        if layers is None or is_modified():
            return blocks(x, h, first, run)
        begin = 0
        for listens, group in groupby(range(len(h)), lambda i: run.hook.at(first + i).listens()):
            end = begin + len(list(group))
            if listens:
                x = blocks(x, h[begin:end], first + begin, run)
            else:
                cache = run.cache.of_layers(first + begin, first + end)
                x = layers(x, h[begin:end], run.visible, cache)
            begin = end
        return x

    return run_layers
