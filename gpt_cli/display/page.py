"""Views as web pages: interactive files that load nothing."""

import base64
import hashlib
import html
import json
from functools import cached_property
from pathlib import Path
from string import Template

import numpy as np

from gpt_cli.display.colours import BITS, SHARES, SIGNED
from gpt_cli.display.views import AttentionView, GridView, SurpriseView, View
from gpt_cli.errors import InputError, brief
from gpt_cli.options.declare import OptionError
from gpt_cli.system.atomic import write_file
from gpt_cli.texts.result import Result

_MAX_BYTES = 64_000_000  # of a page, so that a phone can show it
_MAX_FRAME = 10_000_000  # characters of a page in a notebook, whose file has all outputs
_HEIGHT = 720  # of a frame, in pixels
_ENDINGS = (".html", ".htm")
_MAX_TOKENS = 20_000  # of a text in `surprise`; all are nodes, and more take many seconds


class Page(Result):
    """A view as a page: a notebook displays it, and `save` writes it to a file."""

    def __init__(self, view: View):
        self.view: View = view  # its data

    @cached_property
    def html(self) -> str:
        """The page; InputError if a browser could not show it."""
        return page(self.view)

    def save(self, path: str | Path) -> None:
        """Write the page to a file that ends with .html or .htm, which is replaced if it exists.

        Raise OptionError for another ending, and InputError if the file cannot be written.
        """
        if Path(path).suffix.lower() not in _ENDINGS:
            cure = "a page is HTML; `gpt-cli show --png FILE` draws maps as pictures"
            complaint = f"must end with {' or '.join(_ENDINGS)}, not {brief(Path(path).name, 80)}"
            raise OptionError("path", f"{complaint}: {cure}")
        write_file(Path(path), self.html.encode(), replace=True)

    def _facts(self) -> str:
        return f"{self.view.model}, {self.view.view}"

    def _repr_html_(self) -> str:
        return framed(self)


def framed(page: Page) -> str:
    """Return a page in a frame of a notebook, where it can neither load nor change anything.

    If the page is too large, return a line that says so.
    """
    try:
        text = page.html
    except InputError as error:
        return f"<p>{html.escape(str(error))}</p>"
    if len(text) > _MAX_FRAME:
        size = f"the page of {page.view.view} has {len(text) / 1e6:,.0f} MB, much for a notebook"
        return f"<p>{size}: show less, or save the page of Engine.show</p>"
    style = f"width: 100%; height: {_HEIGHT}px; border: 1px solid #8884; border-radius: 4px"
    # A notebook that is not trusted removes the frame, and shows the text in it.
    fallback = html.escape(f"{page!r}: run the cell to see the picture, or trust the notebook")
    frame = f'<iframe srcdoc="{html.escape(text)}" sandbox="allow-scripts" style="{style}">'
    return f"{frame}{fallback}</iframe>"


def page(view: View) -> str:
    """Return a view as a self-contained page; raise InputError if a browser could not show it."""
    if isinstance(view, SurpriseView) and len(view.tokens) > _MAX_TOKENS:
        raise InputError(
            f"the page would have {len(view.tokens):,} tokens, more than {_MAX_TOKENS:,}: "
            "shorten the text"
        )
    record = _packed(view) if isinstance(view, AttentionView) else view.record()
    # ASCII without `<` is safe within the page.
    data = json.dumps(record, allow_nan=False, separators=(",", ":")).replace("<", r"\u003c")
    _check_size(len(data))
    colours = json.dumps({"shares": SHARES, "bits": BITS, "signed": SIGNED})
    script_name = "grid" if isinstance(view, GridView) else view.view
    style = _part("page.css")
    scripts = _part("shared.js") + _part(f"{script_name}.js")
    script = f'"use strict";\nconst COLOURS = {colours};\n{scripts}'
    # The browser applies only this style and this script, whatever a prompt or a token contains.
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return Template(_part("page.html")).substitute(
        policy=policy,
        # Bytes of a path that are not UTF-8 become `?`.
        title=html.escape(f"{view.model} · {view.view}").encode(errors="replace").decode(),
        style=style,
        data=data,
        script=script,
    )


def _packed(view: AttentionView) -> dict[str, object]:
    """Return the record of a view, with the weights of each head as a text.

    It is base64 of the lower triangle, row by row, as little-endian 16-bit integers in units of
    1/65535.
    """
    layers, heads, T, _ = view.weights.shape
    _check_size(layers * heads * T * (T + 1) * 4 // 3)
    seen = np.tri(T, dtype=bool)
    weights = [
        [base64.b64encode(np.rint(head[seen] * 65535).astype("<u2")).decode() for head in layer]
        for layer in view.weights
    ]
    return view.record() | {"weights": weights}


def _check_size(size: int) -> None:
    if size > _MAX_BYTES:
        raise InputError(
            f"the page would have {size / 1e6:,.0f} MB, more than {_MAX_BYTES / 1e6:.0f}: "
            "shorten the text, or show less (--layer, --head, --top)"
        )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _part(name: str) -> str:
    return Path(__file__).with_name("web").joinpath(name).read_text(encoding="utf-8")
