"""Compute the rows of a job on a cluster, by Ray Data."""

import logging
import math
import os
import pickle
import re
import signal
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gpt_cli import hub
from gpt_cli.engine import Engine
from gpt_cli.errors import GPTCLIError, ResourceError, import_extra
from gpt_cli.gpt2.edits import with_absolute_path
from gpt_cli.jobs import parquet
from gpt_cli.jobs.formats import Ranges
from gpt_cli.jobs.layout import InputRow
from gpt_cli.jobs.reader import FileRange, RowReader
from gpt_cli.jobs.rows import Source, ranges_together
from gpt_cli.jobs.storage import is_address
from gpt_cli.jobs.task import Task
from gpt_cli.loading import load, load_reader
from gpt_cli.options.declare import OptionError
from gpt_cli.records import Record
from gpt_cli.system.machine import cores
from gpt_cli.system.terminal import silent_stderr

if TYPE_CHECKING:
    import pyarrow

_MOST_BUNDLES = 50_000  # of one job; Ray keeps track of all of them
_WORKERS_PER_READER = 8  # reading is far faster than computing
_THREADS = 4  # of a worker by default; more help GPT-2 little
# Settings of a Ray that is started for one job. Its actors start 2 s sooner without the processes
# for Ray's tasks, which it does not use.
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
    gpus_per_worker: float = 0
    threads: int | None = None  # and CPUs, of a worker; None: up to 4


class _BundleActor:
    """An actor of Ray that turns bundles of ranges or rows into bundles of rows or records."""

    def __init__(self, transform: Callable[[list[Any]], Iterable[Any]]):
        self._transform = transform

    def __call__(self, table: "pyarrow.Table") -> "pyarrow.Table":
        """Return the bundle that replaces those of a table; it may be an error."""
        try:
            return _packed(list(self._transform(_unpacked(table))))
        except GPTCLIError as error:
            return _packed(error)


@dataclass(frozen=True)
class _RangeReader:
    """Reads the rows of ranges, from the index `start` on."""

    reader: RowReader
    start: int
    folder: Path  # the driver's, for relative paths

    @cached_property
    def _opened(self) -> Ranges:
        """The compressed file that stays open between bundles."""
        return Ranges()

    def rows(self, ranges: Iterable[FileRange]) -> Iterator[InputRow]:
        """Yield the rows of ranges; raise InputError if a file cannot be read."""
        for file_range in ranges:
            name = file_range.file.name
            path = name if is_address(name) else str(self.folder / name)
            moved = replace(file_range, file=replace(file_range.file, name=path))
            for row in self.reader.read(moved, self._opened):
                if row.index >= self.start:
                    yield replace(row, file=name if self.reader.many else None)


@dataclass(frozen=True)
class Model:
    """A model that every machine of a cluster can load."""

    name: str  # as a user wrote it
    adapter: str | None  # as a user wrote it
    path: str  # the name, or an absolute path
    loading: Mapping[str, Any]  # keywords of `load`

    @classmethod
    def of(cls, name: str, loading: Mapping[str, Any], gpus: float) -> "Model":
        """Return a model by its name and keywords of `load`, which may have relative paths.

        Without `gpus`, those of a process that computes, it computes on the CPU.
        """
        adapter = loading.get("adapter")
        options = dict(loading)
        options["adapter"] = _absolute(adapter) if adapter else adapter
        options["edits"] = [with_absolute_path(edit) for edit in loading.get("edits", ())]
        if options.get("device", "auto") == "auto" and not gpus:
            options["device"] = "cpu"  # Ray has assigned no GPU
        return cls(name, adapter, _absolute(name), options)

    def load(self) -> Engine:
        """Load the model."""
        return self._named(load(self.path, **self.loading))

    def load_reader(self) -> Engine:
        """Load what reads requests to the model, and cannot compute."""
        return self._named(load_reader(self.path, **self.loading))

    def _named(self, engine: Engine) -> Engine:
        engine.name = self.name
        engine.adapter = self.adapter
        return engine


@dataclass
class _Worker:
    """Computes the records of rows, or of the rows of ranges."""

    task: Task
    reader: _RangeReader
    model: Model

    @cached_property
    def _engine(self) -> Engine:
        """The model, loaded for the first bundle: Ray would return only the text of an error."""
        return self.model.load()

    def records(self, bundle: list[Any]) -> Iterator[list[Record]]:
        """Yield the records of each row of a bundle."""
        rows = self.reader.rows(bundle) if isinstance(bundle[0], FileRange) else bundle
        for _, group in groupby(rows, lambda row: row.index // self.task.rows_together):
            yield from self.task.records(self._engine, list(group))


def compute(
    cluster: Cluster, source: Source, start: int, task: Task, model: str, loading: Mapping[str, Any]
) -> Iterator[list[Record]]:
    """Yield the records of each row from index `start` on, in order.

    On a running cluster, this machine reads local files, and the workers read files at an address
    (such as file://, a folder that all machines share). The same rows are computed together as on
    one machine. The errors of workers, such as ModelNotFoundError, are raised here.
    """
    ray = library()
    groups = ((source.total or 0) - start) / task.rows_together
    size = task.rows_together * max(1, math.ceil(groups / _MOST_BUNDLES))
    bundles = [_packed(ranges) for ranges in ranges_together(source.ranges, size, start)]
    if not bundles:
        return
    reader = _RangeReader(source.reader, start, Path.cwd())
    with _connected(cluster) as alone:
        workers, threads = _room(cluster)
        # A bundle at a time; with GPUs, Ray requires a number.
        batches = {"batch_size": 1, "batch_format": "pyarrow"}
        actors = ray.data.ActorPoolStrategy
        data = ray.data.from_arrow(bundles)
        if not (alone or all(is_address(file.name) for file in source.files)):
            readers = math.ceil(workers / _WORKERS_PER_READER)
            data = data.map_batches(  # tasks would be new processes on a node without CPUs
                _BundleActor,
                fn_constructor_args=(reader.rows,),
                num_cpus=0,  # else a reader would wait forever once the workers have all CPUs
                resources={f"node:{ray.util.get_node_ip_address()}": 0.001},  # of 1: this machine
                compute=actors(size=min(len(bundles), readers)),
                **batches,
            )
        worker = _Worker(task, reader, Model.of(model, loading, cluster.gpus_per_worker))
        data = data.map_batches(
            _BundleActor,
            fn_constructor_args=(worker.records,),
            num_cpus=threads,
            num_gpus=cluster.gpus_per_worker or None,
            compute=actors(size=min(workers, len(bundles))),
            **batches,
        )
        # With prefetching, a bundle would wait for the next one, which may take an hour.
        for table in data.iter_batches(prefetch_batches=0, batch_size=None, batch_format="pyarrow"):
            yield from _unpacked(table)


def _absolute(name: str) -> str:
    """Return the name of a model or an adapter, or the absolute path of its folder."""
    return str(Path(name).absolute()) if hub.is_folder(name) else name


def _packed(content: list[Any] | GPTCLIError) -> "pyarrow.Table":
    """Return a bundle for Ray Data, which would return only the text of an exception."""
    pyarrow = parquet.library()
    return pyarrow.table({"bundle": pyarrow.array([pickle.dumps(content)], "large_binary")})


def _unpacked(table: "pyarrow.Table") -> list[Any]:
    """Return the content of the bundles of a table; raise a bundle that is an error."""
    content = []
    for data in table["bundle"].to_pylist():
        bundle = pickle.loads(data)  # noqa: S301 (from one of our processes)
        if isinstance(bundle, GPTCLIError):
            raise bundle
        content += bundle
    return content


def _room(cluster: Cluster) -> tuple[int, int]:
    """Return the numbers of workers and of their threads; raise an error if they do not fit."""
    gpus = cluster.gpus_per_worker
    if not (gpus <= 1 or gpus % 1 == 0):  # NaN, too
        raise OptionError("gpus_per_worker", f"must be whole or below 1, not {gpus}")
    nodes = [node["Resources"] for node in library().nodes() if node["Alive"]]
    most = max(int(node.get("CPU", 0)) for node in nodes)
    threads = cluster.threads or max(1, min(most, _THREADS))
    room = 0
    for node in nodes:
        workers = int(node.get("CPU", 0)) // threads
        if gpus:
            workers = min(workers, _fitting(int(node.get("GPU", 0)), gpus))
        room += workers
    worker = f"threads {threads}" + (f" and gpus_per_worker {gpus:g}" if gpus else "")
    if not room:
        raise ResourceError(
            f"no machine of the cluster has room for a worker with {worker}: ask for less"
        )
    if room < (cluster.workers or 1):
        complaint = f"must be at most {room} on this cluster with {worker}, not {cluster.workers}"
        raise OptionError("workers", complaint)
    return cluster.workers or room, threads


def _fitting(gpus: int, per_worker: float) -> int:
    """Return how many workers fit the GPUs of a machine."""
    sharing = int(1 / per_worker + 1e-9)  # workers that share a GPU; 0 if they need more
    return gpus * sharing if sharing else gpus // int(per_worker)


@contextmanager
def _connected(cluster: Cluster) -> Iterator[bool]:
    """Connect to a cluster, or start one for this job; yield whether it was started."""
    ray = library()
    address = cluster.address or os.environ.get("RAY_ADDRESS") or "local"
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    alone = address == "local"
    if alone:
        for name, value in _ALONE.items():
            os.environ.setdefault(name, value)
        options["num_cpus"] = max(cluster.threads or 1, cores())
        options["include_dashboard"] = False
    _check_address(address)  # before `ray.shutdown`, which would also end Ray of the caller
    terminate = signal.getsignal(signal.SIGTERM)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # errors are raised, too
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        with silent_stderr():
            _join(address, options)
        signal.signal(signal.SIGTERM, terminate)  # Ray has installed a handler
        yield alone
    except ray.exceptions.RayError as error:
        raise ResourceError(f"Ray has failed: {_summary(error)}") from error
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Raise an error if nobody answers at an address: Ray would try for minutes."""
    if address.startswith("ray://"):
        cure = "run gpt-cli on a machine of the cluster, for example by `ray job submit`, with the"
        raise OptionError("address", f"ray:// is not supported: {cure} address auto")
    host, _, port = address.rpartition(":")
    try:
        if port.isdecimal():  # not "auto" or "local"
            socket.create_connection((host.strip("[]"), int(port)), timeout=10.0).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise ResourceError(
            f"no Ray cluster answers at {address} ({error}): check the address"
        ) from None


def _join(address: str, options: dict[str, Any]) -> None:
    """Connect to Ray at an address; raise ResourceError if that fails."""
    ray = library()
    try:
        ray.init(address, **options)
    except ConnectionError as error:
        raise ResourceError(
            f"no Ray cluster answers at {address}: `ray start --head` starts one on this machine; "
            "without an address, one is started for this job"
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
    if not lines:
        return repr(error)
    return lines[0] if lines[0] == lines[-1] else f"{lines[0]}: {lines[-1]}"


def library() -> ModuleType:
    """Return Ray; raise ResourceError if it is not installed."""
    return import_extra("a cluster needs Ray", "'ray[data]'", "ray", "ray.data", "ray.exceptions")
