"""`gpt-cli info`: what a model is, without loading it."""

import json

from gpt_cli.cli.options import Json, ModelName, Offline, Revision, Verbose
from gpt_cli.cli.text import write


def info(
    name: ModelName,
    revision: Revision = None,
    offline: Offline = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Show what a model is and the memory it takes."""
    from dataclasses import asdict

    from gpt_cli import checkpoint, hub

    config = hub.read_config(name, revision=revision, offline=offline)
    folder = hub.find(name, revision)
    facts = {"name": name, "folder": str(folder) if folder else None} | asdict(config)
    sizes = checkpoint.memory(config, config.dtype)
    if as_json:
        write(json.dumps(facts | sizes, ensure_ascii=False) + "\n")
        return
    shown = facts | {"parameters": f"{sizes['parameters']:,}"}
    shown["memory for weights"] = hub.format_size(sizes["weights_bytes"])
    shown["memory for a full context"] = hub.format_size(sizes["kv_cache_bytes"])
    shown["eos_token_id"] = " ".join(map(str, config.eos_token_id))
    write("".join(f"{key:32} {value}\n" for key, value in shown.items() if value is not None))
