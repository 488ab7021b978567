"""The options of `gpt-cli score` for its output, and the output as text."""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpt_cli import records
from gpt_cli.cli import flags
from gpt_cli.cli.output import on_terminal, token_label
from gpt_cli.errors import InputError
from gpt_cli.options.declare import Declared, Range, option
from gpt_cli.records import Record, json_line

# The columns of tables on a terminal, with their widths; the last one may have any width.
_LINES = {"tokens": 12, "log-lik.": 12, "perplexity": 12, "bits/byte": 12}
_MIN_K = {"min-k%": 12, "min-k%++": 12}
_TEXT = {"text": 0}
_TOKENS = {"line": 6, "id": 6, "log-lik.": 12, "token": 0}
_WORDS = {"line": 6, "start": 8, "end": 8, "tokens": 6, "bits": 12, "word": 0}
_LAYER = 12  # the width of a column layer0, layer1, ...
SUMS = ("tokens", "tokens_scored", "total_logprob")
_POSITIVE = Range(lambda number: number > 0, "above 0")
_PERCENT = Range(lambda number: 0 < number <= 100, "above 0 and at most 100")


def _bound(words: str) -> Any:
    help = f"Print only lines with a perplexity of {words} X, unchanged; a line needs 2 tokens."
    return option(None, help, _POSITIVE)


@dataclass(kw_only=True, eq=False, repr=False)
class Form(Declared):
    """The options of scoring and of its output."""

    lines: bool = option(False, "Score each line on its own.")
    tokens: bool = option(
        False,
        "Show the log-likelihood of each token; with --json, also its rank, the gap to the "
        "likeliest token, and entropy, mean and standard deviation of its distribution.",
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
        _PERCENT,
        metavar="K",
    )
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
    def by_token(self) -> bool:
        """Return whether tokens are shown."""
        return self.tokens or (self.layers and not self.words)

    @property
    def plain(self) -> bool:
        """Return whether the output is only numbers."""
        return not (self.as_json or self.by_token or self.words)

    def check(self, *, as_rows: bool) -> None:
        """Raise InputError if options exclude one another."""
        if self.tokens and self.words:
            raise InputError("--tokens and --words cannot be used together: choose one")
        excluded = {
            "--tokens": self.tokens,
            "--words": self.words,
            "--layers": self.layers,
            "--min-k": self.min_k is not None,
            "--max-perplexity or --min-perplexity": self.filters,
            "--output, --format or --template": as_rows,
        }
        for flag, used in excluded.items():
            if self.total and used:
                raise InputError(f"--total cannot be used with {flag}: leave one of them out")
        *parts, filters, _ = excluded
        shown = [flag for flag in parts if excluded[flag]]
        if self.filters and shown and not self.as_json:
            raise InputError(f"{shown[-1]} with {filters} needs --json")
        if len(shown) > 1 and "--min-k" in shown and not (self.as_json or as_rows):
            raise InputError(f"--min-k with {shown[0]} needs --json")
        if (self.min_perplexity or 0) > (self.max_perplexity or math.inf):
            raise InputError("--min-perplexity is above --max-perplexity: no line could pass")
        if self.filters and as_rows:
            raise InputError(
                "--max-perplexity and --min-perplexity cannot be used with --output, --format or "
                "--template: filter the records instead"
            )


def as_text(record: Record, form: Form, table: "Table", *, first: bool) -> str:
    """Return the output for a whole text, which may be the first without an error."""
    if form.total:
        return total(record, form)
    if form.as_json:
        return json_line(record)
    if not form.plain:
        return table.rows(record)
    if "error" in record:
        return ""
    facts = {"file": record["file"]} if "file" in record else {}
    facts |= {
        "tokens": f"{record['tokens']} ({record['tokens_scored']} scored)",
        "log-likelihood": _number(record["total_logprob"]),
        "perplexity": _number(perplexity_of(record)),
        "bits per byte": _number(record["bits_per_byte"]),
    }
    if form.min_k is not None:
        names = f"Min-{form.min_k:g}%", f"Min-{form.min_k:g}%++"
        facts |= zip(names, map(_number, _min_k(record)), strict=True)
    gap = "" if first else "\n"
    return gap + "".join(f"{name:16}{value}\n" for name, value in facts.items())


def total(record: Record, form: Form) -> str:
    """Return the perplexity and the name of a file."""
    if form.as_json:
        names = ("index", "file", *SUMS, "perplexity", "error")
        return json_line({name: record[name] for name in names if name in record})
    perplexity = "nan" if "error" in record else _number(perplexity_of(record))
    cell = f"{perplexity:>12}  " if on_terminal(sys.stdout) else f"{perplexity}\t"
    return f"{cell}{record['file']}\n"


class Table:
    """A row per line, token or word: on a terminal aligned under a header, else with tabs.

    Each row begins with the name of its file if there are several.
    """

    def __init__(self, form: Form, files: Sequence[str]):
        self._form, self._aligned = form, on_terminal(sys.stdout)
        lines = _LINES | ({} if form.min_k is None else _MIN_K) | _TEXT
        columns = _WORDS if form.words else _TOKENS if form.by_token else lines
        self._file = {"file": max(map(len, files))} if len(files) > 1 else {}
        self._columns = {name: columns[name] for name in columns if form.lines or name != "line"}
        self._widths: dict[str, int] = {}  # of all columns, in their order on a terminal

    def rows(self, record: Record, line: bytes = b"") -> str:
        """Return the rows of a record; in the row of a line, the line is unchanged."""
        file = {"file": record["file"]} if self._file else {}
        rows = [file | cells for cells in self._cells(record, line)]
        header = []
        if rows and self._aligned and not self._widths:
            layers = {name: _LAYER for name in rows[0] if name.startswith("layer")}
            *others, last = self._columns.items()
            self._widths = {**self._file, **dict(others), **layers, **dict([last])}
            header = [{name: name for name in self._widths}]
        return "".join(map(self._row, [*header, *rows]))

    def _row(self, cells: Mapping[str, object]) -> str:
        if not self._aligned:
            return "\t".join(map(str, cells.values())) + "\n"
        texts = [f"{cells[name]:>{width}}" for name, width in self._widths.items()]
        return "  ".join(texts) + "\n"

    def _cells(self, record: Record, line: bytes) -> Iterator[dict[str, object]]:
        """Yield the cells of rows, in their order in a pipe."""
        if self._form.plain:
            *names, _ = self._columns
            values: list[object] = ["nan"] * len(names)
            if "error" not in record:
                numbers = record["total_logprob"], perplexity_of(record), record["bits_per_byte"]
                values = [record["tokens"], *map(_number, [*numbers, *_min_k(record)])]
            text = line.removesuffix(b"\n").decode(errors="surrogateescape")
            yield dict(zip(self._columns, [*values, text], strict=True))
            return
        number = record.get("line", record["index"] + 1) if self._form.lines else 1
        for word in record.get("words", []):
            bits = _number(word["surprisal"])
            facts = {name: word[name] for name in ("word", "start", "end", "tokens")}
            cells = {"line": number} | facts | {"bits": bits}
            yield cells | self._layers(word)
        for token in record.get("logprobs", []):
            logprob, text = _number(token["logprob"]), token_label(token)
            cells = {"line": number, "id": token["id"], "log-lik.": logprob, "token": text}
            yield cells | self._layers(token)

    def _layers(self, part: Record) -> dict[str, str]:
        """Return the cells of the layers of a token or a word."""
        values = map(_number, part.get("layers") or [])
        return {f"layer{layer}": value for layer, value in enumerate(values)}


def _min_k(record: Record) -> list[float | None]:
    return [record[name] for name in records.MIN_K if name in record]


def perplexity_of(record: Record) -> float:
    """Return the perplexity, which is NaN if no token is scored; JSON has no infinite one."""
    unscored = record["perplexity"] is None and not record["tokens_scored"]
    return math.nan if unscored else record["perplexity"] or math.inf


def _number(value: float | None) -> str:
    return "nan" if value is None else f"{value:.6g}"
