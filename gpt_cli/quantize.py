"""A checkpoint -> the same in int8, written as `checkpoint` reads it."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from gpt_cli import checkpoint, hub
from gpt_cli.atomic import new_folder
from gpt_cli.config import INT8
from gpt_cli.errors import CheckpointError, InputError, ResourceError
from gpt_cli.files import read_small
from gpt_cli.ops import Array, Rows
from gpt_cli.ops.int8 import quantize


def write(source: Path, to: Path) -> None:
    """Write the int8 form of the checkpoint in a folder into a new one, which appears when whole.

    Raises:
        CheckpointError: the checkpoint is damaged.
        InputError: it is in int8 already, or `to` is no new or empty folder.
        ResourceError: the disk is full or cannot be written.
    """
    config, tensors = checkpoint.read(source)
    if config.dtype == "int8":
        raise InputError(f"{source} is in int8 already")
    others = hub.other_files(source)
    if missing := [file.name for file in others if not file.is_file()]:
        raise CheckpointError(f"{source} has no {' and no '.join(missing)}")
    try:
        with new_folder(to.resolve()) as folder:
            described = json.loads(read_small(source / "config.json"))
            described["quantization_config"] = INT8
            (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")
            for file in others:
                shutil.copyfile(file, folder / file.name)
            rounded = dict(_rounded(checkpoint.without_tied_head(tensors, config), source))
            save_file(rounded, folder / "model.safetensors", {"format": "pt"})
            (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ResourceError(f"cannot write {to}: {reason}; name another folder") from error


def _rounded(tensors: Mapping[str, Rows], source: Path) -> Iterator[tuple[str, Array]]:
    """Yield what the file holds: int8 matrices with their scales, and the rest as it is."""
    for name, tensor in tensors.items():
        if checkpoint.is_matrix(name, tensor.shape):
            int8 = quantize(tensor, transposed=checkpoint.is_transposed(name))
            arrays = {name: int8.weight[:], name + checkpoint.SCALE: int8.scale[:]}
        else:
            arrays = {name: tensor[:]}
        if not all(np.isfinite(array).all() for array in arrays.values()):
            raise CheckpointError(
                f"{source}: the tensor {name} is not finite: the weights are damaged"
            )
        yield from arrays.items()
