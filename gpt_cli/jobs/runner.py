"""Run a job: a task for all rows of an input, on this machine or on a cluster."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

from gpt_cli.engine import Engine
from gpt_cli.errors import InputError
from gpt_cli.jobs.formats import Format
from gpt_cli.jobs.layout import InputRow
from gpt_cli.jobs.outputs import open_sink
from gpt_cli.jobs.rows import Source
from gpt_cli.jobs.sinks import Observer, Resumed, Sink
from gpt_cli.jobs.task import Task
from gpt_cli.loading import load
from gpt_cli.options.arguments import checks_arguments
from gpt_cli.options.declare import OptionError
from gpt_cli.options.edit import check_texts
from gpt_cli.records import Record

if TYPE_CHECKING:
    from gpt_cli.jobs.cluster import Cluster


@dataclass(frozen=True)
class Summary:
    """The number of rows of a job, and of those that failed, earlier runs included."""

    rows: int  # of the input
    failed: int  # rows whose record is an error
    reason: str | None = None  # why all rows failed, if it is the same for all
    kept: int = 0  # rows that have passed a filter


@checks_arguments()
def run(
    task: Task,
    input: str | PathLike[str] | Sequence[str | PathLike[str]],
    output: str | PathLike[str] | Sink,
    *,
    model: str = "gpt2",
    format: Format = "auto",
    delimiter: str | None = None,
    resume: bool = False,
    cluster: "Cluster | None" = None,
    observer: Observer | None = None,
    requests: Callable[[], Task] | None = None,
    **loading: Any,
) -> Summary:
    """Do a task for all rows of an input, and write their records, which may be errors.

    Args:
        task: such as `Generation(Options(max_tokens=20))` or `Scoring()`.
        input: a file, a folder, a pattern, or an address of these; "-" is standard input. Or a
            list of these, whose rows are read one after the other.
        output: a file, a folder or an address, as `--output` of `gpt-cli batch`, or a sink.
        model: a name or a folder, as for `gpt_cli.load`.
        format: of the input: "lines", "jsonl", "csv", "tsv", "parquet", or "text": each file is a
            row. "auto": by the name of each file, or else by its first bytes.
        delimiter: between the cells of CSV and TSV, such as ";".
        resume: whether to keep the records of an earlier run and add the missing ones.
        cluster: where to compute; None is this process.
        observer: receives the progress.
        requests: returns the task, such as `serve.Requests()`, if the first row is a request: an
            object with "custom_id", "url" and "body".
        loading: keywords of `gpt_cli.load`.
    """
    check_texts(loading.get("edits") or ())
    names = [input] if isinstance(input, str | PathLike) else input
    source = _open_source(task, [fspath(name) for name in names], format, delimiter, cluster)
    if requests and source.begins_with_request():
        task = requests()
        source.read_for(task.layout)
    job = _Job(task, source, model, loading, cluster, observer or Observer())
    if not isinstance(output, str | PathLike):
        return job.run(output)
    sink = open_sink(fspath(output), source, task, job.description, resume=resume)
    if isinstance(sink, Resumed):
        job.observer.note(f"{output} is complete; its content was not checked")
        return Summary(source.total or 0, sink.failed, kept=sink.kept)
    try:
        return job.run(sink)
    except KeyboardInterrupt:
        if sink.compares or not source.streams:
            job.observer.interrupted()
        raise


def _open_source(
    task: Task,
    names: Sequence[str],
    format: Format,
    delimiter: str | None,
    cluster: "Cluster | None",
) -> Source:
    """Return the input; raise InputError if it does not suit the task or the cluster."""
    if cluster:
        from gpt_cli.jobs.cluster import library

        library()  # before the input is read
    source = Source(names, format, task.layout, task.rows_together, delimiter)
    if source.streams and cluster:
        raise OptionError("engine", "ray reads files, not a pipe: name a file")
    try:
        task.check_lines()
    except InputError:
        if not {"lines", "text"}.isdisjoint(source.peek()):
            raise
    return source


@dataclass
class _Job:
    """A task, its input, and where it is computed."""

    task: Task
    source: Source
    model: str
    loading: dict[str, Any]
    cluster: "Cluster | None"
    observer: Observer
    _noted: set[str] = field(default_factory=set)  # columns that are ignored, or have new names

    @property
    def description(self) -> dict[str, Any]:
        """Everything that the records depend on, for the manifest."""
        job = {
            "task": type(self.task).__name__.lower(),
            "format": "+".join(self.source.formats),
            "input": None if self.source.streams else self.source.contents,
            "model": self.model,
            "revision": self.loading.get("revision"),
            "adapter": self.loading.get("adapter"),
            "dtype": self.loading.get("dtype", "auto"),
        }
        for name in ("bos_token", "edits"):  # absent in older manifests
            if self.loading.get(name):
                job[name] = self.loading[name]
        if self.source.delimiter:
            job["delimiter"] = self.source.delimiter
        for name, setting in self.task.settings.items():
            job.setdefault(name, setting)
        return job

    def run(self, sink: Sink) -> Summary:
        """Write the records that are missing in a sink."""
        self._note_ignored(self.source.ignored)
        records: Callable[[Sink, int], Iterator[list[Record]]]
        if self.cluster:
            records = partial(self._cluster_records, self.cluster)
        else:
            records = partial(self._records, load(self.model, **self.loading))
        with sink:
            resumed = sink.resume()
            failed = resumed.failed
            kept = resumed.kept
            self.observer.start(self.source.total, resumed.rows, failed)
            self.task = self.task.with_seed(resumed.seed)
            error_of = self.task.layout.error_of
            # The messages of errors, and None if a row did not fail: at most two of these.
            reasons: set[str | None] = {None} if resumed.rows else set()
            # Closed at once after an interrupt, with the files that the rows come from.
            with closing(self._begun(sink, records(sink, resumed.rows))) as of_rows:
                for of_row in of_rows:
                    kept += self.task.passes_rows and "data" in of_row[0]  # a sink may take it
                    sink.write_row(of_row)
                    errors = list(filter(None, map(error_of, of_row)))
                    good = [record for record in of_row if error_of(record) is None]
                    if errors:
                        failed += 1
                        if not sink.keeps_errors:
                            self.observer.dropped(of_row[0])
                    if len(reasons) < 2:
                        reasons.update([None] if good else [error["message"] for error in errors])
                    self.observer.advance(sum(map(self.task.tokens, good)), bool(errors))
            sink.finish(self.source.total or 0)
            if not self.source.total:
                self.observer.note("the input has no rows")
            elif resumed.rows == self.source.total:
                self.observer.note("nothing is missing: an earlier run has written all rows")
        reason = reasons.pop() if len(reasons) == 1 else None
        return Summary(self.source.total or 0, failed, reason, kept)

    def _begun(
        self, sink: Sink, records: Iterator[list[Record]]
    ) -> Generator[list[Record], None, None]:
        """Yield records of rows; before, when the input has been opened, begin the output."""
        first = list(islice(records, 1))
        sink.begin(self.source.header)
        yield from chain(first, records)

    def _cluster_records(self, cluster: "Cluster", sink: Sink, done: int) -> Iterator[list[Record]]:
        """Yield the same as `_records`, computed on a cluster."""
        from gpt_cli.jobs.cluster import compute

        if sink.compares:
            for row in islice(chain.from_iterable(self.source.rows()), done):
                sink.check(row)
        yield from compute(cluster, self.source, done, self.task, self.model, self.loading)

    def _records(self, engine: Engine, sink: Sink, done: int) -> Iterator[list[Record]]:
        """Yield the records of each row from index `done` on; the sink checks the rows before."""
        compared = done if sink.compares else 0
        for rows in self.source.rows(done - compared):
            self._note_ignored(self.source.ignored)  # of a pipe, which has begun only now
            for row in rows:
                if row.index < compared:
                    sink.check(row)
            self._note_fields(rows)
            yield from self.task.records(engine, rows, done)

    def _note_fields(self, rows: Sequence[InputRow]) -> None:
        """Note fields of rows that are not read, or that have other names in records."""
        layout = self.task.layout
        if layout.keep_fields is None and not layout.passes_rows:
            names = dict.fromkeys(chain.from_iterable(row.fields for row in rows))
            self._note_ignored([name for name in names if name not in layout.columns])
        new: dict[str, str] = {}
        for row in rows:
            new |= layout.renamed(row.fields)
        changes = [f"{name} is {new[name]}" for name in new if name not in self._noted]
        if changes:
            self._noted.update(new)
            self.observer.note(f"renamed fields: in the records, {', '.join(changes)}")

    def _note_ignored(self, names: Sequence[str]) -> None:
        """Note columns, each of them once."""
        new = [name for name in names if name not in self._noted]
        if new:
            self._noted.update(new)
            self.observer.note(f"ignored columns: {', '.join(new)}")
