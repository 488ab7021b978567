"""`gpt-cli tokenize` and `gpt-cli detokenize`: bytes to ids and back, without the weights."""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from gpt_cli.cli import options as flags
from gpt_cli.cli.output import on_terminal, remark, token_label, write, write_json
from gpt_cli.errors import InputError
from gpt_cli.jobs.storage import read_bytes
from gpt_cli.options.declare import option
from gpt_cli.records import Record, json_line

if TYPE_CHECKING:
    from gpt_cli.folder.tokenizer import Tokenizer

_FILE = option(None, "Read from FILE (-: standard input).", aliases=("-f",), metavar="FILE")
_ROW = "{id:>{width}}  {start:>{width}}  {end:>{width}}  {label}\n"
_LONGEST_ID = 18  # digits; int() refuses thousands


def tokenize(
    text: str | None = flags.argument("[TEXT]", "Text to tokenize"),
    *,
    file: Path | None = _FILE,
    count: bool = option(False, "Print only the number of tokens."),
    special: bool = flags.SPECIAL,
    model: flags.Model,
    as_json: bool = flags.JSON,
) -> None:
    """Print the token ids of TEXT.

    On a terminal, print a table with the tokens. Every byte counts, also a final line end and bytes
    that are not UTF-8.

    Examples:
        gpt-cli tokenize -m tiny 'Once upon a time'
        echo 'Once upon a time' | gpt-cli tokenize -m tiny --count
    """
    data = _read(None if text is None else os.fsencode(text), file)
    tokenizer = _read_tokenizer(model)
    ids = _ids(tokenizer, data, special=special)
    tokens = _records(tokenizer, ids)
    if count:
        write_json({"tokens": len(ids)}) if as_json else write(f"{len(ids)}\n")
    elif as_json:
        _write_many(map(json_line, tokens))
    elif on_terminal(sys.stdout):
        width = max(len("start"), len(str(len(data))), len(str(max(ids, default=0))))
        write(_ROW.format(id="id", start="start", end="end", label="token", width=width))
        _write_many(_ROW.format(**t, label=token_label(t), width=width) for t in tokens)
    else:
        _write_many(f" {id}" if index else str(id) for index, id in enumerate(ids))
        write("\n")


def detokenize(
    ids: list[str] | None = flags.argument("[IDS]...", "Ids, separated by white space"),
    *,
    file: Path | None = _FILE,
    model: flags.Model,
) -> None:
    """Write the text of the token ids IDS.

    Examples:
        gpt-cli tokenize -m tiny 'Once' | gpt-cli detokenize -m tiny
    """
    words = _read(os.fsencode(" ".join(ids)) if ids else None, file)
    tokenizer = _read_tokenizer(model)
    data = bytearray()  # bytes.join would take 80 bytes of memory per token
    for piece in tokenizer.pieces(_parse_ids(words)):
        data += piece
    write(bytes(data))
    if on_terminal(sys.stdout):
        write("\n")


def _read(argument: bytes | None, file: Path | None) -> bytes:
    """Return an argument, or else the content of `file` or a pipe; raise InputError for both."""
    flags.refuse_both(argument, file)
    if argument is None:
        return read_bytes(flags.or_pipe(file, "no input: give an argument, --file FILE"))
    return argument


def _read_tokenizer(model: flags.Model) -> "Tokenizer":
    from gpt_cli import hub

    tokenizer = hub.read_tokenizer(model.model, revision=model.revision, offline=model.offline)
    if not model.quiet and hub.find(model.model, model.revision) is None:
        remark(
            f"{model.model} is not on this machine: its tokenizer is downloaded each time; "
            f"`gpt-cli download {model.model}` keeps the model"
        )
    return tokenizer


def _parse_ids(words: bytes) -> Iterator[int]:
    for match in re.finditer(rb"\S+", words):  # words.split() would make a list
        word = match[0]
        if not word.isdigit() or len(word) > _LONGEST_ID:
            raise InputError(
                f"{word.decode(errors='replace')!r:.40} is not a token id: "
                "ids are whole numbers, separated by white space"
            )
        yield int(word)


def _ids(tokenizer: "Tokenizer", data: bytes, *, special: bool) -> list[int]:
    """Return the ids of data, which are those of its text if it is valid UTF-8."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return tokenizer.encode_bytes(data, special=special)
    return [*tokenizer.special_ids.start, *tokenizer.encode(text, special=special)]


def _records(tokenizer: "Tokenizer", ids: Sequence[int]) -> Iterator[Record]:
    """Yield the records of tokens, with their positions in the input in bytes."""
    start = 0
    for id, piece in zip(ids, tokenizer.pieces(ids), strict=True):
        data = tokenizer.token_bytes(id)
        name = tokenizer.token_name(id) if data is None else data.decode(errors="replace")
        end = start + len(piece)
        yield {"id": id, "token": name, "bytes": list(data or b""), "start": start, "end": end}
        start = end


def _write_many(pieces: Iterator[str]) -> None:
    """Write pieces lazily, in batches."""
    while batch := "".join(islice(pieces, 10_000)):
        write(batch)
