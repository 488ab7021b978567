"""`gpt-cli batch`: continue many prompts, a line each."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gpt_cli.cli import options as flags
from gpt_cli.cli.progress import Progress
from gpt_cli.cli.rows import Output, Row, count_rows, read_rows
from gpt_cli.cli.text import input_file, on_terminal
from gpt_cli.errors import InputError, RowsError

if TYPE_CHECKING:
    import gpt_cli


def batch(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[IN]",
            help="Prompts, one a line, or JSON Lines; without it, what comes through a pipe.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="OUT", help="Write to a new file, not to standard output."
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="If OUT is there, keep its rows and add those that are missing. Give the same "
            "flags again; the seed is known from OUT.",
        ),
    ] = False,
    form: Annotated[
        Literal["auto", "lines", "jsonl"],
        typer.Option("--format", help="What IN is; auto: jsonl if it begins with {, else lines."),
    ] = "auto",
    batch_size: Annotated[
        str, typer.Option(metavar="N|auto", help="How many rows are computed side by side.")
    ] = "auto",
    model: flags.Model = "gpt2",
    max_tokens: flags.MaxTokens = 128,
    temperature: flags.Temperature = 0.8,
    top_k: flags.TopK = 40,
    top_p: flags.TopP = 0.95,
    min_p: flags.MinP = 0.0,
    repeat_penalty: flags.RepeatPenalty = 1.0,
    stop: flags.Stop = None,
    seed: flags.Seed = None,
    cache: flags.Cache = True,
    device: flags.Device = "auto",
    dtype: flags.Dtype = "auto",
    threads: flags.Threads = None,
    revision: flags.Revision = None,
    offline: flags.Offline = False,
    overflow: flags.Overflow = "error",
    ignore_eos: flags.IgnoreEos = False,
    special: flags.Special = False,
    logprobs: flags.LogProbs = None,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
) -> None:
    """Continue each line of IN.

    A line of JSON is written for each, in the same order.

    A line of JSON Lines is an object with a "prompt", an "id" if wanted, and options of its own,
    such as "max_tokens", "temperature", "seed" and "stop".
    """
    file = input_file(file, "no prompts: give a file IN, or a pipe on standard input")
    size = _batch_size(batch_size)
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
    output = None if output == Path("-") else output
    if output is not None and file.exists() and output.exists() and output.samefile(file):
        raise InputError(f"{output} is the input: name another --output")
    records = Output(output, resume=resume)
    streams = file == Path("-") or file.is_fifo() or file.is_char_device()
    total = None if streams else count_rows(file)
    engine = gpt_cli.load(
        model, device=device, dtype=dtype, revision=revision, offline=offline, quiet=quiet
    )
    shown = not quiet and not (output is None and on_terminal(sys.stdout))
    seen = 0
    with records, Progress(total, records.rows, shown=shown) as progress:
        failed = records.failed
        for block in read_rows(file, form):
            seen += len(block)
            rows = [row for row in block if not records.has(row, engine.name, seed)]
            options = replace(options, seed=options.seed if records.seed is None else records.seed)
            for row, result in _complete(engine, rows, options, size):
                failed += isinstance(result, InputError)
                told = report.row_record(engine, row, result, logprobs=logprobs is not None)
                records.write(report.json_line(told))
                progress.add(0 if isinstance(result, InputError) else len(result.ids))
        records.end(seen)
    if failed:
        raise RowsError(f"{failed} of {seen} rows failed: their records say why")


def _complete(
    engine: "gpt_cli.Engine", rows: list[Row], options: "gpt_cli.Options", size: int | None
) -> "Iterator[tuple[Row, gpt_cli.Completion | InputError]]":
    """Yield each row with what has become of it."""
    requests = (row.request for row in rows)
    indices = (row.index for row in rows)
    results = engine.batch(requests, options, batch_size=size, indices=indices)
    return zip(rows, results, strict=True)


def _batch_size(given: str) -> int | None:
    if given == "auto":
        return None
    try:
        size = int(given) if given.isdecimal() else 0
    except ValueError:  # of thousands of digits
        size = 0
    if size == 0:
        raise InputError(f"--batch-size must be auto, or 1 or more, not {given:.40}")
    return size
