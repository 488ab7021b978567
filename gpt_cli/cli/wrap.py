"""Text on a terminal, streamed: lines break between words."""

import re
import shutil
import sys
from collections.abc import Callable

from gpt_cli.cli.output import on_terminal, visible, write

_PARTS = re.compile(r"\n|[^\S\n]+|\S+")  # line ends, other white space, words
_TAB = 8  # columns


def text_writer() -> Callable[[str], None]:
    """Return a function that writes the next piece of a text to standard output.

    A pipe or a file gets the text as it is. On a terminal, lines break between words.
    """
    if not on_terminal(sys.stdout):
        return write
    wrap = WordWrap()
    return lambda piece: write(wrap.add(piece), escapes=True)


class WordWrap:
    """The pieces of a text, as they are written to a terminal.

    White space before a word becomes a line end if the word does not fit the line. The next pieces
    may make a word too long that was already written: then it is erased, and written on the next
    line.
    """

    def __init__(self) -> None:
        from rich.cells import cell_len  # a pipe does not need it

        self._width_of = cell_len
        self._column = 0  # where the last word begins, or the next one
        self._word = ""  # the beginning of a word, which was written
        self._space = ""  # before the next word, not written yet

    def add(self, piece: str) -> str:
        """Return what is written for the next piece of the text."""
        return "".join(map(self._add, _PARTS.findall(visible(piece))))

    def _add(self, part: str) -> str:
        if part == "\n":
            self._column, self._word, self._space = 0, "", ""
            return part
        # The last column stays free: after it, a terminal may be on either line.
        columns = shutil.get_terminal_size().columns - 1
        if part.isspace():
            self._column += self._width_of(self._word)
            if self._column > columns:  # after a word longer than a line
                self._column %= columns + 1
            self._word = ""
            self._space += part.replace("\t", " " * _TAB)
            return ""
        space, self._space = self._space, ""
        written, self._word = self._width_of(self._word), self._word + part
        width = self._width_of(self._word)
        is_wide = width > len(self._word)  # as Chinese, which has no spaces
        self._column += len(space)
        if self._column + width <= columns or width > columns or is_wide or not self._column:
            return space + part
        self._column = 0
        erasure = "\b" * written + " " * written + "\b" * written
        return f"{erasure}\n{self._word}"
