"""Fuzz the targets: `PYTHONPATH=tests python tests/fuzz/run.py SECONDS [TARGET ...] [--keep]`.

Two processes share the seconds. Inputs that reach new code are collected in build/fuzz/corpus.
Inputs that show an error are written to build/fuzz/findings, and the exit code is then 1. A target
ends with its first finding, because the next ones are mostly the same.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path

from targets import TARGETS

HERE = Path(__file__).parent
KEPT = HERE / "corpus"
BUILD = HERE.parents[1] / "build" / "fuzz"
PROCESSES = 2
# Bytes of an input. The time of a target may grow with the square of it, or faster.
MAX_BYTES = dict.fromkeys(TARGETS, 8000) | {"constraints": 300, "compressed": 400}
MAX_BYTES |= {"stops": 48, "decoder": 48}
SHM = Path("/dev/shm")  # for the files of a target: writing them to a disk would be slow


@dataclass
class Result:
    """The result of fuzzing one target: a row of the table, in this order."""

    target: str
    executions: int
    rate: float  # a second
    corpus: int
    edges: int
    features: int
    crashes: int
    hangs: int

    def row(self) -> str:
        cells = [self.target, f"{self.executions:,}", f"{self.rate:,.0f}", *astuple(self)[3:]]
        return f"| {' | '.join(map(str, cells))} |"


HEADER = """\
| target | executions | a second | corpus | edges | features | crashes | hangs |
|-|-|-|-|-|-|-|-|"""


def fuzz(target: str, seconds: int) -> Result:
    """Fuzz one target in a new process."""
    collected, findings = BUILD / "corpus" / target, BUILD / "findings" / target
    for folder in (collected, findings):
        folder.mkdir(parents=True, exist_ok=True)
    for old in findings.iterdir():
        old.unlink()
    start = time.perf_counter()
    log = libfuzzer(
        target,
        f"-max_total_time={seconds}",
        "-timeout=10",  # seconds for one input
        "-rss_limit_mb=2048",
        f"-max_len={MAX_BYTES[target]}",
        f"-artifact_prefix={findings}/",
        "-print_final_stats=1",
        str(collected),
        str(KEPT / target),
    )
    elapsed = time.perf_counter() - start
    (BUILD / f"{target}.log").write_text(log, encoding="utf-8")
    kinds = [path.name.partition("-")[0] for path in findings.iterdir()]
    status = re.findall(r"^#(\d+)\s.*cov: (\d+) ft: (\d+) corp: (\d+)", log, re.MULTILINE)
    executions, edges, features, corpus = map(int, status[-1]) if status else (0, 0, 0, 0)
    crashes = sum(kind in ("crash", "oom") for kind in kinds)
    rate, hangs = executions / elapsed, kinds.count("timeout")
    return Result(target, executions, rate, corpus, edges, features, crashes, hangs)


def keep(target: str) -> None:
    """Copy the fewest collected inputs that reach all code that no kept input reaches."""
    # Without counters: the number of passes over an edge is new too often.
    libfuzzer(
        target, "-merge=1", "-use_counters=0", str(KEPT / target), str(BUILD / "corpus" / target)
    )


def libfuzzer(target: str, *arguments: str) -> str:
    """Run the fuzzer and return its log; raise RuntimeError if the fuzzer itself fails."""
    with tempfile.TemporaryDirectory(dir=SHM if SHM.is_dir() else None) as folder:
        finished = subprocess.run(
            [sys.executable, HERE / "fuzzer.py", target, *arguments],
            env=os.environ | {"TMPDIR": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    if finished.returncode and "Test unit written to" not in finished.stdout:
        raise RuntimeError(f"the fuzzer of {target} failed:\n{finished.stdout[-2000:]}")
    return finished.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seconds", type=int)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--keep", action="store_true", help="add new inputs to tests/fuzz/corpus")
    arguments = parser.parse_args()
    targets = arguments.targets or list(TARGETS)
    if unknown := set(targets) - TARGETS.keys():
        parser.error(f"unknown targets: {', '.join(sorted(unknown))}")
    share = max(1, arguments.seconds * PROCESSES // max(PROCESSES, len(targets)))
    with ThreadPoolExecutor(PROCESSES) as pool:
        results = list(pool.map(lambda target: fuzz(target, share), targets))
        if arguments.keep:
            list(pool.map(keep, targets))
    print(HEADER, *(result.row() for result in results), sep="\n")
    if any(result.crashes or result.hangs for result in results):
        print(f"\nThe inputs are in {BUILD / 'findings'}, and the logs are {BUILD}/TARGET.log.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
