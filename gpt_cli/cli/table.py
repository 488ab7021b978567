"""Tables: aligned under a header on a terminal, with tabs between the cells in a pipe."""

import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from gpt_cli.cli.output import on_terminal


@dataclass(frozen=True)
class Column:
    """A column of a table: its name in the header, and the form of its cells."""

    name: str = ""
    width: int = 0  # at least, where cells are aligned
    align: Literal["<", ">"] = "<"
    format: str = ""  # of its values, such as ".2%"
    free: bool = False  # text of any length: the last column where cells are aligned
    wrap: bool = False  # on a terminal, wrap the text of the last column

    def padded(self, text: str) -> str:
        """Return a text as an aligned cell."""
        return f"{text:{self.align}{self.width}}"


class Table:
    """A table that may grow row by row. It has a header if its columns have names."""

    def __init__(self, *columns: Column, aligned: bool = False):
        """With `aligned`, align the cells in a pipe, too."""
        self._columns = columns
        self._aligned = aligned or on_terminal(sys.stdout)
        self._header_is_due = self._aligned and any(column.name for column in columns)

    def line(self, *values: object) -> str:
        """Return the line of a row, with the header before the first row."""
        return self._header() + self._line(self._texts(values))

    def lines(self, rows: Iterable[Iterable[object]]) -> Iterator[str]:
        """Yield the header and the lines of rows."""
        yield self._header()
        for row in rows:
            yield self.line(*row)

    def whole(self, rows: Iterable[Iterable[object]]) -> str:
        """Return a table whose columns are as wide as the widest of their cells."""
        texts = [self._texts(row) for row in rows]
        fitted = []
        for index, column in enumerate(self._columns):
            width = max([len(column.name), *(len(row[index]) for row in texts)])
            fitted.append(replace(column, width=width, format=""))
        return "".join(Table(*fitted, aligned=self._aligned).lines(texts))

    def _header(self) -> str:
        """Return the header, or "" if there is none or it was returned before."""
        if not self._header_is_due:
            return ""
        self._header_is_due = False
        return self._line([column.name for column in self._columns])

    def _texts(self, row: Iterable[object]) -> list[str]:
        pairs = zip(self._columns, row, strict=True)
        return [format(value, column.format) for column, value in pairs]

    def _line(self, texts: list[str]) -> str:
        if not self._aligned:
            return "\t".join(texts) + "\n"
        pairs = sorted(zip(self._columns, texts, strict=True), key=lambda pair: pair[0].free)
        head = "".join(column.padded(text) + "  " for column, text in pairs[:-1])
        column, text = pairs[-1]
        if column.wrap and on_terminal(sys.stdout):
            return _hanging(head, text)
        if column.align == ">":
            text = column.padded(text)
        line = head + text if text else head.rstrip()
        return line + "\n"


def facts_table(values: Mapping[str, object]) -> str:
    """Return a line for each name and its value."""
    return Table(Column(), Column(), aligned=True).whole(values.items())


def _hanging(head: str, text: str) -> str:
    """Return a text wrapped beside its head.

    The text starts on the next line if the head is wider than half of the terminal, or if a word
    does not fit beside the head.
    """
    columns = shutil.get_terminal_size().columns
    longest = max(map(len, text.split()))
    if 2 * len(head) > columns or longest > columns - len(head):
        head = f"{head.rstrip()}\n    "
    indent = len(head.rpartition("\n")[2])
    lines = textwrap.wrap(text, columns - indent, break_long_words=False, break_on_hyphens=False)
    return head + f"\n{' ' * indent}".join(lines) + "\n"
