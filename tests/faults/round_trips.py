"""Compress and decompress many random and hostile files with `tiny`: each must come back whole.

    python tests/faults/round_trips.py MEGABYTES [--save FILE]
    python tests/faults/round_trips.py --only KIND NUMBER

Each file is written with two threads at the highest level of this processor, and read with one
thread at the lowest; half of them in int8. The first files of a kind also go through the commands,
in pipes. A file depends on its kind and its number alone, so --only repeats one that failed. Random
bytes, which are stored without the model, fill up what the other kinds leave.
"""

import argparse
import base64
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from itertools import count
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from stories import write_story

import gpt_cli
from gpt_cli.compression.archive import MAX_SEGMENT_TOKENS, ArchiveReader
from gpt_cli.compression.codec import Codec
from gpt_cli.engine import Engine
from gpt_cli.gpt2.digests import TEXT
from gpt_cli.ops.bindings import levels, use_level

ROOT = Path(__file__).parents[2]
DTYPES = "float32", "int8"
THREADS = 2, 1  # to compress, to decompress
BY_COMMAND = 2  # first files of a kind, if they are not large
LARGE = 1 << 20  # bytes
MOST_BLOCKS = 4096  # of a file: each takes time

Make = Callable[[random.Random, int], bytes]  # about as many bytes


@dataclass(frozen=True)
class Kind:
    """A kind of files."""

    make: Make
    part: float  # of all bytes but those of one letter
    least: int  # bytes of a file
    most: int
    smallest_block: int = 1  # tokens


@cache
def engine(dtype: str) -> Engine:
    return gpt_cli.load("tiny", device="cpu", dtype=dtype, speculate=False)


@cache
def codec(dtype: str) -> Codec:
    return Codec(engine(dtype).model, engine(dtype).tokenizer)


def repeated(*parts: bytes) -> Make:
    """Return a function that repeats one of these."""

    def make(rng: random.Random, size: int) -> bytes:
        part = rng.choice(parts)
        return part * (size // len(part) + 1)

    return make


def drawn(*parts: bytes) -> Make:
    """Return a function that draws from these, again and again."""
    length = sum(map(len, parts)) / len(parts)
    return lambda rng, size: b"".join(rng.choices(parts, k=round(size / length) + 1))


def base_64(rng: random.Random, size: int) -> bytes:
    encode = rng.choice((base64.b64encode, base64.encodebytes))
    return encode(rng.randbytes(size * 3 // 4))


def utf_8(rng: random.Random, size: int) -> bytes:
    """Return characters of all planes, in runs of one plane; surrogates are no characters."""
    text = []
    for _ in range(size // 40 + 1):
        plane = rng.choice((0, 0, 0, *range(17))) << 16
        text += [chr(plane | rng.randrange(1 << 16)) for _ in range(10)]
    return "".join(text).encode("utf-8", "ignore")


def broken_utf_8(rng: random.Random, size: int) -> bytes:
    """Return UTF-8 in which bytes are missing or wrong, with surrogates and overlong forms."""
    data = bytearray(utf_8(rng, size))
    for _ in range(len(data) // 20):
        place = rng.randrange(len(data))
        wrong = (b"", b"\xff", b"\x80", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80")
        data[place : place + 1] = rng.choice(wrong)
    return bytes(data)


def own_texts(rng: random.Random, size: int) -> bytes:
    """Return what the model writes itself, at any temperature."""
    options = {"temperature": rng.uniform(0.1, 2), "seed": rng.getrandbits(32)}
    texts = engine("float32").generate([""] * (size // 800 + 1), max_tokens=400, **options)
    return "\n".join(text.text for text in texts).encode()


def stories(rng: random.Random, size: int) -> bytes:
    """Return texts like those that the model has learned from."""
    data = b""
    while len(data) < size:
        data += write_story(rng).text.encode() + b"\n"
    return data[:size]


@cache
def sources() -> list[bytes]:
    """Return this project's own files."""
    folders = ROOT / "gpt_cli", ROOT / "tests", ROOT / "docs"
    paths = sorted(path for folder in folders for path in folder.rglob("*.*"))
    suffixes = ".py", ".c", ".h", ".md", ".json", ".html"
    return [path.read_bytes() for path in paths if path.suffix in suffixes]


def source_code(rng: random.Random, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += rng.choice(sources())
    return data[:size]


def mixed(rng: random.Random, size: int) -> bytes:
    """Return texts among random bytes, so that some blocks of a file are stored."""
    parts = [make(rng, size // 8) for make in (random.Random.randbytes, stories) * 4]
    rng.shuffle(parts)
    return b"".join(parts)


def small(rng: random.Random, size: int) -> bytes:
    """Return the first bytes of a file of some kind."""
    return rng.choice(SMALL_KINDS)(rng, size)[:size]


WORDS = drawn(*(word.encode() + b" " for word in TEXT.split()), b"\n", b'"Oh, no!" ')
ALL_BYTES = bytes(range(256))
END = b"<|endoftext|>"
PRINTABLE = drawn(*(bytes([byte]) for byte in range(32, 127)))
CONTROL = drawn(*(bytes([byte]) for byte in (*range(32), 127)))
SMALL_KINDS = [random.Random.randbytes, utf_8, broken_utf_8, PRINTABLE, CONTROL, stories, stories]

ONE_LETTER = 10_000_000  # bytes, in one file
PART = 1e-3  # of all other bytes
KINDS = {  # those that take longest first
    "one letter": Kind(repeated(b"o"), 0.01 * PART, ONE_LETTER, ONE_LETTER, 2048),
    "random bytes": Kind(random.Random.randbytes, 1 - 15.5 * PART, 1000, 8_000_000, 4096),
    "files of up to 300 bytes": Kind(small, PART, 0, 300),
    "the model's own texts": Kind(own_texts, PART, 1000, 100_000),
    "stories": Kind(stories, PART, 300, 100_000),
    "words at random": Kind(WORDS, PART, 1000, 100_000),
    "source code": Kind(source_code, PART, 1000, 100_000),
    "all bytes in order": Kind(repeated(ALL_BYTES, ALL_BYTES[::-1]), PART, 256, 100_000),
    "printable ASCII": Kind(PRINTABLE, PART, 300, 100_000),
    "base64": Kind(base_64, PART, 300, 100_000),
    "characters of all planes": Kind(utf_8, PART, 300, 100_000),
    "broken UTF-8": Kind(broken_utf_8, PART, 300, 100_000),
    "control characters": Kind(CONTROL, PART, 300, 100_000),
    "line ends": Kind(drawn(b"\n", b"\r\n", b"\r"), PART / 2, 300, 30_000),
    "one long line": Kind(drawn(b"word,", b"a", b"0.1,", b"=="), PART, 300, 100_000),
    "end of text": Kind(drawn(END, END, END, END[:-1], b"\n"), PART, 300, 100_000),
    "texts among random bytes": Kind(mixed, 2 * PART, 30_000, 300_000, 256),
}


def file(kind: str, number: int) -> tuple[bytes, int, str]:
    """Return a file, the tokens of its blocks, and the dtype of its model."""
    rng = random.Random(f"{kind} {number}")
    rule = KINDS[kind]
    if kind == "files of up to 300 bytes" and number <= 256:
        data = bytes([number - 1]) if number else b""
    else:
        data = rule.make(rng, round(between(rng, rule.least, rule.most)))
    smallest = max(rule.smallest_block, len(data) // MOST_BLOCKS)
    return data, round(between(rng, smallest, MAX_SEGMENT_TOKENS)), DTYPES[number % 2]


def between(rng: random.Random, least: int, most: int) -> float:
    """Return a number of which small and large are as likely."""
    return (least + 1) * ((most + 1) / (least + 1)) ** rng.random() - 1


@dataclass
class Sums:
    """The number of files of a kind, of their tokens and of their bytes."""

    files: int = 0
    size: int = 0
    compressed: int = 0
    stored: int = 0
    tokens_in: int = 0  # tokens of which the model computed the probabilities
    tokens_out: int = 0
    by_command: int = 0  # files


def round_trip(kind: str, number: int, sums: Sums) -> None:
    """Compress and decompress a file; raise RuntimeError if that does not give it back."""
    data, block, dtype = file(kind, number)
    both = codec(dtype)

    def count_in(tokens: int) -> None:
        sums.tokens_in += tokens

    def count_out(tokens: int) -> None:
        sums.tokens_out += tokens

    with computing(dtype, levels()[0], THREADS[0]):
        code = b"".join(both.compress(BytesIO(data), block, count_in))
    with computing(dtype, levels()[-1], THREADS[1]):
        found = b"".join(both.decompress(ArchiveReader(BytesIO(code)), count_out))
    if found != data:
        raise RuntimeError("the data differ")
    blocks = ArchiveReader(BytesIO(code)).segments()
    sums.stored += sum(block.size for block in blocks if block.stored)
    sums.files += 1
    sums.size += len(data)
    sums.compressed += len(code)
    if number < BY_COMMAND and len(data) < LARGE:
        flags = "--segment", str(block), "--dtype", dtype
        if command("compress", data, levels()[0], THREADS[0], *flags) != code:
            raise RuntimeError("the command `compress` writes another file")
        if command("decompress", code, levels()[-1], THREADS[1]) != data:
            raise RuntimeError("the data of the command `decompress` differ")
        sums.by_command += 1


@contextmanager
def computing(dtype: str, level: str, threads: int) -> Iterator[None]:
    """Compute at this level of the processor, with this number of threads."""
    use_level(level)
    engine(dtype).model.ops.threads = threads
    yield
    use_level(levels()[0])


def command(name: str, data: bytes, level: str, threads: int, *flags: str) -> bytes:
    """Return what a command writes for this input."""
    arguments = [sys.executable, "-m", "gpt_cli", name, "-q", "-m", "tiny", *flags]
    arguments += ["--threads", str(threads)]
    environment = {**os.environ, "GPT_CLI_LEVEL": level}
    return subprocess.run(
        arguments, input=data, stdout=subprocess.PIPE, check=True, env=environment, cwd=ROOT
    ).stdout


def run(kind: str, size: int) -> Sums:
    """Round-trip files of a kind of at least this many bytes in all."""
    sums, start = Sums(), time.monotonic()
    for number in count():
        if sums.size >= size:
            break
        try:
            round_trip(kind, number, sums)
        except Exception as error:
            error.add_note(f"repeat it with --only {kind!r} {number}")
            raise
    print(f"{kind}: {sums}, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return sums


def run_all(size: int) -> dict[str, Sums]:
    """Round-trip files of all kinds of about this many bytes in all, two kinds at a time."""
    rest = size - ONE_LETTER
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        found = {kind: pool.submit(run, kind, round(rest * KINDS[kind].part)) for kind in KINDS}
        try:
            for each in as_completed(found.values()):
                each.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return {kind: each.result() for kind, each in found.items()}


def report(done: dict[str, Sums], seconds: float) -> str:
    """Return the table."""

    def row(name: str, sums: list[Sums]) -> str:
        def total(field: str) -> int:
            return sum(getattr(each, field) for each in sums)

        sizes = [f"{total(field) / 1e6:,.2f}" for field in ("size", "compressed", "stored")]
        counts = [f"{total(field):,}" for field in ("files", "tokens_in", "tokens_out")]
        return f"| {' | '.join([name, *counts[:1], *sizes, *counts[1:]])} |\n"

    rows = "".join(row(kind, [sums]) for kind, sums in done.items())
    total = row("all", [*done.values()])
    by_command = sum(sums.by_command for sums in done.values())
    version = f"gpt-cli {gpt_cli.__version__} and Python {platform.python_version()}"
    return f"""\
# Round trips

Written by `make round-trips` with {version}, in {seconds / 60:.0f} minutes.
Each file came back byte for byte. It was compressed with `tiny` by {THREADS[0]} threads at the
highest level of this processor, {levels()[0]}, and decompressed by {THREADS[1]} thread at the
lowest, {levels()[-1]}; half of the files with weights in {DTYPES[0]}, half in {DTYPES[1]}.
Blocks have 1 to {MAX_SEGMENT_TOKENS:,} tokens. {by_command} files also went through the commands,
which write the same.

Megabytes, and tokens that the model computed at each end. A block that the model would not make
smaller is stored; random bytes are stored without the model, if the block is not a small one.

| files | number | MB | compressed | stored | tokens compressed | decompressed |
|-|-|-|-|-|-|-|
{rows}{total}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("megabytes", type=float, nargs="?", default=300)
    parser.add_argument("--only", nargs=2, metavar=("KIND", "NUMBER"))
    parser.add_argument("--save", type=Path, help="write the table here, too")
    arguments = parser.parse_args()
    start = time.monotonic()
    if arguments.only:
        kind, number = arguments.only
        done = {kind: Sums()}
        round_trip(kind, int(number), done[kind])
    else:
        done = run_all(round(arguments.megabytes * 1e6))
    table = report(done, time.monotonic() - start)
    print(table, end="")
    if arguments.save:
        arguments.save.write_text(table)


if __name__ == "__main__":
    main()
