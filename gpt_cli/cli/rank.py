"""`gpt-cli rank`: which of several continuations is the likeliest."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from gpt_cli.cli import options as flags
from gpt_cli.cli.text import on_terminal, quoted, read_prompt, write
from gpt_cli.errors import InputError
from gpt_cli.reading import read_text


def rank(
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="[PROMPT]", help="What stands before; else what a pipe brings."),
    ] = None,
    choices: Annotated[
        str | None, typer.Option(metavar="A,B,C", help="The continuations, with commas between.")
    ] = None,
    choices_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The continuations, one a line.")
    ] = None,
    by: Annotated[
        Literal["total", "token", "byte"],
        typer.Option(
            help="Compare the likelihood of the whole, which favours the short, or its mean for "
            "a token or a byte."
        ),
    ] = "total",
    exact: Annotated[
        bool,
        typer.Option("--exact", help="Take the choices as they are, and put no space before them."),
    ] = False,
    file: flags.PromptFile = None,
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
    """Rank continuations of PROMPT by probability.

    They are shown as a table, or as JSON in a pipe.

    Spaces around a choice do not count, and one is put before it if the prompt does not end so.
    """
    if choices_file == Path("-") and prompt is None:
        raise InputError("only one of them can come through the pipe: PROMPT or --choices-file")
    listed = _choices(choices, choices_file)
    text = read_prompt(prompt, file)
    if not exact:
        listed = [choice.strip() for choice in listed]
    if "" in listed:
        raise InputError("give each choice a text: none may be empty")
    space = "" if exact or not text or text[-1].isspace() else " "
    given = {space + choice: choice for choice in listed}
    if len(given) < len(listed):
        raise InputError("give each choice once: none may be there twice")
    flags.prepare(threads)
    import gpt_cli
    from gpt_cli import records

    engine = gpt_cli.load(
        model,
        device=device,
        dtype=dtype,
        revision=revision,
        offline=offline,
        quiet=quiet,
    )
    ranked = engine.rank(text, list(given), by=by)
    if as_json or not on_terminal(sys.stdout):
        for place, choice in enumerate(ranked, 1):
            told = {
                "rank": place,
                "choice": given[choice.text],
                "text": choice.text,
                "probability": choice.probability,
                "logprob": choice.logprob,
                "tokens": len(choice.ids),
                "bytes": choice.bytes,
                "model": engine.name,
            }
            write(records.json_line(told))
        return
    write(f"{'probability':>11}  {'log-lik.':>9}  tokens  choice\n")
    for choice in ranked:
        numbers = f"{choice.probability:11.2%}  {choice.logprob:9.3f}  {len(choice.ids):6}"
        write(f"{numbers}  {quoted(choice.text.encode())}\n")


def _choices(given: str | None, file: Path | None) -> list[str]:
    if (given is None) == (file is None):
        raise InputError("give the continuations by one of --choices A,B,C and --choices-file FILE")
    if file is not None:
        lines = [line.removesuffix("\r") for line in read_text(file).split("\n")]
        return [line for line in lines if line]
    return (given or "").split(",")
