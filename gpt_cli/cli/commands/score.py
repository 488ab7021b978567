"""`gpt-cli score`: how likely texts are; and a filter of lines by their perplexity."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpt_cli import jobs, records
from gpt_cli.cli import flags, inputs
from gpt_cli.cli.jobs import RowLines, run
from gpt_cli.cli.output import note, write
from gpt_cli.cli.score_format import SUMS, Form, ScoreTable, as_text, total
from gpt_cli.errors import InputError, RowsError, counted
from gpt_cli.jobs import storage
from gpt_cli.jobs.sinks import LineEnds
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
    placement: flags.Placement,
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

    With --max-perplexity or --min-perplexity, the lines or rows that pass are written unchanged,
    and the number of them is shown on standard error.

    Without these, but with --output, --format or --template, FILE has rows: lines, JSON Lines with
    a "text" (or a "prompt"), or tables. A record with the numbers and the other fields is written
    for each row.

    Examples:
        echo 'The fox was happy.' | gpt-cli score -m tiny
        echo 'The fox was happy.' | gpt-cli score -m tiny --words --bos
        printf 'The fox ran.\nFox ran the.\n' | gpt-cli score -m tiny --lines
    """
    files = inputs.files_or_pipe(files, from_files, "no text: give a FILE", quiet=loading.quiet)
    filled = inputs.read_template(template)
    by_line = form.lines or form.filters
    as_rows = rows.output is not None or filled is not None or (rows.used and not by_line)
    form.check(as_rows=as_rows)
    if placement.engine == "ray" and not as_rows:
        raise InputError("--engine ray needs a file as output: add --output OUT")
    if form.filters and form.as_json and rows.output is not None:
        raise InputError("--json shows the rows that pass as records: leave out --output")
    if len(files) == 1 and not as_rows:
        inputs.check_files(files, "to score a text, pipe it: echo TEXT | gpt-cli score")
        _check_text(files[0])
    task = _task(form, filled, details=form.as_json or as_rows)
    if as_rows:
        run(task, files, rows, loading, placement)
    else:
        _score_files(task, files, form, rows, loading, placement)


def _task(form: Form, template: jobs.Template | None, *, details: bool) -> jobs.Scoring:
    """Return the task; raise InputError if no line could pass its filter."""
    options: dict[str, Any] = {
        "stride": form.stride,
        "logprobs": form.by_token,
        "words": form.words,
        "bos": form.bos,
        "template": template,
        "details": details,
        "layers": form.layers,
        "min_k": form.min_k,
        "eos": form.eos,
        "special": form.special,
        "context": form.before,
    }
    if not form.filters:
        return jobs.Scoring(**options)
    return jobs.Filtering(
        **options, max_perplexity=form.max_perplexity, min_perplexity=form.min_perplexity
    )


def _score_files(
    task: jobs.Scoring,
    files: Sequence[str],
    form: Form,
    rows: flags.RowFiles,
    loading: flags.Loading,
    placement: flags.Placement,
) -> None:
    """Write the scores of whole files or of their lines; raise RowsError if some have none."""
    errors = _errors(files, quiet=loading.quiet)
    if form.filters:
        sink: Files = KeptRows(form, files, errors)
    elif form.lines:
        task = replace(task, every_line=True)
        kind = Totals if form.total else ScoredLines
        sink = kind(form, files, errors)
    else:
        task = replace(task, whole_files=True)
        sink = WholeTexts(form, files, errors)
    unread = ""
    if errors:
        failed = len(files) - len(sink.readable)
        unread = f"{failed:,} of {counted(len(files), 'file')} could not be scored"
    try:
        if sink.readable:
            run(task, sink.readable, rows, loading, placement, sink)
        else:
            sink.finish(0)
    except RowsError as error:
        if unread and not sink.unread:  # the error counts only lines
            raise RowsError(f"{unread}, and {error}") from None
        raise
    if unread:
        raise RowsError(unread)


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


class Files(RowLines):
    """The texts or lines of files, some of which may have an error instead."""

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
        """Write a record with its file if there are several files.

        The job has no names in records if it reads only one of them.
        """
        if len(self._files) > 1:
            record = {"index": record["index"], "file": self.readable[0]} | record
        super().write(record)

    def json(self, record: Record) -> str:
        """Return the record of a line as JSON."""
        if len(self._files) == 1 and "error" not in record:
            del record["line"]
        return json_line(record)


class WholeTexts(Files):
    """The scores of whole files: that of a text, or the sum of the rows of a table."""

    noun = "file"

    def __init__(self, form: Form, files: Sequence[str], errors: Mapping[str, InputError]):
        super().__init__(form, files, errors)
        self._table = ScoreTable(form, files)
        self.unread = len(files) - len(self.readable)
        self._written = 0  # number of files
        self._failed = 0
        self._rows: Record | None = None  # the sum of the rows of a table, so far

    def write(self, record: Record) -> None:
        """Write the score or the error of a file, after those of files before it."""
        if "line" in record:
            self._add(record)
            return
        self._write_until(record["file"])
        if "error" in record and len(self._files) == 1:
            raise InputError(record["error"]["message"])
        if "error" in record and not (self._form.as_json or self.quiet):
            note(f"gpt-cli: {record['error']['message']}")
        self._write_file(record)

    def finish(self, rows: int) -> None:
        """Write the score of the last table, and the errors of the last files."""
        self._write_until(None)

    def _add(self, record: Record) -> None:
        """Add a row to the sum of its table."""
        file = record["file"]
        if self._rows is None or self._rows["file"] != file:
            if not self._form.plain_sums:
                raise InputError(f"{storage.label(file)} has rows: add --lines, for each of them")
            self._write_until(file)
            names = ("rows", *SUMS, "bytes")
            self._rows = {"index": 0, "file": file} | dict.fromkeys(names, 0)
            self.noun = "text"
        if "error" in record:
            if not self.quiet:
                place = f"{storage.label(file)}, line {record['line']}"
                note(f"gpt-cli: {place}: {record['error']['message']}")
            return
        self._rows |= {name: record[name] for name in ("model", "adapter")}
        self._rows["rows"] += 1
        for name in SUMS:
            self._rows[name] += record[name]
        if record["bits_per_byte"]:
            bits = -record["total_logprob"] / math.log(2)
            self._rows["bytes"] += round(bits / record["bits_per_byte"])

    def _write_until(self, file: str | None) -> None:
        """Write the score of a table that has ended, and the errors of files before a file."""
        if self._rows is not None:
            table, self._rows = self._rows, None
            self._write_until(table["file"])
            self._write_file(_of_table(table))
        while self._written < len(self._files) and self._files[self._written] != file:
            name = self._files[self._written]
            error = self._errors.get(name)
            if error is None:
                error = InputError(f"{storage.label(name)} has no rows")
                if not (self._form.as_json or self.quiet):
                    note(f"gpt-cli: {error}")
            self._write_file({"file": name} | records.of_error(error))

    def _write_file(self, record: Record) -> None:
        form = self._form
        record = record | {"index": self._written}  # among all files
        if len(self._files) == 1 and not form.total:
            del record["file"]
        self._failed += "error" in record
        write(as_text(record, form, self._table, first=self._written == self._failed))
        self._written += 1


def _of_table(rows: Record) -> Record:
    """Return the record of a table for the sum of its rows."""
    from gpt_cli.scoring.score import perplexity  # brings NumPy

    size = rows.pop("bytes")
    if not rows["tokens_scored"]:
        error = InputError(f"{storage.label(rows['file'])}: no row has a token that is scored")
        return {"index": 0, "file": rows["file"]} | records.of_error(error)
    value = perplexity(rows["total_logprob"], rows["tokens_scored"])
    bits = -rows["total_logprob"] / math.log(2)
    sums = {"perplexity": records.finite(value), "bits_per_byte": bits / size if size else None}
    return rows | sums


class Totals(Files):
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


class ScoredLines(Files):
    """Lines with their scores."""

    def __init__(self, form: Form, files: Sequence[str], errors: Mapping[str, InputError]):
        super().__init__(form, files, errors)
        self._table = ScoreTable(form, files)
        self.has_fields = form.as_json

    def line(self, record: Record) -> str | bytes:
        """Return the output for a line."""
        line = record.pop("data", None)
        if self._form.as_json:
            return self.json(record)
        if line is None:  # a row, whose text may have line ends
            text = record.get("text", "").replace("\r", "\\r").replace("\n", "\\n")
        else:
            text = line.removesuffix(b"\n").decode(errors="surrogateescape")
        return self._table.rows(record, text)


class KeptRows(Files):
    """The rows that pass a filter: their records, or the rows unchanged, below their header."""

    def __init__(self, form: Form, files: Sequence[str], errors: Mapping[str, InputError]):
        super().__init__(form, files, errors)
        self._ends = LineEnds()
        self.has_fields = form.as_json

    def begin(self, header: bytes) -> None:
        """Write the header of a table."""
        if header and not self._form.as_json:
            write(self._ends.complete(header))

    def line(self, record: Record) -> str | bytes:
        """Return the output for a row, which is empty if the row does not pass."""
        row = record.pop("data", None)
        if row is None:
            return b""
        return self.json(record) if self._form.as_json else self._ends.complete(row)
