"""What is told about a run: as JSON on standard output, as notes on standard error."""

import json
from typing import Any

from gpt_cli.cli.rows import Row
from gpt_cli.cli.text import quoted
from gpt_cli.engine import Engine
from gpt_cli.errors import InputError
from gpt_cli.generate import Completion


def timing(engine: Engine, completion: Completion) -> dict[str, float | None]:
    """Seconds to load, seconds to the first token, and tokens a second after it."""
    times = completion.seconds
    rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None
    return {
        "load_s": round(engine.load_seconds, 4),
        "ttft_s": round(times[0], 4) if times else None,
        "decode_tok_s": rate and round(rate, 2),
    }


def json_line(value: Any) -> str:
    """Return a value as one line of JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n"


def record(
    engine: Engine, prompt: str, completion: Completion, *, logprobs: bool
) -> dict[str, Any]:
    """Return what is told about a completion, with the log-probability of each token if wanted."""
    told = {
        "prompt": prompt,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "seed": completion.seed,
        "model": engine.name,
        "usage": {
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": len(completion.ids),
        },
        "timing": timing(engine, completion),
    }
    if logprobs:
        steps = zip(completion.ids, completion.logprobs, completion.top_logprobs, strict=True)
        told["logprobs"] = [
            token_record(engine, id, logprob)
            | {"top": [token_record(engine, *other) for other in top]}
            for id, logprob, top in steps
        ]
    return told


def row_record(
    engine: Engine, row: Row, result: Completion | InputError, *, logprobs: bool
) -> dict[str, Any]:
    """Return what is told about a row of a batch: a completion, or why there is none."""
    place = {"index": row.index} | ({} if row.id is None else {"id": row.id})
    if isinstance(result, InputError):
        return place | {"line": row.line} | error_record(result)
    return place | record(engine, row.prompt, result, logprobs=logprobs)


def error_record(reason: InputError) -> dict[str, Any]:
    """Return what is told of a row that failed."""
    return {"error": {"code": reason.code, "message": str(reason)}}


def token_record(engine: Engine, id: int, logprob: float | None) -> dict[str, Any]:
    """Return a token with its text, in which U+FFFD stands for an unfinished character.

    A model may have more ids than its tokenizer has tokens; the others have a name and no bytes.
    """
    try:
        piece = engine.tokenizer.token_bytes(id)
    except InputError:
        return {"id": id, "token": f"<{id}>", "bytes": [], "logprob": logprob}
    text = piece.decode(errors="replace")
    return {"id": id, "token": text, "bytes": list(piece), "logprob": logprob}


def shown(token: dict[str, Any]) -> str:
    """Return what people are shown of a token, on one line."""
    return quoted(bytes(token["bytes"])) if token["bytes"] else token["token"]


def remarks(prompt: str, completions: list[Completion], *, tell_seed: bool) -> list[str]:
    """Return what a user may not expect about a result, and the seed that was drawn for it."""
    notes = []
    if prompt.endswith(" "):
        notes.append(
            "the prompt ends with a space; GPT-2 puts the space before a word, so leave it out"
        )
    if any(completion.finish_reason == "context" for completion in completions):
        notes.append("the context is full; --overflow shift goes on past it")
    if tell_seed:
        notes.append(f"--seed {completions[0].seed} gives this text again")
    return [f"gpt-cli: note: {note}" for note in notes]


def statistics(engine: Engine, completions: list[Completion]) -> list[str]:
    """Return a line for each completion."""
    return [_statistics(engine, completion) for completion in completions]


def _statistics(engine: Engine, completion: Completion) -> str:
    times = timing(engine, completion)
    first, rate = times["ttft_s"], times["decode_tok_s"]
    return ", ".join(
        [
            f"{engine.name}: loaded in {times['load_s']:.2f} s",
            f"{completion.prompt_tokens} prompt tokens",
            "no token yet" if first is None else f"first token after {first:.3f} s",
            f"{len(completion.ids)} tokens" + (f" at {rate:.1f} a second" if rate else ""),
            f"finish reason {completion.finish_reason}",
            f"seed {completion.seed}",
        ]
    )
