"""A range coder: a sequence of symbols as one number, in as few bits as their odds allow.

The number lies in a range, which begins as [0, 1). A step divides the range among all symbols in
proportion to their counts, and keeps the part of the next symbol. A symbol with `count` of `total`
counts multiplies the length of the range by `count / total`, and takes -log2 of that in bits. Both
ends compute with integers, so they agree to the last bit.

G. N. N. Martin, "Range encoding", 1979.
"""

_WORD = 32  # bits that leave the range at a time
_BITS = 96  # of the range at its longest, and 64 at its shortest: totals below 2^48 lose nothing
_SHORTEST = 1 << (_BITS - _WORD)


class Encoder:
    """Encode symbols; a symbol is an interval in the running sum of all counts."""

    def __init__(self) -> None:
        self._low = 0
        self._length = 1 << _BITS
        self._words: list[int] = []  # the settled part of the number; one may have a carry, bit 32

    def encode(self, start: int, end: int, total: int) -> None:
        """Append the symbol whose counts are those from `start` to `end` of `total`."""
        unit = self._length // total
        self._low += unit * start
        self._length = unit * (end - start)
        while self._length < _SHORTEST:
            self._words.append(self._low >> (_BITS - _WORD))
            self._low = self._low % _SHORTEST << _WORD
            self._length <<= _WORD

    def finish(self) -> bytes:
        """Return the shortest bytes of a number in the range; zeros follow it."""
        zeros = self._length.bit_length()
        while self._rounded(zeros) >= self._low + self._length:
            zeros -= 1
        # One of 2^64 numbers in a row ends with 64 zeros, so one more word is enough.
        last = self._rounded(zeros) >> (_BITS - _WORD)
        code = bytearray()
        carry = 0
        for word in reversed([*self._words, last]):
            carry, rest = divmod(word + carry, 1 << 32)
            code += rest.to_bytes(4, "little")
        return bytes(code[::-1]).rstrip(b"\0")

    def _rounded(self, zeros: int) -> int:
        """Return the least number that is not below the range and ends with this many zero bits."""
        return -(-self._low >> zeros) << zeros


class Decoder:
    """Decode the symbols of an `Encoder`, from the same counts."""

    def __init__(self, code: bytes):
        self._code = code
        self._at = 0  # the next byte
        self._length = 1 << _BITS
        self._offset = 0  # of the number in the range
        for _ in range(_BITS // _WORD):
            self._read()

    def _read(self) -> None:
        word = self._code[self._at : self._at + 4].ljust(4, b"\0")
        self._offset = self._offset << _WORD | int.from_bytes(word, "big")
        self._at += 4

    def target(self, total: int) -> int:
        """Return a count of the next symbol; raise ValueError if no encoder writes this code."""
        self._unit = self._length // total
        target = self._offset // self._unit
        if target >= total:
            raise ValueError("the code is damaged")
        return target

    def advance(self, start: int, end: int) -> None:
        """Remove the symbol of the last target, whose counts are those from `start` to `end`."""
        self._offset -= self._unit * start
        self._length = self._unit * (end - start)
        while self._length < _SHORTEST:
            self._length <<= _WORD
            self._read()
