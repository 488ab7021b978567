"""Measure gpt-cli, and its peers beside it, in one run; write a table of medians and ratios.

    make bench                                                      # gpt-cli alone
    python benchmarks/run.py --python PYTHON --peer transformers --peer ctranslate2 --save NAME

PYTHON is an interpreter that has the peers; what each needs is said in measure.py.

The checkpoint has GPT-2's 124M parameters with random weights, made here unless a FOLDER is given.
Engines take turns, each round in fresh processes, so that a slow minute of the machine hits both.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

Figures = dict[str, float]

UNITS = {
    "decode": "tokens/s",
    "decode_896": "tokens/s",
    "prefill": "tokens/s",
    "batch_8": "tokens/s",
    "batch_64": "tokens/s",
    "forward": "tokens/s",
    "score": "tokens/s",
    "process_20": "s",
    "peak_memory": "MB",
    "help": "s",
}


def make_checkpoint(folder: Path) -> Path:
    """Write a checkpoint of GPT-2's size."""
    from checkpoints import write_checkpoint

    sizes = {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024, "vocab_size": 50257}
    write_checkpoint(folder, sizes)
    return folder


def process(command: list[str]) -> tuple[float, float]:
    """Run a command; return its seconds and its peak memory in MB."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    start = time.perf_counter()
    child = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - start
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"failed: {' '.join(command)}")
    unit = 1 if platform.system() == "Darwin" else 1024  # of ru_maxrss, in bytes
    return seconds, usage.ru_maxrss * unit / 1e6


def one_round(engine: str, python: str, folder: Path, threads: int) -> Figures:
    """Measure everything once for one engine."""
    measure = [python, str(HERE / "measure.py"), engine, str(folder), "--threads", str(threads)]
    found: Figures = json.loads(subprocess.run(measure, check=True, capture_output=True).stdout)
    prompt = "The computer"
    if engine == "ctranslate2":  # its checkpoint must be converted first: no process to compare
        return found
    if engine == "gpt-cli":
        start = [python, "-m", "gpt_cli"]
        found["help"] = process([*start, "--help"])[0]
        command = [*start, "generate", "-m", str(folder), "-n", "20", "--temperature", "0", prompt]
    else:
        command = [python, str(HERE / "transformers_script.py"), str(folder), prompt]
    found["process_20"], found["peak_memory"] = process(command)
    return found


def versions(python: str, packages: list[str]) -> dict[str, str]:
    """Return the versions of packages, as another interpreter has them."""
    code = "import importlib.metadata as m, sys; print(*map(m.version, sys.argv[1:]))"
    found = subprocess.run([python, "-c", code, *packages], check=True, capture_output=True)
    return dict(zip(packages, found.stdout.decode().split(), strict=True))


def machine() -> dict[str, Any]:
    """Describe where the figures come from."""
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


def table(rounds: dict[str, list[Figures]]) -> str:
    """Write medians with their range; beside a peer's, the median of our ratios to it."""
    ours, *peers = rounds
    columns = [ours, *(cell for peer in peers for cell in (peer, "ratio"))]
    lines = ["| " + " | ".join(["", "unit", *columns]) + " |", "|" + "-|" * (len(columns) + 2)]
    for name, unit in UNITS.items():
        cells = [name, unit, spread([figures[name] for figures in rounds[ours]])]
        for peer in peers:
            cells.append(spread([figures[name] for figures in rounds[peer] if name in figures]))
            pairs = zip(rounds[ours], rounds[peer], strict=True)
            ratios = [one[name] / other[name] for one, other in pairs if name in other]
            cells.append(f"{statistics.median(ratios):.3g}" if ratios else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def spread(values: list[float]) -> str:
    """Return the median of values and their range."""
    if not values:
        return ""
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def main() -> None:
    """Measure, print, and save where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument(
        "--peer", action="append", default=[], choices=["transformers", "ctranslate2"]
    )
    parser.add_argument("--python", default=sys.executable, help="an interpreter with the peers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.json and .md")
    arguments = parser.parse_args()
    engines = {"gpt-cli": sys.executable} | dict.fromkeys(arguments.peer, arguments.python)
    rounds: dict[str, list[Figures]] = {engine: [] for engine in engines}
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or make_checkpoint(Path(scratch))
        for number in range(arguments.rounds):
            print(f"round {number + 1} of {arguments.rounds}", file=sys.stderr)
            for engine, python in engines.items():
                rounds[engine].append(one_round(engine, python, folder, arguments.threads))
    print(table(rounds), end="")
    if arguments.save:
        where = machine() | {"threads": arguments.threads}
        where |= versions(sys.executable, ["gpt-cli", "numpy"])
        if arguments.peer:
            where |= versions(arguments.python, [*arguments.peer, "torch"])
        results = HERE / "results" / arguments.save
        results.with_suffix(".json").write_text(
            json.dumps({"machine": where, "rounds": rounds}, indent=1) + "\n"
        )
        facts = "".join(f"- {key}: {value}\n" for key, value in where.items())
        results.with_suffix(".md").write_text(f"{facts}\n{table(rounds)}")


if __name__ == "__main__":
    main()
