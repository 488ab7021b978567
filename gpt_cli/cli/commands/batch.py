"""`gpt-cli batch`: continue many prompts."""

from contextlib import suppress
from dataclasses import replace

from gpt_cli import jobs
from gpt_cli.cli import options as flags
from gpt_cli.cli.inputs import input_file, unescape
from gpt_cli.cli.jobs import run
from gpt_cli.errors import InputError
from gpt_cli.options.declare import option
from gpt_cli.options.request import Options


def batch(
    file: str | None = flags.argument(
        "[IN]",
        "Prompts as plain lines, JSON Lines or Parquet: a file, a folder, a quoted pattern, or a "
        "URL of these",
    ),
    *,
    from_file: str | None = flags.ROWS_FILE,
    rows: flags.RowFiles,
    filled: flags.Filled,
    batch_size: str = option("auto", "Number of rows to compute at once.", metavar="N|auto"),
    options: Options,
    escape: bool = option(False, r"Read \n, \r, \t and \\ in --stop as escapes."),
    logprobs: int | None = flags.LOGPROBS,
    loading: flags.Generating,
    where: flags.Where,
) -> None:
    r"""Continue each prompt of IN.

    Write one JSON record per row, in the order of the input.

    In JSON Lines, a row is an object with a "prompt", an optional "id", and options of its own,
    such as "max_tokens", "temperature", "seed" and "stop".

    Examples:
        printf 'Once\nThe fox\n' | gpt-cli batch -m tiny -n 20
        printf 'Once\nThe fox\n' | gpt-cli batch -m tiny -n 20 -o new.jsonl
    """
    file = input_file(file, from_file, "prompts")
    size = _batch_size(batch_size)
    where.prepare(loading.threads)
    if escape:
        options = replace(options, stop=[unescape(stop) for stop in options.stop])
    options = replace(options, top_logprobs=logprobs or 0)
    task = jobs.Generation(options, size, logprobs is not None, filled.template)
    run(task, file, rows, loading, where)


def _batch_size(value: str) -> int | None:
    if value == "auto":
        return None
    with suppress(ValueError):  # not decimal, or thousands of digits
        if value.isdecimal() and int(value):
            return int(value)
    raise InputError(f"--batch-size must be auto, or 1 or more, not {value:.40}")
