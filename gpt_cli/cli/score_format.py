"""The output forms of `gpt-cli score`: facts, columns, tokens, JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpt_cli import records
from gpt_cli.cli.layout import quoted
from gpt_cli.engine import Engine
from gpt_cli.errors import InputError
from gpt_cli.jobs.storage import read_lines, without_line_end
from gpt_cli.score import Score

_TOGETHER = 256  # lines


@dataclass(frozen=True)
class Line:
    """A line, or a whole text, with its score or an error."""

    number: int  # from 1
    data: bytes  # with its line end
    text: str | InputError
    score: Score | InputError

    @property
    def perplexity(self) -> float | None:
        """Return the perplexity; None if there is none."""
        return None if isinstance(self.score, InputError) else self.score.perplexity

    @property
    def tokens(self) -> int:
        """Return the number of scored tokens."""
        return 0 if isinstance(self.score, InputError) else self.score.tokens_scored


def score_lines(engine: Engine, file: str, stride: int | None) -> Iterator[Line]:
    """Score the lines of a file as they come, those of similar length side by side.

    Raises:
        GPTCLIError: one of its subclasses: the file cannot be read, or no line can be scored.
    """
    number = 1
    for block in read_lines(file):
        for begin in range(0, len(block), _TOGETHER):
            some = block[begin : begin + _TOGETHER]
            texts = [_decoded(data, number + place) for place, data in enumerate(some)]
            scores = engine.score_many(texts, stride=stride)
            for data, text, score in zip(some, texts, scores, strict=True):
                yield Line(number, data, text, score)
                number += 1


def _decoded(data: bytes, number: int) -> str | InputError:
    try:
        return without_line_end(data.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        return InputError(f"the line is not UTF-8 at byte {error.start}")


def as_json(engine: Engine, line: Line, tokens: bool) -> str:
    """Return a JSON object, with the tokens if wanted."""
    place = {"index": line.number - 1}
    if isinstance(line.score, InputError):
        return records.json_line(place | {"line": line.number} | records.of_error(line.score))
    score = records.of_score(engine, line.score, logprobs=tokens)
    return records.json_line(place | {"text": line.text} | score)


def as_tokens(engine: Engine, line: Line, tokens: bool = True) -> str:
    """Return a line for each token: number of its line, id, log-likelihood, text."""
    if isinstance(line.score, InputError):
        return ""
    return "".join(
        f"{line.number}\t{id}\t{_number(logprob)}\t{quoted(engine.tokenizer.token_bytes(id))}\n"
        for id, logprob in zip(line.score.ids, line.score.token_logprobs, strict=True)
    )


def as_columns(line: Line, *, aligned: bool) -> bytes:
    """Return tokens, log-likelihood, perplexity, bits per byte, and the line unchanged."""
    score = line.score
    if isinstance(score, InputError):
        numbers = ["nan"] * 4
    else:
        values = (score.total_logprob, score.perplexity, score.bits_per_byte)
        numbers = [str(len(score.ids)), *map(_number, values)]
    text = line.data if line.data.endswith(b"\n") else line.data + b"\n"
    return _columns(numbers, aligned=aligned).encode() + text


def header() -> str:
    """Return the names of the columns."""
    return _columns(("tokens", "log-lik.", "perplexity", "bits/byte"), aligned=True) + "text\n"


def _columns(cells: Sequence[str], *, aligned: bool) -> str:
    """Return cells in columns of one width, or with a tab after each."""
    if aligned:
        return "".join(f"{cell:>12}  " for cell in cells)
    return "".join(f"{cell}\t" for cell in cells)


def as_facts(score: Score) -> str:
    """Return a line for each number, with its name."""
    facts = {
        "tokens": f"{len(score.ids)} ({score.tokens_scored} scored)",
        "log-likelihood": _number(score.total_logprob),
        "perplexity": _number(score.perplexity),
        "bits per byte": _number(score.bits_per_byte),
    }
    return "".join(f"{name:16}{value}\n" for name, value in facts.items())


def _number(value: float | None) -> str:
    return "nan" if value is None else f"{value:.6g}"
