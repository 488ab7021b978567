#!/usr/bin/env python3
"""Measure `compress` and `decompress`: sizes beside `score` and other programs, and speed.

    compress.py [--model FOLDER] [--rounds 5] > results/compress.md    # needs zstandard

Files of stories are compressed with `tiny`: held-out ones, and those that it writes at several
temperatures. `score` is their likelihood in bytes, and the goal is 1.02 times as much and 64 bytes.
Times of both ends are in seconds. Then a file is compressed at every level of this processor.

With --model, a checkpoint in the shapes of GPT-2 that predicts stories: the rate of compressing and
that of `score` of the same text, in turns; and that of decompressing blocks side by side and that
of `batch` with as many rows and tokens.
"""

import argparse
import gzip
import hashlib
import lzma
import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any

from run import machine

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from stories import write_story

import gpt_cli
from gpt_cli.compression.archive import SEGMENT_TOKENS, ArchiveReader
from gpt_cli.compression.codec import Codec
from gpt_cli.engine import Engine
from gpt_cli.ops.bindings import levels, use_level
from gpt_cli.options.request import OptionFields, Options

try:
    import zstandard
except ImportError:
    sys.exit("compress.py compares with zstd: pip install zstandard")

STORIES, HELD_OUT_SEED = 64, 3_000  # the seed of the stories that train_tiny.py holds out
TEMPERATURES = (0.7, 1.0, 1.3, 1.6)
BLOCKS = (1024, 4096, SEGMENT_TOKENS, 65536)
MOST_RATIO, MOST_MORE = 1.02, 64  # of a file to `score`
SCORED = 2048  # tokens
SIDE_BY_SIDE = (1, 4, 8, 16, 32)
ROW = 64  # tokens of a block and of a row
DTYPES = ("float32", "int8")
THREADS = (1, 2)

# Both ends of a program.
Ends = tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]
PROGRAMS: dict[str, Ends] = {
    "gzip -9": (lambda data: gzip.compress(data, 9), gzip.decompress),
    "xz -9e": (lambda data: lzma.compress(data, preset=9 | lzma.PRESET_EXTREME), lzma.decompress),
    "zstd -19": (
        zstandard.ZstdCompressor(level=19).compress,
        zstandard.ZstdDecompressor().decompress,
    ),
}


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of a call, and its result."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def table(*columns: str) -> None:
    """Print the head of a table."""
    print(f"\n| {' | '.join(columns)} |\n|{'-|' * len(columns)}", flush=True)


def held_out(stories: int) -> str:
    """Return stories that `tiny` has not seen."""
    rng = random.Random(HELD_OUT_SEED)  # noqa: S311
    return "\n".join(write_story(rng).text for _ in range(stories))


def story_files(tiny: Engine) -> dict[str, str]:
    """Return the texts that are compressed."""
    texts = {"held out": held_out(STORIES)}
    for seed, temperature in enumerate(TEMPERATURES):
        options: OptionFields = {"temperature": temperature, "seed": seed, "max_tokens": 500}
        written = tiny.generate([""] * STORIES, **options)
        texts[f"temperature {temperature}"] = "\n".join(story.text for story in written)
    return texts


def measure_sizes(tiny: Engine, texts: dict[str, str]) -> None:
    """Print the sizes of files with blocks of several sizes, beside `score`."""
    blocks = [f"--segment {block:,}" for block in BLOCKS]
    table("stories", "bytes", "tokens", "`score`", *blocks, "default / `score`", "goal")
    for name, text in texts.items():
        score = tiny.score(text, bos=True)
        bound = -score.total_logprob / math.log(2) / 8
        sizes = {block: len(tiny.compress(text.encode(), segment=block)) for block in BLOCKS}
        reached = sizes[SEGMENT_TOKENS] <= MOST_RATIO * bound + MOST_MORE
        cells = [len(text.encode()), score.tokens_scored, round(bound), *sizes.values()]
        numbers = " | ".join(f"{cell:,}" for cell in cells)
        goal = "reached" if reached else "MISSED"
        print(f"| {name} | {numbers} | {sizes[SEGMENT_TOKENS] / bound:.4f} | {goal} |", flush=True)


def measure_programs(tiny: Engine, texts: dict[str, str]) -> None:
    """Print sizes and times of other programs and of gpt-cli."""
    table("stories", "program", "bytes", "of the text", "compress, s", "decompress, s")
    programs = PROGRAMS | {"gpt-cli": (tiny.compress, tiny.decompress)}
    for (name, text), (program, (compress, decompress)) in product(texts.items(), programs.items()):
        data = text.encode()
        there, code = timed(lambda: compress(data))  # noqa: B023
        back, restored = timed(lambda: decompress(code))  # noqa: B023
        if restored != data:
            sys.exit(f"{program}: the data differ")
        part = len(code) / len(data)
        print(f"| {name} | {program} | {len(code):,} | {part:.2%} | {there:.3f} | {back:.3f} |")


def measure_levels(text: str) -> None:
    """Print the digest of the file at all levels, with all numbers of threads."""
    table("weights", "levels", "threads", "SHA-256 of the file")
    for dtype in DTYPES:
        engine = gpt_cli.load("tiny", device="cpu", dtype=dtype, speculate=False)
        digests = set()
        for level, engine.model.ops.threads in product(levels(), THREADS):
            use_level(level)
            digests.add(hashlib.sha256(engine.compress(text.encode())).hexdigest())
        use_level(levels()[0])
        if len(digests) > 1:
            sys.exit(f"{dtype}: the files differ")
        threads = ", ".join(map(str, THREADS))
        print(f"| {dtype} | {', '.join(levels())} | {threads} | `{digests.pop()}` |", flush=True)


def measure_compressing(engine: Engine, ids: list[int], rounds: int) -> None:
    """Print the rates of compressing and of `score` for the same text."""
    text = engine.decode(beginning(engine, ids, SCORED))
    data = text.encode()
    calls: dict[str, Callable[[], Any]] = {
        "score": lambda: engine.score(text, bos=True),
        "compress": lambda: engine.compress(data),
    }
    tokens = calls["score"]().tokens_scored
    calls["compress"]()  # computes the digests of the model
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in sorted(calls, reverse=number % 2 == 1):
            seconds[name].append(timed(calls[name])[0])
    rates = [tokens / statistics.median(seconds[name]) for name in calls]
    ratios = [a / b for a, b in zip(seconds["score"], seconds["compress"], strict=True)]
    table("tokens", "`score`, tokens a second", "compress", "compress / `score`", "rounds")
    median, spread = statistics.median(ratios), f"{min(ratios):.3f} to {max(ratios):.3f}"
    print(f"| {tokens:,} | {rates[0]:.0f} | {rates[1]:.0f} | {median:.3f} | {spread} |", flush=True)


def measure_decompressing(engine: Engine, ids: list[int], rounds: int) -> None:
    """Print the rates of decompressing blocks side by side and of `batch` with as many rows."""
    codec = Codec(engine.model, engine.tokenizer)
    options = Options(max_tokens=ROW, ignore_eos=True, seed=1)
    table("side by side", "`batch`, tokens a second", "decompress", "decompress / `batch`")
    for rows in SIDE_BY_SIDE:
        data = engine.decode(beginning(engine, ids, rows * ROW)).encode()
        code = b"".join(codec.compress(BytesIO(data), ROW))
        segments = list(ArchiveReader(BytesIO(code)).segments())
        if len(segments) != rows or any(segment.stored for segment in segments):
            sys.exit("the model does not predict stories: it must make all blocks smaller")
        tokens = sum(segment.size for segment in segments)
        rates = []
        for _ in range(rounds):
            batch, _ = timed(lambda: [*engine.batch([""] * rows, options, batch_size=rows)])  # noqa: B023
            back, parts = timed(lambda: [*codec.decompress(ArchiveReader(BytesIO(code)))])  # noqa: B023
            if b"".join(parts) != data:
                sys.exit("the data differ")
            rates.append((rows * ROW / batch, tokens / back))
        batch, back = (statistics.median(column) for column in zip(*rates, strict=True))
        ratio = statistics.median(back / batch for batch, back in rates)
        print(f"| {rows} | {batch:.0f} | {back:.0f} | {ratio:.3f} |", flush=True)


def beginning(engine: Engine, ids: list[int], most: int) -> list[int]:
    """Return the first ids. The next one begins a word, so their text has the same ids."""
    while not engine.tokenizer.token_name(ids[most]).startswith(" "):
        most -= 1
    return ids[:most]


def main() -> None:
    """Run all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    tiny = gpt_cli.load("tiny", device="cpu", dtype="float32", speculate=False)
    for name, value in {**machine(), "threads": tiny.model.ops.threads}.items():
        print(f"- {name}: {value}")
    texts = story_files(tiny)
    measure_sizes(tiny, texts)
    measure_programs(tiny, texts)
    measure_levels(texts["held out"])
    for dtype in DTYPES if arguments.model else ():
        engine = gpt_cli.load(arguments.model, device="cpu", dtype=dtype, speculate=False)
        # Without line ends, at which blocks would end before they are full.
        ids = engine.encode(held_out(STORIES).replace("\n", " "))
        print(f"\n124M, {dtype}:")
        measure_compressing(engine, ids, arguments.rounds)
        measure_decompressing(engine, ids, arguments.rounds)


if __name__ == "__main__":
    main()
