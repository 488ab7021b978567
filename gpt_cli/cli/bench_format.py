"""The output forms of `gpt-cli bench`: a table with curves, and JSON."""

from dataclasses import asdict

from gpt_cli import records
from gpt_cli.bench import Benchmark, Spread
from gpt_cli.cli.layout import counted
from gpt_cli.cli.plot import curves, number
from gpt_cli.machine import format_size

# The figures of a mode: their labels, and a factor to the unit of the label.
_ROWS = {
    "tokenize_s": ("tokenization, ms", 1000),
    "first_token_s": ("first token, ms", 1000),
    "prefill_tok_s": ("prefill, tokens/s", 1),
    "decode_tok_s": ("decode, tokens/s", 1),
    "model_s": ("model, ms a token", 1000),
    "other_s": ("the rest, ms a token", 1000),
    "total_s": ("whole text, s", 1),
}


def as_json(found: Benchmark) -> str:
    """Return a JSON object with all figures and the time of each token."""
    return records.json_line(asdict(found))


def as_text(found: Benchmark) -> str:
    """Return a table, the curves and a conclusion."""
    parts = [_head(found), _table(found), _notes(found), curves(found), conclusion(found)]
    return "\n\n".join(part for part in parts if part) + "\n"


def conclusion(found: Benchmark) -> str:
    """Return sentences about the growth of times and the equality of ids, if known."""
    said = []
    growths = [mode.growth for mode in found.modes.values() if mode.growth is not None]
    if found.early and found.late:
        said.append(
            f"{'With' if found.cache_on else 'Without'} the cache, {_tokens(found.late)} of the "
            f"text took {_times(growths[0])} times as long as {_tokens(found.early)}"
        )
        said[0] += "." if len(growths) == 1 else f"; without it, {_times(growths[1])} times."
    if len(found.modes) * found.repetitions > 1:
        said.append("All ids agree.")
    return " ".join(said)


def _head(found: Benchmark) -> str:
    what = f"{found.model}: {found.parameters:,} parameters in {found.dtype}"
    plan = [
        counted(found.prompt_tokens, "prompt token"),
        counted(found.max_tokens, "new token"),
        counted(found.batch, "row"),
        counted(found.repetitions, "repetition"),
    ]
    by = f"computed by {found.ops} with {counted(found.threads, 'thread')}"
    return f"{what}, {by}\n{', '.join(plan)}"


def _table(found: Benchmark) -> str:
    rows = [["median (min-max)", *found.modes]]
    for figure, (label, scale) in _ROWS.items():
        cells = [_cell(getattr(mode, figure), scale) for mode in found.modes.values()]
        rows.append([label, *cells])
    if found.ratio is not None:
        ratios = [_times(found.ratio[figure]) if figure in found.ratio else "-" for figure in _ROWS]
        for row, cell in zip(rows, ["ratio", *ratios], strict=True):
            row.append(cell)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _notes(found: Benchmark) -> str:
    peak = "unknown" if found.peak_bytes is None else format_size(found.peak_bytes)
    lines = [
        f"model loaded in {number(found.load_s)} s; peak memory of the process {peak}, "
        f"weights {format_size(found.weights_bytes)}"
    ]
    if found.ratio is not None:
        lines.append("ratio: how many times as fast with the cache")
    if found.batch > 1:
        lines.append("ms a token: the time in which each row gets one")
    return "\n".join(lines)


def _cell(spread: Spread | None, scale: float) -> str:
    if spread is None:
        return "-"
    median, least, most = (
        number(value * scale) for value in (spread.median, spread.min, spread.max)
    )
    return median if least == most else f"{median} ({least}-{most})"


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 99.95 else f"{ratio:.1f}"


def _tokens(positions: tuple[int, int]) -> str:
    first, last = positions
    return f"token {first}" if first == last else f"tokens {first} to {last}"
