"""`gpt-cli next`: what the model expects after a prompt."""

import math
import shutil
import sys
from typing import Annotated

import typer

from gpt_cli.cli import options as flags
from gpt_cli.cli.text import bar, on_terminal, read_prompt, write


def next_tokens(
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="[PROMPT]", help="The text so far; else what a pipe brings."),
    ] = None,
    top: Annotated[
        int, typer.Option("--top", "-k", metavar="N", min=1, help="How many tokens.")
    ] = 10,
    file: flags.PromptFile = None,
    special: flags.Special = False,
    model: flags.Model = "gpt2",
    device: flags.Device = "auto",
    dtype: flags.Dtype = "auto",
    threads: flags.Threads = None,
    revision: flags.Revision = None,
    offline: flags.Offline = False,
    as_json: flags.Json = False,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
) -> None:
    """Show the likeliest next tokens after PROMPT.

    They are shown with bars, or as JSON in a pipe.
    """
    text = read_prompt(prompt, file)
    flags.prepare(threads)
    import gpt_cli
    from gpt_cli import records
    from gpt_cli.cli import report

    engine = gpt_cli.load(
        model,
        device=device,
        dtype=dtype,
        revision=revision,
        offline=offline,
        quiet=quiet,
    )
    found = [
        records.of_token(engine, id, logprob) | {"probability": math.exp(logprob)}
        for id, logprob in engine.next_tokens(text, top, special=special)
    ]
    if as_json or not on_terminal(sys.stdout):
        for place, token in enumerate(found, 1):
            write(records.json_line({"rank": place} | token))
        return
    pieces = [report.shown(token) for token in found]
    width = max(map(len, pieces))
    room = max(1, shutil.get_terminal_size().columns - width - 13)
    for token, piece in zip(found, pieces, strict=True):
        drawn = bar(token["probability"] / found[0]["probability"] * room)
        write(f"{token['probability']:8.2%}  {piece:{width}}  {drawn}".rstrip() + "\n")
