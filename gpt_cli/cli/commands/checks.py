"""`gpt-cli bench`, `compare`, `verify` and `doctor`: measure and check models and this machine."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gpt_cli import records
from gpt_cli.checks.plan import Plan
from gpt_cli.cli import flags, inputs
from gpt_cli.cli.files import check_picture
from gpt_cli.cli.output import note, write, write_json
from gpt_cli.cli.progress import LONG, StatusLine
from gpt_cli.cli.table import Column, Table, facts_table
from gpt_cli.display.labels import quoted
from gpt_cli.errors import CheckpointError, ResourceError, counted
from gpt_cli.options.declare import option
from gpt_cli.system.atomic import write_file
from gpt_cli.system.startup import prepare

if TYPE_CHECKING:
    from gpt_cli.checks.compare import Comparison

_MODEL = "A model, as for --model of other commands, or NAME@DTYPE, such as gpt2@int8."
_WORDS = {True: "ok", False: "FAILED", None: "not checked"}


def bench(
    *,
    plan: Plan,
    cache: bool | None = option(
        None, "Measure only one mode; both if not set.", flag="--cache/--no-cache"
    ),
    speculate: bool = option(
        False, "Measure the cache with and without speculative decoding.", excludes=("--no-cache",)
    ),
    plot: Path | None = option(
        None, "Draw the curves: .png, .svg or .pdf (matplotlib).", metavar="FILE"
    ),
    force: bool = flags.FORCE,
    loading: flags.Loading,
    as_json: bool = flags.JSON,
) -> None:
    """Measure generation with and without the KV cache, or speculative decoding.

    Print times, rates, memory use and two curves. The prompt is a built-in text. Generation is
    greedy, so both modes generate the same tokens.

    Examples:
        gpt-cli bench -m tiny -n 64
        gpt-cli bench -m tiny -n 32 -b 4 --json
        gpt-cli bench -m gpt2 --speculate
    """
    prepare(loading.threads)
    if plot is not None:
        check_picture("--plot", plot, force=force)
    if speculate:
        plan = replace(plan, modes=("speculation", "cache on"))
    elif cache is not None:
        plan = replace(plan, modes=("cache on" if cache else "cache off",))
    from gpt_cli.checks.bench import measure
    from gpt_cli.cli.bench_format import as_text, draw

    engine = loading.load()
    with StatusLine(shown=not loading.quiet, pause=0.0) as status:
        benchmark = measure(engine, plan, status.show)
    if as_json:
        write_json(asdict(benchmark))
    else:
        write(as_text(benchmark))
    if plot is not None:
        write_file(plot, draw(benchmark, plot), replace=force)


def verify(
    name: str | None = flags.MODEL_NAME,
    *,
    model: flags.Adapted,
    threads: int | None = flags.THREAD_COUNT,
    as_json: bool = flags.JSON,
) -> None:
    """Check that a model gives the expected results.

    Check its files and known texts, and that all implementations agree. The exit code is 4 if a
    check fails. A check that cannot run on this machine reports the reason.

    Examples:
        gpt-cli verify tiny
    """
    model = model.named(name)
    prepare(threads)
    from gpt_cli import hub
    from gpt_cli.checks.verify import cure, verify

    folder, *adapters = hub.resolve_all(model.model, **model.options)
    checks = []
    table = Table(Column(width=11), Column(width=25), Column(wrap=True), aligned=True)
    for check in verify(model.model, folder, *adapters):
        checks.append(check)
        if not as_json:
            write(table.line(_WORDS[check.passed], check.name, check.detail))
    failed = [check.name for check in checks if check.passed is False]
    run = sum(check.passed is not None for check in checks)
    if as_json:
        result = {
            "model": model.model,
            "adapter": model.adapter,
            "folder": str(folder),
            "passed": not failed,
            "checks": [asdict(check) for check in checks],
        }
        write_json(result)
    if failed:
        raise CheckpointError(
            f"{model.model} failed {len(failed)} of {counted(run, 'check')} "
            f"({', '.join(failed)}): {cure(failed)}"
        )


def compare(
    a: str = typer.Argument(metavar="A", help=_MODEL, autocompletion=flags.complete_model),
    b: str = typer.Argument(metavar="B", help="Another one.", autocompletion=flags.complete_model),
    files: list[str] | None = flags.argument("[FILE]...", "Texts, or rows with a text each"),
    *,
    from_files: Sequence[str] | None = flags.ROWS_FILES,
    rows: flags.RowFormat,
    special: bool = flags.SPECIAL,
    loading: flags.LoadingByName,
    as_json: bool = flags.JSON,
) -> None:
    """Show how the predictions of two models differ.

    A and B have the same tokenizer, or are one model in two dtypes. At each token of the texts but
    the first, compare the distributions of the two: print figures of the KL divergence KL(A || B)
    in nats, how often the likeliest token is the same, both perplexities, and the tokens where the
    models differ most, with the likeliest tokens by A and B.

    Examples:
        gpt-cli compare gpt2 gpt2@int8 article.txt
        echo 'The fox was happy.' | gpt-cli compare tiny tiny@float32
    """
    files = inputs.files_or_pipe(files, from_files, "no text: give a FILE", quiet=loading.quiet)
    # A file of lines is one text, unless the format is set to lines.
    source = rows.source(files, ("text",), whole_files=rows.format != "lines")
    labels, texts = zip(*inputs.read_texts(source, quiet=loading.quiet), strict=True)
    prepare(loading.threads)
    from gpt_cli.checks.compare import compare

    engine_a = loading.load_named(a)
    engine_b = loading.load_named(b)
    lengths = (len(engine_a.encode(text, special=special)) for text in texts)
    short = [label for label, tokens in zip(labels, lengths, strict=True) if tokens < 2]
    if short and len(texts) > 1 and not loading.quiet:
        others = f" and {len(short) - 1:,} more texts have" if short[1:] else " has"
        note(f"gpt-cli: {short[0]}{others} fewer than 2 tokens: nothing to compare")
    with StatusLine(shown=not loading.quiet, delay=LONG) as status:

        def observe(tokens: int) -> None:
            status.show(status.rate(tokens))

        result = compare(engine_a, engine_b, texts, observe, special=special)
    if as_json:
        record = {"a": a, "b": b, **asdict(result)}
        for token in record["worst"]:
            token["file"] = labels[token["text"]]
        record["perplexities"] = list(map(records.finite, result.perplexities))
        record["perplexity_ratio"] = records.finite(result.perplexity_ratio)
        write_json(record)
    else:
        write(_as_text(result, labels))


def _as_text(result: "Comparison", files: Sequence[str]) -> str:
    """Return the figures, and a table of the tokens where the models differ most."""
    by_a, by_b = result.perplexities
    facts = {
        "tokens": f"{result.tokens:,}",
        "KL(A || B), mean": f"{result.kl['mean']:.3g} nats",
        "    median": f"{result.kl['median']:.3g}",
        "    99%": f"{result.kl['p99']:.3g}",
        "    worst": f"{result.kl['max']:.3g}",
        "same likeliest": f"{result.same_likeliest:.2%}",
        "perplexity": f"{by_a:.6g} and {by_b:.6g}, ratio B / A {result.perplexity_ratio:.6g}",
    }
    different = [token for token in result.worst if token.kl > 0]
    if not different:
        return facts_table(facts)
    table = Table(
        Column("KL", width=8, align=">", format=".3g"),
        Column("position", width=8, align=">"),
        Column("likeliest by A", width=16),
        Column("by B", width=16),
        Column("text, and its next token"),
        aligned=True,
    )
    rows = []
    for token in different:
        likeliest = [quoted(text.encode()) for text in token.likeliest]
        text = f"{quoted(token.before.encode())}  {quoted(token.token.encode())}"
        if len(files) > 1:
            text += f"  {files[token.text]}"
        rows.append([token.kl, token.position, *likeliest, text])
    return f"{facts_table(facts)}\n{''.join(table.lines(rows))}"


def doctor(as_json: bool = flags.JSON, verbose: bool = flags.VERBOSE) -> None:
    """Check this machine for problems.

    Each line is ok, a note or a problem, with its cure. The exit code is 5 if there is a problem.

    Examples:
        gpt-cli doctor
    """
    prepare(None)
    from gpt_cli.checks.doctor import examine

    problems = []
    table = Table(Column(width=7), Column(width=8), Column(wrap=True), aligned=True)
    for finding in examine():
        if finding.status == "problem":
            problems.append(finding.name)
        if as_json:
            write_json(asdict(finding))
        else:
            text = f"{finding.found}; cure: {finding.cure}" if finding.cure else finding.found
            write(table.line(finding.status, finding.name, text))
    if problems:
        raise ResourceError(f"problems with {', '.join(problems)}: see the cures")
