"""`gpt-cli score`: how likely texts are; and a filter of lines by their perplexity."""

import math
import sys
from dataclasses import dataclass, replace
from typing import Any

from gpt_cli import jobs, records
from gpt_cli.cli import options as flags
from gpt_cli.cli.jobs import Lines, run
from gpt_cli.cli.output import on_terminal, quoted, write
from gpt_cli.errors import InputError
from gpt_cli.jobs import storage
from gpt_cli.options.declare import Declared, Range, option
from gpt_cli.records import Record, json_line

_ALIGNED = "{:>12}  "
_HEADER = (
    "".join(map(_ALIGNED.format, ("tokens", "log-lik.", "perplexity", "bits/byte"))) + "text\n"
)
_POSITIVE = Range(lambda number: number > 0, "above 0")


def _bound(words: str) -> Any:
    help = f"Print only lines with a perplexity of {words} X, unchanged; a line needs 2 tokens."
    return option(None, help, _POSITIVE, metavar="X")


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
    bos: bool = option(False, "Score the first token of a text, too, after the start token.")
    max_perplexity: float | None = _bound("at most")
    min_perplexity: float | None = _bound("at least")
    stride: int | None = option(
        None,
        "For a text longer than the context, score N tokens per window, with as many preceding "
        "tokens as fit; half of the context if not set.",
        metavar="N",
    )
    as_json: bool = option(False, "Print JSON, one object per line.", flag="--json")

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
    file: str | None = flags.argument(
        "[FILE]", "The text, or rows as for batch with --output, --format or --template"
    ),
    *,
    from_file: str | None = flags.ROWS_FILE,
    form: Form,
    template: str | None = flags.TEMPLATE,
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
    file = flags.input_file(file, from_file, "text")
    filled = flags.read_template(template)
    as_rows = rows.output is not None or rows.format is not None or filled is not None
    form.check(as_rows=as_rows)
    if not as_rows:
        _check_text(file, rows, where)
    task = jobs.Scoring(form.stride, form.tokens, form.words, form.bos, filled)
    if as_rows:
        rows = replace(rows, format=rows.format or ("lines" if form.lines else "auto"))
        run(task, file, rows, loading, where)
    elif form.lines or form.filters:
        task = replace(task, details=form.as_json, every_line=True)
        run(task, file, replace(rows, format="lines"), loading, where, ScoredLines(form))
    else:
        _score_text(file, form, loading)


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


def _score_text(file: str, form: Form, loading: flags.Loading) -> None:
    """Write the score of a whole text."""
    text = storage.without_line_end(storage.read_text(file))
    engine = loading.load()
    details = form.tokens and form.as_json
    score = engine.score(
        text, stride=form.stride, bos=form.bos, ranks=details, entropies=details, words=form.words
    )
    record = records.of_score(engine, score, logprobs=form.tokens)
    if not form.plain:
        write(_parts({"index": 0, "text": text} | record, form))
        return
    facts = {
        "tokens": f"{record['tokens']} ({record['tokens_scored']} scored)",
        "log-likelihood": _number(record["total_logprob"]),
        "perplexity": _number(_perplexity(record)),
        "bits per byte": _number(record["bits_per_byte"]),
    }
    write("".join(f"{name:16}{value}\n" for name, value in facts.items()))


class ScoredLines(Lines):
    """Lines with their scores, or unchanged where the filter lets them pass."""

    totals = False
    noun, failure = "line", "could not be scored"

    def __init__(self, form: Form):
        self._form, self._aligned = form, on_terminal(sys.stdout)

    def resume(self) -> jobs.Resumed:
        """Begin with a header on a terminal."""
        if self._aligned and self._form.plain and not self._form.filters:
            write(_HEADER)
        return super().resume()

    def line(self, record: Record) -> str | bytes:
        """Return the output for a line, which is empty if the filter does not let it pass."""
        line, form = record.pop("data"), self._form
        perplexity = math.nan if "error" in record else _perplexity(record)
        least, most = form.min_perplexity or 0, form.max_perplexity or math.inf
        if form.filters and not least <= perplexity <= most:  # NaN never passes
            return b""
        if not form.plain:
            return _parts(record, form)
        return line if form.filters else self._columns(record, line)

    def _columns(self, record: Record, line: bytes) -> bytes:
        """Return tokens, log-likelihood, perplexity, bits per byte, and the line unchanged."""
        numbers = ["nan"] * 4
        if "error" not in record:
            values = (record["total_logprob"], _perplexity(record), record["bits_per_byte"])
            numbers = [str(record["tokens"]), *map(_number, values)]
        cells = map((_ALIGNED if self._aligned else "{}\t").format, numbers)
        return "".join(cells).encode() + line.removesuffix(b"\n") + b"\n"


def _parts(record: Record, form: Form) -> str:
    """Return a JSON object, or a line per token or word, which begins with the number.

    A token has its id, log-likelihood and text; a word its text, start and end in bytes, number
    of tokens and surprisal.
    """
    if form.as_json:
        return json_line(record)
    parts = [
        (word["word"], word["start"], word["end"], word["tokens"], _number(word["surprisal"]))
        for word in record.get("words", [])
    ] + [
        (token["id"], _number(token["logprob"]), quoted(bytes(token["bytes"])))
        for token in record.get("logprobs", [])
    ]
    return "".join("\t".join(map(str, (record["index"] + 1, *part))) + "\n" for part in parts)


def _perplexity(record: Record) -> float:
    """Return the perplexity, which is NaN if no token is scored; JSON has no infinite one."""
    unscored = record["perplexity"] is None and not record["tokens_scored"]
    return math.nan if unscored else record["perplexity"] or math.inf


def _number(value: float | None) -> str:
    return "nan" if value is None else f"{value:.6g}"
