"""Views of `gpt-cli show` as pictures: maps of attention, and of effects on a logit."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpt_cli.cli.files import rendered
from gpt_cli.cli.show.terminal import cut
from gpt_cli.display.colours import SIGNED
from gpt_cli.display.labels import token_label
from gpt_cli.display.views import AttentionView, GridView, pooled

_MAX_LABELS = 80  # beside a map
_MAX_LABEL = 20  # characters of a label
_MAX_DOTS = 1500  # of all maps in a row


def picture(view: AttentionView | GridView, file: Path) -> bytes:
    """Draw a view in the format of a file's ending."""
    from matplotlib import rc_context

    with warnings.catch_warnings(), rc_context({"text.parse_math": False}):
        warnings.filterwarnings("ignore", "Glyph .* missing")  # matplotlib draws a box
        figure = _attention(view) if isinstance(view, AttentionView) else _effects(view)
        return rendered(figure, file)


def _attention(view: AttentionView) -> Any:
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
            labels = _cut([token_label(token) for token in view.tokens])
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
    _finish(figure, image, title)
    figure.colorbar(image, shrink=0.6, format=lambda share, _: f"{share:.0%}")
    return figure


def _grid(weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Join (L, H, T, T) to one map with lines between; masked weights and lines are NaN."""
    layers, heads, T, _ = weights.shape
    visible = np.where(np.tri(T, dtype=bool), weights, np.nan)
    padded = np.pad(visible, [(0, 0), (0, 0), (0, 1), (0, 1)], constant_values=np.nan)
    grid = padded.swapaxes(1, 2).reshape(layers * (T + 1), heads * (T + 1))
    return grid[:-1, :-1]


def _effects(view: GridView) -> Any:
    """Draw values by row and column: negative ones in red, positive ones in blue."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure

    values = np.array(view.values)
    rows, columns = values.shape
    limit = float(abs(values).max()) or 1.0
    figure = Figure((max(5.0, 0.4 * columns) + 2, max(2.5, 0.25 * rows) + 1), layout="constrained")
    axes = figure.add_subplot()
    colours = LinearSegmentedColormap.from_list("signed", SIGNED)
    image = axes.imshow(values, colours, vmin=-limit, vmax=limit, aspect="auto")
    axes.set_xticks(range(columns), view.columns)
    if rows <= _MAX_LABELS:
        axes.set_yticks(range(rows), _cut(view.rows))
    axes.set(xlabel=view.axes[1], ylabel=view.axes[0])
    _finish(figure, image, f"{view.model}: {view.title}")
    figure.colorbar(image)
    return figure


def _cut(labels: Sequence[str]) -> list[str]:
    return [cut(label, _MAX_LABEL) for label in labels]


def _finish(figure: Any, image: Any, title: str) -> None:
    """Add the title, and remove the frame and the ticks of the axes."""
    figure.suptitle(title, wrap=True)
    image.axes.tick_params(length=0)
    image.axes.spines[:].set_visible(False)
