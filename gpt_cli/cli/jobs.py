"""Run a job for a command: its rows in, records out, progress and notes on standard error."""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from typing import TYPE_CHECKING, TextIO, cast

from gpt_cli import jobs
from gpt_cli.cli import flags
from gpt_cli.cli.output import NoteStream, note, on_terminal, write, write_json
from gpt_cli.cli.progress import Progress, failure
from gpt_cli.errors import InputError, RowsError, counted
from gpt_cli.records import Record
from gpt_cli.system.terminal import replace_line

if TYPE_CHECKING:
    from gpt_cli.jobs.task import RecordTask


class Records(jobs.Sink):
    """Records on standard output, for a command without --output."""

    has_fields = True  # whether the fields of a row are in its record
    totals = True  # whether the number of rows is shown at the end of a short job, too
    noun = "row"
    failure = "failed"
    advice = ": the records say why"
    quiet = False
    unread = 0  # inputs that failed before the job

    def write(self, record: Record) -> None:
        write_json(record)


class RowLines(Records):
    """Lines of text instead of records; the errors of rows are shown on standard error."""

    has_fields = False
    advice = ": the records, with --json, say why"

    def line(self, record: Record) -> str | bytes:
        """Return the output for a record, which may be an error."""
        raise NotImplementedError

    def write(self, record: Record) -> None:
        if "error" in record and not self.quiet:
            if on_terminal(sys.stderr) and not on_terminal(sys.stdout):
                replace_line("")  # erases the progress
            note(failure(record))
        write(self.line(record))


class AnswerLines(RowLines):
    """A line per row, with tabs: its answer, the number of that, and the fields of the row."""

    def __init__(self, fields: Sequence[str]):
        self._fields = fields

    def answer(self, record: Record) -> tuple[str, str]:
        """Return the answer of a record without an error, and its probability or other number."""
        raise NotImplementedError

    def line(self, record: Record) -> str:
        """Return cells with tabs between them."""
        if "error" in record:
            cells = ["", "nan"] + [""] * len(self._fields)
        else:
            cells = [*self.answer(record), *(record[name] for name in self._fields)]
        # A line end within a cell would end the row.
        return "\t".join(cells).replace("\r", "\\r").replace("\n", "\\n") + "\n"


def run(
    task: "RecordTask",
    files: Sequence[str],
    rows: flags.RowFiles,
    loading: flags.Loading,
    placement: flags.Placement,
    sink: Records | None = None,
    requests: Callable[[], jobs.Task] | None = None,
) -> None:
    """Run a job; raise RowsError if it is complete and rows failed.

    Without --output, the records go to `sink`, by default to standard output. They have the fields
    of rows that --keep-fields says. `requests` returns the task for rows that are requests: see
    `jobs.run`.
    """
    cluster = placement.cluster(loading.threads)
    if sink is None or rows.output is not None:
        sink = Records()
    has_fields = sink.has_fields and (rows.output is None or not task.passes_rows)
    if not has_fields and rows.keep_fields is not None:
        cure = "leave it out" if task.passes_rows else "add --output OUT"
        raise InputError(f"--keep-fields needs a record for each row: {cure}")
    task = replace(task, keep_fields=(rows.keep_fields or "all") if has_fields else None)
    sink.quiet = loading.quiet
    hidden = loading.quiet or (rows.output is None and on_terminal(sys.stdout))
    progress = Progress(shown=not hidden, notes=not loading.quiet, totals=sink.totals)
    with ExitStack() as stack, progress:
        if cluster is not None and sys.stdout is not None:
            # Ray prints messages there, for example about a node that died.
            notes = cast(TextIO, NoteStream(sys.stdout, shown=not loading.quiet))
            stack.enter_context(redirect_stdout(notes))
        summary = jobs.run(
            task,
            files,
            sink if rows.output is None else rows.output,
            model=loading.model,
            format=rows.format or "auto",
            delimiter=rows.delimiter,
            resume=rows.resume,
            cluster=cluster,
            observer=progress,
            requests=requests,
            **loading.options,
        )
    if task.passes_rows and not loading.quiet:
        note(f"gpt-cli: kept {summary.kept:,} of {counted(summary.rows, 'row')}")
    failed = summary.failed + sink.unread
    if failed:
        total = counted(summary.rows + sink.unread, sink.noun)
        advice = sink.advice if ".jsonl" in task.endings else ": the output has their errors"
        if task.passes_rows:  # they have been reported
            advice = ""
        why = f": {summary.reason}" if summary.reason and not sink.unread else advice
        raise RowsError(f"{failed:,} of {total} {sink.failure}{why}")
