"""Load models: from names to engines."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gpt_cli import hub
from gpt_cli.engine import Engine
from gpt_cli.errors import InputError
from gpt_cli.folder.dtypes import SHORT
from gpt_cli.folder.tensors import unchanged
from gpt_cli.gpt2 import assembly, checkpoint
from gpt_cli.gpt2.checkpoint import Checkpoint
from gpt_cli.gpt2.memory import weights_bytes
from gpt_cli.ops import Ops, Rows, check_available, get_ops, ops_for
from gpt_cli.options.arguments import checks_arguments
from gpt_cli.options.declare import NamedOptionError, OptionError
from gpt_cli.options.edit import AnyEdit
from gpt_cli.system.machine import check_room
from gpt_cli.system.signals import raise_swallowed
from gpt_cli.texts.loaded import LoadedModel
from gpt_cli.texts.speculator import Speculator

_OF_ONE_MODEL = ("revision", "adapter", "bos_token", "edits")


@checks_arguments()
def load(
    model: str | Path = "gpt2",
    *,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    offline: bool = False,
    quiet: bool = True,
    threads: int | None = None,
    speculate: bool = True,
    adapter: str | None = None,
    bos_token: str | int | None = None,
    edits: Sequence[AnyEdit] = (),
) -> Engine:
    """Load a model; a GPTCLIError says what to do.

    Args:
        model: "tiny" (bundled), a short name such as "gpt2", a Hub id "owner/name", or a folder.
        device: "cpu", "cuda" for an NVIDIA GPU, or "auto" for a GPU if one can be used. Both give
            the same bits, unless NumPy computes.
        dtype: of the weights: "float32"; "bfloat16" or "float16", half of the bytes; "int8", a
            quarter of the bytes; or "auto": as stored. Weights that are stored otherwise are
            rounded when they are read. 16-bit weights are only read in 16 bits: sums and products
            are those of float32.
        revision: a branch, tag or commit on the Hub.
        offline: do not ask the Hub.
        quiet: show no progress of a download.
        threads: to compute with; by default GPT_CLI_THREADS, or the number of cores that this
            process may use. NumPy reads another number, OMP_NUM_THREADS.
        speculate: generate faster where that saves time, with equal results. It may take a quarter
            of the memory of float32 weights.
        adapter: a folder or a Hub id with a LoRA adapter of PEFT, to be merged into the weights.
        bos_token: the start token, a name or an id, of a model that has none or a wrong one.
        edits: changes of values in the forward pass: see `Engine.with_edits`.
    """
    opening = _opened(
        str(model),
        device=device,
        dtype=dtype,
        revision=revision,
        offline=offline,
        quiet=quiet,
        threads=threads,
        adapter=adapter,
        bos_token=bos_token,
    )
    with opening as opened:
        _check_room([opened])
        return opened.load(speculate=speculate, edits=edits)


def load_all(
    models: Sequence[str],
    *,
    dtype: str = "auto",
    speculate: bool = True,
    edits: Sequence[AnyEdit] = (),
    **options: Any,
) -> dict[str, Engine]:
    """Load models if there is room for all of them; return them by their names.

    The name of a folder is without its path. Raise InputError if two models have the same name,
    ResourceError if there is not enough memory for all, and the errors of `load`.

    Args:
        models: as for `load`, or NAME@DTYPE.
        dtype: of the models without one.
        speculate: as for `load`.
        edits: as for `load`.
        options: others of `load`. With several models, there may be none of `revision`, `adapter`,
            `bos_token` and `edits`.
    """
    for option, value in {"edits": edits, **options}.items():
        if option in _OF_ONE_MODEL and value and len(models) > 1:
            raise OptionError(option, "is for a single model: leave it out with several")
    named: dict[str, tuple[str, str, str]] = {}
    for written in models:
        model, at, own_dtype = _split_dtype(written)
        name = f"{hub.shown_name(model)}{at}{own_dtype}"
        if name in named:
            raise InputError(f"two models have the name {name}: leave one out, or rename a folder")
        named[name] = written, model, own_dtype
    opened: dict[str, _Opened] = {}
    with ExitStack() as files:
        for name, (written, model, own_dtype) in named.items():
            opening = _opened(model, dtype=own_dtype or dtype, **options)
            try:
                opened[name] = files.enter_context(opening)
            except NamedOptionError as error:
                if own_dtype and error.args[0] == "dtype":  # name what was written
                    error.args = "model", f"{written}: the dtype {error.args[1]}"
                raise
        _check_room([*opened.values()])
        return {
            name: model.load(speculate=speculate, edits=edits) for name, model in opened.items()
        }


def _split_dtype(written: str) -> tuple[str, str, str]:
    """Return the parts of NAME@DTYPE; the last two are "" if there is no dtype."""
    name, at, dtype = written.rpartition("@")
    if not name or os.path.exists(written):  # noqa: PTH110 (never raises)
        return written, "", ""
    return name, at, dtype


@dataclass(frozen=True, eq=False)
class _Opened:
    """A model whose files are open, and whose weights are not read yet."""

    name: str
    adapter: str | None  # its name
    checkpoint: Checkpoint
    weights: Mapping[str, Rows]
    ops: Ops
    bytes: int  # of the weights in memory

    def load(self, *, speculate: bool, edits: Sequence[AnyEdit]) -> Engine:
        """Read the weights."""
        start = time.perf_counter()
        with assembly.placing(self.checkpoint.config_json, self.ops, self.weights) as wait:
            config = self.checkpoint.config  # reads the tokenizer while the weights are read
            network = assembly.build(config, self.ops, wait())
        seconds = time.perf_counter() - start
        raise_swallowed()  # such as while CuPy or pyarrow was imported
        speculator = Speculator(network)
        drafts = speculator if speculate and speculator.pays else None
        read_classifier = partial(self.checkpoint.classifier, self.ops)
        loaded = LoadedModel(
            network, self.checkpoint.tokenizer, drafts, read_classifier=read_classifier
        )
        engine = Engine(loaded, self.name, seconds, self.adapter)
        return engine.with_edits(edits) if edits else engine


@contextmanager
def _opened(
    name: str,
    *,
    dtype: str,
    device: str = "auto",
    threads: int | None = None,
    adapter: str | None = None,
    bos_token: str | int | None = None,
    **where: Any,
) -> Iterator[_Opened]:
    """Open the files of a model; raise CheckpointError on exit if they have changed since.

    The keywords are those of `load`; `where` are those of `hub.resolve_all`.
    """
    check_available(device, dtype)  # before any download
    folder, *adapters = hub.resolve_all(name, adapter, **where)
    with unchanged(folder, *adapters):
        opened = checkpoint.open_checkpoint(folder, *adapters, bos_token=bos_token)
        if dtype == "auto":
            ops = ops_for(opened.stored_dtype, device, threads, mixed=bool(adapters))
        else:
            ops = get_ops(device, dtype, threads)
        weights = opened.tensors
        if dtype in SHORT:
            weights = checkpoint.rounded(weights, dtype, name)
        # Matrices that an adapter changes are not in 16 bits, unless they are rounded.
        widest = "float32" if adapters and dtype == "auto" else ops.dtype
        size = weights_bytes(opened.config_json, widest)
        yield _Opened(name, adapter, opened, weights, ops, size)


def _check_room(models: Sequence[_Opened]) -> None:
    """Raise ResourceError if there is not enough memory for all of these models."""
    names = " and ".join(f"{model.name} in {model.ops.dtype}" for model in models)
    check_room(
        f"the weights of {names} take",
        sum(model.bytes for model in models),
        models[0].ops.free_memory(),  # all are on one device
        "choose a smaller model or dtype, or another device",
    )


def load_reader(
    model: str,
    *,
    revision: str | None = None,
    offline: bool = False,
    adapter: str | None = None,
    bos_token: str | int | None = None,
    edits: Sequence[AnyEdit] = (),
    **_: Any,
) -> Engine:
    """Return an engine that reads texts and options as that of `load`, and cannot compute.

    Its weights stay in their files. The keywords are those of `load`; most change nothing here.
    """
    folder, *adapters = hub.resolve_all(
        model, adapter, revision=revision, offline=offline, quiet=True
    )
    opened = checkpoint.open_checkpoint(folder, *adapters, bos_token=bos_token)
    network = assembly.build(opened.config, get_ops("cpu", "float32"), opened.stored_tensors)
    engine = Engine(LoadedModel(network, opened.tokenizer), model, 0.0, adapter)
    return engine.with_edits(edits) if edits else engine
