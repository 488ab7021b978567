"""Answers of the server."""

from gpt_cli.options.request import Options

# OpenAI's defaults, where a body leaves a field out.
DEFAULTS = {"max_tokens": 16, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}

REASONS = {
    **dict.fromkeys(("eos", "stop", "complete"), "stop"),
    **dict.fromkeys(("length", "context"), "length"),
    "stuck": "stuck",
}


def engine_options(fields):
    """Return the options of the engine for the fields of a body."""
    options = {name: value for name, value in fields.items() if name in Options.row_fields()}
    options |= {name: fields[name] for name in ("ignore_eos",) if name in fields}
    if "logit_bias" in options:
        options["logit_bias"] = [(int(id), bias) for id, bias in options["logit_bias"].items()]
    if isinstance(options.get("stop"), str):
        options["stop"] = [options["stop"]]
    return DEFAULTS | options | {"top_logprobs": fields.get("logprobs") or 0}


def computed(engine, prompt, n=1, **fields):
    """Return what the engine computes for a body, a completion for every choice."""
    prompts = [prompt] if isinstance(prompt, str) else prompt
    rows = [text for text in prompts for _ in range(n)]
    return engine.generate(rows, **engine_options(fields))


def told(choices):
    """Return what choices say, without what the server drew."""
    return [(choice["text"], choice["finish_reason"]) for choice in choices]


def texts_of(completions):
    """Return the same of what the engine computes."""
    return [(done.text, REASONS[done.finish_reason]) for done in completions]


def choices_of(answer):
    """Return the choices of an answer; those of a stream are joined."""
    assert answer.status == 200, answer.body
    if answer.headers["Content-Type"] == "application/json":
        return answer.json()["choices"]
    choices = {}
    for chunk in answer.events():
        for piece in chunk["choices"]:
            if known := choices.get(piece["index"]):
                assert known["finish_reason"] is None, "nothing follows the last piece"
                logprobs = piece["logprobs"] and {
                    name: known["logprobs"][name] + more for name, more in piece["logprobs"].items()
                }
                text = known["text"] + piece["text"]
                piece = piece | {"text": text, "logprobs": logprobs}
            choices[piece["index"]] = piece
    return [choices[index] for index in range(len(choices))]
