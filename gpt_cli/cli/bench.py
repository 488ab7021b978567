"""`gpt-cli bench`: what the KV cache is for."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from gpt_cli.atomic import check_file
from gpt_cli.cli import options as flags
from gpt_cli.cli.progress import renew
from gpt_cli.cli.text import on_terminal, write


def bench(
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", "-p", help="How many tokens each prompt has.")
    ] = 32,
    max_tokens: flags.MaxTokens = 128,
    batch: Annotated[int, typer.Option("--batch", "-b", help="How many texts side by side.")] = 1,
    repetitions: Annotated[
        int, typer.Option("--repetitions", "-r", help="How often each is measured.")
    ] = 3,
    cache: Annotated[
        bool | None,
        typer.Option("--cache/--no-cache", help="Measure only with, or only without; else both."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the curves: .png, .svg or .pdf (matplotlib)."),
    ] = None,
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
    """Measure generation with and without KV cache.

    It shows times, rates, memory and two curves.

    The prompt is a text of this program's own; the tokens are the likeliest, the same in both.
    """
    from gpt_cli.cli import plot as plots

    if plot is not None:
        check_file("--plot", plot, plots.FORMATS)
        plots.check_library("--plot")
    flags.prepare(threads)
    import gpt_cli
    from gpt_cli.bench import Plan, measure
    from gpt_cli.cli import benched

    caches = (True, False) if cache is None else (cache,)
    plan = Plan(prompt_tokens, max_tokens, batch, repetitions, caches)
    engine = gpt_cli.load(
        model, device=device, dtype=dtype, revision=revision, offline=offline, quiet=quiet
    )
    shown = on_terminal(sys.stderr) and not quiet
    try:
        found = measure(engine, plan, lambda what: renew(f"gpt-cli: {what}") if shown else None)
    finally:
        if shown:
            renew("")
    write(benched.as_json(found) if as_json else benched.as_text(found))
    if plot is not None:
        plots.save(found, plot)
