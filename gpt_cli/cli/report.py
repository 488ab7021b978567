"""What is told about a run: as JSON on standard output, as notes on standard error."""

import json
from typing import Any

from gpt_cli.engine import Engine
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


def json_lines(engine: Engine, prompt: str, completions: list[Completion]) -> str:
    """Return one JSON object a line for each completion."""
    return "".join(
        json.dumps(_record(engine, prompt, index, completion), ensure_ascii=False) + "\n"
        for index, completion in enumerate(completions)
    )


def _record(engine: Engine, prompt: str, index: int, completion: Completion) -> dict[str, Any]:
    return {
        "index": index,
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
