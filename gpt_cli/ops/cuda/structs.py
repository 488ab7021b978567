"""The arguments of the kernels as NumPy types, read from structs.cu."""

import re
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from struct import Struct
from typing import Any

import numpy as np

_STRUCT = re.compile(r"^struct (\w+) \{\n(.*?)^\};", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(r"^\s*(?:const )?(?:struct )?(\w+) ([^;()\[\]]+);")
_NUMBERS = {"int64_t": "i8", "int32_t": "i4", "float": "f4", "double": "f8"}
_PACKED = {"u8": "Q", "i8": "q", "i4": "i", "f4": "f", "f8": "d"}  # formats of the module `struct`
_PLAIN = (int, float, bytes)


@cache
def types() -> dict[str, np.dtype[np.void]]:
    """Return the types of the structs. Pointers are addresses."""
    structs: dict[str, np.dtype[np.void]] = {}
    text = files(__package__).joinpath("structs.cu").read_text("utf-8")
    for name, body in _STRUCT.findall(text):
        fields = [field for line in body.splitlines() for field in _fields(line, structs)]
        if fields:
            structs[name] = np.dtype(fields, align=True)
    return structs


def _fields(line: str, structs: dict[str, np.dtype[np.void]]) -> list[tuple[str, object]]:
    """Return the fields that a line declares. Arrays are left out: no argument has one."""
    match = _FIELD.match(line)
    if not match:
        return []
    kind = structs.get(match[1]) or np.dtype(_NUMBERS.get(match[1], "V"))
    names = match[2].replace(" ", "").split(",")
    return [(name.lstrip("*"), "u8" if name[0] == "*" else kind) for name in names]


def pack(name: str, **fields: Any) -> bytes:
    """Return a struct of these fields; the others are 0.

    A field is a number, a struct as bytes, or a pointer: an address, an array on the device, or
    None. Packing takes about two microseconds, a tenth of the time of NumPy's structs.
    """
    to_bytes, zeros = _layout(name)
    values = (zeros | fields).values()
    return to_bytes(*[value if isinstance(value, _PLAIN) else _address(value) for value in values])


def _address(array: Any) -> int:
    return 0 if array is None else array.data.ptr


@cache
def _layout(name: str) -> tuple[Callable[..., bytes], dict[str, int | bytes]]:
    """Return a function that packs all fields of a struct in their order, and zeros for them."""
    kind = types()[name]
    form = "<"
    end = 0
    zeros: dict[str, int | bytes] = {}
    for field, described in (kind.fields or {}).items():
        part, offset = described[:2]
        form += "x" * (offset - end) + _PACKED.get(part.str[1:], f"{part.itemsize}s")
        zeros[field] = bytes(part.itemsize) if part.names else 0
        end = offset + part.itemsize
    return Struct(form + "x" * (kind.itemsize - end)).pack, zeros
