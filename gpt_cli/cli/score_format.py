"""The options of `gpt-cli score`, and the forms of its output: facts, columns, tokens, JSON."""

import math
from dataclasses import dataclass

from gpt_cli import jobs
from gpt_cli.cli.layout import quoted
from gpt_cli.errors import InputError
from gpt_cli.options.declare import NUMBER, WHOLE, Declared, Range, option
from gpt_cli.records import Record, json_line

_ALIGNED = "{:>12}  "
_NAMES = ("tokens", "log-lik.", "perplexity", "bits/byte")
HEADER = "".join(map(_ALIGNED.format, _NAMES)) + "text\n"
_POSITIVE = Range(lambda number: number > 0, "above 0")


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
    max_perplexity: float | None = option(
        None,
        "Print only lines with a perplexity of at most X, unchanged; a line needs 2 tokens.",
        _POSITIVE,
        kind=NUMBER,
        metavar="X",
    )
    min_perplexity: float | None = option(
        None,
        "Print only lines with a perplexity of at least X, unchanged; a line needs 2 tokens.",
        _POSITIVE,
        kind=NUMBER,
        metavar="X",
    )
    stride: int | None = option(
        None,
        "For a text longer than the context, score N tokens per window, with as many preceding "
        "tokens as fit; half of the context if not set.",
        kind=WHOLE,
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

    @property
    def task(self) -> "jobs.Scoring":
        """Return the task for rows."""
        return jobs.Scoring(self.stride, self.tokens, self.words, self.bos)

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

    def passes(self, record: Record) -> bool:
        """Return whether the filter lets a line pass; without a perplexity, none passes."""
        if not self.filters:
            return True
        perplexity = None if "error" in record else _perplexity(record)
        least, most = self.min_perplexity or 0, self.max_perplexity or math.inf
        return perplexity is not None and least <= perplexity <= most

    def of_text(self, record: Record) -> str:
        """Return the output for a whole text."""
        if not self.plain:
            return self._of_parts(record)
        facts = {
            "tokens": f"{record['tokens']} ({record['tokens_scored']} scored)",
            "log-likelihood": _number(record["total_logprob"]),
            "perplexity": _number(_perplexity(record)),
            "bits per byte": _number(record["bits_per_byte"]),
        }
        return "".join(f"{name:16}{value}\n" for name, value in facts.items())

    def of_line(self, record: Record, line: bytes, *, aligned: bool) -> str | bytes:
        """Return the output for a line."""
        if not self.plain:
            return self._of_parts(record)
        return line if self.filters else _columns(record, line, aligned=aligned)

    def _of_parts(self, record: Record) -> str:
        """Return a JSON object, or a line for each token or word, which begins with the number.

        A token has its id, log-likelihood and text; a word its text, start and end in bytes, number
        of tokens and surprisal.
        """
        if self.as_json:
            return json_line(record)
        number = record["index"] + 1
        if self.words:
            return "".join(
                f"{number}\t{word['word']}\t{word['start']}\t{word['end']}\t{word['tokens']}\t"
                f"{_number(word['surprisal'])}\n"
                for word in record.get("words", [])
            )
        return "".join(
            f"{number}\t{token['id']}\t{_number(token['logprob'])}\t"
            f"{quoted(bytes(token['bytes']))}\n"
            for token in record.get("logprobs", [])
        )


def _columns(record: Record, line: bytes, *, aligned: bool) -> bytes:
    """Return tokens, log-likelihood, perplexity, bits per byte, and the line unchanged."""
    if "error" in record:
        numbers = ["nan"] * 4
    else:
        values = (record["total_logprob"], _perplexity(record), record["bits_per_byte"])
        numbers = [str(record["tokens"]), *map(_number, values)]
    cell = _ALIGNED if aligned else "{}\t"
    return "".join(map(cell.format, numbers)).encode() + line.removesuffix(b"\n") + b"\n"


def _perplexity(record: Record) -> float | None:
    """Return the perplexity; JSON has no infinite one."""
    unscored = record["perplexity"] is None and not record["tokens_scored"]
    return None if unscored else record["perplexity"] or math.inf


def _number(value: float | None) -> str:
    return "nan" if value is None else f"{value:.6g}"
