"""`gpt-cli tokenize` and `gpt-cli detokenize`: bytes to ids and back, without the weights."""

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING

from gpt_cli.cli import flags, inputs
from gpt_cli.cli.output import note, on_terminal, remark, write, write_json
from gpt_cli.cli.table import Column, Table
from gpt_cli.display.labels import token_label
from gpt_cli.errors import InputError
from gpt_cli.jobs.storage import find, read_bytes
from gpt_cli.options.declare import option
from gpt_cli.records import Record, json_line

if TYPE_CHECKING:
    from gpt_cli.folder.tokenizer import Tokenizer

_FILE = flags.ONE_FILE("Read from FILE (- is standard input), and append the arguments.")
_MISSING = "no input: give an argument, --file FILE"
_LONGEST_ID = 18  # digits; int() refuses thousands


def tokenize(
    words: list[str] | None = flags.text_argument(
        "[TEXT]...", "Two or more names of existing files, or the text"
    ),
    *,
    file: str | None = _FILE,
    count: bool = option(False, "Print only the number of tokens."),
    special: bool = flags.SPECIAL,
    model: flags.Model,
    as_json: bool = flags.JSON,
) -> None:
    """Print the token ids of TEXT.

    On a terminal, print a table with the tokens. Every byte counts, also a final line end and bytes
    that are not UTF-8. Each of several files has a line, or a table, of its own.

    Examples:
        gpt-cli tokenize -m tiny 'Once upon a time'
        echo 'Once upon a time' | gpt-cli tokenize -m tiny --count
    """
    texts = _texts(words, file, quiet=model.quiet)
    tokenizer = _read_tokenizer(model)
    noted = special or model.quiet
    for origin, data in texts:
        if not noted:
            noted = _note_name(tokenizer, data)
        ids = _ids(tokenizer, data, special=special)
        if not count:
            _write_tokens(tokenizer, ids, len(data), origin, as_json=as_json)
        elif as_json:
            write_json(origin | {"tokens": len(ids)})
        else:
            write("\t".join([str(len(ids)), *origin.values()]) + "\n")


def _texts(
    words: Sequence[str] | None, file: str | None, *, quiet: bool
) -> Iterable[tuple[dict[str, str], bytes]]:
    """Return texts with the names of their files, if there are several."""
    if not (words and len(words) > 1 and inputs.are_files(words, quiet=quiet)):
        return [({}, b"".join(_read(words, file, quiet=quiet)))]
    option = None if file is None else [file]
    names = inputs.files_or_pipe(words, option, _MISSING, quiet=quiet)
    files = list(chain.from_iterable(map(find, names)))
    return (({"file": name}, read_bytes(name)) for name in files)


def _write_tokens(
    tokenizer: "Tokenizer", ids: list[int], size: int, origin: dict[str, str], *, as_json: bool
) -> None:
    """Write the tokens of a text of `size` bytes: as JSON, as a table on a terminal, or as ids."""
    tokens = _records(tokenizer, ids)
    if as_json:
        _write_many(json_line(origin | token) for token in tokens)
    elif on_terminal(sys.stdout):
        width = max(len("start"), len(str(size)), len(str(max(ids, default=0))))
        write("".join(f"{name}\n" for name in origin.values()))
        numbers = (Column(name, width, ">") for name in ("id", "start", "end"))
        rows = ((t["id"], t["start"], t["end"], token_label(t)) for t in tokens)
        _write_many(Table(*numbers, Column("token")).lines(rows))
    else:
        _write_many(f" {id}" if index else str(id) for index, id in enumerate(ids))
        write("\n")


def detokenize(
    ids: list[str] | None = flags.argument(
        "[IDS]...", "Ids, separated by white space, or - (the pipe) and ids after it"
    ),
    *,
    file: str | None = _FILE,
    model: flags.Model,
) -> None:
    """Write the text of the token ids IDS.

    Examples:
        gpt-cli tokenize -m tiny 'Once' | gpt-cli detokenize -m tiny
    """
    words = b" ".join(_read(ids, file, quiet=model.quiet))
    tokenizer = _read_tokenizer(model)
    data = bytearray()  # bytes.join would take 80 bytes of memory per token
    for piece in tokenizer.pieces(_parse_ids(words)):
        data += piece
    write(bytes(data))
    if on_terminal(sys.stdout):
        write("\n")


def _read(words: Sequence[str] | None, file: str | None, *, quiet: bool) -> tuple[bytes, bytes]:
    """Return the content of `file` or of the pipe, if any, and the words."""
    name, text = inputs.parts_of_text(words, file, _MISSING, quiet=quiet)
    return b"" if name is None else read_bytes(name), os.fsencode(text or "")


def _read_tokenizer(model: flags.Model) -> "Tokenizer":
    from gpt_cli import hub

    tokenizer = hub.read_tokenizer(model.model, revision=model.revision, offline=model.offline)
    is_folder = os.path.isdir(model.model)  # noqa: PTH112 (never raises)
    if not (model.quiet or is_folder) and hub.find(model.model, model.revision) is None:
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


def _note_name(tokenizer: "Tokenizer", data: bytes) -> bool:
    """Return whether data has the name of a special token; say that it is read as text."""
    from gpt_cli.folder.base_tokenizer import NAME_AS_TEXT

    name = tokenizer.special_name_in(data.decode(errors="replace"))
    if name is None:
        return False
    note(f"gpt-cli: {NAME_AS_TEXT % name}")
    return True


def _ids(tokenizer: "Tokenizer", data: bytes, *, special: bool) -> list[int]:
    """Return the ids of data: those of its text if it is valid UTF-8."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return tokenizer.encode_bytes(data, special=special)
    return [*tokenizer.special_ids.start, *tokenizer.encode(text, special=special)]


def _records(tokenizer: "Tokenizer", ids: Sequence[int]) -> Iterator[Record]:
    """Yield the records of tokens, with their positions in the input in bytes."""
    start = 0
    for id, piece in zip(ids, tokenizer.pieces(ids), strict=True):
        name = tokenizer.token_name(id)
        data = tokenizer.token_bytes(id) or b""
        end = start + len(piece)
        yield {"id": id, "token": name, "bytes": list(data), "start": start, "end": end}
        start = end


def _write_many(pieces: Iterator[str]) -> None:
    """Write pieces lazily, in batches."""
    while batch := "".join(islice(pieces, 10_000)):
        write(batch)
