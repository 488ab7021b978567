"""`gpt-cli next`: the likeliest next tokens."""

import math
import shutil
import sys
from pathlib import Path

from gpt_cli import records
from gpt_cli.cli import options as flags
from gpt_cli.cli.inputs import read_prompt
from gpt_cli.cli.output import bar, on_terminal, token_label, write, write_json
from gpt_cli.options.declare import AT_LEAST_1, option


def next_tokens(
    prompt: str | None = flags.argument("[PROMPT]", "The text so far"),
    *,
    top: int = option(10, "Number of tokens.", AT_LEAST_1, aliases=("-k",), metavar="N"),
    file: Path | None = flags.PROMPT_FILE,
    special: bool = flags.SPECIAL,
    loading: flags.Loading,
    as_json: bool = flags.JSON,
) -> None:
    """Show the likeliest next tokens after PROMPT.

    The output is a table with bars, or JSON in a pipe.

    Examples:
        gpt-cli next -m tiny 'Every day, the fox' -k 5
    """
    text = read_prompt(prompt, file)
    engine = loading.load()
    tokens = [
        records.of_token(engine, id, logprob) | {"probability": math.exp(logprob)}
        for id, logprob in engine.next_tokens(text, top, special=special)
    ]
    if as_json or not on_terminal(sys.stdout):
        write_json(*({"rank": rank} | token for rank, token in enumerate(tokens, 1)))
        return
    labels = [token_label(token) for token in tokens]
    width = max(map(len, labels))
    room = max(1, shutil.get_terminal_size().columns - width - 13)
    for token, label in zip(tokens, labels, strict=True):
        drawn = bar(token["probability"] / tokens[0]["probability"] * room)
        write(f"{token['probability']:8.2%}  {label:{width}}  {drawn}".rstrip() + "\n")
