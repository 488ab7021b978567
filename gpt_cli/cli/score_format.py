"""The output forms of `gpt-cli score`: facts, columns, tokens, JSON."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from gpt_cli import records
from gpt_cli.cli.layout import quoted
from gpt_cli.errors import InputError
from gpt_cli.jobs.storage import read_lines, without_line_end
from gpt_cli.options.declare import NUMBER, WHOLE, Declared, Range, option

if TYPE_CHECKING:
    from gpt_cli.engine import Engine
    from gpt_cli.scoring.score import Score

_TOGETHER = 256  # lines
_ALIGNED = "{:>12}  "
_NAMES = ("tokens", "log-lik.", "perplexity", "bits/byte")
HEADER = "".join(map(_ALIGNED.format, _NAMES)) + "text\n"
_POSITIVE = Range(lambda number: number > 0, "above 0")


@dataclass(frozen=True)
class Line:
    """A line, or a whole text, with its score or an error."""

    number: int  # from 1
    data: bytes  # with its line end
    text: str | InputError
    score: "Score | InputError"


def score_lines(engine: "Engine", file: str, options: dict[str, Any]) -> Iterator[Line]:
    """Score the lines of a file as they come, those of similar length side by side."""
    number = 1
    for block in read_lines(file):
        for begin in range(0, len(block), _TOGETHER):
            some = block[begin : begin + _TOGETHER]
            texts = [_decoded(data, place) for place, data in enumerate(some, number)]
            scores = engine.score_many(texts, **options)
            yield from map(Line, count(number), some, texts, scores)
            number += len(some)


def _decoded(data: bytes, number: int) -> str | InputError:
    try:
        return without_line_end(data.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        return InputError(f"the line is not UTF-8 at byte {error.start}")


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
    def options(self) -> dict[str, Any]:
        """Return the keywords of `Engine.score` and `score_many`."""
        detailed = self.tokens and self.as_json
        return {
            "stride": self.stride,
            "bos": self.bos,
            "ranks": detailed,
            "entropies": detailed,
            "words": self.words,
        }

    def check(self, *, as_rows: bool) -> None:
        """Raise InputError if options exclude each other."""
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

    def passes(self, score: "Score | InputError") -> bool:
        """Return whether the filter lets a line pass."""
        if not self.filters:
            return True
        perplexity = None if isinstance(score, InputError) else score.perplexity
        least, most = self.min_perplexity or 0, self.max_perplexity or math.inf
        return perplexity is not None and least <= perplexity <= most

    def of_text(self, engine: "Engine", text: str) -> str:
        """Score a text; return the output."""
        score = engine.score(text, **self.options)
        line = Line(1, text.encode(), text, score)
        if not self.plain:
            return self._of_parts(engine, line)
        facts = {
            "tokens": f"{len(score.ids)} ({score.tokens_scored} scored)",
            "log-likelihood": _number(score.total_logprob),
            "perplexity": _number(score.perplexity),
            "bits per byte": _number(score.bits_per_byte),
        }
        return "".join(f"{name:16}{value}\n" for name, value in facts.items())

    def of_line(self, engine: "Engine", line: Line, *, aligned: bool) -> str | bytes:
        """Return the output for a line."""
        if not self.plain:
            return self._of_parts(engine, line)
        return line.data if self.filters else _columns(line, aligned=aligned)

    def _of_parts(self, engine: "Engine", line: Line) -> str:
        """Return a JSON object, or a line for each token or word, which begins with the number.

        A token has its id, log-likelihood and text; a word its text, start and end in bytes, number
        of tokens and surprisal.
        """
        place = {"index": line.number - 1}
        if isinstance(line.score, InputError):
            error = place | {"line": line.number} | records.of_error(line.score)
            return records.json_line(error) if self.as_json else ""
        if self.as_json:
            score = records.of_score(engine, line.score, logprobs=self.tokens)
            return records.json_line(place | {"text": line.text} | score)
        if self.words:
            return "".join(
                f"{line.number}\t{word.text}\t{word.start}\t{word.end}\t{word.tokens}\t"
                f"{_number(word.surprisal)}\n"
                for word in line.score.words or []
            )
        return "".join(
            f"{line.number}\t{id}\t{_number(logprob)}\t{quoted(engine.tokenizer.token_bytes(id))}\n"
            for id, logprob in zip(line.score.ids, line.score.token_logprobs, strict=True)
        )


def _columns(line: Line, *, aligned: bool) -> bytes:
    """Return tokens, log-likelihood, perplexity, bits per byte, and the line unchanged."""
    score = line.score
    if isinstance(score, InputError):
        numbers = ["nan"] * 4
    else:
        values = (score.total_logprob, score.perplexity, score.bits_per_byte)
        numbers = [str(len(score.ids)), *map(_number, values)]
    text = line.data if line.data.endswith(b"\n") else line.data + b"\n"
    cell = _ALIGNED if aligned else "{}\t"
    return "".join(map(cell.format, numbers)).encode() + text


def _number(value: float | None) -> str:
    return "nan" if value is None else f"{value:.6g}"
