"""`gpt-cli download`: fetch a model before it is needed, or to carry it elsewhere."""

from pathlib import Path
from typing import Annotated

import typer

from gpt_cli.cli import completion
from gpt_cli.cli.options import Quiet, Revision, Verbose
from gpt_cli.cli.text import write


def download(
    name: Annotated[
        str,
        typer.Argument(
            help="gpt2 and its relatives, or owner/name on the Hub.",
            autocompletion=completion.downloads,
        ),
    ],
    revision: Revision = None,
    to: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write a plain folder here, not the Hub's cache."),
    ] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Fetch a model from the Hub; print its folder."""
    from gpt_cli import hub

    write(f"{hub.download(name, revision=revision, to=to, quiet=quiet)}\n")
