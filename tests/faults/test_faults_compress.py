"""Faults of compressed data: damage, hostile files, full disks, pipes that close, and signals."""

import os
import random
import signal
import time
from dataclasses import replace
from functools import cache, partial
from io import BytesIO
from pathlib import Path
from typing import NamedTuple
from unittest import mock
from zlib import crc32

import pytest

from gpt_cli.compression.archive import (
    MAX_SEGMENT_TOKENS,
    ArchiveReader,
    Header,
    Segment,
    check,
    end,
)
from gpt_cli.compression.codec import Codec
from gpt_cli.errors import InputError
from support.in_process import run_here
from support.processes import posix
from support.signals import (
    ENDS,
    TINY,
    at_each_limit,
    drip,
    each_signal,
    interrupt,
    leave,
    limit_addresses,
    limits,
    linux,
)
from support.world import fault_row

pytestmark = posix

SLOW = pytest.mark.slow
HEADER = 26  # bytes
SHORT = 2000  # tokens of a segment
ONE = (*TINY, "-q", "--threads", 1)  # several would wait for each other on a busy machine
TEXT = b"Once upon a time there was a fox.\n"
NOISE = random.Random(0).randbytes(1_200_000)
EMPTY = "standard output is empty"
REST = "all other segments, with --salvage"


class Packed(NamedTuple):
    """A compressed file in its parts."""

    header: Header
    segments: list[Segment]
    texts: list[bytes]  # the data of each segment

    @property
    def parts(self) -> list[bytes]:
        """Return the bytes of the header, of each segment and of the end."""
        data = b"".join(self.texts)
        last = end(len(self.segments), len(data), crc32(data))
        return [part.pack() for part in (self.header, *self.segments, last)]

    @property
    def file(self) -> bytes:
        """Return the bytes of the file."""
        return b"".join(self.parts)

    def but(self, **changes: object) -> bytes:
        """Return a file with another first segment, which has a correct CRC-32."""
        first = replace(self.segments[0], **changes)
        return b"".join([self.parts[0], first.pack(), *self.parts[2:]])

    def ended(self, last: Segment) -> bytes:
        """Return a file with another end."""
        return b"".join([*self.parts[:-1], last.pack()])


@pytest.fixture(autouse=True)
def _library(library, world, monkeypatch):
    world.env.pop("GPT_CLI_OPS", None)
    monkeypatch.delenv("GPT_CLI_OPS", raising=False)


@pytest.fixture(scope="session")
def codec(tiny, library):
    return Codec(tiny.model, tiny.tokenizer)


@pytest.fixture(scope="session")
def packed(tiny, codec) -> Packed:
    """Return a story in short segments, the last of which is noise."""
    (row,) = tiny.generate(["Once upon a time"], max_tokens=60, seed=1, ignore_eos=True)
    data = f"Once upon a time{row.text}".encode() + NOISE[:100]
    reader = ArchiveReader(BytesIO(b"".join(codec.compress(BytesIO(data), 20))))
    segments = list(reader.segments())
    texts = codec._decoded(segments, lambda _: None)
    assert b"".join(texts) == data
    assert {segment.stored for segment in segments} == {False, True}
    return Packed(reader.header, segments, texts)


# --- damaged and hostile files -------------------------------------------------------------------


def flipped(file: bytes, index: int) -> bytes:
    index %= len(file)
    return file[:index] + bytes([file[index] ^ 1]) + file[index + 1 :]


def row(number, name, damage, says, kept=slice(None)):
    """Return a row of the table: a damaged file, its message, and the segments that are left."""
    return fault_row(number, name, 2, damage, says, kept, intact=REST)


NONE, FIRST_TWO, OTHERS = slice(0), slice(2), slice(1, None)
HEAD, END, BLOCK = "its header is damaged", "its end is missing", "segment 0 is damaged"
WRONG = "segment 0 does not have its checksum"
# fmt: off
DAMAGED = [
    row(87, "an empty file", lambda _: b"", "is empty", NONE),
    row(87, "a file cut in its name", lambda it: it.file[:3], "is not a compressed file", NONE),
    row(87, "a file cut in its header", lambda it: it.file[:20], HEAD, NONE),
    row(87, "a file cut after its header", lambda it: it.parts[0], END, NONE),
    row(87, "a file cut in a segment's fields", lambda it: it.file[:HEADER + 4], END, NONE),
    row(87, "a file cut in a code", lambda it: it.file[:HEADER + 12], END, NONE),
    row(87, "a file cut between segments", lambda it: b"".join(it.parts[:3]), END, FIRST_TWO),
    row(87, "a file cut before its end", lambda it: b"".join(it.parts[:-1]), END),
    row(87, "a file cut in its end", lambda it: it.file[:-1], END),
    row(87, "a bit of the name", lambda it: flipped(it.file, 0), "is not a compressed file"),
    row(87, "a bit of the header", lambda it: flipped(it.file, 9), HEAD),
    row(87, "a bit of a mark", lambda it: flipped(it.file, HEADER), BLOCK, OTHERS),
    row(87, "a bit of an index", lambda it: flipped(it.file, HEADER + 1), BLOCK, OTHERS),
    row(87, "a bit of a size", lambda it: flipped(it.file, HEADER + 2), BLOCK, OTHERS),
    row(87, "a bit of a length", lambda it: flipped(it.file, HEADER + 3), BLOCK, OTHERS),
    row(87, "a bit of a checksum", lambda it: flipped(it.file, HEADER + 7), BLOCK, OTHERS),
    row(87, "a bit of a code", lambda it: flipped(it.file, HEADER + 12), BLOCK, OTHERS),
    row(87, "a bit of the end", lambda it: flipped(it.file, -1), END),
    row(87, "a segment that is missing", lambda it: b"".join([it.parts[0], *it.parts[2:]]), BLOCK,
        OTHERS),
    row(87, "two segments in each other's place",
        lambda it: b"".join([it.parts[0], *it.parts[2:0:-1], *it.parts[3:]]), BLOCK, OTHERS),
    row(87, "two files joined", lambda it: it.file * 2, "there is more after its end"),
    row(87, "a byte after the end", lambda it: it.file + b"\n", "there is more after its end"),
    row(87, "a text", lambda _: TEXT * 20, "is not a compressed file", NONE),
    row(87, "a text behind a header", lambda it: it.parts[0] + TEXT * 20, END, NONE),
    row(87, "1 MB of noise behind a header", lambda it: it.parts[0] + NOISE, END, NONE),
    row(88, "a code of noise", lambda it: it.but(code=NOISE[:50]), WRONG, OTHERS),
    row(88, "a code of ones", lambda it: it.but(code=b"\xff" * 900), WRONG, OTHERS),
    row(88, "no code", lambda it: it.but(code=b""), WRONG, OTHERS),
    row(88, "a segment that stores something else", lambda it: it.but(stored=True), BLOCK, OTHERS),
    row(88, "a segment of 300 tokens", lambda it: it.but(size=300), WRONG, OTHERS),
    row(88, "a segment that is too large", lambda it: it.but(size=MAX_SEGMENT_TOKENS + 1), BLOCK,
        OTHERS),
    row(88, "a code of 1 MB", lambda it: it.but(code=NOISE[:1 << 20]), BLOCK, OTHERS),
    row(88, "an index of 80 bits", lambda it: it.but(index=1 << 80), BLOCK, OTHERS),
    row(88, "a size of 80 bits", lambda it: it.but(size=1 << 80), BLOCK, OTHERS),
    row(88, "an index of 62 bits", lambda it: it.but(index=1 << 62), "segments 0 to 4611686018427",
        slice(1)),
    row(88, "numbers without an end", lambda it: it.parts[0] + b"\xb5" + b"\xff" * 10**6, END,
        NONE),
    row(88, "20,000 false marks", lambda it: it.parts[0] + b"\xb5\0\2\x90\x4e" * 20_000, END, NONE),
    row(88, "an end of another size", lambda it: it.ended(end(len(it.segments), 5, 0)),
        "the data does not have its checksum"),
    row(88, "an end without a size",
        lambda it: it.ended(Segment(len(it.segments), 0, False, 0, b"")), "its end is damaged"),
    row(88, "an end of 400 kB",
        lambda it: it.ended(Segment(len(it.segments), 0, False, 0, NOISE[:400_000])),
        "does not have its checksum"),
]
# fmt: on


@pytest.mark.parametrize(("damage", "says", "kept"), DAMAGED)
def test_damage_is_told_and_costs_no_other_segment(damage, says, kept, packed, world, suffer_here):
    (world.place / "in").write_bytes(damage(packed))
    command = ("decompress", *ONE, world.place / "in")
    suffer_here(*command, "-o", "out", code=2, says=says, do="")
    if kept == NONE:
        suffer_here(
            *command, "--salvage", code=2, says="no undamaged segment is left", do="another"
        )
        return
    out, error = run_here(*command, "--salvage", code=6)
    assert out == b"".join(packed.texts[kept])
    assert error.endswith("; all else is written\n")
    assert len(error) < 300


@pytest.mark.fault(87, "bytes between the segments, and a segment twice", 0, intact="every byte")
def test_what_costs_nothing_is_no_damage(packed):
    head, first, *others = packed.parts
    file = head + TEXT + first * 2 + NOISE[:1000] + b"".join(others)
    assert run_here("decompress", *ONE, input=file) == (b"".join(packed.texts), "")


@pytest.mark.fault(87, "a damaged segment that stores a compressed file", 6, intact=REST)
def test_a_file_within_a_damaged_one_is_not_taken_for_it(packed, compressed):
    data = NOISE[:3000] + packed.file + NOISE[3000:9000] + TEXT
    file = compressed(data)
    stored = list(ArchiveReader(BytesIO(file)).segments())[1].code
    assert packed.file in stored
    damaged = file.replace(NOISE[2900:3000][::-1], bytes(100))
    out, error = run_here("decompress", *TINY, "--salvage", input=damaged, code=6)
    assert "segment 1 is damaged; all else" in error
    assert out == data.replace(stored, b"")


@SLOW
@pytest.mark.fault(87, "a file cut at each place, and each of its bits", 2, intact=REST)
def test_any_damage_is_told_and_costs_no_other_segment(packed, codec):
    parts, file = packed.parts, packed.file
    decode = codec._decoded
    decoded = cache(lambda segment: decode([segment], lambda _: None)[0])  # it would take minutes
    ends = [sum(map(len, parts[: n + 1])) for n in range(len(parts))]

    def decompressed(data: bytes, **flags: bool) -> bytes:
        return b"".join(codec.decompress(ArchiveReader(BytesIO(data), **flags)))

    with mock.patch.object(codec, "_decoded", lambda segments, _: list(map(decoded, segments))):
        assert decompressed(file) == b"".join(packed.texts)
        for index in range(len(file)):
            number = next(n for n, stop in enumerate(ends) if index < stop) - 1
            whole = [text for n, text in enumerate(packed.texts) if n != number]
            changes = [bytes([file[index] ^ 1 << bit]) for bit in range(8)]
            damaged = [file[:index] + change + file[index + 1 :] for change in changes]
            expected = [b"".join(whole)] * 8 + [b"".join(packed.texts[: max(0, number)])]
            for data, kept in zip([*damaged, file[:index]], expected, strict=True):
                with pytest.raises(InputError):
                    decompressed(data)
                if kept:
                    assert decompressed(data, salvage=True) == kept
                    continue
                with pytest.raises(InputError, match="no undamaged segment is left"):
                    decompressed(data, salvage=True)


@SLOW
@pytest.mark.fault(88, "three segments of 65,536 tokens without a code", 2, intact=REST)
def test_the_most_tokens_end_in_time(model, world, suffer):
    header = world.output("compress", "-m", model)[:HEADER]
    codes = (b"", b"\xff" * 99, NOISE[:400_000])
    segments = [Segment(n, MAX_SEGMENT_TOKENS, False, 0, code) for n, code in enumerate(codes)]
    segments += Segment(3, len(TEXT), True, check(TEXT), TEXT), end(4, 1, 0)
    (world.place / "in").write_bytes(header + b"".join(segment.pack() for segment in segments))
    options = {"limit": 300, "says": WRONG, "do": "see `gpt-cli verify`"}
    suffer("decompress", "-q", "-m", model, "in", code=2, **options)
    finished = world.run("decompress", "-m", model, "in", "--salvage", limit=300)
    assert (finished.returncode, finished.stdout) == (6, TEXT)


# --- another model, machine or version -----------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "says", "do"),
    [
        fault_row(89, name, 2, index, says, do, intact=EMPTY)
        for name, index, says, do in (
            ("a later version of the format", 4, "has version 0", "use the gpt-cli that has"),
            ("data of another model", 6, "with another model", "use that model"),
            ("data of a machine that computes other bits", 14, "other bits", "gpt-cli verify"),
        )
    ],
)
@pytest.mark.parametrize("salvage", [[], ["--salvage"]], ids=["strictly", "salvaged"])
def test_what_cannot_be_read_here_is_refused(index, says, do, salvage, packed, world, suffer_here):
    lead = flipped(packed.parts[0], index)[:-4]
    header = lead + crc32(lead).to_bytes(4, "little")
    (world.place / "in").write_bytes(header + packed.file[HEADER:])
    command = ("decompress", *TINY, world.place / "in", "-o", "out")
    suffer_here(*command, *salvage, code=2, says=says, do=do)


@pytest.mark.fault(89, "a machine without the compiled library", 5, intact=EMPTY)
@pytest.mark.parametrize("command", ["compress", "decompress"])
def test_without_the_library_there_is_no_promise(command, packed, suffer_here):
    options = {"env": {"GPT_CLI_OPS": "numpy"}, "stdin": packed.file}
    says, do = "numpy does not", "use the compiled library"
    suffer_here(command, *TINY, code=5, says=says, do=do, **options)


# --- disks and pipes -----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def compressed(codec):
    """Return a function that compresses data in short segments."""
    return cache(lambda data: b"".join(codec.compress(BytesIO(data), SHORT)))


@pytest.fixture
def job(compressed, world):
    """Return a function that returns a command with its input, and what it must write."""

    def make(command: str, data: bytes) -> tuple[tuple[object, ...], bytes]:
        file = compressed(data)
        (world.place / "data").write_bytes(data)
        (world.place / "file").write_bytes(file)
        if command == "compress":
            return ("compress", *ONE, "--segment", SHORT, "data"), file
        return ("decompress", *ONE, "file"), data

    return make


COMMANDS = pytest.mark.parametrize("command", ["compress", "decompress"])


@COMMANDS
@pytest.mark.fault(90, "a full disk behind standard output", 5, intact="-")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_is_told(command, job, world):
    arguments, _ = job(command, TEXT)
    with Path("/dev/full").open("wb") as full:
        finished = world.run(*arguments, stdout=full)
    message = b"gpt-cli: error: cannot write to standard output: No space left on device\n"
    assert (finished.returncode, finished.stderr) == (5, message)


@COMMANDS
@pytest.mark.fault(90, "a disk that fills under an output", 5, intact="there is no output")
def test_an_output_that_finds_no_room_does_not_appear(command, job, suffer):
    arguments, _ = job(command, NOISE[:100_000])
    options = {"preexec_fn": limits(FSIZE=50_000), "code": 5}
    suffer(*arguments, "-o", "out", says="cannot write out", do="File too large", **options)


@COMMANDS
@pytest.mark.fault(90, "an output that is there already", 2, intact="the output")
def test_an_output_is_not_written_over(command, job, suffer_here):
    arguments, _ = job(command, TEXT)
    for name in ("data", "file"):  # one of them is the input
        suffer_here(*arguments, "-o", name, code=2, says=f"{name} exists", do="name another output")


@linux
@COMMANDS
@pytest.mark.fault(90, "an input that cannot be read", 2, intact="there is no output")
def test_an_input_that_cannot_be_read_is_told(command, suffer_here):
    memory = "/proc/self/mem"  # its first page cannot be read
    options = {"says": f"cannot read {memory}", "do": "name a file that can be read"}
    suffer_here(command, *TINY, memory, "-o", "out", code=2, **options)


@COMMANDS
@pytest.mark.fault(91, "standard output that is closed", 5, intact="-")
def test_standard_output_must_be_open(command, job, suffer):
    arguments, _ = job(command, TEXT)
    closed = ["sh", "-c", 'exec "$@" >&-', "sh"]
    says, do = "standard output is closed", "redirect it"
    suffer(*arguments, before=closed, code=5, says=says, do=do)


@COMMANDS
@pytest.mark.fault(91, "a reader that leaves", 141, intact="nothing is said")
def test_a_reader_that_leaves_ends_it_quietly(command, job, world):
    arguments, expected = job(command, NOISE[:100_000])
    assert leave(world, *arguments, size=10) == (expected[:10], 141)


@COMMANDS
@pytest.mark.fault(91, "input a byte at a time", 0, intact="the same output")
def test_input_may_come_a_byte_at_a_time(command, job, world):
    arguments, expected = job(command, TEXT * 3)
    data = (world.place / arguments[-1]).read_bytes()
    assert drip(world, *arguments[:-1], stdin=data) == expected


# --- signals -------------------------------------------------------------------------------------


def hidden(world) -> list[Path]:
    """Return the temporary files of outputs."""
    return [path for path in world.place.iterdir() if path.name.startswith(".")]


def wait_for_output(world) -> None:
    """Wait until a command has its temporary file. Before, Python itself handles signals."""
    until = time.monotonic() + 60
    while not hidden(world):
        assert time.monotonic() < until
        time.sleep(0.01)


@COMMANDS
@each_signal(
    92, "in the middle of an output", "there is no output", {signal.SIGINT: 130, signal.SIGHUP: 129}
)
def test_a_signal_leaves_no_output(number, command, job, world, survive):
    arguments, _ = job(command, TEXT * 600)
    until = partial(wait_for_output, world)
    ended = interrupt(world, number, *arguments, "-o", "out", until=until)
    assert ended == (128 + number, b"", b"")
    assert {path.name for path in world.place.iterdir()} == {"data", "file"}
    survive(1)


@SLOW
@COMMANDS
@each_signal(92, "at 26 moments", "an output is whole or not there", ENDS)
def test_an_output_is_never_half_written(number, command, job, world, survive):
    arguments, expected = job(command, TEXT * 600)
    chance = random.Random(f"{command} {number}")
    killed = 0
    for turn in range(26):
        output = ["-o", "out"] if turn % 2 else []
        with world.start(*arguments, *output, bufsize=0) as process:
            beginning = b""
            if output:
                wait_for_output(world)
            else:
                beginning = process.stdout.read(1)
            time.sleep(chance.uniform(0, 1))
            process.send_signal(number)
            out, errors = process.communicate(timeout=60)
        assert process.returncode in (0, -number, ENDS[number]), errors
        assert errors == b""
        assert expected.startswith(beginning + out)
        if (world.place / "out").exists():
            assert (world.place / "out").read_bytes() == expected
            (world.place / "out").unlink()
        else:
            assert process.returncode or not output
        assert number == signal.SIGKILL or not hidden(world)
        for path in hidden(world):
            path.unlink()
        killed += process.returncode != 0
    survive(killed)


@SLOW
@COMMANDS
@pytest.mark.fault(92, "a reader that leaves at 25 moments", 141, intact="nothing is said")
def test_a_reader_may_leave_at_any_moment(command, job, world, survive):
    arguments, expected = job(command, TEXT * 600)
    chance = random.Random(command)
    left = 0
    for _ in range(25):
        out, code = leave(world, *arguments, size=1, wait=chance.uniform(0, 0.5))
        assert expected.startswith(out)
        assert code in (0, 141)
        left += code != 0
    survive(left)


# --- memory, and files that change ---------------------------------------------------------------


@linux
@COMMANDS
@pytest.mark.fault(93, "a limit of 300 MiB of address space", 5, intact="nothing is begun")
def test_too_little_address_space_is_known_before(command, job, suffer):
    arguments, _ = job(command, TEXT)
    options = {"preexec_fn": limit_addresses(300), "code": 5}
    suffer(*arguments, "-o", "out", says="MiB of address space", do="ulimit -v", **options)


@linux
@SLOW
@COMMANDS
@pytest.mark.fault(93, "each limit of address space from 50 to 1600 MiB", 5, intact="-")
def test_any_limit_of_address_space_is_enough_or_told(command, job, world):
    arguments, expected = job(command, TEXT * 60)
    for finished in at_each_limit(world, *arguments, "-o", "out"):
        if not finished.returncode:
            assert (world.place / "out").read_bytes() == expected
            (world.place / "out").unlink()
        assert {path.name for path in world.place.iterdir()} == {"data", "file"}


@SLOW
@linux
@pytest.mark.fault(93, "input without end, in 1000 MiB", 141, intact="memory is bounded")
@pytest.mark.parametrize(
    ("arguments", "size"),
    [
        pytest.param(["compress", "/dev/urandom"], 4 << 20, id="noise"),
        pytest.param(["compress", "/dev/zero", "--segment", 2000], HEADER + 20, id="zeros"),
    ],
)
def test_input_without_end_is_compressed_as_it_comes(arguments, size, world):
    options = {"preexec_fn": limit_addresses(1000), "env": {"OPENBLAS_NUM_THREADS": "1"}}
    out, code = leave(world, *arguments, *ONE, size=size, **options)
    assert (len(out), code) == (size, 141)


@SLOW
@linux
@pytest.mark.fault(93, "a damaged file without end, in 1000 MiB", 130, intact="memory is bounded")
def test_damage_without_end_is_searched_in_bounded_memory(world):
    command = ("decompress", *ONE, "/dev/zero", "--salvage", "-o", "out")
    options = {"until": partial(time.sleep, 3), "preexec_fn": limit_addresses(1000)}
    assert interrupt(world, signal.SIGINT, *command, **options) == (130, b"", b"")
    assert list(world.place.iterdir()) == []


@SLOW
@pytest.mark.fault(94, "a file that changes its size while it is read", 0, intact="what was read")
@pytest.mark.parametrize("change", ["it grows", "it shrinks"])
def test_a_file_that_changes_its_size_is_what_was_read(change, world):
    path = world.place / "data"
    path.write_bytes(NOISE)
    with world.start("compress", *ONE, "data", "-o", "out") as process:
        wait_for_output(world)
        if change == "it grows":
            with path.open("ab") as file:
                file.write(TEXT)
        else:
            os.truncate(path, 1 << 20)
        assert (process.wait(60), process.stderr.read()) == (0, b"")
    data = world.output("decompress", *TINY, "out")
    assert len(data) >= 1 << 20
    assert (NOISE + TEXT).startswith(data)
