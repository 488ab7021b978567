"""`gpt-cli batch`: continue many prompts."""

from contextlib import suppress
from dataclasses import replace
from typing import Annotated

import typer

from gpt_cli.cli import options as flags
from gpt_cli.cli.inputs import input_file, unescape
from gpt_cli.errors import InputError
from gpt_cli.options import Options


def batch(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="[IN]",
            path_type=str,
            help="Prompts as plain lines, JSON Lines or Parquet: a file, a folder, a quoted "
            "pattern, or a URL of these; standard input if not given.",
        ),
    ] = None,
    *,
    from_file: flags.RowsFile = None,
    rows: flags.Rows,
    batch_size: Annotated[
        str, typer.Option(metavar="N|auto", help="Number of rows to compute at once.")
    ] = "auto",
    options: Options,
    escape: Annotated[
        bool, typer.Option("--escape", help=r"Read \n, \r, \t and \\ in --stop as escapes.")
    ] = False,
    logprobs: flags.LogProbs = None,
    loading: flags.Loading,
    where: flags.Where,
) -> None:
    """Continue each prompt of IN.

    Write one JSON record per row, in the order of the input.

    In JSON Lines, a row is an object with a "prompt", an optional "id", and options of its own,
    such as "max_tokens", "temperature", "seed" and "stop".
    """
    file = input_file(file, from_file, "prompts")
    size = _batch_size(batch_size)
    where.prepare(loading.threads)
    from gpt_cli.cli import jobs
    from gpt_cli.jobs import Generation

    if escape:
        options = replace(options, stop=[unescape(stop) for stop in options.stop])
    options = replace(options, top_logprobs=logprobs or 0)
    jobs.run(Generation(options, size, logprobs is not None), file, rows, loading, where)


def _batch_size(given: str) -> int | None:
    if given == "auto":
        return None
    with suppress(ValueError):  # not decimal, or thousands of digits
        if given.isdecimal() and int(given):
            return int(given)
    raise InputError(f"--batch-size must be auto, or 1 or more, not {given:.40}")
