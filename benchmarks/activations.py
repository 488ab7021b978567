#!/usr/bin/env python3
"""Measure activations of lines of 30 tokens against `score` of the same lines, and their memory.

    activations.py [--rows 1000] [--rounds 5] [--folder .] [--peer PYTHON] FOLDER

In each round, jobs score the lines, write the mean of one residual stream of each line, and all
residual streams of all tokens, in turns and with the same model. A process then writes 2 GB. PYTHON
is an interpreter that has transformers, which also writes the residual streams of all tokens.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from run import HERE, machine

import gpt_cli
from gpt_cli import jobs
from gpt_cli.checks import bench
from gpt_cli.gpt2.hooks import select_hooks
from gpt_cli.gpt2.memory import weights_bytes
from gpt_cli.texts.states import value_bytes

LINE, WRITTEN = 30, 2e9  # tokens; bytes
ALL = "*.hook_resid_post"
# Run a command from a small process: on Linux, the peak of a process includes that of its parent.
PEAK = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
"""


def measure_rates(
    engine: gpt_cli.Engine, lines: Path, out: Path, rounds: int, peer: Sequence[str]
) -> None:
    """Print the rates of activations relative to those of `score`, and of a peer's command."""
    middle = f"blocks.{engine.model.config.n_layer // 2}.hook_resid_post"
    tasks = {
        "score": (jobs.Scoring(), "scores.jsonl"),
        f"{middle}, mean": (jobs.Activations((middle,), "mean"), "mean/"),
        f"{ALL}, all tokens": (jobs.Activations((ALL,)), "all/"),
    }
    wall: dict[str, list[float]] = {name: [] for name in tasks}
    cpu: dict[str, list[float]] = {name: [] for name in tasks}
    of_peer = []
    for _ in range(rounds):
        for name, (task, output) in tasks.items():
            with tempfile.TemporaryDirectory(dir=out) as folder:
                start, start_cpu = time.perf_counter(), time.process_time()
                jobs.run(task, lines, f"{folder}/{output}")
                wall[name].append(time.perf_counter() - start)
                cpu[name].append(time.process_time() - start_cpu)
        if peer:
            with tempfile.TemporaryDirectory(dir=out) as folder:
                command = [*peer, str(lines), f"{folder}/states"]
                finished = subprocess.run(command, check=True, stdout=subprocess.PIPE)
                of_peer.append(float(finished.stdout))
    print("\n| values | rate / score | lowest to highest | seconds of processors: score / it |")
    print("|-|-|-|-|")
    for name in [*tasks][1:]:
        ratio, lowest, highest = ratios(wall["score"], wall[name])
        work = statistics.median(a / b for a, b in zip(cpu["score"], cpu[name], strict=True))
        print(f"| {name} | {ratio:.2f} | {lowest:.2f} to {highest:.2f} | {work:.2f} |", flush=True)
    print(f"\nMedians of {rounds} rounds.")
    if peer:
        ratio, lowest, highest = ratios(of_peer, wall[f"{ALL}, all tokens"])
        print(f"\n{ALL}, rate / transformers: {ratio:.2f} ({lowest:.2f} to {highest:.2f})")


def ratios(others: list[float], ours: list[float]) -> tuple[float, float, float]:
    """Return the median, the lowest and the highest ratio of the seconds of rounds."""
    of_rounds = [a / b for a, b in zip(others, ours, strict=True)]
    return statistics.median(of_rounds), min(of_rounds), max(of_rounds)


def measure_memory(engine: gpt_cli.Engine, folder: str, lines: Path, out: Path) -> None:
    """Print the peak memory of a process that writes 2 GB, above that of the weights."""
    config = engine.model.config
    globs = ["*.hook_resid_*"]
    line_bytes = value_bytes(engine.model, select_hooks(config, globs), LINE)
    texts = lines.read_text().splitlines(keepends=True)
    many = (texts * (1 + int(WRITTEN / line_bytes / len(texts))))[: int(WRITTEN / line_bytes)]
    with tempfile.TemporaryDirectory(dir=out) as written:
        rows = Path(written, "rows")
        rows.write_text("".join(many))
        command = [sys.executable, "-m", "gpt_cli", "activations", str(rows), "-q", "-m", folder]
        command += ["--hook", *globs, "-o", f"{written}/out/"]
        measured = [sys.executable, "-c", PEAK, *command]
        peak = int(subprocess.run(measured, check=True, capture_output=True, text=True).stdout)
        size = sum(file.stat().st_size for file in Path(written, "out").iterdir())
    above = (peak - weights_bytes(config, engine.model.ops.dtype)) / 1e6
    print(f"\nA process that writes {size / 1e9:.1f} GB: {above:.0f} MB above the weights")


def main() -> None:
    """Print the figures of a model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="FOLDER")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=".", help="where 2 GB are written and removed")
    parser.add_argument("--peer", metavar="PYTHON")
    a = parser.parse_args()
    engine = gpt_cli.load(a.model)
    for name, value in machine().items():
        print(f"- {name}: {value}")
    print(f"- weights: {engine.model.ops.dtype}\n- lines: {a.rows:,} of {LINE} tokens")
    texts = [text.replace("\n", " ") for text in bench.prompts(engine, LINE, a.rows)]
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder, "lines")
        lines.write_text("".join(f"{text}\n" for text in texts))
        with mock.patch("gpt_cli.jobs.runner.load", lambda *_, **__: engine):
            peer = [a.peer, str(HERE / "transformers_states.py"), a.model] if a.peer else []
            measure_rates(engine, lines, Path(a.folder), a.rounds, peer)
        measure_memory(engine, a.model, lines, Path(a.folder))


if __name__ == "__main__":
    main()
