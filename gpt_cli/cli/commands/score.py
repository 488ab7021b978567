"""`gpt-cli score`: how likely texts are; and a filter of lines by their perplexity."""

import sys
from dataclasses import replace

from gpt_cli import jobs, records
from gpt_cli.cli import options as flags
from gpt_cli.cli.inputs import input_file
from gpt_cli.cli.jobs import Lines, run
from gpt_cli.cli.score_format import HEADER, Form
from gpt_cli.cli.streams import on_terminal, write
from gpt_cli.errors import InputError
from gpt_cli.jobs import storage
from gpt_cli.records import Record


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
    if not as_rows:
        _check_text(file, rows, where)
    where.prepare(loading.threads)
    if not (as_rows or form.lines or form.filters):
        _score_text(file, form, loading)
    elif as_rows:
        rows = replace(rows, format=rows.format or ("lines" if form.lines else "auto"))
        run(replace(form.task, template=template), file, rows, loading, where)
    else:
        task = replace(form.task, details=form.as_json, every_line=True)
        sink = ScoredLines(form, quiet=loading.quiet)
        run(task, file, replace(rows, format="lines"), loading, where, sink)


class ScoredLines(Lines):
    """Lines with their scores, or unchanged where the filter lets them pass."""

    totals = False
    failure = "{} of {} lines could not be scored"

    def __init__(self, form: Form, *, quiet: bool):
        super().__init__(quiet=quiet)
        self._form, self._aligned = form, on_terminal(sys.stdout)

    def resume(self) -> jobs.Resumed:
        """Begin with a header on a terminal."""
        if self._aligned and self._form.plain and not self._form.filters:
            write(HEADER)
        return super().resume()

    def write(self, record: Record) -> None:
        """Write the output for a line; show an error."""
        line = record.pop("data")
        if "error" in record:
            self.complain(record)
        if self._form.passes(record):
            write(self._form.of_line(record, line, aligned=self._aligned))


def _score_text(file: str, form: Form, loading: flags.Loading) -> None:
    """Write the score of a whole text."""
    text = storage.without_line_end(storage.read_text(file))
    engine = loading.load()
    details = form.tokens and form.as_json
    score = engine.score(
        text, stride=form.stride, bos=form.bos, ranks=details, entropies=details, words=form.words
    )
    record = records.of_score(engine, score, logprobs=form.tokens)
    write(form.of_text({"index": 0, "text": text} | record))


def _check_text(file: str, rows: flags.RowFiles, where: flags.Where) -> None:
    """Raise InputError if a file cannot be scored as a text, before a model is loaded."""
    if rows.resume or where.engine == "ray":
        flag = "--resume" if rows.resume else "--engine ray"
        raise InputError(f"{flag} needs the name of a file for records: add --output OUT")
    if file == "-":
        return
    if storage.is_folder(file) or ("*" in file and not storage.exists(file)):
        raise InputError(f"cannot read {file}: for a folder or a pattern, add --output OUT")
    if not storage.is_address(file) and not storage.exists(file):
        pipe = "echo TEXT | gpt-cli score"
        raise InputError(f"cannot read {file:.80}: No such file; to score a text, pipe it: {pipe}")
    storage.size(file)
