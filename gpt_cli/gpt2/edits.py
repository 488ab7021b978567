"""Edits: change values of the forward pass at hook points, for each row by itself.

    HOOK[INDEX]@POSITIONS OPERATOR VALUE

    blocks.9.attn.hook_z[9]=0                     ablate a head
    blocks.6.hook_resid_pre@-1=clean.safetensors  patch the last position of the prompt
    blocks.6.hook_resid_pre+=4*vec.safetensors    add a vector

Positions count from the start of a text, and negative ones from the end of its prompt. An
`options.edit.Edit` has the same parts. Functions of Python are edits, too.
"""

import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpt_cli.errors import InputError, brief, counted
from gpt_cli.folder.config import GPT2Config
from gpt_cli.gpt2.hooks import Hook, has_key_axis, hook_shapes, indexed, select_hooks
from gpt_cli.ops import Array, Ops
from gpt_cli.options.declare import OptionError
from gpt_cli.options.edit import AnyEdit, Edit, Vector

_EDIT = re.compile(
    r"(?P<hook>[^\[\]@=]+?)(\[(?P<index>[^\]]*)\])?(@(?P<positions>[^=*+]*))?"
    r"(?P<operator>\*=|\+=|(?<![*+])=)(?P<value>.+)",
    re.DOTALL,
)
_FORM = "it must be HOOK[INDEX]@POSITIONS, then =, *= or +=, and a value"
_SLICE = re.compile(r"(-?\d{1,9})?(:)?(-?\d{1,9})?", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_ALL = ":"
_AFTER_ALL = 2**31  # a position
_LARGEST = float(np.finfo(np.float32).max)
_OPERATIONS = {"=": lambda _, new: new, "*=": operator.mul, "+=": operator.add}

# Values (n, ...) and positions (n,) of a text -> the new values; None for these.
HookFunction: TypeAlias = Callable[
    [NDArray[np.float32], NDArray[np.int64]], NDArray[np.float32] | None
]


class EditError(OptionError):
    """An edit is not valid."""

    def __init__(self, edit: str | Edit, problem: object):
        # The parts of an edit may have control characters.
        shown = (c if c.isprintable() else ascii(c)[1:-1] for c in str(problem))
        super().__init__("edits", f"{brief(edit, 120)}: {''.join(shown)}")


@dataclass(frozen=True, eq=False)
class ModelEdit:
    """An edit of any text, which fits a model."""

    source: str | Edit
    hooks: Mapping[str, tuple[Any, ...]]  # names with shapes: see `hook_shapes`
    index: list[int] | slice  # heads, neurons or dimensions
    positions: str  # as in a text
    operator: str  # "=", "*=" or "+="
    number: float = 1.0  # the value, or the factor of the arrays
    arrays: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)  # by hook
    stored: NDArray[np.int64] | None = None  # positions of the arrays; None: these are vectors

    @classmethod
    def of(cls, source: AnyEdit, config: GPT2Config, folder: Path | None = None) -> "ModelEdit":
        """Return an edit with its arrays; a file of a text is in `folder`, if there is one.

        Raise EditError if it does not fit the model, or if the file cannot be used.
        """
        if isinstance(source, Vector):
            source = 1 * source
        edit = _parse(source) if isinstance(source, str) else source
        shapes = hook_shapes(config)
        try:
            if not isinstance(edit.hook, str):
                raise InputError("its hook must be a string")
            if edit.op not in _OPERATIONS:
                raise InputError(f"its op must be one of {', '.join(_OPERATIONS)}")
            hooks = {name: shapes[name] for name in select_hooks(config, [edit.hook])}
            smallest = min(hooks, key=lambda name: _sizes(hooks[name])[0])
            index = _index(edit.index, _sizes(hooks[smallest])[0], indexed(smallest))
            positions = _ALL if edit.positions is None else _as_text(edit.positions)
            bare = cls(source, hooks, index, positions, edit.op)
            _ranges(positions, 0)
            if isinstance(edit.value, str):
                return bare._with_text(edit.value, folder)
            return bare._with_value(edit.value)
        except InputError as error:
            raise EditError(source, error.args[-1]) from None

    def _with_value(self, value: Any) -> "ModelEdit":
        """Return the edit with a number or an array."""
        try:
            array = np.asarray(value)
        except (TypeError, ValueError, RuntimeError) as error:  # such as an array on a GPU
            raise InputError(f"its value is no array: {error!s:.200}") from None
        if array.dtype.kind not in "fiu":
            shown = "is None" if value is None else f"holds {array.dtype!s:.40}"
            raise InputError(f"its value {shown}: give a number, an array of numbers or a text")
        if not array.ndim:
            if not abs(array) <= _LARGEST:
                raise InputError(f"its value, {array}, is not finite in float32")
            return replace(self, number=float(array))
        of_tokens = array.ndim > len(_sizes(next(iter(self.hooks.values()))))
        stored = np.arange(len(array)) if of_tokens else None
        return self.with_arrays(dict.fromkeys(self.hooks, array), "its value", stored)

    def _with_text(self, value: str, folder: Path | None) -> "ModelEdit":
        """Return the edit with a number, or with arrays of a file."""
        if _is_number(self.operator, value):
            return replace(self, number=_number(value))
        factor, mean, source = _parts_of_value(self.operator, value)
        if self.operator == "+=" and _NUMBER.fullmatch(source):
            example = f"+={source}*FILE"
            raise InputError(f"+= adds the vector of a file, not a number: give one, as {example}")
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
    ) -> "ModelEdit":
        """Return the edit with vectors, or with activations at `stored` positions.

        Raise InputError if their shapes are not those of the hooks, or a number is nan or infinite.
        """
        if stored is not None and (np.diff(stored) <= 0).any():
            raise InputError(f"{source} has several rows: give a file with the activations of one")
        converted = {}
        for hook, array in arrays.items():
            has_keys = has_key_axis(hook)
            if has_keys and (stored is None or self.operator != "="):
                raise InputError(f"{hook} can be a number or the activations of a row")
            expected = _sizes(self.hooks[hook])
            if stored is not None:
                expected = (len(stored), *expected)
            axes = len(expected) + has_keys
            if array.shape[: len(expected)] != expected or array.ndim != axes:
                problem = f"has the shape {array.shape}, and {hook} needs {expected}"
                raise InputError(f"{source} {problem}")
            array = array.astype(np.float32)
            if not _is_finite(hook, array):
                raise InputError(f"{hook} in {source} is not finite")
            converted[hook] = array
        return replace(self, arrays=converted, stored=stored)

    def apply(self, hook: str, values: Array, positions: Array) -> Array:
        """Change the values (n, ...) of a hook point at n positions of a row; return them.

        All arrays are on the host.
        """
        new: Any = np.float32(self.number)
        if hook in self.arrays:
            array = self.arrays[hook]
            if self.stored is not None:
                array = array[np.searchsorted(self.stored, positions)]
            if has_key_axis(hook):
                padded = np.full(values.shape, _hidden(hook))
                padded[..., : array.shape[-1]] = array[..., : values.shape[-1]]
                array = padded
            new = new * array
        part = slice(None), self.index
        new = np.broadcast_to(new, values.shape)[part]
        values[part] = _OPERATIONS[self.operator](values[part], new)
        return _without_later_keys(hook, values, positions)


@dataclass(frozen=True, eq=False)
class FunctionEdit:
    """A function that changes the values of each text, at all its positions."""

    hooks: Collection[str]
    function: HookFunction

    def apply(self, hook: str, values: Array, positions: Array) -> Array:
        """Change the values (n, ...) of a hook point at n positions of a row; return them.

        The function gets them as they are without other rows: with the keys up to the last
        position. Raise InputError if it returns another shape or type, or is the first to give
        numbers that are not finite.
        """
        value = values[..., : positions[-1] + 1] if has_key_axis(hook) else values
        was_finite = _is_finite(hook, value)
        new = self.function(value, positions.copy())
        if new is None:
            new = value  # which the function may have changed
        if not isinstance(new, np.ndarray) or (new.shape, new.dtype) != (value.shape, value.dtype):
            is_array = isinstance(new, np.ndarray)
            returned = f"{new.dtype} {new.shape}" if is_array else brief(new)
            if is_array and new.shape == value.shape:
                returned += ": add .astype(np.float32)"
            needed = f"float32 {value.shape}"
            raise InputError(f"the function at {hook} must return {needed}, not {returned}")
        value[...] = new
        values = _without_later_keys(hook, values, positions)
        if was_finite and not _is_finite(hook, values):
            raise InputError(f"the function at {hook} has returned numbers that are not finite")
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
    """An edit of a row, and the ranges of positions that it changes."""

    edit: ModelEdit | FunctionEdit
    ranges: Sequence[tuple[int, int]]  # of the first position, and the one after the last

    def places(self, positions: Array) -> Array:
        """Return where there are positions (n,) that it changes."""
        starts, stops = np.transpose(self.ranges)
        inside = (positions[:, None] >= starts) & (positions[:, None] < stops)
        return np.flatnonzero(inside.any(axis=1))


def bind(edits: Sequence[ModelEdit | FunctionEdit], length: int, final_length: int) -> list[Bound]:
    """Return edits for a prompt of `length` tokens, whose text may grow to `final_length`.

    Raise EditError if a position is not in the text, or has no stored activations.
    """
    bound = []
    for edit in edits:
        if isinstance(edit, FunctionEdit):
            bound.append(Bound(edit, [(0, _AFTER_ALL)]))
            continue
        ranges = _ranges(edit.positions, length)
        for start, stop in ranges:
            _check_range(edit, start, stop, length, final_length)
        bound.append(Bound(edit, ranges))
    return bound


def _check_range(edit: ModelEdit, start: int, stop: int, length: int, final_length: int) -> None:
    """Raise EditError if an edit cannot change a range of positions of a text."""
    if 0 <= stop < start:
        raise EditError(edit.source, f"@{edit.positions:.40} ends before it begins")
    last = final_length if stop == _AFTER_ALL else stop
    if not 0 <= start <= last <= final_length:
        size = counted(length, "token")
        if final_length > length:
            size += f" and {final_length - length:,} new"
        raise EditError(edit.source, f"@{edit.positions:.40} is not in a text of {size}")
    if edit.stored is not None and not np.isin(np.arange(start, last), edit.stored).all():
        count = counted(len(edit.stored), "position")
        raise EditError(edit.source, f"the activations have {count}: use only these")


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
        for row, bound in self._edits.get(name, ()):
            positions = self._positions[row, : self._new[row]]
            columns = bound.places(positions)
            if len(columns):
                if changed is value:
                    changed = value.copy()
                values = changed[row] if value.ndim == 3 else changed[row].swapaxes(0, 1)
                old = self._ops.to_host(values[columns])
                new = bound.edit.apply(name, old, positions[columns])
                values[columns] = self._ops.xp.asarray(new)
        return changed


def _hidden(hook: str) -> np.float32:
    """Return the number that a value with keys has for those that a query cannot see."""
    return np.float32(0 if hook.endswith("pattern") else -np.inf)


def _without_later_keys(hook: str, values: Array, positions: Array) -> Array:
    """Return values in which no query sees later keys; a value may have no keys."""
    if not has_key_axis(hook):
        return values
    later = np.arange(values.shape[-1]) > positions[:, None, None]
    return np.where(later, _hidden(hook), values)


def _is_finite(hook: str, values: Array) -> bool:
    """Return whether values are finite; scores are -inf where a query cannot see a key."""
    hidden = np.isneginf(values) if hook.endswith("scores") else False
    return bool((np.isfinite(values) | hidden).all())


def _parse(text: str) -> Edit:
    """Return the parts of a text; raise EditError if it does not have them."""
    parts = _EDIT.fullmatch(text.strip())
    if not parts:
        raise EditError(text, _FORM)
    positions = parts["positions"]
    return Edit(
        parts["hook"].strip(),
        parts["value"].strip(),
        parts["index"],
        None if positions is None else positions.strip(),
        parts["operator"],  # type: ignore[arg-type]
    )


def _as_text(numbers: Any) -> str:
    """Return an index or positions as in a text."""
    if isinstance(numbers, slice):
        if numbers.step not in (None, 1):
            raise InputError(f"{numbers} has a step: give a list")
        bounds = numbers.start, numbers.stop
        return ":".join("" if bound is None else str(bound) for bound in bounds)
    if isinstance(numbers, Collection) and not isinstance(numbers, str):
        return ",".join(map(_as_text, numbers))
    return str(numbers)


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
        raise InputError(f"{brief(text)} is not a number")
    if abs(float(text)) > _LARGEST:
        raise InputError(f"{text:.40} is too large")
    return float(text)


@np.errstate(all="ignore")  # a mean that is not finite is refused
def _mean(array: NDArray[Any]) -> NDArray[Any]:
    """Return the mean over stored tokens; InputError if there is none."""
    if array.ndim < 2 or not len(array):
        raise InputError("a mean needs activations of tokens")
    return array.mean(axis=0, dtype=np.float64)


def _index(index: Any, size: int, kind: str) -> list[int] | slice:
    """Return an index of heads, neurons or dimensions: `3`, `3,5`, `0:4`, or None for all."""
    if index is None:
        return slice(None)
    text = _as_text(index)
    numbers: list[int] = []
    for part in text.split(","):
        match = _SLICE.fullmatch(part.strip())
        if not match or not match[0] or "-" in match[0]:
            raise InputError(f"[{text:.40}] must be numbers such as 3, 3,5 or 0:4")
        first = int(match[1] or 0)
        last = int(match[3] or size) if match[2] else first + 1
        numbers += range(first, min(last, size + 1))  # a request may name any number
    if not numbers or max(numbers) >= size:
        raise InputError(f"[{text:.40}] must be {kind} from 0 to {size - 1}")
    return numbers


def _ranges(positions: str, length: int) -> list[tuple[int, int]]:
    """Return ranges: the first position, and the one after the last; `length` is the prompt's."""

    def from_start(position: str | None) -> int:
        number = int(position or 0)
        return number if number >= 0 else number + length

    def range_of(part: str) -> tuple[int, int]:
        if part in ("prompt", "generated"):
            return (0, length) if part == "prompt" else (length, _AFTER_ALL)
        match = _SLICE.fullmatch(part)
        if not match or not match[0]:
            forms = "@-1, @4, @2:7, @1,4, @prompt or @generated"
            raise InputError(f"@{positions:.40} must be such as {forms}")
        first = from_start(match[1])
        if not match[2]:
            return first, first + 1
        return first, from_start(match[3]) if match[3] else _AFTER_ALL

    return [range_of(part.strip()) for part in positions.split(",")]
