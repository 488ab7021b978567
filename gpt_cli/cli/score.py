"""`gpt-cli score`: how likely texts are; and a filter of lines by their perplexity."""

import sys
from dataclasses import replace
from typing import Annotated

import typer

from gpt_cli.cli import options as flags
from gpt_cli.cli.inputs import input_file
from gpt_cli.cli.progress import Progress
from gpt_cli.cli.streams import note, on_terminal, write
from gpt_cli.errors import InputError, RowsError
from gpt_cli.jobs import storage


def score(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE]",
            path_type=str,
            help="The text; if not given, from a pipe. With --output or --format, rows as for "
            "batch.",
        ),
    ] = None,
    *,
    from_file: flags.RowsFile = None,
    lines: Annotated[bool, typer.Option("--lines", help="Score each line on its own.")] = False,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Show the log-likelihood of each token.")
    ] = False,
    bounds: flags.Bounds,
    stride: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="For a text longer than the context, score N tokens at a time, each after as many "
            "tokens before it as fit; half of the context if not set.",
        ),
    ] = None,
    rows: flags.Rows,
    loading: flags.Loading,
    where: flags.Where,
    as_json: flags.Json = False,
) -> None:
    """Show how likely a text is.

    The numbers are tokens, log-likelihood, perplexity and bits per byte. With --lines, write a line
    for each line: the four numbers and the text. The first token of a text has nothing before it
    and is not scored, so a line needs two tokens.

    With --output or --format, FILE has rows: lines, JSON Lines with a "text" and an optional "id",
    or Parquet with such columns. A record with the numbers is written for each row.
    """
    file = input_file(file, from_file, "text")
    bounds.check()
    if bounds.given and tokens and not as_json:
        raise InputError("--tokens cannot be shown with lines that pass unchanged: add --json")
    as_rows = rows.output is not None or rows.format is not None
    if bounds.given and as_rows:
        raise InputError("--output and --format write records of all rows: filter those instead")
    if not as_rows and (rows.resume or where.engine == "ray"):
        raise InputError("--resume and --engine ray need rows: add --output OUT")
    if as_rows:
        _score_rows(file, lines, tokens, stride, rows, loading, where)
    elif lines or bounds.given:
        _score_lines(file, tokens, bounds, stride, loading, where, as_json)
    else:
        _score_text(file, tokens, stride, loading, where, as_json)


def _score_rows(
    file: str,
    lines: bool,
    tokens: bool,
    stride: int | None,
    rows: flags.Rows,
    loading: flags.Loading,
    where: flags.Where,
) -> None:
    """Write a record for each row."""
    where.prepare(loading.threads)
    from gpt_cli.cli import jobs
    from gpt_cli.jobs import Scoring

    format = rows.format or ("lines" if lines else "auto")
    jobs.run(Scoring(stride, tokens), file, replace(rows, format=format), loading, where)


def _score_text(
    file: str,
    tokens: bool,
    stride: int | None,
    loading: flags.Loading,
    where: flags.Where,
    as_json: bool,
) -> None:
    """Show the score of one text."""
    _check_file(file)
    text = storage.without_line_end(storage.read_text(file))
    where.prepare(loading.threads)
    from gpt_cli.cli import score_format

    engine = loading.load()
    score = engine.score(text, stride=stride)
    if as_json or tokens:
        line = score_format.Line(1, text.encode(), text, score)
        write((score_format.as_json if as_json else score_format.as_tokens)(engine, line, tokens))
    else:
        write(score_format.as_facts(score))


def _score_lines(
    file: str,
    tokens: bool,
    bounds: flags.Bounds,
    stride: int | None,
    loading: flags.Loading,
    where: flags.Where,
    as_json: bool,
) -> None:
    """Show the score of each line, or write the lines within the bounds unchanged."""
    _check_file(file)
    where.prepare(loading.threads)
    from gpt_cli.cli import score_format

    engine = loading.load()
    aligned = on_terminal(sys.stdout)

    def shown(line: score_format.Line) -> str | bytes:
        if as_json:
            return score_format.as_json(engine, line, tokens)
        if tokens:
            return score_format.as_tokens(engine, line)
        return line.data if bounds.given else score_format.as_columns(line, aligned=aligned)

    if aligned and not (bounds.given or as_json or tokens):
        write(score_format.header())
    number = failed = 0
    renews = not loading.quiet and not aligned and on_terminal(sys.stderr)
    with Progress(shown=renews, totals=False) as progress:
        progress.start(None, 0, 0)
        for line in score_format.score_lines(engine, file, stride):
            number = line.number
            error = isinstance(line.score, InputError)
            failed += error
            if error and not loading.quiet:
                note(f"gpt-cli: line {number}: {line.score}")
            if not bounds.given or bounds.contain(line.perplexity):
                write(shown(line))
            progress.advance(line.tokens, error)
    if failed:
        raise RowsError(f"{failed} of {number} lines could not be scored")


def _check_file(file: str) -> None:
    """Raise InputError if a file cannot be scored as a text, before a model is loaded."""
    if file == "-":
        return
    if storage.is_folder(file) or ("*" in file and not storage.exists(file)):
        raise InputError(f"cannot read {file}: for a folder or a pattern, add --output OUT")
    if not storage.is_address(file) and not storage.exists(file):
        raise InputError(
            f"cannot read {file:.80}: No such file; to score a text, pipe it: "
            "echo TEXT | gpt-cli score"
        )
    storage.size(file)
