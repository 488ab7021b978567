"""The output of `gpt-cli bench`: a table with curves."""

from gpt_cli.checks.bench import Benchmark, Spread
from gpt_cli.cli.layout import counted
from gpt_cli.cli.plot import curves, number
from gpt_cli.system.machine import format_size

# The figures of a mode, with their labels and factors to the unit of the label.
_ROWS = {
    "tokenize_s": ("tokenization, ms", 1000),
    "first_token_s": ("first token, ms", 1000),
    "prefill_tok_s": ("prefill, tokens/s", 1),
    "decode_tok_s": ("decode, tokens/s", 1),
    "model_s": ("model, ms per token", 1000),
    "other_s": ("other, ms per token", 1000),
    "total_s": ("whole text, s", 1),
}


def as_text(found: Benchmark) -> str:
    """Return a table, the curves and a conclusion."""
    parts = [_head(found), _table(found), _notes(found), curves(found), conclusion(found)]
    return "\n\n".join(part for part in parts if part) + "\n"


def conclusion(found: Benchmark) -> str:
    """Return sentences about the growth of times and the equality of ids, if known."""
    sentences, other = [], "with speculation" if found.speculation else "without it"
    growths = [_ratio(mode.growth) for mode in found.modes.values() if mode.growth is not None]
    if found.early and found.late:
        sentences.append(
            f"{'With' if found.cache_on else 'Without'} the cache, {_tokens(found.late)} of the "
            f"text took {growths[0]} times as long as {_tokens(found.early)}"
            f"{''.join(f'; {other}, {growth} times' for growth in growths[1:])}."
        )
    if len(found.modes) * found.repetitions > 1:
        sentences.append("All ids agree.")
    return " ".join(sentences)


def _head(found: Benchmark) -> str:
    return (
        f"{found.model}: {found.parameters:,} parameters in {found.dtype}, computed by {found.ops} "
        f"with {counted(found.threads, 'thread')}\n"
        f"{counted(found.prompt_tokens, 'prompt token')}, "
        f"{counted(found.max_tokens, 'new token')}, "
        f"{counted(found.batch, 'row')}, {counted(found.repetitions, 'repetition')}"
    )


def _table(found: Benchmark) -> str:
    columns = [["median (min-max)", *(label for label, _ in _ROWS.values())]]
    for name, mode in found.modes.items():
        cells = (_cell(getattr(mode, figure), scale) for figure, (_, scale) in _ROWS.items())
        columns.append([name, *cells])
    if (ratio := found.ratio) is not None:
        cells = (_ratio(ratio[figure]) if figure in ratio else "-" for figure in _ROWS)
        columns.append(["ratio", *cells])
    padded = ([f"{cell:{max(map(len, column))}}" for cell in column] for column in columns)
    return "\n".join("  ".join(row).rstrip() for row in zip(*padded, strict=True))


def _notes(found: Benchmark) -> str:
    peak = "unknown" if found.peak_bytes is None else format_size(found.peak_bytes)
    lines = [
        f"model loaded in {number(found.load_s)} s; peak memory of the process {peak}, "
        f"weights {format_size(found.weights_bytes)}"
    ]
    if found.ratio is not None:
        what = "speculation" if found.speculation else "the cache"
        lines.append(f"ratio: speed with {what} / speed without it")
    if found.speculation:
        each = " in each text, on average" if found.batch > 1 else ""
        lines.append(
            f"speculation: {found.accepted:,} of {found.drafted:,} drafted tokens accepted{each}"
        )
    if found.batch > 1:
        lines.append("ms per token: time in which each row gets one token")
    return "\n".join(lines)


def _cell(spread: Spread | None, scale: float) -> str:
    if spread is None:
        return "-"
    median, low, high = (number(x * scale) for x in (spread.median, spread.min, spread.max))
    return median if low == high else f"{median} ({low}-{high})"


def _ratio(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 99.95 else f"{ratio:.1f}"


def _tokens(positions: tuple[int, int]) -> str:
    first, last = positions
    return f"token {first}" if first == last else f"tokens {first} to {last}"
