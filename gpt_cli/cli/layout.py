"""Text for terminals: wrapped rows, quoted tokens, bars, counts."""

import json
import shutil
import sys
import textwrap
from typing import Any

from gpt_cli.cli.streams import on_terminal

_EIGHTHS = " ▏▎▍▌▋▊▉█"


def hanging(head: str, text: str) -> str:
    """Return a head and a text; on a terminal, wrap the text beside the head.

    The text starts on the next line if the head is wider than half of the terminal, or if a word
    does not fit beside the head.
    """
    if not on_terminal(sys.stdout):
        return f"{head}{text}\n"
    columns = shutil.get_terminal_size().columns
    longest = max(map(len, text.split()))
    if 2 * len(head) > columns or longest > columns - len(head):
        head = f"{head.rstrip()}\n    "
    indent = len(head.rpartition("\n")[2])
    lines = textwrap.wrap(text, columns - indent, break_long_words=False, break_on_hyphens=False)
    return head + f"\n{' ' * indent}".join(lines) + "\n"


def quoted(data: bytes) -> str:
    r"""Return bytes as quoted text on one line, like JSON but safe for any terminal.

    Characters that are not printable are escaped, and a byte that is not UTF-8 is shown as `\xf0`.
    """
    return f'"{"".join(map(_escaped, data.decode(errors="surrogateescape")))}"'


def token_label(token: dict[str, Any]) -> str:
    """Return the text of a record of `records.of_token` on one line."""
    return quoted(bytes(token["bytes"])) if token["bytes"] else str(token["token"])


def bar(length: float) -> str:
    """Return a bar of a length in columns, in steps of 1/8."""
    whole, eighths = divmod(round(length * 8), 8)
    return "█" * whole + _EIGHTHS[eighths].rstrip()


def _escaped(character: str) -> str:
    if "\udc80" <= character <= "\udcff":
        return f"\\x{ord(character) - 0xDC00:02x}"
    if character.isprintable() and character not in '"\\':
        return character
    return json.dumps(character)[1:-1]


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, such as `1 token` or `2 tokens`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
