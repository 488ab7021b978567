"""The rows of a job on a cluster: read, computed and given back in their order, by Ray Data."""

import logging
import math
import os
import pickle
import re
import signal
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow
import ray
import ray.data
from ray.exceptions import RayError

from gpt_cli import hub
from gpt_cli.engine import Engine, load
from gpt_cli.errors import GPTCLIError, InputError, ResourceError
from gpt_cli.machine import cores
from gpt_cli.places import is_address
from gpt_cli.records import Record, Task
from gpt_cli.rows import Line, Piece, Reader, Source, blocks

_MOST_BLOCKS = 50_000  # of one job; Ray keeps track of each
_WORKERS_A_READER = 8  # which reads far faster than they compute
_THREADS = 4  # of a worker, where nobody says: more bring GPT-2 little
_TINY = 1e-9  # what rounding may take from a whole number
_PATIENCE = 10.0  # seconds
# Of a Ray for one job. It is not to start processes for tasks: there are only actors, which come
# 2 s sooner without.
_ALONE = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}


@dataclass(frozen=True)
class Cluster:
    """Where a job is computed, and by how many."""

    address: str | None = None  # host:port or "auto"; None is RAY_ADDRESS, or Ray is started here
    workers: int | None = None  # processes that hold the model; None is as many as have room
    gpus: float = 0  # of each
    threads: int | None = None  # of each, and as many CPUs; None is up to 4


@dataclass(frozen=True)
class _Reading:
    """What reads the lines of pieces, from the index `start` on."""

    reader: Reader
    start: int
    folder: Path  # the driver's, for paths that are not whole

    def lines(self, pieces: Iterable[Piece]) -> Iterator[Line]:
        """Yield the lines of pieces.

        Raises:
            InputError: a file cannot be read.
        """
        for piece in pieces:
            path = piece.file if is_address(piece.file) else str(self.folder / piece.file)
            name = piece.file if self.reader.many else None
            for line in self.reader.read(replace(piece, file=path)):
                if line.index >= self.start:
                    yield replace(line, file=name)


class _ReaderHere:
    """An actor beside the driver; where a node has no CPUs, each task would be a new process."""

    def __init__(self, reading: _Reading):
        self._reading = reading

    def __call__(self, table: pyarrow.Table) -> pyarrow.Table:
        """Return the lines of pieces."""
        try:
            return _packed(list(self._reading.lines(_unpacked(table))))
        except GPTCLIError as error:
            return _packed(error)


class _Worker:
    """An actor: it holds the model, or the error that there was instead."""

    def __init__(
        self, task: Task, reading: _Reading, name: str, model: str, load_options: Mapping[str, Any]
    ):
        self._task = task
        self._reading = reading
        try:
            self._engine: Engine | GPTCLIError = load(model, **load_options)
            self._engine.name = name
        except GPTCLIError as error:
            self._engine = error

    def __call__(self, table: pyarrow.Table) -> pyarrow.Table:
        """Return the records of lines, or of the lines of pieces."""
        try:
            return _packed(list(self._records(_unpacked(table))))
        except GPTCLIError as error:
            return _packed(error)

    def _records(self, block: list[Line] | list[Piece]) -> Iterator[Record]:
        if isinstance(self._engine, GPTCLIError):
            raise self._engine
        lines = self._reading.lines(block) if isinstance(block[0], Piece) else block
        rows = map(self._reading.reader.parse, lines)
        for _, some in groupby(rows, lambda row: row.index // self._task.together):
            yield from self._task.records(self._engine, list(some))


def compute(
    cluster: Cluster,
    source: Source,
    start: int,
    task: Task,
    model: str,
    load_options: Mapping[str, Any],
) -> Iterator[Record]:
    """Yield what becomes of each row from index `start` on, in their order.

    Where there are other machines, files of this one are read on it, and those at an address
    (file:// is one that all machines have) by the workers. The rows that are computed together
    are those that are on one machine, too.

    Raises:
        InputError: a file cannot be read, or there is no room for so many workers.
        ResourceError: there is no cluster, or a worker has not enough memory.
        ModelNotFoundError: a worker cannot get the model.
        CheckpointError: the weights are damaged.
    """
    left = [piece for piece in source.pieces if piece.index + piece.rows > start]
    if not left:
        return
    windows = math.ceil((left[-1].index - start) / task.together / _MOST_BLOCKS)
    size = task.together * max(1, windows)
    items = [_packed(block) for block in blocks(left, size)]
    there = str(Path(model).absolute()) if hub.is_folder(model) else model
    if load_options["device"] == "auto" and not cluster.gpus:  # whose GPUs are not theirs to take
        load_options = {**load_options, "device": "cpu"}
    reading = _Reading(source.reader, start, Path.cwd())
    with _errors(), _connected(cluster) as alone:
        workers, threads = _room(cluster)
        data = ray.data.from_arrow(items)
        if not (alone or all(map(is_address, source.files))):
            here = f"node:{ray.util.get_node_ip_address()}"
            data = data.map_batches(
                _ReaderHere,
                fn_constructor_args=(reading,),
                batch_size=None,
                batch_format="pyarrow",
                num_cpus=0,  # a reader that needed one would wait for ever where workers have all
                resources={here: 0.001},  # every node has 1 of its own
                compute=ray.data.ActorPoolStrategy(
                    size=min(len(items), math.ceil(workers / _WORKERS_A_READER))
                ),
            )
        data = data.map_batches(
            _Worker,
            fn_constructor_args=(task, reading, model, there, load_options),
            batch_size=1,  # a block; Ray wants a number where there are GPUs
            batch_format="pyarrow",
            num_cpus=threads,
            num_gpus=cluster.gpus or None,
            compute=ray.data.ActorPoolStrategy(size=min(workers, len(items))),
        )
        # With one to look ahead for, a block would wait for the next, which may take an hour.
        tables = data.iter_batches(prefetch_batches=0, batch_size=None, batch_format="pyarrow")
        for table in tables:
            yield from _unpacked(table)


def _packed(block: list[Piece] | list[Line] | list[Record] | GPTCLIError) -> pyarrow.Table:
    """Return a block as Ray Data passes it on.

    An error is such, too: of one that is raised, Ray would give back only the text.
    """
    return pyarrow.table({"block": pyarrow.array([pickle.dumps(block)], pyarrow.large_binary())})


def _unpacked(table: pyarrow.Table) -> list[Any]:
    """Return what the blocks of a table hold; raise the error that one of them is."""
    held = []
    for data in table["block"].to_pylist():
        block = pickle.loads(data)  # noqa: S301 (from one of our own processes)
        if isinstance(block, GPTCLIError):
            raise block
        held += block
    return held


def _room(cluster: Cluster) -> tuple[int, int]:
    """Return how many workers there are to be, and the threads of each.

    Raises:
        InputError: the nodes have no room for so many.
        ResourceError: they have none for a single one.
    """
    if cluster.gpus > 1 and cluster.gpus % 1:
        raise InputError(f"--gpus-per-worker must be whole or below 1, not {cluster.gpus}")
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    most = max(int(node.get("CPU", 0)) for node in nodes)
    threads = cluster.threads or max(1, min(most, _THREADS))
    room = 0
    for node in nodes:
        fitting = int(node.get("CPU", 0)) // threads
        if cluster.gpus:
            on_one = int(1 / cluster.gpus + _TINY)  # a worker's share is of one GPU, or whole ones
            here = int(node.get("GPU", 0))
            fitting = min(fitting, here * on_one if on_one else here // int(cluster.gpus))
        room += fitting
    each = f"--threads {threads}" + (
        f", --gpus-per-worker {cluster.gpus:g}" if cluster.gpus else ""
    )
    if not room:
        raise ResourceError(f"no machine of the cluster has room for a worker of {each}: give less")
    if room < (cluster.workers or 1):
        raise InputError(
            f"the cluster has room for --workers {room}, not {cluster.workers}, of {each} each"
        )
    return cluster.workers or room, threads


@contextmanager
def _connected(cluster: Cluster) -> Iterator[bool]:
    """Connect to a cluster, or start one for this job alone; yield whether it is such."""
    address = cluster.address or os.environ.get("RAY_ADDRESS") or "local"
    how: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    alone = address == "local"
    if alone:
        for name, value in _ALONE.items():
            os.environ.setdefault(name, value)
        how |= {"num_cpus": max(cluster.threads or 1, cores()), "include_dashboard": False}
    else:
        _check_address(address)
    terminate = signal.getsignal(signal.SIGTERM)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # what matters is raised, too
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        with _silent():
            _join(address, how)
        signal.signal(signal.SIGTERM, terminate)  # Ray has put its own in the place
        yield alone
    finally:
        ray.shutdown()


def _join(address: str, how: dict[str, Any]) -> None:
    try:
        ray.init(address, **how)
    except ConnectionError as error:
        raise ResourceError(
            f"no Ray cluster answers at {address}: `ray start --head` begins one on this machine, "
            "and without --address there is one for this job alone"
        ) from error
    except (RayError, OSError, ValueError, RuntimeError) as error:
        raise ResourceError(
            f"cannot join the Ray cluster at {address}: {_summary(error)}; run gpt-cli on a "
            "machine of the cluster, with its versions of Ray and Python"
        ) from error


def _summary(error: Exception) -> str:
    """Return what has happened, and what lies at the bottom of it, without its colours."""
    lines = re.sub(r"\x1b\[\d*m", "", str(error)).splitlines()
    told = [line.strip() for line in lines if line.strip()]
    return ": ".join(dict.fromkeys([*told[:1], *told[-1:]])) or repr(error)


def _check_address(address: str) -> None:
    """Raise an error where nobody answers: Ray would try for minutes."""
    if address.startswith("ray://"):
        raise InputError(
            "ray:// is for programs outside of the cluster: run gpt-cli on one of its machines, as "
            "`ray job submit` does, with --address auto"
        )
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return  # "auto" and "local"
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise ResourceError(f"no Ray cluster answers at {address}: {error}") from None


@contextmanager
def _silent() -> Iterator[None]:
    """Hide what Ray's libraries write to standard error while they begin."""
    if sys.stderr is None:
        yield
        return
    sys.stderr.flush()
    kept = os.dup(2)
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@contextmanager
def _errors() -> Iterator[None]:
    """Raise ResourceError for what goes wrong with Ray."""
    try:
        yield
    except RayError as error:
        raise ResourceError(f"Ray has failed: {_summary(error)}") from error
