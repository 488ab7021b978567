"""The time of each token against its position in the text: in characters, and as a picture."""

import io
import itertools
import statistics
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from gpt_cli.atomic import write_file
from gpt_cli.errors import InputError

if TYPE_CHECKING:
    from gpt_cli.bench import Benchmark

_COLUMNS, _LINES = 60, 12
_ACROSS = "position in the text, in tokens"
_UPWARDS = "milliseconds for each token after the first"
FORMATS = (".png", ".svg", ".pdf")

# Of each mode: its mark, its colour (told apart by all eyes), and what it does.
_STYLES = {
    "cache off": (
        "o",
        "#d55e00",
        "without the cache: the whole text is computed again for each token",
    ),
    "cache on": ("*", "#0072b2", "with the cache: only the new token is computed"),
}


def curves(found: "Benchmark") -> str:
    """Draw the milliseconds of each token upwards, its position in the text to the right."""
    positions, times = _drawn(found)
    heights = {name: _columns(token_s) for name, token_s in times.items()}
    top = max(map(max, heights.values()))
    grid = [[" "] * _COLUMNS for _ in range(_LINES)]
    shown = {name: style for name, style in _STYLES.items() if name in heights}
    for name, (mark, _, _) in shown.items():
        for column, height in enumerate(heights[name]):
            grid[round(height / top * (_LINES - 1))][column] = mark
    labels = {_LINES - 1: number(1000 * top), 0: "0"}
    drawn = [f"{labels.get(line, ''):>7} |{''.join(grid[line])}".rstrip() for line in range(_LINES)]
    first, last = str(positions[0]), str(positions[-1])
    return "\n".join(
        [
            _UPWARDS,
            "",
            *reversed(drawn),
            f"{'':8}+{'-' * _COLUMNS}",
            f"{'':9}{first}{_ACROSS:^{_COLUMNS - len(first) - len(last)}}{last}",
            "",
            *(f"{'':9}{mark}  {what}" for mark, _, what in shown.values()),
        ]
    )


def _drawn(found: "Benchmark") -> tuple[list[int], dict[str, list[float]]]:
    """Positions, and of each mode the seconds: of all but the first token, if there are others.

    The first takes the time of the whole prompt, beside which all others would lie on the ground.
    """
    start = 1 if len(found.positions) > 1 else 0
    times = {name: mode.token_s[start:] for name, mode in found.modes.items()}
    return found.positions[start:], times


def _columns(token_s: list[float]) -> list[float]:
    """Medians of as many stretches as there are columns; a few tokens take several columns each."""
    count = len(token_s)
    edges = [column * count // _COLUMNS for column in range(_COLUMNS + 1)]
    return [
        statistics.median(token_s[start : max(end, start + 1)])
        for start, end in itertools.pairwise(edges)
    ]


def number(value: float) -> str:
    """A number above 0 for people: three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def check_library(option: str) -> None:
    """Raise InputError unless matplotlib is here, before anything costly is done for a picture."""
    if find_spec("matplotlib") is None:
        raise InputError(f"{option} needs matplotlib: pip install matplotlib")


def save(found: "Benchmark", file: Path) -> None:
    """Draw the curves as a picture.

    Raises:
        ResourceError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # no pyplot: nothing asks for a display
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    positions, times = _drawn(found)
    for name, (_, colour, what) in _STYLES.items():
        if name in times:
            milliseconds = [1000 * seconds for seconds in times[name]]
            axes.plot(positions, milliseconds, ".-", markersize=3, color=colour, label=what)
            axes.annotate(
                name,
                (positions[-1], milliseconds[-1]),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                color=colour,
            )
    rows = "" if found.batch == 1 else f", {found.batch} rows side by side"
    figure.suptitle(
        f"{found.model}, {found.max_tokens} tokens after a prompt of {found.prompt_tokens}{rows}: "
        "time for each token",
        wrap=True,
        parse_math=False,  # the name of a folder may hold a $
    )
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1))  # above, in no curve's way
    axes.set_xlabel(_ACROSS)
    axes.set_ylabel(_UPWARDS)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    picture = io.BytesIO()
    figure.savefig(picture, format=file.suffix[1:].lower(), dpi=150)
    write_file(file, picture.getvalue())
