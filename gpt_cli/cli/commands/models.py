"""`gpt-cli models`: list the models that are available without a network."""

import sys

from gpt_cli.cli.options import Json, Verbose
from gpt_cli.cli.streams import on_terminal, write
from gpt_cli.records import json_line
from gpt_cli.system.machine import format_size


def models(as_json: Json = False, verbose: Verbose = False) -> None:
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
            write(json_line(row) if as_json else "\t".join(map(str, row.values())) + "\n")
        return

    from rich import box, console, table

    listing = table.Table("name", "origin", "size", box=box.SIMPLE_HEAD)
    listing.add_column("folder", overflow="fold")  # never cut, so that it can be copied
    for model in list_models():
        listing.add_row(model.name, model.origin, format_size(model.size), str(model.folder))
    console.Console().print(listing)
