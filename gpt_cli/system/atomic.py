"""Atomic writing: a file or a folder appears complete, or not at all."""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from gpt_cli.errors import InputError, ResourceError


def write_file(file: Path, data: bytes, *, replace: bool) -> None:
    """Write a file as `new_file` does."""
    with new_file(file, replace=replace) as target:
        target.write(data)


@contextmanager
def new_file(to: Path, *, replace: bool = False) -> Iterator[BinaryIO]:
    """Yield a file that becomes `to` if the block succeeds, or the device or pipe that `to` is.

    InputError if `to` is a folder, or exists and may not be replaced, or its folder does not exist;
    ResourceError if it cannot be written.
    """
    target = _resolved(to)  # keep a symbolic link
    with _part_of(target, to) as part:
        if target.exists() and not target.is_file() and not target.is_dir():
            with target.open("wb") as device:
                yield device
            return
        _check_new(to, replace=replace)
        if not to.parent.is_dir():
            raise InputError(f"the folder {to.parent} does not exist: create it")
        with part.open("xb") as file:
            yield file
        _check_new(to, replace=replace)  # another program may have created it
        if target.exists():
            shutil.copymode(target, part)
        part.replace(target)


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


def _check_new(to: Path, *, replace: bool) -> None:
    if to.is_dir() or (to.exists() and not replace):
        raise InputError(f"{to} exists: name another output")


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
        raise InputError(f"{to} exists and is not an empty folder: name another output")
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
