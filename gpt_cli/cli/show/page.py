"""What `gpt-cli show` shows, as a page to be explored in a browser: one file that loads nothing."""

import base64
import hashlib
import html
import json
from functools import cache
from pathlib import Path
from string import Template

import numpy as np

from gpt_cli.cli.show.views import Attention, Surprise, View
from gpt_cli.errors import InputError

_LIMIT = 64_000_000  # bytes that a browser opens without trouble, also that of a phone
_MOST_TOKENS = 20_000  # of a text in `surprise`, each a node of the page; more take many seconds

_LEADS = {
    "attention": (
        "What each token takes from itself and from those before it, by one head of one layer "
        "(counted from 0): choose a token of the text, and another head where there are several."
    ),
    "lens": (
        "Each cell is the next token that a layer (row, counted from 0) would predict after a "
        "token of the text (column), if the model ended there: choose a cell for its alternatives."
    ),
    "surprise": (
        "The redder a token, the less the model expected it after those before it: 1 bit is a "
        "chance of one half, 10 bits one in a thousand."
    ),
    "tree": (
        "The likeliest continuations: each token has its chance after the one that it hangs from, "
        "and the chance of all since the prompt; a click folds what follows it."
    ),
}


def page(view: View) -> str:
    """Return a view as a page that needs nothing else, not even a network.

    Raises:
        InputError: it would be too large for a browser.
    """
    if isinstance(view, Surprise) and len(view.tokens) > _MOST_TOKENS:
        raise InputError(
            f"the page would have {len(view.tokens):,} tokens, and browsers manage "
            f"{_MOST_TOKENS:,}: shorten the text"
        )
    kind = type(view).__name__.lower()
    data = _data(view)
    _check_size(len(data))
    style, script = _part("page.css"), _part("page.js")
    # Only this style and this script may run, whatever a prompt or a token may hold.
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return Template(_part("page.html")).substitute(
        policy=policy,
        title=_escaped(f"{view.model} · {kind}"),
        lead=_LEADS[kind],
        style=style,
        data=data,
        script=script,
    )


def _data(view: View) -> str:
    """Return a record as JSON that can stand in a page: in ASCII, and without any `<`."""
    if isinstance(view, Attention):
        record = {"view": "attention", **vars(view), "weights": _packed(view)}
    else:
        record = view.record()
    return json.dumps(record, allow_nan=False, separators=(",", ":")).replace("<", r"\u003c")


def _packed(view: Attention) -> list[list[str]]:
    """Return the weights of each head, row by row up to the diagonal: after it all are 0.

    They are multiples of 1/65535, as unsigned 16-bit numbers with the low byte first, in base64.
    """
    layers, heads, T, _ = view.weights.shape
    _check_size(layers * heads * T * (T + 1) * 4 // 3)
    rows, columns = np.tril_indices(T)
    return [
        [
            base64.b64encode(np.rint(head[rows, columns] * 65535).astype("<u2")).decode()
            for head in layer
        ]
        for layer in view.weights
    ]


def _check_size(size: int) -> None:
    if size > _LIMIT:
        raise InputError(
            f"the page would have {size / 1e6:,.0f} MB, and browsers manage {_LIMIT / 1e6:.0f}: "
            "shorten the text, or choose less of it (--layer, --head, --top)"
        )


def _escaped(text: str) -> str:
    """Return text as HTML, also of a path with bytes that are no UTF-8."""
    return html.escape(text).encode(errors="replace").decode()


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


@cache
def _part(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
