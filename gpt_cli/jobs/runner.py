"""Run a job: a task for each row of an input, on this machine or on a cluster."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

from gpt_cli.engine import Engine
from gpt_cli.errors import InputError
from gpt_cli.jobs.observer import Observer
from gpt_cli.jobs.outputs import open_sink
from gpt_cli.jobs.rows import Source
from gpt_cli.jobs.sinks import Sink
from gpt_cli.jobs.storage import Format
from gpt_cli.jobs.tasks import Task
from gpt_cli.loading import load
from gpt_cli.records import Record

if TYPE_CHECKING:
    from gpt_cli.jobs.cluster import Cluster


@dataclass(frozen=True)
class Summary:
    """The result of a job: number of rows, and of failed ones, earlier runs included."""

    rows: int
    failed: int


def run(
    task: Task,
    input: str | PathLike[str],
    output: str | PathLike[str] | Sink,
    *,
    model: str = "gpt2",
    format: Format = "auto",
    resume: bool = False,
    cluster: "Cluster | None" = None,
    observer: Observer | None = None,
    **loading: Any,
) -> Summary:
    """Do a task for each row of an input, and write a record for each.

    Args:
        task: such as `Generation(Options(max_tokens=20))` or `Scoring()`.
        input: a file, a folder, a pattern, or an address of these; "-" is standard input.
        output: a file, a folder or an address; see `open_sink`. Or a sink.
        model: a name or a folder, as for `gpt_cli.load`.
        format: of the input: "auto", "lines", "jsonl" or "parquet".
        resume: whether to keep the records of an earlier run and add the missing ones.
        cluster: where to compute; None is this process.
        observer: receives the progress.
        loading: keywords of `gpt_cli.load`.

    Raises:
        GPTCLIError: one of its subclasses. A row that fails gets an error record instead.
    """
    observer = observer or Observer()
    if cluster:
        from gpt_cli.jobs.cluster import compute, library

        library()  # before the input is read
    source = Source(fspath(input), format, task.columns, task.window, task.template)
    if source.streams and cluster:
        raise InputError("--engine ray reads files, not a pipe: name a file")
    job = {
        "task": type(task).__name__.lower(),
        "format": source.reader.format,
        "input": None if source.streams else source.contents,
        "model": model,
        "revision": loading.get("revision"),
        "dtype": loading.get("dtype", "auto"),
    }
    job = job | task.settings | job  # a setting must not replace what is the job's own
    if isinstance(output, str | PathLike):
        sink = open_sink(fspath(output), source, task, job, resume=resume)
    else:
        sink = output
    if sink is None:
        observer.note(f"{output} is complete; its content was not checked")
        return Summary(source.total or 0, 0)
    if source.ignored:
        observer.note(f"ignored columns: {', '.join(source.ignored)}")
    engine: Any = None if cluster else load(model, **loading)
    with sink:
        resumed = sink.resume()
        done, failed = resumed.rows, resumed.failed
        observer.start(source.total, done, failed)
        task = task.with_seed(resumed.seed)
        if cluster:
            if sink.compares:
                for row in islice(chain.from_iterable(source.rows()), done):
                    sink.check(row)
            records = compute(cluster, source, done, task, model, loading)
        else:
            records = _compute(engine, source, sink, done, task)
        for record in records:
            sink.write(record)
            bad = "error" in record
            failed += bad
            observer.advance(0 if bad else task.tokens(record), bad)
        sink.finish(source.total or 0)
    return Summary(source.total or 0, failed)


def _compute(engine: Engine, source: Source, sink: Sink, done: int, task: Task) -> Iterator[Record]:
    """Yield the records of the rows from index `done` on; the sink checks the rows before."""
    for rows in source.rows(0 if sink.compares else done):
        for row in rows:
            if sink.compares and row.index < done:
                sink.check(row)
        yield from task.records(engine, [row for row in rows if row.index >= done])
