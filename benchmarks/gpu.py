"""Measure gpt-cli and transformers on an NVIDIA GPU, in turns; write a table.

    python benchmarks/gpu.py --peer PYTHON [--size 1.5B] [--dtype float16] [--save NAME]

PYTHON is an interpreter with torch (for CUDA) and transformers; this one needs the extra cuda12 or
cuda13. A round measures all engines in fresh processes, after a warm-up.
    gpt-cli   --device cuda
    eager     transformers with its defaults
    compiled  transformers with a static cache, which uses torch.compile; left out by --no-compiled
The peers compute in float32, bfloat16 or float16; beside int8, in float16.
Rates are tokens per second with random ids and greedy decoding. Decoding is 128 new tokens after a
prompt of 32; the first is not counted:
    decode_1, decode_8, decode_64   with a batch of 1, 8 or 64 texts
    decode_900                      64 new tokens after a prompt of 890
    prefill                         a prompt of 896, up to its first new token
    score                           the log-likelihood of 1,000 texts of 30 tokens
    floor_1                         upper bound of decode_1: measured memory bandwidth / bytes of
                                    the weights
    differ                          logits of 64 tokens that differ from those of the CPU, in their
                                    bits
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import Generate, as_transformers, greedy, wait
from run import SIZES, Figures, machine, make_checkpoint, report, versions

SIZES["1.5B"] = {"n_layer": 48, "n_head": 25, "n_embd": 1600}
ENGINES = ("gpt-cli", "eager", "compiled")
DTYPES = ("float32", "bfloat16", "float16", "int8")
Score = Callable[[list[list[int]]], None]  # score texts, as ids
RATES = "decode_1", "decode_8", "decode_64", "decode_900", "prefill", "score", "floor_1"
UNITS = dict.fromkeys(RATES, "tokens/s") | {"differ": "logits"}
LINES, LENGTH = 1000, 30  # of `score`
BATCH = 64  # texts that transformers scores at a time


def gpt_cli_engine(folder: Path, dtype: str, device: str) -> tuple[Generate, Score, Figures]:
    """Return gpt-cli, and the number of its logits that differ from the CPU's."""
    import numpy as np

    import gpt_cli
    from gpt_cli.scoring.score import measure_texts
    from gpt_cli.texts.measures import log_probabilities
    from gpt_cli.texts.text import Text

    engine, cpu = (gpt_cli.load(folder, device=name, dtype=dtype) for name in (device, "cpu"))
    ids = np.random.default_rng(0).integers(engine.loaded.config.vocab_size, size=(1, 64)).tolist()
    logits, expected = engine.logits(ids), cpu.logits(ids)
    differ = np.count_nonzero(logits.view(np.uint32) != expected.view(np.uint32))

    def score_lines(lines: list[list[int]]) -> None:
        measure_texts(engine.loaded, list(map(Text, lines)), {"logprobs": log_probabilities})

    return greedy(engine.model, engine.tokenizer), score_lines, {"differ": float(differ)}


def transformers_engine(
    folder: Path, dtype: str, device: str, compiled: bool
) -> tuple[Generate, Score, Figures]:
    """Return transformers on PyTorch, and the bound by memory bandwidth."""
    import torch
    from transformers import GPT2LMHeadModel

    dtype = "float16" if dtype == "int8" else dtype
    model = GPT2LMHeadModel.from_pretrained(folder, dtype=getattr(torch, dtype)).eval().to(device)
    # With a static cache, transformers compiles the model.
    settings: dict[str, Any] = {"cache_implementation": "static"} if compiled else {}

    size = sum(weight.numel() * weight.element_size() for weight in set(model.parameters()))
    one = torch.zeros(1 << 28, dtype=torch.uint8, device=device)
    other = torch.empty_like(one)
    seconds = []
    for _ in range(10):
        wait(device)
        start = time.perf_counter()
        other.copy_(one)
        wait(device)
        seconds.append(time.perf_counter() - start)
    floor = 2 * one.numel() / min(seconds) / size

    def score_lines(lines: list[list[int]]) -> None:
        for first in range(0, len(lines), BATCH):
            ids = torch.tensor(lines[first : first + BATCH], device=device)
            with torch.inference_mode():
                logprobs = model(ids[:, :-1]).logits.float().log_softmax(-1)
                logprobs.gather(-1, ids[:, 1:, None]).cpu()

    return as_transformers(model, device, **settings), score_lines, {"floor_1": floor}


def measure(engine: str, folder: Path, dtype: str, device: str) -> Figures:
    """Measure one engine in this process."""
    if engine == "gpt-cli":
        generate, score, figures = gpt_cli_engine(folder, dtype, device)
    else:
        compiled = engine == "compiled"
        generate, score, figures = transformers_engine(folder, dtype, device, compiled)
    for batch in (1, 8, 64):
        # The first two runs of a length compile and capture.
        first, whole = (min([generate(batch, 32, new) for _ in range(5)][2:]) for new in (1, 128))
        figures[f"decode_{batch}"] = 127 * batch / (whole - first)
    first, whole = (min([generate(1, 890, new) for _ in range(4)][1:]) for new in (1, 65))
    figures["decode_900"] = 64 / (whole - first)
    generate(1, 896, 1)
    figures["prefill"] = 896 / min(generate(1, 896, 1) for _ in range(3))
    lines = [[random.randrange(50_000) for _ in range(LENGTH)] for _ in range(LINES)]  # noqa: S311
    figures["score"] = LINES * LENGTH / min([_seconds(score, lines) for _ in range(3)][1:])
    return figures


def _seconds(score: Score, lines: list[list[int]]) -> float:
    start = time.perf_counter()
    score(lines)
    return time.perf_counter() - start


def main() -> None:
    """Measure, print, and save with `--save`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="124M")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--no-compiled", action="store_true")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu is a rehearsal in float32"
    )
    parser.add_argument("--peer", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json and .md")
    parser.add_argument(
        "--measure", nargs=2, metavar=("ENGINE", "FOLDER"), help="run one engine in this process"
    )
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        arguments.dtype = "float32"
    if arguments.measure:
        engine, folder = arguments.measure
        print(json.dumps(measure(engine, Path(folder), arguments.dtype, arguments.device)))
        return
    where = machine() | {"size": arguments.size, "dtype": arguments.dtype}
    where |= versions(sys.executable, ["gpt2-cli", "numpy"])
    if arguments.peer:
        where |= versions(arguments.peer, ["torch", "transformers"])
    if arguments.device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        queried = subprocess.run(query, check=True, capture_output=True, text=True)
        where["gpu"] = queried.stdout.strip()
        import cupy

        where["cupy"] = cupy.__version__
    count = 1 if not arguments.peer else 2 if arguments.no_compiled else 3
    engines = ENGINES[:count]
    rounds: dict[str, list[Figures]] = {engine: [] for engine in engines}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "model")
        make_checkpoint(folder, arguments.size)
        for _ in range(arguments.rounds):
            for engine in engines:
                python = sys.executable if engine == "gpt-cli" else arguments.peer
                command = [python, __file__, "--measure", engine, str(folder)]
                command += ["--dtype", arguments.dtype, "--device", arguments.device]
                printed = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
                rounds[engine].append(json.loads(printed.splitlines()[-1]))
    report(rounds, UNITS, arguments.save, where)


if __name__ == "__main__":
    main()
