"""Measure gpt-cli and its peers in one run; write a table of medians and ratios.

    make bench                                                      # gpt-cli alone
    python benchmarks/run.py --peer transformers=PYTHON --peer llama.cpp=PYTHON --save NAME
    python benchmarks/run.py --dtype int8 --peer float32=PYTHON --peer llama.cpp=PYTHON

PYTHON is an interpreter that has the peer; measure.py and convert.py list the packages. Peers are
transformers, ctranslate2, llama.cpp and openvino, and three that are gpt-cli itself: `before` is
another version, `numpy` runs without the compiled library, and `float32` is for comparison with
another --dtype. With --dtype bfloat16, the checkpoint is stored in bfloat16.

The checkpoint has the shapes of GPT-2 with 124M parameters (or --size 355M) and random weights,
unless a FOLDER is given. Engines take turns in fresh processes, so that a slow minute
of the machine affects all.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

Figures = dict[str, float]

UNITS = {
    "decode": "tokens/s",
    "decode_896": "tokens/s",
    "decode_busy": "tokens/s",
    "prefill": "tokens/s",
    "batch_8": "tokens/s",
    "batch_64": "tokens/s",
    "forward": "tokens/s",
    "score": "tokens/s",
    "process_20": "s",
    "process_200": "s",
    "memory_20": "MB",
    "memory_200": "MB",
    "help": "s",
}


SIZES = {
    "124M": {"n_layer": 12, "n_head": 12, "n_embd": 768},
    "355M": {"n_layer": 24, "n_head": 16, "n_embd": 1024},
}
PACKAGES = {  # whose versions are reported for a peer
    "transformers": ["transformers", "torch"],
    "ctranslate2": ["ctranslate2"],
    "llama.cpp": ["llama-cpp-python"],
    "openvino": ["openvino", "optimum-intel"],
    "before": ["numpy"],
    "numpy": [],
    "float32": [],
}
OURS = ("gpt-cli", "before", "numpy", "float32")
DTYPES = {"float32": "float32", "transformers": "float32"}  # regardless of --dtype


def make_checkpoint(folder: Path, size: str) -> None:
    """Write a checkpoint of a published size."""
    from support.checkpoints import write_checkpoint

    sizes = SIZES[size] | {"n_positions": 1024, "vocab_size": 50257}
    write_checkpoint(folder, {"model_type": "gpt2", **sizes})


def store_in_bfloat16(folder: Path, out: Path) -> None:
    """Write a float32 checkpoint with its weights truncated to bfloat16."""
    import numpy as np
    from safetensors.numpy import load_file

    from support.checkpoints import Stored, safetensors_bytes

    shutil.copytree(folder, out)
    tensors = {}
    for name, array in load_file(folder / "model.safetensors").items():
        bits = (array.view(np.uint32) >> 16).astype("<u2")
        tensors[name] = Stored("BF16", list(bits.shape), bits.tobytes())
    (out / "model.safetensors").write_bytes(safetensors_bytes(tensors))


def in_a_process(act: Callable[..., None], *arguments: Any) -> None:
    """Run a function in a separate process: Linux would count its memory as that of the engines."""
    maker = get_context("spawn").Process(target=act, args=arguments)
    maker.start()
    maker.join()
    if maker.exitcode:
        raise SystemExit(f"failed: {act.__name__}")


def process(command: list[str], **variables: str) -> tuple[float, float]:
    """Run a command; return its seconds and its peak memory in MB."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"} | variables
    start = time.perf_counter()
    child = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - start
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"failed: {' '.join(command)}")
    unit = 1 if platform.system() == "Darwin" else 1024  # bytes per unit of ru_maxrss
    return seconds, usage.ru_maxrss * unit / 1e6


def one_round(engine: str, python: str, converted: Path, threads: int, dtype: str) -> Figures:
    """Run all measurements once for one engine."""
    variables = {"GPT_CLI_OPS": "numpy"} if engine == "numpy" else {}
    name = "gpt-cli" if engine in OURS else engine
    measure = [python, str(HERE / "measure.py"), name, str(converted)]
    measure += ["--threads", str(threads), "--dtype", dtype]
    figures: Figures = json.loads(
        subprocess.run(
            measure, check=True, capture_output=True, env=os.environ | variables
        ).stdout.splitlines()[-1]
    )
    prompt = "The computer"
    if engine in OURS:
        start = [python, "-P", "-m", "gpt_cli"]  # -P: the installed package, not this folder
        figures["help"] = process([*start, "--help"])[0]
        command = [*start, "generate", "-m", str(converted), "--device", "cpu"]
        command += ["--temperature", "0", "--ignore-eos", prompt, "-n"]
        figures["process_20"], figures["memory_20"] = process([*command, "20"], **variables)
        figures["process_200"], figures["memory_200"] = process([*command, "200"], **variables)
    elif engine in ("transformers", "llama.cpp"):
        script = str(HERE / f"{engine.partition('.')[0]}_script.py")
        for new in (20, 200):
            command = [python, script, str(converted), prompt, str(new)]
            figures[f"process_{new}"], figures[f"memory_{new}"] = process(command)
    return figures


def versions(python: str, packages: list[str]) -> dict[str, str]:
    """Return the versions of packages, or of gpt-cli itself, in another interpreter."""
    code = (
        "import importlib.metadata as m, sys\n"
        "sys.path = [path for path in sys.path if path]  # not this folder\n"
        "for name in sys.argv[1:]:\n"
        "    ours = name == 'gpt-cli'  # its distribution has had several names\n"
        "    print(__import__('gpt_cli').__version__ if ours else m.version(name))\n"
    )
    printed = subprocess.run([python, "-c", code, *packages], check=True, capture_output=True)
    return dict(zip(packages, printed.stdout.decode().split(), strict=True))


def machine() -> dict[str, Any]:
    """Return a description of this machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor()
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "python": platform.python_version(),
    }


def report(
    rounds: dict[str, list[Figures]],
    units: dict[str, str],
    save: str | None,
    where: dict[str, Any],
) -> None:
    """Print the table; with `save`, also write it to files of this name, with `where`."""
    print(table(rounds, units), end="")
    if save:
        results = HERE / "results" / save
        results.with_suffix(".json").write_text(
            json.dumps({"machine": where, "rounds": rounds}, indent=1) + "\n"
        )
        facts = "".join(f"- {key}: {value}\n" for key, value in where.items())
        results.with_suffix(".md").write_text(f"{facts}\n{table(rounds, units)}")


def table(rounds: dict[str, list[Figures]], units: dict[str, str]) -> str:
    """Return a table of medians with ranges, and the median ratios of ours to the peers."""
    ours, *peers = rounds
    columns = [ours, *(cell for peer in peers for cell in (peer, "ratio"))]
    lines = ["| " + " | ".join(["", "unit", *columns]) + " |", "|" + "-|" * (len(columns) + 2)]
    for name, unit in units.items():
        cells = [name, unit, spread([figures[name] for figures in rounds[ours] if name in figures])]
        for peer in peers:
            cells.append(spread([figures[name] for figures in rounds[peer] if name in figures]))
            pairs = zip(rounds[ours], rounds[peer], strict=True)
            ratios = [
                one[name] / other[name] for one, other in pairs if name in one and name in other
            ]
            cells.append(f"{statistics.median(ratios):.3g}" if ratios else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def spread(values: list[float]) -> str:
    """Return the median of values and their range."""
    if not values:
        return ""
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def main() -> None:
    """Measure, print, and save with `--save`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--size", choices=SIZES, default="124M", help="without a folder")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "int8"), default="float32")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json and .md")
    arguments = parser.parse_args()
    peers = dict(peer.partition("=")[::2] for peer in arguments.peer)
    if unknown := {name for name, python in peers.items() if name not in PACKAGES or not python}:
        parser.error(f"--peer must be NAME=PYTHON, with a known peer, not {', '.join(unknown)}")
    where = machine() | {"threads": arguments.threads, "dtype": arguments.dtype}
    where |= versions(sys.executable, ["gpt2-cli", "numpy"])
    for peer, python in peers.items():
        prefix = f"{peer}: " if peer == "before" else ""
        where |= {prefix + name: text for name, text in versions(python, PACKAGES[peer]).items()}
    engines = {"gpt-cli": sys.executable} | peers
    rounds: dict[str, list[Figures]] = {engine: [] for engine in engines}
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch, "model")
        if arguments.folder is None:
            in_a_process(make_checkpoint, folder, arguments.size)
        dtypes = {engine: DTYPES.get(engine, arguments.dtype) for engine in engines}
        converted = {
            engine: convert(engine, python, folder, Path(scratch), dtypes[engine])
            for engine, python in engines.items()
        }
        for number in range(arguments.rounds):
            print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
            for engine, python in engines.items():
                rounds[engine].append(
                    one_round(engine, python, converted[engine], arguments.threads, dtypes[engine])
                )
    report(rounds, UNITS, arguments.save, where)


def convert(engine: str, python: str, folder: Path, scratch: Path, dtype: str) -> Path:
    """Return the checkpoint for an engine, converted if necessary."""
    out = scratch / engine
    if engine in OURS and dtype == "bfloat16":
        in_a_process(store_in_bfloat16, folder, out)
        return out
    if engine in OURS and dtype == "int8":
        command = [python, "-P", "-m", "gpt_cli", "quantize", str(folder), "-o", str(out)]
    elif engine in (*OURS, "transformers"):
        return folder
    else:
        command = [python, str(HERE / "convert.py"), engine, str(folder), str(out)]
        command += ["--dtype", dtype]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return out


if __name__ == "__main__":
    main()
