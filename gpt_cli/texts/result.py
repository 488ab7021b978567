"""The base classes of the results of an engine, which know how they are shown."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

R = TypeVar("R", bound="Result")
_LONGEST = 32  # characters of a text in a line


class Display(Protocol):
    """Shows the results of a model: see `gpt_cli.display.results`."""

    def text(self, ids: Sequence[int]) -> str | None:
        """Return the text of tokens; None if their texts are not known."""

    def record(self, result: Any) -> dict[str, Any]:
        """Return a result as a JSON object."""

    def tokens(self, result: Any) -> list[dict[str, Any]]:
        """Return the tokens of a result as JSON objects."""

    def html(self, result: Any) -> str | None:
        """Return a result as HTML; None if it has no picture."""


class Result:
    """A result, which is one line in Python, and a picture in a notebook if it has one."""

    _display: Display | None = None  # set by `shown_by`

    def _facts(self) -> str:
        """Return what matters most, in a few words."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._facts()}>"

    def _repr_html_(self) -> str | None:
        """Return the result as HTML, which notebooks call."""
        return self._display.html(self) if self._display else None

    def _quoted(self, ids: Sequence[int]) -> str:
        """Return the beginning of the text of ids in quotes; `...` if it is unknown."""
        text = self._display.text(ids[:_LONGEST]) if self._display else None
        return "..." if text is None else beginning(text)


def shown_by(display: Display | None, result: R) -> R:
    """Return a result itself, which a display shows from now on."""
    object.__setattr__(result, "_display", display)  # also if it is frozen
    return result


class Recorded(Result):
    """A result with a record, which is that of the command line."""

    def to_dict(self) -> dict[str, Any]:
        """Return the result as a JSON object, with the fields of docs/reference.md."""
        if self._display is None:
            raise ValueError("only the results of an engine have records")
        return self._display.record(self)

    def _tokens(self) -> list[dict[str, Any]]:
        """Return the tokens of the result as JSON objects."""
        if self._display is None:
            raise ValueError("only the results of an engine have records")
        return self._display.tokens(self)


class Arrays(dict[str, Any]):
    """A dictionary of arrays, which shows their shapes and not their numbers."""

    def __repr__(self) -> str:
        shapes = [f"{name} {array.shape}" for name, array in list(self.items())[:2]]
        return f"<{len(self)} arrays: {', '.join(shapes)}{', ...' if len(self) > 2 else ''}>"


def beginning(text: str) -> str:
    """Return a text in quotes on one line, or its beginning if it is long."""
    return repr(text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…")
