"""The files of a model's weights, safetensors or PyTorch's, and the tensors in them."""

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open

from gpt_cli.errors import MALFORMED, CheckpointError
from gpt_cli.folder.contents import select_weights
from gpt_cli.folder.tensors import NotWeightsError, Tensor
from gpt_cli.system.files import IMPOSTORS, version

T = TypeVar("T")

_TORCH = "a file of PyTorch; name it pytorch_model.bin"
_NO_SAFETENSORS = IMPOSTORS | {b"\x80": _TORCH, b"PK": _TORCH}
_PYTORCH = "a file of PyTorch's weights"
_LARGEST_HEADER = 10_000_000  # bytes; gpt2-xl has 60,000, and they take 20 times that in memory
# Of the library, and of parsing a damaged file.
_DAMAGED = (SafetensorError, struct.error, RuntimeError, EOFError, OSError, *MALFORMED)


def weight_files(folder: Path) -> list[Path]:
    """Return the one file of the weights in a folder, or the shards that its index names."""
    present = {path.name for path in folder.iterdir() if path.is_file()}
    first, *shards = select_weights(present, str(folder), folder.joinpath)
    if first not in present:
        if os.path.lexists(folder / first):
            problem = "is not a regular file, or a link to one: get it again"
            raise CheckpointError(f"{folder / first} {problem}")
        needed = f"{first} and no pytorch_model.bin"
        raise CheckpointError(f"{folder} has no {needed}: give the folder of a whole model")
    if missing := [name for name in shards if name not in present]:
        named = f"{folder / first} names it: get it too"
        raise CheckpointError(f"{missing[0]:.200} is missing, but {named}")
    return [folder / name for name in shards or [first]]


def read_tensors(path: Path) -> list[tuple[str, Tensor]]:
    """Return the names and tensors of a complete, valid file of weights, without their data."""
    if path.suffix in (".bin", ".pt"):
        from gpt_cli.folder.torch_file import read_torch  # few models need its imports

        return _read(path, lambda path: list(read_torch(path)), _PYTORCH, IMPOSTORS)
    return _read(path, lambda path: list(_read_safetensors(path)), "safetensors", _NO_SAFETENSORS)


def read_model_args(path: Path) -> dict[str, Any]:
    """Return the settings that nanoGPT's checkpoint has beside its weights, or {}."""
    from gpt_cli.folder import torch_file

    return _read(path, torch_file.read_model_args, _PYTORCH, IMPOSTORS)


def _read(path: Path, read: Callable[[Path], T], kind: str, impostors: Mapping[bytes, str]) -> T:
    """Read a file of a kind; CheckpointError if it is damaged or an impostor."""
    try:
        return read(path)
    except _DAMAGED as error:
        problem = _impostor(path, impostors) or _reason(error)
        raise CheckpointError(f"{path} is not {kind}: {problem}") from None


def _impostor(path: Path, impostors: Mapping[bytes, str]) -> str | None:
    """Return what a file is by its first bytes; None if these are of no known kind."""
    with suppress(OSError), path.open("rb") as file:
        start = file.read(64).lstrip()
        return next((kind for magic, kind in impostors.items() if start.startswith(magic)), None)
    return None


def _reason(error: Exception) -> str:
    """Return why a file could not be read, and what to do."""
    reason = str(error).removeprefix("Error while deserializing header: ")
    if isinstance(error, NotWeightsError):
        return reason  # which says it
    return f"{reason}; it is damaged or incomplete, get it again"


def _read_safetensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of a safetensors file.

    The library validates the lengths, the offsets and the shapes. Its reader would map the file.
    """
    with path.open("rb") as file:
        lead = file.read(8)
        if not lead:
            raise ValueError("it is empty")
        length = int.from_bytes(lead, "little")
        if length > _LARGEST_HEADER:
            raise ValueError(f"its header claims {length} bytes")
        header = file.read(length)
        if not header.startswith(b"{"):  # the library accepts spaces
            raise ValueError("its header does not begin with a brace")
        read = version(file.fileno())
    with safe_open(path, framework="np"):
        pass
    for name, fields in json.loads(header, object_pairs_hook=list):  # keeps duplicates
        if name == "__metadata__":
            continue
        entry = dict(fields)
        dtype = entry["dtype"]
        if not isinstance(dtype, str):  # the library also accepts other JSON forms of an enum
            raise TypeError(f"{dtype!r:.40} is not a dtype")
        offset = 8 + length + entry["data_offsets"][0]
        yield name, Tensor(path, read, offset, dtype, tuple(entry["shape"]))
