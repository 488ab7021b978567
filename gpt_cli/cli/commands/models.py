"""`gpt-cli download`, `quantize`, `models` and `info`: the files of models."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gpt_cli.cli import options as flags
from gpt_cli.cli.output import on_terminal, write, write_json
from gpt_cli.options.declare import option
from gpt_cli.system.machine import format_size

if TYPE_CHECKING:
    from gpt_cli.hub import Description


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

    if as_json or not on_terminal(sys.stdout):
        for model in list_models():
            row = {"name": model.name, "origin": model.origin, "size": model.size}
            row |= {"folder": str(model.folder)}
            write_json(row) if as_json else write("\t".join(map(str, row.values())) + "\n")
        return

    from rich import box, console, table

    listing = table.Table("name", "origin", "size", box=box.SIMPLE_HEAD)
    listing.add_column("folder", overflow="fold")  # never cut, so that it can be copied
    for model in list_models():
        listing.add_row(model.name, model.origin, format_size(model.size), str(model.folder))
    console.Console().print(listing)


def info(
    name: str | None = flags.MODEL_NAME, *, model: flags.Adapted, as_json: bool = flags.JSON
) -> None:
    """Show the configuration of a model, the file of its weights and the memory it needs.

    Examples:
        gpt-cli info tiny
        gpt-cli info gpt2 --json
    """
    from gpt_cli import hub
    from gpt_cli.gpt2.memory import cache_bytes, count_parameters, weights_bytes

    model = model.named(name)
    about = hub.describe(model.model, revision=model.revision, offline=model.offline)
    config, folder, dtype = about.config, about.folder, _held_dtype(about, model)
    facts = {"name": model.model, "folder": str(folder) if folder else None}
    facts |= {"weights": about.weights, "request": about.request, "adapter": model.adapter}
    facts |= asdict(config) | {"dtype": dtype}
    itemsize = 2 if config.dtype == "int8" else 4  # on a CPU
    sizes = {
        "parameters": count_parameters(config),
        "weights_bytes": weights_bytes(config, dtype),
        "kv_cache_bytes": cache_bytes(config, config.n_positions, itemsize),
    }
    if as_json:
        write_json(facts | sizes)
        return
    shown = facts | {
        "parameters": f"{sizes['parameters']:,}",
        "memory for weights": format_size(sizes["weights_bytes"]),
        "memory for a full context": format_size(sizes["kv_cache_bytes"]),
        "eos_token_id": " ".join(map(str, config.eos_token_id)),
    }
    write("".join(f"{key:32} {value}\n" for key, value in shown.items() if value is not None))


def _held_dtype(about: "Description", model: flags.Adapted) -> str:
    """Return the type in which the weights of a model with its adapter are held in memory."""
    if not (about.folder and about.weights):  # only the configuration is here
        return about.config.dtype
    from gpt_cli import hub
    from gpt_cli.gpt2 import checkpoint
    from gpt_cli.gpt2.adapter import merge
    from gpt_cli.ops import held_dtype

    tensors = checkpoint.read(about.folder)[1]
    if model.adapter is not None:
        merge(tensors, *hub.resolve_all(model.model, **model.options))  # it must fit
    return held_dtype(checkpoint.stored_dtype(tensors), "cpu")
