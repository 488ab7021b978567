"""`gpt-cli download`, `quantize`, `models` and `info`: the files of models."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gpt_cli.cli import flags
from gpt_cli.cli.output import on_terminal, write, write_json
from gpt_cli.cli.table import Column, Table, facts_table
from gpt_cli.errors import CheckpointError, InputError
from gpt_cli.folder.config import GPT2Config
from gpt_cli.folder.contents import vocabulary
from gpt_cli.options.declare import option
from gpt_cli.system.machine import format_size

if TYPE_CHECKING:
    from gpt_cli.folder.tokenizer import Tokenizer
    from gpt_cli.gpt2.checkpoint import Checkpoint
    from gpt_cli.hub import Description

# Fields of config.json that `info` shows only where they differ from GPT-2's.
_SETTINGS = (
    "n_inner",
    "activation_function",
    "layer_norm_epsilon",
    "scale_attn_weights",
    "scale_attn_by_inverse_layer_idx",
    "tie_word_embeddings",
)
_SHOWN_OTHERWISE = ("problem", "bos_token_id", "eos_token_id")


def _complete_download() -> list[str]:
    from gpt_cli.hub.local import SHORT_NAMES

    return list(SHORT_NAMES)


_DOWNLOADED = typer.Argument(
    metavar="MODEL",
    help="gpt2 and its relatives, or OWNER/NAME on the Hub.",
    autocompletion=_complete_download,
)


def download(
    name: str = _DOWNLOADED,
    *,
    revision: str | None = flags.REVISION,
    to: Path | None = option(
        None, "Write a plain folder instead of the Hub's cache.", metavar="FOLDER"
    ),
    quiet: bool = flags.QUIET,
    verbose: bool = flags.VERBOSE,
) -> None:
    """Download a model from the Hub and print its folder.

    Examples:
        gpt-cli download gpt2
        gpt-cli download distilgpt2 --to here
    """
    from gpt_cli import hub

    write(f"{hub.download(name, revision=revision, to=to, quiet=quiet)}\n")


def quantize(
    name: str | None = flags.MODEL_NAME,
    *,
    output: Path = option(..., "The new folder.", aliases=("-o",), metavar="FOLDER"),
    model: flags.Adapted,
) -> None:
    """Write a model with int8 weights.

    Write it to a new folder, for use with --model, and print the folder.

    Examples:
        gpt-cli quantize tiny -o tiny-int8
        gpt-cli quantize gpt2 -o gpt2-int8
        gpt-cli quantize gpt2 --adapter my-lora -o merged-int8
    """
    from gpt_cli import hub
    from gpt_cli.gpt2.quantize import write as write_int8

    model = model.named(name)
    folder, *adapters = hub.resolve_all(model.model, **model.options)
    write_int8(folder, output, *adapters)
    write(f"{output}\n")


def models(as_json: bool = flags.JSON, verbose: bool = flags.VERBOSE) -> None:
    """List the models that are on this machine.

    Examples:
        gpt-cli models
        gpt-cli models --json
    """
    from gpt_cli.hub.local import list_models

    rows: list[dict[str, object]] = []
    for model in list_models():
        readable = on_terminal(sys.stdout) and not as_json
        size = format_size(model.size) if readable else model.size
        folder = str(model.folder)
        rows.append({"name": model.name, "origin": model.origin, "size": size, "folder": folder})
    if as_json:
        write_json(*rows)
    else:
        table = Table(Column("name"), Column("origin"), Column("size"), Column("folder"))
        write(table.whole(row.values() for row in rows))


def info(
    name: str | None = flags.MODEL_NAME, *, model: flags.Adapted, as_json: bool = flags.JSON
) -> None:
    """Show whether a model works, its weights, tokenizer and configuration, and its memory.

    Before a download, it says this from config.json and the list of files. If the model does not
    work, the exit code is 4.

    Examples:
        gpt-cli info tiny
        gpt-cli info gpt2 --json
    """
    from gpt_cli import hub
    from gpt_cli.folder.dtypes import WEIGHT_TYPES
    from gpt_cli.gpt2.memory import cache_bytes, count_parameters, weights_bytes

    model = model.named(name)
    about = hub.describe(model.model, revision=model.revision, offline=model.offline)
    opened = _opened(about, model)
    if opened and model.adapter:  # it may have a vocabulary and a tokenizer of its own
        files_there = {path.name for path in opened.tokenizer_folder.iterdir()}
        about = replace(
            about,
            config=opened.config,
            tokenizer=opened.tokenizer,
            vocabulary=vocabulary(files_there) or (),
        )
    config = about.config
    dtype = _held_dtype(opened) if opened else config.dtype
    itemsize = WEIGHT_TYPES[config.dtype].cache_itemsize
    files = ", ".join(about.vocabulary)
    facts = {
        "name": model.model,
        "folder": str(about.folder) if about.folder else None,
        "problem": about.problem,
        "weights": about.weights,
        "tokenizer": f"{about.tokenizer.kind} ({files})" if about.tokenizer else files,
        "adapter": model.adapter,
        **asdict(config),
        "dtype": dtype,
    }
    sizes = {
        "parameters": count_parameters(config),
        "weights_bytes": weights_bytes(config, dtype),
        "kv_cache_bytes": cache_bytes(config, config.n_positions, itemsize),
    }
    if as_json:
        write_json(facts | sizes)
    else:
        write(_as_text(facts, sizes, about.tokenizer))
    if about.problem:
        raise typer.Exit(CheckpointError.exit_code)


def _as_text(facts: dict[str, Any], sizes: dict[str, int], tokenizer: "Tokenizer | None") -> str:
    """Return the facts as text; of the settings, only those that differ from GPT-2's."""
    usual = asdict(GPT2Config())
    if facts["n_inner"] is not None:
        usual["n_inner"] = 4 * facts["n_embd"]
    changed = [f"{name} {facts[name]}" for name in _SETTINGS if facts[name] != usual[name]]
    works = f"no: {facts['problem']}" if facts["problem"] else "yes"
    hidden = {*_SETTINGS, *_SHOWN_OTHERWISE}
    shown = {"name": facts["name"], "works": works}
    shown |= {name: value for name, value in facts.items() if name not in hidden}
    shown["unlike GPT-2"] = ", ".join(changed)
    if tokenizer is not None:
        start = facts["bos_token_id"]
        shown["start token"] = _named([] if start is None else [start], tokenizer)
        shown["end token"] = _named(facts["eos_token_id"], tokenizer)
    shown["parameters"] = f"{sizes['parameters']:,}"
    shown["memory for weights"] = format_size(sizes["weights_bytes"])
    shown["memory for a full context"] = format_size(sizes["kv_cache_bytes"])
    return facts_table({name: value for name, value in shown.items() if value})


def _named(ids: Sequence[int], tokenizer: "Tokenizer") -> str:
    """Return ids with the names of their tokens, if they have one."""
    names = []
    for id in ids:
        try:
            names.append(f"{id} {tokenizer.token_name(id)!r}")
        except InputError:
            names.append(str(id))
    return ", ".join(names) or "none"


def _opened(about: "Description", model: flags.Adapted) -> "Checkpoint | None":
    """Open the model with its adapter, if its weights are on this machine."""
    if not (about.folder and about.weights):
        return None
    from gpt_cli import hub
    from gpt_cli.gpt2.checkpoint import open_checkpoint

    opened = open_checkpoint(*hub.resolve_all(model.model, **model.options))
    _ = opened.tensors  # an adapter must fit
    return opened


def _held_dtype(opened: "Checkpoint") -> str:
    """Return the type of the weights in memory, with the adapter merged."""
    from gpt_cli.folder.dtypes import SHORT
    from gpt_cli.ops import ops_for

    stored = opened.stored_dtype
    return ops_for(stored, "cpu").dtype if stored in SHORT else stored
