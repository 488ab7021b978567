"""`gpt-cli score`: how likely texts are; and a filter of lines by their perplexity."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from gpt_cli import jobs, records
from gpt_cli.cli import flags, inputs
from gpt_cli.cli.jobs import Lines, needs_output, run
from gpt_cli.cli.output import note, write
from gpt_cli.cli.score_format import SUMS, Form, Table, as_text, perplexity_of, total
from gpt_cli.errors import InputError, RowsError, compute_valid, counted
from gpt_cli.jobs import storage
from gpt_cli.options.declare import OptionError
from gpt_cli.records import Record, json_line


def score(
    files: list[str] | None = flags.argument(
        "[FILE]...", "Texts, or rows as for batch with --output, --format or --template"
    ),
    *,
    from_files: Sequence[str] | None = flags.ROWS_FILES,
    form: Form,
    template: str | None = flags.TEMPLATE,
    rows: flags.RowFiles,
    loading: flags.Loading,
    where: flags.Where,
) -> None:
    r"""Show how likely a text is.

    For each FILE, print the number of tokens, the log-likelihood, the perplexity and the bits per
    byte. With --lines, print these numbers and the text for each line. The first token of a text
    has nothing before it and is not scored without --bos, so a text needs at least two tokens.

    With --words, print for each word the number of its line (1 without --lines), the word, its
    start and end in bytes, the number of its tokens and its surprisal, which includes the end of
    the word. With --layers, more columns have the numbers after 0 (the embedding), 1, ... layers.
    If there are several files, each row begins with the name of its file. On a terminal, tables are
    aligned and have a header.

    With --output, --format or --template, FILE has rows: lines, JSON Lines with a "text" and an
    optional "id", or Parquet with these columns. A record with the numbers is written for each row.

    Examples:
        echo 'The fox was happy.' | gpt-cli score -m tiny
        echo 'The fox was happy.' | gpt-cli score -m tiny --words --bos
        printf 'The fox ran.\nFox ran the.\n' | gpt-cli score -m tiny --lines
    """
    files = inputs.files_or_pipe(files, from_files, "no text: give a FILE", quiet=loading.quiet)
    filled = inputs.read_template(template)
    as_rows = rows.output is not None or rows.format is not None or filled is not None
    form.check(as_rows=as_rows)
    if not as_rows and (rows.resume or where.engine == "ray"):
        raise needs_output("--resume" if rows.resume else "--engine ray")
    if len(files) == 1 and not as_rows:
        inputs.check_files(files, "to score a text, pipe it: echo TEXT | gpt-cli score")
        _check_text(files[0])
    task = jobs.Scoring(
        form.stride,
        form.by_token,
        form.words,
        form.bos,
        filled,
        details=form.as_json or as_rows,
        layers=form.layers,
        min_k=form.min_k,
    )
    if as_rows:
        rows = replace(rows, format=rows.format or ("lines" if form.lines else "auto"))
        run(task, files, rows, loading, where)
    elif form.lines or form.filters:
        task = replace(task, every_line=True)
        errors = _errors(files, quiet=loading.quiet)
        sink = (Totals if form.total else ScoredLines)(form, files, errors)
        if sink.readable:
            run(task, sink.readable, replace(rows, format="lines"), loading, where, sink)
        else:
            sink.finish(0)
        _check_complete(len(files) - len(sink.readable), len(files))
    else:
        _score_texts(files, form, task, loading)


def _check_text(file: str) -> None:
    """Raise InputError if a file cannot be read as one text."""
    if storage.is_folder(file) or ("*" in file and not storage.exists(file)):
        raise InputError(f"cannot read {file}: for a folder or a pattern, add --output OUT")
    if not storage.is_stream(file):
        with storage.open_file(file):
            pass


def _errors(files: Sequence[str], *, quiet: bool) -> dict[str, InputError]:
    """Return, and report, the errors of files that cannot be read as texts."""
    errors = {}
    for file in files:
        try:
            _check_text(file)
        except InputError as error:
            errors[file] = error
            if not quiet:
                note(f"gpt-cli: {error}")
    return errors


def _check_complete(failed: int, total: int) -> None:
    """Raise RowsError if files could not be scored."""
    if failed:
        raise RowsError(f"{failed:,} of {counted(total, 'file')} could not be scored")


def _score_texts(
    files: Sequence[str], form: Form, task: jobs.Scoring, loading: flags.Loading
) -> None:
    """Write the scores of whole texts; raise RowsError at the end if some of several have none."""
    results = compute_valid(files, _read, partial(_scores, task, loading))
    failed = 0
    table = Table(form, files)
    for index, (file, result) in enumerate(zip(files, results, strict=True)):
        name = {"file": file} if form.total or len(files) > 1 else {}
        if isinstance(result, InputError):
            if len(files) == 1:
                raise result
            failed += 1
            if not (form.as_json or loading.quiet):
                note(f"gpt-cli: {result}")
            result = records.of_error(result)
        write(as_text({"index": index} | name | result, form, table, first=index == failed))
    _check_complete(failed, len(files))


def _read(file: str) -> tuple[str, str]:
    _check_text(file)
    return file, storage.without_line_end(storage.read_text(file))


def _scores(
    task: jobs.Scoring, loading: flags.Loading, texts: Iterator[tuple[str, str]]
) -> Iterator[Record | InputError]:
    """Yield the records of texts with the names of their files, or errors."""
    engine = None
    for file, text in texts:
        engine = engine or loading.load()  # once a text is read
        try:
            score = engine.score(text, **task.options)
        except OptionError:
            raise
        except InputError as error:
            yield InputError(f"{storage.label(file)}: {error}")
        else:
            yield {"text": text} | task.of_score(engine, score)


class FileLines(Lines):
    """The lines of files, some of which may have an error instead."""

    totals = False
    noun = "line"
    failure = "could not be scored"
    advice = ""

    def __init__(self, form: Form, files: Sequence[str], errors: Mapping[str, InputError]):
        self._form = form
        self._files = files
        self._errors = errors
        self.readable = [file for file in files if file not in errors]

    def write(self, record: Record) -> None:
        """Write a record with its file and line if there are several files.

        The job has no names in records if it reads only one of them.
        """
        if len(self._files) > 1:
            index = record["index"]
            record = {"index": index, "file": self.readable[0], "line": index + 1} | record
        super().write(record)


class Totals(FileLines):
    """The perplexity of the lines of each file."""

    def __init__(self, form: Form, files: Sequence[str], errors: Mapping[str, InputError]):
        super().__init__(form, files, errors)
        self._sums = {file: dict.fromkeys(SUMS, 0) for file in files}

    def line(self, record: Record) -> str:
        """Add a line to the sums of its file; return no output."""
        if "error" not in record:
            sums = self._sums[record.get("file", self._files[0])]
            for name in SUMS:
                sums[name] += record[name]
        return ""

    def finish(self, rows: int) -> None:
        """Write the totals."""
        from gpt_cli.scoring.score import perplexity  # brings NumPy

        for index, (file, sums) in enumerate(self._sums.items()):
            value = perplexity(sums["total_logprob"], sums["tokens_scored"])
            result = sums | {"perplexity": None if value == math.inf else value}
            if file in self._errors:
                result = records.of_error(self._errors[file])
            write(total({"index": index, "file": file} | result, self._form))


class ScoredLines(FileLines):
    """Lines with their scores, or unchanged where the filter lets them pass."""

    def __init__(self, form: Form, files: Sequence[str], errors: Mapping[str, InputError]):
        super().__init__(form, files, errors)
        self._table = Table(form, files)

    def line(self, record: Record) -> str | bytes:
        """Return the output for a line, which is empty if the filter does not let it pass."""
        line = record.pop("data")
        form = self._form
        perplexity = math.nan if "error" in record else perplexity_of(record)
        least, most = form.min_perplexity or 0, form.max_perplexity or math.inf
        if form.filters and not least <= perplexity <= most:  # NaN never passes
            return b""
        if form.as_json:
            return json_line(record)
        return line if form.filters else self._table.rows(record, line)
