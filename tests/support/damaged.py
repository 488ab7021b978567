"""Checkpoints with damaged tensors."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from support.checkpoints import CONFIG, Stored, safetensors_bytes, stored_tensors

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def tensors(change: Callable[[dict[str, Stored]], object]) -> Callable[[Path], object]:
    """Write the weights again with some tensors changed."""

    def damage(folder: Path) -> None:
        stored = stored_tensors(CONFIG)
        change(stored)
        (folder / WEIGHTS).write_bytes(safetensors_bytes(stored))

    return damage


def tensor(name: str, shape: tuple[int, ...], dtype: str = "F32", data: bytes | None = None):
    size = {"F64": 8, "F32": 4, "F8_E4M3": 1}[dtype] * math.prod(shape)
    return tensors(lambda all: all.update({name: Stored(dtype, shape, data or bytes(size))}))


def poison(value: float) -> Callable[[Path], object]:
    """Put a value in the middle of the second layer's weights."""
    shape = (32, 128)
    numbers = np.zeros(shape, "<f4")
    numbers[7, 9] = value
    return tensor("h.1.mlp.c_fc.weight", shape, data=numbers.tobytes())
