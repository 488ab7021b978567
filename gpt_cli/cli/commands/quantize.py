"""`gpt-cli quantize`: write a model with int8 weights, a quarter of the bytes."""

from pathlib import Path
from typing import Annotated

import typer

from gpt_cli.cli import options as flags
from gpt_cli.cli.streams import write


def quantize(
    name: flags.ModelName = None,
    *,
    to: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="The new folder.")],
    model: flags.Model,
) -> None:
    """Write a model with int8 weights.

    Write it to a new folder, for use with --model, and print the folder.

    Examples:
        gpt-cli quantize tiny -o tiny-int8
        gpt-cli quantize gpt2 -o gpt2-int8
    """
    from gpt_cli import hub
    from gpt_cli.gpt2.quantize import write as write_int8

    model = model.named(name)
    write_int8(hub.resolve(model.model, **model.lookup, quiet=model.quiet), to)
    write(f"{to}\n")
