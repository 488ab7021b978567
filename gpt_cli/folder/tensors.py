"""The tensors of safetensors files: names, shapes, offsets and data.

Rows are read straight into aligned arrays. The safetensors library only validates the file: pages
that its reader maps would count as memory in addition to the copies, views of the published `gpt2`
file would be misaligned and slow (its data starts at an odd byte), and NumPy has no bfloat16.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from gpt_cli.errors import MALFORMED, CheckpointError
from gpt_cli.folder.contents import CONFIG, INDEX, WEIGHTS, read_index
from gpt_cli.system.files import version

_AGAIN = "run the command again"
_CACHE_LINE = 64  # bytes

# The supported dtypes as safetensors writes them: how NumPy reads them, and our names for them.
_STORED = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I8": "i1"}
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "I8": "int8"}

# The files of a model; other files in its folder may change at any time.
_FILES = (
    *("*.safetensors", INDEX, CONFIG, "generation_config.json"),
    *("vocab.json", "merges.txt", "added_tokens.json", "tokenizer.json"),
)

# The first bytes of files that often stand in for safetensors.
_IMPOSTORS = {
    b"version https://git-lfs": "a Git LFS pointer, not the weights; run `git lfs pull`",
    b"<": "a web page, not the weights; get it again",
    b"\x80": "a pickle file, which can run code; get the model as safetensors",
    b"PK": "a PyTorch archive, which can run code; get the model as safetensors",
}
_LARGEST_HEADER = 10_000_000  # bytes; gpt2-xl has 60,000, and they take 20 times that in memory


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
    version: tuple[int, int] | None  # of the file when its header was read
    offset: int  # from the start of the file, in bytes
    dtype: str  # as safetensors writes it: F32, F16, BF16, ...
    shape: tuple[int, ...]

    def __getitem__(self, rows: slice, /) -> NDArray[Any]:
        """Read rows (or elements of a vector) into a new array in float32, or int8 for I8."""
        start, stop, _ = rows.indices(self.shape[0])
        stored = aligned_empty((stop - start, *self.shape[1:]), np.dtype(_STORED[self.dtype]))
        first = start * math.prod(self.shape[1:])
        rest = stored.data.cast("B")
        with self.opened() as (file, offset):
            file.seek(offset + first * stored.itemsize)
            while rest:
                if not (count := file.readinto(rest)):
                    raise EOFError
                rest = rest[count:]
        if self.dtype in ("F32", "I8"):
            return stored
        array = aligned_empty(stored.shape, np.dtype("<f4"))
        if self.dtype == "F16":
            array[...] = stored
        else:  # bfloat16 is the upper half of a float32
            np.left_shift(stored, 16, out=array.view("<u4"), dtype="<u4")
        return array

    @contextmanager
    def opened(self) -> Iterator[tuple[FileIO, int]]:
        """Yield the open file and the offset of the data.

        Raise CheckpointError on exit if the file has changed or EOFError was raised inside.
        """
        try:
            with self.path.open("rb", buffering=0) as file:
                yield file, self.offset
                whole = version(file.fileno()) == self.version
        except (FileNotFoundError, EOFError):
            whole = False
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        if not whole:
            raise CheckpointError(f"{self.path} changed while it was read: {_AGAIN}")


@contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    """Raise CheckpointError on exit if a model's files have changed since the entry."""

    def versions() -> dict[Path, object]:
        paths = [path for pattern in _FILES for path in folder.glob(pattern)]
        return {path: version(path) for path in paths}

    before = versions()
    yield
    if versions() != before:
        raise CheckpointError(f"{folder} changed while it was read: {_AGAIN}")


def weight_files(folder: Path) -> list[Path]:
    """Return `[model.safetensors]`, or the shards that the index names."""
    single, index = folder / WEIGHTS, folder / INDEX
    if single.is_file():
        return [single]
    if not index.is_file():
        if single.exists() or single.is_symlink():
            raise CheckpointError(f"{single} is not a regular file, or a link to one: get it again")
        raise CheckpointError(
            f"{folder} has no {WEIGHTS}: get the model as safetensors; other formats can "
            "run code and are not opened"
        )
    present = {path.name for path in folder.iterdir() if path.is_file()}
    names = read_index(index)
    if missing := [name for name in names if name not in present]:
        raise CheckpointError(f"{missing[0]:.200} is missing, but {index} names it: get it too")
    return [folder / name for name in names]


def read_header(path: Path) -> list[tuple[str, Tensor]]:
    """Return the names and tensors of a complete, valid safetensors file, without their data."""
    lead = header = b""
    try:
        with path.open("rb") as file:
            lead = file.read(8)
            if not lead:
                raise ValueError("it is empty")
            length = int.from_bytes(lead, "little")
            header = file.read(min(length, _LARGEST_HEADER))
            if length > _LARGEST_HEADER:
                raise ValueError(f"its header claims {length} bytes")
            if not header.startswith(b"{"):  # the library accepts spaces
                raise ValueError("its header does not begin with a brace")
            read = version(file.fileno())
        with safe_open(path, framework="np"):
            pass  # this validates the lengths, the offsets and the shapes
        tensors = []
        for name, fields in json.loads(header, object_pairs_hook=list):  # keeps duplicates
            if name == "__metadata__":
                continue
            entry = dict(fields)
            dtype, offset = entry["dtype"], 8 + length + entry["data_offsets"][0]
            if not isinstance(dtype, str):  # the library also accepts other JSON forms of an enum
                raise TypeError(f"{dtype!r:.40} is not a dtype")
            tensors.append((name, Tensor(path, read, offset, dtype, tuple(entry["shape"]))))
    except (SafetensorError, OSError, *MALFORMED) as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        start = (lead + header[:64]).lstrip()
        kinds = [kind for magic, kind in _IMPOSTORS.items() if start.startswith(magic)]
        damage = [*kinds, f"{reason}; it is damaged or incomplete, get it again"][0]
        raise CheckpointError(f"{path} is not safetensors: {damage}") from None
    return tensors
