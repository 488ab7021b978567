"""`gpt-cli score`: how likely texts are; and a filter of lines by it."""

import math
import sys
from pathlib import Path
from typing import Annotated

import typer

from gpt_cli.cli import options as flags
from gpt_cli.cli.text import (
    input_file,
    note,
    on_terminal,
    read_lines,
    read_text,
    without_line_end,
    write,
)
from gpt_cli.errors import InputError, RowsError


def score(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="The text; without it, what comes through a pipe."),
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
    model: flags.Model = "gpt2",
    device: flags.Device = "auto",
    dtype: flags.Dtype = "auto",
    threads: flags.Threads = None,
    revision: flags.Revision = None,
    offline: flags.Offline = False,
    as_json: flags.Json = False,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
) -> None:
    """Show how likely a text is.

    It is told in numbers: tokens, log-likelihood, perplexity, bits per byte.

    With --lines, a line of output for each of input: the four numbers, and the text. The first
    token of a text has nothing before it and is not scored; so a line needs two.
    """
    file = input_file(file, "no text: give a FILE, or a pipe on standard input")
    filters = min_perplexity is not None or max_perplexity is not None
    if filters and tokens and not as_json:
        raise InputError("--tokens has no place among lines passed on unchanged: add --json")
    for bound in (min_perplexity, max_perplexity):
        if bound is not None and not bound > 0:
            raise InputError(f"a perplexity is above 0, not {bound}")
    if (min_perplexity or 0) > (max_perplexity or math.inf):
        raise InputError("--min-perplexity is above --max-perplexity: no line could pass")
    whole = None if lines or filters else without_line_end(read_text(file))
    flags.prepare(threads)
    import gpt_cli
    from gpt_cli.cli import scored

    engine = gpt_cli.load(
        model,
        device=device,
        dtype=dtype,
        revision=revision,
        offline=offline,
        quiet=quiet,
        passes=None if whole is None else flags.scoring_passes(whole),
    )

    aligned = on_terminal(sys.stdout)

    def show(line: scored.Scored) -> str | bytes:
        if as_json:
            return scored.as_json(engine, line, tokens=tokens)
        if tokens:
            return scored.as_tokens(engine, line)
        return line.data if filters else scored.as_columns(line, aligned=aligned)

    if whole is not None:
        score = engine.score(whole, stride=stride)
        plain = not (as_json or tokens)
        line = scored.Scored(1, whole.encode(), whole, score)
        write(scored.as_facts(score) if plain else show(line))
        return
    if aligned and not (filters or as_json or tokens):
        header = ("tokens", "log-lik.", "perplexity", "bits/byte")
        write(scored.columns(header, aligned=True) + "text\n")
    number = failed = 0
    for block in read_lines(file):
        for line in scored.score_lines(engine, block, number + 1, stride):
            number = line.number
            if isinstance(line.score, InputError):
                failed += 1
                if not quiet:
                    note(f"gpt-cli: line {number}: {line.score}")
            if not filters or line.within(min_perplexity, max_perplexity):
                write(show(line))
    if failed:
        raise RowsError(f"{failed} of {number} lines could not be scored")
