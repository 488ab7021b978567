"""Texts in a notebook: their tokens with the colours of their surprise, as HTML without scripts."""

import re
from collections.abc import Sequence
from html import escape
from itertools import islice

from gpt_cli.display.colours import BITS, ink, of_bits
from gpt_cli.display.views import characters
from gpt_cli.records import Record

_MAX_PIECES = 2000  # of a text; a notebook keeps all
# Control characters, and those that change the direction of the text.
_UNSEEN = re.compile(r"(?![\n\t])[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_TEXT = "white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.7; max-width: 50rem"


def text_html(tokens: Sequence[Record], heading: str) -> str:
    """Return tokens, which are records, as text; a redder token is more surprising."""
    pieces = characters(tokens)
    shown = "".join(_piece(data, bits) for data, bits in islice(pieces, _MAX_PIECES))
    rest = sum(1 for _ in pieces)
    more = f"<div>… and {rest:,} more tokens</div>" if rest else ""
    steps = " ".join(_coloured(f"\xa0{bound}\xa0", bound) for bound in BITS)
    legend = f"<small>{escape(heading)} · bits: {steps} or more</small>"
    return f'<div>{legend}<div dir="auto" style="{_TEXT}">{shown}</div>{more}</div>'


def _piece(data: bytes, bits: float | None) -> str:
    """Return a token; a space before a word has no colour, as at the end of a line."""
    text = _UNSEEN.sub(lambda sign: f"\\u{ord(sign[0]):04x}", data.decode())
    word = text.lstrip(" ") or text
    return text.removesuffix(word) + _coloured(word, bits)


def _coloured(text: str, bits: float | None) -> str:
    """Return text in the colour of bits, which a tooltip names."""
    colour = of_bits(bits or 0)
    style = f"; background: {colour}; color: {ink(colour)}" if colour else ""
    title = "" if bits is None else f' title="{bits:.2f} bits"'
    return f'<span style="border-radius: 2px{style}"{title}>{escape(text)}</span>'
