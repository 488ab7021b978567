"""`gpt-cli activations`: the values inside the model, for each row of a file."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gpt_cli import jobs
from gpt_cli.cli import flags, inputs
from gpt_cli.cli.jobs import run
from gpt_cli.cli.output import on_terminal, write, write_json
from gpt_cli.errors import InputError
from gpt_cli.options.declare import Declared, option


@dataclass(kw_only=True, eq=False, repr=False)
class Values(Declared):
    """The values to take out, and their form."""

    hook: Sequence[str] | None = option(
        None,
        "A hook point, or a pattern such as '*.hook_resid_post' for all layers; repeatable.",
        metavar="GLOB",
    )
    hooks: bool = option(False, "List the hook points of the model, or those of --hook, instead.")
    pool: Literal["none", "last", "mean", "word"] = option(
        "none", "Keep all tokens, the last one, the mean of a text, or the mean of each word."
    )
    bos: bool = option(False, "Put the start token before texts; a mean leaves it out.")
    special: bool = flags.SPECIAL
    out_dtype: Literal["float32", "float16"] = option("float32", "Type of the arrays in OUT.")


@dataclass(kw_only=True, eq=False, repr=False)
class ArrayFiles(flags.RowFiles):
    """The input format and the output of a command with arrays per row."""

    output: str | None = option(
        None,
        "Write to a new FOLDER/, in parts, or to one file that ends with .safetensors, .npz or, "
        "with --pool, .parquet; local or a URL such as s3://...",
        aliases=("-o",),
        metavar="OUT",
        callback=flags.dash_as_none,
    )


def activations(
    files: list[str] | None = flags.argument("[IN]...", "Rows, as for batch, with a text each"),
    *,
    from_files: Sequence[str] | None = flags.ROWS_FILES,
    values: Values,
    template: str | None = flags.TEMPLATE,
    rows: ArrayFiles,
    loading: flags.Loading,
    placement: flags.Placement,
    as_json: bool = option(
        False, "Print the list as JSON, one object per line.", flag="--json", needs="--hooks"
    ),
) -> None:
    """Write the values inside the model for each row of IN: its activations.

    The hook points have the names of TransformerLens, and the weights are used as published. A row
    is a line, or a "text" of JSON Lines or a table. An array of OUT has the values of one hook
    point for the tokens, words or means of all rows; "row" has the indices of the rows.

    With --hooks, list the names, their shapes for a text of T tokens, and the bytes of a token in
    OUT; 48*T means 48 bytes for each pair of a token and one of the T tokens.

    Examples:
        gpt-cli activations -m tiny --hooks
        echo 'The fox ran.' | gpt-cli activations -m tiny --hook hook_embed -o new/
        echo Hi | gpt-cli activations -m tiny --hook '*post' --pool last -o n.npz
    """
    if values.hooks:
        _list_hooks(loading, values, as_json=as_json)
        return
    if not values.hook:
        raise InputError("no hook point: give --hook NAME; --hooks lists the names")
    if rows.output is None:
        raise InputError("no output: add --output FOLDER/, or a FILE such as values.npz")
    files = inputs.files_or_pipe(files, from_files, "no text: give a FILE", quiet=loading.quiet)
    pool = None if values.pool == "none" else values.pool
    filled = inputs.read_template(template)
    task = jobs.Activations(
        tuple(values.hook), pool, values.bos, filled, values.out_dtype, values.special
    )
    run(task, files, rows, loading, placement)


def _list_hooks(model: flags.Model, values: Values, *, as_json: bool) -> None:
    """Write the hook points of a model, or those that match, with their shapes and sizes."""
    from gpt_cli import hub
    from gpt_cli.gpt2.hooks import has_key_axis, hook_shapes, select_hooks

    about = hub.describe(model.model, revision=model.revision, offline=model.offline)
    shapes = hook_shapes(about.config)
    itemsize = {"float32": 4, "float16": 2}[values.out_dtype]
    names = select_hooks(about.config, values.hook or ["*"])
    width = max(map(len, names))
    if on_terminal(sys.stdout) and not as_json:
        write(f"{'name':{width}}  {'shape':14}  bytes per token\n")
    for name in names:
        shape = shapes[name]
        size = itemsize * math.prod(n for n in shape if n != "T")
        per_key = has_key_axis(name)
        if as_json:
            unit = "bytes_per_token_and_key" if per_key else "bytes_per_token"
            write_json({"name": name, "shape": list(shape), unit: size})
        else:
            shown = f"({', '.join(map(str, shape))})"
            factor = "*T" if per_key else ""
            write(f"{name:{width}}  {shown:14}  {size}{factor}\n")
