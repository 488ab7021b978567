"""LoRA adapters, merged into the tensors of a checkpoint while they are read.

An adapter changes some matrices by products of low rank, W + scale B A, and replaces other tensors.
"""

import logging
import re
from collections.abc import Mapping, Sequence
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

_PREFIX, _TRANSFORMER = "base_model.model.", "transformer."  # of names in files of adapters
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


def merge(tensors: Mapping[str, Tensor | Int8Rows], source: Path, folder: Path) -> dict[str, Rows]:
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
        replaced, factors = _parts(stored, tensors, config)
        merged = {**tensors, **_changed(factors, tensors, config), **replaced}
    except ValueError as error:
        cure = f"get it again, or use {model or 'the model that it was trained for':.80}"
        raise CheckpointError(f"{weights}: {error}: {cure}") from None
    if "wte.weight" in replaced:  # as after PEFT's merge_and_unload, the head is no longer tied
        merged.setdefault("lm_head.weight", tensors["wte.weight"])
    return merged


def _parts(
    stored: Sequence[tuple[str, Tensor]], model: Mapping[str, Rows], config: LoraConfig
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Return the tensors that replace others, by name, and those of LoRA by module and name."""
    shapes = {"lm_head.weight": model["wte.weight"].shape}
    shapes |= {name: tensor.shape for name, tensor in model.items()}
    replaced: dict[str, Tensor] = {}
    factors: dict[str, dict[str, Tensor]] = {}
    for stored_name, tensor in stored:
        full = stored_name.removeprefix(_PREFIX)
        name = full.removeprefix(_TRANSFORMER)
        lora = _LORA.fullmatch(name)
        if lora and f"{lora[1]}.weight" in shapes:
            group, key = factors.setdefault(lora[1], {}), name
        elif name in shapes and config.saves(f"{_TRANSFORMER}{name}"):
            group, key = replaced, name
            _check(full, tensor, shapes[name])
        else:
            raise ValueError(f"the tensor {full:.80} is neither LoRA of a block nor a saved module")
        if key in group:
            raise ValueError(f"duplicate tensor {full}")
        group[key] = tensor
    for name in shapes:
        if name not in replaced and config.saves(f"{_TRANSFORMER}{name}"):
            raise ValueError(f"the tensor {name} of modules_to_save is missing")
    if not replaced and not factors:
        raise ValueError("it has no tensors")
    return replaced, factors


def _changed(
    factors: Mapping[str, Mapping[str, Tensor]], model: Mapping[str, Rows], config: LoraConfig
) -> dict[str, Rows]:
    """Return the matrices that are changed by products of low rank."""
    ops: Ops = NumPyOps()
    with suppress(InputError):  # of GPT_CLI_OPS=cupy
        ops = get_ops("cpu", "float32")  # the library's products have the same bits everywhere
    changed: dict[str, Rows] = {}
    for module, pair in factors.items():
        matrix = model[f"{module}.weight"]
        n_in, n_out = matrix.shape
        rank, scale = config.rank_and_scale(f"{_TRANSFORMER}{module}")
        left = np.ascontiguousarray(_factor(pair, f"{module}.lora_A.weight", (rank, n_in)).T)
        B = _factor(pair, f"{module}.lora_B.weight", (n_out, rank))
        right = Linear(ops.place_matrix(B, transposed=True))
        changed[f"{module}.weight"] = _Merged(matrix, left, right, np.float32(scale), ops)
    return changed


def _factor(pair: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Array:
    """Return one of the two factors of a change; ValueError if it is missing or wrong."""
    if name not in pair:
        raise ValueError(f"the tensor {name} is missing")
    _check(name, pair[name], shape)
    array = pair[name][:]
    if not np.isfinite(array).all():
        raise ValueError(f"the tensor {name} is not finite")
    return array


def _check(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError if a tensor of an adapter has another shape, or is not supported."""
    if tensor.shape != shape:
        shapes = f"{list(tensor.shape)!s:.80}, not {list(shape)}"
        raise ValueError(f"the tensor {name} has the shape {shapes}")
    if tensor.dtype not in ("F32", "F16", "BF16") or tensor.strides:  # views may repeat numbers
        form = "a view" if tensor.strides else tensor.dtype
        raise ValueError(f"the tensor {name} is {form}, which is not supported")
