"""The format of a file of rows: what a user says, else what its name says, else its first bytes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import PurePosixPath
from typing import Literal, TypeAlias

from gpt_cli.errors import InputError
from gpt_cli.jobs import compressed, storage
from gpt_cli.jobs.compressed import Compression

Format: TypeAlias = Literal["auto", "lines", "jsonl", "csv", "tsv", "parquet", "text"]

_FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".txt": "lines",
}
_DELIMITERS = {"csv": ",", "tsv": "\t"}
ENDINGS = (*_FORMATS, *compressed.ENDINGS)  # of names that say how a file is stored
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_PARQUET = b"PAR1\x15"
_NAMES = {"lines": "plain lines", "jsonl": "JSON Lines", "csv": "CSV", "tsv": "TSV"}


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file, and how its rows are stored."""

    name: str
    format: Format  # "auto" only for a file without rows
    compression: Compression | None = None
    delimiter: str = ""  # between the cells of CSV and TSV; "" in other formats
    header: tuple[str, ...] = ()  # the columns of CSV and TSV
    header_line: int = 0

    def with_first_row(self, row: bytes) -> "InputFile":
        """Return the file with its format, which the first row decides if nothing else does.

        Raise InputError for a JSON array.
        """
        start = row.removeprefix(BYTE_ORDER_MARK).strip()
        says_json = PurePosixPath(_plain_name(self.name)).suffix.lower() == ".json"
        if self.format == "auto" or (self.format == "jsonl" and says_json):
            rest = start[1:].lstrip()
            if start.startswith(b"[") and (says_json or not rest or rest.startswith(b"{")):
                raise InputError(
                    f"{storage.label(self.name)} begins like a JSON array: make a row of each item "
                    "with `jq -c '.[]'`, or set its format to lines"
                )
        if self.format != "auto":
            return self
        return replace(self, format="jsonl" if start.startswith(b"{") else "lines")


def _plain_name(name: str) -> str:
    """Return a name without the ending of a compressed file."""
    path = PurePosixPath(name)
    return name[: -len(path.suffix)] if path.suffix.lower() in compressed.ENDINGS else name


def named(name: str, format: Format = "auto", delimiter: str | None = None) -> InputFile:
    """Return a file as its name describes it; a format that is not "auto" replaces that."""
    compression = compressed.ENDINGS.get(PurePosixPath(name).suffix.lower())
    if format == "auto":
        format = _FORMATS.get(PurePosixPath(_plain_name(name)).suffix.lower(), "auto")
    if format == "parquet" and compression:
        raise InputError(f"{name}: Parquet is not read from a compressed file: decompress it")
    if format in _DELIMITERS:
        return InputFile(name, format, compression, delimiter or _DELIMITERS[format])
    return InputFile(name, format, compression)


@contextmanager
def opened(file: InputFile) -> Iterator[tuple[InputFile, BufferedReader]]:
    """Open a file; yield it with what its first bytes say, and its bytes, decompressed.

    Raise InputError if it is not what its name or its format says. The format may be "parquet",
    which is not read here, and stays "auto" if the first row decides.
    """
    with storage.open_file(file.name) as stream:
        with storage.reading(storage.label(file.name)):
            head = stream.peek()
        file = replace(file, compression=_compression(file, head))
        if file.compression:
            stream = compressed.decompressed(stream, file.compression, file.name)
            head = stream.peek()
        storage.check_mark(file.name, head)
        if head.startswith(_PARQUET) and file.format != "text":
            file = _as_table(file)
        yield file, stream


def _compression(file: InputFile, head: bytes) -> Compression | None:
    """Return how a file with these first bytes is compressed; InputError if its name differs."""
    label = storage.label(file.name)
    compression = compressed.compression_of(head)
    if file.compression not in (None, compression):
        raise InputError(f"{label} is not compressed as its name says: rename it")
    if compression and not file.compression and named(file.name).format != "auto":
        ending = next(ending for ending, kind in compressed.ENDINGS.items() if kind == compression)
        raise InputError(f"{label} is compressed by {compression}: rename it to {label}{ending}")
    return compression


def _as_table(file: InputFile) -> InputFile:
    """Return a file that begins as Parquet does; raise InputError if it is not read so."""
    label = storage.label(file.name)
    if file.format != "auto":
        kind = _NAMES[file.format]
        raise InputError(f"{label} is Parquet, not {kind}: rename it, or set its format to parquet")
    if file.compression or storage.is_stream(file.name):
        raise InputError(
            f"{label} is Parquet, which needs a file: name one that ends with .parquet"
        )
    return replace(file, format="parquet")


def read_whole(file: InputFile) -> bytes:
    """Return the content of a file, decompressed."""
    with opened(file) as (_, stream):
        return storage.bytes_of(stream, file.name)
