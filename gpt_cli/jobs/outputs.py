"""Choose the sink for the name of an output, and refuse names that would do harm."""

import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from gpt_cli.errors import InputError
from gpt_cli.jobs import formats, storage
from gpt_cli.jobs.rows import Source
from gpt_cli.jobs.sinks import (
    ANOTHER,
    MANIFEST,
    JSONLines,
    Resumed,
    Sink,
    existing,
    refusal,
)
from gpt_cli.jobs.task import Task
from gpt_cli.options.declare import OptionError

_TABLES = (".parquet", ".csv", ".tsv")
# Endings of files in which nobody expects JSON Lines.
_OTHER_FORMATS = (
    *(".xls", ".xlsx", ".ods", ".sqlite", ".db", ".arrow", ".feather", ".avro", ".orc"),
    *(".gz", ".zip", ".zst", ".bz2", ".xz"),
)


def open_sink(
    name: str, source: Source, task: Task, job: Mapping[str, Any], *, resume: bool
) -> Sink | Resumed:
    """Return the sink of an output, or the counts of an output that an earlier run has completed.

    Its name is that of a file, a folder (FOLDER/, or FOLDER/*.ENDING with an ending of the task) or
    an address of these. The job is everything that the records depend on: see `Manifest`. Raise
    InputError if the output exists, cannot be resumed or has an unsuitable name.
    """
    name = storage.with_slashes(name)
    output, ending = _split(name, source, task.endings)
    _check_folder_of(output)
    example = f"{output}/part-0{ending}" if ending else name
    for input in source.names:
        _check_apart(input, example)
    if task.passes_rows:
        _check_suits(name, source, is_folder=bool(ending))
    has_lines = ".jsonl" in task.endings and not task.passes_rows
    suffix = PurePosixPath(name).suffix.lower()
    if has_lines and suffix in _TABLES and suffix not in task.endings:
        raise _unsuitable(name, "the answers to requests are JSON Lines: name a .jsonl file")
    in_lines = has_lines and suffix not in _TABLES
    if in_lines and not (ending or storage.is_address(name)):
        _check_file(Path(name), source, resume=resume)
        return JSONLines(Path(name), task.layout, job)
    from gpt_cli.jobs import parts  # brings fsspec

    if resume and source.streams:
        raise OptionError("resume", f"needs a file as input, not a pipe, for {name}")
    if task.passes_rows:
        if resume and storage.exists(name):
            return parts.check_filtered(name, job)
        return parts.FilteredFile(name, job, resume=resume)
    schema = task.layout.table | ({"id": "int64"} if source.whole_ids else {})
    error_of = task.layout.error_of
    if ending:
        return parts.Folder(output, ending, schema, job, resume=resume, error_of=error_of)
    if resume and storage.exists(name):
        return parts.check_complete(name, job, error_of)
    return parts.File(name, schema, job, resume=resume, error_of=error_of)


def _check_file(path: Path, source: Source, *, resume: bool) -> None:
    """Raise InputError if lines cannot be written to a file."""
    if path.suffix.lower() in _OTHER_FORMATS:
        raise _unsuitable(path, "records are JSON Lines, CSV, TSV or Parquet: name a .jsonl file")
    if not path.exists():
        return
    if any(path.samefile(file.name) for file in source.files if Path(file.name).exists()):
        raise refusal(f"{path} is the input")
    if not path.is_file():
        raise refusal(f"{path} is not a file")
    if not resume:
        raise existing(path)


def _check_suits(name: str, source: Source, *, is_folder: bool) -> None:
    """Raise InputError if rows that pass a filter cannot be in an output: they keep their format.

    A name without a known ending suits all rows, and so does the ending of an input.
    """
    if is_folder:
        raise _unsuitable(name, "the rows that pass are in one file: name it")
    output = formats.named(name)
    ending = PurePosixPath(name).suffix.lower()
    if output.compression or ending in _OTHER_FORMATS:
        raise _unsuitable(name, "the rows that pass are as in the input, uncompressed: rename it")
    if output.format == "auto" or ending in [formats.ending(file.name) for file in source.files]:
        return
    for format in source.peek():
        if format not in (output.format, "auto", "text"):
            kind = formats.NAMES[format]
            raise _unsuitable(name, f"the rows that pass stay {kind}: name a file with its ending")


def _split(name: str, source: Source, endings: Sequence[str]) -> tuple[str, str]:
    """Return the file or folder of an output, and the ending of the parts in a folder, else "".

    The endings are those of the task. Without JSON Lines, a name without an ending is a folder.
    """
    if not name:  # such as of a variable that is not set
        raise OptionError("output", "is empty: name a file")
    output = name
    ending = ""
    has_lines = ".jsonl" in endings
    suffix = PurePosixPath(name).suffix
    folder, slash, base = name.rpartition("/")
    if "*" in base:
        ending = base.removeprefix("*")
        if base != f"*{ending}" or ending not in endings:
            folders = " or ".join(f"FOLDER/*{ending}" for ending in endings)
            raise _unsuitable(name, f"name a folder as {folders}")
        output = folder + slash or "."
    elif name.endswith("/") or storage.is_folder(name) or not (has_lines or suffix):
        ending = ".parquet" if has_lines and source.formats == ["parquet"] else endings[0]
    elif not has_lines and suffix not in endings:
        files = " or ".join(endings)
        cure = f"name a FOLDER/ or a file that ends with {files}"
        if suffix == ".parquet":
            raise OptionError("pool", f"must be set for the table {name}: choose one, or {cure}")
        raise _unsuitable(name, f"for arrays, {cure}")
    output = output.rstrip("/")
    if storage.is_address(output) and storage.is_pattern(output):
        raise _unsuitable(name, "an address must not contain *, ? or [")
    if not output or output.endswith(":"):  # such as s3://$BUCKET/ without that variable
        raise OptionError("output", f"{name} is not a folder that can hold records: {ANOTHER}")
    return output, ending


def _unsuitable(name: str | Path, complaint: str) -> OptionError:
    """Return the error of a name that an output cannot have."""
    return OptionError("output", f"{name}: {complaint}")


def _check_folder_of(output: str) -> None:
    """Raise InputError if the folder of an output does not exist, or holds parts of another one."""
    folder, _, name = _normalized(output).rpartition("/")
    if not storage.is_address(output) and not Path(folder or "/").is_dir():
        raise InputError(f"cannot write {output}: there is no folder {Path(output).parent}")
    if name.startswith("part-") and storage.exists(f"{folder}/{MANIFEST}"):
        # A shell expands a pattern without quotes to such a name.
        pattern = f"{output.removesuffix(name)}*{Path(name).suffix}"
        raise InputError(f"{output} is a part of the output {pattern}: put the output in quotes")


def _check_apart(input: str, output: str) -> None:
    """Raise InputError if an output file would be part of the input of the next run."""
    file = _normalized(output)
    rows = _normalized(input)
    folder, _, name = file.rpartition("/")
    if storage.is_folder(input):
        inside = folder == rows and not storage.is_hidden(name)
    elif "**" in input:
        inside = fnmatch(file, rows)
    else:  # unlike `match`, fnmatch lets `*` match a slash
        inside = "*" in input and PurePosixPath(file).match(rows)
    if inside:
        raise refusal(f"{output} would be among the files of {input}")


def _normalized(name: str) -> str:
    """Return a name without `..`, and without a slash at its end; a path becomes absolute."""
    if storage.is_address(name):
        return name.rstrip("/")
    return Path(os.path.abspath(name)).as_posix()  # noqa: PTH100 (Path keeps ..)
