"""Choose the sink for the name of an output, and refuse names that would do harm."""

import os
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from gpt_cli.errors import InputError
from gpt_cli.jobs import manifest, storage
from gpt_cli.jobs.manifest import ANOTHER, refusal
from gpt_cli.jobs.rows import Source
from gpt_cli.jobs.sinks import JSONLines, Sink
from gpt_cli.jobs.tasks import Task
from gpt_cli.records import ERROR, ERROR_PLACE, PLACE

# Endings of files in which nobody expects JSON Lines.
_OTHER_FORMATS = (".csv", ".tsv", ".xls", ".xlsx", ".arrow", ".feather", ".gz", ".zip", ".zst")


def open_sink(
    name: str, source: Source, task: Task, job: Mapping[str, Any], *, resume: bool
) -> Sink | None:
    """Return the sink of an output; None if an earlier run has completed it.

    Its name is that of a file, a folder (FOLDER/, FOLDER/*.jsonl, FOLDER/*.parquet) or an address
    of these. The job is everything that the records depend on; see `Manifest`.

    Raises:
        InputError: the output exists, cannot be resumed, or has an unsuitable name.
        ResourceError: a package for such files is missing.
    """
    place, ending = _place(name, source)
    _check_place(place)
    _check_apart(source.name, f"{place}/part-0{ending}" if ending else name)
    if not (ending or storage.is_address(name) or name.endswith(".parquet")):
        _check_file(Path(name), source, resume=resume)
        return JSONLines(Path(name), task.texts, job)
    from gpt_cli.jobs import parts  # brings fsspec

    if resume and source.streams:
        raise InputError(f"--resume: {name} needs a file as input, not a pipe")
    ids = {"id": "int64"} if source.whole_ids else {}
    texts = dict.fromkeys(task.texts, "string")  # also a template's {line}, in place of its number
    schema = PLACE | texts | task.schema | ERROR_PLACE | ERROR | ids | texts
    if ending:
        return parts.Folder(place, ending, schema, job, resume=resume)
    if resume and storage.exists(name):
        return None
    return parts.File(name, schema, job, resume=resume)


def _check_file(path: Path, source: Source, *, resume: bool) -> None:
    """Raise InputError if lines cannot be written to a file."""
    if path.suffix.lower() in _OTHER_FORMATS:
        raise InputError(f"--output {path}: records are JSON Lines or Parquet: name a .jsonl file")
    if not path.exists():
        return
    if any(path.samefile(file) for file in source.files if Path(file).exists()):
        raise refusal(f"{path} is the input")
    if not path.is_file():
        raise refusal(f"{path} is not a file")
    if not resume:
        raise InputError(f"{path} exists: continue it with --resume, or {ANOTHER}")


def _place(name: str, source: Source) -> tuple[str, str]:
    """Return the file or folder of an output, and the ending of the parts in a folder, else ""."""
    place, ending = name, ""
    start, slash, own = name.rpartition("/")
    if "*" in own:
        if own not in ("*.jsonl", "*.parquet"):
            cure = "name a folder as FOLDER/*.jsonl or FOLDER/*.parquet"
            raise InputError(f"--output {name}: {cure}")
        place, ending = start + slash or ".", own.removeprefix("*")
    elif name.endswith("/") or storage.is_folder(name):
        ending = ".parquet" if source.reader.format == "parquet" else ".jsonl"
    place = place.rstrip("/")
    if storage.is_address(place) and any(mark in place for mark in "*?["):
        # Moving and removing there would affect everything that such a name matches.
        raise InputError(f"--output {name}: an address must not contain *, ? or [")
    if not place or place.endswith(":"):  # such as s3://$BUCKET/ without that variable
        raise refusal(f"--output {name} is not a folder that can hold records")
    return place, ending


def _check_place(output: str) -> None:
    """Raise InputError if the folder of an output does not exist, or holds parts of another one."""
    folder, _, own = _normalized(output).rpartition("/")
    if not storage.is_address(output) and not Path(folder or "/").is_dir():
        raise InputError(f"cannot write {output}: there is no folder {Path(output).parent}")
    if own.startswith("part-") and storage.exists(f"{folder}/{manifest.NAME}"):
        # A shell expands a pattern without quotes to such a name.
        pattern = f"{output.removesuffix(own)}*{Path(own).suffix}"
        raise InputError(f"{output} is a part of the output {pattern}: put --output in quotes")


def _check_apart(name: str, output: str) -> None:
    """Raise InputError if an output file would be part of the input of the next run."""
    whole, rows = _normalized(output), _normalized(name)
    folder, _, own = whole.rpartition("/")
    if storage.is_folder(name):
        inside = folder == rows and not storage.is_hidden(own)
    elif "**" in name:
        inside = fnmatch(whole, rows)
    else:  # unlike `match`, fnmatch lets `*` match a slash
        inside = "*" in name and PurePosixPath(whole).match(rows)
    if inside:
        raise refusal(f"{output} would be among the files of {name}")


def _normalized(name: str) -> str:
    """Return the one spelling of a name."""
    if storage.is_address(name):
        return name.rstrip("/")
    return Path(os.path.abspath(name)).as_posix()  # noqa: PTH100 (Path keeps ..)
