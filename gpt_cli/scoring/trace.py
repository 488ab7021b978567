"""Trace a forward pass: the state, attention and prediction of every layer."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gpt_cli.errors import counted
from gpt_cli.gpt2.hooks import select_hooks
from gpt_cli.gpt2.memory import FLOAT, logits_bytes
from gpt_cli.gpt2.model import GPT2, unembed
from gpt_cli.ops import Array, Ops
from gpt_cli.system.machine import check_room
from gpt_cli.texts.measures import likeliest
from gpt_cli.texts.result import Result
from gpt_cli.texts.states import states
from gpt_cli.texts.text import Text

_LENS_ROWS = 64  # of logits at a time: a row of GPT-2 takes 200 kB


@dataclass(frozen=True, repr=False)
class Trace(Result):
    """A trace of a pass, on the host. L is n_layer; index 0 of L + 1 is before the first layer."""

    model: GPT2
    ids: list[int]  # (T,)
    residual: NDArray[np.float32]  # (L + 1, T, C): the embedding, then the output of every layer
    attention: NDArray[np.float32]  # (L, H, T, T): of the tokens (columns) for a token (row)

    @cached_property
    def logits(self) -> NDArray[np.float32]:
        """The logits (L + 1, T, V) of the next tokens if the model ended after a layer.

        The last are those of the model. This is the "logit lens" of nostalgebraist (2020). `lens`
        needs less memory.
        """
        ops = self.model.ops
        depth, T, _ = self.residual.shape
        _check_memory(ops, logits_bytes(self.model.config, depth * T), "the logits", T)
        return ops.to_host(self._unembed(self.residual))

    def lens(self, count: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the likeliest ids (L + 1, T, count), best first, and their log-probabilities."""
        ops = self.model.ops
        depth, T, C = self.residual.shape
        states = self.residual.reshape(-1, C)
        best = [
            likeliest(ops, self._unembed(part), count)
            for part in np.split(states, range(_LENS_ROWS, len(states), _LENS_ROWS))
        ]
        ids, logprobs = (ops.xp.concatenate(parts) for parts in zip(*best, strict=True))
        shape = depth, T, -1
        return ops.to_host(ids).reshape(shape), ops.to_host(logprobs).reshape(shape)

    def _facts(self) -> str:
        shapes = f"residual {self.residual.shape}, attention {self.attention.shape}"
        return f"{shapes}: {self._quoted(self.ids)}"

    def _unembed(self, states: NDArray[np.float32]) -> Array:
        ops = self.model.ops
        return unembed(self.model, ops.layer_norm(ops.xp.asarray(states), self.model.ln_f))


def trace(model: GPT2, text: Text) -> Trace:
    """Run a pass over a text of 1 to n_positions tokens, and keep its intermediate results."""
    ops = model.ops
    config = model.config
    T = len(text.ids)
    L = config.n_layer
    floats = (L + 1) * T * config.n_embd + L * config.n_head * T * T
    _check_memory(ops, FLOAT * floats, "the trace", T)
    names = select_hooks(config, ["blocks.0.hook_resid_pre", "*.hook_resid_post", "*.hook_pattern"])
    (computed,) = states(model, [text], names)
    (row,) = computed.rows
    # Checks that all is finite: the last token depends on all others.
    unembed(model, row.states[-1:], computed.hook)
    residual = [ops.to_host(row.values[name]) for name in names if not name.endswith("pattern")]
    attention = [ops.to_host(row.values[name]) for name in names if name.endswith("pattern")]
    return Trace(model, text.ids, np.stack(residual), np.stack(attention))


def _check_memory(ops: Ops, needed: int, what: str, T: int) -> None:
    subject = f"{what} of a pass over {counted(T, 'token')} takes"
    check_room(subject, 2 * needed, ops.free_memory(), "shorten the text")  # on device and host
