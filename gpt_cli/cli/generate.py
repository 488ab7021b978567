"""`gpt-cli generate`: continue a prompt."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gpt_cli.cli.options import Json, Model, Offline, Quiet, Revision, Verbose, limit_threads
from gpt_cli.cli.text import read_prompt, write

if TYPE_CHECKING:
    from gpt_cli.engine import Run

SEPARATOR = "\n---\n"  # between samples


def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(help="The text to continue; with none, standard input if it is a pipe."),
    ] = None,
    model: Model = "gpt2",
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", help="Read the prompt's beginning from FILE; - is the pipe."),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", min=1, help="How many new tokens at most.")
    ] = 128,
    temperature: Annotated[
        float, typer.Option(min=0, help="Higher is more surprising; 0: always the likeliest token.")
    ] = 0.8,
    top_k: Annotated[
        int, typer.Option(min=0, help="Choose among the k likeliest tokens; 0: among all.")
    ] = 40,
    top_p: Annotated[
        float,
        typer.Option(min=0, max=1, help="Choose among the likeliest of this probability together."),
    ] = 0.95,
    min_p: Annotated[
        float,
        typer.Option(min=0, max=1, help="Choose among those this likely beside the likeliest."),
    ] = 0.0,
    repeat_penalty: Annotated[
        float, typer.Option(min=0, help="Above 1: what the text already has gets less likely.")
    ] = 1.0,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this string; may be given repeatedly.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed", "-s", min=0, max=2**64 - 1, help="The same seed gives the same text."
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="How many continuations.")] = 1,
    cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="Keep keys and values of earlier tokens.")
    ] = True,
    device: Annotated[str, typer.Option(help="auto or cpu.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Type of the weights: float32.")] = "float32",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads for matrix products; all cores if not set.")
    ] = None,
    revision: Revision = None,
    offline: Offline = False,
    overflow: Annotated[
        Literal["error", "truncate", "shift"],
        typer.Option(
            help="A text beyond the context: refuse it, cut the prompt's beginning off, "
            "or go on with its newest half."
        ),
    ] = "error",
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Never end with the end token.")
    ] = False,
    echo: Annotated[bool, typer.Option("--echo", help="Print the prompt before the text.")] = False,
    stream: Annotated[
        bool, typer.Option("--stream/--no-stream", help="Print each piece of text at once.")
    ] = True,
    as_json: Json = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Show times and rates on standard error.")
    ] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Continue PROMPT, streaming the text to standard output."""
    text = read_prompt(prompt, file)
    limit_threads(threads)
    import gpt_cli
    from gpt_cli.cli import report

    engine = gpt_cli.load(
        model, device=device, dtype=dtype, revision=revision, offline=offline, quiet=quiet
    )
    run = engine.run(
        [text] * samples,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repeat_penalty=repeat_penalty,
        seed=seed,
        stop=stop or (),
        use_cache=cache,
        ignore_eos=ignore_eos,
        overflow=overflow,
    )
    streaming = stream and samples == 1 and not as_json
    prefix = text if echo else ""
    interrupted = not _finish(run, prefix if streaming else None)
    if as_json:
        write(report.json_lines(engine, text, run.completions))
    elif not streaming:
        write(SEPARATOR.join(prefix + completion.text for completion in run.completions))
    if not as_json and sys.stdout.isatty():
        write("\n")
    if not quiet:
        drawn = seed is None and temperature > 0
        notes = report.remarks(text, run.completions, report_seed=drawn and sys.stderr.isatty())
        notes += report.statistics(engine, run.completions) if stats else []
        print(*notes, sep="\n", end="\n" if notes else "", file=sys.stderr)
    if interrupted:
        raise typer.Exit(130)


def _finish(run: "Run", prefix: str | None) -> bool:
    """Let a run come to its end, with its text shown behind `prefix`; False if interrupted."""
    try:
        if prefix:
            write(prefix)
        for step in run:
            if prefix is not None:
                write(step.text)
    except KeyboardInterrupt:
        return False
    return True
