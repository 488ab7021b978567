"""Views of `gpt-cli show` as text: coloured cells, or characters without colours."""

import math
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.style import Style
from rich.text import Text

from gpt_cli.cli.output import bar, on_terminal, visible, write
from gpt_cli.display import views
from gpt_cli.display.colours import BITS, SHARES, SIGNED, between, ink, of_bits
from gpt_cli.display.labels import quoted, token_data, token_label
from gpt_cli.records import Record

_MOST_BITS = max(BITS)  # of a bar
# Shares from 0 to 1 without colours: lower bounds of characters.
_CHARACTERS = {0: "·", 0.04: "░", 0.16: "▒", 0.36: "▓", 0.64: "█"}
# Values from -1 to 1 without colours: characters, and the sizes that separate them.
_SIGNS = "=-·+#"
_STEPS = (0.125, 0.5)
_NUMBER = 5  # columns of a share as a number
_MIN_WIDTH = 30  # columns
_SCREEN = 20  # lines that surely fit a screen


def print_view(view: views.View) -> None:
    """Print a view in the width of the terminal, with colours if it has 256 or more."""
    # In a pipe on Windows, rich would leave a column free, as an old console needs it.
    legacy = None if on_terminal(sys.stdout) else False
    console = Console(file=sys.stdout, legacy_windows=legacy)
    # The terminal's theme chooses 16 colours, so their order is unknown.
    coloured = console.color_system in ("256", "truecolor") and not console.no_color
    with console.capture() as captured:
        for part in parts(view, max(console.width, _MIN_WIDTH), coloured=coloured):
            console.print(part)
    write(captured.get(), escapes=coloured)


def parts(view: views.View, width: int, *, coloured: bool) -> Iterator[Text]:
    """Return the parts of a view. Each begins on a new line."""
    drawers = {"attention": _attention, "lens": _lens, "surprise": _surprise, "tree": _tree}
    draw: Any = drawers.get(view.view, _grid)
    return draw(view, width, coloured)


def _attention(view: views.AttentionView, width: int, coloured: bool) -> Iterator[Text]:
    yield Text(f"{view.model}: how much each token attends to earlier tokens, {_source(view)}\n")
    T = len(view.tokens)
    digits = len(str(T - 1))
    labels = [f"{i:{digits}} {token_label(token)}" for i, token in enumerate(view.tokens)]
    labels = _column(labels, max(digits + 7, width // 4))
    room = width - cell_len(labels[0]) - 1
    rows, size = views.pooled(view.weights.mean(axis=(0, 1)), room)
    columns = next((wide for wide in (_NUMBER, 2) if wide * len(rows) <= room), 1)  # of a cell
    marks = [f"{i:<10}" for i in range(0, T, 10 // columns * size)]
    ruler = Text(" " * (width - room) + "".join(marks[: room // 10]).rstrip(), no_wrap=True)
    yield ruler
    for i, (label, row) in enumerate(zip(labels[::size], rows, strict=True)):
        line = Text(f"{label} ", no_wrap=True)
        for share in row[: i + 1].tolist():
            line.append(_cell(share, columns, coloured), _share_style(share, coloured))
        if not coloured:
            line.rstrip()
        yield line
    if len(rows) > _SCREEN:
        yield ruler
    if coloured or columns < _NUMBER:
        yield _share_legend(coloured)
    if size > 1:
        yield Text(f"A cell shows the maximum of {size} x {size} tokens.")
    if len(view.layers) * len(view.heads) > 1 and T > 1:
        yield from _notable_heads(view, width)


def _source(view: views.AttentionView) -> str:
    heads = len(view.layers) * len(view.heads)
    if heads == 1:
        return f"head {view.heads[0]} of layer {view.layers[0]}"
    layer = f"heads of layer {view.layers[0]}"
    return f"mean of the {heads} {layer}" if len(view.layers) == 1 else f"mean of all {heads} heads"


def _cell(share: float, columns: int, coloured: bool) -> str:
    """Return the number of a share if there is room, else spaces for a colour, or characters."""
    if columns == _NUMBER:
        return f"{share:4.0%} "
    filling = [sign for bound, sign in _CHARACTERS.items() if share >= bound]
    return (" " if coloured else filling[-1]) * columns


def _notable_heads(view: views.AttentionView, width: int) -> Iterator[Text]:
    """Yield the heads that attend most to three targets."""
    rows = np.arange(1, len(view.tokens))
    targets = {"the token before": rows - 1, "the first token": 0 * rows, "the token itself": rows}
    yield Text("\nHeads (layer.head) with the highest mean attention to")
    for name, columns in targets.items():
        means: NDArray[np.float32] = view.weights[:, :, rows, columns].mean(axis=-1)
        best = np.argsort(-means, axis=None, kind="stable")[: (width - 16) // 12]
        line = f"{name:16}"
        for index in best.tolist():
            layer, head = divmod(index, len(view.heads))
            number = f"{view.layers[layer]}.{view.heads[head]}"
            line += f"{number:>7}{means[layer, head]:5.0%}"
        yield Text(line, no_wrap=True)


def _lens(view: views.LensView, width: int, coloured: bool) -> Iterator[Text]:
    prompt = b"".join(map(token_data, view.tokens))
    yield Text(f"{view.model}: the next token that each layer would predict after\n")
    yield Text(f"{_end(quoted(prompt), width)}\n")
    last = [layer[-1] for layer in view.predictions]  # after the last token, likeliest first
    names = _column(view.layers, width)
    room = width - cell_len(names[0]) - 1
    longest = max(cell_len(token_label(token)) for token in chain.from_iterable(last))
    columns = min(longest, 16, room - _NUMBER - 1)  # of a token
    for name, tokens in zip(names, last, strict=True):
        line = Text(name, no_wrap=True)
        for token in tokens[: room // (columns + _NUMBER + 1)]:
            probability = math.exp(token["logprob"])
            label = set_cell_size(cut(token_label(token), columns), columns)
            text = f"{label}{_percent(probability, 0):>{_NUMBER}}"
            line.append(" ").append(text, _share_style(probability, coloured))
        yield line
    if coloured:
        yield _share_legend(coloured)


def _surprise(view: views.SurpriseView, width: int, coloured: bool) -> Iterator[Text]:
    pieces = list(views.characters(view.tokens))
    if coloured:
        text = Text()
        for data, bits in pieces:
            piece = visible(data.decode())
            word = piece.lstrip(" ") or piece
            # At a line break, a coloured space before a word would stay at the end of the line.
            text.append(" " * (len(piece) - len(word)))
            text.append(word, _bits_style(bits or 0))
        yield text
        legend = [(f" {bound} ", _bits_style(bound)) for bound in BITS]
        yield Text.assemble("\nbits: ", *legend, " or more")
    else:
        texts = [quoted(data) for data, _ in pieces]
        header, *labels = _column(["token", *texts], max(8, width // 3))
        numbers = ["" if bits is None else f"{bits:.2f}" for _, bits in pieces]
        digits = max(6, *map(len, numbers))
        room = width - digits - cell_len(header) - 4
        more = ", >: more" if any((bits or 0) > _MOST_BITS for _, bits in pieces) else ""
        yield Text(f"{'bits':>{digits}}  {header}  bar: 0 to {_MOST_BITS}{more}\n")
        for label, number, (_, bits) in zip(labels, numbers, pieces, strict=True):
            line = f"{number:>{digits}}  {label}  {_bits_bar(bits or 0, room)}"
            yield Text(line.rstrip(), no_wrap=True)
        yield Text()
    yield Text(f"{view.model}: {view.summary}")


def _bits_bar(bits: float, columns: int) -> str:
    """Return a bar; one that is cut off at `_MOST_BITS` ends in `>`."""
    return bar(columns - 1) + ">" if bits > _MOST_BITS else bar(bits / _MOST_BITS * columns)


def _tree(view: views.TreeView, width: int, coloured: bool) -> Iterator[Text]:
    yield Text(f"{view.model}: the probability of each token, and of its path from the prompt\n")
    yield Text(f"  token   path  {_end(quoted(view.prompt.encode()), width - 16)}", no_wrap=True)
    yield from _branches(view.branches, "", coloured)


def _branches(branches: Sequence[Record], indent: str, coloured: bool) -> Iterator[Text]:
    """Yield a line per token, indented only below a choice."""
    for branch in branches:
        if len(branches) == 1:
            fork = below = "" if indent else "  "
        elif branch is branches[-1]:
            fork, below = "└ ", "  "
        else:
            fork, below = "├ ", "│ "
        token = branch["token"]
        probability = math.exp(token["logprob"])
        numbers = f"{_percent(probability):>7}{_percent(branch['probability']):>7}  "
        line = Text(f"{numbers}{indent}{fork}", no_wrap=True, overflow="ellipsis")
        yield line.append(token_label(token), _share_style(probability, coloured))
        yield from _branches(branch["branches"], indent + below, coloured)


def _grid(view: views.GridView, width: int, coloured: bool) -> Iterator[Text]:
    yield Text(f"{view.model}: {view.title}")
    yield from map(Text, view.notes)
    values = np.array(view.values)
    limit = float(abs(values).max()) or 1.0
    blank, *labels = _column(["", *view.rows], max(5, width // 3))
    room = width - cell_len(blank) - 1
    cells = _signed_cells(values, limit, room // len(view.columns), coloured)
    columns = len(cells[0][0])
    step = -(-max(map(len, view.columns)) // max(1, columns - 1))  # names are wider than cells
    names = "".join(f"{name:>{columns}}".ljust(columns * step) for name in view.columns[::step])
    yield Text(f"\n{blank} {names[:room].rstrip()}", no_wrap=True)
    for label, row, texts in zip(labels, values / limit, cells, strict=True):
        line = Text(f"{label} ", no_wrap=True)
        for share, text in zip(row, texts[:room], strict=False):
            line.append(text, _signed_style(share) if coloured else Style.null())
        yield line
    yield Text()
    if coloured:
        shares = np.linspace(-1, 1, 5)
        yield Text.assemble(*((f" {x * limit:+z.2f} ", _signed_style(x)) for x in shares))
    elif columns < _NUMBER:
        less, more = (f"{share * limit:.2g}" for share in _STEPS)
        yield Text(f"= to -{more}  - to -{less}  + from +{less}  # from +{more}")
    order = np.argsort(-abs(values), axis=None, kind="stable")[: width // 16]
    between = "." if view.axes[1] == "head" else f", {view.axes[1]} "
    largest = []
    for index in order.tolist():
        i, j = divmod(index, len(view.columns))
        largest.append(f"{view.rows[i]}{between}{view.columns[j]} {values[i, j]:+z.2f}")
    yield Text(f"largest: {'; '.join(largest)}")


def _signed_cells(
    values: NDArray[np.float64], limit: float, room: int, coloured: bool
) -> list[list[str]]:
    """Return texts of one width, at most `room`: numbers if they fit, else spaces or signs."""
    digits = min(2, 2 - math.floor(math.log10(limit)))
    for decimals in (max(0, digits), max(0, digits - 1)):
        texts = [[f" {value:+z.{decimals}f}" for value in row] for row in values]
        columns = max(len(text) for row in texts for text in row)
        if columns <= room:
            return [[f"{text:>{columns}}" for text in row] for row in texts]
    steps = np.searchsorted(_STEPS, abs(values / limit), side="right")
    signs = np.where(values < 0, 2 - steps, 2 + steps)
    columns = max(1, min(room, 2))
    return [[" " * columns if coloured else _SIGNS[i] * columns for i in row] for row in signs]


def _percent(probability: float, digits: int = 1) -> str:
    """Return a percentage; one that would be rounded to 0 gets a `<`."""
    least = 10.0**-digits / 100
    return f"<{least:.{digits}%}" if 0 < probability < least / 2 else f"{probability:.{digits}%}"


def _share_legend(coloured: bool) -> Text:
    if not coloured:
        return Text("\n" + "  ".join(f"{sign} {bound:.0%}" for bound, sign in _CHARACTERS.items()))
    bounds = [*_CHARACTERS, 1]
    return Text.assemble("\n", *((f" {bound:.0%} ", _share_style(bound)) for bound in bounds))


def _share_style(share: float, coloured: bool = True) -> Style:
    return _on(between(SHARES, math.sqrt(share))) if coloured else Style.null()


def _signed_style(share: float) -> Style:
    """Return the colour of a share from -1 to 1."""
    return _on(between(SIGNED, (share + 1) / 2))


def _bits_style(bits: float) -> Style:
    colour = of_bits(bits)
    return _on(colour) if colour else Style.null()


def _on(colour: str) -> Style:
    """Return a background, with text that can be read on it."""
    return Style(color=ink(colour), bgcolor=colour)


def _column(texts: Sequence[str], most: int) -> list[str]:
    """Cut and pad texts to one width, at most `most` columns."""
    width = min(most, max(map(cell_len, texts)))
    return [set_cell_size(cut(text, width), width) for text in texts]


def cut(text: str, width: int) -> str:
    """Return a text, or its beginning if it is wider than `width` columns."""
    return text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


def _end(text: str, width: int) -> str:
    """Return a quoted text, or its end if it is wider than `width` columns."""
    backwards = text[:0:-1]  # without the first quote
    return '"' + cut(backwards, width - 1)[::-1]
