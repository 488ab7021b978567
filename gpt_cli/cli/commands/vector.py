"""`gpt-cli vector`: a vector of the difference between two sets of texts, to steer with."""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import typer

from gpt_cli.cli import flags
from gpt_cli.cli.files import check_file
from gpt_cli.cli.output import write, write_json
from gpt_cli.errors import InputError, counted
from gpt_cli.jobs import storage
from gpt_cli.options.declare import option
from gpt_cli.system.atomic import write_file


def vector(
    positive: str = typer.Argument(metavar="POSITIVE", help="Texts to point to, as for score."),
    negative: str = typer.Argument(metavar="NEGATIVE", help="Texts to point away from."),
    *,
    hook: str = option(..., "The name of the hook point.", metavar="HOOK"),
    output: Path = option(..., "The new .safetensors file.", aliases=("-o",), metavar="FILE"),
    pool: Literal["last", "mean"] = option(
        "mean", "Read the activations of the last token of a text, or the mean over its tokens."
    ),
    pca: bool = option(
        False, "Take the first principal component of all texts, not the difference of means."
    ),
    rows: flags.RowFormat,
    special: bool = flags.SPECIAL,
    force: bool = flags.FORCE,
    loading: flags.Loading,
    as_json: bool = flags.JSON,
) -> None:
    """Find the vector from the activations of some texts to those of others.

    A line is a text; rows may also be JSON Lines or tables with "text" and "edits". The accuracy
    is the share of every fifth line on the right side of a vector that was fitted to the other
    lines. The vector in the file is fitted to all lines. Steer with it by --edit 'HOOK+=4*FILE'.

    Examples:
        gpt-cli vector wet dry -m gpt2 --hook blocks.6.attn.hook_z -o v.safetensors
    """
    check_file("--output", output, (".safetensors",), force=force)
    if positive == negative == "-":
        raise InputError("POSITIVE and NEGATIVE cannot both be read from the pipe: name a file")
    engine = loading.load()
    import numpy as np
    from safetensors.numpy import save

    sets = {"positive": _texts(positive, rows), "negative": _texts(negative, rows)}
    direction = engine.vector(
        sets["positive"], sets["negative"], hook, pool=pool, pca=pca, special=special
    )
    write_file(output, save({direction.hook: direction.vector}), replace=force)
    record = {
        "hook": direction.hook,
        "norm": float(np.linalg.norm(direction.vector)),
        "accuracy": direction.accuracy,
        "positive": len(sets["positive"]),
        "negative": len(sets["negative"]),
        "tested": direction.tested,
    }
    if as_json:
        write_json(record)
        return
    text = f"{direction.hook}: norm {record['norm']:.4g}"
    if direction.accuracy is not None:
        tested = counted(direction.tested, "left-out line")
        text += f", accuracy {direction.accuracy:.1%} of {tested}"
    write(f"{text} ({record['positive']:,} positive, {record['negative']:,} negative)\n")


def _texts(name: str, rows: flags.RowFormat) -> Sequence[Mapping[str, Any]]:
    """Return the rows of a file, as `Engine.vector` takes them; raise InputError for a bad row."""
    texts = []
    source = rows.source([name], ("text", "edits", "special"))
    for row in chain.from_iterable(source.rows()):
        if row.error:
            raise InputError(f"{storage.label(name)}, line {row.line}: {row.error}")
        texts.append(row.fields)
    return texts
