"""Templates: a text with fields of a row in it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from gpt_cli.errors import InputError

LINE = "line"  # the field that a plain line has

_PART = re.compile(r"(?P<text>[^{}]+)|(?P<brace>\{\{|\}\})|\{(?P<name>[^{}]+)\}")


@dataclass(frozen=True)
class Template:
    """A text with `{name}` for a field of a row, `{line}` for a plain line, `{{` for a brace."""

    text: str

    def __post_init__(self) -> None:
        if not self.names:
            raise InputError("the template has no field: write {line}, or {name} of a field")

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the fields, without duplicates."""
        return tuple(dict.fromkeys(part for is_name, part in self._parts if is_name))

    @cached_property
    def _parts(self) -> list[tuple[bool, str]]:
        """Names of fields (True), and texts."""
        parts, end = [], 0
        while end < len(self.text):
            match = _PART.match(self.text, end)
            if match is None:
                raise InputError(
                    f"the template has a lone {self.text[end]} at character {end + 1}: "
                    "write {{ or }} for a brace, {name} for a field"
                )
            name, brace = match["name"], match["brace"]
            parts.append((True, name) if name else (False, brace[0] if brace else match["text"]))
            end = match.end()
        return parts

    def check_line(self) -> None:
        """Raise InputError if a plain line does not have all fields."""
        if other := [name for name in self.names if name != LINE]:
            raise InputError(
                f"the template has {{{other[0]:.40}}}, and the input has plain lines: "
                "write {line}, or give JSON Lines or Parquet"
            )

    def fill(self, fields: Mapping[str, str]) -> str:
        """Return the text with the values of its fields."""
        return "".join(fields[part] if is_name else part for is_name, part in self._parts)
