"""Matrices in panels, and the packing of rows of weights into them by native/pack.c."""

import ctypes
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from gpt_cli.folder.dtypes import GROUP, NAMES_OF_CODES, WEIGHT_TYPES
from gpt_cli.folder.tensors import Tensor
from gpt_cli.ops import bindings, int8
from gpt_cli.ops.bindings import FLOAT32, check, contiguous
from gpt_cli.ops.contract import Array, Rows
from gpt_cli.ops.int8 import Int8Rows, quantize, scales_shape
from gpt_cli.ops.memory import Arena
from gpt_cli.ops.short import RoundedRows

# The types of panels, by the bytes of a weight.
_PANEL_TYPES: dict[int, np.dtype[Any]] = {4: FLOAT32, 2: np.dtype("u2"), 1: np.dtype("u1")}
_PIECE = 256 * 1024  # numbers read and packed at a time: 1 MB, which stays in the cache

# Results of packing other than 0 and an errno.
_FILE_ENDED = -1
_INVALID_INT8 = -2


class Packed:
    """A matrix (n_in, n_out) in panels, at first of zeros: see native/kernels.h."""

    def __init__(self, n_in: int, n_out: int, format: str, arena: Arena):
        self.n_in = n_in
        self.n_out = n_out
        self.format = format
        self.has_groups = WEIGHT_TYPES[format].has_groups
        number, storage = bindings.formats()[format]
        units = -(-n_in // storage.unit_rows)
        length = storage.unit_bytes // storage.weight_bytes  # of a unit
        count = -(-n_out // bindings.layout().columns)
        self.panels = arena.zeros((count, units, length), _PANEL_TYPES[storage.weight_bytes])
        self.width = count * bindings.layout().columns  # padded to whole panels
        self.matrix = bindings.Matrix(
            panels=self.panels, panel_bytes=self.panels.strides[0],
            n_in=n_in, n_out=n_out, format=number,
        )  # fmt: skip
        self.struct = ctypes.addressof(self.matrix)

    def library_panels(self) -> Iterator[Array]:
        """Yield the panels."""
        yield from self.panels

    def is_finite(self) -> bool:
        """Return whether all weights are finite, by the exponents of weights or scales."""
        if self.panels.dtype == FLOAT32:
            return bool(np.isfinite(self.panels).all())
        numbers = self.panels
        if self.has_groups:
            numbers = numbers[..., -2 * bindings.layout().columns :]  # the scales
        exponent = np.uint16(WEIGHT_TYPES[self.format].exponent)
        return not ((numbers.view(np.uint16) & exponent) == exponent).any()


def pack(rows: Rows, dtype: str, arena: Arena, *, transposed: bool) -> Packed:
    """Pack a float32 matrix (n_in, n_out), or (n_out, n_in) if `transposed`, into panels.

    The panels are in `dtype`. But a matrix for 16 bits is kept in float32, unless it is stored in
    `dtype` or is `RoundedRows` of it: other rows would lose precision.
    """
    n_rows, length = rows.shape
    n_in, n_out = (length, n_rows) if transposed else (n_rows, length)
    if not n_in or not n_out:
        raise ValueError("a matrix must have rows and columns")
    stored = rows.weight if isinstance(rows, Int8Rows) else rows
    is_stored = isinstance(stored, Tensor) and NAMES_OF_CODES.get(stored.dtype) == dtype
    is_rounded = isinstance(rows, RoundedRows) and rows.dtype == dtype
    if WEIGHT_TYPES[dtype].is_short and not (is_stored or is_rounded):
        dtype = "float32"
    packed = Packed(n_in, n_out, dtype, arena)
    if isinstance(stored, Tensor) and is_stored:
        _pack_file(stored, rows, packed, transposed)
    else:
        _pack_rows(rows, packed, transposed)
    return packed


def _pack_file(stored: Tensor, rows: Rows, packed: Packed, transposed: bool) -> None:
    """Pack rows that are stored in the type of the panels: C reads them, without Python's lock."""
    scales = None
    if isinstance(rows, Int8Rows):
        n_rows, length = rows.shape
        scales = contiguous(rows.scale[:], FLOAT32)
        check(scales.shape == scales_shape(n_rows, length, transposed), "the scales", scales)
    with stored.opened() as (file, offset):
        _pack(
            file.name, to=packed.struct, transposed=transposed, file=file.fileno(), offset=offset,
            scales=scales,
        )  # fmt: skip


def _pack_rows(rows: Rows, packed: Packed, transposed: bool) -> None:
    """Convert and pack a range of rows at a time, while they are in the processor's cache."""
    n_rows, length = rows.shape
    step = max(1, _PIECE // length // GROUP) * GROUP
    for first in range(0, n_rows, step):
        part, scales = _converted(rows, slice(first, first + step), packed.format, transposed)
        _pack(
            "a matrix", to=packed.struct, transposed=transposed, rows=part, scales=scales,
            first=first, count=len(part),
        )  # fmt: skip


def _converted(rows: Rows, part: slice, dtype: str, transposed: bool) -> tuple[Array, Array | None]:
    """Return a range of rows in the type of the panels, and the scales of their groups."""
    if isinstance(rows, RoundedRows) and rows.dtype == dtype:
        return rows.bits(part), None
    if not WEIGHT_TYPES[dtype].has_groups:
        return np.ascontiguousarray(rows[part], FLOAT32), None
    if isinstance(rows, Int8Rows):
        weight, scale = rows.parts(part)
    else:
        weight, scale = quantize(rows[part], transposed=transposed).parts(slice(None))
    return np.ascontiguousarray(weight, np.int8), contiguous(scale, FLOAT32)


def _pack(name: str, **fields: Any) -> None:
    """Pack rows of a file or of "a matrix" (its name in errors)."""
    error = bindings.Pack(**fields).run(1)
    if error > 0:
        raise OSError(error, os.strerror(error), name)
    if error == _FILE_ENDED:
        raise EOFError
    if error == _INVALID_INT8:
        raise int8.invalid(name)
