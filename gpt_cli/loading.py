"""Load a model: from a name to an engine."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpt_cli import hub
from gpt_cli.engine import Engine
from gpt_cli.folder.dtypes import SHORT
from gpt_cli.folder.tensors import unchanged
from gpt_cli.gpt2 import assembly, checkpoint
from gpt_cli.gpt2.memory import weights_bytes
from gpt_cli.ops import check_available, get_ops, ops_for
from gpt_cli.options.arguments import checks_arguments
from gpt_cli.options.edit import AnyEdit
from gpt_cli.system.machine import check_room
from gpt_cli.system.signals import raise_swallowed
from gpt_cli.texts.loaded import LoadedModel
from gpt_cli.texts.speculator import Speculator


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
    name = str(model)
    check_available(device, dtype)  # before any download
    folder, *adapters = hub.resolve_all(
        name, adapter, revision=revision, offline=offline, quiet=quiet
    )
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
        check_room(
            f"the weights of {name} in {ops.dtype} take",
            weights_bytes(opened.config_json, widest),
            ops.free_memory(),
            "choose a smaller model or dtype, or another device",
        )
        start = time.perf_counter()
        config = opened.config  # reads the tokenizer; beside the weights, both would take longer
        network = assembly.assemble(config, ops, weights)
    seconds = time.perf_counter() - start
    raise_swallowed()  # such as while CuPy or pyarrow was imported
    speculator = Speculator(network)
    drafts = speculator if speculate and speculator.pays else None
    loaded = LoadedModel(
        network, opened.tokenizer, drafts, read_classifier=partial(opened.classifier, ops)
    )
    engine = Engine(loaded, name, seconds, adapter)
    return engine.with_edits(edits) if edits else engine


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
