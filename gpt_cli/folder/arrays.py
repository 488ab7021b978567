"""Arrays in files: activations and vectors in .safetensors, .npz and .npy."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from gpt_cli.errors import MALFORMED, CheckpointError, InputError, did_you_mean
from gpt_cli.folder.weight_files import read_tensors

_SUFFIXES = (".safetensors", ".npz", ".npy")
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
        is_inside = not path.is_absolute() and folder.resolve() in inside.parents
        return inside if is_inside and inside.is_file() else None
    except (OSError, ValueError, RuntimeError):  # a name that no file has; a circle of links
        return None


class ArrayFile:
    """A file of named arrays; that of .npy has any name. InputError if it cannot be read."""

    def __init__(self, name: str, folder: Path | None = None):
        """Open a file; with a folder, only one in it, to which the name is relative."""
        self.name = name
        path = Path(name)
        if path.suffix not in _SUFFIXES:
            raise InputError(f"{name:.200} must end with {', '.join(_SUFFIXES)}")
        if folder:  # one answer for what is outside and what is missing
            if not (inside := _inside(folder, path)):
                raise InputError(f"{name:.200} is not a file in the folder for edits")
            path = inside
        try:
            self._arrays: Mapping[str, Any]
            if path.suffix == ".safetensors":
                self._arrays = dict(read_tensors(path))
            else:
                stored = np.load(path, allow_pickle=False)  # arrays of objects could run code
                self._arrays = {_ANY: stored} if path.suffix == ".npy" else stored
        except FileNotFoundError:
            raise InputError(f"{name:.200} does not exist") from None
        except CheckpointError as error:
            raise InputError(str(error).replace(str(path), name)) from None
        except (OSError, BadZipFile, EOFError, *MALFORMED) as error:
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
        except (OSError, BadZipFile, EOFError, CheckpointError, *MALFORMED) as error:
            raise InputError(f"{self.name:.200} cannot be read: {error!s:.200}") from None
        if array.dtype.kind not in "fiu":
            raise InputError(f"{self.name:.200} holds {array.dtype!s:.40}, not numbers")
        return array
