"""`gpt-cli generate`: continue a prompt."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gpt_cli.cli.options import Json, Model, Offline, Quiet, Revision, Verbose, limit_threads
from gpt_cli.cli.text import note, on_terminal, read_prompt, write

if TYPE_CHECKING:
    from gpt_cli.engine import Run

SEPARATOR = "\n---\n"  # between samples


def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="[PROMPT]", help="The text to continue; without it, what comes through a pipe."
        ),
    ] = None,
    model: Model = "gpt2",
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            metavar="FILE",
            help="Read the prompt from FILE (-: a pipe); PROMPT comes after it.",
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", help="How many new tokens at most.")
    ] = 128,
    temperature: Annotated[
        float, typer.Option(help="Higher is more surprising; 0: always the likeliest token.")
    ] = 0.8,
    top_k: Annotated[
        int, typer.Option(help="Choose among the k likeliest tokens; 0: among all.")
    ] = 40,
    top_p: Annotated[
        float,
        typer.Option(help="Choose among the fewest that have this probability together; 1: all."),
    ] = 0.95,
    min_p: Annotated[
        float,
        typer.Option(help="Drop what is less likely than this fraction of the likeliest; 0: none."),
    ] = 0.0,
    repeat_penalty: Annotated[
        float, typer.Option(help="Above 1, tokens that the text already has get less likely.")
    ] = 1.0,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this string; may be given repeatedly.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option("--seed", "-s", help="The same seed gives the same text; else one is drawn."),
    ] = None,
    samples: Annotated[
        int,
        typer.Option(min=1, help="How many texts, printed when all are done, a line --- between."),
    ] = 1,
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
            help="Where the text does not fit the context: refuse it, drop the prompt's "
            "beginning, or go on with the newest half."
        ),
    ] = "error",
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Never end with the end token.")
    ] = False,
    special: Annotated[
        bool, typer.Option("--special", help="Let <|endoftext|> in the prompt be the token.")
    ] = False,
    echo: Annotated[bool, typer.Option("--echo", help="Print the prompt before the text.")] = False,
    stream: Annotated[
        bool,
        typer.Option("--stream/--no-stream", help="Print text while it is made, or at the end."),
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
    from gpt_cli.generate import Options

    given = {} if seed is None else {"seed": seed}
    options = Options(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repeat_penalty=repeat_penalty,
        stop=stop or (),
        use_cache=cache,
        ignore_eos=ignore_eos,
        special=special,
        overflow=overflow,
        **given,
    )
    engine = gpt_cli.load(
        model, device=device, dtype=dtype, revision=revision, offline=offline, quiet=quiet
    )
    run = engine.run([text] * samples, options)
    streaming = stream and samples == 1 and not as_json
    prefix = text if echo else ""
    interrupted = not _finish(run, prefix if streaming else None)
    if as_json:
        write(report.json_lines(engine, text, run.completions))
    elif not streaming:
        write(SEPARATOR.join(prefix + completion.text for completion in run.completions))
    if not as_json and on_terminal(sys.stdout):
        write("\n")
    if not quiet:
        people = on_terminal(sys.stdout) and on_terminal(sys.stderr)
        tell_seed = people and seed is None and temperature > 0
        note(*report.remarks(text, run.completions, tell_seed=tell_seed))
    if stats:
        note(*report.statistics(engine, run.completions))
    if interrupted:
        raise typer.Exit(130)


def _finish(run: "Run", prefix: str | None) -> bool:
    """Let a run come to its end, showing its text behind `prefix` if any; False if interrupted."""
    try:
        if prefix:
            write(prefix)
        for step in run:
            if prefix is not None:
                write(step.text)
    except KeyboardInterrupt:
        return False
    return True
