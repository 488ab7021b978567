"""LoRA adapters, merged into the tensors of a checkpoint while they are read.

An adapter changes some matrices by products of low rank, W + scale B A, and replaces other tensors.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpt_cli.errors import CheckpointError, InputError
from gpt_cli.folder.adapter import LoraConfig
from gpt_cli.folder.contents import adapter_files
from gpt_cli.folder.tensors import Tensor
from gpt_cli.folder.weight_files import read_tensors
from gpt_cli.ops import Array, Linear, Ops, Rows, get_ops
from gpt_cli.ops.int8 import Int8Rows
from gpt_cli.ops.numpy_ops import NumPyOps
from gpt_cli.options.declare import OptionError

# Prefixes of names in files of adapters.
_PREFIX = "base_model.model."
_TRANSFORMER = "transformer."
# Only matrices (n_in, n_out): for LoRA of a tied wte or head, PEFT itself has two results.
_LORA = re.compile(r"(h\.\d+\.(?:attn|mlp)\.c_\w+)\.lora_([AB])\.weight", re.ASCII)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Merged:
    """A matrix (n_in, n_out) plus its change; as `Rows`, both are added when rows are read."""

    matrix: Rows
    left: Array  # (n_in, r)
    right: Linear  # (r, n_out)
    scale: np.float32
    ops: Ops

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the lengths of the axes."""
        return self.matrix.shape

    def __getitem__(self, rows: slice, /) -> Array:
        """Return a range of rows."""
        with np.errstate(over="ignore", invalid="ignore"):  # infinities are detected in the results
            return self.matrix[rows] + self.scale * self.ops.linear(self.left[rows], self.right)


def merge(tensors: Mapping[str, Rows], source: Path, folder: Path) -> dict[str, Rows]:
    """Return the tensors of the checkpoint in `source`, changed by the adapter in `folder`.

    CheckpointError if a file of the adapter is missing, damaged or not for this model; OptionError
    if the weights are in int8.
    """
    if any(isinstance(tensor, Int8Rows) for tensor in tensors.values()):
        cure = "quantize the model with the adapter instead (gpt-cli quantize --adapter)"
        raise OptionError("adapter", f"{folder} cannot change int8 weights: {cure}")
    names = {path.name for path in folder.iterdir() if path.is_file()}
    weights, description = (folder / name for name in adapter_files(names, str(folder)))
    config = LoraConfig.from_file(description)
    model = config.base_model_name_or_path
    if Path(model).name not in str(source):
        _log.warning("the adapter %s was trained for %.80r, not for %s", folder, model, source)
    stored = read_tensors(weights)
    try:
        return {**tensors, **_changed(_by_name(stored), tensors, config)}
    except ValueError as error:
        cure = f"get it again, or use {model or 'the model that it was trained for':.80}"
        raise CheckpointError(f"{weights}: {error}: {cure}") from None


def _by_name(stored: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors of an adapter by their names without prefixes; ValueError if none."""
    tensors: dict[str, Tensor] = {}
    for stored_name, tensor in stored:
        name = stored_name.removeprefix(_PREFIX).removeprefix(_TRANSFORMER)
        if name in tensors:
            raise ValueError(f"duplicate tensor {name}")
        tensors[name] = tensor
    if not tensors:
        raise ValueError("it has no tensors")
    return tensors


def _changed(
    parts: Mapping[str, Tensor], model: Mapping[str, Rows], config: LoraConfig
) -> dict[str, Rows]:
    """Return the tensors of the model that are not as before; ValueError if a part does not fit."""
    shapes = {name: tensor.shape for name, tensor in model.items()}
    shapes.setdefault("lm_head.weight", model["wte.weight"].shape)
    saved = {name: shapes[name] for name in shapes if config.saves(f"{_TRANSFORMER}{name}")}
    needed = dict(saved)
    scales: dict[str, float] = {}  # of the changes, by module
    for lora in filter(None, map(_LORA.fullmatch, parts)):
        module = lora[1]
        if f"{module}.weight" in shapes:
            n_in, n_out = shapes[f"{module}.weight"]
            rank, scales[module] = config.rank_and_scale(f"{_TRANSFORMER}{module}")
            needed[f"{module}.lora_A.weight"] = (rank, n_in)
            needed[f"{module}.lora_B.weight"] = (n_out, rank)
    _check(parts, needed)
    ops: Ops = NumPyOps()
    with suppress(InputError):  # of GPT_CLI_OPS=cupy
        ops = get_ops("cpu", "float32")  # the library's products have the same bits everywhere
    changed: dict[str, Rows] = {}
    for module, scale in scales.items():
        A = parts[f"{module}.lora_A.weight"][:]
        B = parts[f"{module}.lora_B.weight"][:]
        if not (np.isfinite(A).all() and np.isfinite(B).all()):
            raise ValueError(f"the tensors of {module} are not finite")
        left = np.ascontiguousarray(A.T)
        right = Linear(ops.place_matrix(B, transposed=True))
        name = f"{module}.weight"
        changed[name] = _Merged(model[name], left, right, np.float32(scale), ops)
    if "wte.weight" in saved:  # as after PEFT's merge_and_unload, the head is no longer tied
        changed["lm_head.weight"] = model.get("lm_head.weight", model["wte.weight"])
    return changed | {name: parts[name] for name in saved}


def _check(parts: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError unless the tensors have exactly these names and shapes, and floats."""
    for name in parts:
        if name not in shapes:
            raise ValueError(f"the tensor {name:.80} is neither LoRA of a block nor a saved module")
    for name, shape in shapes.items():
        if name not in parts:
            raise ValueError(f"the tensor {name} is missing")
        tensor = parts[name]
        if tensor.shape != shape:
            lengths = f"{list(tensor.shape)!s:.80}, not {list(shape)}"
            raise ValueError(f"the tensor {name} has the shape {lengths}")
        if tensor.dtype not in ("F32", "F16", "BF16") or tensor.strides:  # views repeat numbers
            form = "a view" if tensor.strides else tensor.dtype
            raise ValueError(f"the tensor {name} is {form}, which is not supported")
