"""`gpt-cli info`: what a model is, without loading it."""

import json
from typing import Annotated

import typer

from gpt_cli.cli.options import Json, Offline, Quiet, Revision, Verbose
from gpt_cli.cli.text import write


def info(
    name: Annotated[str, typer.Argument(help="As for generate --model.")],
    revision: Revision = None,
    offline: Offline = False,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show a model's configuration, parameters, and the memory that it will take."""
    from dataclasses import asdict

    from gpt_cli import checkpoint, hub
    from gpt_cli.config import GPT2Config

    folder = hub.resolve(name, revision=revision, offline=offline, quiet=quiet)
    config = GPT2Config.from_folder(folder)
    facts = {"name": name, "folder": str(folder)} | asdict(config) | checkpoint.describe(config)
    if as_json:
        write(json.dumps(facts) + "\n")
    else:
        width = max(map(len, facts))
        write("".join(f"{key:{width}}  {value}\n" for key, value in facts.items()))
