"""The output of `gpt-cli bench`: a table, and curves of the time per token as text or a picture."""

import itertools
import statistics
from pathlib import Path

from gpt_cli.checks.bench import Benchmark, Spread
from gpt_cli.cli.files import rendered
from gpt_cli.cli.table import Column, Table
from gpt_cli.errors import counted
from gpt_cli.system.machine import format_size

# The figures of a mode, with their labels and the factors that convert them to the labels' units.
_ROWS = {
    "tokenize_s": ("tokenization, ms", 1000),
    "first_token_s": ("first token, ms", 1000),
    "prefill_tok_s": ("prefill, tokens/s", 1),
    "decode_tok_s": ("decode, tokens/s", 1),
    "model_s": ("model, ms per token", 1000),
    "other_s": ("other, ms per token", 1000),
    "total_s": ("whole text, s", 1),
}
_COLUMNS = 60  # of the curves
_LINES = 12
_X_LABEL = "position in the text, in tokens"
_Y_LABEL = "milliseconds for each token after the first"
# The mark of a mode, its colour (safe for the colour-blind), and its description.
_OFF = "without the cache: the whole text is computed again for each token"
_STYLES = {
    "cache off": ("o", "#d55e00", _OFF),
    "cache on": ("*", "#0072b2", "with the cache: only the new token is computed"),
    "speculation": ("+", "#009e73", "with speculation: a pass gives one or more tokens"),
}


def as_text(result: Benchmark) -> str:
    """Return a table, the curves and a conclusion."""
    parts = [_head(result), _table(result), _notes(result), curves(result), conclusion(result)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(result: Benchmark) -> str:
    counts = [
        counted(result.prompt_tokens, "prompt token"),
        counted(result.max_tokens, "new token"),
        counted(result.batch, "row"),
        counted(result.repetitions, "repetition"),
    ]
    return (
        f"{result.model}: {result.parameters:,} parameters in {result.dtype}, "
        f"computed by {result.ops} with {counted(result.threads, 'thread')}\n"
        f"{', '.join(counts)}"
    )


def _table(result: Benchmark) -> str:
    names = ["median (min-max)", *result.modes]
    if result.ratio is not None:
        names.append("ratio")
    rows = []
    for figure, (label, scale) in _ROWS.items():
        row = [label]
        row += [_cell(getattr(mode, figure), scale) for mode in result.modes.values()]
        if result.ratio is not None:
            ratio = result.ratio.get(figure)
            row.append("-" if ratio is None else number(ratio, ".1f"))
        rows.append(row)
    return Table(*map(Column, names), aligned=True).whole(rows).removesuffix("\n")


def _cell(spread: Spread | None, scale: float) -> str:
    if spread is None:
        return "-"
    median, low, high = (number(x * scale) for x in (spread.median, spread.min, spread.max))
    return median if low == high else f"{median} ({low}-{high})"


def number(value: float, small: str = "#.3g") -> str:
    """Return a positive number as an integer from 99.95 on; a smaller one in the format `small`."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:{small}}"


def _notes(result: Benchmark) -> str:
    peak = "unknown" if result.peak_bytes is None else format_size(result.peak_bytes)
    lines = [
        f"model loaded in {number(result.load_s)} s; peak memory of the process {peak}, "
        f"weights {format_size(result.weights_bytes)}"
    ]
    if result.ratio is not None:
        name = "speculation" if result.speculation else "the cache"
        lines.append(f"ratio: speed with {name} / speed without it")
    if result.drafted is not None:
        average = " in each text, on average" if result.batch > 1 else ""
        accepted = f"{result.accepted:,} of {counted(result.drafted, 'drafted token')} accepted"
        lines.append(f"speculation: {accepted}{average}")
    if result.batch > 1:
        lines.append("ms per token: time in which each row gets one token")
    return "\n".join(lines)


def conclusion(result: Benchmark) -> str:
    """Say how the time per token grew, and that the ids of all runs agree, as far as known."""
    sentences = []
    growths = [mode.growth for mode in result.modes.values() if mode.growth is not None]
    if result.early and result.late:
        first, *others = (number(growth, ".1f") for growth in growths)
        sentence = (
            f"{'With' if result.cache_on else 'Without'} the cache, {_tokens(result.late)} of the "
            f"text took {first} times as long as {_tokens(result.early)}"
        )
        for growth in others:  # at most one
            mode = "with speculation" if result.speculation else "without it"
            sentence += f"; {mode}, {growth} times"
        sentences.append(f"{sentence}.")
    if len(result.modes) * result.repetitions > 1:
        sentences.append("All ids agree.")
    return " ".join(sentences)


def _tokens(positions: tuple[int, int]) -> str:
    first, last = positions
    return f"token {first}" if first == last else f"tokens {first} to {last}"


def curves(result: Benchmark) -> str:
    """Plot milliseconds per token over the position in the text, with characters."""
    positions, times = _points(result)
    heights = {name: _columns(milliseconds) for name, milliseconds in times.items()}
    top = max(map(max, heights.values()))
    grid = [[" "] * _COLUMNS for _ in range(_LINES)]
    for name, columns in heights.items():
        for column, height in enumerate(columns):
            grid[round(height / top * (_LINES - 1))][column] = _STYLES[name][0]
    y_labels = {_LINES - 1: number(top), 0: "0"}
    rows = [f"{y_labels.get(y, ''):>7} |{''.join(row)}".rstrip() for y, row in enumerate(grid)]
    lines = [_Y_LABEL, "", *reversed(rows)]
    lines.append(f"{'':8}+{'-' * _COLUMNS}")
    first, last = str(positions[0]), str(positions[-1])
    room = _COLUMNS - len(first) - len(last)
    lines += [f"{'':9}{first}{_X_LABEL:^{room}}{last}", ""]
    for name in times:
        mark, _, description = _STYLES[name]
        lines.append(f"{'':9}{mark}  {description}")
    return "\n".join(lines)


def _points(result: Benchmark) -> tuple[list[int], dict[str, list[float]]]:
    """Return positions, and milliseconds per mode."""
    # The first token, if there are others, would flatten the curves: it includes the prompt's time.
    start = 1 if len(result.positions) > 1 else 0
    times = {}
    for name in _STYLES:
        if name in result.modes:
            times[name] = [1000 * seconds for seconds in result.modes[name].token_s[start:]]
    return result.positions[start:], times


def _columns(times: list[float]) -> list[float]:
    """Return a median per column; few tokens take several columns."""
    edges = [column * len(times) // _COLUMNS for column in range(_COLUMNS + 1)]
    return [
        statistics.median(times[start : max(end, start + 1)])
        for start, end in itertools.pairwise(edges)
    ]


def draw(result: Benchmark, file: Path) -> bytes:
    """Plot the curves in the format of a file's ending."""
    from matplotlib.figure import Figure  # pyplot would need a display
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    positions, times = _points(result)
    for name, times_ms in times.items():
        _, colour, label = _STYLES[name]
        axes.plot(positions, times_ms, ".-", markersize=3, color=colour, label=label)
        end = (positions[-1], times_ms[-1])
        axes.annotate(name, end, (6, 0), textcoords="offset points", va="center", color=colour)
    rows = "" if result.batch == 1 else f", {result.batch} rows side by side"
    figure.suptitle(
        f"{result.model}, {counted(result.max_tokens, 'token')} after a prompt of "
        f"{result.prompt_tokens:,}{rows}: time for each token",
        wrap=True,
        parse_math=False,  # the name of a folder may contain a $
    )
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1))  # above the curves
    axes.set(xlabel=_X_LABEL, ylabel=_Y_LABEL, ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return rendered(figure, file)
