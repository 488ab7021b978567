"""Where files are: on this machine, or at an address such as s3://bucket/name, by fsspec."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING

from gpt_cli.errors import GPTCLIError, InputError, ResourceError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_ANOTHER = "name a file that can be read"


def is_address(name: str) -> bool:
    """Return whether a name is that of a file on any machine, not only of one on this."""
    return "://" in name


def filesystem(name: str) -> "tuple[AbstractFileSystem, str]":
    """Return the file system of a path or an address, and its path there.

    Raises:
        InputError: there is no such kind of address.
        ResourceError: the package for it is missing.
    """
    import fsspec

    if not is_address(name):
        return fsspec.filesystem("file"), Path(name).absolute().as_posix()
    with reading(name):
        return fsspec.core.url_to_fs(name)


def base(name: str) -> str:
    """Return the last part of a name."""
    return name.rpartition("/")[2] if is_address(name) else Path(name).name


def find(name: str) -> list[str]:
    """Return the files of a name: its own, those in a folder, or those that a pattern matches.

    They are in the order of their names; hidden ones (`.`, `_`) of a folder are left out.

    Raises:
        InputError: there is none, or nothing can be read there.
    """
    there = _find_there if is_address(name) else _find_here
    with reading(name):
        found = there(name)
    if not found:
        raise InputError(f"cannot read {name}: it holds, or matches, no file; {_ANOTHER}")
    return sorted(found)


def _find_here(name: str) -> list[str]:
    path = Path(name)
    if path.is_dir():
        return [str(file) for file in path.iterdir() if file.is_file() and not is_hidden(str(file))]
    if "*" in name and not path.exists():
        found = glob(name, recursive=True)  # noqa: PTH207 (leaves ./ as it is)
        return [file for file in found if Path(file).is_file()]
    path.stat()
    return [name]


def _find_there(name: str) -> list[str]:
    fs, path = filesystem(name)
    kind = "" if "*" in path else fs.info(path)["type"]
    if kind == "file":
        return [name]
    if not kind:
        found = [file for file in fs.glob(path) if not fs.isdir(file)]
    else:
        files = [about["name"] for about in fs.ls(path, detail=True) if about["type"] == "file"]
        # A folder of a bucket may be a file of its own, which is empty.
        inside = [file for file in files if file.rstrip("/") != path.rstrip("/")]
        found = [file for file in inside if not is_hidden(f"://{file}")]
    files = [fs.unstrip_protocol(file) for file in found]
    if any(filesystem(file) != (fs, path) for file, path in zip(files, found, strict=True)):
        raise InputError(f"{name}: such an address can only be that of one file")
    return files


def is_hidden(name: str) -> bool:
    """Return whether a file is not taken for one of the rows of its folder."""
    return base(name).startswith((".", "_"))


def is_folder(name: str) -> bool:
    """Return whether there is a folder of this name.

    Raises:
        InputError: nothing can be read there.
    """
    if not is_address(name):
        return Path(name).is_dir()
    fs, path = filesystem(name)
    with reading(name):
        return bool(fs.isdir(path))


def exists(name: str) -> bool:
    """Return whether there is something of this name.

    Raises:
        InputError: nothing can be read there.
    """
    fs, path = filesystem(name)
    with reading(name):
        return bool(fs.exists(path))


def size(name: str) -> int:
    """Return how many bytes a file has.

    Raises:
        InputError: it cannot be read.
    """
    with reading(name):
        if not is_address(name):
            return Path(name).stat().st_size
        fs, path = filesystem(name)
        return int(fs.size(path))


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Raise InputError for what a file system raises when it cannot read."""
    with _told(name, "read", InputError, _ANOTHER):
        yield


@contextmanager
def writing(name: str, cure: str) -> Iterator[None]:
    """Raise ResourceError for what a file system raises when it cannot write."""
    with _told(name, "write", ResourceError, cure):
        yield


@contextmanager
def _told(name: str, doing: str, kind: type[GPTCLIError], cure: str) -> Iterator[None]:
    try:
        yield
    except GPTCLIError:
        raise
    except FileNotFoundError:  # whose text is only the path, where it comes from fsspec
        raise kind(f"cannot {doing} {name}: {os.strerror(errno.ENOENT)}; {cure}") from None
    except OSError as error:
        raise kind(f"cannot {doing} {name}: {error.strerror or error}; {cure}") from None
    except Exception as error:
        if not is_address(name):
            raise
        # The packages for addresses have errors of their own, of no common kind.
        kind = ResourceError if isinstance(error, ImportError) else kind
        raise kind(f"cannot {doing} {name}: {error!s:.300}") from None
