"""The arguments of the kernels as NumPy types, read from structs.cu."""

import re
from functools import cache
from importlib.resources import files

import numpy as np

_STRUCT = re.compile(r"^struct (\w+) \{\n(.*?)^\};", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(r"^\s*(?:const )?(?:struct )?(\w+) ([^;()\[\]]+);")
_NUMBERS = {"int64_t": "i8", "int32_t": "i4", "float": "f4", "double": "f8"}


@cache
def types() -> dict[str, np.dtype[np.void]]:
    """Return the types of the structs. Pointers are addresses."""
    found: dict[str, np.dtype[np.void]] = {}
    text = files(__package__).joinpath("structs.cu").read_text("utf-8")
    for name, body in _STRUCT.findall(text):
        if fields := [field for line in body.splitlines() for field in _fields(line, found)]:
            found[name] = np.dtype(fields, align=True)
    return found


def _fields(line: str, structs: dict[str, np.dtype[np.void]]) -> list[tuple[str, object]]:
    """Return the fields that a line declares; an array, which no kernel is passed, is none."""
    match = _FIELD.match(line)
    if not match:
        return []
    kind = structs.get(match[1]) or np.dtype(_NUMBERS.get(match[1], "V"))
    names = match[2].replace(" ", "").split(",")
    return [(name.lstrip("*"), "u8" if name[0] == "*" else kind) for name in names]
