"""Arrays in files: activations and vectors in .safetensors, .npz and .npy."""

import re
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from lzma import LZMAError
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any
from zipfile import BadZipFile, ZipFile

import numpy as np
from numpy.typing import NDArray

from gpt_cli.errors import MALFORMED, CheckpointError, InputError, brief, did_you_mean
from gpt_cli.folder.weight_files import read_tensors

_SUFFIXES = (".safetensors", ".npz", ".npy")
# Of zipfile and NumPy: a member may have a password, and a header may claim any size.
_DAMAGED = (
    OSError,
    EOFError,
    RuntimeError,
    MemoryError,
    SyntaxError,
    TokenError,
    BadZipFile,
    zlib.error,
    LZMAError,
    *MALFORMED,
)
_ANY = ""  # the name of the array of .npy
_FILE_AND_KEY = re.compile(rf"(.*(?:{'|'.join(map(re.escape, _SUFFIXES))})):([^/]*)", re.DOTALL)


def file_and_key(text: str) -> tuple[str, str]:
    """Split FILE:NAME; the name is "" if there is only a file."""
    match = _FILE_AND_KEY.fullmatch(text)
    return (match[1], match[2]) if match else (text, "")


def _inside(folder: Path, path: Path) -> Path | None:
    """Return a regular file in a folder, or None."""
    try:
        inside = (folder / path).resolve()
        leads_out = path.is_absolute() or ".." in path.parts
        is_inside = not leads_out and folder.resolve() in inside.parents
        return inside if is_inside and inside.is_file() else None
    except (OSError, ValueError, RuntimeError):  # a name that no file has; a circle of links
        return None


def _read_npy(file: IO[bytes]) -> NDArray[Any]:
    """Return the array of a file. Objects are refused: their pickles could run code."""
    with warnings.catch_warnings(action="ignore"):  # about a header by Python 2
        array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
    return array


@dataclass(frozen=True)
class _Member:
    """An array in a file of .npz."""

    path: Path
    name: str

    def __getitem__(self, rows: slice, /) -> NDArray[Any]:
        with ZipFile(self.path) as file, file.open(self.name) as member:
            return _read_npy(member)[rows]


def _open(path: Path) -> Mapping[str, Any]:
    """Return the arrays of a file, which are read as far as they are indexed."""
    if path.suffix == ".safetensors":
        return dict(read_tensors(path))
    if path.suffix == ".npy":
        with path.open("rb") as file:
            return {_ANY: _read_npy(file)}
    with ZipFile(path) as file:
        return {name.removesuffix(".npy"): _Member(path, name) for name in file.namelist()}


class ArrayFile:
    """A file of named arrays; the array of .npy has any name. InputError if it cannot be read."""

    def __init__(self, name: str, folder: Path | None = None):
        """Open a file; with a folder, only one in it, to which the name is relative."""
        self.name = name
        path = Path(name)
        if path.suffix not in _SUFFIXES:
            raise InputError(f"{brief(name, 200)} must end with {' or '.join(_SUFFIXES)}")
        if folder:  # one answer for what is outside and what is missing
            inside = _inside(folder, path)
            if inside is None:
                raise InputError(f"{name:.200} is not a file in the folder for edits")
            path = inside
        try:
            path.stat()  # FileNotFoundError, whatever its format
            self._arrays = _open(path)
        except FileNotFoundError:
            raise InputError(f"{name:.200} does not exist") from None
        except CheckpointError as error:
            raise InputError(str(error).replace(str(path), name)) from None
        except _DAMAGED as error:
            raise InputError(f"{name:.200} cannot be read: {error!s:.200}") from None

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def read(self, name: str) -> NDArray[Any]:
        """Return an array; InputError if it is missing, damaged or not of numbers."""
        name = _ANY if _ANY in self else name
        if name not in self:
            hint = did_you_mean(name, self._arrays) or f": it has {', '.join(self._arrays):.200}"
            raise InputError(f"{self.name:.200} has no {name:.80}{hint}")
        try:
            array = np.asarray(self._arrays[name][:])
        except (CheckpointError, *_DAMAGED) as error:
            raise InputError(f"{self.name:.200} cannot be read: {error!s:.200}") from None
        if array.dtype.kind not in "fiu":
            raise InputError(f"{self.name:.200} holds {array.dtype!s:.40}, not numbers")
        return array
