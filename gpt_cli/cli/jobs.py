"""A job: a task for each row of an input, on this machine or on many, with its output resumed."""

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

import gpt_cli
from gpt_cli import places
from gpt_cli.cli.output import JOB, Output
from gpt_cli.cli.progress import Progress
from gpt_cli.cli.text import Aside, note, on_terminal
from gpt_cli.engine import Engine
from gpt_cli.errors import InputError, RowsError
from gpt_cli.records import ERROR, PLACE, Record, Task
from gpt_cli.rows import Form, Source

if TYPE_CHECKING:
    from gpt_cli.cli.parts import Parts
    from gpt_cli.ray.job import Cluster


@dataclass(frozen=True)
class Job:
    """What flags say of a job."""

    input: str  # a file, a folder, a pattern, or an address of such; "-" is standard input
    output: str | None  # the same; None is standard output
    form: Form  # what the input is
    resume: bool  # whether there may be an output of an earlier run
    seed: int | None  # the one that was given
    model: str  # a name or a folder
    load_options: dict[str, Any]  # keywords for `gpt_cli.load`
    cluster: "Cluster | None"  # where it is computed; None is here
    quiet: bool  # nothing is told on the way


def run(job: Job, task: Task) -> None:
    """Do a job.

    Raises:
        GPTCLIError: one of its subclasses; RowsError if all is done, and some rows have failed.
    """
    source = Source(job.input, job.form, task.fields, task.together)
    if source.streams and job.cluster is not None:
        raise InputError("--engine ray reads files, and no pipe: name a file")
    output = _output(job, task, source)
    if output is None:
        note(f"gpt-cli: note: {job.output} is there, and whole; what is in it was not looked at")
        return
    if source.ignored and not job.quiet:
        note(f"gpt-cli: note: columns that are not read: {', '.join(source.ignored)}")
    total = source.total
    aside: AbstractContextManager[object] = nullcontext()
    if job.cluster is None:
        engine = gpt_cli.load(job.model, **job.load_options, quiet=job.quiet)
        compute = partial(_compute_here, engine)
    else:
        compute = partial(_compute_there, job, job.cluster)
        if sys.stdout is not None:
            # Ray prints there what it has to say, as of a node that has died.
            aside = redirect_stdout(cast(TextIO, Aside(sys.stdout, shown=not job.quiet)))
    shown = not job.quiet and not (job.output is None and on_terminal(sys.stdout))
    with aside, output, Progress(total, output.rows, output.failed, shown=shown) as progress:
        for record in compute(task, source, output):
            output.write(record.line)
            progress.add(record.tokens, failed=record.failed)
        rows = source.total or 0
        output.end(rows)
    if progress.failed:
        raise RowsError(f"{progress.failed} of {rows} rows failed: their records say why")


def _compute_here(
    engine: Engine, task: Task, source: Source, output: "Output | Parts"
) -> Iterator[Record]:
    """Yield what becomes of the rows that the output does not have."""
    for rows in source.rows(0 if output.to_check else output.rows):
        missing = [row for row in rows if not output.has(row)]
        if output.seed is not None:
            task = task.with_seed(output.seed)
        yield from task.records(engine, missing)


def _compute_there(
    job: Job, cluster: "Cluster", task: Task, source: Source, output: "Output | Parts"
) -> Iterator[Record]:
    """The same, by the workers of a cluster."""
    from gpt_cli.ray.job import compute

    for row in islice(chain.from_iterable(source.rows()), output.to_check):
        output.has(row)
    if output.seed is not None:
        task = task.with_seed(output.seed)
    yield from compute(cluster, source, output.rows, task, job.model, job.load_options)


def _output(job: Job, task: Task, source: Source) -> "Output | Parts | None":
    """Return where the records go; None if they are all there."""
    name = job.output
    folder, ending = (None, "") if name is None else _folder(name, source)
    if name is not None:
        _check_place(folder or name)
        if not folder:
            _check_apart(job.input, name)
    if name is None or not (folder or places.is_address(name) or name.endswith(".parquet")):
        path = None if name is None else Path(name)
        files = [file for file in source.files if Path(file).exists()]
        if path is not None and path.exists() and any(map(path.samefile, files)):
            raise InputError(f"{path} is the input: name another --output")
        return Output(path, task, job.model, job.seed, resume=job.resume)
    from gpt_cli.cli.parts import Parts, Whole

    if job.resume and source.streams:
        raise InputError(f"--resume goes on with {name} only where the input is no pipe")
    columns = PLACE | task.columns | ERROR | ({"id": "int64"} if source.whole_ids else {})
    made_from = {
        "task": type(task).__name__.lower(),
        "format": source.reader.form,
        "input": None if source.streams else source.contents,
        "model": job.model,
        "revision": job.load_options["revision"],
        "dtype": job.load_options["dtype"],
        **task.settings,
    }
    given = job.seed is not None
    if folder:
        return Parts(folder, ending, columns, made_from, seed_given=given, resume=job.resume)
    if job.resume and places.exists(name):
        return None
    return Whole(name, columns, made_from, seed_given=given, resume=job.resume)


def _check_place(output: str) -> None:
    """Raise InputError if there is no place for an output, or it is for another one."""
    folder, _, own = _whole(output).rpartition("/")
    if not places.is_address(output) and not Path(folder or "/").is_dir():
        raise InputError(f"cannot write {output}: there is no folder {Path(output).parent}")
    if own.startswith("part-") and places.exists(f"{folder}/{JOB}"):
        # As a shell makes it of a pattern without quotes.
        pattern = f"{output.removesuffix(own)}*{Path(own).suffix}"
        raise InputError(f"{output} is a part of a whole, which is --output '{pattern}', in quotes")


def _check_apart(name: str, output: str) -> None:
    """Raise InputError if an output would be a part of the input of the next run."""
    whole, rows = _whole(output), _whole(name)
    folder, _, own = whole.rpartition("/")
    if places.is_folder(name):
        inside = folder == rows and not places.is_hidden(own)
    elif "**" in name:
        inside = fnmatch(whole, rows)
    else:  # a `*` does not go past a slash, as those of fnmatch do
        of, _, pattern = rows.rpartition("/")
        inside = "*" in name and folder == of and fnmatch(own, pattern)
    if inside:
        raise InputError(f"{output} would be among the files of {name}: name another --output")


def _whole(name: str) -> str:
    """Return a name in the one way to say it."""
    if places.is_address(name):
        return name.rstrip("/")
    return Path(os.path.abspath(name)).as_posix()  # noqa: PTH100 (Path keeps ..)


def _folder(name: str, source: Source) -> tuple[str | None, str]:
    """Return the folder that an output is, and how the names of its files end; None if it is none.

    Raises:
        InputError: it is a pattern that says something else, or the root of a file system.
    """
    folder: str | None
    start, slash, own = name.rpartition("/")
    ending = ".parquet" if source.reader.form == "parquet" else ".jsonl"
    if "*" in own:
        if own not in ("*.jsonl", "*.parquet"):
            raise InputError(
                f"{name} is no output: a folder's are FOLDER/*.jsonl or FOLDER/*.parquet"
            )
        folder, ending = start + slash or ".", own.removeprefix("*")
    elif name.endswith("/") or places.is_folder(name):
        folder = name
    else:
        folder = None
    place = (name if folder is None else folder).rstrip("/")
    if places.is_address(place) and any(mark in place for mark in "*?["):
        # What is moved and removed there may be all that such a name matches.
        raise InputError(f"{name} is no output: a name at an address is without *, ? and [")
    if not place or place.endswith(":"):  # as of s3://$BUCKET/ where there is no such variable
        raise InputError(f"{name} is no folder that records can be in: name another --output")
    return (None, "") if folder is None else (place, ending)
