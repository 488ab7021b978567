"""The tensors of files of weights: dtypes, shapes, offsets and data.

Rows are read straight into aligned arrays: mapped pages would count as memory in addition to the
copies, views of the published `gpt2` file would be misaligned and slow (its data starts at an odd
byte), and NumPy has no bfloat16.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from gpt_cli.errors import CheckpointError
from gpt_cli.folder.contents import TOKENIZER
from gpt_cli.system.files import version

_AGAIN = "run the command again"
_CACHE_LINE = 64  # bytes

# How NumPy reads the dtypes, as safetensors writes them.
_STORED = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I8": "i1", "F64": "<f8", "I64": "<i8"}

# The files of a model or an adapter; other files in its folder may change at any time.
_FILES = (
    "*.safetensors",
    "*_model*.bin",
    "*.pt",
    "hparams.json",
    "*.index.json",
    "*config.json",
    *TOKENIZER,
)


Version: TypeAlias = tuple[int, int]  # of a file: see `gpt_cli.system.files.version`


class NotWeightsError(ValueError):
    """A file has more than weights; the message says what to do."""


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an uninitialized array that starts on a cache line, for fast vector loads."""
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + _CACHE_LINE, np.uint8)
    start = -buffer.ctypes.data % _CACHE_LINE
    return buffer[start : start + size].view(dtype).reshape(shape)


@dataclass(frozen=True)
class Tensor:
    """A tensor on disk."""

    path: Path
    version: Version | None  # of the file when its header was read
    offset: int  # from the start of the file, in bytes
    dtype: str  # as safetensors writes it: F32, F16, BF16, ...
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None  # in elements, as PyTorch stores views; None: no gaps

    def __getitem__(self, rows: slice, /) -> NDArray[Any]:
        """Read rows (or elements of a vector) into a new array; all floats become float32."""
        start, stop, _ = rows.indices(self.shape[0])
        shape = (stop - start, *self.shape[1:])
        if self.strides is None:
            stored = self._read(start * math.prod(shape[1:]), math.prod(shape)).reshape(shape)
        else:
            steps = [(size - 1) * step for size, step in zip(shape, self.strides, strict=True)]
            part = self._read(start * self.strides[0], sum(steps) + 1 if all(shape) else 0)
            strides = [step * part.itemsize for step in self.strides]
            stored = np.ascontiguousarray(as_strided(part, shape, strides, writeable=False))
        if self.dtype not in ("F16", "BF16", "F64"):
            return stored
        array = aligned_empty(stored.shape, np.dtype("<f4"))
        if self.dtype != "BF16":
            with np.errstate(over="ignore"):  # an infinity is detected in the results
                array[...] = stored
        else:  # bfloat16 is the upper half of a float32
            np.left_shift(stored, 16, out=array.view("<u4"), dtype="<u4")
        return array

    def transposed(self) -> "Tensor":
        """Return the matrix with its axes swapped."""
        rows, columns = self.shape
        steps = self.strides or (columns, 1)
        strides = None if steps == (1, rows) else steps[::-1]
        return replace(self, shape=(columns, rows), strides=strides)

    def _read(self, first: int, count: int) -> NDArray[Any]:
        """Read elements as they are stored, from the first on: (count,)."""
        stored = aligned_empty((count,), np.dtype(_STORED[self.dtype]))
        rest = stored.data.cast("B")
        with open_unchanged(self.path, self.version) as file:
            file.seek(self.offset + first * stored.itemsize)
            while rest:
                size = file.readinto(rest)
                if not size:
                    raise EOFError
                rest = rest[size:]
        return stored


@contextmanager
def open_unchanged(path: Path, expected_version: Version | None) -> Iterator[FileIO]:
    """Open a file of weights.

    Raise CheckpointError if it is missing; and on exit if its version is another one, or if
    EOFError was raised inside.
    """
    try:
        with path.open("rb", buffering=0) as file:
            yield file
            whole = version(file.fileno()) == expected_version
    except (FileNotFoundError, EOFError):
        whole = False
    except OSError as error:
        raise OSError(error.errno, error.strerror, error.filename or str(path)) from error
    if not whole:
        raise changed_error(path)


def changed_error(path: Path) -> CheckpointError:
    """Return the error for a file or a folder that has changed."""
    return CheckpointError(f"{path} changed while it was read: {_AGAIN}")


@contextmanager
def unchanged(*folders: Path) -> Iterator[None]:
    """Raise CheckpointError on exit if files of models or adapters have changed since the entry."""

    def versions(folder: Path) -> dict[Path, object]:
        paths = [path for pattern in _FILES for path in folder.glob(pattern)]
        return {path: version(path) for path in paths}

    before = {folder: versions(folder) for folder in folders}
    yield
    for folder in folders:
        if versions(folder) != before[folder]:
            raise changed_error(folder)
