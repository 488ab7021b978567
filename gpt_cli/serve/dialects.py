"""The fields of other servers' requests: their names here, and values that change nothing.

A client that sends every field of its server, each with its default, gets the answer that it gets
without them.

https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html
https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md
"""

from collections.abc import Mapping
from typing import Any

from gpt_cli.serve.refusals import RequestError

_OLD_SAMPLERS = ["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]
_SAMPLERS = ["penalties", "dry", "top_n_sigma", *_OLD_SAMPLERS[1:]]

_BAN = -100  # the lowest bias

# Fields that this server has by another name.
_RENAMED = {
    "repetition_penalty": "repeat_penalty",
    "include_stop_str_in_output": "include_stop",
    "n_predict": "max_tokens",
}
# Values that change nothing, of fields that this server does not have or reads in another way.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "suffix": ("",),
    # of vLLM
    "add_special_tokens": (True, False),
    "guided_whitespace_pattern": (),
    "priority": (0,),
    "return_mm_kwargs": (True,),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "routed_experts_prompt_start": (0,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "thinking_token_budget": (-1,),
    "top_k": (-1,),
    "vllm_xargs": ({},),
    "watermarking": (True, False),  # for a model that has no watermark
    # of llama.cpp
    "adaptive_decay": (0.9,),
    "adaptive_target": (-1,),
    "cache_prompt": (True, False),
    "dry_allowed_length": (2,),
    "dry_base": (1.75,),
    "dry_multiplier": (0,),
    "dry_penalty_last_n": (-1, 64),
    "dry_sequence_breakers": (["\n", ":", '"', "*"],),
    "dynatemp_exponent": (1,),
    "dynatemp_range": (0,),
    "grammar": ("",),
    "id_slot": (-1,),
    "lora": ([],),
    "min_keep": (0,),
    "mirostat": (0,),
    "mirostat_eta": (0.1,),
    "mirostat_tau": (5,),
    "n_cache_reuse": (0,),
    "n_cmpl": (1,),
    "n_indent": (0,),
    "n_keep": (0,),
    "n_probs": (0,),
    "post_sampling_probs": (False,),
    "repeat_last_n": (-1,),  # and more without a repeat_penalty: see `translated`
    "response_fields": ([],),
    "return_progress": (False,),
    "return_tokens": (False,),
    "samplers": (_SAMPLERS, _OLD_SAMPLERS),
    "t_max_predict_ms": (0, -1),
    "timings_per_token": (False,),
    "top_n_sigma": (-1,),
    "xtc_probability": (0,),
    "xtc_threshold": (0.1,),
}


def translated(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a body by the names of this server; nulls are left out.

    Raise RequestError if a field has two values.
    """
    values = {name: value for name, value in body.items() if value is not None}
    for name, known in _RENAMED.items():
        if name in values:
            value = values.pop(name)
            if values.setdefault(known, value) != value:
                raise RequestError(f"{name} and {known} differ: leave one of them out", name)
    values.pop("guided_decoding_backend", None)  # there is only one
    if "logit_bias" in values:
        values["logit_bias"] = _biases(values["logit_bias"])
    if values.get("repeat_penalty", 1) == 1:
        values.pop("repeat_last_n", None)  # the number of tokens that it applies to
    return values


def _biases(value: Any) -> Any:
    """Return biases with a number for llama.cpp's `false`, which bans a token."""
    if isinstance(value, dict):
        return {token: _BAN if bias is False else bias for token, bias in value.items()}
    if isinstance(value, list):
        pairs = []
        for pair in value:
            is_ban = isinstance(pair, list) and len(pair) == 2 and pair[1] is False
            pairs.append([pair[0], _BAN] if is_ban else pair)
        return pairs
    return value


def in_dialect(error: RequestError, body: Mapping[str, Any]) -> RequestError:
    """Return an error about a field of a body, by the name that the body has for it."""
    for name, known in _RENAMED.items():
        if error.field == known and body.get(name) is not None:
            return RequestError(str(error).replace(known, name), name)
    return error
