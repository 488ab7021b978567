"""The output of `gpt-cli bench`: a table with curves."""

from gpt_cli.checks.bench import Benchmark, Spread
from gpt_cli.cli.layout import counted
from gpt_cli.cli.plot import curves, number
from gpt_cli.system.machine import format_size

# The figures of a mode, with their labels and the factors to the units of the labels.
_ROWS = {
    "tokenize_s": ("tokenization, ms", 1000),
    "first_token_s": ("first token, ms", 1000),
    "prefill_tok_s": ("prefill, tokens/s", 1),
    "decode_tok_s": ("decode, tokens/s", 1),
    "model_s": ("model, ms per token", 1000),
    "other_s": ("other, ms per token", 1000),
    "total_s": ("whole text, s", 1),
}


def as_text(result: Benchmark) -> str:
    """Return a table, the curves and a conclusion."""
    parts = [_head(result), _table(result), _notes(result), curves(result), conclusion(result)]
    return "\n\n".join(part for part in parts if part) + "\n"


def conclusion(result: Benchmark) -> str:
    """Return sentences about the growth of times and the equality of ids, if known."""
    sentences, other = [], "with speculation" if result.speculation else "without it"
    growths = [_ratio(mode.growth) for mode in result.modes.values() if mode.growth is not None]
    if result.early and result.late:
        sentences.append(
            f"{'With' if result.cache_on else 'Without'} the cache, {_tokens(result.late)} of the "
            f"text took {growths[0]} times as long as {_tokens(result.early)}"
            f"{''.join(f'; {other}, {growth} times' for growth in growths[1:])}."
        )
    if len(result.modes) * result.repetitions > 1:
        sentences.append("All ids agree.")
    return " ".join(sentences)


def _head(result: Benchmark) -> str:
    return (
        f"{result.model}: {result.parameters:,} parameters in {result.dtype}, "
        f"computed by {result.ops} with {counted(result.threads, 'thread')}\n"
        f"{counted(result.prompt_tokens, 'prompt token')}, "
        f"{counted(result.max_tokens, 'new token')}, "
        f"{counted(result.batch, 'row')}, {counted(result.repetitions, 'repetition')}"
    )


def _table(result: Benchmark) -> str:
    columns = [["median (min-max)", *(label for label, _ in _ROWS.values())]]
    for name, mode in result.modes.items():
        cells = (_cell(getattr(mode, figure), scale) for figure, (_, scale) in _ROWS.items())
        columns.append([name, *cells])
    if (ratio := result.ratio) is not None:
        cells = (_ratio(ratio[figure]) if figure in ratio else "-" for figure in _ROWS)
        columns.append(["ratio", *cells])
    padded = ([f"{cell:{max(map(len, column))}}" for cell in column] for column in columns)
    return "\n".join("  ".join(row).rstrip() for row in zip(*padded, strict=True))


def _notes(result: Benchmark) -> str:
    peak = "unknown" if result.peak_bytes is None else format_size(result.peak_bytes)
    lines = [
        f"model loaded in {number(result.load_s)} s; peak memory of the process {peak}, "
        f"weights {format_size(result.weights_bytes)}"
    ]
    if result.ratio is not None:
        name = "speculation" if result.speculation else "the cache"
        lines.append(f"ratio: speed with {name} / speed without it")
    if result.speculation:
        average = " in each text, on average" if result.batch > 1 else ""
        accepted = f"{result.accepted:,} of {result.drafted:,} drafted tokens accepted"
        lines.append(f"speculation: {accepted}{average}")
    if result.batch > 1:
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
