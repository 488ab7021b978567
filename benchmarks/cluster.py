"""Measure `--engine ray` on a cluster of several nodes on this machine; write a report.

    python benchmarks/cluster.py [--save NAME] [--pairs N] [equal] [overhead] [driver]

It needs the extra `ray` and takes half an hour. By default it runs all parts:
    equal     5,000 ragged rows, a few of them invalid, through the bundled model: on this machine;
              on a cluster of four nodes; with a node killed after a fifth of the records; with the
              driver killed then and the job resumed. Apart from times, all must give the same
              records. The same for scores, as Parquet.
    overhead  a job of a minute or more with 124M parameters and one worker: without Ray, with Ray
              started for the job, and on a running cluster, in turns.
    driver    the rows per second that one driver reads, sends, receives and writes when workers
              only make records, and the bytes per row.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster
from run import machine, make_checkpoint, versions

from gpt_cli.engine import Engine
from gpt_cli.jobs import Cluster as Workers
from gpt_cli.jobs import Generation, InputRow
from gpt_cli.jobs.cluster import compute
from gpt_cli.jobs.rows import Source
from gpt_cli.options.request import Options
from gpt_cli.records import Record, json_line

PARTS = ("equal", "overhead", "driver")
NODES, ROWS = 4, 5000
WORDS = "Once upon a time there was a little fox who loved the moon and lived by the sea".split()  # noqa: SIM905
COMMAND = [sys.executable, "-m", "gpt_cli"]


def write_rows(file: Path, rows: int, most: int) -> None:
    """Write prompts of 1 to 60 words with 1 to `most` new tokens; one in 501 has no prompt."""
    choose = random.Random(1)  # noqa: S311
    lines = []
    for index in range(rows):
        words = choose.choice([1, 2, 3, 5, 8, 13, 30, 60])
        row: dict[str, Any] = {"id": f"row {index}"}
        row["prompt"] = " ".join(choose.choice(WORDS) for _ in range(words))
        row["max_tokens"] = choose.choice(
            [1, most // 12, most // 6, most // 3, 2 * most // 3, most]
        )
        row |= {"seed": index} if index % 7 == 0 else {}
        row |= {"temperature": 0} if index % 11 == 0 else {}
        row |= {"stop": "."} if index % 13 == 0 else {}
        lines.append(json.dumps(row | ({"prompt": None} if index % 501 == 0 else {})) + "\n")
    file.write_text("".join(lines))


def records(file: Path) -> list[dict[str, Any]]:
    """Return the records of a file without times and null fields."""
    if file.suffix == ".parquet":
        import pyarrow.parquet

        rows = pyarrow.parquet.read_table(file).to_pylist()
    else:
        rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [
        {name: value for name, value in record.items() if name != "timing" and value is not None}
        for record in rows
    ]


def run(*arguments: object) -> float:
    """Run a command, whose rows may fail; return its seconds."""
    start = time.perf_counter()
    finished = subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, check=False)
    if finished.returncode not in (0, 6):
        sys.exit(finished.stderr.decode())
    return time.perf_counter() - start


@contextmanager
def cluster(nodes: int, cpus: int) -> Iterator[tuple[Cluster, list[Any]]]:
    """Start a cluster of worker nodes and a head node that does not compute."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    started: Any = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        yield started, [started.add_node(num_cpus=cpus) for _ in range(nodes)]
    finally:
        started.shutdown()


def begin(*arguments: object) -> subprocess.Popen[bytes]:
    """Start a command; return when a fifth of its output exists."""
    output = Path(str(arguments[arguments.index("-o") + 1]))
    process = subprocess.Popen([*COMMAND, *map(str, arguments)], stderr=subprocess.DEVNULL)
    while process.poll() is None and not (output.exists() and lines_of(output) > ROWS // 5):
        time.sleep(0.2)
    return process


def lines_of(file: Path) -> int:
    """Return the number of lines of a file."""
    return file.read_bytes().count(b"\n")


def measure_equal(scratch: Path) -> list[str]:
    """Run jobs that must all give the same records."""
    source, alone, output = (scratch / f"{name}.jsonl" for name in ("in", "alone", "nodes"))
    write_rows(source, ROWS, 48)
    job = ["batch", source, "--model", "tiny", "--seed", 1, "--threads", 1]
    seconds = run(*job, "-o", alone)
    expected = records(alone)
    table = [row("on this machine, one process", seconds, len(expected), "")]
    with cluster(NODES, 1) as (nodes, workers):
        remote = [*job, "--engine", "ray", "--address", nodes.address]
        seconds = run(*remote, "-o", output)
        table.append(compared(f"{NODES} nodes", seconds, output, expected))
        table.append(kill_driver(remote, scratch / "driver.jsonl", expected))
        kill = partial(nodes.remove_node, workers[-1], allow_graceful=False)
        table.append(kill_node(remote, scratch / "killed.jsonl", expected, kill))
        table += measure_scores(scratch, nodes.address, expected)
    return [
        f"{ROWS} ragged rows through `tiny`, a thread for each worker:",
        "",
        "| | seconds | records | equal to those of this machine |",
        "|-|-|-|-|",
        *table,
    ]


def compared(
    name: str, seconds: float, output: Path, expected: list[dict[str, Any]], note: str = ""
) -> str:
    """Return a row that says how many records of an output are the expected ones."""
    actual = records(output)
    same = sum(one == other for one, other in zip(expected, actual, strict=False))
    return row(name, seconds, len(actual), f"{same} of {len(expected)}{note}")


def kill_driver(job: list[Any], output: Path, expected: list[dict[str, Any]]) -> str:
    """Kill the driver of a job after a fifth of the records, and resume the job."""
    start = time.perf_counter()
    process = begin(*job, "-o", output)
    process.kill()
    process.wait()
    before = lines_of(output)
    run(*job, "-o", output, "--resume")
    seconds = time.perf_counter() - start
    name = "the driver killed, and resumed"
    return compared(name, seconds, output, expected, f"; {before} before it")


def kill_node(
    job: list[Any], output: Path, expected: list[dict[str, Any]], kill: Callable[[], None]
) -> str:
    """Kill a node after a fifth of the records of a job."""
    start = time.perf_counter()
    process = begin(*job, "-o", output)
    before = lines_of(output)
    kill()
    process.wait()
    seconds = time.perf_counter() - start
    return compared("a node killed", seconds, output, expected, f"; {before} before it")


def measure_scores(scratch: Path, address: str, continued: list[dict[str, Any]]) -> list[str]:
    """Score the texts of records, as Parquet: on this machine, and on the cluster."""
    texts, one, other = (scratch / name for name in ("texts.jsonl", "one.parquet", "other.parquet"))
    rows = [
        {"id": record["id"], "text": record["prompt"] + record["text"]}
        for record in continued
        if "error" not in record
    ]
    texts.write_text("".join(json.dumps(fields) + "\n" for fields in rows))
    score = ["score", texts, "--model", "tiny", "--threads", 1]
    seconds = run(*score, "-o", one)
    expected = records(one)
    alone = row("scores as Parquet, on this machine", seconds, len(expected), "")
    seconds = run(*score, "--engine", "ray", "--address", address, "-o", other)
    return [alone, compared("scores as Parquet, on the remaining nodes", seconds, other, expected)]


def row(*cells: object) -> str:
    """Return a row of a Markdown table."""
    shown = (f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in cells)
    return f"| {' | '.join(shown)} |"


def measure_overhead(scratch: Path, pairs: int) -> list[str]:
    """Run whole commands with one worker, in turns."""
    model, source = scratch / "124M", scratch / "in.jsonl"
    make_checkpoint(model, "124M")
    job = ["batch", source, "--model", model, "--seed", 1, "--ignore-eos"]
    lines = [
        "| 124M parameters, one worker | rows | threads | seconds | ratio to without Ray |",
        "|-|-|-|-|-|",
    ]
    names = ("without Ray", "Ray started for the job", "on a running cluster")
    remote = ["--engine", "ray", "--workers", 1]
    for threads, rows in ((1, 384), (2, 768)):  # they take about as long
        write_rows(source, rows, 48)
        times: dict[str, list[float]] = {name: [] for name in names}
        outputs: list[Path] = []
        for _ in range(pairs):
            for name in names:
                outputs.append(scratch / f"{threads} {len(outputs)}")
                command = [*job, "--threads", threads, "-o", outputs[-1]]
                if name == names[0]:
                    times[name].append(run(*command))
                elif name == names[1]:
                    times[name].append(run(*command, *remote))
                else:
                    with cluster(1, 2) as (nodes, _):
                        times[name].append(run(*command, *remote, "--address", nodes.address))
                print(threads, name, times[name][-1], file=sys.stderr, flush=True)
        expected = records(outputs[0])
        if any(records(output) != expected for output in outputs):
            sys.exit("the records differ")
        for name, seconds in times.items():
            ratios = [one / local for one, local in zip(seconds, times[names[0]], strict=True)]
            lines.append(row(name, rows, threads, spread(seconds, 1), spread(ratios, 3)))
    return [*lines, "", "All records with the same number of threads are equal."]


def spread(values: Sequence[float], digits: int) -> str:
    """Return the median and the range."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


@dataclass(frozen=True)
class Echo(Generation):
    """A task that makes records as long as those of `batch`, without a model."""

    def results(self, engine: Engine, rows: Sequence[InputRow]) -> Iterator[Any]:
        """Yield a result for each row."""
        for _ in rows:
            yield {"text": "x" * 300}

    def record(self, engine: Engine, row: InputRow, result: Any) -> Record:
        """Return the result as it is."""
        return result


def measure_driver(scratch: Path) -> list[str]:
    """Measure the throughput of a driver."""
    file = scratch / "in.jsonl"
    write_rows(file, 200_000, 48)
    start = time.perf_counter()
    source = Source([str(file)], "auto", Echo(Options(seed=1)).layout, 256)
    rows = source.total or 0
    cut = rows / (time.perf_counter() - start)
    start = time.perf_counter()
    for _ in source.rows():
        pass
    read = rows / (time.perf_counter() - start)
    lines = [
        f"A driver, with {rows} rows of {file.stat().st_size / rows:.0f} bytes:",
        "",
        "| | rows a second |",
        "|-|-|",
        row("split the file into blocks", round(cut)),
        row("read and parse the rows, in one process", round(read)),
    ]
    with cluster(1, 2) as (nodes, _):
        for batch_size in (64, 1024):
            task = Echo(Options(seed=1), batch_size)
            source = Source([str(file)], "auto", task.layout, task.rows_together)
            with (scratch / "out").open("w") as output:
                times = []
                for record in compute(
                    Workers(nodes.address, threads=1), source, 0, task, "tiny", {"device": "cpu"}
                ):
                    output.write(json_line(record))
                    times.append(time.perf_counter())
            # Without the first block, which waits for the workers to start.
            rate = (rows - task.rows_together) / (times[-1] - times[task.rows_together - 1])
            size = (scratch / "out").stat().st_size / rows
            sent = f"send blocks of {task.rows_together} rows to two workers"
            lines.append(row(f"{sent}, and write their records of {size:.0f} bytes", round(rate)))
    return lines


def main() -> None:
    """Measure, print, and save with `--save`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", default=PARTS)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--save", metavar="NAME", help="write benchmarks/results/NAME.md")
    arguments = parser.parse_args()
    where = machine() | versions(sys.executable, ["gpt2-cli", "numpy", "ray", "pyarrow"])
    lines = [f"- {name}: {value}" for name, value in where.items()]
    for name in arguments.parts:
        with tempfile.TemporaryDirectory() as folder:
            scratch = Path(folder)
            lines.append("")
            if name == "equal":
                lines += measure_equal(scratch)
            elif name == "overhead":
                lines += measure_overhead(scratch, arguments.pairs)
            else:
                lines += measure_driver(scratch)
    print("\n".join(lines))
    if arguments.save:
        Path(__file__).parent.joinpath("results", f"{arguments.save}.md").write_text(
            "\n".join(lines) + "\n"
        )


if __name__ == "__main__":
    main()
