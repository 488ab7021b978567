"""Mixed commands in one process for a long time: its memory, files and threads must stay flat.

    python tests/faults/soak.py MINUTES [--save FILE]

This finds a command that leaks, because the process does not end with it. Linux only.
"""

import argparse
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import gpt_cli
from gpt_cli.cli import app
from support.checkpoints import CASES

EVERY = 10.0  # seconds between two samples
WARM = 0.2  # fraction of the time that is not counted: one-time allocations happen in it
MOST = 1.02  # largest ratio of the memory in the last third to that in the first

HUB = """
import sys; sys.path.insert(0, sys.argv[1])
from pathlib import Path
from support.checkpoints import CASES
from support.loopback_hub import LoopbackHub
root = Path(sys.argv[2])
folder = CASES["saved"].write(root / "published")
with LoopbackHub(root / "hub") as hub:
    hub.add("acme/gpt", {path.name: path.read_bytes() for path in folder.iterdir()})
    print(hub.endpoint, flush=True)
    sys.stdin.read()
"""

TINY = ["-m", "tiny", "-q"]
# Each with its exit code; failures run other code.
COMMANDS = [
    (0, "generate", *TINY, "-n", "40", "Once upon a time"),
    (0, "generate", *TINY, "-n", "20", "--json", "--logprobs", "3", "Once"),
    (0, "generate", *TINY, "-n", "20", "--samples", "3", "--no-cache", "--stop", "fox", "Once"),
    (0, "generate", *TINY, "-n", "20", "--dtype", "int8", "Once"),
    (0, "generate", "-m", "acme/gpt", "-q", "-n", "5", "Once"),
    (0, "batch", *TINY, "-n", "10", "prompts"),
    (6, "batch", *TINY, "-n", "10", "rows"),
    (0, "batch", *TINY, "-n", "10", "prompts", "-o", "out", "--resume"),
    (0, "score", *TINY, "prompts"),
    (0, "score", *TINY, "--lines", "--json", "prompts"),
    (0, "rank", *TINY, "Once", "--choices", "upon,there,fox"),
    (0, "next", *TINY, "Once upon a"),
    (0, "tokenize", "-m", "tiny", "--json", "Once upon a time"),
    (0, "detokenize", "-m", "tiny", "40 41 42"),
    (0, "info", "tiny"),
    (0, "models"),
    (0, "download", "acme/gpt", "-q"),
    (0, "bench", "-m", "tiny", "-q", "-n", "4"),
    (2, "generate", *TINY, "--temperature", "-1", "Once"),
    (3, "generate", "-m", "acme/none", "-q", "Once"),
    (4, "generate", "-m", "damaged", "-q", "Once"),
]


@dataclass(frozen=True)
class Sample:
    """The resources of the process at a moment."""

    seconds: float
    memory: int  # resident, in bytes
    files: int
    threads: int

    @classmethod
    def take(cls, seconds: float) -> "Sample":
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        files = len(list(Path("/proc/self/fd").iterdir())) - 1  # without the listing's own
        threads = len(list(Path("/proc/self/task").iterdir()))
        return cls(seconds, pages * os.sysconf("SC_PAGE_SIZE"), files, threads)


def soak(seconds: float) -> tuple[list[Sample], Counter[str]]:
    """Run commands for a while, in random order; return the samples, and how often each ran."""
    chosen = random.Random(1)
    ran: Counter[str] = Counter()
    samples: list[Sample] = []
    start = time.monotonic()
    while (now := time.monotonic() - start) < seconds:
        code, *arguments = chosen.choice(COMMANDS)
        with (
            Path(os.devnull).open("w") as nowhere,
            redirect_stdout(nowhere),
            redirect_stderr(nowhere),
        ):
            found = app.run(arguments)
        if found != code:
            raise RuntimeError(f"exit code {found} and not {code}: {arguments}")
        ran[arguments[0]] += 1
        if now >= len(samples) * EVERY:
            samples.append(Sample.take(now))
    return samples, ran


def prepare(folder: Path) -> None:
    """Write the input of the commands."""
    Path("prompts").write_text("Once upon a time\nOne day\nThe fox\n")
    Path("rows").write_text('{"prompt": "Once"}\n{\n{"prompt": 3}\n')
    weights = CASES["saved"].write(folder / "damaged") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def report(samples: list[Sample], ran: Counter[str], minutes: float) -> tuple[str, bool]:
    """Return the table, and whether everything is flat."""
    warm = [sample for sample in samples if sample.seconds > WARM * minutes * 60]
    third = len(warm) // 3
    first, last = warm[:third], warm[-third:]
    memory, later_memory = (
        statistics.median(sample.memory for sample in part) for part in (first, last)
    )
    files, later_files = (max(sample.files for sample in part) for part in (first, last))
    threads, later_threads = (max(sample.threads for sample in part) for part in (first, last))
    flat = later_memory <= MOST * memory and later_files <= files and later_threads <= threads
    return (
        f"""\
# A soak of {minutes:g} minutes

Written by `make soak` with gpt-cli {gpt_cli.__version__} and Python {platform.python_version()}:
{ran.total():,} commands in one process, with a sample every {EVERY:g} seconds. The first {WARM:.0%}
of the time are not counted, because one-time allocations happen in it.

| | first third | last third |
|-|-|-|
| memory, median | {memory / 1e6:.1f} MB | {later_memory / 1e6:.1f} MB |
| open files, most | {files} | {later_files} |
| threads, most | {threads} | {later_threads} |

{"Flat" if flat else "NOT flat"}. The commands: \
{", ".join(f"{count} {name}" for name, count in sorted(ran.items()))}.
""",
        flat,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("minutes", type=float)
    parser.add_argument("--save", type=Path, help="write the table here, too")
    arguments = parser.parse_args()
    save = arguments.save and arguments.save.resolve()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        command = [sys.executable, "-c", HUB, str(Path(__file__).parents[1]), scratch]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as hub:
            os.environ |= {
                "HF_ENDPOINT": hub.stdout.readline().strip(),
                "HF_HOME": str(folder / "home"),
                "NO_PROXY": "127.0.0.1,localhost",
            }
            os.chdir(folder)
            prepare(folder)
            samples, ran = soak(60 * arguments.minutes)
            hub.stdin.close()
    table, flat = report(samples, ran, arguments.minutes)
    print(table, end="")
    if save:
        save.write_text(table)
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main())
