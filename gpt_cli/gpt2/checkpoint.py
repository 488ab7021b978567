"""From safetensors to GPT2. All quirks of the published checkpoints are handled here.

Matrices may be in int8, as `quantize` writes them and `ops.int8` defines them: `NAME.weight` as I8,
and the scales of its blocks as F32, `NAME.weight_scale`: (blocks, n_out), or (n_out, blocks) for
wte and lm_head.
"""

import math
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from gpt_cli.errors import CheckpointError
from gpt_cli.folder.config import GPT2Config
from gpt_cli.folder.names import SCALE, expected_shapes, is_matrix, is_transposed
from gpt_cli.folder.tensors import DTYPES, Tensor, read_header, weight_files
from gpt_cli.gpt2.model import GPT2, MLP, Attention, Block
from gpt_cli.ops import LayerNorm, Linear, Ops, Rows
from gpt_cli.ops.int8 import GROUP, Int8Rows
from gpt_cli.system.machine import cores

# Causal masks, which old versions of transformers stored with the weights.
_MASK_BUFFER = re.compile(r"h\.\d+\.attn\.(masked_)?bias")
_PREFIX = "transformer."  # of the names in files written by save_pretrained
_READERS = 4  # threads at most: copying from the page cache takes most of the time
_COMPARED = 1024  # rows at a time
_MATCHING = "get the weights and the config.json of the same GPT-2"

T = TypeVar("T", bound=Rows)


def load(folder: Path, ops: Ops) -> GPT2:
    """Read the checkpoint in a folder, and place it on the device of `ops`."""
    config, tensors = read(folder)
    return assemble(config, ops, tensors)


def read(folder: Path) -> tuple[GPT2Config, dict[str, Tensor | Int8Rows]]:
    """Return a checkpoint's configuration and its tensors, without reading the tensors' data.

    Raises:
        CheckpointError: a file, a tensor or a field is missing, damaged or not GPT-2's.
    """
    config = GPT2Config.from_folder(folder)
    tensors = find_tensors(folder)
    _check(tensors, config, folder)
    return config, tensors


def find_tensors(folder: Path) -> dict[str, Tensor | Int8Rows]:
    """Return the tensors of a folder by GPT-2's own names, without reading their data."""
    tensors: dict[str, Tensor] = {}
    for path in weight_files(folder):
        for name, tensor in read_header(path):
            name = name.removeprefix(_PREFIX)
            if _MASK_BUFFER.fullmatch(name):
                continue
            if name in tensors:
                raise CheckpointError(
                    f"{path}: duplicate tensor {name}: get a file that was written correctly"
                )
            tensors[name] = tensor
    return _with_scales(tensors, folder)


def stored_dtype(tensors: Mapping[str, Tensor | Int8Rows]) -> str:
    """Return "int8", "bfloat16" or "float16" if all matrices are stored so, else "float32"."""
    matrices = [tensor for name, tensor in tensors.items() if is_matrix(name, tensor.shape)]
    stored = {"I8" if isinstance(each, Int8Rows) else each.dtype for each in matrices}
    return DTYPES[stored.pop()] if len(stored) == 1 else "float32"


def _with_scales(tensors: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor | Int8Rows]:
    """Combine the matrices in int8 with their scales."""
    joined: dict[str, Tensor | Int8Rows] = dict(tensors)
    for name, weight in tensors.items():
        scale = tensors.get(name + SCALE)
        if weight.dtype != "I8" or scale is None or not is_matrix(name, weight.shape):
            continue  # `_check` refuses a matrix or a scale without its counterpart
        transposed = is_transposed(name)
        blocks = list(weight.shape)
        blocks[transposed] = -(-blocks[transposed] // GROUP)
        if (scale.dtype, list(scale.shape)) != ("F32", blocks):
            raise CheckpointError(
                f"{folder}: the tensor {name + SCALE} is {scale.dtype} {list(scale.shape)}, "
                f"but must be F32 {blocks}: make the folder again with `gpt-cli quantize`"
            )
        joined[name] = Int8Rows(weight, scale, transposed)
        del joined[name + SCALE]
    return joined


def memory(config: GPT2Config, dtype: str = "float32") -> dict[str, int]:
    """Return a model's number of parameters, and the bytes of its weights and of a full context."""
    parameters = matrices = 0
    # All layers have the same shapes, and a damaged file may claim a million layers.
    for name, shape in expected_shapes(replace(config, n_layer=1)):
        count = math.prod(shape) * (config.n_layer if name.startswith("h.") else 1)
        parameters += count
        matrices += count if is_matrix(name, shape) else 0
    halves = 2 * matrices
    saved = {"float16": halves, "bfloat16": halves, "int8": 3 * matrices - halves // GROUP}
    weights = 4 * parameters - saved.get(dtype, 0)
    number = 2 if dtype in ("int8", "float16") else 4  # bytes of each, keys and values
    cache = 2 * number * config.n_layer * config.n_embd * config.n_positions
    return {"parameters": parameters, "weights_bytes": weights, "kv_cache_bytes": cache}


def _check(tensors: Mapping[str, Tensor | Int8Rows], config: GPT2Config, folder: Path) -> None:
    """Compare the tensors with those that the configuration requires."""
    known = set()
    for name, shape in expected_shapes(config, head="lm_head.weight" in tensors):
        known.add(name)
        if name not in tensors:
            raise CheckpointError(f"{folder}: the tensor {name} is missing: {_MATCHING}")
        if tensors[name].shape != shape:
            raise CheckpointError(
                f"{folder}: the tensor {name} has the shape {list(tensors[name].shape)}, "
                f"but config.json requires {list(shape)}: {_MATCHING}"
            )
    if unknown := sorted(tensors.keys() - known):
        raise CheckpointError(
            f"{folder}: tensors that GPT-2 does not have, such as "
            f"{', '.join(unknown[:3])}: {_MATCHING}"
        )
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.dtype not in ("F32", "F16", "BF16"):
            raise CheckpointError(
                f"{folder}: the tensor {name} is {tensor.dtype}, which is not supported: "
                "save the model in F32, F16 or BF16"
            )


def assemble(config: GPT2Config, ops: Ops, tensors: Mapping[str, Rows]) -> GPT2:
    """Build a model from tensors on disk or in memory, placed by `ops`.

    A head that is stored although it is tied is used if it differs from wte, as in transformers.
    """
    tensors = without_tied_head(tensors, config)

    def place(name: str) -> Any:
        tensor = tensors[name]
        if is_matrix(name, tensor.shape):
            return ops.place_matrix(tensor, transposed=is_transposed(name))
        return ops.xp.asarray(tensor[:])

    # The largest first, so that the threads end at about the same time.
    names = sorted(tensors, key=lambda name: -math.prod(tensors[name].shape))
    with ThreadPoolExecutor(min(_READERS, cores())) as pool:
        arrays = dict(zip(names, pool.map(place, names), strict=True))

    def linear(name: str) -> Linear:
        return Linear(arrays[f"{name}.weight"], arrays[f"{name}.bias"])

    def layer_norm(name: str) -> LayerNorm:
        weight, bias = arrays[f"{name}.weight"], arrays[f"{name}.bias"]
        return LayerNorm(weight, bias, config.layer_norm_epsilon)

    def block(layer: int) -> Block:
        h = f"h.{layer}"
        scale = 1 / math.sqrt(config.head_size) if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            scale /= layer + 1
        return Block(
            layer_norm(f"{h}.ln_1"),
            Attention(linear(f"{h}.attn.c_attn"), linear(f"{h}.attn.c_proj"), config.n_head, scale),
            layer_norm(f"{h}.ln_2"),
            MLP(linear(f"{h}.mlp.c_fc"), linear(f"{h}.mlp.c_proj"), config.activation_function),
        )

    return GPT2(
        config=config,
        ops=ops,
        wte=arrays["wte.weight"],
        wpe=arrays["wpe.weight"],
        h=tuple(block(layer) for layer in range(config.n_layer)),
        ln_f=layer_norm("ln_f"),
        lm_head=Linear(arrays.get("lm_head.weight", arrays["wte.weight"])),
    )


def without_tied_head(tensors: Mapping[str, T], config: GPT2Config) -> dict[str, T]:
    """Remove a head that is stored although it is tied and equal to wte."""
    kept = dict(tensors)
    wte, head = tensors["wte.weight"], tensors.get("lm_head.weight")
    if head is not None and config.tie_word_embeddings:
        parts = [slice(at, at + _COMPARED) for at in range(0, wte.shape[0], _COMPARED)]
        if all(np.array_equal(wte[part], head[part]) for part in parts):
            del kept["lm_head.weight"]
    return kept
