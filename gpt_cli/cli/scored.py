"""Lines with their scores, in the forms that `gpt-cli score` shows them in."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from gpt_cli import records
from gpt_cli.cli.text import quoted
from gpt_cli.engine import Engine
from gpt_cli.errors import InputError
from gpt_cli.reading import read_lines, without_line_end
from gpt_cli.score import Score


@dataclass(frozen=True)
class Scored:
    """A line, with its end, or a whole text; and its score, or why it has none."""

    number: int  # from 1
    data: bytes
    text: str | InputError  # what was scored of it
    score: Score | InputError

    def within(self, least: float | None, most: float | None) -> bool:
        """Return whether the line has a perplexity, and one that lies between the bounds."""
        if isinstance(self.score, InputError) or self.score.perplexity is None:
            return False
        perplexity = self.score.perplexity
        return (least is None or perplexity >= least) and (most is None or perplexity <= most)


def score_lines(engine: Engine, file: str, stride: int | None) -> Iterator[Scored]:
    """Score the lines of a file as they come, those of like length side by side.

    Raises:
        GPTCLIError: one of its subclasses: the file cannot be read, or no line can be scored.
    """
    number = 1
    for block in read_lines(file):
        for begin in range(0, len(block), records.Scoring.together):
            some = block[begin : begin + records.Scoring.together]
            texts = [_decoded(data, place) for place, data in enumerate(some, number)]
            scores = engine.score_many(texts, stride=stride)
            yield from map(Scored, count(number), some, texts, scores)
            number += len(some)


def _decoded(data: bytes, number: int) -> str | InputError:
    try:
        return without_line_end(data.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        return InputError(f"the line is not UTF-8 at byte {error.start}")


def as_json(engine: Engine, line: Scored, *, tokens: bool) -> str:
    """A JSON object, with the tokens if wanted."""
    told: dict[str, Any] = {"index": line.number - 1}
    if isinstance(line.score, InputError):
        return records.json_line(told | {"line": line.number} | records.of_error(line.score))
    told |= {"text": line.text} | records.of_score(engine, line.score, logprobs=tokens)
    return records.json_line(told)


def as_tokens(engine: Engine, line: Scored) -> str:
    """A line for each token: the number of the line, its id, its log-likelihood, its text."""
    if isinstance(line.score, InputError):
        return ""
    return "".join(
        f"{line.number}\t{id}\t{_number(logprob)}\t{quoted(engine.tokenizer.token_bytes(id))}\n"
        for id, logprob in zip(line.score.ids, line.score.token_logprobs, strict=True)
    )


def as_columns(line: Scored, *, aligned: bool) -> bytes:
    """Tokens, log-likelihood, perplexity, bits per byte, and the line as it is."""
    score = line.score
    if isinstance(score, InputError):
        numbers = ["nan"] * 4
    else:
        values = (score.total_logprob, score.perplexity, score.bits_per_byte)
        numbers = [str(len(score.ids)), *map(_number, values)]
    text = line.data if line.data.endswith(b"\n") else line.data + b"\n"
    return _columns(numbers, aligned=aligned).encode() + text


def header() -> str:
    """What the columns are, for people."""
    return _columns(("tokens", "log-lik.", "perplexity", "bits/byte"), aligned=True) + "text\n"


def _columns(cells: Sequence[str], *, aligned: bool) -> str:
    """Cells with a tab after each; or, for people, in columns."""
    if aligned:
        return "".join(f"{cell:>12}  " for cell in cells)
    return "".join(f"{cell}\t" for cell in cells)


def as_facts(score: Score) -> str:
    """A line for each number, with its name."""
    facts = {
        "tokens": f"{len(score.ids)} ({score.tokens_scored} scored)",
        "log-likelihood": _number(score.total_logprob),
        "perplexity": _number(score.perplexity),
        "bits per byte": _number(score.bits_per_byte),
    }
    return "".join(f"{name:16}{value}\n" for name, value in facts.items())


def _number(value: float | None) -> str:
    return "nan" if value is None else f"{value:.6g}"
