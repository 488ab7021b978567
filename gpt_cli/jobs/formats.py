"""The format of a file of rows: what a user says, else what its name says, else its first bytes.

Compressed files are decompressed, also in ranges.
"""

import io
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Literal, Protocol, Self, TypeAlias

from gpt_cli.errors import InputError, import_extra
from gpt_cli.jobs import storage

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

Format: TypeAlias = Literal["auto", "lines", "jsonl", "csv", "tsv", "parquet", "text"]
Compression: TypeAlias = Literal["gzip", "zstd", "bzip2", "xz"]

_COMPRESSED: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd", ".bz2": "bzip2", ".xz": "xz"}
_MAGIC: tuple[tuple[bytes, Compression], ...] = (  # no text in UTF-8 begins with most of these
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"BZh91AY&SY", "bzip2"),
    (b"\xfd7zXZ\0", "xz"),
)
_BLOCK = 8192  # compressed bytes to read at once: they may be a thousand times as many
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
ENDINGS = (*_FORMATS, *_COMPRESSED)  # of names that say how a file is stored
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_PARQUET = b"PAR1\x15"
_ZIP = b"PK\x03\x04"
NAMES = {"lines": "plain lines", "jsonl": "JSON Lines", "csv": "CSV", "tsv": "TSV"}


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file, and how its rows are stored."""

    name: str
    format: Format  # "auto" only for a file without rows
    compression: Compression | None = None
    delimiter: str = ""  # between the cells of CSV and TSV; "" in other formats
    header: tuple[str, ...] = ()  # the columns of CSV and TSV; of Parquet, those that are read
    header_line: int = 0
    error: InputError | None = None  # why it cannot be read, in place of its text

    def with_first_row(self, row: bytes) -> "InputFile":
        """Return the file with its format, which the first row decides if nothing else does.

        Raise InputError for a JSON array.
        """
        start = row.removeprefix(BYTE_ORDER_MARK).strip()
        says_json = ending(self.name) == ".json"
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


def ending(name: str) -> str:
    """Return the ending of a name that says its format, before that of a compressed file."""
    path = PurePosixPath(name)
    return (path.with_suffix("") if path.suffix.lower() in _COMPRESSED else path).suffix.lower()


def named(name: str, format: Format = "auto", delimiter: str | None = None) -> InputFile:
    """Return a file as its name describes it; a format that is not "auto" replaces that."""
    compression = _COMPRESSED.get(PurePosixPath(name).suffix.lower())
    if format == "auto":
        format = _FORMATS.get(ending(name), "auto")
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
            stream = decompressed(stream, file.compression, file.name)
            head = stream.peek()
        storage.check_mark(file.name, head)
        if head.startswith(_ZIP):
            cure = "export the workbook as CSV, or unpack the archive"
            raise InputError(f"{storage.label(file.name)} is a zip file, as .xlsx is: {cure}")
        if head.startswith(_PARQUET) and file.format != "text":
            file = _as_table(file)
        yield file, stream


def _compression(file: InputFile, head: bytes) -> Compression | None:
    """Return how a file with these first bytes is compressed; InputError if its name differs."""
    label = storage.label(file.name)
    compression = compression_of(head)
    if file.compression not in (None, compression):
        raise InputError(f"{label} is not compressed as its name says: rename it")
    if compression and not file.compression and named(file.name).format != "auto":
        ending = next(ending for ending, kind in _COMPRESSED.items() if kind == compression)
        raise InputError(f"{label} is compressed by {compression}: rename it to {label}{ending}")
    return compression


def _as_table(file: InputFile) -> InputFile:
    """Return a file that begins as Parquet does; raise InputError if it is not read so."""
    label = storage.label(file.name)
    if file.format != "auto":
        kind = NAMES[file.format]
        raise InputError(f"{label} is Parquet, not {kind}: rename it, or set its format to parquet")
    if file.compression or storage.is_stream(file.name):
        raise InputError(
            f"{label} is Parquet, which needs a file: name one that ends with .parquet"
        )
    return replace(file, format="parquet")


def whole_unless_rows(file: InputFile, head: bytes | None = None) -> InputFile:
    """Return a file with the format "text", if its rows would be lines.

    The first bytes are read from the file unless they are given.
    """
    if file.format == "auto" and head is None:
        with opened(file) as (file, stream):
            head = stream.peek()
    if file.format == "auto":
        file = file.with_first_row(head or b"")
    return replace(file, format="text") if file.format == "lines" else file


def read_whole(file: InputFile) -> bytes:
    """Return the content of a file, decompressed."""
    with opened(file) as (_, stream):
        return storage.bytes_of(stream, file.name)


def compression_of(head: bytes) -> Compression | None:
    """Return how bytes are compressed that begin with these."""
    for magic, compression in _MAGIC:
        # The fourth byte of bzip2 is the size of its blocks.
        start = head if compression != "bzip2" else head[:3] + b"9" + head[4:]
        if start.startswith(magic):
            return compression
    return None


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class _Zstandard:
    """The decompressed bytes of a stream of Zstandard, which may have several frames."""

    def __init__(self, stream: BufferedReader):
        package = import_extra("a .zst file needs zstandard", "zstandard", "zstandard")
        self._new_frame = package.ZstdDecompressor().decompressobj
        self._error = package.ZstdError
        self._stream = stream
        self._frame = self._new_frame()
        self._data = b""  # decompressed
        self._in_frame = False

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes, and none at the end."""
        while not self._data:
            block = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = self._new_frame()
                self._in_frame = False
            block = block or self._stream.read1(_BLOCK)
            if not block and self._in_frame:
                raise EOFError("it ends within a frame")
            if not block:
                return b""
            self._in_frame = True
            try:
                self._data = self._frame.decompress(block)
            except self._error as error:
                raise OSError(str(error)) from None
        data, self._data = self._data[:size], self._data[size:]
        return data


def _reader(stream: BufferedReader, compression: Compression) -> _Readable:
    """Return a reader of decompressed bytes."""
    # Imported here: `--help` imports this module.
    if compression == "gzip":
        from gzip import GzipFile

        return GzipFile(fileobj=stream)
    if compression == "bzip2":
        from bz2 import BZ2File

        return BZ2File(stream)
    if compression == "xz":
        from lzma import LZMAFile

        return LZMAFile(stream)
    return _Zstandard(stream)


def _errors() -> tuple[type[Exception], ...]:
    """Return the errors that readers raise."""
    from lzma import LZMAError
    from zlib import error

    return OSError, EOFError, LZMAError, error


class _Decompressed(io.RawIOBase):
    """The decompressed bytes of a stream; damage is an InputError with the name of the file."""

    def __init__(self, stream: BufferedReader, compression: Compression, file: str):
        self._stream = _reader(stream, compression)
        self._file = file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        """Read some bytes; return their number."""
        view = memoryview(buffer)
        try:
            data = self._stream.read(len(view))
        except _errors() as error:
            raise InputError(
                f"{storage.label(self._file)} is damaged, or its end is missing ({error}): copy or "
                "compress it again"
            ) from None
        view[: len(data)] = data
        return len(data)


def decompressed(stream: BufferedReader, compression: Compression, file: str) -> BufferedReader:
    """Return the decompressed bytes of a stream; the name of the file is for errors."""
    return BufferedReader(_Decompressed(stream, compression, file), storage.READ_BYTES)


class Ranges:
    """Ranges of the decompressed bytes of files.

    The last file stays open: reading ranges in their order decompresses a file once.
    """

    def __init__(self) -> None:
        self._opened = ExitStack()
        self._file: str | None = None
        self._position = 0

    def read(self, file: str, compression: Compression, start: int, end: int) -> bytes:
        """Return the bytes from `start` to `end`."""
        if file != self._file or start < self._position:
            self.close()
            raw = self._opened.enter_context(storage.open_file(file))
            self._stream = decompressed(raw, compression, file)
            self._file = file
        while self._position < start:
            skipped = self._stream.read(min(start - self._position, storage.READ_BYTES))
            if not skipped:
                break
            self._position += len(skipped)
        data = self._stream.read(end - start)
        self._position += len(data)
        if self._position != end:
            raise storage.shorter(file)
        return data

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the last file."""
        self._opened.close()
        self._file = None
        self._position = 0
