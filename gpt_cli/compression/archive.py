"""The file format of compressed data.

    header    "GPTZ", version (1), dtype (1), digests of weights (8) and logits (8), CRC-32 (4)
    segments  mark (1), index, kind and size, length of the code, check (2), CRC-32 (4), code
    end       a segment of size 0, whose code is the number of all bytes and their CRC-32

Numbers without a width above are variable-length (LEB128); the others are little-endian. The CRC-32
of a segment covers the rest of the segment, so damage is detected before anything is computed. The
check covers the decoded data, so a machine that computes other bits is detected before it writes
anything. A damaged segment does not affect the others: the next one is recognized by its mark and
its CRC-32. Stored data is reversed. Otherwise, the segments of a compressed file in it could be
mistaken for those of this file.
"""

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol
from zlib import crc32

from gpt_cli.errors import InputError
from gpt_cli.folder.dtypes import NAMES
from gpt_cli.options.declare import Range

SEGMENT_TOKENS = 32_768  # by default
MAX_SEGMENT_TOKENS = 65_536
SEGMENT_RANGE = Range(lambda n: 1 <= n <= MAX_SEGMENT_TOKENS, f"from 1 to {MAX_SEGMENT_TOKENS}")
MAX_CODE_BYTES = 8 * MAX_SEGMENT_TOKENS  # a token takes fewer than 64 bits
_MAGIC = b"GPTZ"
_VERSION = 1
_MARK = b"\xb5"
_HEADER = struct.Struct("<4sBB8s8sI")
_NUMBER = re.compile(rb"([\x80-\xff]{0,8}+[\0-\x7f])")
_SMALL = rb"([\x80-\xff]{0,2}+[\0-\x7f])"  # a number below 2^21
_SEGMENT = re.compile(_MARK + _NUMBER.pattern + _SMALL + _SMALL)  # up to the length of the code
_MAX_FIELDS = 15  # bytes that match `_SEGMENT`, without the last
_MAX_RECORD = 64 + MAX_CODE_BYTES
_PIECE = 1 << 20  # bytes to read at a time
# The search for a segment behind damage ends after this many bytes of wrong checksums: seconds.
# Random data needs about 48 for each of its bytes. So only a file with 90 MB of damage, or one that
# was built to be slow, is refused.
_MOST_CHECKED = 1 << 32
_CHECKED_PER_MARK = 4096  # the time that a mark takes, in bytes
_ANOTHER = "get another copy"
_CURE = f"{_ANOTHER}, or salvage the undamaged segments"


class Readable(Protocol):
    """A binary file to read."""

    def read(self, size: int, /) -> bytes:
        """Return `size` bytes, or fewer at the end."""


@dataclass(frozen=True)
class Header:
    """The identity of the model that has written a file."""

    dtype: str  # of its weights in memory
    weights: bytes  # the first 8 bytes of the digest of the weights
    bits: bytes  # the first 8 bytes of the digest of the logits

    def pack(self) -> bytes:
        """Return the first bytes of the file."""
        dtype = NAMES.index(self.dtype)
        fields = _HEADER.pack(_MAGIC, _VERSION, dtype, self.weights, self.bits, 0)[:-4]
        return fields + crc32(fields).to_bytes(4, "little")


@dataclass(frozen=True)
class Segment:
    """A part of the data that does not depend on the others."""

    index: int
    size: int  # in tokens, or in bytes if it is stored
    stored: bool  # the code is the data itself
    check: int  # see `check`
    code: bytes

    def pack(self) -> bytes:
        """Return the bytes of the file."""
        code = self.code[::-1] if self.stored else self.code
        numbers = (self.index, self.size << 1 | self.stored, len(code))
        fields = b"".join(map(_pack_number, numbers)) + self.check.to_bytes(2, "little")
        crc = crc32(code, crc32(fields))
        return _MARK + fields + crc.to_bytes(4, "little") + code


def count_tokens(file: BinaryIO, *, salvage: bool) -> int | None:
    """Return the number of tokens in the rest of a compressed file, and seek back to where it was.

    Return None for a pipe, and for damage that `ArchiveReader` refuses.
    """
    if not file.seekable():
        return None
    start = file.tell()
    try:
        segments = ArchiveReader(file, salvage=salvage).segments()
        return sum(segment.size for segment in segments if not segment.stored)
    except InputError:
        return None
    finally:
        file.seek(start)


def end(index: int, size: int, crc: int) -> Segment:
    """Return the last segment, for data of `size` bytes with the CRC-32 `crc`."""
    return Segment(index, 0, False, 0, _pack_number(size) + crc.to_bytes(4, "little"))


def check(data: bytes) -> int:
    """Return the check of a segment that holds `data`: half of the CRC-32."""
    return crc32(data) & 0xFFFF


class ArchiveReader:
    """Read compressed data from start to end, in bounded memory and time.

    Damage raises InputError. With `salvage`, it is noted in `lost` instead, but data of another
    version, without an undamaged segment, or with too much damage to search, is refused.
    """

    def __init__(self, file: Readable, name: str = "the data", *, salvage: bool = False):
        self._file = file
        self._name = name
        self._salvage = salvage
        self._data = b""  # the part of the file in memory
        self._at = 0  # the next byte in it
        self._checked = 0  # bytes that had wrong checksums, while a segment was searched
        self.lost: list[str] = []  # descriptions of what could not be read
        self.size = self.crc = 0  # of all data, once the end has been read
        self.dtype = "auto"  # that of the header, if known
        self.header = self._read_header()  # None if it is damaged beyond repair

    def _read_header(self) -> Header | None:
        self._fill()
        lead = self._data[: _HEADER.size]
        if not lead.startswith(_MAGIC) and not self._salvage:
            what = "not a compressed file" if lead else "empty"
            raise InputError(
                f"{self._name} is {what}: give a file that `gpt-cli compress` has written"
            )
        if len(lead) < _HEADER.size:
            self._damaged("its header is damaged")
            return None
        _, version, dtype, weights, bits, crc = _HEADER.unpack(lead)
        undamaged = crc == crc32(lead[:-4])
        if undamaged and (version != _VERSION or dtype >= len(NAMES)):
            raise InputError(
                f"{self._name} has version {version} of the format, and this gpt-cli reads "
                f"version {_VERSION}: use the gpt-cli that has written it"
            )
        header = None
        for name in NAMES:  # if only bytes before the digests are damaged, one has this CRC-32
            candidate = Header(name, weights, bits)
            if candidate.pack().endswith(lead[-4:]):
                header = candidate
        if header:
            self.dtype = header.dtype
        elif dtype < len(NAMES):
            self.dtype = NAMES[dtype]
        if undamaged:
            self._at = _HEADER.size
        else:
            self._damaged("its header is damaged")
        return header

    def segments(self) -> Iterator[Segment]:
        """Yield the segments before the end."""
        expected = 0
        while segment := self._next(expected):
            lost = segment.index - expected
            if lost == 1:
                self._damaged(f"segment {expected} is damaged")
            elif lost > 1:
                self._damaged(f"segments {expected} to {segment.index - 1} are damaged")
            expected = segment.index + 1
            if not segment.size:
                self._read_end(segment)
                return
            yield segment
        self._damaged("its end is missing")

    def finish(self, size: int, crc: int) -> None:
        """Compare the size and the CRC-32 of all data with those in the end of the file."""
        if self.lost and not size:
            raise InputError(f"{self._name}: no undamaged segment is left: {_ANOTHER}")
        if not self.lost and (size, crc) != (self.size, self.crc):
            self._damaged("the data does not have its checksum")

    def _read_end(self, segment: Segment) -> None:
        size = _NUMBER.match(segment.code)
        if size is None:
            self._damaged("its end is damaged")
            return
        self.size = _unpack_number(size[0])
        self.crc = int.from_bytes(segment.code[size.end() :], "little")
        if self._fill():
            self._damaged("there is more after its end")

    def lose(self, segment: Segment) -> None:
        """Report a segment whose decoded data does not have its check."""
        self._damaged(
            f"segment {segment.index} does not have its checksum",
            "the file was altered, or this machine computes other bits (see `gpt-cli verify`)",
        )

    def _damaged(self, what: str, cure: str = _CURE) -> None:
        if not self._salvage:
            raise InputError(f"{self._name}: {what}: {cure}")
        self.lost.append(what)

    def _next(self, expected: int) -> Segment | None:
        """Return the next undamaged segment from the expected one on; None if there is none."""
        while self._fill():
            match = _SEGMENT.search(self._data, self._at)
            if match is None:
                self._at = max(self._at + 1, len(self._data) - _MAX_FIELDS)
                continue
            self._at = match.start()
            self._fill()  # the whole segment
            index, kind, length = map(_unpack_number, match.groups())
            stop = self._at + len(match[0]) + 6 + length
            if index >= expected and length <= MAX_CODE_BYTES and stop <= len(self._data):
                record = self._data[self._at + 1 : stop]
                segment = _unpack_segment(record, index, kind, length)
                if segment:
                    self._at = stop
                    return segment
                self._checked += length
            self._checked += _CHECKED_PER_MARK
            if self._checked > _MOST_CHECKED:
                raise InputError(
                    f"{self._name}: segments from {expected} on are damaged: {_ANOTHER}"
                )
            self._at += 1
        return None

    def _fill(self) -> bool:
        """Read on until a whole segment is in memory; return whether any byte is left."""
        while len(self._data) - self._at < _MAX_RECORD and (more := self._file.read(_PIECE)):
            self._data = self._data[self._at :] + more
            self._at = 0
        return self._at < len(self._data)


def _pack_number(number: int) -> bytes:
    """Return a number as LEB128: seven bits a byte, the lowest first."""
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    data.append(number)
    return bytes(data)


def _unpack_number(data: bytes) -> int:
    number = 0
    for byte in reversed(data):
        number = number << 7 | byte & 0x7F
    return number


def _unpack_segment(record: bytes, index: int, kind: int, length: int) -> Segment | None:
    """Return the segment in a record, which begins after the mark; None if it is damaged."""
    size = kind >> 1
    stored = bool(kind & 1)
    valid = size == length if stored else size <= MAX_SEGMENT_TOKENS
    if not valid:
        return None
    start = len(record) - length  # of the code
    fields = record[: start - 4]
    code = record[start:]
    crc = int.from_bytes(record[start - 4 : start], "little")
    if crc != crc32(code, crc32(fields)):
        return None
    check = int.from_bytes(fields[-2:], "little")
    return Segment(index, size, stored, check, code[::-1] if stored else code)
