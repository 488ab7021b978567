"""`gpt-cli score`: how likely texts are; and a filter of lines by their perplexity."""

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from gpt_cli.cli import options as flags
from gpt_cli.cli.inputs import input_file
from gpt_cli.cli.layout import counted
from gpt_cli.cli.progress import LONG, StatusLine
from gpt_cli.cli.score_format import HEADER, Form, score_lines
from gpt_cli.cli.streams import note, on_terminal, write
from gpt_cli.errors import InputError, RowsError
from gpt_cli.jobs import storage

if TYPE_CHECKING:
    from gpt_cli.engine import Engine


def score(
    file: str | None = flags.argument(
        "[FILE]", "The text, or rows as for batch with --output, --format or --template"
    ),
    *,
    from_file: str | None = flags.ROWS_FILE,
    form: Form,
    filled: flags.Filled,
    rows: flags.RowFiles,
    loading: flags.Loading,
    where: flags.Where,
) -> None:
    r"""Show how likely a text is.

    Print the number of tokens, the log-likelihood, the perplexity and the bits per byte. With
    --lines, print these numbers and the text for each line. The first token of a text has nothing
    before it and is not scored without --bos, so a text needs at least two tokens.

    With --words, print for each word the number of its line (1 without --lines), the word, its
    start and end in bytes, the number of its tokens and its surprisal, which includes the end of
    the word.

    With --output, --format or --template, FILE has rows: lines, JSON Lines with a "text" and an
    optional "id", or Parquet with these columns. A record with the numbers is written for each row.

    Examples:
        echo 'The fox was happy.' | gpt-cli score -m tiny
        echo 'The fox was happy.' | gpt-cli score -m tiny --words --bos
        printf 'The fox ran.\nFox ran the.\n' | gpt-cli score -m tiny --lines
    """
    file = input_file(file, from_file, "text")
    template = filled.template
    as_rows = rows.output is not None or rows.format is not None or template is not None
    form.check(as_rows=as_rows)
    if not as_rows and (rows.resume or where.engine == "ray"):
        flag = "--resume" if rows.resume else "--engine ray"
        raise InputError(f"{flag} needs the name of a file for records: add --output OUT")
    where.prepare(loading.threads)
    if as_rows:
        from gpt_cli.cli import jobs
        from gpt_cli.jobs import Scoring

        rows = replace(rows, format=rows.format or ("lines" if form.lines else "auto"))
        task = Scoring(form.stride, form.tokens, form.words, form.bos, template)
        jobs.run(task, file, rows, loading, where)
        return
    _check_file(file)
    if form.lines or form.filters:
        _write_lines(loading.load(), file, form, quiet=loading.quiet)
    else:
        text = storage.without_line_end(storage.read_text(file))
        write(form.of_text(loading.load(), text))


def _write_lines(engine: "Engine", file: str, form: Form, *, quiet: bool) -> None:
    """Write each line with its score, or the lines within the bounds unchanged."""
    aligned = on_terminal(sys.stdout)
    if aligned and form.plain and not form.filters:
        write(HEADER)
    number = failed = tokens = 0
    with StatusLine(shown=not quiet and not aligned) as status:
        for line in score_lines(engine, file, form.options):
            number, score = line.number, line.score
            error = isinstance(score, InputError)
            failed += error
            if error and not quiet:
                status.erase()
                note(f"gpt-cli: line {number}: {score}")
            if form.passes(score):
                write(form.of_line(engine, line, aligned=aligned))
            tokens += 0 if isinstance(score, InputError) else score.tokens_scored
            errors = f" ({failed:,} failed)" if failed else ""
            if status.seconds > LONG:
                status.show(f"{counted(number, 'row')}{errors}, {status.rate(tokens)}")
    if failed:
        raise RowsError(f"{failed} of {number} lines could not be scored")


def _check_file(file: str) -> None:
    """Raise InputError if a file cannot be scored as a text, before a model is loaded."""
    if file == "-":
        return
    if storage.is_folder(file) or ("*" in file and not storage.exists(file)):
        raise InputError(f"cannot read {file}: for a folder or a pattern, add --output OUT")
    if not storage.is_address(file) and not storage.exists(file):
        pipe = "echo TEXT | gpt-cli score"
        raise InputError(f"cannot read {file:.80}: No such file; to score a text, pipe it: {pipe}")
    storage.size(file)
