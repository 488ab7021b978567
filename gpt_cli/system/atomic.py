"""Atomic writing: a file or a folder appears complete, or not at all."""

import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from gpt_cli.errors import InputError, ResourceError


def check_file(option: str, file: Path, endings: Sequence[str]) -> None:
    """Raise InputError before costly work if the output file of an option cannot be used."""
    if file.suffix.lower() not in endings:
        raise InputError(f"{option} {file}: the name must end with {' or '.join(endings)}")
    if not file.parent.is_dir():
        raise InputError(f"{option} {file}: the folder {file.parent} does not exist")
    if file.is_dir():
        raise InputError(f"{option} {file} is a folder: give a file name")


def write_file(file: Path, data: bytes) -> None:
    """Write or replace a file; if ResourceError is raised, an existing file is unchanged."""
    target = _resolved(file)  # keep a symbolic link
    with _part_of(target, file) as part:
        if target.exists() and not target.is_file():
            target.write_bytes(data)  # a device or a pipe cannot be replaced
            return
        part.write_bytes(data)
        if target.exists():
            shutil.copymode(target, part)
        part.replace(target)


@contextmanager
def new_file(to: Path) -> Iterator[BinaryIO]:
    """Yield a file that becomes `to` if the block succeeds, or the device or pipe that `to` is.

    InputError if `to` exists, or its folder does not; ResourceError if it cannot be written.
    """
    with _part_of(to, to) as part:
        if to.exists() and not to.is_file() and not to.is_dir():
            with to.open("wb") as device:
                yield device
            return
        _check_new(to)
        if not to.parent.is_dir():
            raise InputError(f"the folder {to.parent} does not exist: create it")
        with part.open("xb") as file:
            yield file
        _check_new(to)  # another program may have created it
        part.replace(to)


@contextmanager
def _part_of(to: Path, name: Path) -> Iterator[Path]:
    """Yield a new path beside `to`, and remove that file at the end; errors say `name`."""
    part = to.parent / f".{uuid.uuid4().hex}"
    try:
        yield part
    except OSError as error:
        if error.filename not in (None, str(part), str(to)):
            raise
        raise ResourceError(f"cannot write {name}: {error.strerror}") from None
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def _check_new(to: Path) -> None:
    if to.exists():
        raise InputError(f"{to} exists: give a new name")


def _resolved(path: Path) -> Path:
    """Return an absolute path without links, except links to themselves.

    Path.resolve would raise RuntimeError for those before Python 3.13.
    """
    return Path(os.path.realpath(path))


@contextmanager
def new_folder(to: Path) -> Iterator[Path]:
    """Yield a temporary folder, which becomes `to` if the block succeeds.

    Raise InputError if `to` exists and is not an empty folder.
    """
    import tempfile  # slow to import, and every command imports this module

    to = _resolved(to)
    if os.path.lexists(to) and (not to.is_dir() or any(to.iterdir())):
        raise InputError(f"{to} exists and is not an empty folder: give a new name")
    beside = next(parent for parent in to.parents if parent.exists())
    # One level down, because only the owner can read the temporary folder itself.
    with tempfile.TemporaryDirectory(prefix=f".{to.name}-", dir=beside) as scratch:
        folder = Path(scratch, "model")
        folder.mkdir()
        yield folder
        to.parent.mkdir(parents=True, exist_ok=True)
        if to.exists():
            to.rmdir()  # POSIX would replace an empty folder, Windows would not
        folder.replace(to)
