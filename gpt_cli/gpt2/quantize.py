"""Convert a checkpoint to int8, in the format that `checkpoint` reads."""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from gpt_cli.errors import CheckpointError, InputError, ResourceError
from gpt_cli.folder.config import INT8, SCALE, GPT2Config, is_matrix, is_transposed
from gpt_cli.folder.contents import CONFIG, GENERATION_CONFIG, tokenizer_files
from gpt_cli.gpt2 import assembly, checkpoint
from gpt_cli.gpt2.checkpoint import HEAD
from gpt_cli.ops import Array, Rows
from gpt_cli.ops.int8 import quantize
from gpt_cli.system.atomic import new_folder
from gpt_cli.system.files import read_json


def write(source: Path, to: Path, adapter: Path | None = None) -> None:
    """Write a checkpoint in int8 to a new or empty folder, which appears when it is complete.

    The adapter in a folder is merged into it.
    """
    opened = checkpoint.open_checkpoint(source, adapter)
    config = opened.config_json
    if config.dtype == "int8":
        raise InputError(f"{source} is in int8 already: use it as it is")
    tensors = opened.tensors
    present = {file.name for file in opened.tokenizer_folder.iterdir() if file.is_file()}
    names = tokenizer_files(present)
    if missing := [name for name in names if name not in present]:
        raise CheckpointError(f"{source} has no {' and no '.join(missing)}: get the whole model")
    copied = [opened.tokenizer_folder / name for name in names]
    if (source / GENERATION_CONFIG).is_file():
        copied.append(source / GENERATION_CONFIG)
    try:
        with new_folder(to) as folder:
            described = _described(source, config)
            text = json.dumps(described, indent=2) + "\n"
            (folder / "config.json").write_bytes(text.encode())  # the same on every system
            for path in copied:
                shutil.copyfile(path, folder / path.name)
            rounded = dict(_rounded(assembly.without_tied_head(tensors, config), source))
            if opened.classifier_head is not None:
                rounded[HEAD] = opened.classifier_head[:]
            save_file(rounded, folder / "model.safetensors", {"format": "pt"})
            (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)
    except (OSError, SafetensorError) as error:
        # safetensors has only the number of an error of the system: "... (os error 28)".
        number = re.search(r"\(os error (\d+)\)", str(error))
        words = os.strerror(int(number[1])) if number else error
        reason = getattr(error, "strerror", None) or words
        raise ResourceError(f"cannot write {to}: {reason}; give another folder") from error


def _described(source: Path, config: GPT2Config) -> dict[str, Any]:
    """Return the content of a config.json for the int8 weights of a checkpoint."""
    path = source / CONFIG
    fields = asdict(config)
    described = read_json(path) if path.is_file() else fields
    del fields["dtype"]
    return described | {"vocab_size": config.vocab_size, "quantization_config": INT8}


def _rounded(tensors: Mapping[str, Rows], source: Path) -> Iterator[tuple[str, Array]]:
    """Yield the names and arrays of the new file: int8 matrices with scales, the rest unchanged."""
    for name, stored in tensors.items():
        tensor = assembly.without_gaps(stored)
        if is_matrix(name, tensor.shape):
            int8 = quantize(tensor, transposed=is_transposed(name))
            arrays = {name: int8.weight[:], name + SCALE: int8.scale[:]}
        else:
            arrays = {name: tensor[:]}
        if not all(np.isfinite(array).all() for array in arrays.values()):
            raise CheckpointError(
                f"{source}: the tensor {name} is not finite, so it is damaged: get it again"
            )
        yield from arrays.items()
