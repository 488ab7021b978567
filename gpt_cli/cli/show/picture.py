"""Views of `gpt-cli show` as pictures: maps of attention; the others as on a terminal."""

import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.segment import Segment

from gpt_cli.cli.files import rendered
from gpt_cli.cli.output import token_label
from gpt_cli.cli.show.terminal import cut, parts
from gpt_cli.cli.show.views import AttentionView, View, pooled
from gpt_cli.errors import InputError

_COLUMNS, _MAX_LINES = 100, 1000
_FONT = 10  # points
_CELL, _LINE = 0.602 * _FONT / 72, 0.19  # width and height of a character in inches
_MAX_LABELS, _MAX_LABEL = 80, 20  # labelled tokens beside a map, and characters of a label
_MAX_DOTS = 1500  # of all maps in a row


def picture(view: View, file: Path) -> bytes:
    """Draw a view in the format of a file's ending; raise InputError if it would be too long."""
    from matplotlib import rc_context

    # Without hinting, characters have the font's exact width, so columns line up.
    with warnings.catch_warnings(), rc_context({"text.hinting": "none", "text.parse_math": False}):
        warnings.filterwarnings("ignore", "Glyph .* missing")  # matplotlib draws a box
        figure = _maps(view) if isinstance(view, AttentionView) else _text(view)
        return rendered(figure, file)


def _maps(view: AttentionView) -> Any:
    """Draw one head with its tokens, or a grid with a row per layer."""
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure  # pyplot would need a display

    layers, heads, T, _ = view.weights.shape
    weights, size = pooled(view.weights, _MAX_DOTS // heads)
    single = layers * heads == 1
    inches = max(5.0, min(14.0, 0.22 * T if single else 0.8 * heads))
    figure = Figure((inches + 1.5, inches * layers / heads + 1.2), layout="constrained")
    axes = figure.add_subplot()
    norm = PowerNorm(0.5, 0, 1)  # most weights are small
    image = axes.imshow(_grid(weights), norm=norm, interpolation="nearest")
    if single:
        title = f"{view.model}: layer {view.layers[0]}, head {view.heads[0]}"
        if T <= _MAX_LABELS:
            labels = [cut(token_label(token), _MAX_LABEL) for token in view.tokens]
            axes.set_xticks(range(T), labels, rotation=90)
            axes.set_yticks(range(T), labels)
        axes.set(xlabel="attends to", ylabel="token")
    else:
        title = f"{view.model}: attention of each token (row) to each token (column), by head"
        step = weights.shape[-1] + 1
        centers = step / 2 - 1 + step * np.arange(max(layers, heads))
        axes.set_xticks(centers[:heads], map(str, view.heads))
        axes.set_yticks(centers[:layers], map(str, view.layers))
        axes.set(xlabel="head", ylabel="layer")
    if size > 1:
        title += f"; a dot shows the maximum of {size} x {size} tokens"
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.suptitle(title, wrap=True)
    figure.colorbar(image, shrink=0.6, format=lambda share, _: f"{share:.0%}")
    return figure


def _grid(weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Join (L, H, T, T) to one map with lines between; masked weights and lines are NaN."""
    layers, heads, T, _ = weights.shape
    visible = np.where(np.tri(T, dtype=bool), weights, np.nan)
    padded = np.pad(visible, [(0, 0), (0, 0), (0, 1), (0, 1)], constant_values=np.nan)
    grid = padded.swapaxes(1, 2).reshape(layers * (T + 1), heads * (T + 1))
    return grid[:-1, :-1]


def _text(view: View) -> Any:
    """Draw the text of a terminal, character by character."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    console = Console(width=_COLUMNS, force_terminal=True, color_system="truecolor")
    rendered = map(console.render, parts(view, _COLUMNS, coloured=True))
    lines = list(Segment.split_lines(chain.from_iterable(rendered)))
    if len(lines) > _MAX_LINES:
        raise InputError(
            f"the picture would have {len(lines)} lines, more than {_MAX_LINES}: shorten the text"
        )
    figure = Figure(((_COLUMNS + 2) * _CELL, (len(lines) + 1) * _LINE))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-1, _COLUMNS + 1), ylim=(len(lines) + 0.5, -0.5))
    axes.set_axis_off()
    for y, line in enumerate(lines):
        x = 0
        for text, style, _ in line:
            width = Segment(text).cell_length
            ink = "#000000"
            if style is not None and style.color is not None and style.bgcolor is not None:
                ink, behind = style.color.name, style.bgcolor.name
                axes.add_patch(Rectangle((x, y), width, 1, color=behind, linewidth=0))
            axes.text(
                x, y + 0.5, text, color=ink, family="monospace", size=_FONT, va="center_baseline"
            )
            x += width
    return figure
