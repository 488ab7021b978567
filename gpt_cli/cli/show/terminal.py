"""Views of `gpt-cli show` as text: coloured blocks, or characters without colours."""

import math
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len, set_cell_size
from rich.console import Console, RenderableType
from rich.style import Style
from rich.text import Text

from gpt_cli.cli.layout import bar, quoted, token_label
from gpt_cli.cli.show.views import Attention, Branch, Lens, Surprise, Token, Tree, View, pooled
from gpt_cli.cli.streams import on_terminal, visible, write

# Shares from 0 to 1: viridis over their square root, or a character for each step.
_VIRIDIS = [*map(bytes.fromhex, ("440154", "3b528b", "21918c", "5ec962", "fde725"))]
_SHARES = (0, 0.04, 0.16, 0.36, 0.64)
_CHARACTERS = "·░▒▓█"
_NUMBER = 5  # columns of a share as a number
_MIN_WIDTH = 30  # columns
_SCREEN = 20  # lines that surely fit a screen
# Bits: a colour for each step (ColorBrewer's OrRd, safe for the colour-blind); none below 1.
_BITS = (1, 2, 4, 8, 16)
_OR_RD = [*map(bytes.fromhex, ("fef0d9", "fdcc8a", "fc8d59", "e34a33", "b30000"))]


def print_view(view: View) -> None:
    """Print a view in the width of the terminal, with colours if it has 256 or more."""
    # In a pipe on Windows, rich would leave a column free, as an old console needs it.
    legacy = None if on_terminal(sys.stdout) else False
    console = Console(
        file=sys.stdout, highlight=False, markup=False, emoji=False, legacy_windows=legacy
    )
    # The terminal's theme chooses 16 colours, so their order is unknown.
    coloured = console.color_system in ("256", "truecolor") and not console.no_color
    with console.capture() as captured:
        for part in parts(view, max(console.width, _MIN_WIDTH), coloured=coloured):
            console.print(part)
    write(captured.get(), escapes=coloured)


def parts(view: View, width: int, *, coloured: bool) -> Iterator[RenderableType]:
    """Return the parts of a view, which begin on new lines."""
    drawers: dict[Any, Any] = {Attention: _attention, Lens: _lens, Surprise: _surprise, Tree: _tree}
    return drawers[type(view)](view, width, coloured)


def _attention(view: Attention, width: int, coloured: bool) -> Iterator[RenderableType]:
    yield Text(f"{view.model}: how much each token attends to earlier tokens, {_source(view)}\n")
    T = len(view.tokens)
    digits = len(str(T - 1))
    names = [f"{place:{digits}} {token_label(token)}" for place, token in enumerate(view.tokens)]
    names = _padded([cut(name, max(digits + 7, width // 4)) for name in names])
    room = width - cell_len(names[0]) - 1
    rows, size = pooled(view.weights.mean(axis=(0, 1)), room)
    columns = next((wide for wide in (_NUMBER, 2) if wide * len(rows) <= room), 1)  # of a block
    marks = [f"{place:<10}" for place in range(0, T, 10 // columns * size)]
    ruler = Text(" " * (width - room) + "".join(marks[: room // 10]).rstrip(), no_wrap=True)
    yield ruler
    for place, (name, row) in enumerate(zip(names[::size], rows, strict=True)):
        line = Text(f"{name} ", no_wrap=True)
        for share in row[: place + 1].tolist():
            line.append_text(_block(share, columns, coloured))
        if not coloured:
            line.rstrip()
        yield line
    if len(rows) > _SCREEN:
        yield ruler
    if coloured or columns < _NUMBER:
        yield _share_legend(coloured)
    if size > 1:
        yield Text(f"A block shows the maximum of {size} x {size} tokens.")
    if len(view.layers) * len(view.heads) > 1 and T > 1:
        yield from _notable_heads(view, width)


def _source(view: Attention) -> str:
    if len(view.layers) * len(view.heads) == 1:
        return f"head {view.heads[0]} of layer {view.layers[0]}"
    if len(view.layers) == 1:
        return f"mean of the {len(view.heads)} heads of layer {view.layers[0]}"
    return f"mean of all {len(view.layers) * len(view.heads)} heads"


def _notable_heads(view: Attention, width: int) -> Iterator[Text]:
    """Yield the heads that attend most to each of three places."""
    rows = np.arange(1, len(view.tokens))
    places = {"the token before": rows - 1, "the first token": 0 * rows, "the token itself": rows}
    yield Text("\nHeads (layer.head) with the highest mean attention to")
    for name, columns in places.items():
        means: NDArray[np.float32] = view.weights[:, :, rows, columns].mean(axis=-1)
        best = np.argsort(-means, axis=None, kind="stable")[: (width - 16) // 12]
        line = f"{name:16}"
        for layer, head in zip(*np.unravel_index(best, means.shape), strict=True):
            number = f"{view.layers[layer]}.{view.heads[head]}"
            line += f"{number:>7}{means[layer, head]:5.0%}"
        yield Text(line, no_wrap=True)


def _lens(view: Lens, width: int, coloured: bool) -> Iterator[RenderableType]:
    prompt = b"".join(bytes(token["bytes"]) for token in view.tokens)
    yield Text(f"{view.model}: the next token that each layer would predict after\n")
    yield Text(f"{_end(quoted(prompt), width)}\n")
    last = [layer[-1] for layer in view.predictions]  # after the last token, likeliest first
    names = _padded(view.layers)
    room = width - cell_len(names[0]) - 1
    longest = max(cell_len(token_label(token)) for token in chain.from_iterable(last))
    cell = min(longest, 16, room - _NUMBER - 1)  # columns of a token
    for name, tokens in zip(names, last, strict=True):
        line = Text(name, no_wrap=True)
        for token in tokens[: room // (cell + _NUMBER + 1)]:
            probability = math.exp(token["logprob"])
            piece = set_cell_size(cut(token_label(token), cell), cell)
            style = _share_style(probability) if coloured else Style.null()
            line.append(" ").append(f"{piece}{_percent(probability, 0):>{_NUMBER}}", style)
        yield line
    if coloured:
        yield _share_legend(coloured)


def _surprise(view: Surprise, width: int, coloured: bool) -> Iterator[RenderableType]:
    pieces = list(_characters(view.tokens))
    if coloured:
        text = Text()
        for data, bits in pieces:
            piece = visible(data.decode())
            word = piece.lstrip(" ") or piece
            # At a line break, a coloured space before a word would stay at the end of the line.
            text.append(" " * (len(piece) - len(word))).append(word, _bits_style(bits or 0))
        yield text
        yield Text.assemble("\nbits: ", *((f" {step} ", _bits_style(step)) for step in _BITS))
    else:
        labels = [cut(quoted(data), max(8, width // 3)) for data, _ in pieces]
        header, *names = _padded(["token", *labels])
        numbers = ["" if bits is None else f"{bits:.2f}" for _, bits in pieces]
        digits = max(6, *map(len, numbers))
        room = width - digits - cell_len(header) - 4
        yield Text(f"{'bits':>{digits}}  {header}  bar: 0 to {_BITS[-1]}\n")
        for name, number, (_, bits) in zip(names, numbers, pieces, strict=True):
            drawn = bar(min((bits or 0) / _BITS[-1], 1) * room)
            yield Text(f"{number:>{digits}}  {name}  {drawn}".rstrip(), no_wrap=True)
        yield Text()
    known = [-token["logprob"] / math.log(2) for token in view.tokens[1:]]
    perplexity = "infinite" if view.perplexity is None else f"{view.perplexity:.4g}"
    yield Text(
        f"{view.model}: {len(known) + 1} tokens ({len(known)} scored), "
        f"{math.fsum(known) / len(known):.2f} bits each, perplexity {perplexity}"
    )


def _characters(tokens: Sequence[Token]) -> Iterator[tuple[bytes, float | None]]:
    """Yield tokens and their bits; tokens that share a character are merged."""
    data, bits = b"", 0.0
    for token in tokens:
        data += bytes(token["bytes"])
        bits -= (token["logprob"] or 0.0) / math.log(2)
        try:
            data.decode()
        except UnicodeDecodeError:
            continue
        yield data, None if token["logprob"] is None else bits
        data, bits = b"", 0.0


def _tree(view: Tree, width: int, coloured: bool) -> Iterator[RenderableType]:
    yield Text(f"{view.model}: the probability of each token, and of its path from the prompt\n")
    yield _line("  token   path  ", _end(quoted(view.prompt.encode()), width - 16))
    yield from _branches(view.branches, "", coloured)


def _branches(branches: Sequence[Branch], indent: str, coloured: bool) -> Iterator[Text]:
    """Yield a line for each token, indented only below a choice."""
    for place, branch in enumerate(branches, 1):
        fork, below = ("└ ", "  ") if place == len(branches) else ("├ ", "│ ")
        if len(branches) == 1:
            fork = below = "" if indent else "  "
        own = math.exp(branch["token"]["logprob"])
        line = _line(f"{_percent(own):>7}{_percent(branch['probability']):>7}  ", indent + fork)
        yield line.append(token_label(branch["token"]), _share_style(own) if coloured else None)
        yield from _branches(branch["branches"], indent + below, coloured)


def _line(*texts: str) -> Text:
    return Text("".join(texts), no_wrap=True, overflow="ellipsis")


def _block(share: float, columns: int, coloured: bool) -> Text:
    """Return a share as a block: its number if there is room, else its colour or character."""
    filling = " " if coloured else _CHARACTERS[sum(share >= bound for bound in _SHARES[1:])]
    text = f"{share:4.0%} " if columns == _NUMBER else filling * columns
    return Text(text, _share_style(share) if coloured else "")


def _percent(probability: float, digits: int = 1) -> str:
    """Return a percentage; one that would be rounded to 0 gets a `<`."""
    least = 10.0**-digits / 100
    return f"<{least:.{digits}%}" if 0 < probability < least / 2 else f"{probability:.{digits}%}"


def _share_legend(coloured: bool) -> Text:
    """Return each step with its lower bound."""
    if coloured:
        steps = ((f" {bound:.0%} ", _share_style(bound)) for bound in (*_SHARES, 1))
        return Text.assemble("\n", *steps)
    pairs = zip(_CHARACTERS, _SHARES, strict=True)
    return Text("\n" + "  ".join(f"{character} {bound:.0%}" for character, bound in pairs))


def _share_style(share: float) -> Style:
    place = math.sqrt(share) * (len(_VIRIDIS) - 1)
    step = min(int(place), len(_VIRIDIS) - 2)
    pairs = zip(_VIRIDIS[step], _VIRIDIS[step + 1], strict=True)
    return _on(bytes(round(low + (place - step) * (high - low)) for low, high in pairs))


def _bits_style(bits: float) -> Style:
    step = sum(bits >= bound for bound in _BITS)
    return _on(_OR_RD[step - 1]) if step else Style.null()


def _on(colour: bytes) -> Style:
    """Return a background with black or white text, whichever has the higher contrast."""
    light = (np.frombuffer(colour, np.uint8) / 255) ** 2.2
    bright = light @ (0.2126, 0.7152, 0.0722) > 0.18  # equal contrast
    return Style(color="#000000" if bright else "#ffffff", bgcolor=f"#{colour.hex()}")


def _padded(texts: Sequence[str]) -> list[str]:
    width = max(map(cell_len, texts))
    return [set_cell_size(text, width) for text in texts]


def cut(text: str, width: int) -> str:
    """Return a text, or its beginning if it is wider than `width` columns."""
    return text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


def _end(text: str, width: int) -> str:
    """Return a quoted text, or its end if it is wider than `width` columns."""
    if len(text) > width:
        text = '"…' + text[2 - width :]
    while cell_len(text) > width:
        text = '"…' + text[3:]
    return text
