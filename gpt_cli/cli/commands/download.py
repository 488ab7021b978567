"""`gpt-cli download`: download a model before it is needed."""

from pathlib import Path
from typing import Annotated

import typer

from gpt_cli.cli import completion
from gpt_cli.cli import options as flags
from gpt_cli.cli.streams import write
from gpt_cli.options.declare import PATH, option


def download(
    name: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="gpt2 and its relatives, or OWNER/NAME on the Hub.",
            autocompletion=completion.downloads,
        ),
    ],
    *,
    revision: flags.Revision = None,
    to: Path | None = option(
        None, "Write a plain folder instead of the Hub's cache.", kind=PATH, metavar="FOLDER"
    ),
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
) -> None:
    """Download a model from the Hub and print its folder.

    Examples:
        gpt-cli download gpt2
        gpt-cli download distilgpt2 --to here
    """
    from gpt_cli import hub

    write(f"{hub.download(name, revision=revision, to=to, quiet=quiet)}\n")
