"""What `gpt-cli show` shows, as a picture: maps of attention, and else what a terminal shows."""

import io
import warnings
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.segment import Segment

from gpt_cli.cli.layout import token_label
from gpt_cli.cli.show.terminal import cut, parts
from gpt_cli.cli.show.views import Attention, View, pooled
from gpt_cli.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS, _MOST_LINES = 100, 1000
_FONT, _CELL, _LINE = 10, 0.602 * 10 / 72, 0.19  # points; of a character of it, inches
_DOTS = 150  # an inch
_MOST_LABELS, _LONGEST_NAME = 80, 20  # tokens that are named beside a map, characters of a name
_MOST_DOTS = 1500  # of all maps beside one another


def picture(view: View) -> bytes:
    """Draw a view as a PNG.

    Raises:
        InputError: it would be too long.
    """
    from matplotlib import rc_context

    figure = _maps(view) if isinstance(view, Attention) else _text(view)
    drawn = io.BytesIO()
    # Unhinted letters are as wide as the font says, so that columns line up.
    with warnings.catch_warnings(), rc_context({"text.hinting": "none"}):
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a box stands for it
        figure.savefig(drawn, format="png", dpi=_DOTS)
    return drawn.getvalue()


def _maps(view: Attention) -> "Figure":
    """All heads beside one another: layers downwards, heads to the right; or one head, named."""
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure  # no pyplot: nothing asks for a display

    layers, heads, T, _ = view.weights.shape
    weights, together = pooled(view.weights, _MOST_DOTS // heads)
    n = weights.shape[-1]
    one = layers * heads == 1
    size = max(5.0, min(14.0, 0.22 * T if one else 0.8 * heads))
    figure = Figure((size + 1.5, size * layers / heads + 1.2), layout="constrained")
    axes = figure.add_subplot()
    norm = PowerNorm(0.5, 0, 1)  # most weights are small
    image = axes.imshow(_side_by_side(weights), norm=norm, interpolation="nearest")
    if one:
        title = f"{view.model}: layer {view.layers[0]}, head {view.heads[0]}"
        if T <= _MOST_LABELS:
            names = [cut(token_label(token), _LONGEST_NAME) for token in view.tokens]
            axes.set_xticks(range(T), names, rotation=90, parse_math=False)
            axes.set_yticks(range(T), names, parse_math=False)
        axes.set_xlabel("takes from")
        axes.set_ylabel("token")
    else:
        title = f"{view.model}: how much each token (row) takes from each (column), by head"
        middle = (n - 1) / 2
        axes.set_xticks([middle + (n + 1) * place for place in range(heads)], map(str, view.heads))
        axes.set_yticks(
            [middle + (n + 1) * place for place in range(layers)], map(str, view.layers)
        )
        axes.set_xlabel("head")
        axes.set_ylabel("layer")
    if together > 1:
        title += f"; a dot is {together} x {together} tokens, of which it shows the most"
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.suptitle(title, wrap=True, parse_math=False)
    figure.colorbar(image, shrink=0.6, format=lambda share, _: f"{share:.0%}")
    return figure


def _side_by_side(weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """(L, H, T, T) as one map, with lines between; what a token cannot see is left blank."""
    layers, heads, T, _ = weights.shape
    whole = np.full((layers, T + 1, heads, T + 1), np.nan, np.float32)
    seen = np.where(np.tri(T, dtype=bool), weights, np.nan)
    whole[:, :T, :, :T] = seen.transpose(0, 2, 1, 3)
    return whole.reshape(layers * (T + 1), heads * (T + 1))[:-1, :-1]


def _text(view: View) -> "Figure":
    """What a terminal of some columns shows, character for character."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    console = Console(
        file=io.StringIO(), width=_COLUMNS, force_terminal=True, color_system="truecolor"
    )
    segments = (
        piece for part in parts(view, _COLUMNS, coloured=True) for piece in console.render(part)
    )
    lines = list(Segment.split_lines(segments))
    if len(lines) > _MOST_LINES:
        raise InputError(
            f"the picture would have {len(lines)} lines, more than {_MOST_LINES}: shorten the text"
        )
    figure = Figure(((_COLUMNS + 2) * _CELL, (len(lines) + 1) * _LINE))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-1, _COLUMNS + 1), ylim=(len(lines) + 0.5, -0.5))
    axes.set_axis_off()
    for place, line in enumerate(lines):
        column = 0
        for text, style, _ in line:
            width = Segment(text).cell_length
            if style is not None and style.bgcolor is not None:
                colour = style.bgcolor.get_truecolor().hex
                axes.add_patch(Rectangle((column, place), width, 1, color=colour, linewidth=0))
            ink = "#000000" if style is None or style.color is None else style.color.name
            axes.text(
                column,
                place + 0.5,
                text,
                color=ink,
                family="monospace",
                fontsize=_FONT,
                va="center_baseline",
                parse_math=False,
            )
            column += width
    return figure
