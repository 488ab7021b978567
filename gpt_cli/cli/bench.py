"""`gpt-cli bench`: measure generation with and without the KV cache."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from gpt_cli.atomic import check_file
from gpt_cli.cli import options as flags
from gpt_cli.cli.progress import renew
from gpt_cli.cli.streams import on_terminal, write
from gpt_cli.startup import prepare


def bench(
    *,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", "-p", help="Prompt length in tokens.")
    ] = 32,
    max_tokens: flags.MaxTokens = 128,
    batch: Annotated[int, typer.Option("--batch", "-b", help="Number of texts per batch.")] = 1,
    repetitions: Annotated[
        int, typer.Option("--repetitions", "-r", help="Number of runs in each mode.")
    ] = 3,
    cache: Annotated[
        bool | None,
        typer.Option("--cache/--no-cache", help="Measure only one mode; both if not set."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the curves: .png, .svg or .pdf (matplotlib)."),
    ] = None,
    loading: flags.Loading,
    as_json: flags.Json = False,
) -> None:
    """Measure generation with and without KV cache.

    Print times, rates, memory use and two curves. The prompt is a built-in text. Generation is
    greedy, so both modes generate the same tokens.
    """
    from gpt_cli.cli import plot as plots

    if plot is not None:
        check_file("--plot", plot, plots.FORMATS)
        plots.check_library("--plot")
    prepare(loading.threads)
    from gpt_cli.bench import Plan, measure
    from gpt_cli.cli import bench_format

    caches = (True, False) if cache is None else (cache,)
    plan = Plan(prompt_tokens, max_tokens, batch, repetitions, caches)
    engine = loading.load()
    shown = on_terminal(sys.stderr) and not loading.quiet
    try:
        found = measure(engine, plan, lambda what: renew(f"gpt-cli: {what}") if shown else None)
    finally:
        if shown:
            renew("")
    write(bench_format.as_json(found) if as_json else bench_format.as_text(found))
    if plot is not None:
        plots.save(found, plot)
