"""`gpt-cli quantize`: write a model's int8 form, of which a start reads a quarter of the bytes."""

from pathlib import Path
from typing import Annotated

import typer

from gpt_cli.cli.options import ModelName, Offline, Quiet, Revision, Verbose
from gpt_cli.cli.text import write


def quantize(
    name: ModelName,
    to: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="The new folder.")],
    revision: Revision = None,
    offline: Offline = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write a model with int8 weights.

    It goes into a new folder, which is printed, and which --model takes.
    """
    from gpt_cli import hub
    from gpt_cli.quantize import write as write_int8

    write_int8(hub.resolve(name, revision=revision, offline=offline, quiet=quiet), to)
    write(f"{to}\n")
