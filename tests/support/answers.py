"""Answers of the server."""

from gpt_cli.options.request import Options

# OpenAI's defaults, where a body leaves a field out.
DEFAULTS = {"max_tokens": 16, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}

REASONS = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}


def asked(fields):
    """Return the options of the engine for the fields of a body."""
    own = {name: value for name, value in fields.items() if name in Options.row_fields()}
    own |= {name: fields[name] for name in ("ignore_eos",) if name in fields}
    if "logit_bias" in own:
        own["logit_bias"] = [(int(id), bias) for id, bias in own["logit_bias"].items()]
    if isinstance(own.get("stop"), str):
        own["stop"] = [own["stop"]]
    return DEFAULTS | own | {"top_logprobs": fields.get("logprobs") or 0}


def computed(engine, prompt, n=1, **fields):
    """Return what the engine computes for a body, a completion for each choice."""
    prompts = [prompt] if isinstance(prompt, str) else prompt
    rows = [each for each in prompts for _ in range(n)]
    return engine.generate(rows, **asked(fields))


def told(choices):
    """Return what choices say, without what the server drew."""
    return [(choice["text"], choice["finish_reason"]) for choice in choices]


def joined(chunks, count):
    """Return the choices that chunks of a stream make."""
    choices = [None] * count
    for chunk in chunks:
        for piece in chunk["choices"]:
            known = choices[piece["index"]]
            if known is None:
                choices[piece["index"]] = piece
                continue
            assert known["finish_reason"] is None, "nothing follows the last piece"
            logprobs = piece["logprobs"] and {
                name: known["logprobs"][name] + more for name, more in piece["logprobs"].items()
            }
            text = known["text"] + piece["text"]
            choices[piece["index"]] = piece | {"text": text, "logprobs": logprobs}
    return choices
