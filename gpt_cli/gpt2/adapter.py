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
from gpt_cli.folder.adapter import MERGE, LoraConfig
from gpt_cli.folder.contents import adapter_files
from gpt_cli.folder.tensors import Tensor
from gpt_cli.folder.weight_files import read_tensors
from gpt_cli.ops import Array, Linear, Ops, Rows, get_ops
from gpt_cli.ops.numpy_ops import NumPyOps

# Prefixes of names in files of adapters.
_PREFIX = "base_model.model."
_TRANSFORMER = "transformer."
# Only matrices (n_in, n_out): for LoRA of a tied wte or head, PEFT itself has two results.
_LORA = re.compile(r"(h\.\d+\.(?:attn|mlp)\.c_\w+)\.lora_([AB])\.weight", re.ASCII)

_WTE = "wte.weight"
_HEAD = "lm_head.weight"
_CLASSIFIER = "score.weight"
_COPY = re.compile(r"\.(original_module|modules_to_save)\.")

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


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter's folder, opened; its tensors' data are read when the model's are.

    Attributes:
        path: the file of weights.
        config: its configuration.
        parts: the tensors in the file, by their names in GPT-2.
        classifier_head: the head of a classifier, if it was trained as one.
    """

    path: Path
    config: LoraConfig
    parts: Mapping[str, Tensor]
    classifier_head: Tensor | None

    @property
    def cure(self) -> str:
        """Return what to do if it does not fit the model."""
        model = self.config.base_model_name_or_path or "the model that it was trained for"
        return f"get it again, or use {model:.80}"

    @property
    def vocab_size(self) -> int | None:
        """Return the rows of its own wte, or None if it has none."""
        wte = self.parts.get(_WTE)
        return wte.shape[0] if wte is not None and wte.shape else None

    def check_size(self, size: int, of: str) -> None:
        """Raise CheckpointError if its wte has fewer rows than `of`, which has `size` tokens."""
        if self.vocab_size is not None and self.vocab_size < size:
            rows = f"its wte has {self.vocab_size:,} rows, and {of} {size:,} tokens"
            raise CheckpointError(f"{self.path}: {rows}: {MERGE}")

    def merge(self, tensors: Mapping[str, Rows]) -> dict[str, Rows]:
        """Return the tensors of a checkpoint, changed; CheckpointError if a part does not fit."""
        try:
            return {**tensors, **_changed(self, tensors)}
        except ValueError as error:
            raise CheckpointError(f"{self.path}: {error}") from None


def open_adapter(folder: Path, source: Path) -> Adapter:
    """Open the adapter in a folder, for the model in `source`.

    A note says so if it was trained for a model of another name. CheckpointError if a file is
    missing or damaged, or has more than LoRA.
    """
    names = {path.name for path in folder.iterdir() if path.is_file()}
    weights, description = (folder / name for name in adapter_files(names, str(folder)))
    config = LoraConfig.from_file(description)
    model = config.base_model_name_or_path
    if Path(model).name not in str(source):
        _log.warning("the adapter %s was trained for %.80r, not for %s", folder, model, source)
    try:
        parts = _by_name(read_tensors(weights))
        head = parts.pop(_CLASSIFIER, None)
        if not parts:
            raise ValueError("it has no tensors")
        return Adapter(weights, config, parts, head)
    except ValueError as error:
        raise CheckpointError(f"{weights}: {error}: get it again") from None


def _by_name(stored: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors of an adapter by their names without prefixes; ValueError if one repeats.

    PEFT stores an embedding that is a module to save under three names, of which the plain one has
    the trained values.
    """
    tensors: dict[str, Tensor] = {}
    for stored_name, tensor in stored:
        name = stored_name.removeprefix(_PREFIX).removeprefix(_TRANSFORMER)
        if name in tensors:
            raise ValueError(f"duplicate tensor {name}")
        tensors[name] = tensor
    for name in [name for name in tensors if _COPY.search(name)]:
        if _COPY.sub(".", name) in tensors:
            del tensors[name]
    return tensors


def _changed(adapter: Adapter, model: Mapping[str, Rows]) -> dict[str, Rows]:
    """Return the tensors of the model that are not as before; ValueError if a part does not fit."""
    parts = adapter.parts
    config = adapter.config
    shapes = {name: tensor.shape for name, tensor in model.items()}
    shapes.setdefault(_HEAD, model[_WTE].shape)
    saved = {name: shapes[name] for name in shapes if config.saves(f"{_TRANSFORMER}{name}")}
    # After the vocabulary was resized, PEFT also stores both, and both have its new size.
    rows = (parts.get(_WTE) or model[_WTE]).shape[:1]
    for name in (_WTE, _HEAD):
        if name in parts:
            saved[name] = (*rows, *shapes[_WTE][1:])
    needed = dict(saved)
    scales: dict[str, float] = {}  # of the changes, by module
    for lora in filter(None, map(_LORA.fullmatch, parts)):
        module = lora[1]
        if f"{module}.weight" in shapes:
            n_in, n_out = shapes[f"{module}.weight"]
            rank, scales[module] = config.rank_and_scale(f"{_TRANSFORMER}{module}")
            needed[f"{module}.lora_A.weight"] = (rank, n_in)
            needed[f"{module}.lora_B.weight"] = (n_out, rank)
    _check(parts, needed, adapter.cure)
    ops: Ops = NumPyOps()
    with suppress(InputError):  # of GPT_CLI_OPS=cupy
        ops = get_ops("cpu", "float32")  # the library's products have the same bits everywhere
    changed: dict[str, Rows] = {}
    for module, scale in scales.items():
        A = parts[f"{module}.lora_A.weight"][:]
        B = parts[f"{module}.lora_B.weight"][:]
        if not (np.isfinite(A).all() and np.isfinite(B).all()):
            raise ValueError(f"the tensors of {module} are not finite: {adapter.cure}")
        left = np.ascontiguousarray(A.T)
        right = Linear(ops.place_matrix(B, transposed=True))
        name = f"{module}.weight"
        changed[name] = _Merged(model[name], left, right, np.float32(scale), ops)
    is_untied = _HEAD in model or config.saves(f"{_TRANSFORMER}{_WTE}")
    if _WTE in saved and _HEAD not in parts and is_untied:
        if rows != shapes[_WTE][:1]:
            raise ValueError(f"the tensor {_HEAD} is missing: {adapter.cure}")
        # As after PEFT's merge_and_unload, the head stays what it was.
        changed[_HEAD] = model.get(_HEAD, model[_WTE])
    return changed | {name: parts[name] for name in saved}


def _check(parts: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], cure: str) -> None:
    """Raise ValueError unless the tensors have exactly these names and shapes, and floats.

    `cure` is what to do if they are of another model.
    """
    for name in parts:
        if name not in shapes:
            problem = "neither LoRA of a block nor a saved module"
            raise ValueError(f"the tensor {name:.80} is {problem}: {MERGE}")
    for name, shape in shapes.items():
        if name not in parts:
            raise ValueError(f"the tensor {name} is missing: {cure}")
        tensor = parts[name]
        if tensor.shape != shape:
            lengths = f"{list(tensor.shape)!s:.80}, not {list(shape)}"
            raise ValueError(f"the tensor {name} has the shape {lengths}: {cure}")
        if tensor.dtype not in ("F32", "F16", "BF16") or tensor.strides:  # views repeat numbers
            form = "a view" if tensor.strides else tensor.dtype
            raise ValueError(f"the tensor {name} is {form}, which is not supported: {MERGE}")
