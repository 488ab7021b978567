"""Matrices in the memory of a GPU."""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np

from gpt_cli.folder.dtypes import GROUP, WEIGHT_TYPES
from gpt_cli.ops.contract import Array
from gpt_cli.ops.cuda import plans, structs

_LIBRARY_COLUMNS = 32  # of a panel in native/kernels.h
_PER_LINE = 4  # rows of an int8 group that are adjacent there


class Placed:
    """A matrix (n_in, n_out) on the device, in the panels that structs.cu draws."""

    def __init__(self, panels: Any, n_in: int, n_out: int, format: str):
        self.panels = panels  # (panels, bytes)
        self.n_in = n_in
        self.n_out = n_out
        self.format = format
        self.units = plans.LAYOUTS[format].units(n_in)  # of rows, in a panel
        self._kind = WEIGHT_TYPES[format]

    @cached_property
    def struct(self) -> bytes:
        """Return a `struct matrix`."""
        sizes = {"n_in": self.n_in, "n_out": self.n_out, "units": self.units}
        return structs.pack("matrix", panels=self.panels, **sizes)

    def is_finite(self) -> bool:
        """Return whether all weights are finite, by the exponents of weights or scales."""
        numbers = self.panels.view(np.uint16)
        exponent = np.uint16(self._kind.exponent)
        if self._kind.has_groups:
            units = numbers.reshape(-1, plans.LAYOUTS[self.format].unit_bytes // 2)
            numbers = units[:, -plans.PANEL :]  # the scales
        elif not self._kind.is_short:
            numbers = numbers[:, 1::2]  # the upper halves
        return not bool(((numbers & exponent) == exponent).any())

    def library_panels(self) -> Iterator[Array]:
        """Yield the panels of the C library, on the host: see native/kernels.h."""
        step = _LIBRARY_COLUMNS // plans.PANEL
        for first in range(0, len(self.panels), step):
            panels = self.panels[first : first + step].get()
            if len(panels) < step:  # at the end
                panels = np.pad(panels, ((0, step - len(panels)), (0, 0)))
            columns = self.n_out - first * plans.PANEL
            in_library = self._of_groups if self._kind.has_groups else self._of_floats
            yield in_library(panels, columns)

    def _of_floats(self, panels: Array, columns: int) -> Array:
        """Return panels (panels, bytes) as one of the library: (n_in, its columns)."""
        kind = np.dtype("u2" if self._kind.is_short else "f4")
        adjacent = 16 // kind.itemsize  # rows of a column
        loads = panels.view(kind).reshape(len(panels), -1, plans.PANEL, adjacent)
        panel = loads.transpose(1, 3, 0, 2).reshape(-1, _LIBRARY_COLUMNS)[: self.n_in]
        panel[:, columns:] = 0
        return panel

    def _of_groups(self, panels: Array, columns: int) -> Array:
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
