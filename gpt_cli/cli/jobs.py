"""Run a job for a command: its rows in, records out, progress and notes on standard error."""

import sys
from contextlib import ExitStack, redirect_stdout
from typing import TextIO, cast

from gpt_cli import jobs
from gpt_cli.cli import options as flags
from gpt_cli.cli.progress import Progress
from gpt_cli.cli.streams import NoteStream, on_terminal, write
from gpt_cli.errors import InputError, RowsError
from gpt_cli.records import Record, json_line


class StandardOutput(jobs.Sink):
    """The sink of a command without --output."""

    def write(self, record: Record) -> None:
        write(json_line(record))


def run(
    task: jobs.Task,
    file: str,
    rows: flags.RowFiles,
    loading: flags.Loading,
    where: flags.Where,
    shown: jobs.Sink | None = None,
) -> None:
    """Run a job; raise RowsError if it is complete and some rows failed.

    Without --output, records go to `shown`, by default to standard output.
    """
    if rows.resume and rows.output is None:
        raise InputError("--resume continues a file: give its name by --output OUT")
    cluster = where.cluster(loading.threads)
    terminal = rows.output is None and on_terminal(sys.stdout)
    progress = Progress(shown=not loading.quiet and not terminal, notes=not loading.quiet)
    with ExitStack() as stack, progress:
        if cluster is not None and sys.stdout is not None:
            # Ray prints messages there, for example about a node that died.
            notes = cast(TextIO, NoteStream(sys.stdout, shown=not loading.quiet))
            stack.enter_context(redirect_stdout(notes))
        summary = jobs.run(
            task,
            file,
            (shown or StandardOutput()) if rows.output is None else rows.output,
            model=loading.model,
            format=rows.format or "auto",
            resume=rows.resume,
            cluster=cluster,
            observer=progress,
            **loading.options,
        )
    if summary.failed:
        records = shown is None or rows.output is not None
        why = "their records say why" if records else "their records, with --json, say why"
        raise RowsError(f"{summary.failed} of {summary.rows} rows failed: {why}")
