"""Run a job for a command: its rows in, records out, progress and notes on standard error."""

import sys
from contextlib import ExitStack, redirect_stdout
from typing import TextIO, cast

from gpt_cli import jobs
from gpt_cli.cli import options as flags
from gpt_cli.cli.progress import Progress, replace_line
from gpt_cli.cli.streams import NoteStream, note, on_terminal, write
from gpt_cli.errors import InputError, RowsError
from gpt_cli.records import Record, json_line


class Records(jobs.Sink):
    """Records on standard output, for a command without --output."""

    totals = True  # whether progress is shown in logs, too, and the number of rows at the end
    failure = "{} of {} rows failed: their records say why"

    def write(self, record: Record) -> None:
        write(json_line(record))


class Lines(Records):
    """Lines of text in place of records; the errors of rows are shown on standard error."""

    failure = "{} of {} rows failed: their records, with --json, say why"

    def __init__(self, *, quiet: bool):
        self._quiet = quiet

    def complain(self, record: Record) -> None:
        """Show the error of a row."""
        if self._quiet:
            return
        if on_terminal(sys.stderr) and not on_terminal(sys.stdout):
            replace_line("")  # erases the progress
        file = f"{record['file']}, " if "file" in record else ""
        line = record.get("line_number", record.get("line"))
        note(f"gpt-cli: {file}line {line}: {record['error']['message']}")


def run(
    task: jobs.Task,
    file: str,
    rows: flags.RowFiles,
    loading: flags.Loading,
    where: flags.Where,
    shown: Records | None = None,
) -> None:
    """Run a job; raise RowsError if it is complete and some rows failed.

    Without --output, the output is `shown`, by default records on standard output.
    """
    if rows.resume and rows.output is None:
        raise InputError("--resume continues a file: give its name by --output OUT")
    cluster = where.cluster(loading.threads)
    sink = shown if shown and rows.output is None else Records()
    hidden = loading.quiet or (rows.output is None and on_terminal(sys.stdout))
    progress = Progress(shown=not hidden, notes=not loading.quiet, totals=sink.totals)
    with ExitStack() as stack, progress:
        if cluster is not None and sys.stdout is not None:
            # Ray prints messages there, for example about a node that died.
            notes = cast(TextIO, NoteStream(sys.stdout, shown=not loading.quiet))
            stack.enter_context(redirect_stdout(notes))
        summary = jobs.run(
            task,
            file,
            sink if rows.output is None else rows.output,
            model=loading.model,
            format=rows.format or "auto",
            resume=rows.resume,
            cluster=cluster,
            observer=progress,
            **loading.options,
        )
    if summary.failed:
        raise RowsError(sink.failure.format(summary.failed, summary.rows))
