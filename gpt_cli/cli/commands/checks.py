"""`gpt-cli bench`, `verify` and `doctor`: measure and check a model and this machine."""

from dataclasses import asdict, replace
from pathlib import Path

from gpt_cli.checks.plan import Plan
from gpt_cli.cli import options as flags
from gpt_cli.cli.files import check_picture
from gpt_cli.cli.output import hanging, write, write_json
from gpt_cli.cli.progress import StatusLine
from gpt_cli.errors import CheckpointError, InputError, ResourceError, counted
from gpt_cli.options.declare import option
from gpt_cli.system.atomic import write_file
from gpt_cli.system.startup import prepare

_WORDS = {True: "ok", False: "FAILED", None: "not checked"}


def bench(
    *,
    plan: Plan,
    cache: bool | None = option(
        None, "Measure only one mode; both if not set.", flag="--cache/--no-cache"
    ),
    speculate: bool = option(False, "Measure the cache with and without speculative decoding."),
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
    if speculate and cache is False:
        raise InputError("--speculate needs the cache: leave out --no-cache")
    if speculate:
        plan = replace(plan, modes=("speculation", "cache on"))
    elif cache is not None:
        plan = replace(plan, modes=("cache on" if cache else "cache off",))
    from gpt_cli.checks.bench import measure
    from gpt_cli.cli.bench_format import as_text, draw

    engine = loading.load()
    with StatusLine(shown=not loading.quiet, pause=0.0) as status:
        benchmark = measure(engine, plan, status.show)
    write_json(asdict(benchmark)) if as_json else write(as_text(benchmark))
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
    for check in verify(model.model, folder, *adapters):
        checks.append(check)
        if not as_json:
            write(hanging(f"{_WORDS[check.passed]:11}  {check.name:25}  ", check.detail))
    failed = [check.name for check in checks if check.passed is False]
    run = sum(check.passed is not None for check in checks)
    if as_json:
        result = {"model": model.model, "adapter": model.adapter, "folder": str(folder)}
        write_json(result | {"passed": not failed, "checks": [asdict(check) for check in checks]})
    if failed:
        raise CheckpointError(
            f"{model.model} failed {len(failed)} of {counted(run, 'check')} "
            f"({', '.join(failed)}): {cure(failed)}"
        )


def doctor(as_json: bool = flags.JSON, verbose: bool = flags.VERBOSE) -> None:
    """Check this machine for problems.

    Each line is ok, a note or a problem, with its cure. The exit code is 5 if there is a problem.

    Examples:
        gpt-cli doctor
    """
    prepare(None)
    from gpt_cli.checks.doctor import examine

    problems = []
    for finding in examine():
        if finding.status == "problem":
            problems.append(finding.name)
        if as_json:
            write_json(asdict(finding))
        else:
            text = finding.found + (f"; cure: {finding.cure}" if finding.cure else "")
            write(hanging(f"{finding.status:7}  {finding.name:8}  ", text))
    if problems:
        raise ResourceError(f"problems with {', '.join(problems)}: see the cures")
