"""Files as `torch.save` writes them, written without PyTorch, to be read as data."""

import io
import struct
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from support.checkpoints import Stored, write_weights

KINDS = {"F32": "Float", "F16": "Half", "BF16": "BFloat16", "F64": "Double", "U8": "Byte"}
KINDS |= {"I64": "Long", "BOOL": "Bool"}
SIZES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "U8": 1, "I64": 8, "BOOL": 1}
MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001


class Name(NamedTuple):
    """A name that a pickle imports."""

    module: str
    name: str


class Call(NamedTuple):
    """A call of a name."""

    name: Name
    arguments: tuple[Any, ...]


class Storage(NamedTuple):
    """A persistent id."""

    key: str
    dtype: str
    count: int


class View(NamedTuple):
    """A tensor as a part of a storage."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


ORDERED = Call(Name("collections", "OrderedDict"), ())


def opcodes(value: Any) -> bytes:
    """Return the opcodes of protocol 2 that leave a value on the stack."""
    match value:
        case Name():
            return b"c" + f"{value.module}\n{value.name}\n".encode()
        case Call():
            return opcodes(value.name) + opcodes(value.arguments) + b"R"
        case Storage():
            name = Name("torch", f"{KINDS[value.dtype]}Storage")
            return opcodes(("storage", name, value.key, "cpu", value.count)) + b"Q"
        case View():
            arguments = (value.storage, value.offset, value.shape, value.strides, False, ORDERED)
            return opcodes(Call(Name("torch._utils", "_rebuild_tensor_v2"), arguments))
        case None | True | False:
            return {None: b"N", True: b"\x88", False: b"\x89"}[value]
        case int():
            data = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
            return b"\x8a" + bytes([len(data)]) + data
        case str():
            return b"X" + struct.pack("<I", len(value.encode())) + value.encode()
        case tuple():
            return b"(" + b"".join(map(opcodes, value)) + b"t"
        case list():
            return b"](" + b"".join(map(opcodes, value)) + b"e"
        case dict():
            items = b"".join(opcodes(part) for item in value.items() for part in item)
            return opcodes(ORDERED) + b"(" + items + b"u" + b"}X\t\0\0\0_metadata}sb"
    raise TypeError(value)


def pickled(value: Any) -> bytes:
    return b"\x80\x02" + opcodes(value) + b"."


def views_of(tensors: dict[str, Stored]) -> tuple[dict[str, View], dict[str, bytes]]:
    """Return tensors as whole storages, and the data of these; equal data is one storage."""
    views, storages = {}, {}
    for name, tensor in tensors.items():
        key = next(
            (key for key, data in storages.items() if data is tensor.data), str(len(storages))
        )
        storages[key] = tensor.data
        strides, step = [], 1
        for size in reversed(tensor.shape):
            strides.append(step)
            step *= size
        storage = Storage(key, tensor.dtype, len(tensor.data) // SIZES[tensor.dtype])
        views[name] = View(storage, 0, tensor.shape, tuple(reversed(strides)))
    return views, storages


def zip_bytes(
    pickle: bytes,
    storages: dict[str, bytes],
    *,
    change: Callable[[zipfile.ZipInfo], object] = lambda entry: None,
    relist: Callable[[zipfile.ZipFile], object] = lambda archive: None,
    **others: bytes,
) -> bytes:
    """Return a file of PyTorch since 1.6.

    `change` sees each entry before it is written, and `relist` all before the directory is.
    """
    files = {"data.pkl": pickle, "byteorder": b"little"}
    files |= {f"data/{key}": data for key, data in storages.items()} | {"version": b"3\n"} | others
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(f"archive/{name}")
            change(entry)
            archive.writestr(entry, data)
        relist(archive)
    return file.getvalue()


def older_bytes(pickle: bytes, storages: dict[str, bytes], itemsizes: dict[str, int]) -> bytes:
    """Return a file of PyTorch before 1.6."""
    system = {"protocol_version": PROTOCOL, "little_endian": sys.byteorder == "little"}
    parts = [*map(pickled, (MAGIC, PROTOCOL, system)), pickle, pickled(list(storages))]
    for key, data in storages.items():
        parts += [struct.pack("<q", len(data) // itemsizes[key]), data]
    return b"".join(parts)


def torch_bytes(tensors: dict[str, Stored], *, older: bool = False) -> bytes:
    """Return a state dict as a file of PyTorch."""
    views, storages = views_of(tensors)
    if not older:
        return zip_bytes(pickled(views), storages)
    sizes = {view.storage.key: SIZES[view.storage.dtype] for view in views.values()}
    return older_bytes(pickled(views), storages, sizes)


def write_torch(
    folder: Path, tensors: dict[str, Stored], *, older: bool = False, shards: int = 1
) -> Path:
    """Replace the weights of a checkpoint by files of PyTorch; return the folder."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    encode = partial(torch_bytes, older=older)
    write_weights(folder / "pytorch_model.bin", tensors, encode, shards)
    return folder
