"""Measure gpt-cli and transformers on an NVIDIA GPU, in turns; write a table.

    python benchmarks/gpu.py --peer PYTHON [--size 1.5B] [--dtype float16] [--save NAME]

PYTHON is an interpreter with torch (for CUDA) and transformers; this one needs the extra cuda12 or
cuda13. A round measures all engines in fresh processes, after a warm-up.
    gpt-cli   --device cuda
    eager     transformers with its defaults
    compiled  transformers with a static cache, which uses torch.compile
Rates are tokens per second with random ids and greedy decoding. Decoding is 128 new tokens after a
prompt of 32; the first is not counted:
    decode_1, decode_8, decode_64   with a batch of 1, 8 or 64 texts
    prefill                         a prompt of 896, up to its first new token
    floor_1                         upper bound of decode_1: measured memory bandwidth / bytes of
                                    the weights
    error                           of gpt-cli: largest difference of its logits from those of the
                                    CPU in float32, relative to the largest of these
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import Generate, as_transformers, greedy, wait
from run import SIZES, Figures, machine, make_checkpoint, report, versions

SIZES["1.5B"] = {"n_layer": 48, "n_head": 25, "n_embd": 1600}
ENGINES = ("gpt-cli", "eager", "compiled")
UNITS = dict.fromkeys(("decode_1", "decode_8", "decode_64", "prefill", "floor_1"), "tokens/s")
UNITS["error"] = ""


def gpt_cli_engine(folder: Path, dtype: str, device: str) -> tuple[Generate, Figures]:
    """Return gpt-cli, and the error of its logits."""
    import numpy as np

    from gpt_cli.folder.tokenizer import read_tokenizer
    from gpt_cli.gpt2 import checkpoint
    from gpt_cli.gpt2.model import forward
    from gpt_cli.ops import get_ops

    ops = get_ops(device, dtype)
    model = checkpoint.load(folder, ops)
    ids = np.random.default_rng(0).integers(model.config.vocab_size, size=(1, 64))
    logits = ops.to_host(forward(model, ops.xp.asarray(ids)))
    exact = forward(checkpoint.load(folder, get_ops("cpu", "float32")), ids)
    error = float(abs(logits - exact).max() / abs(exact).max())
    return greedy(model, read_tokenizer(folder)), {"error": error}


def transformers_engine(
    folder: Path, dtype: str, device: str, compiled: bool
) -> tuple[Generate, Figures]:
    """Return transformers on PyTorch, and the bound by memory bandwidth."""
    import torch
    from transformers import GPT2LMHeadModel

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
    return as_transformers(model, device, **settings), {"floor_1": floor}


def measure(engine: str, folder: Path, dtype: str, device: str) -> Figures:
    """Measure one engine in this process."""
    if engine == "gpt-cli":
        generate, figures = gpt_cli_engine(folder, dtype, device)
    else:
        generate, figures = transformers_engine(folder, dtype, device, engine == "compiled")
    for batch in (1, 8, 64):
        # The first two runs of a length compile and capture.
        first, whole = (min([generate(batch, 32, new) for _ in range(5)][2:]) for new in (1, 128))
        figures[f"decode_{batch}"] = 127 * batch / (whole - first)
    generate(1, 896, 1)
    figures["prefill"] = 896 / min(generate(1, 896, 1) for _ in range(3))
    return figures


def main() -> None:
    """Measure, print, and save with `--save`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="124M")
    parser.add_argument("--dtype", choices=("float32", "float16"), default="float16")
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
    engines = ENGINES if arguments.peer else ENGINES[:1]
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
