"""`gpt-cli score`: how likely texts are; and a filter of lines by it."""

import math
import sys
from typing import Annotated, Any

import typer

from gpt_cli import places
from gpt_cli.cli import options as flags
from gpt_cli.cli.text import input_file, note, on_terminal, write
from gpt_cli.errors import InputError, RowsError
from gpt_cli.reading import read_text, without_line_end


def score(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE]",
            path_type=str,
            help="The text; without it, what comes through a pipe. With --output or --format, "
            "rows, as for batch.",
        ),
    ] = None,
    lines: Annotated[bool, typer.Option("--lines", help="Score each line by itself.")] = False,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Show the log-likelihood of each token.")
    ] = False,
    max_perplexity: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Pass on lines of at most X, unchanged; never those of 0 or 1 tokens.",
        ),
    ] = None,
    min_perplexity: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Pass on lines of at least X, unchanged; never those of 0 or 1 tokens.",
        ),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Where a text is longer than the context, score N tokens at a time, each seen "
            "with all before that fit; half of the context if not set.",
        ),
    ] = None,
    output: flags.Output = None,
    resume: flags.Resume = False,
    form: flags.OtherFormat = None,
    model: flags.Model = "gpt2",
    device: flags.Device = "auto",
    dtype: flags.Dtype = "auto",
    threads: flags.Threads = None,
    revision: flags.Revision = None,
    offline: flags.Offline = False,
    engine: flags.EngineName = "local",
    address: flags.Address = None,
    workers: flags.Workers = None,
    gpus_per_worker: flags.GPUsPerWorker = None,
    as_json: flags.Json = False,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
) -> None:
    """Show how likely a text is.

    It is told in numbers: tokens, log-likelihood, perplexity, bits per byte.

    With --lines, a line of output for each of input: the four numbers, and the text. The first
    token of a text has nothing before it and is not scored; so a line needs two.

    With --output or --format, FILE is rows: lines, JSON Lines with a "text" and an "id" if wanted,
    or Parquet with such columns. For each, there is a record with its numbers.
    """
    file = input_file(file, "no text: give a FILE, or a pipe on standard input")
    filters = min_perplexity is not None or max_perplexity is not None
    if filters and tokens and not as_json:
        raise InputError("--tokens has no place among lines passed on unchanged: add --json")
    _check_bounds(min_perplexity, max_perplexity)
    load_options: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "revision": revision,
        "offline": offline,
    }
    if output is not None or form is not None:
        if filters:
            raise InputError("--output and --format have records of all rows: filter those")
        if engine == "local":
            flags.prepare(threads)
        from gpt_cli.cli import jobs
        from gpt_cli.records import Scoring

        cluster = flags.cluster(
            engine, address=address, workers=workers, gpus=gpus_per_worker, threads=threads
        )
        form = form or ("lines" if lines else "auto")
        job = jobs.Job(file, output, form, resume, None, model, load_options, cluster, quiet)
        jobs.run(job, Scoring(stride, tokens))
        return
    if resume or engine == "ray":
        raise InputError("--resume and --engine ray are for rows: give --output OUT, too")
    # There is none, and no flag may say anything of one.
    flags.cluster(engine, address=address, workers=workers, gpus=gpus_per_worker, threads=threads)
    if file != "-" and (places.is_folder(file) or ("*" in file and not places.exists(file))):
        raise InputError(
            f"cannot read {file}: it is a folder or a pattern; name a file, or give --output, too"
        )
    if file != "-":
        places.size(file)  # before a model is loaded
    whole = None if lines or filters else without_line_end(read_text(file))
    flags.prepare(threads)
    import gpt_cli
    from gpt_cli.cli import scored

    loaded = gpt_cli.load(model, **load_options, quiet=quiet)
    plain = not (filters or as_json or tokens)
    aligned = on_terminal(sys.stdout)

    def show(line: scored.Scored) -> str | bytes:
        if as_json:
            return scored.as_json(loaded, line, tokens=tokens)
        if tokens:
            return scored.as_tokens(loaded, line)
        return line.data if filters else scored.as_columns(line, aligned=aligned)

    if whole is not None:
        score = loaded.score(whole, stride=stride)
        line = scored.Scored(1, whole.encode(), whole, score)
        write(scored.as_facts(score) if plain else show(line))
        return
    if aligned and plain:
        write(scored.header())
    number = failed = 0
    for line in scored.score_lines(loaded, file, stride):
        number = line.number
        if isinstance(line.score, InputError):
            failed += 1
            if not quiet:
                note(f"gpt-cli: line {number}: {line.score}")
        if not filters or line.within(min_perplexity, max_perplexity):
            write(show(line))
    if failed:
        raise RowsError(f"{failed} of {number} lines could not be scored")


def _check_bounds(least: float | None, most: float | None) -> None:
    for bound in (least, most):
        if bound is not None and not bound > 0:
            raise InputError(f"a perplexity is above 0, not {bound}")
    if (least or 0) > (most or math.inf):
        raise InputError("--min-perplexity is above --max-perplexity: no line could pass")
