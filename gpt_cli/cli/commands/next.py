"""`gpt-cli next`: the likeliest next tokens."""

import math
import shutil
import sys
from pathlib import Path

from gpt_cli import records
from gpt_cli.cli import options as flags
from gpt_cli.cli.inputs import read_prompt
from gpt_cli.cli.layout import bar, token_label
from gpt_cli.cli.streams import on_terminal, write
from gpt_cli.options.declare import option


def next_tokens(
    prompt: str | None = flags.argument("[PROMPT]", "The text so far"),
    *,
    top: int = option(10, "Number of tokens.", aliases=("-k",), min=1, metavar="N"),
    file: Path | None = flags.PROMPT_FILE,
    special: flags.Special = False,
    loading: flags.Loading,
    as_json: flags.Json = False,
) -> None:
    """Show the likeliest next tokens after PROMPT.

    The output is a table with bars, or JSON in a pipe.

    Examples:
        gpt-cli next -m tiny 'Every day, the fox' -k 5
    """
    text = read_prompt(prompt, file)
    engine = loading.load()
    found = [
        records.of_token(engine, id, logprob) | {"probability": math.exp(logprob)}
        for id, logprob in engine.next_tokens(text, top, special=special)
    ]
    if as_json or not on_terminal(sys.stdout):
        for place, token in enumerate(found, 1):
            write(records.json_line({"rank": place} | token))
    else:
        _write_bars(found)


def _write_bars(found: list[records.Record]) -> None:
    pieces = [token_label(token) for token in found]
    width = max(map(len, pieces))
    room = max(1, shutil.get_terminal_size().columns - width - 13)
    for token, piece in zip(found, pieces, strict=True):
        drawn = bar(token["probability"] / found[0]["probability"] * room)
        write(f"{token['probability']:8.2%}  {piece:{width}}  {drawn}".rstrip() + "\n")
