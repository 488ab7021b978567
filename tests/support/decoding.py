"""Operations that decode ahead, on a CPU."""

from contextlib import contextmanager

import numpy as np
import pytest

from gpt_cli.errors import CheckpointError
from gpt_cli.gpt2.model import hidden_states, unembed


def decode_by_steps(model, cache, last, uniforms, banned, params):
    """Return what `CuPyOps.decode` does, computed a pass at a time."""
    ops, lengths = model.ops, cache.lengths
    chosen = []
    try:
        for draws in uniforms:
            logits = unembed(model, hidden_states(model, last[:, None], cache)[:, -1])
            normalizer, masked = ops.log_normalizer(logits), logits.copy()
            masked[:, banned] = -np.inf
            if (last := ops.choose(masked, draws, params)) is None:
                return None
            chosen.append((last, logits[np.arange(len(last)), last] - normalizer))
    except CheckpointError:
        return None
    finally:
        cache.lengths = lengths
    return tuple(map(np.stack, zip(*chosen, strict=True)))


@contextmanager
def decoding_ahead(ops, decode=decode_by_steps):
    """Let operations decode ahead; yield the sizes of the calls so far: steps and rows."""
    calls = []

    def counted(model, cache, last, uniforms, banned, params):
        calls.append(uniforms.shape)
        return decode(model, cache, last, uniforms, banned, params)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "decode", counted)
        yield calls
