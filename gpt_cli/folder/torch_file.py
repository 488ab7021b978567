"""PyTorch's files of weights (`pytorch_model.bin`), read as data: nothing in them is ever called.

A file may also be the checkpoint of a training, with the state dict as one of its entries.

`torch.save` writes a pickle that describes tensors, and their numbers as they are in memory, the
storages. The pickle's opcodes are interpreted over plain values. Only the names that a state dict
needs are known; another name or opcode is an error. So a tensor is a dtype, a shape and an offset,
as in safetensors, and no number is read here. Source: torch/serialization.py and torch/_utils.py.
"""

import math
import os
import pickletools
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO, FileIO
from itertools import chain, islice, pairwise, repeat
from pathlib import Path
from typing import Any

from gpt_cli.folder.tensors import NotWeightsError, Tensor
from gpt_cli.system.files import version

_LARGEST = 2_000_000  # bytes of a pickle or a directory; those of gpt2-xl have 150,000
_MOST_OPCODES = 100_000  # of a file, in less than half a second; gpt2-xl has 20,000
_MOST_AXES = 8
_MOST_ELEMENTS = 2**40
_CURE = "save `model.state_dict()` alone, or get the model as safetensors"
# The entry of the state dict in a training's checkpoint, such as nanoGPT's, Lightning's or
# DeepSpeed's.
_STATE_DICTS = ("model", "state_dict", "model_state_dict", "module")
_MAGIC = 0x1950A86A20F9469CFC6C  # the first pickle of the older form (before 1.6)
_PROTOCOL = 1001  # the second one

# Types of storages: the dtype as in safetensors, and the bytes of an element.
_STORAGES = {
    "torch.FloatStorage": ("F32", 4),
    "torch.HalfStorage": ("F16", 2),
    "torch.BFloat16Storage": ("BF16", 2),
    "torch.DoubleStorage": ("F64", 8),
    "torch.LongStorage": ("I64", 8),
    "torch.IntStorage": ("I32", 4),
    "torch.ShortStorage": ("I16", 2),
    "torch.CharStorage": ("I8", 1),
    "torch.ByteStorage": ("U8", 1),
    "torch.BoolStorage": ("BOOL", 1),
}
_DICT = "collections.OrderedDict"
_TENSOR = "torch._utils._rebuild_tensor_v2"
_PARAMETER = "torch._utils._rebuild_parameter"
_MARK = object()  # on the stack


class _Name(str):
    """A name that the pickle mentions; it stands for nothing but itself."""


@dataclass(frozen=True)
class _TorchStorage:
    """Numbers in the file."""

    key: str
    dtype: str
    itemsize: int  # bytes
    count: int  # elements


@dataclass(frozen=True)
class _View:
    """A tensor as a part of a storage; the offset and the strides are in elements."""

    storage: _TorchStorage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


# --- the pickle ----------------------------------------------------------------------------------


def _values(data: BytesIO) -> Iterator[Any]:
    """Yield the values of the pickles in `data`, which is then right after each."""
    stack: list[Any] = []
    memo: dict[Any, Any] = {}  # by number
    opcodes = chain.from_iterable(map(pickletools.genops, repeat(data)))
    for number, (opcode, argument, _) in enumerate(opcodes):
        if number == _MOST_OPCODES:
            raise ValueError(f"it has more than {_MOST_OPCODES} opcodes")
        match opcode.name:
            case "PROTO":
                pass
            case "MARK":
                stack.append(_MARK)
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "STOP":
                yield stack.pop()
                stack = []
                memo = {}
            case name:
                stack.append(_result(name, argument, _operands(opcode, stack)))


def _operands(opcode: pickletools.OpcodeInfo, stack: list[Any]) -> list[Any]:
    """Pop what an opcode takes from the stack; the values since a mark are one list."""
    operands: list[Any] = []
    for kind in reversed(opcode.stack_before):
        if kind is pickletools.stackslice:
            values = list(iter(stack.pop, _MARK))
            operands.append(values[::-1])
        elif kind is not pickletools.markobject:
            operands.append(stack.pop())
    return operands[::-1]


def _result(opcode: str, argument: Any, operands: list[Any]) -> Any:
    """Return what an opcode puts on the stack; NotWeightsError if a state dict does not need it."""
    match [opcode, *operands]:
        case ["NONE" | "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT" | "BINUNICODE"]:
            return argument
        case ["NEWTRUE" | "NEWFALSE"]:
            return opcode == "NEWTRUE"
        case ["EMPTY_LIST" | "EMPTY_DICT"]:
            return [] if opcode == "EMPTY_LIST" else {}
        case ["TUPLE", values] | ["EMPTY_TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3", *values]:
            return tuple(values)
        case ["APPENDS", list() as target, values] | ["APPEND", list() as target, *values]:
            target += values
            return target
        case ["SETITEMS", dict() as target, items] | ["SETITEM", dict() as target, *items]:
            for name, value in zip(items[::2], items[1::2], strict=True):
                if type(name) is not int:  # the number of an optimizer's parameter
                    _of_type(name, str)
                if name in target:
                    raise ValueError(f"it has {name!s:.80} twice")
                target[name] = value
            return target
        case ["BUILD", dict() as target, dict()]:  # the versions of a state dict's modules
            return target
        case ["GLOBAL"]:
            name = argument.replace(" ", ".")
            if name in (_DICT, _TENSOR, _PARAMETER) or name in _STORAGES:
                return _Name(name)
            raise NotWeightsError(f"it names {name:.80}, which is never called; {_CURE}")
        case ["BINPERSID", ("storage", _Name() as name, str(key), _, int(count), *view)]:
            if name in _STORAGES and not any(view):
                return _TorchStorage(key, *_STORAGES[name], count)
        case ["REDUCE", _Name() as name, ()] if name == _DICT:
            return {}
        case ["REDUCE", _Name() as name, (_View() as view, *_)] if name == _PARAMETER:
            return view
        case ["REDUCE", _Name() as name, (_TorchStorage() as storage, *numbers)] if name == _TENSOR:
            return _view(storage, *numbers[:3])
    kinds = [x if isinstance(x, _Name) else type(x).__name__ for x in operands]
    shown = f"{opcode} of {', '.join(kinds)}" if kinds else opcode
    raise NotWeightsError(f"its pickle has the opcode {shown}, which is not run; {_CURE}")


def _of_type(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"its pickle has a {type(value).__name__} in place of a {kind.__name__}")
    return value


def _view(storage: _TorchStorage, offset: Any, shape: Any, strides: Any) -> _View:
    """Return a tensor whose elements are all in its storage."""
    numbers = (offset, *_of_type(shape, tuple), *_of_type(strides, tuple))
    if any(_of_type(number, int) < 0 for number in numbers):
        raise ValueError("a tensor has a negative size, stride or offset")
    if len(shape) > _MOST_AXES:
        raise ValueError(f"a tensor has {len(shape)} axes")
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    end = offset + last + 1 if all(shape) else offset
    if end > storage.count or math.prod(shape) > _MOST_ELEMENTS:
        raise ValueError(f"a tensor {list(shape)} goes beyond its storage")
    return _View(storage, offset, shape, strides)


def _parts(saved: Any) -> tuple[dict[str, _View], dict[str, _TorchStorage]]:
    """Return the tensors of a state dict by their names, and their storages by their keys."""
    entries = (_of_type(saved, dict).get(name) for name in _STATE_DICTS)
    state = next((entry for entry in entries if isinstance(entry, dict)), saved)
    storages: dict[str, _TorchStorage] = {}
    for name, value in state.items():
        _of_type(name, str)
        if not isinstance(value, _View):
            kind = f"{name:.80} is a {type(value).__name__}, not a tensor"
            raise NotWeightsError(f"{kind}, as in a checkpoint of a training; {_CURE}")
        if storages.setdefault(value.storage.key, value.storage) != value.storage:
            raise ValueError(f"its storage {value.storage.key:.40} has two types or lengths")
    return state, storages


# --- the file ------------------------------------------------------------------------------------


class _File(FileIO):
    """A file that reads at most `_LARGEST` bytes at a time."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Read up to `size` bytes, or up to the limit; ValueError if `size` is beyond it."""
        if size is not None and size > _LARGEST:
            raise ValueError(f"a part of its description has {size} bytes")
        return super().read(_LARGEST if size is None or size < 0 else size) or b""


def read_torch(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of a file of PyTorch, without their data.

    ValueError and its like if the file is damaged, or is more than a state dict.
    """
    with _File(path) as file:
        read = version(file.fileno())
        read_parts = _read_zip if file.read(4) == b"PK\3\4" else _read_older
        try:
            views, offsets = read_parts(file)
        except zipfile.BadZipFile as error:
            raise ValueError(error) from None
    for name, view in views.items():
        storage = view.storage
        offset = offsets[storage.key] + view.offset * storage.itemsize
        strides = view.strides if _has_gaps(view) else None
        yield name, Tensor(path, read, offset, storage.dtype, view.shape, strides)


def read_model_args(path: Path) -> dict[str, Any]:
    """Return the settings in nanoGPT's checkpoint, or {}; raise ValueError if it is damaged.

    Only plain values are settings: nested ones could be of any size.
    """
    with _File(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                saved = _unpickled(archive)
        except zipfile.BadZipFile as error:
            raise ValueError(error) from None
    settings = _of_type(_of_type(saved, dict).get("model_args", {}), dict)
    plain = (str, int, float, bool, type(None))
    return {
        name: value
        for name, value in settings.items()
        if isinstance(name, str) and isinstance(value, plain)
    }


def _has_gaps(view: _View) -> bool:
    """Return whether the elements of a tensor are not one after the other, row by row."""
    apart = 1  # elements from one to the next along an axis
    for size, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if size != 1 and stride != apart:  # an axis of length 1 has any stride
            return True
        apart *= size
    return False


def _read_zip(file: _File) -> tuple[dict[str, _View], dict[str, int]]:
    """Return the tensors of a zip file, and where in the file their storages begin."""
    with zipfile.ZipFile(file) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        if len(entries) < len(archive.infolist()):
            raise ValueError("two of its entries have the same name")
        spans = {name: _span(file, entry) for name, entry in entries.items()}
        ordered = sorted(spans.values())
        ordered.append((archive.start_dir, 0))
        if any(end > start for (_, end), (start, _) in pairwise(ordered)):
            raise ValueError("its entries overlap")
        folder = _folder(archive)
        order = entries.get(f"{folder}byteorder")
        if order and archive.read(order) != b"little":
            raise ValueError("its numbers are big-endian")
        views, storages = _parts(_unpickled(archive))
    offsets = {}
    for key, storage in storages.items():
        size = entries[f"{folder}data/{key}"].file_size
        if size != storage.count * storage.itemsize:
            raise ValueError(f"its storage {key:.40} has {size} bytes")
        offsets[key] = spans[f"{folder}data/{key}"][1] - size
    return views, offsets


def _folder(archive: zipfile.ZipFile) -> str:
    """Return the folder in a zip file that has all of its entries."""
    (pickle,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
    return pickle.removesuffix("data.pkl")


def _unpickled(archive: zipfile.ZipFile) -> Any:
    """Return what was saved in a zip file, with views in place of tensors."""
    return next(_values(BytesIO(archive.read(f"{_folder(archive)}data.pkl"))))


def _span(file: _File, entry: zipfile.ZipInfo) -> tuple[int, int]:
    """Return where an entry of a zip file begins and ends; it must be uncompressed."""
    file.seek(entry.header_offset)
    header = file.read(30)
    name = int.from_bytes(header[26:28], "little")  # the lengths of two fields
    extra = int.from_bytes(header[28:30], "little")
    plain = entry.compress_type == zipfile.ZIP_STORED and not entry.flag_bits & 1
    if not header.startswith(b"PK\3\4") or not plain or entry.compress_size != entry.file_size:
        raise ValueError(f"its entry {entry.filename:.80} is compressed or damaged")
    return entry.header_offset, entry.header_offset + 30 + name + extra + entry.file_size


def _read_older(file: _File) -> tuple[dict[str, _View], dict[str, int]]:
    """Return the tensors of a file of PyTorch before 1.6, and where their storages begin.

    Four pickles (two numbers, the system, the state dict), the list of the storages' keys, and for
    each of these its number of elements and its data. All numbers are little-endian.
    """
    file.seek(0)
    data = BytesIO(file.read())
    magic, protocol, _, state, keys = islice(_values(data), 5)
    if (magic, protocol) != (_MAGIC, _PROTOCOL):
        raise ValueError("it is a pickle, but not PyTorch's")
    views, storages = _parts(state)
    if sorted(_of_type(key, str) for key in _of_type(keys, list)) != sorted(storages):
        raise ValueError("its storages are not those of its tensors")
    offset = data.tell()
    offsets = {}
    for key in keys:
        storage = storages[key]
        file.seek(offset)
        if int.from_bytes(file.read(8), "little") != storage.count:
            raise ValueError(f"its storage {key:.40} has another length")
        offsets[key] = offset + 8
        offset = offsets[key] + storage.count * storage.itemsize
    missing = offset - file.seek(0, os.SEEK_END)
    if missing > 0:
        raise ValueError(f"it ends {missing} bytes early")
    return views, offsets
