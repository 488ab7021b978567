"""`gpt-cli bench`: measure generation with and without the KV cache, or speculation."""

from dataclasses import asdict, replace
from pathlib import Path

from gpt_cli.checks.plan import Plan
from gpt_cli.cli import options as flags
from gpt_cli.cli.progress import StatusLine
from gpt_cli.cli.streams import write
from gpt_cli.errors import InputError
from gpt_cli.options.declare import PATH, SWITCH, option
from gpt_cli.records import json_line
from gpt_cli.system.startup import prepare


def bench(
    *,
    plan: Plan,
    cache: bool | None = option(
        None, "Measure only one mode; both if not set.", kind=SWITCH, flag="--cache/--no-cache"
    ),
    speculate: bool = option(False, "Measure the cache with and without speculative decoding."),
    plot: Path | None = option(
        None, "Draw the curves: .png, .svg or .pdf (matplotlib).", kind=PATH, metavar="FILE"
    ),
    loading: flags.Loading,
    as_json: flags.Json = False,
) -> None:
    """Measure generation with and without the KV cache, or speculative decoding.

    Print times, rates, memory use and two curves. The prompt is a built-in text. Generation is
    greedy, so both modes generate the same tokens.

    Examples:
        gpt-cli bench -m tiny -n 64
        gpt-cli bench -m tiny -n 32 --batch 4 --json
        gpt-cli bench -m gpt2 --speculate
    """
    from gpt_cli.cli import plot as plots

    if plot is not None:
        plots.check("--plot", plot, (".png", ".svg", ".pdf"))
    if speculate and cache is False:
        raise InputError("--speculate needs the cache: leave out --no-cache")
    if speculate:
        plan = replace(plan, modes=("speculation", "cache on"))
    elif cache is not None:
        plan = replace(plan, modes=("cache on" if cache else "cache off",))
    prepare(loading.threads)
    from gpt_cli.checks.bench import measure
    from gpt_cli.cli import bench_format

    engine = loading.load()
    with StatusLine(shown=not loading.quiet, pause=0.0) as status:
        benchmark = measure(engine, plan, status.show)
    write(json_line(asdict(benchmark)) if as_json else bench_format.as_text(benchmark))
    if plot is not None:
        plots.save(benchmark, plot)
