"""Edits: change values of the forward pass at hook points, for each row by itself.

    HOOK[INDEX]@POSITIONS OPERATOR VALUE

    blocks.9.attn.hook_z[9]=0                     ablate a head
    blocks.6.hook_resid_pre@-1=clean.safetensors  patch the last position of the prompt
    blocks.6.hook_resid_pre+=4*vec.safetensors    add a vector

Positions count from the start of a text, and negative ones from the end of its prompt.
"""

import operator
import re
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpt_cli.errors import InputError, counted
from gpt_cli.folder.config import GPT2Config
from gpt_cli.gpt2.hooks import Hook, has_key_axis, hook_shapes, select_hooks
from gpt_cli.ops import Array, Ops
from gpt_cli.options.declare import OptionError

_EDIT = re.compile(
    r"(?P<hook>[^\[\]@=]+?)(\[(?P<index>[^\]]*)\])?(@(?P<positions>[^=*+]*))?"
    r"(?P<operator>\*=|\+=|(?<![*+])=)(?P<value>.+)",
    re.DOTALL,
)
_FORM = "it must be HOOK[INDEX]@POSITIONS, then =, *= or +=, and a value"
_SLICE = re.compile(r"(-?\d{1,9})?(:)?(-?\d{1,9})?", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_AFTER_ALL = 2**31  # a position
_LARGEST = float(np.finfo(np.float32).max)
_OPERATIONS = {"=": lambda _, new: new, "*=": operator.mul, "+=": operator.add}


class EditError(OptionError):
    """An edit is not valid."""

    def __init__(self, edit: str, problem: object):
        # The parts of an edit may have control characters.
        shown = (c if c.isprintable() else ascii(c)[1:-1] for c in str(problem))
        super().__init__("edits", f"{edit!r:.120}: {''.join(shown)}")


@dataclass(frozen=True, eq=False)
class Edit:
    """An edit of any text, parsed for a model."""

    text: str
    hooks: Mapping[str, tuple[Any, ...]]  # names with shapes: see `hook_shapes`
    index: list[int] | slice  # heads, neurons or dimensions
    positions: str  # as written
    operator: str  # "=", "*=" or "+="
    number: float = 1.0  # the value, or the factor of the arrays
    arrays: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)  # by hook
    stored: NDArray[np.int64] | None = None  # positions of the arrays; None: these are vectors

    @classmethod
    def parse(cls, text: str, config: GPT2Config, folder: Path | None = None) -> "Edit":
        """Return an edit with the arrays of its file, which is in `folder`, if there is one.

        Raise EditError if it does not fit the model, or if the file cannot be used.
        """
        parts = _EDIT.fullmatch(text.strip())
        if not parts:
            raise EditError(text, _FORM)
        shapes = hook_shapes(config)
        try:
            hooks = {name: shapes[name] for name in select_hooks(config, [parts["hook"].strip()])}
            index = _index(parts["index"], min(_sizes(shape)[0] for shape in hooks.values()))
            positions = ":" if parts["positions"] is None else parts["positions"].strip()
            edit = cls(text, hooks, index, positions, parts["operator"])
            _range(edit.positions, 0)
            return edit._with_value(parts["value"].strip(), folder)
        except InputError as error:
            raise EditError(text, error.args[-1]) from None

    def _with_value(self, value: str, folder: Path | None) -> "Edit":
        if _is_number(self.operator, value):
            return replace(self, number=_number(value))
        factor, mean, source = _parts_of_value(self.operator, value)
        edit = replace(self, number=_number(factor.rstrip("* ")) if factor else 1.0)
        from gpt_cli.folder.array_file import ArrayFile, file_and_key  # few edits have a file

        name, key = file_and_key(source)
        file = ArrayFile(name, folder)
        arrays = {hook: file.read(key or hook) for hook in self.hooks}
        if mean:
            return edit.with_arrays({hook: _mean(array) for hook, array in arrays.items()}, name)
        if self.operator == "+=":
            return edit.with_arrays(arrays, name)
        count = min(map(len, arrays.values()))
        stored = file.read("position") if "position" in file else None
        return edit.with_arrays(arrays, name, np.arange(count) if stored is None else stored)

    @np.errstate(all="ignore")  # the error replaces NumPy's warnings
    def with_arrays(
        self,
        arrays: Mapping[str, NDArray[Any]],
        source: str,
        stored: NDArray[np.int64] | None = None,
    ) -> "Edit":
        """Return the edit with vectors, or with activations at `stored` positions.

        Raise InputError if their shapes are not those of the hooks, or a number is nan or infinite.
        """
        if stored is not None and (np.diff(stored) <= 0).any():
            raise InputError(f"{source} has several rows: give a file with the activations of one")
        converted = {}
        for hook, array in arrays.items():
            has_keys = has_key_axis(hook)
            if has_keys and stored is None:
                raise InputError(f"{hook} can be a number or the activations of a row")
            expected = _sizes(self.hooks[hook])
            if stored is not None:
                expected = (len(stored), *expected)
            axes = len(expected) + has_keys
            if array.shape[: len(expected)] != expected or array.ndim != axes:
                raise InputError(f"{hook} in {source} is {array.shape}, not {expected}")
            array = array.astype(np.float32)
            masked = np.isneginf(array) if hook.endswith("scores") else False  # later keys
            if not (np.isfinite(array) | masked).all():
                raise InputError(f"{hook} in {source} is not finite")
            converted[hook] = array
        return replace(self, arrays=converted, stored=stored)

    def apply(self, hook: str, values: Array, positions: Array) -> Array:
        """Change the values (n, ...) of a hook point at n positions of a row; return them.

        All arrays are on the host.
        """
        new: Any = np.float32(self.number)
        has_keys = has_key_axis(hook)
        hidden = np.float32(0 if hook.endswith("pattern") else -np.inf)
        if hook in self.arrays:
            array = self.arrays[hook]
            if self.stored is not None:
                array = array[np.searchsorted(self.stored, positions)]
            if has_keys:
                padded = np.full(values.shape, hidden)
                padded[..., : array.shape[-1]] = array[..., : values.shape[-1]]
                array = padded
            new = new * array
        part = slice(None), self.index
        new = np.broadcast_to(new, values.shape)[part]
        values[part] = _OPERATIONS[self.operator](values[part], new)
        if has_keys:  # an edit does not let a query see later keys
            later = np.arange(values.shape[-1]) > positions[:, None, None]
            values = np.where(later, hidden, values)
        return values


def with_absolute_path(edit: str) -> str:
    """Return an edit with the absolute path of its file, if it names one."""
    from gpt_cli.folder.array_file import file_and_key

    parts = _EDIT.fullmatch(edit.strip())
    if not parts or _is_number(parts["operator"], parts["value"].strip()):
        return edit
    factor, mean, source = _parts_of_value(parts["operator"], parts["value"])
    name, _ = file_and_key(source)
    if not Path(name).is_file():
        return edit
    before_value = parts[0][: parts.start("value")]
    return f"{before_value}{factor}{mean}{Path(source).absolute()}"


class Bound(NamedTuple):
    """An edit of a row, and the range of positions that it changes."""

    edit: Edit
    start: int
    stop: int


def bind(edits: Sequence[Edit], length: int, final_length: int) -> list[Bound]:
    """Return edits for a prompt of `length` tokens, whose text may grow to `final_length`.

    Raise EditError if a position is not in the text, or has no stored activations.
    """
    bound = []
    for edit in edits:
        start, stop = _range(edit.positions, length)
        if 0 <= stop < start:
            raise EditError(edit.text, f"@{edit.positions} ends before it begins")
        last = final_length if stop == _AFTER_ALL else stop
        if not 0 <= start <= last <= final_length:
            size = counted(length, "token")
            if final_length > length:
                size += f" and {final_length - length:,} new"
            raise EditError(edit.text, f"@{edit.positions} is not in a text of {size}")
        if edit.stored is not None and not np.isin(np.arange(start, last), edit.stored).all():
            count = counted(len(edit.stored), "position")
            raise EditError(edit.text, f"the activations have {count}: use only these")
        bound.append(Bound(edit, start, stop))
    return bound


class Editor(Hook):
    """Applies the edits of the rows of a pass, on the host: CuPy rounds tiny numbers to 0."""

    changes_values = True

    def __init__(self, rows: Sequence[Sequence[Bound]], ops: Ops):
        self._ops = ops
        self._positions: Array = np.empty((0, 0), np.int64)  # of the pass
        self._new: Array = np.empty(0, np.int64)  # numbers of its tokens
        self._edits: dict[str, list[tuple[int, Bound]]] = {}  # by hook point, with rows
        for row, bounds in enumerate(rows):
            for bound in bounds:
                for name in bound.edit.hooks:
                    self._edits.setdefault(name, []).append((row, bound))
        self.names = self._edits.keys()

    def begin(self, positions: Array, new: Array) -> "Editor":
        """Return the editor of a pass."""
        editor = copy(self)
        editor._positions = positions
        editor._new = new
        return editor

    def take(self, name: str, value: Array) -> Array:
        """Return the value, or a changed copy."""
        changed = value
        for row, (edit, start, stop) in self._edits.get(name, ()):
            positions = self._positions[row, : self._new[row]]
            columns = np.flatnonzero((positions >= start) & (positions < stop))
            if len(columns):
                if changed is value:
                    changed = value.copy()
                values = changed[row] if value.ndim == 3 else changed[row].swapaxes(0, 1)
                new = edit.apply(name, self._ops.to_host(values[columns]), positions[columns])
                values[columns] = self._ops.xp.asarray(new)
        return changed


def _sizes(shape: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the sizes of a value at one token, without the number of keys."""
    return tuple(size for size in shape if size != "T")


def _is_number(operator: str, value: str) -> bool:
    """Return whether a value must be a number; all others name a file."""
    return operator == "*=" or (operator == "=" and _NUMBER.fullmatch(value) is not None)


def _parts_of_value(operator: str, value: str) -> tuple[str, str, str]:
    """Return the factor with its star, `mean:`, and the file; the first two may be empty."""
    factor = ""
    source = value
    if operator == "+=" and "*" in value:
        number, star, source = value.partition("*")
        factor = number + star
    source = source.strip()
    mean = "mean:" if source.startswith("mean:") else ""
    return factor, mean, source.removeprefix(mean)


def _number(text: str) -> float:
    """Return the number in a text, if it is one in float32; else raise InputError."""
    if not _NUMBER.fullmatch(text):
        raise InputError(f"{text!r:.40} is not a number")
    if abs(float(text)) > _LARGEST:
        raise InputError(f"{text:.40} is too large")
    return float(text)


@np.errstate(all="ignore")  # a mean that is not finite is refused
def _mean(array: NDArray[Any]) -> NDArray[Any]:
    """Return the mean over stored tokens; InputError if there is none."""
    if array.ndim < 2 or not len(array):
        raise InputError("a mean needs activations of tokens")
    return array.mean(axis=0, dtype=np.float64)


def _index(text: str | None, size: int) -> list[int] | slice:
    """Parse an index of heads, neurons or dimensions: `3`, `3,5`, `0:4`, or None for all."""
    if text is None:
        return slice(None)
    numbers: list[int] = []
    for part in text.split(","):
        match = _SLICE.fullmatch(part.strip())
        if not match or not match[0] or "-" in match[0]:
            raise InputError(f"[{text:.40}] must be numbers such as 3, 3,5 or 0:4")
        first = int(match[1] or 0)
        last = int(match[3] or size) if match[2] else first + 1
        numbers += range(first, min(last, size + 1))  # a request may name any number
    if not numbers or max(numbers) >= size:
        raise InputError(f"[{text:.40}] is not in 0:{size}")
    return numbers


def _range(positions: str, length: int) -> tuple[int, int]:
    """Return the first position and the one after the last; `length` is that of the prompt."""
    if positions in ("prompt", "generated"):
        return (0, length) if positions == "prompt" else (length, _AFTER_ALL)
    match = _SLICE.fullmatch(positions)
    if not match or not match[0]:
        raise InputError(f"@{positions:.40} must be such as @-1, @4, @2:7, @prompt or @generated")

    def from_start(position: str | None) -> int:
        number = int(position or 0)
        return number if number >= 0 else number + length

    first = from_start(match[1])
    if not match[2]:
        return first, first + 1
    return first, from_start(match[3]) if match[3] else _AFTER_ALL
