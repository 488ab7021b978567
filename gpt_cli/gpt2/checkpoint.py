"""From files of weights to GPT2. All quirks of the published checkpoints are handled here.

Matrices may be in int8, as `quantize` writes them and `ops.int8` defines them: `NAME.weight` as I8,
and the scales of its groups as F32, `NAME.weight_scale`: (groups, n_out), or (n_out, groups) for
wte and lm_head.
"""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpt_cli.errors import CheckpointError, InputError
from gpt_cli.folder.config import SCALE, GPT2Config, expected_shapes, is_matrix, is_transposed
from gpt_cli.folder.contents import CONFIG, vocabulary
from gpt_cli.folder.dtypes import NAMES_OF_CODES, SHORT
from gpt_cli.folder.settings import read_config
from gpt_cli.folder.tensors import Tensor
from gpt_cli.folder.tokenizer import Tokenizer, read_tokenizer, with_special_tokens
from gpt_cli.folder.weight_files import read_tensors, weight_files
from gpt_cli.gpt2.assembly import assemble
from gpt_cli.gpt2.model import GPT2
from gpt_cli.ops import Ops, Rows
from gpt_cli.ops.int8 import Int8Rows, scales_shape
from gpt_cli.ops.short import RoundedRows
from gpt_cli.options.declare import OptionError
from gpt_cli.system.files import read_json

if TYPE_CHECKING:
    from gpt_cli.gpt2.adapter import Adapter
    from gpt_cli.gpt2.classifier import ClassifierHead

# Causal masks, which old versions of transformers stored with the weights.
_MASK_BUFFER = re.compile(r"h\.\d+\.attn\.(masked_)?bias")
_LAYER = re.compile(r"h\.\d+\.mlp\.c_proj\.weight")  # one of each layer
_LINEAR = re.compile(r"h\.\d+\.(attn|mlp)\.c_\w+\.weight")
_PREFIX = "transformer."  # of the names in files written by save_pretrained
_FIRST = "wte.weight"  # which every GPT-2 has, whatever comes before its name
_TRANSFORMER = ("wte.", "wpe.", "h.", "ln_f.", "lm_head.")
HEAD = "score.weight"  # of a classifier
_FLOATS = ("F32", "F16", "BF16", "F64")
_MOST_NAMES = 1000  # of tensors, to look for one that is near
_MATCHING = "get the weights and the config.json of the same GPT-2"

_log = logging.getLogger(__name__)

# A tensor of a checkpoint: in a file, in int8 with its scales, or zeros in place of a missing bias.
Stored: TypeAlias = Tensor | Int8Rows | NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model's folder, opened: its configuration and tensors fit together.

    The data of the tensors, the tokenizer and the adapter are read when they are needed.

    Attributes:
        folder: the model's.
        adapter: a LoRA adapter, or None.
        bos_token: the start token, a name or an id, if it replaces the model's.
        config_json: the configuration in config.json, with the vocabulary of the adapter. `config`
            also has the special tokens.
        stored_tensors: the tensors in the files, by the names in GPT-2. An adapter changes some of
            them: see `tensors`.
        classifier_head: `score.weight`, if the model or its adapter is a classifier.
    """

    folder: Path
    adapter: "Adapter | None"
    bos_token: str | int | None
    config_json: GPT2Config
    stored_tensors: Mapping[str, Stored]
    classifier_head: Tensor | None = None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Read the tokenizer; see `read_tokenizer` for errors."""
        tokenizer = read_tokenizer(self.tokenizer_folder)
        if self.adapter and self.tokenizer_folder != self.folder:
            _log.warning("the tokenizer is the one beside the adapter: %s", self.tokenizer_folder)
            self.adapter.check_size(tokenizer.last_id + 1, "its tokenizer")
        return tokenizer

    @property
    def tokenizer_folder(self) -> Path:
        """Return the folder with the tokenizer: that of the adapter, if it has one."""
        beside = self.adapter.path.parent if self.adapter else self.folder
        return beside if vocabulary({path.name for path in beside.iterdir()}) else self.folder

    @cached_property
    def config(self) -> GPT2Config:
        """Settle the special tokens; see `with_special_tokens` for errors."""
        return with_special_tokens(self.config_json, self.tokenizer, self.folder, self.bos_token)

    @cached_property
    def tensors(self) -> Mapping[str, Rows]:
        """Merge the adapter into the tensors; see `Adapter.merge` for errors.

        OptionError if the weights are in int8.
        """
        if self.adapter is None:
            return self.stored_tensors
        if any(isinstance(tensor, Int8Rows) for tensor in self.stored_tensors.values()):
            cure = "quantize the model with the adapter instead (gpt-cli quantize --adapter)"
            folder = self.adapter.path.parent
            raise OptionError("adapter", f"{folder} cannot change int8 weights: {cure}")
        return self.adapter.merge(self.stored_tensors)

    def classifier(self, ops: Ops) -> "ClassifierHead":
        """Read the head of a classifier, rounded as other weights of `ops` are.

        See `read_classifier` for errors; InputError if there is no head.
        """
        if self.classifier_head is None:
            cure = "use a model that was trained as GPT2ForSequenceClassification"
            raise InputError(f"this model is no classifier: it has no score.weight: {cure}")
        from gpt_cli.gpt2.classifier import read_classifier  # most models have none

        path = self.folder / CONFIG
        settings = read_json(path) if path.is_file() else {}
        head: Rows = self.classifier_head
        if ops.dtype in SHORT and NAMES_OF_CODES.get(self.classifier_head.dtype) != ops.dtype:
            head = RoundedRows(head, ops.dtype)
        return read_classifier(settings, head, ops, str(path))

    @property
    def stored_dtype(self) -> str:
        """Return the type in which the files hold all matrices; float32 if they differ."""
        stored = {
            tensor.dtype if isinstance(tensor, Tensor) else "I8"
            for name, tensor in self.stored_tensors.items()
            if is_matrix(name, tensor.shape)
        }
        return NAMES_OF_CODES.get(stored.pop(), "float32") if len(stored) == 1 else "float32"


def load(folder: Path, ops: Ops) -> GPT2:
    """Read the checkpoint in a folder, and put it on the device of `ops`."""
    opened = open_checkpoint(folder)
    return assemble(opened.config_json, ops, opened.tensors)


def open_checkpoint(
    folder: Path, adapter: Path | None = None, *, bos_token: str | int | None = None
) -> Checkpoint:
    """Open the checkpoint in a folder, without reading the tensors' data.

    Tensors beside the transformer, such as the heads of classifiers, are left out, with a note.
    CheckpointError if a file, a tensor or a field is missing, damaged or not GPT-2's.
    """
    config = read_config(folder)
    tensors: dict[str, Stored] = {**find_tensors(folder)}
    others = sorted(name for name in tensors if not name.startswith((_PREFIX, *_TRANSFORMER)))
    beside = {name: tensors.pop(name) for name in others}
    head = beside.pop(HEAD) if _is_head(beside.get(HEAD), config) else None
    has_biases = any(name.endswith(".bias") for name in tensors)
    if not has_biases:  # as nanoGPT with bias=False
        tensors |= {
            name: np.zeros(shape, np.float32)
            for name, shape in expected_shapes(config)
            if name.endswith(".bias")
        }
    for problem in _problems(tensors, others, config):
        raise CheckpointError(f"{folder}: {problem}")
    if not has_biases:
        _log.warning("%s: the weights have no biases, so all are 0", folder)
    if any(isinstance(tensor, Tensor) and tensor.dtype == "F64" for tensor in tensors.values()):
        _log.warning("%s: the weights are in float64, and are rounded to float32", folder)
    if beside:
        names = ", ".join(f"{name!r:.80}" for name in sorted(beside)[:3])
        _log.warning("%s: ignoring tensors beside the transformer, such as %s", folder, names)
    opened = None
    if adapter is not None:
        from gpt_cli.gpt2.adapter import open_adapter  # most models need none

        opened = open_adapter(adapter, folder)
        opened.check_size(config.vocab_size, "the model")
        config = replace(config, vocab_size=opened.vocab_size or config.vocab_size)
        if _is_head(opened.classifier_head, config):
            head = opened.classifier_head
    if isinstance(head, Tensor):
        has_head = opened is not None and head is opened.classifier_head
        used = "classify uses its score.weight, and nothing else does"
        _log.warning("%s is a classifier: %s", adapter if has_head else folder, used)
        return Checkpoint(folder, opened, bos_token, config, tensors, head)
    return Checkpoint(folder, opened, bos_token, config, tensors)


def _is_head(tensor: Stored | None, config: GPT2Config) -> bool:
    """Return whether a tensor can be the head of a classifier."""
    if not isinstance(tensor, Tensor) or tensor.dtype not in _FLOATS or len(tensor.shape) != 2:
        return False
    labels, width = tensor.shape
    return labels > 0 and width == config.n_embd


def find_tensors(folder: Path) -> dict[str, Tensor | Int8Rows]:
    """Return the tensors of a folder by the names in GPT-2, without reading their data."""
    stored = [
        (path, name, tensor) for path in weight_files(folder) for name, tensor in read_tensors(path)
    ]
    prefix = _shared_prefix([name for _, name, _ in stored])
    if prefix:
        _log.warning("%s: the names of the weights are read without %r", folder, prefix)
    tensors: dict[str, Tensor] = {}
    for path, stored_name, tensor in stored:
        name = stored_name.removeprefix(prefix)
        short = name.removeprefix(_PREFIX)
        if _MASK_BUFFER.fullmatch(short):
            continue
        name = short if short.startswith(_TRANSFORMER) else name
        if name in tensors:
            raise CheckpointError(
                f"{path}: duplicate tensor {name}: get a file that was written correctly"
            )
        tensors[name] = tensor
    return _with_scales(_turned(tensors, folder), folder)


def _shared_prefix(names: Iterable[str]) -> str:
    """Return what comes before GPT-2's names, such as "_orig_mod." or "module."; "" for nothing."""
    firsts = [name for name in names if f".{name}".endswith(f".{_FIRST}")]
    return firsts[0].removesuffix(_FIRST).removesuffix(_PREFIX) if len(firsts) == 1 else ""


def _turned(tensors: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Return matrices as (n_in, n_out), with a note if they are stored as (n_out, n_in)."""
    shape = tensors["h.0.attn.c_attn.weight"].shape if "h.0.attn.c_attn.weight" in tensors else ()
    if len(shape) != 2 or shape[0] != 3 * shape[1]:
        return tensors
    _log.warning("%s: the weights are those of PyTorch's Linear, and are turned", folder)
    return {
        name: tensor.transposed() if _LINEAR.fullmatch(name) and len(tensor.shape) == 2 else tensor
        for name, tensor in tensors.items()
    }


def rounded(tensors: Mapping[str, Rows], dtype: str, name: str) -> dict[str, Rows]:
    """Return tensors that are rounded to a 16-bit type when they are read, unless stored in it.

    All are, also vectors and positions, as in a checkpoint that is stored in the type. A note says
    so. OptionError if the model of this name is stored in int8.
    """
    if any(isinstance(tensor, Int8Rows) for tensor in tensors.values()):
        problem = f"{name} is stored in int8, and its weights would be rounded twice"
        raise OptionError("dtype", f"cannot be {dtype}: {problem}: choose auto or float32")

    def is_stored(rows: Rows) -> bool:
        return isinstance(rows, Tensor) and NAMES_OF_CODES.get(rows.dtype) == dtype

    if not all(map(is_stored, tensors.values())):
        _log.warning("the weights of %s are rounded to %s", name, dtype)
    return {
        key: rows if is_stored(rows) else RoundedRows(rows, dtype) for key, rows in tensors.items()
    }


def _with_scales(tensors: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor | Int8Rows]:
    """Combine the matrices in int8 with their scales."""
    joined: dict[str, Tensor | Int8Rows] = dict(tensors)
    for name, weight in tensors.items():
        scale = tensors.get(name + SCALE)
        if weight.dtype != "I8" or scale is None or not is_matrix(name, weight.shape):
            continue  # `_problems` reports a matrix or a scale without its counterpart
        transposed = is_transposed(name)
        n_rows, length = weight.shape
        required = scales_shape(n_rows, length, transposed)
        if (scale.dtype, scale.shape) != ("F32", required):
            raise CheckpointError(
                f"{folder}: the tensor {name + SCALE} is {scale.dtype} {list(scale.shape)}, "
                f"but must be F32 {list(required)}: make the folder again with `gpt-cli quantize`"
            )
        joined[name] = Int8Rows(weight, scale, transposed)
        del joined[name + SCALE]
    return joined


def _problems(
    tensors: Mapping[str, Stored], others: Sequence[str], config: GPT2Config
) -> Iterator[str]:
    """Yield the differences from the tensors that the configuration requires.

    `others` are the names of tensors beside the transformer.
    """
    known = set()
    for name, required in expected_shapes(config, head="lm_head.weight" in tensors):
        known.add(name)
        if name not in tensors:
            from difflib import get_close_matches  # most models need none

            there = islice([*tensors, *others], _MOST_NAMES)
            near = ", ".join(get_close_matches(name, there, 3))
            hint = f" (the nearest names in the file: {near:.200})" if near else ""
            yield f"the tensor {name} is missing{hint}: {_MATCHING}"
            continue
        shape = tensors[name].shape
        if shape != required:
            shapes = f"the shape {list(shape)}, but config.json requires {list(required)}"
            yield f"the tensor {name} has {shapes}: {_MATCHING}"
    layers = sum(_LAYER.fullmatch(name) is not None for name in tensors)
    if layers > config.n_layer:
        count = f"config.json has n_layer {config.n_layer}"
        yield f"{count}, and the weights have {layers} layers: {_MATCHING}"
    unknown = sorted(tensors.keys() - known)
    if unknown:
        names = ", ".join(unknown[:3])
        yield f"tensors that GPT-2 does not have, such as {names}: {_MATCHING}"
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.dtype not in _FLOATS:
            cure = "save the model in F32, F16 or BF16"
            yield f"the tensor {name} is {tensor.dtype}, which is not supported: {cure}"
