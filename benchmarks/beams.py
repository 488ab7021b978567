#!/usr/bin/env python3
"""Measure beam search beside sampling as many rows, transformers and CTranslate2.

    beams.py [--rounds 5] [--threads 2] [--peer PYTHON --converted CT2] FOLDER > results/beams.md

PYTHON has torch, transformers and ctranslate2, and CT2 is the output of convert.py. In each round,
each engine continues one random prompt of 32 tokens by 64, in a process of its own, in float32.
"""

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

BEAMS, PROMPT, NEW = 5, 32, 64
OURS = ("rows", "beams")  # 5 rows of `batch --no-speculate`, and 5 beams of one prompt
PEERS = ("transformers", "ctranslate2")


def ours(engine: str, folder: str, threads: int, ids: list[int]) -> Callable[[], object]:
    """Return a function that continues ids by beams, or by as many rows."""
    from dataclasses import replace

    import gpt_cli
    from gpt_cli.generation.generate import Run
    from gpt_cli.generation.row import Request
    from gpt_cli.options.request import Options
    from gpt_cli.texts.text import Text

    loaded = replace(gpt_cli.load(folder, dtype="float32", threads=threads).loaded, speculator=None)
    options = Options(max_tokens=NEW, ignore_eos=True, seed=0)
    if engine == "rows":
        return lambda: [*Run(loaded, [Request(Text(ids), options, row) for row in range(BEAMS)])]
    search = replace(options, beams=BEAMS)
    return lambda: [*Run(loaded, [Request(Text(ids), search)])]


def transformers(folder: str, threads: int, ids: list[int]) -> Callable[[], object]:
    """Return a function that continues ids by the beam search of transformers."""
    import torch
    from transformers import GPT2LMHeadModel

    torch.set_num_threads(threads)
    model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()
    lengths = {"max_new_tokens": NEW, "min_new_tokens": NEW, "num_beams": BEAMS}
    ends = {"pad_token_id": 0, "eos_token_id": None, "do_sample": False}
    return lambda: model.generate(torch.tensor([ids]), **lengths, **ends)


def ctranslate2(folder: str, threads: int, ids: list[int]) -> Callable[[], object]:
    """Return a function that continues ids by the beam search of CTranslate2."""
    import ctranslate2 as library

    generator = library.Generator(folder, compute_type="float32", intra_threads=threads)
    with open(f"{folder}/vocabulary.json", encoding="utf-8") as file:  # noqa: PTH123
        vocabulary = json.load(file)
    lengths = {"max_length": NEW, "min_length": NEW, "beam_size": BEAMS}
    tokens = [vocabulary[id] for id in ids]
    return lambda: generator.generate_batch([tokens], include_prompt_in_result=False, **lengths)


def measure(engine: str, folder: str, threads: int) -> None:
    """Print seconds and the peak of the memory in MB, of an engine in this process."""
    dice = random.Random(0)  # noqa: S311
    ids = [dice.randrange(50_000) for _ in range(PROMPT)]
    peer = {"transformers": transformers, "ctranslate2": ctranslate2}.get(engine)
    run = peer(folder, threads, ids) if peer else ours(engine, folder, threads, ids)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps([statistics.median(seconds[1:]), peak]))  # the first one warms up


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--peer", metavar="PYTHON")
    parser.add_argument("--converted", metavar="CT2")
    parser.add_argument("--one")
    arguments = parser.parse_args()
    if arguments.one:
        measure(arguments.one, arguments.folder, arguments.threads)
        return
    engines = OURS + (PEERS if arguments.peer else ())
    rounds: dict[str, list[list[float]]] = {engine: [] for engine in engines}
    for _ in range(arguments.rounds):
        for engine in engines:
            folder = arguments.converted if engine == "ctranslate2" else arguments.folder
            python = sys.executable if engine in OURS else arguments.peer
            command = [python, __file__, folder, "--one", engine]
            command += ["--threads", str(arguments.threads)]
            output = subprocess.run(command, capture_output=True, check=True, text=True).stdout
            rounds[engine].append(json.loads(output))
    print(f"{BEAMS} beams, a prompt of {PROMPT} tokens and {NEW} new ones, medians:\n")
    print("| | seconds | rate of beams / this | peak, MB |\n|-|-|-|-|")
    for engine, figures in rounds.items():
        ratios = [other[0] / beam[0] for other, beam in zip(figures, rounds["beams"], strict=True)]
        seconds, peaks = zip(*figures, strict=True)
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        median, peak = statistics.median(seconds), statistics.median(peaks)
        print(f"| {engine} | {median:.2f} | {spread} | {peak:.0f} |")


if __name__ == "__main__":
    main()
