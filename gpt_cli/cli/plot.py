"""Plots of the time per token against the position in the text, as text or as a picture."""

import io
import itertools
import statistics
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from gpt_cli.errors import ResourceError
from gpt_cli.system.atomic import check_file, write_file

if TYPE_CHECKING:
    from gpt_cli.checks.bench import Benchmark

_COLUMNS, _LINES = 60, 12
_X_LABEL = "position in the text, in tokens"
_Y_LABEL = "milliseconds for each token after the first"
# The mark of a mode, its colour (safe for the colour-blind), and its description.
_OFF = "without the cache: the whole text is computed again for each token"
_STYLES = {
    "cache off": ("o", "#d55e00", _OFF),
    "cache on": ("*", "#0072b2", "with the cache: only the new token is computed"),
    "speculation": ("+", "#009e73", "with speculation: a pass gives one or more tokens"),
}


def curves(benchmark: "Benchmark") -> str:
    """Plot milliseconds per token over the position in the text, in characters."""
    positions, times = _points(benchmark)
    heights = {name: _columns(milliseconds) for name, milliseconds in times.items()}
    top = max(map(max, heights.values()))
    grid = [[" "] * _COLUMNS for _ in range(_LINES)]
    for name, columns in heights.items():
        for column, height in enumerate(columns):
            grid[round(height / top * (_LINES - 1))][column] = _STYLES[name][0]
    labels = {_LINES - 1: number(top), 0: "0"}
    rows = [f"{labels.get(y, ''):>7} |{''.join(row)}".rstrip() for y, row in enumerate(grid)]
    first, last = str(positions[0]), str(positions[-1])
    x_axis = f"{'':9}{first}{_X_LABEL:^{_COLUMNS - len(first) - len(last)}}{last}"
    base = f"{'':8}+{'-' * _COLUMNS}"
    styles = [_STYLES[name] for name in times]
    legend = [f"{'':9}{mark}  {text}" for mark, _, text in styles]
    return "\n".join([_Y_LABEL, "", *reversed(rows), base, x_axis, "", *legend])


def _points(benchmark: "Benchmark") -> tuple[list[int], dict[str, list[float]]]:
    """Return positions, and milliseconds per mode.

    The first token is left out if there are others: it includes the time of the prompt, which would
    flatten the curves.
    """
    start = 1 if len(benchmark.positions) > 1 else 0
    times = {
        name: [1000 * seconds for seconds in benchmark.modes[name].token_s[start:]]
        for name in _STYLES
        if name in benchmark.modes
    }
    return benchmark.positions[start:], times


def _columns(times: list[float]) -> list[float]:
    """Return a median per column; few tokens take several columns each."""
    edges = [column * len(times) // _COLUMNS for column in range(_COLUMNS + 1)]
    return [
        statistics.median(times[start : max(end, start + 1)])
        for start, end in itertools.pairwise(edges)
    ]


def number(value: float) -> str:
    """Return a positive number with three digits, or with all digits of its integer part."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def check(option: str, file: Path, endings: Sequence[str]) -> None:
    """Raise an error early, before costly work, if a flag for a picture cannot be used."""
    check_file(option, file, endings)
    try:
        import_module("matplotlib.figure")
    except ImportError as error:
        message = f"{option} needs matplotlib ({error}): pip install matplotlib"
        raise ResourceError(message) from None


def save(benchmark: "Benchmark", file: Path) -> None:
    """Plot the curves to a file; raise ResourceError if it cannot be written."""
    from matplotlib.figure import Figure  # pyplot would need a display
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    positions, times = _points(benchmark)
    for name, times_ms in times.items():
        _, colour, label = _STYLES[name]
        axes.plot(positions, times_ms, ".-", markersize=3, color=colour, label=label)
        end, shift = (positions[-1], times_ms[-1]), (6, 0)
        axes.annotate(name, end, shift, textcoords="offset points", va="center", color=colour)
    rows = "" if benchmark.batch == 1 else f", {benchmark.batch} rows side by side"
    figure.suptitle(
        f"{benchmark.model}, {benchmark.max_tokens} tokens after a prompt of "
        f"{benchmark.prompt_tokens}{rows}: time for each token",
        wrap=True,
        parse_math=False,  # the name of a folder may contain a $
    )
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1))  # above the curves
    axes.set(xlabel=_X_LABEL, ylabel=_Y_LABEL)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    picture = io.BytesIO()
    figure.savefig(picture, format=file.suffix[1:].lower(), dpi=150)
    write_file(file, picture.getvalue())
