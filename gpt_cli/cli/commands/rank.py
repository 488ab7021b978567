"""`gpt-cli rank`: which of several continuations is the likeliest."""

import sys
from collections.abc import Sequence
from glob import glob
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from gpt_cli import jobs
from gpt_cli.cli import options as flags
from gpt_cli.cli.inputs import input_file
from gpt_cli.cli.layout import quoted
from gpt_cli.cli.streams import note, on_terminal, write
from gpt_cli.errors import InputError
from gpt_cli.jobs import storage
from gpt_cli.options.declare import PATH, option, split_commas
from gpt_cli.records import Record, json_line, of_ranking

# Endings of inputs; a word with one is no prompt.
_FILES = (".txt", ".jsonl", ".json", ".parquet", ".csv", ".tsv")


def rank(
    prompt: str | None = flags.argument(
        "[PROMPT|IN]", "Text before the choices; or, if it names a file, its rows, as for batch"
    ),
    *,
    from_file: str | None = flags.ROWS_FILE,
    choices: list[str] | None = option(
        (),
        "Continuations, separated by commas; repeatable.",
        metavar="A,B,C",
        callback=split_commas,
    ),
    choices_file: Path | None = option(
        None, "Continuations, one per line.", kind=PATH, metavar="FILE"
    ),
    by: Annotated[
        Literal["total", "token", "byte"],
        typer.Option(
            help="Rank by the total log-likelihood, which favours short choices, or by its mean "
            "per token or byte."
        ),
    ] = "total",
    exact: bool = option(False, "Use the choices as given: remove and add no spaces."),
    filled: flags.Filled,
    rows: flags.RowFiles,
    loading: flags.Loading,
    where: flags.Where,
    as_json: flags.Json = False,
) -> None:
    r"""Rank continuations of PROMPT, or of each row of IN, by probability.

    For one prompt, the output is a table, or JSON in a pipe. For rows, it is a line for each: the
    likeliest choice, its probability and the row, with tabs between them; with --json or --output,
    a record with all choices. In JSON Lines, a row has a "prompt", and may have an "id" and
    "choices" of its own. With --template, it has the fields of the template instead of a prompt.

    Spaces around a choice are removed. One is added before it unless the prompt ends with a space.

    Examples:
        gpt-cli rank -m tiny 'The fox was very' --choices happy,sad,stone
        printf 'The fox was\nThe sun was\n' | gpt-cli rank -m tiny --choices red,up
    """
    if choices_file == Path("-") and (from_file or prompt or "-") == "-":
        raise InputError("rows and --choices-file cannot both be read from the pipe")
    listed = _choices(choices, choices_file)
    if listed:
        jobs.spaced("", listed, exact=exact)  # raises for choices that no prompt can have
    template = filled.template
    asked = from_file or template or rows.used or where.engine != "local"
    if prompt is None or asked or _is_input(prompt):
        file = input_file(prompt, from_file, "rows")
        task = jobs.Ranking(listed, by, exact, template)
        where.prepare(loading.threads)
        from gpt_cli.cli.jobs import run

        sink = None if as_json else Columns(task, quiet=loading.quiet)
        run(task, file, rows, loading, where, sink)
        return
    if not listed:
        raise InputError("no choices: give --choices A,B,C or --choices-file FILE")
    given = jobs.spaced(prompt, listed, exact=exact)
    engine = loading.load()
    records = of_ranking(engine, engine.rank(prompt, list(given), by=by), given)
    if as_json or not on_terminal(sys.stdout):
        write("".join(map(json_line, records)))
    else:
        _write_table(records)


class Columns(jobs.Sink):
    """A line for each row: the likeliest choice, its probability, and the fields of the row."""

    def __init__(self, task: jobs.Task, *, quiet: bool):
        self._fields, self._quiet = task.texts, quiet
        _, self._line = task.error_place

    def write(self, record: Record) -> None:
        """Write the line of a record; report an error."""
        if "error" in record:
            if not self._quiet:
                file = f"{record['file']}, " if "file" in record else ""
                note(f"gpt-cli: {file}line {record[self._line]}: {record['error']['message']}")
            cells = ["", "nan", *("" for _ in self._fields)]
        else:
            best = record["choices"][0]
            texts = [record[name] for name in self._fields]
            cells = [best["choice"], f"{best['probability']:.4f}", *texts]
        write("\t".join(map(_cell, cells)) + "\n")


def _cell(text: str) -> str:
    """Return a text without line ends, which would end its row."""
    return text.replace("\r", "\\r").replace("\n", "\\n")


def _write_table(records: Sequence[dict[str, Any]]) -> None:
    write(f"{'probability':>11}  {'log-lik.':>9}  tokens  choice\n")
    for choice in records:
        numbers = f"{choice['probability']:11.2%}  {choice['logprob']:9.3f}  {choice['tokens']:6}"
        write(f"{numbers}  {quoted(choice['text'].encode())}\n")


def _choices(given: list[str] | None, file: Path | None) -> tuple[str, ...]:
    """Return the choices of the flags, if any."""
    if given and file is not None:
        raise InputError("give either --choices A,B,C or --choices-file FILE")
    if file is not None:
        lines = (line.removesuffix("\r") for line in storage.read_text(file).split("\n"))
        return tuple(line for line in lines if line)
    return tuple(given or ())


def _is_input(prompt: str) -> bool:
    """Return whether an argument names an input; raise InputError if it does, and there is none."""
    if any(map(str.isspace, prompt)):
        return False
    if prompt == "-":  # standard input
        return True
    if storage.is_address(prompt) or storage.exists(prompt) or glob(prompt):  # noqa: PTH207
        return True
    if prompt.endswith(_FILES):
        raise InputError(f"cannot read {prompt:.80}: No such file")
    return False
