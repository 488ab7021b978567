"""The options of `gpt-cli score` for its output, and the output as text."""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gpt_cli.cli import flags
from gpt_cli.cli import table as tables
from gpt_cli.cli.output import on_terminal
from gpt_cli.display.labels import token_label
from gpt_cli.errors import InputError
from gpt_cli.options.declare import ABOVE_0, PERCENT, Declared, option
from gpt_cli.records import Record, json_line, perplexity_of

_TEXTS = ("text", "token", "word")  # columns of any width
# The widths of columns of whole numbers; those of other numbers are wider.
_WIDTHS = {"line": 6, "id": 6, "start": 8, "end": 8, "tokens": 6}
_NUMBER_WIDTH = 12
SUMS = ("tokens", "tokens_scored", "total_logprob")


def _bound(words: str) -> Any:
    help = (
        f"Keep only the lines, or rows, with a perplexity of {words} X: they are unchanged, on "
        "standard output or in the file OUT of --output."
    )
    return option(None, help, ABOVE_0, excludes=("--template",))


@dataclass(kw_only=True, eq=False, repr=False)
class Form(Declared):
    """The options of scoring and of its output."""

    lines: bool = option(
        False, "Score each line, or each row of JSON Lines or a table, on its own."
    )
    tokens: bool = option(
        False,
        "Show the log-likelihood of each token; with --json, also its rank, the gap to the "
        "likeliest token, and entropy, mean and standard deviation of its distribution.",
        excludes=("--words",),
    )
    words: bool = option(False, "Show the surprisal of each word in bits.")
    layers: bool = option(
        False,
        "Show the log-likelihood of each token, or with --words the surprisal of each word, also "
        "if the model ended after 0, 1, ... layers (logit lens).",
    )
    min_k: float | None = option(
        None,
        "Show Min-K% and Min-K%++ of the K percent least likely tokens, which are higher for texts "
        "that the model was trained on.",
        PERCENT,
        metavar="K",
    )
    total: bool = option(
        False,
        "Show only the perplexity and the name of each file; with --lines, that of all its lines.",
        excludes=(
            "--tokens",
            "--words",
            "--layers",
            "--min-k",
            "--max-perplexity",
            "--min-perplexity",
            "--output",
            "--format",
            "--template",
        ),
    )
    bos: bool = flags.BOS
    eos: bool = flags.EOS
    special: bool = flags.SPECIAL
    before: str = option(  # click has a parameter `context`
        "",
        "A text before each text: it is joined to it, and is not scored.",
        flag="--context",
        metavar="TEXT",
    )
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
    def by_token(self) -> bool:
        """Return whether tokens are shown."""
        return self.tokens or (self.layers and not self.words)

    @property
    def plain(self) -> bool:
        """Return whether the output is only numbers."""
        return not (self.as_json or self.by_token or self.words)

    @property
    def plain_sums(self) -> bool:
        """Return whether all figures can be added up over texts."""
        no_parts = not (self.by_token or self.words)
        return no_parts and self.min_k is None

    def check(self, *, as_rows: bool) -> None:
        """Raise InputError for figures that only JSON shows together."""
        parts = {"--tokens": self.tokens, "--words": self.words, "--layers": self.layers}
        shown = [flag for flag, used in parts.items() if used]
        if self.min_k is not None:
            if shown and not (self.as_json or as_rows):
                raise InputError(f"--min-k with {shown[0]} needs --json")
            shown.append("--min-k")
        if self.filters and shown and not self.as_json:
            raise InputError(f"{shown[-1]} with --max-perplexity or --min-perplexity needs --json")


def as_text(record: Record, form: Form, table: "ScoreTable", *, first: bool) -> str:
    """Return the output for a whole text, which may be the first without an error."""
    if form.total:
        return total(record, form)
    if form.as_json:
        return json_line(record)
    if not form.plain:
        return table.rows(record)
    if "error" in record:
        return ""
    facts = {}
    if "file" in record:
        facts["file"] = record["file"]
    if "rows" in record:
        facts["rows"] = f"{record['rows']:,}"
    facts["tokens"] = f"{record['tokens']} ({record['tokens_scored']} scored)"
    facts["log-likelihood"] = _number(record["total_logprob"])
    facts["perplexity"] = _number(perplexity_of(record))
    facts["bits per byte"] = _number(record["bits_per_byte"])
    if form.min_k is not None:
        facts[f"Min-{form.min_k:g}%"] = _number(record["min_k"])
        facts[f"Min-{form.min_k:g}%++"] = _number(record["min_k_plus_plus"])
    gap = "" if first else "\n"
    return gap + tables.facts_table(facts)


def total(record: Record, form: Form) -> str:
    """Return the perplexity and the name of a file."""
    if form.as_json:
        names = ("index", "file", *SUMS, "perplexity", "error")
        return json_line({name: record[name] for name in names if name in record})
    perplexity = math.nan if "error" in record else perplexity_of(record)
    table = tables.Table(tables.Column(width=_NUMBER_WIDTH, align=">"), tables.Column())
    return table.line(_number(perplexity), record["file"])


class ScoreTable:
    """A row per line, token or word, with the name of its file if there are several files."""

    def __init__(self, form: Form, files: Sequence[str]):
        self._form = form
        self._several = len(files) > 1
        self._file_width = max(map(len, files))
        self._table: tables.Table | None = None  # the first row has the names of its columns

    def rows(self, record: Record, text: str = "") -> str:
        """Return the rows of a record; in the row of a line, its text is unchanged."""
        output = ""
        file = {"file": record["file"]} if self._several else {}
        for cells in self._cells(record, text):
            row = file | cells
            if self._table is None:
                self._table = tables.Table(*map(self._column, row))
            output += self._table.line(*row.values())
        return output

    def _column(self, name: str) -> tables.Column:
        if name in _TEXTS:
            return tables.Column(name, free=True)
        width = self._file_width if name == "file" else _WIDTHS.get(name, _NUMBER_WIDTH)
        return tables.Column(name, width, align=">")

    def _cells(self, record: Record, text: str) -> Iterator[dict[str, object]]:
        """Yield the cells of rows, in their order in a pipe."""
        if self._form.plain:
            yield self._numbers(record) | {"text": text}
            return
        place = {}
        if self._form.lines:
            place["line"] = record["line"]
        elif not on_terminal(sys.stdout):
            place["line"] = 1
        for word in record.get("words", []):
            facts = {name: word[name] for name in ("word", "start", "end", "tokens")}
            yield {**place, **facts, "bits": _number(word["surprisal"]), **_layers(word)}
        for token in record.get("logprobs", []):
            facts = {"id": token["id"], "log-lik.": _number(token["logprob"])}
            yield {**place, **facts, "token": token_label(token), **_layers(token)}

    def _numbers(self, record: Record) -> dict[str, object]:
        """Return the cells before the text of a line."""
        names = ["tokens", "log-lik.", "perplexity", "bits/byte"]
        if self._form.min_k is not None:
            names += ["min-k%", "min-k%++"]
        if "error" in record:
            return dict.fromkeys(names, "nan")
        values = [record["total_logprob"], perplexity_of(record), record["bits_per_byte"]]
        if self._form.min_k is not None:
            values += [record["min_k"], record["min_k_plus_plus"]]
        return dict(zip(names, [record["tokens"], *map(_number, values)], strict=True))


def _layers(part: Record) -> dict[str, str]:
    """Return the cells of the layers of a token or a word."""
    values = part.get("layers") or []
    return {f"layer{layer}": _number(value) for layer, value in enumerate(values)}


def _number(value: float | None) -> str:
    return "nan" if value is None else f"{value:.6g}"
