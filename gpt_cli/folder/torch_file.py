"""PyTorch's files of weights (`pytorch_model.bin`), read as data: nothing in them is ever called.

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
from pathlib import Path
from typing import Any

from gpt_cli.folder.tensors import NotWeightsError, Tensor
from gpt_cli.system.files import version

_LARGEST = 2_000_000  # bytes of a pickle or a directory; those of gpt2-xl have 150,000
_MOST_OPCODES = 250_000  # a quarter of a second; gpt2-xl has 20,000
_MOST_AXES, _MOST_ELEMENTS = 8, 2**40
_SAFE = "get the model as safetensors"
_MAGIC = 0x1950A86A20F9469CFC6C  # the first pickle of the older form (before 1.6)
_PROTOCOL = 1001  # the second one

# Storages by their names: the dtype as in safetensors, and the bytes of an element.
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
_FUNCTIONS = (
    "collections.OrderedDict",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_parameter",
)


# --- the pickle ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Name:
    """A name that the pickle mentions; it stands for nothing but itself."""

    name: str


@dataclass(frozen=True)
class _Storage:
    """Numbers in the file."""

    key: str
    dtype: str
    itemsize: int  # bytes
    count: int  # elements


@dataclass(frozen=True)
class _View:
    """A tensor as a part of a storage; the offset and the strides are in elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Interpreter:
    """A stack machine for the opcodes that `torch.save` writes, over plain values."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._marks: list[int] = []  # lengths of the stack
        self._memo: dict[int, Any] = {}

    def run(self, data: BytesIO) -> Any:
        """Return the value of one pickle, and leave `data` after it."""
        for number, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if number > _MOST_OPCODES:
                raise ValueError(f"it has more than {_MOST_OPCODES} opcodes")
            if opcode.name == "STOP":
                break
            self._step(opcode.name, argument)
        return self.stack.pop()

    def _step(self, opcode: str, argument: Any) -> None:
        stack = self.stack
        match opcode:
            case "PROTO":
                pass
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[opcode])
            case "EMPTY_TUPLE" | "EMPTY_LIST" | "EMPTY_DICT":
                stack.append({"EMPTY_TUPLE": (), "EMPTY_LIST": [], "EMPTY_DICT": {}}[opcode])
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT" | "BINUNICODE":
                stack.append(argument)
            case "MARK":
                self._marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(self._pop_marked()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(self._pop(int(opcode[-1]))))
            case "APPEND" | "APPENDS":
                items = [stack.pop()] if opcode == "APPEND" else self._pop_marked()
                _of_type(stack[-1], list).extend(items)
            case "SETITEM" | "SETITEMS":
                items = (
                    [stack.pop(), stack.pop()][::-1] if opcode == "SETITEM" else self._pop_marked()
                )
                _add_items(_of_type(stack[-1], dict), items)
            case "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "GLOBAL":
                stack.append(_known_name(argument.replace(" ", ".")))
            case "BINPERSID":
                stack.append(_storage(stack.pop()))
            case "REDUCE":
                arguments = _of_type(stack.pop(), tuple)
                stack.append(_rebuilt(_of_type(stack.pop(), _Name).name, arguments))
            case "BUILD":  # the versions of a state dict's modules
                _of_type(stack.pop(), dict)
                _of_type(stack[-1], dict)
            case _:
                raise NotWeightsError(
                    f"its pickle has the opcode {opcode}, which is not run; {_SAFE}"
                )

    def _pop(self, count: int) -> list[Any]:
        """Pop the last values."""
        return [self.stack.pop() for _ in range(count)][::-1]

    def _pop_marked(self) -> list[Any]:
        """Pop the values since the last mark."""
        return self._pop(len(self.stack) - self._marks.pop())


def _of_type(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"its pickle has a {type(value).__name__} in place of a {kind.__name__}")
    return value


def _counts(values: Any) -> tuple[int, ...]:
    """Return a tuple of numbers from 0 on."""
    if any(_of_type(value, int) < 0 for value in _of_type(values, tuple)):
        raise ValueError("a tensor has a negative size, stride or offset")
    return values


def _add_items(target: dict[str, Any], items: list[Any]) -> None:
    for name, value in zip(items[::2], items[1::2], strict=True):
        if _of_type(name, str) in target:
            raise ValueError(f"it has {name:.80} twice")
        target[name] = value


def _known_name(name: str) -> _Name:
    if name not in _FUNCTIONS and name not in _STORAGES:
        raise NotWeightsError(f"it names {name:.80}, which is never called; {_SAFE}")
    return _Name(name)


def _storage(identity: Any) -> _Storage:
    """Return the storage of a persistent id."""
    kind, name, key, _, count, *view = _of_type(identity, tuple)
    if kind != "storage" or any(part is not None for part in view):
        raise ValueError("its pickle refers to something that is not a storage")
    dtype, itemsize = _STORAGES[_of_type(name, _Name).name]
    (count,) = _counts((count,))
    return _Storage(_of_type(key, str), dtype, itemsize, count)


def _rebuilt(function: str, arguments: tuple[Any, ...]) -> Any:
    """Return what a function of PyTorch describes."""
    if function == "collections.OrderedDict" and not arguments:
        return {}
    if function == "torch._utils._rebuild_parameter":
        return _of_type(arguments[0], _View)
    if function != "torch._utils._rebuild_tensor_v2":
        raise NotWeightsError(f"it calls {function}, which is never called; {_SAFE}")
    storage, offset, shape, strides, *_ = arguments
    (offset,), shape, strides = _counts((offset,)), _counts(shape), _counts(strides)
    if len(shape) > _MOST_AXES:
        raise ValueError(f"a tensor has {len(shape)} axes")
    steps = zip(shape, strides, strict=True)
    end = offset + sum((size - 1) * stride for size, stride in steps) + 1 if all(shape) else offset
    if end > _of_type(storage, _Storage).count or math.prod(shape) > _MOST_ELEMENTS:
        raise ValueError(f"a tensor {list(shape)} goes beyond its storage")
    return _View(storage, offset, shape, strides)


def _views(state: Any) -> dict[str, _View]:
    """Return the tensors of a state dict; ValueError if it is something else."""
    storages: dict[str, _Storage] = {}
    for name, value in _of_type(state, dict).items():
        if not isinstance(value, _View):
            raise NotWeightsError(
                f"{name:.80} is a {type(value).__name__}, not a tensor, as in a checkpoint of a "
                "training; save the model's state_dict alone"
            )
        if storages.setdefault(value.storage.key, value.storage) != value.storage:
            raise ValueError(f"its storage {value.storage.key:.40} has two types or lengths")
    return dict(state)


# --- the file ------------------------------------------------------------------------------------


class _File(FileIO):
    """A file in which no single read is larger than a pickle or a directory may be."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Read up to `size` bytes, or the rest of the file."""
        if size is None or size < 0:
            size = os.fstat(self.fileno()).st_size - self.tell()
        if size > _LARGEST:
            raise ValueError(f"a part of its description has {size} bytes")
        return super().read(size) or b""


def read_torch(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of a file of PyTorch, without their data.

    ValueError and its like if the file is damaged, or is more than a state dict.
    """
    with _File(path) as file:
        read, is_zip = version(file.fileno()), file.read(4) == b"PK\3\4"
        try:
            views, offsets = (_read_zip if is_zip else _read_older)(file)
        except zipfile.BadZipFile as error:
            raise ValueError(error) from None
    for name, view in views.items():
        storage = view.storage
        offset = offsets[storage.key] + view.offset * storage.itemsize
        strides = None if view.strides == _row_major(view) else view.strides
        yield name, Tensor(path, read, offset, storage.dtype, view.shape, strides)


def _row_major(view: _View) -> tuple[int, ...]:
    """Return the strides of the shape without gaps; an axis of length 1 has any stride."""
    strides, step = [], 1
    for size, stride in reversed([*zip(view.shape, view.strides, strict=True)]):
        strides.append(stride if size == 1 else step)
        step *= size
    return tuple(reversed(strides))


def _read_zip(file: _File) -> tuple[dict[str, _View], dict[str, int]]:
    """Return the tensors of a zip file, and where in the file their storages begin."""
    with zipfile.ZipFile(file) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        if len(entries) < len(archive.infolist()):
            raise ValueError("two of its entries have the same name")
        spans = sorted(_span(file, entry) for entry in entries.values())
        next_starts = [start for start, _ in spans[1:]] + [archive.start_dir]
        if any(end > start for (_, end), start in zip(spans, next_starts, strict=True)):
            raise ValueError("its entries overlap")
        (pickle,) = (name for name in entries if name.endswith("/data.pkl"))
        folder = pickle.removesuffix("data.pkl")
        if (order := entries.get(f"{folder}byteorder")) and archive.read(order) != b"little":
            raise ValueError("its numbers are big-endian")
        views = _views(_Interpreter().run(BytesIO(archive.read(pickle))))
    offsets = {}
    for storage in {view.storage for view in views.values()}:
        entry = entries[f"{folder}data/{storage.key}"]
        _, end = _span(file, entry)
        if entry.file_size != storage.count * storage.itemsize:
            raise ValueError(f"its storage {storage.key:.40} has {entry.file_size} bytes")
        offsets[storage.key] = end - entry.file_size
    return views, offsets


def _span(file: _File, entry: zipfile.ZipInfo) -> tuple[int, int]:
    """Return where an entry of a zip file begins and ends; it must be uncompressed."""
    file.seek(entry.header_offset)
    header = file.read(30)
    name, extra = (int.from_bytes(header[start : start + 2], "little") for start in (26, 28))
    plain = entry.compress_type == zipfile.ZIP_STORED and not entry.flag_bits & 1
    if not header.startswith(b"PK\3\4") or not plain or entry.compress_size != entry.file_size:
        raise ValueError(f"its entry {entry.filename:.80} is compressed or damaged")
    return entry.header_offset, entry.header_offset + 30 + name + extra + entry.file_size


def _read_older(file: _File) -> tuple[dict[str, _View], dict[str, int]]:
    """Return the tensors of a file of PyTorch before 1.6, and where their storages begin.

    Four pickles (two numbers, the system, the state dict), the list of the storages' keys, and for
    each of these its number of elements and its data. All numbers are little-endian.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    data = BytesIO(file.read(min(size, _LARGEST)))
    magic, protocol, _, state, keys = (_Interpreter().run(data) for _ in range(5))
    if (magic, protocol) != (_MAGIC, _PROTOCOL):
        raise ValueError("it is a pickle, but not PyTorch's")
    views, offset, offsets = _views(state), data.tell(), {}
    storages = {view.storage.key: view.storage for view in views.values()}
    if sorted(_of_type(keys, list), key=str) != sorted(storages):
        raise ValueError("its storages are not those of its tensors")
    for key in keys:
        storage = storages[key]
        file.seek(offset)
        if int.from_bytes(file.read(8), "little") != storage.count:
            raise ValueError(f"its storage {key:.40} has another length")
        offsets[key], offset = offset + 8, offset + 8 + storage.count * storage.itemsize
    if offset > size:
        raise ValueError(f"it ends {offset - size} bytes early")
    return views, offsets
