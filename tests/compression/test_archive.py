"""The file format: what is written is read, and damage costs what it hits."""

import io
import random
from contextlib import suppress
from dataclasses import replace
from unittest import mock
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt_cli.compression import archive
from gpt_cli.compression.archive import (
    MAX_CODE_BYTES,
    MAX_SEGMENT_TOKENS,
    ArchiveReader,
    Header,
    Segment,
    end,
)
from gpt_cli.errors import InputError

HEADER = Header("int8", b"digests.", b"the bits")
blocks = st.builds(
    lambda stored, size, check, code: (len(code) if stored else size, stored, check, code),
    st.booleans(),
    st.integers(1, MAX_SEGMENT_TOKENS),
    st.integers(0, 2**16 - 1),
    st.binary(min_size=1, max_size=300),
)


def packed(drawn, size=7, crc=9):
    written = [Segment(index, *fields) for index, fields in enumerate(drawn)]
    return written, file_of(*written, end(len(written), size, crc))


def file_of(*parts):
    """Return a file of segments, or of bytes between them."""
    packed = (part if isinstance(part, bytes) else part.pack() for part in parts)
    return HEADER.pack() + b"".join(packed)


def read(data, **how):
    reader = ArchiveReader(io.BytesIO(data), "f", **how)
    return reader, list(reader.segments())


@given(st.lists(blocks, max_size=20), st.integers(0, 2**40), st.integers(0, 2**32 - 1))
def test_what_is_written_is_read(drawn, size, crc):
    written, data = packed(drawn, size, crc)
    reader, actual = read(data)
    assert (reader.header, actual, reader.size, reader.crc) == (HEADER, written, size, crc)
    reader.finish(size, crc)
    with pytest.raises(InputError, match="checksum"):
        reader.finish(size, crc ^ 1)


def test_the_bytes_are_those_of_the_format():
    # The format is fixed: a change of these bytes needs another version.
    _, data = packed([(300, False, 0x1234, b"code"), (5, True, 1, b"bytes")], 1234, 0x01020304)
    assert data.hex(" ") == (
        "47 50 54 5a 01 03 64 69 67 65 73 74 73 2e 74 68 65 20 62 69 74 73 " + data[22:26].hex(" ")
        + " b5 00 d8 04 04 34 12 " + data[33:37].hex(" ") + " 63 6f 64 65"
        + " b5 01 0b 05 01 00 " + data[47:51].hex(" ") + " 73 65 74 79 62"
        + " b5 02 00 06 00 00 " + data[62:66].hex(" ") + " d2 09 04 03 02 01"
    )  # fmt: skip


def test_a_number_takes_a_byte_for_each_seven_bits():
    for size, bytes_ in ((1, 1), (63, 1), (64, 2), (8191, 2), (8192, 3), (MAX_SEGMENT_TOKENS, 3)):
        (written,), data = packed([(size, False, 0, b"")])
        assert read(data)[1] == [written]
        assert len(written.pack()) == 9 + bytes_  # with mark, index, length, check and CRC-32


@given(st.lists(blocks, min_size=1, max_size=6), st.data())
def test_a_flipped_bit_is_found_and_costs_one_block(drawn, data):
    written, packed_ = packed(drawn)
    offset, bit = data.draw(st.integers(0, len(packed_) - 1)), data.draw(st.integers(0, 7))
    flipped = bytearray(packed_)
    flipped[offset] ^= 1 << bit
    with pytest.raises(InputError):
        read(bytes(flipped))
    if offset < 5:  # without its name and version, it may be any file
        return
    reader, actual = read(bytes(flipped), salvage=True)
    assert reader.lost
    assert reader.dtype == "int8"
    assert (reader.header is None) == (6 <= offset < 26)
    assert len(actual) >= len(written) - 1
    assert set(actual) <= set(written)


@given(st.lists(blocks, min_size=1, max_size=6), st.data())
def test_a_cut_file_is_refused_and_its_beginning_salvaged(drawn, data):
    written, packed_ = packed(drawn)
    length = data.draw(st.integers(0, len(packed_) - 1))
    with pytest.raises(InputError):
        read(packed_[:length])
    reader, actual = read(packed_[:length], salvage=True)
    assert actual == written[: len(actual)]
    assert reader.lost


@given(st.lists(blocks, min_size=2, max_size=6), st.binary(max_size=2000), st.data())
def test_bytes_in_between_cost_nothing(drawn, junk, data):
    written, _ = packed(drawn)
    parts = [*written, end(len(written), 7, 9)]
    parts.insert(data.draw(st.integers(0, len(written))), junk)
    assert read(file_of(*parts), salvage=True)[1] == written


def test_lost_blocks_are_listed():
    written, _ = packed([(1, False, 2, b"code")] * 6)
    last = end(6, 7, 9)
    for kept, says in (
        (written[2:], "segments 0 to 1 are damaged"),
        (written[:2] + written[5:], "segments 2 to 4 are damaged"),
        (written[:5], "segment 5 is damaged"),
    ):
        data = file_of(*kept, last)
        assert read(data, salvage=True)[0].lost == [says]
        with pytest.raises(InputError, match=f"f: {says}: get another copy, or salvage"):
            read(data)
    reader, _ = read(b"X" + file_of(last)[1:], salvage=True)
    reader.lose(written[3])
    assert reader.lost == [
        "its header is damaged",
        "segments 0 to 5 are damaged",
        "segment 3 does not have its checksum",
    ]
    reader, _ = read(file_of(Segment(0, 0, False, 0, b"\xff")), salvage=True)
    assert reader.lost == ["its end is damaged"]
    with pytest.raises(InputError, match="no undamaged segment is left"):
        reader.finish(0, 0)


@pytest.mark.parametrize(("data", "says"), [(b"", "empty"), (b"text", "not a compressed file")])
def test_what_is_no_compressed_file_is_refused(data, says):
    with pytest.raises(InputError, match=f"f is {says}: give a file"):
        read(data)
    assert read(data, salvage=True)[0].dtype == "auto"


def test_the_largest_blocks_are_read_and_no_larger_ones():
    largest = (MAX_CODE_BYTES, True, 0, bytes(MAX_CODE_BYTES))
    written, data = packed([largest] * 5)  # which are read in pieces of 1 MB
    assert read(data)[1] == written
    for size, stored, code in (
        (MAX_CODE_BYTES + 1, True, bytes(MAX_CODE_BYTES + 1)),
        (MAX_SEGMENT_TOKENS + 1, False, b"code"),
        (2, True, b"bytes"),
    ):
        with pytest.raises(InputError, match="segment 0 is damaged"):
            read(file_of(Segment(0, size, stored, 0, code), end(1, 7, 9)))


def test_a_compressed_file_within_a_damaged_block_is_not_taken_for_blocks():
    _, inner = packed([(3, False, 5, b"inner")] * 4)
    stored = (1 + len(inner), True, 5, b"x" + inner)
    written, outer = packed([stored, (7, False, 5, b"outer")])
    assert read(outer)[1] == written
    reader, actual = read(outer.replace(b"x", b"y"), salvage=True)
    assert (actual, reader.lost) == (written[1:], ["segment 0 is damaged"])


def test_false_marks_do_not_take_long():
    with mock.patch.object(archive, "_unpack_segment", wraps=archive._unpack_segment) as tried:
        with pytest.raises(InputError, match="end is missing"):
            read(file_of(b"\xb5" * 20_000))
        assert tried.call_count <= 4096  # each may cost a CRC-32 of 512 kB


@pytest.mark.parametrize("salvage", [False, True])
@pytest.mark.parametrize(  # marks with no code, with one of 10 kB and with the longest one
    "unit", [b"\xb5\0\2\0", b"\xb5\0\2\x90\x4e", b"\xb5\0\2\xff\xff\x1f", b"\xb5\xb5\0\0\0"]
)
def test_the_search_behind_damage_is_bounded(unit, salvage):
    written, _ = packed([(1, False, 2, b"code")])
    checked = []

    def counting(data, start=0):
        checked.append(len(data))
        return crc32(data, start)

    data = file_of(*written, unit * (2_000_000 // len(unit)))
    with (
        mock.patch.object(archive, "_MOST_CHECKED", 20_000_000),
        mock.patch.object(archive, "crc32", counting),
        pytest.raises(InputError, match="f: segments from 1 on are damaged: get another copy"),
    ):
        read(data, salvage=salvage)
    assert sum(checked) <= 20_000_000 + 2 * MAX_CODE_BYTES
    assert len(checked) <= 2 * 20_000_000 // 4096 + 10  # a segment has two


@pytest.mark.parametrize("junk", [b"\xb5\0\2\0" * 30_000, random.Random(1).randbytes(5_000_000)])
def test_a_block_behind_false_marks_is_read(junk):
    (written,), _ = packed([(1, False, 2, b"code")])
    assert read(file_of(junk, written, end(1, 7, 9)))[1] == [written]


@pytest.mark.parametrize("first", [100_000, 300_000, 500_000])
def test_a_long_block_behind_long_damage_is_read(first):
    lengths = [first, 400_000, 250_000, 500_000, 350_000, 450_000]
    written, _ = packed([(length, True, 0, bytes(length)) for length in lengths])
    parts = [block.pack() for block in written]
    for damaged in range(len(written)):
        others = [*parts[:damaged], b"X" + parts[damaged][1:], *parts[damaged + 1 :]]
        data = file_of(*others, end(len(written), 7, 9))
        assert read(data, salvage=True)[1] == written[:damaged] + written[damaged + 1 :]


@pytest.mark.parametrize("damage", [b"\x03", b"\x83", b"\0\1", b"GPTX\1\0", b"\0" * 6])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_a_header_that_is_damaged_before_its_digests_is_repaired(dtype, damage):
    header = replace(HEADER, dtype=dtype)
    data = header.pack()[: 6 - len(damage)] + damage + header.pack()[6:]
    if data == header.pack():
        return
    reader, _ = read(data, salvage=True)
    assert (reader.header, reader.dtype) == (header, dtype)
    assert reader.lost[0] == "its header is damaged"


@pytest.mark.parametrize(
    ("byte", "dtype"), [(0, "float32"), (3, "int8"), (4, "auto"), (255, "auto")]
)
def test_a_header_that_cannot_be_repaired_has_the_dtype_that_it_names(byte, dtype):
    data = HEADER.pack()
    reader, _ = read(data[:5] + bytes([byte]) + data[6:-1] + b"!", salvage=True)
    assert (reader.header, reader.dtype) == (None, dtype)


def test_a_file_is_read_in_pieces():
    stored = (MAX_CODE_BYTES, True, 0, bytes(MAX_CODE_BYTES))
    written, data = packed([stored] * 8)
    file = io.BytesIO(data)
    assert next(ArchiveReader(file).segments()) == written[0]
    assert file.tell() <= 2_000_000


def test_more_after_the_end_is_refused():
    _, data = packed([])
    with pytest.raises(InputError, match="more after its end"):
        read(data + b"x")
    assert read(data + data, salvage=True)[0].lost == ["there is more after its end"]


@pytest.mark.parametrize(("offset", "says"), [(4, "has version 4"), (5, "use the gpt-cli that")])
def test_another_version_or_an_unknown_type_is_refused(offset, says):
    data = bytearray(HEADER.pack())
    data[offset] = 4  # there are four types
    data[-4:] = crc32(data[:-4]).to_bytes(4, "little")
    with pytest.raises(InputError, match=says):
        read(bytes(data))


@pytest.mark.parametrize("rest", [b"\xb5", b"\xb5\0", b"\xb5\0\0\0", b"\xb5\0\0\0\0\0\0\0\0"])
def test_a_segment_that_is_cut_is_no_end(rest):
    for data in (rest, rest + bytes(3)):
        with pytest.raises(InputError, match="its end is missing"):
            read(file_of(data))


@given(st.binary(max_size=3000))
def test_any_bytes_are_read_or_refused(junk):
    for how in ({}, {"salvage": True}):
        for data in (junk, file_of(junk)):
            with suppress(InputError):
                read(data, **how)


def test_a_block_that_comes_twice_is_read_once():
    written, _ = packed([(1, False, 2, b"one"), (3, False, 4, b"two")])
    assert read(file_of(*written, *written, end(2, 7, 9)))[1] == written
