"""What `gpt-cli show` shows, as text: blocks of colour, or characters where there is none."""

import math
import sys
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len, set_cell_size
from rich.console import Console, RenderableType
from rich.style import Style
from rich.text import Text

from gpt_cli.cli.layout import bar, quoted, token_label
from gpt_cli.cli.show.views import Attention, Branch, Lens, Surprise, Token, Tree, View, pooled
from gpt_cli.cli.streams import on_terminal, visible, write

# Shares from 0 to 1 have the colours of viridis, by their square root; without colours, characters.
_VIRIDIS = ("#440154", "#3b528b", "#21918c", "#5ec962", "#fde725")
_SHARES = (0, 0.04, 0.16, 0.36, 0.64)
_CHARACTERS = "·░▒▓█"
_NUMBER, _NARROWEST = 5, 30  # columns: of a share as a number, and that are needed at all
_SCREEN = 20  # lines, after which what stood above them may be gone
# Bits have a colour for each step (OrRd of ColorBrewer); below 1, none. All eyes can tell them.
_BITS = (1, 2, 4, 8, 16)
_OR_RD = ("#fef0d9", "#fdcc8a", "#fc8d59", "#e34a33", "#b30000")


def print_view(view: View) -> None:
    """Print a view as wide as the terminal is, in colour where it has colours."""
    # rich would leave a column free in a pipe of Windows, as for an old console.
    legacy = None if on_terminal(sys.stdout) else False
    console = Console(
        file=sys.stdout, highlight=False, markup=False, emoji=False, legacy_windows=legacy
    )
    # 16 colours are those of the terminal's theme, and not ours.
    coloured = console.color_system in ("256", "truecolor") and not console.no_color
    with console.capture() as captured:
        for part in parts(view, max(console.width, _NARROWEST), coloured=coloured):
            console.print(part)
    write(captured.get(), escapes=coloured)


def parts(view: View, width: int, *, coloured: bool) -> Iterator[RenderableType]:
    """Yield the parts of a view, each from a line of its own on."""
    match view:
        case Attention():
            found = _attention(view, width, coloured)
        case Lens():
            found = _lens(view, width, coloured)
        case Surprise():
            found = _surprise(view, width, coloured)
        case Tree():
            found = _tree(view, width, coloured)
    return found


# --- attention -----------------------------------------------------------------------------------


def _attention(view: Attention, width: int, coloured: bool) -> Iterator[RenderableType]:
    yield Text(f"{view.model}: what each token takes from those before it, {_whose(view)}\n")
    T = len(view.tokens)
    names = [
        f"{place:{len(str(T - 1))}} {token_label(token)}" for place, token in enumerate(view.tokens)
    ]
    most = max(len(str(T - 1)) + 7, width // 4)
    names = _padded([cut(name, most) for name in names])
    room = width - cell_len(names[0]) - 1
    rows, together = pooled(view.weights.mean(axis=(0, 1)), room)
    columns = next((wide for wide in (_NUMBER, 2) if wide * len(rows) <= room), 1)  # of a block
    marks = [f"{place:<10}" for place in range(0, T, 10 // columns * together)]
    ruler = Text(" " * (width - room) + "".join(marks[: room // 10]).rstrip(), no_wrap=True)
    yield ruler
    for place, (name, row) in enumerate(zip(names[::together], rows, strict=True)):
        line = Text(f"{name} ", no_wrap=True)
        for share in row[: place + 1].tolist():
            line.append_text(_block(share, columns, coloured))
        yield line if coloured else _bare(line)
    if len(rows) > _SCREEN:
        yield ruler
    if coloured or columns < _NUMBER:
        yield _legend_of_shares(coloured)
    if together > 1:
        yield Text(f"A block is {together} x {together} tokens, and shows the most of them.")
    if len(view.layers) * len(view.heads) > 1 and T > 1:
        yield from _tendencies(view, width)


def _whose(view: Attention) -> str:
    if len(view.heads) == 1:
        return f"by head {view.heads[0]} of layer {view.layers[0]}"
    if len(view.layers) == 1:
        return f"in the mean of the {len(view.heads)} heads of layer {view.layers[0]}"
    return f"in the mean of {len(view.layers)} layers with {len(view.heads)} heads each"


def _tendencies(view: Attention, width: int) -> Iterator[RenderableType]:
    """Which heads look most at three places that there are names for."""
    rows = np.arange(1, len(view.tokens))
    places = {"the token before": rows - 1, "the first token": 0 * rows, "the token itself": rows}
    yield Text("\nWhich heads look most (layer.head), and how much, at")
    for name, columns in places.items():
        means: NDArray[np.float32] = view.weights[:, :, rows, columns].mean(axis=-1)
        best = np.argsort(-means, axis=None, kind="stable")[: (width - 16) // 12]
        line = f"{name:16}"
        for layer, head in zip(*np.unravel_index(best, means.shape), strict=True):
            number = f"{view.layers[layer]}.{view.heads[head]}"
            line += f"{number:>7}{means[layer, head]:5.0%}"
        yield Text(line, no_wrap=True)


# --- lens ----------------------------------------------------------------------------------------


def _lens(view: Lens, width: int, coloured: bool) -> Iterator[RenderableType]:
    prompt = b"".join(bytes(token["bytes"]) for token in view.tokens)
    yield Text(f"{view.model}: the next token as each layer would predict it, after\n")
    yield Text(f"{_end(quoted(prompt), width)}\n")
    last = [predictions[-1] for predictions in view.predictions]  # (layers, the likeliest first)
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
        yield line if coloured else _bare(line)
    if coloured:
        yield _legend_of_shares(coloured)


# --- surprise ------------------------------------------------------------------------------------


def _surprise(view: Surprise, width: int, coloured: bool) -> Iterator[RenderableType]:
    pieces = list(_characters(view.tokens))
    if coloured:
        text = Text()
        for data, bits in pieces:
            piece = visible(data.decode())
            word = piece.lstrip(" ") or piece
            # Before a word, a space in colour would be left alone where a line ends.
            text.append(" " * (len(piece) - len(word))).append(word, _bits_style(bits or 0))
        yield text
        legend = Text("\nbits: ")
        for bound in _BITS:
            legend.append(f" {bound} ", _bits_style(bound))
        yield legend
    else:
        names = _padded([cut(quoted(data), max(8, width // 3)) for data, _ in pieces])
        numbers = ["" if bits is None else f"{bits:.2f}" for _, bits in pieces]
        digits = max(6, *map(len, numbers))
        room = width - digits - cell_len(names[0]) - 4
        header = set_cell_size("token", cell_len(names[0]))
        yield Text(f"{'bits':>{digits}}  {header}  bar: to {_BITS[-1]}\n")
        for name, number, (_, bits) in zip(names, numbers, pieces, strict=True):
            drawn = bar(min((bits or 0) / _BITS[-1], 1) * room)
            yield Text(f"{number:>{digits}}  {name}  {drawn}".rstrip(), no_wrap=True)
        yield Text()
    known = [-token["logprob"] / math.log(2) for token in view.tokens[1:]]
    perplexity = "beyond all numbers" if view.perplexity is None else f"{view.perplexity:.4g}"
    yield Text(
        f"{view.model}: {len(known) + 1} tokens ({len(known)} scored), "
        f"{math.fsum(known) / len(known):.2f} bits each, perplexity {perplexity}"
    )


def _characters(tokens: Sequence[Token]) -> Iterator[tuple[bytes, float | None]]:
    """Tokens and their bits; those that are only together a character, in one."""
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


# --- tree ----------------------------------------------------------------------------------------


def _tree(view: Tree, width: int, coloured: bool) -> Iterator[RenderableType]:
    yield Text(f"{view.model}: the chance of each token, and of all since the prompt\n")
    yield _line(" chance in all  ", _end(quoted(view.prompt.encode()), width - 16))
    yield from _branches(view.branches, "", coloured)


def _branches(branches: Sequence[Branch], indent: str, coloured: bool) -> Iterator[Text]:
    """A line for each token; more to the right only where there is something to choose."""
    for place, branch in enumerate(branches, 1):
        fork, below = ("└ ", "  ") if place == len(branches) else ("├ ", "│ ")
        if len(branches) == 1:
            fork = below = "" if indent else "  "
        own = math.exp(branch.token["logprob"])
        line = _line(f"{_percent(own):>7}{_percent(branch.probability):>7}  ", indent + fork)
        yield line.append(token_label(branch.token), _share_style(own) if coloured else None)
        yield from _branches(branch.branches, indent + below, coloured)


def _line(*texts: str) -> Text:
    return Text("".join(texts), no_wrap=True, overflow="ellipsis")


# --- what they share -----------------------------------------------------------------------------


def _block(share: float, columns: int, coloured: bool) -> Text:
    """A share in its colour; where there is room its number, else without colours a character."""
    text = f"{share:4.0%} " if columns == _NUMBER else " " * columns
    if coloured:
        return Text(text, _share_style(share))
    character = _CHARACTERS[sum(share >= bound for bound in _SHARES[1:])]
    return Text(text if columns == _NUMBER else character * columns)


def _percent(probability: float, digits: int = 1) -> str:
    """A percentage, of which nothing is left out that is not 0."""
    least = 10.0**-digits / 100
    return f"<{least:.{digits}%}" if 0 < probability < least / 2 else f"{probability:.{digits}%}"


def _legend_of_shares(coloured: bool) -> Text:
    """Each step with its lower bound."""
    legend = Text("\n")
    for bound in (*_SHARES, 1) if coloured else _SHARES:
        if coloured:
            legend.append(f" {bound:.0%} ", _share_style(bound))
        else:
            legend.append_text(_block(bound, 1, coloured)).append(f" {bound:.0%}  ")
    return legend if coloured else _bare(legend)


def _bare(line: Text) -> Text:
    """The line without spaces at its end."""
    line.rstrip()
    return line


def _share_style(share: float) -> Style:
    place = math.sqrt(share) * (len(_VIRIDIS) - 1)
    index = min(int(place), len(_VIRIDIS) - 2)
    below, above = (
        np.frombuffer(bytes.fromhex(_VIRIDIS[i][1:]), np.uint8) for i in (index, index + 1)
    )
    colour = below + (place - index) * (above.astype(float) - below)
    return _on(f"#{colour.round().astype(np.uint8).tobytes().hex()}")


def _bits_style(bits: float) -> Style:
    step = sum(bits >= bound for bound in _BITS)
    return _on(_OR_RD[step - 1]) if step else Style.null()


def _on(colour: str) -> Style:
    """A background, and for a text on it what can be read there, whatever the terminal's theme."""
    light = (np.frombuffer(bytes.fromhex(colour[1:]), np.uint8) / 255) ** 2.2
    bright = light @ (0.2126, 0.7152, 0.0722) > 0.18  # where black and white stand out alike
    return Style(color="#000000" if bright else "#ffffff", bgcolor=colour)


def _padded(texts: Sequence[str]) -> list[str]:
    width = max(map(cell_len, texts))
    return [set_cell_size(text, width) for text in texts]


def cut(text: str, width: int) -> str:
    """Return a text, or its beginning where it is wider than it may be."""
    return text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


def _end(text: str, width: int) -> str:
    """A text in quotes, or its end where it is wider than it may be."""
    if len(text) > width:
        text = '"…' + text[2 - width :]
    while cell_len(text) > width:
        text = '"…' + text[3:]
    return text
