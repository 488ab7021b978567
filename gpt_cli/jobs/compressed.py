"""Compressed files: their bytes, and ranges of these."""

import io
from contextlib import ExitStack
from typing import TYPE_CHECKING, Literal, Protocol, Self, TypeAlias

from gpt_cli.errors import InputError, import_extra
from gpt_cli.jobs import storage

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

Compression: TypeAlias = Literal["gzip", "zstd", "bzip2", "xz"]

ENDINGS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd", ".bz2": "bzip2", ".xz": "xz"}
_MAGIC: tuple[tuple[bytes, Compression], ...] = (  # no text in UTF-8 begins with most of these
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"BZh91AY&SY", "bzip2"),
    (b"\xfd7zXZ\0", "xz"),
)
_BLOCK = 8192  # compressed bytes to read at once: they may be a thousand times as many


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

    def __init__(self, stream: io.BufferedReader):
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


def _reader(stream: io.BufferedReader, compression: Compression) -> _Readable:
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

    def __init__(self, stream: io.BufferedReader, compression: Compression, file: str):
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


def decompressed(
    stream: io.BufferedReader, compression: Compression, file: str
) -> io.BufferedReader:
    """Return the decompressed bytes of a stream; the name of the file is for errors."""
    return io.BufferedReader(_Decompressed(stream, compression, file), storage.READ_BYTES)


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
