"""Matrices in the memory of a GPU."""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np

from gpt_cli.folder.dtypes import SHORT
from gpt_cli.ops import Array
from gpt_cli.ops.cuda import plans, structs
from gpt_cli.ops.int8 import GROUP

_LIBRARY_COLUMNS = 32  # of a panel in native/kernels.h
_PER_LINE = 4  # rows of an int8 group that are adjacent there


class Placed:
    """A matrix (n_in, n_out) on the device, in the panels that structs.cu draws."""

    def __init__(self, panels: Any, n_in: int, n_out: int, format: str):
        self.panels = panels  # (panels, bytes)
        self.n_in, self.n_out, self.format = n_in, n_out, format

    @cached_property
    def struct(self) -> bytes:
        """Return a `struct matrix`."""
        sizes = {"n_in": self.n_in, "n_out": self.n_out, "units": self.units}
        return structs.pack("matrix", panels=self.panels, **sizes)

    @property
    def units(self) -> int:
        """Return the units of rows in a panel."""
        return -(-self.n_in // plans.unit_rows(self.format))

    def is_finite(self) -> bool:
        """Return whether all weights are finite, by the exponents of weights or scales."""
        numbers = self.panels.view(np.uint16)
        exponent = np.uint16(0x7C00 if self.format == "float16" else 0x7F80)
        if self.format == "float32":
            numbers = numbers[:, 1::2]  # the upper halves
        elif self.format == "int8":
            units = numbers.reshape(-1, plans.unit_bytes("int8") // 2)
            numbers = units[:, -plans.PANEL :]  # the scales
        return not bool(((numbers & exponent) == exponent).any())

    def library_panels(self) -> Iterator[Array]:
        """Yield the panels of the C library, on the host: see native/kernels.h."""
        step = _LIBRARY_COLUMNS // plans.PANEL
        for first in range(0, len(self.panels), step):
            panels = self.panels[first : first + step].get()
            if len(panels) < step:  # at the end
                panels = np.pad(panels, ((0, step - len(panels)), (0, 0)))
            columns = self.n_out - first * plans.PANEL
            in_library = self._of_int8 if self.format == "int8" else self._of_floats
            yield in_library(panels, columns)

    def _of_floats(self, panels: Array, columns: int) -> Array:
        """Return panels (panels, bytes) as one of the library: (n_in, its columns)."""
        kind = np.dtype("u2" if self.format in SHORT else "f4")
        adjacent = 16 // kind.itemsize  # rows of a column
        loads = panels.view(kind).reshape(len(panels), -1, plans.PANEL, adjacent)
        panel = loads.transpose(1, 3, 0, 2).reshape(-1, _LIBRARY_COLUMNS)[: self.n_in]
        panel[:, columns:] = 0
        return panel

    def _of_int8(self, panels: Array, columns: int) -> Array:
        """Return panels (panels, bytes) as one of the library: (groups, bytes)."""
        count, groups = len(panels), -(-self.n_in // GROUP)
        units = panels.reshape(count, groups, -1)
        weights, scales = np.split(units, [plans.PANEL * GROUP], axis=2)
        loads = weights.reshape(count, groups, GROUP // 16, plans.PANEL, 16)
        rows = loads.transpose(1, 2, 4, 0, 3).reshape(groups, GROUP, _LIBRARY_COLUMNS)
        rows[..., columns:] = 0
        lines = rows.reshape(groups, -1, _PER_LINE, _LIBRARY_COLUMNS).swapaxes(2, 3)
        scales = np.ascontiguousarray(scales).view(np.uint16)
        scales = scales.swapaxes(0, 1).reshape(groups, _LIBRARY_COLUMNS)
        scales[:, columns:] = 0
        return np.concatenate((lines.reshape(groups, -1), scales.view(np.uint8)), axis=1)
