#!/usr/bin/env python3
"""Measure rows that begin alike, with and without sharing that beginning; and words of texts.

    rows.py [--rows 1000] [--apart 20] [--dtype float32] [--rounds 5] FOLDER > results/rows.md

A row is a line of 20 tokens after a template of 500, with three choices. First the time of a row,
shared and apart, with equal results; then whole processes of `rank` over 12 such lines; then rates
of `score` with and without words, in turns, and of lm-evaluation-harness if it is installed.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from run import machine

import gpt_cli
from gpt_cli.checks import bench
from gpt_cli.engine import Engine
from gpt_cli.gpt2.memory import weights_bytes
from gpt_cli.scoring.rank import continuation_logprobs
from gpt_cli.texts.text import Text

TEMPLATE, LINE = 500, 20  # tokens
CHOICES = {"one token": [[10], [20], [30]], "1 to 3 tokens": [[10], [20, 5], [30, 6, 7]]}
LINES = 12  # of a whole process


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of a call, and its result."""
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def table(columns: str) -> None:
    """Print the head of a table."""
    print(f"\n| {columns} |\n|{'-|' * (columns.count('|') + 1)}", flush=True)


def measure_rows(engine: Engine, texts: list[str], rows: int, apart: int) -> None:
    """Print milliseconds a row, and the peak memory above that of the weights."""
    template, *lines = (engine.encode(text) for text in texts)
    template = (template * TEMPLATE)[:TEMPLATE]
    weights = weights_bytes(engine.model.config, engine.model.ops.dtype)
    table("choices | shared, ms a row | apart | ratio | memory above the weights, MB")
    for name, choices in CHOICES.items():
        questions = [Text(template + line, continuations=choices) for line in lines[:rows]]

        def run(part: list[Text]) -> list[list[list[float]]]:
            return continuation_logprobs(replace(engine.loaded), part)  # with new prefixes

        together, results = timed(lambda: run(questions))  # noqa: B023
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        alone, expected = timed(lambda: [run([question])[0] for question in questions[:apart]])  # noqa: B023
        if results[:apart] != expected:
            sys.exit("the results differ")
        shared, single = 1e3 * together / rows, 1e3 * alone / apart
        above = (peak - weights) / 1e6
        print(f"| {name} | {shared:.1f} | {single:.1f} | {single / shared:.1f} | {above:.0f} |")


def measure_processes(
    engine: Engine, folder: str, dtype: str, texts: list[str], rounds: int
) -> None:
    """Print the seconds of whole processes of `rank`."""
    with tempfile.TemporaryDirectory() as folder_name:
        rows, template = Path(folder_name, "lines"), Path(folder_name, "template")
        rows.write_text("".join(f"{text!r}\n" for text in texts[:LINES]))
        ids = (engine.encode(texts[-1]) * TEMPLATE)[:TEMPLATE]
        template.write_text(engine.decode(ids).replace("{", "").replace("}", "") + "{line}")
        command = [sys.executable, "-m", "gpt_cli", "rank", str(rows), "-q", "-m", folder]
        command += ["--dtype", dtype, "--template", str(template), "--choices", "red,green,blue"]
        run = lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: E731
        times = [timed(run)[0] for _ in range(rounds)]
    print(f"\nA process of {LINES} lines: {statistics.median(times):.2f} s, median of {rounds}")


def measure_words(engine: Engine, texts: list[str], rounds: int) -> None:
    """Print the rate of `score` with words, relative to that without."""
    engine.score_many(texts[:1], words=True)  # builds the table of tokens that begin a word
    ratios = []
    for _ in range(rounds):
        plain = timed(lambda: engine.score_many(texts))[0]
        ratios.append(plain / timed(lambda: engine.score_many(texts, words=True))[0])
    ratio, low, high = statistics.median(ratios), min(ratios), max(ratios)
    print(f"\nscore --words / score: {ratio:.3f} ({low:.3f} to {high:.3f}), {rounds} rounds")


def measure_lm_eval(folder: str, dtype: str, rounds: int) -> None:
    """Print the rate of lm-evaluation-harness's requests, relative to `score` of the same texts."""
    from lm_eval.api.instance import Instance

    from gpt_cli.lm_eval import EngineLM

    lm = EngineLM(folder, dtype=dtype)
    texts = [f"{text} {n}" for n, text in enumerate(bench.prompts(lm.engine, 150, 30))]
    requests = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in texts]
    ratios = []
    for _ in range(rounds):
        plain = timed(lambda: lm.engine.score_many(texts, bos=True))[0]
        ratios.append(plain / timed(lambda: lm.loglikelihood_rolling(requests, True))[0])
    ratio, low, high = statistics.median(ratios), min(ratios), max(ratios)
    print(f"\nlm-eval / score: {ratio:.3f} ({low:.3f} to {high:.3f}), {rounds} rounds")


def main() -> None:
    """Print the figures of a model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", metavar="FOLDER")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--apart", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    a = parser.parse_args()
    engine = gpt_cli.load(a.folder, dtype=a.dtype)
    for name, value in machine().items():
        print(f"- {name}: {value}")
    print(f"- weights: {engine.model.ops.dtype}")
    texts = bench.prompts(engine, LINE, a.rows + 1)
    measure_rows(engine, texts, a.rows, a.apart)
    measure_processes(engine, a.folder, a.dtype, texts, a.rounds)
    measure_words(engine, bench.prompts(engine, 200, 40), a.rounds)
    if find_spec("lm_eval"):
        measure_lm_eval(a.folder, a.dtype, a.rounds)


if __name__ == "__main__":
    main()
