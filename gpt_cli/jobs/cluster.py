"""Compute the rows of a job on a cluster, by Ray Data."""

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
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gpt_cli import hub
from gpt_cli.engine import Engine
from gpt_cli.errors import GPTCLIError, InputError, ResourceError
from gpt_cli.jobs import parquet
from gpt_cli.jobs.rows import Piece, Reader, Row, Source, blocks
from gpt_cli.jobs.storage import is_address
from gpt_cli.jobs.tasks import Task
from gpt_cli.loading import load
from gpt_cli.records import Record
from gpt_cli.system.machine import cores

if TYPE_CHECKING:
    import pyarrow

_MOST_BLOCKS = 50_000  # of one job; Ray keeps track of each
_WORKERS_PER_READER = 8  # reading is far faster than computing
_THREADS = 4  # of a worker by default; more help GPT-2 little
# Settings of a Ray that is started for one job. Its actors start 2 s sooner without the processes
# for tasks, which it does not use.
_ALONE = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}


@dataclass(frozen=True)
class Cluster:
    """The Ray cluster and the workers that compute a job."""

    address: str | None = None  # host:port or "auto"; None: RAY_ADDRESS, or start Ray here
    workers: int | None = None  # processes that hold the model; None: as many as fit
    gpus: float = 0  # of each worker
    threads: int | None = None  # and CPUs, of each worker; None: up to 4


class _Actor:
    """Turn each block into another block, or into an error."""

    def __call__(self, table: "pyarrow.Table") -> "pyarrow.Table":
        """Return the block for the blocks of a table."""
        try:
            return _packed(list(self.content(_unpacked(table))))
        except GPTCLIError as error:
            return _packed(error)

    def content(self, block: list[Any]) -> Iterable[Any]:
        raise NotImplementedError


@dataclass(frozen=True)
class _PieceReader(_Actor):
    """Read the rows of pieces, from the index `start` on.

    It is an actor only beside the driver; on a node without CPUs each task would be a new process.
    """

    reader: Reader
    start: int
    folder: Path  # the driver's, for relative paths

    def content(self, block: list[Piece]) -> Iterator[Row]:
        """Yield the rows of pieces; raise InputError if a file cannot be read."""
        for piece in block:
            path = piece.file if is_address(piece.file) else str(self.folder / piece.file)
            name = piece.file if self.reader.many else None
            for row in self.reader.read(replace(piece, file=path)):
                if row.index >= self.start:
                    yield replace(row, file=name)


class _Worker(_Actor):
    """Hold the model, or the error of loading it."""

    def __init__(
        self, task: Task, reader: _PieceReader, name: str, model: str, loading: Mapping[str, Any]
    ):
        self._task = task
        self._reader = reader
        try:
            self._engine: Engine | GPTCLIError = load(model, **loading)
            self._engine.name = name
        except GPTCLIError as error:
            self._engine = error

    def content(self, block: list[Any]) -> Iterator[Record]:
        """Yield the records of rows, or of the rows of pieces."""
        if isinstance(self._engine, GPTCLIError):
            raise self._engine
        rows = self._reader.content(block) if isinstance(block[0], Piece) else block
        for _, some in groupby(rows, lambda row: row.index // self._task.window):
            yield from self._task.records(self._engine, list(some))


def compute(
    cluster: Cluster, source: Source, start: int, task: Task, model: str, loading: Mapping[str, Any]
) -> Iterator[Record]:
    """Yield the record of each row from index `start` on, in order.

    On a running cluster, this machine reads local files, and the workers read files at an address
    (such as file://, a folder that all machines share). The same rows are computed together as on
    one machine.

    Raises:
        InputError: a file cannot be read, or the cluster has no room for all workers.
        ResourceError: there is no cluster, or a worker has not enough memory.
        ModelNotFoundError: a worker cannot get the model.
        CheckpointError: the weights are damaged.
    """
    ray = library()
    left = [piece for piece in source.pieces if piece.index + piece.rows > start]
    if not left:
        return
    windows = math.ceil((left[-1].index - start) / task.window / _MOST_BLOCKS)
    size = task.window * max(1, windows)
    items = [_packed(block) for block in blocks(left, size)]
    there = str(Path(model).absolute()) if hub.is_folder(model) else model
    if loading.get("device", "auto") == "auto" and not cluster.gpus:  # Ray has assigned no GPU
        loading = {**loading, "device": "cpu"}
    reading = source.reader, start, Path.cwd()
    with _connected(cluster) as alone:
        workers, threads = _room(cluster)
        data = ray.data.from_arrow(items)
        if not (alone or all(map(is_address, source.files))):
            here = f"node:{ray.util.get_node_ip_address()}"
            data = data.map_batches(
                _PieceReader,
                fn_constructor_args=reading,
                batch_size=None,
                batch_format="pyarrow",
                num_cpus=0,  # else a reader would wait forever once the workers have all CPUs
                resources={here: 0.001},  # each node has 1 of its own
                compute=ray.data.ActorPoolStrategy(
                    size=min(len(items), math.ceil(workers / _WORKERS_PER_READER))
                ),
            )
        data = data.map_batches(
            _Worker,
            fn_constructor_args=(task, _PieceReader(*reading), model, there, loading),
            batch_size=1,  # block; Ray requires a number if there are GPUs
            batch_format="pyarrow",
            num_cpus=threads,
            num_gpus=cluster.gpus or None,
            compute=ray.data.ActorPoolStrategy(size=min(workers, len(items))),
        )
        # With prefetching, a block would wait for the next one, which may take an hour.
        for table in data.iter_batches(prefetch_batches=0, batch_size=None, batch_format="pyarrow"):
            yield from _unpacked(table)


def _packed(block: list[Any] | GPTCLIError) -> "pyarrow.Table":
    """Return a block for Ray Data; an error is one, too, since Ray would return only its text."""
    pyarrow = parquet.library()
    return pyarrow.table({"block": pyarrow.array([pickle.dumps(block)], pyarrow.large_binary())})


def _unpacked(table: "pyarrow.Table") -> list[Any]:
    """Return the content of the blocks of a table; raise a block that is an error."""
    content = []
    for data in table["block"].to_pylist():
        block = pickle.loads(data)  # noqa: S301 (from one of our own processes)
        if isinstance(block, GPTCLIError):
            raise block
        content += block
    return content


def _room(cluster: Cluster) -> tuple[int, int]:
    """Return the number of workers, and the threads of each; raise an error if they do not fit."""
    ray = library()
    if not (cluster.gpus <= 1 or cluster.gpus % 1 == 0):  # NaN, too
        raise InputError(f"--gpus-per-worker must be whole or below 1, not {cluster.gpus}")
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    most = max(int(node.get("CPU", 0)) for node in nodes)
    threads = cluster.threads or max(1, min(most, _THREADS))
    room = 0
    for node in nodes:
        fitting = int(node.get("CPU", 0)) // threads
        if cluster.gpus:
            on_one = int(1 / cluster.gpus + 1e-9)  # workers that share a GPU; 0 if they need more
            here = int(node.get("GPU", 0))
            fitting = min(fitting, here * on_one if on_one else here // int(cluster.gpus))
        room += fitting
    each = f"--threads {threads}"
    if cluster.gpus:
        each += f", --gpus-per-worker {cluster.gpus:g}"
    if not room:
        raise ResourceError(
            f"no machine of the cluster has room for a worker with {each}: ask for less"
        )
    if room < (cluster.workers or 1):
        raise InputError(
            f"the cluster has room for --workers {room}, not {cluster.workers}, with {each} each"
        )
    return cluster.workers or room, threads


@contextmanager
def _connected(cluster: Cluster) -> Iterator[bool]:
    """Connect to a cluster, or start one for this job; yield whether it was started.

    Raises:
        ResourceError: no cluster answers, or Ray fails within the block.
    """
    ray = library()
    address = cluster.address or os.environ.get("RAY_ADDRESS") or "local"
    how: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    if alone := address == "local":
        for name, value in _ALONE.items():
            os.environ.setdefault(name, value)
        how |= {"num_cpus": max(cluster.threads or 1, cores()), "include_dashboard": False}
    _check_address(address)
    terminate = signal.getsignal(signal.SIGTERM)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # errors are raised, too
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        with _silent():
            _join(address, how)
        signal.signal(signal.SIGTERM, terminate)  # Ray has installed its own handler
        yield alone
    except ray.exceptions.RayError as error:
        raise ResourceError(f"Ray has failed: {_summary(error)}") from error
    finally:
        ray.shutdown()


def _join(address: str, how: dict[str, Any]) -> None:
    ray = library()
    try:
        ray.init(address, **how)
    except ConnectionError as error:
        raise ResourceError(
            f"no Ray cluster answers at {address}: `ray start --head` starts one on this machine; "
            "without --address, one is started for this job"
        ) from error
    except (ray.exceptions.RayError, OSError, ValueError, RuntimeError) as error:
        raise ResourceError(
            f"cannot join the Ray cluster at {address}: {_summary(error)}; run gpt-cli on a "
            "machine of the cluster, with its versions of Ray and Python"
        ) from error


def _summary(error: Exception) -> str:
    """Return the first line of an error and the last, its cause, without colours."""
    lines = re.sub(r"\x1b\[\d*m", "", str(error)).splitlines()
    lines = [line.strip() for line in lines if line.strip()]
    return ": ".join(dict.fromkeys([*lines[:1], *lines[-1:]])) or repr(error)


def _check_address(address: str) -> None:
    """Raise an error if nobody answers, which Ray would retry for minutes."""
    if address.startswith("ray://"):
        raise InputError(
            "--address ray:// is not supported: run gpt-cli on a machine of the cluster, for "
            "example by `ray job submit`, with --address auto"
        )
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return  # "auto" and "local"
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10.0).close()
    except (OSError, OverflowError, UnicodeError) as error:
        message = f"no Ray cluster answers at {address} ({error}): check --address"
        raise ResourceError(message) from None


@contextmanager
def _silent() -> Iterator[None]:
    """Hide the output of Ray's libraries to standard error while they start."""
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


def library() -> ModuleType:
    """Return Ray; raise ResourceError if it is not installed."""
    try:
        import ray
        import ray.data
        import ray.exceptions
    except ImportError as error:
        raise ResourceError(f"--engine ray: {error}: pip install 'ray[data]'") from None
    return ray
