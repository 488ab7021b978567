"""`gpt-cli generate`: continue a prompt."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from gpt_cli.cli import options as flags
from gpt_cli.cli.text import note, on_terminal, read_prompt, write
from gpt_cli.errors import InputError

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
    model: flags.Model = "gpt2",
    file: flags.PromptFile = None,
    max_tokens: flags.MaxTokens = 128,
    temperature: flags.Temperature = 0.8,
    top_k: flags.TopK = 40,
    top_p: flags.TopP = 0.95,
    min_p: flags.MinP = 0.0,
    repeat_penalty: flags.RepeatPenalty = 1.0,
    stop: flags.Stop = None,
    seed: flags.Seed = None,
    samples: Annotated[
        int,
        typer.Option(
            min=1,
            max=10_000,  # all are computed side by side
            help="How many texts, printed when all are done, a line --- between.",
        ),
    ] = 1,
    cache: flags.Cache = True,
    device: flags.Device = "auto",
    dtype: flags.Dtype = "auto",
    threads: flags.Threads = None,
    revision: flags.Revision = None,
    offline: flags.Offline = False,
    overflow: flags.Overflow = "error",
    ignore_eos: flags.IgnoreEos = False,
    special: flags.Special = False,
    echo: Annotated[bool, typer.Option("--echo", help="Print the prompt before the text.")] = False,
    stream: Annotated[
        bool,
        typer.Option("--stream/--no-stream", help="Print text while it is made, or at the end."),
    ] = True,
    as_json: flags.Json = False,
    logprobs: flags.LogProbs = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Show times and rates on standard error.")
    ] = False,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
) -> None:
    """Continue PROMPT, streaming the text.

    It goes to standard output, and nothing else does.
    """
    if logprobs is not None and not as_json:
        raise InputError("--logprobs is a part of the JSON: give --json with it")
    text = read_prompt(prompt, file)
    flags.prepare(threads)
    import gpt_cli
    from gpt_cli.cli import report

    options = flags.generation_options(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repeat_penalty=repeat_penalty,
        stop=stop,
        seed=seed,
        use_cache=cache,
        ignore_eos=ignore_eos,
        special=special,
        overflow=overflow,
        top_logprobs=logprobs,
    )
    engine = gpt_cli.load(
        model,
        device=device,
        dtype=dtype,
        revision=revision,
        offline=offline,
        quiet=quiet,
    )
    run = engine.run([text] * samples, options)
    streaming = stream and samples == 1 and not as_json
    prefix = text if echo else ""
    interrupted = not _finish(run, prefix if streaming else None)
    if as_json:
        from gpt_cli import records

        for index, completion in enumerate(run.completions):
            record = records.of_completion(engine, text, completion, logprobs=logprobs is not None)
            write(records.json_line({"index": index} | record))
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
