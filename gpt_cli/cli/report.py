"""What people are told about a run, as notes on standard error."""

from typing import Any

from gpt_cli import records
from gpt_cli.cli.text import quoted
from gpt_cli.engine import Engine
from gpt_cli.generate import Completion


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
    times = records.timing(engine, completion)
    first, rate = times["ttft_s"], times["decode_tok_s"]
    return ", ".join(
        [
            f"{engine.name} in {engine.model.ops.dtype}: loaded in {times['load_s']:.2f} s",
            f"{completion.prompt_tokens} prompt tokens",
            "no token yet" if first is None else f"first token after {first:.3f} s",
            f"{len(completion.ids)} tokens" + (f" at {rate:.1f} a second" if rate else ""),
            f"finish reason {completion.finish_reason}",
            f"seed {completion.seed}",
        ]
    )
