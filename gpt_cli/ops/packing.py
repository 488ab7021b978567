"""Matrices in panels, and the packing of rows of weights into them by native/pack.c."""

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from gpt_cli.errors import CheckpointError
from gpt_cli.folder.dtypes import GROUP, NAMES_OF_CODES, WEIGHT_TYPES
from gpt_cli.folder.tensors import Tensor, Version, changed_error, open_unchanged
from gpt_cli.ops import bindings, int8
from gpt_cli.ops.bindings import FLOAT32, check, contiguous
from gpt_cli.ops.contract import Array, Rows
from gpt_cli.ops.int8 import Int8Rows, quantize, scales_shape
from gpt_cli.ops.memory import Arena
from gpt_cli.ops.short import RoundedRows
from gpt_cli.system.machine import readers

# The types of panels, by the bytes of a weight.
_PANEL_TYPES: dict[int, np.dtype[Any]] = {4: FLOAT32, 2: np.dtype("u2"), 1: np.dtype("u1")}
_PIECE = 256 * 1024  # numbers read and packed at a time: 1 MB, which stays in the cache
_PART = 4 << 20  # bytes of a file that a thread reads at a time

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


@dataclass(frozen=True, eq=False)
class _Packing:
    """A float32 matrix (n_in, n_out), or (n_out, n_in) if transposed, and its panels."""

    rows: Rows
    stored: Tensor | None  # where C can read the rows: stored in the type of the panels
    transposed: bool
    packed: Packed


def pack(rows: Rows, dtype: str, arena: Arena, *, transposed: bool) -> Packed:
    """Pack a float32 matrix (n_in, n_out), or (n_out, n_in) if `transposed`, into panels.

    The panels are in `dtype`. But a matrix for 16 bits is kept in float32, unless it is stored in
    `dtype` or is `RoundedRows` of it: other rows would lose precision.
    """
    with packing([(rows, transposed)], dtype, arena, threads=1) as wait:
        (packed,) = wait()
        return packed


@contextmanager
def packing(
    matrices: Sequence[tuple[Rows, bool]], dtype: str, arena: Arena, threads: int
) -> Iterator[Callable[[], list[Packed]]]:
    """Pack matrices in the background; yield a function that waits until all are packed.

    `matrices` are pairs: rows, and whether they are transposed, as for `pack`. C reads all that are
    stored in the type of the panels, without Python's lock. On exit, no more are packed.
    """
    packings = [_unpacked(rows, dtype, arena, transposed) for rows, transposed in matrices]
    reading = _Reading([(matrix, matrix.stored) for matrix in packings if matrix.stored])
    threads = min(threads, readers())
    tasks: list[Future[None]] = []

    def wait() -> list[Packed]:
        tasks.append(pool.submit(reading.run))  # not in this thread: it would not see an interrupt
        for task in tasks:
            task.result()
        reading.finish()
        return [matrix.packed for matrix in packings]

    pool = ThreadPoolExecutor(threads)
    try:
        # One fewer, because the calling thread is busy until it waits.
        tasks += [pool.submit(reading.run) for _ in range(threads - 1)]
        tasks += [pool.submit(_pack_rows, matrix) for matrix in packings if not matrix.stored]
        yield wait
    finally:
        reading.stop()
        pool.shutdown(cancel_futures=True)
        reading.close()


def _unpacked(rows: Rows, dtype: str, arena: Arena, transposed: bool) -> _Packing:
    """Return a matrix whose panels are still zeros."""
    n_rows, length = rows.shape
    n_in, n_out = (length, n_rows) if transposed else (n_rows, length)
    if not n_in or not n_out:
        raise ValueError("a matrix must have rows and columns")
    tensor = rows.weight if isinstance(rows, Int8Rows) else rows
    stored = tensor if isinstance(tensor, Tensor) and tensor.strides is None else None
    if stored and NAMES_OF_CODES.get(stored.dtype) != dtype:
        stored = None
    is_rounded = isinstance(rows, RoundedRows) and rows.dtype == dtype
    if WEIGHT_TYPES[dtype].is_short and not (is_rounded or stored):
        dtype = "float32"
    return _Packing(rows, stored, transposed, Packed(n_in, n_out, dtype, arena))


class _Reading:
    """Matrices that C reads from their files, in parts. A thread reads one part at a time."""

    def __init__(self, matrices: Sequence[tuple[_Packing, Tensor]]):
        """Open the files."""
        parts: list[bindings.Struct] = []
        self._paths: list[Path] = []  # of the parts
        with ExitStack() as files:

            @cache
            def opened(path: Path, version: Version | None) -> int:
                return files.enter_context(open_unchanged(path, version)).fileno()

            for matrix, tensor in matrices:
                of_matrix = _parts(matrix, tensor, opened(tensor.path, tensor.version))
                parts += of_matrix
                self._paths += [tensor.path] * len(of_matrix)
            self._files = files.pop_all()
        self._kept = matrices, parts  # the array points to their panels and scales
        self._parts = (bindings.StoredRows * len(parts))(*parts)
        self._read = bindings.Read(parts=ctypes.addressof(self._parts), count=len(parts))

    def run(self) -> None:
        """Read and pack parts until none is left; several threads may do so."""
        self._read.run(1)

    def stop(self) -> None:
        """Let threads end after the parts that they are reading."""
        self._read.next = self._read.count

    def finish(self) -> None:
        """Close the files. Raise CheckpointError if one has changed or has wrong int8 weights."""
        self._files.close()
        for part, path in zip(self._parts, self._paths, strict=True):
            _check(part.error, path)

    def close(self) -> None:
        """Close the files after another error."""
        with suppress(CheckpointError):
            self._files.close()


def _parts(matrix: _Packing, tensor: Tensor, file: int) -> list[bindings.Struct]:
    """Return the parts of a matrix in an open file (a descriptor)."""
    n_rows, length = tensor.shape
    scales = None
    row_bytes = length * matrix.packed.panels.itemsize
    if isinstance(matrix.rows, Int8Rows):
        scales = contiguous(matrix.rows.scale[:], FLOAT32)
        right = scales_shape(n_rows, length, matrix.transposed)
        check(scales.shape == right, "the scales", scales)
    parts = []
    step = max(1, _PART // row_bytes // GROUP) * GROUP
    for first in range(0, n_rows, step):
        groups = first if matrix.transposed else first // GROUP
        pack = bindings.Pack(
            to=matrix.packed.struct, scales=None if scales is None else scales[groups:],
            first=first, count=min(step, n_rows - first), transposed=matrix.transposed,
        )  # fmt: skip
        offset = tensor.offset + first * row_bytes
        parts.append(bindings.StoredRows(pack=pack, offset=offset, file=file))
    return parts


def _pack_rows(matrix: _Packing) -> None:
    """Convert and pack a range of rows at a time, while they are in the processor's cache."""
    n_rows, length = matrix.rows.shape
    step = max(1, _PIECE // length // GROUP) * GROUP
    for first in range(0, n_rows, step):
        part, scales = _converted(matrix, slice(first, first + step))
        pack = bindings.Pack(
            to=matrix.packed.struct, rows=part, scales=scales, first=first, count=len(part),
            transposed=matrix.transposed,
        )  # fmt: skip
        _check(pack.run(1), "a matrix")


def _converted(matrix: _Packing, part: slice) -> tuple[Array, Array | None]:
    """Return a range of rows in the type of the panels, and the scales of their groups."""
    rows, dtype = matrix.rows, matrix.packed.format
    if isinstance(rows, RoundedRows) and rows.dtype == dtype:
        return rows.bits(part), None
    if not WEIGHT_TYPES[dtype].has_groups:
        return np.ascontiguousarray(rows[part], FLOAT32), None
    if isinstance(rows, Int8Rows):
        weight, scale = rows.parts(part)
    else:
        weight, scale = quantize(rows[part], transposed=matrix.transposed).parts(slice(None))
    return np.ascontiguousarray(weight, np.int8), contiguous(scale, FLOAT32)


def _check(error: int, source: Path | str) -> None:
    """Raise the error of packing rows from a file or of "a matrix", unless it is 0."""
    if error == _FILE_ENDED:
        raise changed_error(Path(source))
    if error == _INVALID_INT8:
        raise int8.invalid(str(source))
    if error:
        raise OSError(error, os.strerror(error), str(source))
