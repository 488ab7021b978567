"""`gpt-cli info`: describe a model without loading it."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from gpt_cli.cli import options as flags
from gpt_cli.cli.streams import write
from gpt_cli.records import json_line
from gpt_cli.system.machine import format_size

if TYPE_CHECKING:
    from gpt_cli.folder.config import GPT2Config


def info(name: flags.ModelName = None, *, model: flags.Model, as_json: flags.Json = False) -> None:
    """Show the configuration of a model and the memory it needs.

    Examples:
        gpt-cli info tiny
        gpt-cli info gpt2 --json
    """
    from gpt_cli import hub
    from gpt_cli.gpt2.memory import cache_bytes, count_parameters, weights_bytes

    model = model.named(name)
    config = hub.read_config(model.model, **model.lookup)
    folder = hub.find(model.model, model.revision)
    dtype = _dtype_in_memory(config, folder)
    facts = {"name": model.model, "folder": str(folder) if folder else None} | asdict(config)
    facts["dtype"] = dtype
    itemsize = 2 if config.dtype == "int8" else 4  # on a CPU
    sizes = {
        "parameters": count_parameters(config),
        "weights_bytes": weights_bytes(config, dtype),
        "kv_cache_bytes": cache_bytes(config, config.n_positions, itemsize),
    }
    if as_json:
        write(json_line(facts | sizes))
        return
    shown = facts | {"parameters": f"{sizes['parameters']:,}"}
    shown["memory for weights"] = format_size(sizes["weights_bytes"])
    shown["memory for a full context"] = format_size(sizes["kv_cache_bytes"])
    shown["eos_token_id"] = " ".join(map(str, config.eos_token_id))
    write("".join(f"{key:32} {value}\n" for key, value in shown.items() if value is not None))


def _dtype_in_memory(config: "GPT2Config", folder: Path | None) -> str:
    """Return the default dtype of the weights on a CPU."""
    from gpt_cli.gpt2 import checkpoint
    from gpt_cli.ops import held_dtype

    if folder is None or not any(folder.glob("*.safetensors*")):
        return config.dtype  # only the configuration is here
    return held_dtype(checkpoint.stored_dtype(checkpoint.read(folder)[1]), "cpu")
