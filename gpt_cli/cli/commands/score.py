"""`gpt-cli score`: how likely texts are; and a filter of lines by their perplexity."""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gpt_cli import jobs, records
from gpt_cli.cli import inputs
from gpt_cli.cli import options as flags
from gpt_cli.cli.jobs import Lines, needs_output, run
from gpt_cli.cli.output import note, on_terminal, token_label, write
from gpt_cli.errors import InputError, RowsError, compute_valid, counted
from gpt_cli.jobs import storage
from gpt_cli.options.declare import Declared, OptionError, Range, option
from gpt_cli.records import Record, json_line

# The columns of tables on a terminal, with their widths; the last one may have any width.
_LINES = {"tokens": 12, "log-lik.": 12, "perplexity": 12, "bits/byte": 12, "text": 0}
_TOKENS = {"line": 6, "id": 6, "log-lik.": 12, "token": 0}
_WORDS = {"line": 6, "start": 8, "end": 8, "tokens": 6, "bits": 12, "word": 0}
_SUMS = ("tokens", "tokens_scored", "total_logprob")
_POSITIVE = Range(lambda number: number > 0, "above 0")


def _bound(words: str) -> Any:
    help = f"Print only lines with a perplexity of {words} X, unchanged; a line needs 2 tokens."
    return option(None, help, _POSITIVE)


@dataclass(kw_only=True, eq=False, repr=False)
class Form(Declared):
    """The options of scoring and of its output."""

    lines: bool = option(False, "Score each line on its own.")
    tokens: bool = option(
        False,
        "Show the log-likelihood of each token; with --json, also its rank and the entropy of its "
        "distribution.",
    )
    words: bool = option(False, "Show the surprisal of each word in bits.")
    total: bool = option(
        False,
        "Show only the perplexity and the name of each file; with --lines, that of all its lines.",
    )
    bos: bool = flags.BOS
    max_perplexity: float | None = _bound("at most")
    min_perplexity: float | None = _bound("at least")
    stride: int | None = option(
        None,
        "For a text longer than the context, score N tokens per window, with as many preceding "
        "tokens as fit; half of the context if not set.",
    )
    as_json: bool = flags.JSON

    @property
    def filters(self) -> bool:
        """Return whether lines are filtered."""
        return self.max_perplexity is not None or self.min_perplexity is not None

    @property
    def plain(self) -> bool:
        """Return whether the output is only numbers."""
        return not (self.as_json or self.tokens or self.words)

    def check(self, *, as_rows: bool) -> None:
        """Raise InputError if options exclude one another."""
        if self.tokens and self.words:
            raise InputError("--tokens and --words cannot be used together: choose one")
        excluded = {
            "--tokens": self.tokens,
            "--words": self.words,
            "--max-perplexity or --min-perplexity": self.filters,
            "--output, --format or --template": as_rows,
        }
        for flag, used in excluded.items():
            if self.total and used:
                raise InputError(f"--total cannot be used with {flag}: leave one of them out")
        if self.filters and not (self.plain or self.as_json):
            flag = "--tokens" if self.tokens else "--words"
            raise InputError(f"{flag} with --max-perplexity or --min-perplexity needs --json")
        if (self.min_perplexity or 0) > (self.max_perplexity or math.inf):
            raise InputError("--min-perplexity is above --max-perplexity: no line could pass")
        if self.filters and as_rows:
            raise InputError(
                "--max-perplexity and --min-perplexity cannot be used with --output, --format or "
                "--template: filter the records instead"
            )


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
    the word. If there are several files, each row begins with the name of its file. On a terminal,
    tables are aligned and have a header.

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
    task = jobs.Scoring(form.stride, form.tokens, form.words, form.bos, filled)
    if as_rows:
        rows = replace(rows, format=rows.format or ("lines" if form.lines else "auto"))
        run(task, files, rows, loading, where)
    elif form.lines or form.filters:
        task = replace(task, details=form.as_json, every_line=True)
        errors = _errors(files, quiet=loading.quiet)
        sink = (Totals if form.total else ScoredLines)(form, files, errors)
        if sink.readable:
            run(task, sink.readable, replace(rows, format="lines"), loading, where, sink)
        else:
            sink.finish(0)
        _check_complete(len(files) - len(sink.readable), len(files))
    else:
        _score_texts(files, form, loading)


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


def _score_texts(files: Sequence[str], form: Form, loading: flags.Loading) -> None:
    """Write the scores of whole texts; raise RowsError at the end if some of several have none."""
    results = compute_valid(files, _read, partial(_scores, form, loading))
    failed, table = 0, Table(form, files)
    for index, (file, result) in enumerate(zip(files, results, strict=True)):
        name = {"file": file} if form.total or len(files) > 1 else {}
        if isinstance(result, InputError):
            if len(files) == 1:
                raise result
            failed += 1
            if not (form.as_json or loading.quiet):
                note(f"gpt-cli: {result}")
            result = records.of_error(result)
        write(_text({"index": index} | name | result, form, table, first=index == failed))
    _check_complete(failed, len(files))


def _read(file: str) -> tuple[str, str]:
    _check_text(file)
    return file, storage.without_line_end(storage.read_text(file))


def _scores(
    form: Form, loading: flags.Loading, texts: Iterator[tuple[str, str]]
) -> Iterator[Record | InputError]:
    """Yield the records of texts with the names of their files, or errors."""
    engine = None
    details = form.tokens and form.as_json
    for file, text in texts:
        engine = engine or loading.load()  # once a text is read
        options = {"ranks": details, "entropies": details, "words": form.words}
        try:
            score = engine.score(text, stride=form.stride, bos=form.bos, **options)
        except OptionError:
            raise
        except InputError as error:
            yield InputError(f"{storage.label(file)}: {error}")
        else:
            yield {"text": text} | records.of_score(engine, score, logprobs=form.tokens)


def _text(record: Record, form: Form, table: "Table", *, first: bool) -> str:
    """Return the output for a whole text, which may be the first without an error."""
    if form.total:
        return _total(record, form)
    if form.as_json:
        return json_line(record)
    if not form.plain:
        return (table.header() if first else "") + table.rows(record)
    if "error" in record:
        return ""
    facts = {"file": record["file"]} if "file" in record else {}
    facts |= {
        "tokens": f"{record['tokens']} ({record['tokens_scored']} scored)",
        "log-likelihood": _number(record["total_logprob"]),
        "perplexity": _number(_perplexity(record)),
        "bits per byte": _number(record["bits_per_byte"]),
    }
    gap = "" if first else "\n"
    return gap + "".join(f"{name:16}{value}\n" for name, value in facts.items())


def _total(record: Record, form: Form) -> str:
    """Return the perplexity and the name of a file."""
    if form.as_json:
        names = ("index", "file", *_SUMS, "perplexity", "error")
        return json_line({name: record[name] for name in names if name in record})
    perplexity = "nan" if "error" in record else _number(_perplexity(record))
    cell = f"{perplexity:>12}  " if on_terminal(sys.stdout) else f"{perplexity}\t"
    return f"{cell}{record['file']}\n"


class FileLines(Lines):
    """The lines of files, some of which may have an error instead."""

    totals = False
    noun, failure, advice = "line", "could not be scored", ""

    def __init__(self, form: Form, files: Sequence[str], errors: Mapping[str, InputError]):
        self._form, self._files, self._errors = form, files, errors
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
        self._sums = {file: dict.fromkeys(_SUMS, 0) for file in files}

    def line(self, record: Record) -> str:
        """Add a line to the sums of its file; return no output."""
        if "error" not in record:
            sums = self._sums[record.get("file", self._files[0])]
            for name in _SUMS:
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
            write(_total({"index": index, "file": file} | result, self._form))


class ScoredLines(FileLines):
    """Lines with their scores, or unchanged where the filter lets them pass."""

    def __init__(self, form: Form, files: Sequence[str], errors: Mapping[str, InputError]):
        super().__init__(form, files, errors)
        self._table = Table(form, files)

    def resume(self) -> jobs.Resumed:
        """Begin with a header on a terminal."""
        if not (self._form.as_json or self._form.filters):
            write(self._table.header())
        return super().resume()

    def line(self, record: Record) -> str | bytes:
        """Return the output for a line, which is empty if the filter does not let it pass."""
        line, form = record.pop("data"), self._form
        perplexity = math.nan if "error" in record else _perplexity(record)
        least, most = form.min_perplexity or 0, form.max_perplexity or math.inf
        if form.filters and not least <= perplexity <= most:  # NaN never passes
            return b""
        if form.as_json:
            return json_line(record)
        return line if form.filters else self._table.rows(record, line)


class Table:
    """A row per line, token or word: on a terminal aligned under a header, else with tabs.

    Each row begins with the name of its file if there are several.
    """

    def __init__(self, form: Form, files: Sequence[str]):
        self._form, self._aligned = form, on_terminal(sys.stdout)
        columns = _WORDS if form.words else _TOKENS if form.tokens else _LINES
        self._widths = {"file": max(map(len, files))} if len(files) > 1 else {}
        self._widths |= {name: columns[name] for name in columns if form.lines or name != "line"}

    def header(self) -> str:
        """Return the first line, which is empty in a pipe."""
        return self._row({name: name for name in self._widths}) if self._aligned else ""

    def rows(self, record: Record, line: bytes = b"") -> str:
        """Return the rows of a record; in the row of a line, the line is unchanged."""
        file = {"file": record["file"]} if "file" in self._widths else {}
        return "".join(self._row(file | cells) for cells in self._cells(record, line))

    def _row(self, cells: Mapping[str, object]) -> str:
        if not self._aligned:
            return "\t".join(map(str, cells.values())) + "\n"
        texts = [f"{cells[name]:>{width}}" for name, width in self._widths.items()]
        return "  ".join(texts) + "\n"

    def _cells(self, record: Record, line: bytes) -> Iterator[dict[str, object]]:
        """Yield the cells of rows, in their order in a pipe."""
        if self._form.plain:
            values: list[object] = ["nan"] * 4
            if "error" not in record:
                numbers = record["total_logprob"], _perplexity(record), record["bits_per_byte"]
                values = [record["tokens"], *map(_number, numbers)]
            text = line.removesuffix(b"\n").decode(errors="surrogateescape")
            yield dict(zip(_LINES, [*values, text], strict=True))
            return
        number = record.get("line", record["index"] + 1) if self._form.lines else 1
        for word in record.get("words", []):
            bits = _number(word["surprisal"])
            names = "word", "start", "end", "tokens"
            yield {"line": number} | {name: word[name] for name in names} | {"bits": bits}
        for token in record.get("logprobs", []):
            logprob, text = _number(token["logprob"]), token_label(token)
            yield {"line": number, "id": token["id"], "log-lik.": logprob, "token": text}


def _perplexity(record: Record) -> float:
    """Return the perplexity, which is NaN if no token is scored; JSON has no infinite one."""
    unscored = record["perplexity"] is None and not record["tokens_scored"]
    return math.nan if unscored else record["perplexity"] or math.inf


def _number(value: float | None) -> str:
    return "nan" if value is None else f"{value:.6g}"
