"""Edits as a user gives them; `gpt2.edits` has their notation as text, and applies them."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from reprlib import repr as short
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from gpt_cli.options.declare import Kind, OptionTypeError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

Numbers: TypeAlias = int | Sequence[int] | slice | str


@dataclass(frozen=True, eq=False, repr=False)
class Edit:
    """A change of values in the forward pass, as `--edit HOOK[INDEX]@POSITIONS OP VALUE`.

    Whether it fits the model is checked where it is used.

    Attributes:
        hook: the name of a hook point, or a glob.
        value: a number; a Direction or an array with the shape of one value, such as (C,) or (H,
            D), for all positions; an array (n, ...) of the values at positions 0 to n - 1, with
            tokens first and heads after them; or a text, as in `--edit`.
        index: heads, neurons or dimensions: a number, a list, a slice or a text; None for all.
        positions: a number, a list, a slice or a text, such as "2:7" or "generated"; None for all.
            Negative ones count from the end of the prompt.
        op: "=" sets, "*=" multiplies, and "+=" adds.
    """

    hook: str
    value: "ArrayLike | Vector"
    index: Numbers | None = None
    positions: Numbers | None = None
    op: Literal["=", "*=", "+="] = "="

    def __post_init__(self) -> None:
        if isinstance(self.value, Vector):
            object.__setattr__(self, "value", self.value.vector)  # it is frozen

    def __repr__(self) -> str:
        """Return the parts that are set, with the shape of an array."""
        shape = tuple(getattr(self.value, "shape", ()))
        parts = [repr(self.hook), f"<array {shape}>" if shape else short(self.value)]
        numbers = {"index": self.index, "positions": self.positions}
        parts += [f"{name}={short(part)}" for name, part in numbers.items() if part is not None]
        if self.op != "=":
            parts.append(f"op={short(self.op)}")
        return f"Edit({', '.join(parts)})"


class Vector:
    """A vector at a hook point. As an edit, it is added there; a number times it is an edit, too.

    Attributes:
        hook: the name of the hook point.
        vector: with the shape of one value, such as (C,), or (H, D) of heads.
    """

    hook: str
    vector: "NDArray[np.float32]"

    def __mul__(self, factor: Any) -> Edit:
        """Return the edit that adds the vector so many times."""
        if not isinstance(factor, Real):
            return NotImplemented
        return Edit(self.hook, float(factor) * self.vector, op="+=")

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Edit:
        return self * (1 / divisor) if isinstance(divisor, Real) else NotImplemented

    def __neg__(self) -> Edit:
        return self * -1


AnyEdit: TypeAlias = str | Edit | Vector


def _convert(value: Any) -> tuple[AnyEdit, ...]:
    edits = [value] if isinstance(value, AnyEdit) else value
    if not isinstance(edits, Sequence) or not all(isinstance(edit, AnyEdit) for edit in edits):
        raise TypeError
    return tuple(edits)


def check_texts(edits: Sequence[Any]) -> None:
    """Raise OptionTypeError for an edit that is no text: a job keeps edits in files."""
    for edit in edits:
        if not isinstance(edit, str):
            cure = "save its array, and give a text with the name of the file"
            raise OptionTypeError("edits", f"of a job must be strings, not {edit!r:.200}: {cure}")


EDITS = Kind("a string, an Edit, or a list of these", list[str], _convert)
