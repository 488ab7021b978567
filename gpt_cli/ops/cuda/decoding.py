"""Several tokens of many texts, one after the other, without waiting for the GPU between them."""

from types import ModuleType
from typing import Any

import numpy as np

from gpt_cli.ops.contract import Array, Cache, Model
from gpt_cli.ops.cuda import plans, structs
from gpt_cli.ops.cuda.layers import DeviceOps, Layers, Memory, Tokens, norm_of
from gpt_cli.options.request import SamplingParams

CHOICE_ARRAYS = 6  # in structs.cu


def decode(
    ops: DeviceOps,
    model: Model,
    cache: Cache,
    last: Array,
    uniforms: Array,
    banned: Array,
    params: SamplingParams,
) -> tuple[Array, Array, Array]:
    """Return ids and logprobs (steps, B) of the next tokens, and flags (B,) of finite results."""
    steps, B = uniforms.shape
    C, V = model.wte.n_in, model.lm_head.weight.n_out
    launch = ops.launch
    xp = ops.xp
    past = cache.lengths
    counts = np.concatenate([np.ones((1, B), np.int64), past + np.arange(steps + 1)[:, None]])
    counts = xp.asarray(counts)
    draws = xp.asarray(np.ascontiguousarray(uniforms, np.float64))
    ids = np.zeros((steps + 1, B), np.int64)
    ids[0] = last
    ids = xp.asarray(ids)
    is_finite = xp.asarray(np.ones(B, np.int32))
    logprobs = xp.empty((steps, B), np.float64)
    most = int(past.max())
    layers = Layers(ops, model.h, cache, B, 1, most + steps)
    memory = Memory(xp, 4 * B * C, 4 * B * V)
    x, logits = memory.addresses
    ln_f = norm_of(model.ln_f)
    choice = {
        "logits": logits, "is_finite": is_finite, "rows": B, "n": V,
        "banned": banned, "banned_count": len(banned),
        **choice_fields(params), **scratch_fields(xp, B, V),
    }  # fmt: skip
    for step in range(steps):
        now = 8 * B * step  # bytes before the numbers of this step in an array (steps, B)
        positions = counts.data.ptr + 8 * B + now
        after = ids.data.ptr + 8 * B + now
        tokens = Tokens(positions, counts.data.ptr, positions + 8 * B, most + step + 1)
        job = structs.pack(
            "embed", wte=model.wte.struct, wpe=model.wpe, n_positions=len(model.wpe),
            ids=after - 8 * B, positions=positions, tokens=B, x=x,
        )  # fmt: skip
        launch(plans.embed(B), job)
        layers.run(x, tokens)
        layers.layer_norm(x, ln_f)
        layers.linear(layers.normalized, model.lm_head, logits)
        job = structs.pack(
            "next_tokens", uniforms=draws.data.ptr + now, ids=after,
            logprobs=logprobs.data.ptr + now, **choice,
        )  # fmt: skip
        launch(plans.of_rows("next_tokens", B, V), job)
    return ids[1:], logprobs, is_finite


def choice_fields(params: SamplingParams) -> dict[str, Any]:
    """Return the fields with the options for the choice of a token."""
    filters = {"top_k": params.top_k, "top_p": params.top_p, "log_min_p": params.log_min_p}
    return filters | {"temperature": params.temperature}


def scratch_fields(xp: ModuleType, rows: int, n: int) -> dict[str, Any]:
    """Return the fields with scratch memory for the choice of a token among n."""
    size = scratch_size(n)
    return {"scratch": xp.empty((rows, CHOICE_ARRAYS, size), np.float32), "scratch_size": size}


def scratch_size(n: int) -> int:
    """Return the length of an array of scratch memory: a power of two that holds whole spans."""
    return 1 << (-(-n // plans.SPAN) * plans.SPAN - 1).bit_length()
