"""The file of compressed data: what `gpt_cli.compression.codec` writes, byte for byte.

    header   "GPTZ", version (1), dtype (1), digests of the weights (8) and of the bits (8), CRC-32
    blocks   mark (1), index, kind and size, length of the code, check (2), CRC-32 (4), code
    end      a block of size 0, whose code is the number of all bytes and their CRC-32

Numbers are variable-length (LEB128) where no length is given, else little-endian. A block's CRC-32
is that of the rest of it, so that damage is found before anything is computed. Its check is of the
bytes that it stands for, so that a machine that computes other bits is found before they are
written. A damaged block costs its own bytes: the next is found by its mark and its CRC-32. What is
stored is stored backwards, or the blocks of a compressed file in it would be taken for the next.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol
from zlib import crc32

from gpt_cli.errors import InputError

BLOCK = 32_768  # tokens, by default
LARGEST_BLOCK = 65_536
_DTYPES = ("float32", "bfloat16", "float16", "int8")
_MAGIC, _VERSION, _MARK = b"GPTZ", 1, b"\xb5"
_HEADER = struct.Struct("<4sBB8s8sI")
LARGEST_CODE = 8 * LARGEST_BLOCK  # bytes: a token takes fewer than 64 bits
_LARGEST_RECORD = 64 + LARGEST_CODE
_TRIED = 4096  # marks behind damage, unless `salvage` is given: each may cost a large CRC-32
_PIECE = 1 << 20  # bytes to read at a time
_ANOTHER = "get another copy"
_CURE = f"{_ANOTHER}, or keep the undamaged blocks with --salvage"


class Readable(Protocol):
    """A binary file to read."""

    def read(self, size: int, /) -> bytes:
        """Return this many bytes, or fewer at the end."""


@dataclass(frozen=True)
class Header:
    """The dtype and the digests that must be the same for writing and reading."""

    dtype: str
    weights: bytes  # the first 8 bytes of `digests.weights_digest`
    bits: bytes  # and of `digests.logits_digest`

    def pack(self) -> bytes:
        """Return the bytes of the file."""
        dtype = _DTYPES.index(self.dtype)
        fields = _HEADER.pack(_MAGIC, _VERSION, dtype, self.weights, self.bits, 0)[:-4]
        return fields + crc32(fields).to_bytes(4, "little")


@dataclass(frozen=True)
class Block:
    """A part of the data, which can be read without the others."""

    index: int
    size: int  # in tokens, or in bytes if it is stored
    stored: bool  # the code is the data itself
    check: int  # see `check`
    code: bytes

    def pack(self) -> bytes:
        """Return the bytes of the file."""
        code = self.code[::-1] if self.stored else self.code
        numbers = self.index, self.size << 1 | self.stored, len(code)
        fields = b"".join(map(_pack_number, numbers)) + self.check.to_bytes(2, "little")
        crc = crc32(code, crc32(fields))
        return _MARK + fields + crc.to_bytes(4, "little") + code


def end(index: int, size: int, crc: int) -> Block:
    """Return the last block, of data with this number of bytes and this CRC-32."""
    return Block(index, 0, False, 0, _pack_number(size) + crc.to_bytes(4, "little"))


def check(data: bytes) -> int:
    """Return the check of a block that stands for these bytes: half of their CRC-32."""
    return crc32(data) & 0xFFFF


class Reader:
    """Read a file of compressed data, from its start to its end, in bounded memory.

    Attributes:
        header: of the file; None if it is damaged and `salvage` is given.
        dtype: that of the header, even if the rest of it is damaged; "auto" without a header.
        lost: what could not be read, in words, if `salvage` is given.
        size, crc: of all bytes, once the end has been read.
    """

    def __init__(self, file: Readable, name: str = "the data", *, salvage: bool = False):
        """Read the header.

        Raises:
            InputError: it is damaged or of another version, or this is no compressed file.
        """
        self._file, self._name, self._salvage = file, name, salvage
        self._data, self._at = b"", 0
        self.lost: list[str] = []
        self.size = self.crc = 0
        self.dtype = "auto"
        self.header = self._read_header()

    def _read_header(self) -> Header | None:
        self._fill()
        lead = self._data[: _HEADER.size]
        if not lead.startswith(_MAGIC) and not self._salvage:
            what = "not a compressed file" if lead else "empty"
            raise InputError(
                f"{self._name} is {what}: give one that `gpt-cli compress` has written"
            )
        if len(lead) == _HEADER.size:
            self.dtype = _DTYPES[lead[5] % len(_DTYPES)]
            _, version, dtype, weights, bits, crc = _HEADER.unpack(lead)
            if crc == crc32(lead[:-4]):
                if version != _VERSION or dtype >= len(_DTYPES):
                    raise InputError(
                        f"{self._name} has version {version} of the format, and this gpt-cli reads "
                        f"version {_VERSION}: use the gpt-cli that has written it"
                    )
                self._at = _HEADER.size
                return Header(_DTYPES[dtype], weights, bits)
        self._damaged("its header is damaged")
        return None

    def blocks(self) -> Iterator[Block]:
        """Yield the blocks, except the end.

        Raises:
            InputError: a block is damaged or missing, unless `salvage` is given.
        """
        expected = 0
        while block := self._next(expected):
            if block.index > expected:
                self._lose(expected, block.index)
            expected = block.index + 1
            if not block.size:
                self._end(block)
                return
            yield block
        self._damaged("its end is missing")

    def finish(self, size: int, crc: int) -> None:
        """Compare all data, by its size and CRC-32, with what the end of the file says.

        Raises:
            InputError: they differ, unless `salvage` is given; or nothing was salvaged.
        """
        if self.lost and not size:
            raise InputError(f"{self._name}: no undamaged block is left: {_ANOTHER}")
        if not self.lost and (size, crc) != (self.size, self.crc):
            self._damaged("the data does not have its checksum")

    def _end(self, block: Block) -> None:
        try:
            self.size, width = _unpack_number(block.code, 0)
        except (ValueError, IndexError):
            self._damaged("its end is damaged")
            return
        self.crc = int.from_bytes(block.code[width:], "little")
        self._fill()
        if self._at < len(self._data):
            self._damaged("there is more after its end")

    def lose(self, block: Block) -> None:
        """Report a block whose code is not that of its data."""
        self._damaged(
            f"block {block.index} does not have its checksum",
            "the file was altered, or this machine computes other bits (see `gpt-cli verify`)",
        )

    def _lose(self, first: int, last: int) -> None:
        blocks = f"block {first} is" if last == first + 1 else f"blocks {first} to {last - 1} are"
        self._damaged(f"{blocks} damaged")

    def _damaged(self, what: str, cure: str = _CURE) -> None:
        if not self._salvage:
            raise InputError(f"{self._name}: {what}: {cure}")
        self.lost.append(what)

    def _next(self, expected: int) -> Block | None:
        """Return the next undamaged block, or None if there is none."""
        tried = 0
        while self._fill() and (self._salvage or tried < _TRIED):
            tried += 1
            place = self._data.find(_MARK, self._at)
            self._at = len(self._data) if place < 0 else place + 1
            try:
                block, stop = _unpack_block(self._data, self._at)
            except (ValueError, IndexError):
                continue
            if block.index >= expected:
                self._at = stop
                return block
        return None

    def _fill(self) -> bool:
        """Have a whole block in memory, or all that is left; return whether any byte is."""
        while len(self._data) - self._at < _LARGEST_RECORD and (more := self._file.read(_PIECE)):
            self._data, self._at = self._data[self._at :] + more, 0
        return self._at < len(self._data)


def _pack_number(number: int) -> bytes:
    """Return a number as LEB128: seven bits a byte, the lowest first."""
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*data, number])


def _unpack_number(data: bytes, at: int) -> tuple[int, int]:
    """Return a number and where it ends; raise ValueError or IndexError if there is none."""
    number = 0
    for shift in range(0, 63, 7):
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
    raise ValueError("the number is too long")


def _unpack_block(data: bytes, start: int) -> tuple[Block, int]:
    """Return the block after a mark and where it ends.

    Raises:
        ValueError, IndexError: there is none.
    """
    index, at = _unpack_number(data, start)
    kind, at = _unpack_number(data, at)
    length, at = _unpack_number(data, at)
    size, stored = kind >> 1, bool(kind & 1)
    if length > LARGEST_CODE or (size != length if stored else size > LARGEST_BLOCK):
        raise ValueError("the block is too large")
    fields, stop = data[start : at + 2], at + 6 + length
    crc, code = data[at + 2 : at + 6], data[at + 6 : stop]
    if stop > len(data) or int.from_bytes(crc, "little") != crc32(code, crc32(fields)):
        raise ValueError("the block is damaged")
    check = int.from_bytes(fields[-2:], "little")
    return Block(index, size, stored, check, code[::-1] if stored else code), stop
