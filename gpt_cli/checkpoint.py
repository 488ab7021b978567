"""safetensors -> GPT2. Every quirk of the published checkpoints lives here and nowhere else.

Each tensor is read straight into aligned arrays: whole, or some rows at a time where the operations
want it in another order. The library's reader is not used for the data, only to check the file:
mapped pages would count as memory beside the copies, the published `gpt2` file starts its data at
an odd byte, which makes every view of a mapping misaligned and every product with it slow, and
NumPy has no bfloat16.

Matrices may be stored in int8, as `quantize` writes them: `NAME.weight` as I8 in the shape that it
has in float32, and the scales of its blocks as F32, `NAME.weight_scale`: (blocks, n_out), for wte
and lm_head (n_out, blocks). `ops.int8` says what they stand for.
"""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from gpt_cli.config import GPT2Config
from gpt_cli.errors import MALFORMED, CheckpointError
from gpt_cli.files import INDEX, read_small, version
from gpt_cli.model import GPT2, MLP, Attention, Block
from gpt_cli.ops import LayerNorm, Linear, Ops, Rows
from gpt_cli.ops.int8 import BLOCK, Int8Rows
from gpt_cli.ops.memory import aligned_empty

# Causal masks that old versions of transformers stored as if they were weights.
_MASK_BUFFER = re.compile(r"h\.\d+\.attn\.(masked_)?bias")
_PREFIX = "transformer."  # of the names in files written by save_pretrained
_READERS = 4  # threads: the time goes into copying out of the page cache and faulting pages in
_COMPARED = 1024  # rows, at a time
_AGAIN = "run the command again"
_MATCHING = "get weights and config.json of one and the same GPT-2"

# What can be read, and as what.
_STORED = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I8": "i1"}

T = TypeVar("T", bound=Rows)

SCALE = "_scale"  # at the end of the names of an int8 matrix's scales

# What is read of a model; other files in its folder may change at any time.
_FILES = (
    "*.safetensors",
    INDEX,
    "config.json",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "tokenizer.json",
)

# What a file that is no safetensors file begins with.
_IMPOSTORS = {
    b"version https://git-lfs": "a Git LFS pointer, not the weights; run `git lfs pull`",
    b"<": "a web page, not the weights; download it again",
    b"\x80": "a pickle file, which is never opened; get the model as safetensors",
    b"PK": "a PyTorch archive, which is never opened; get the model as safetensors",
}
_LARGEST_HEADER = 10_000_000  # bytes; that of gpt2-xl has 60,000, and each becomes 20 in memory


@dataclass(frozen=True)
class Tensor:
    """Where a tensor lies on disk."""

    path: Path
    version: tuple[int, int] | None  # of the file, when its header was read
    offset: int  # from the start of the file, in bytes
    dtype: str  # as safetensors writes it: F32, F16, BF16, ...
    shape: tuple[int, ...]

    def __getitem__(self, rows: slice, /) -> NDArray[Any]:
        """Read some rows, or numbers where there is one axis, into a new array.

        It is of float32, but for whole numbers, which stay int8.
        """
        stored = self.stored(rows)
        if self.dtype in ("F32", "I8"):
            return stored
        array = aligned_empty(stored.shape, np.dtype("<f4"))
        if self.dtype == "F16":
            array[...] = stored
        else:  # bfloat16 is the upper half of a float32
            np.left_shift(stored, 16, out=array.view("<u4"), dtype="<u4")
        return array

    def stored(self, rows: slice, /) -> NDArray[Any]:
        """Read some rows as they are stored; those in bfloat16 as whole numbers of the same bits."""
        start, stop, _ = rows.indices(self.shape[0])
        array = aligned_empty((stop - start, *self.shape[1:]), np.dtype(_STORED[self.dtype]))
        self._fill(array, start * math.prod(self.shape[1:]))
        return array

    def _fill(self, array: NDArray[Any], first: int) -> None:
        """Read as many numbers as the array holds, from the tensor's number `first` on."""
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.offset + first * array.itemsize)
                rest = array.data.cast("B")
                while count := file.readinto(rest):
                    rest = rest[count:]
                whole = not rest and version(file.fileno()) == self.version
        except FileNotFoundError:
            whole = False
        if not whole:
            raise CheckpointError(f"{self.path} changed while it was read: {_AGAIN}")


def load(folder: Path, ops: Ops) -> GPT2:
    """Load the checkpoint in a folder onto the device of `ops`.

    Raises:
        CheckpointError: a file, a tensor or a field is missing, damaged, or not what GPT-2 has.
    """
    config = GPT2Config.from_folder(folder)
    tensors = find_tensors(folder)
    check_tensors(tensors, config, folder)
    return assemble(config, ops, tensors)


@contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    """Read a model: of two that take each other's place meanwhile, no mixture may come.

    Raises:
        CheckpointError: at the end, its files are not those of the beginning.
    """

    def versions() -> dict[Path, object]:
        paths = [path for pattern in _FILES for path in folder.glob(pattern)]
        return {path: version(path) for path in paths}

    begun = versions()
    yield
    if versions() != begun:
        raise CheckpointError(f"{folder} changed while it was read: {_AGAIN}")


def find_tensors(folder: Path) -> dict[str, Tensor | Int8Rows]:
    """Return the tensors of a folder by GPT-2's own names, without reading their data.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    tensors: dict[str, Tensor] = {}
    for path in weight_files(folder):
        for name, tensor in read_header(path):
            name = name.removeprefix(_PREFIX)
            if _MASK_BUFFER.fullmatch(name):
                continue
            if name in tensors:
                raise CheckpointError(
                    f"{path}: the tensor {name} is there twice: get a file that was written rightly"
                )
            tensors[name] = tensor
    return _with_scales(tensors, folder)


def stored_dtype(folder: Path) -> str:
    """Return "int8", "bfloat16" or "float16" if all matrices are stored so, else "float32".

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    tensors = find_tensors(folder)
    matrices = [tensor for name, tensor in tensors.items() if is_matrix(name, tensor.shape)]
    stored = {"I8" if isinstance(each, Int8Rows) else each.dtype for each in matrices}
    names = {"I8": "int8", "BF16": "bfloat16", "F16": "float16"}
    return names.get(stored.pop(), "float32") if len(stored) == 1 else "float32"


def _with_scales(tensors: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor | Int8Rows]:
    """Join the matrices in int8 with their scales."""
    joined: dict[str, Tensor | Int8Rows] = dict(tensors)
    for name, weight in tensors.items():
        scale = tensors.get(name + SCALE)
        if weight.dtype != "I8" or scale is None or not is_matrix(name, weight.shape):
            continue  # what is left without its other half is refused by its type, or its name
        transposed = is_transposed(name)
        blocks = list(weight.shape)
        blocks[transposed] = -(-blocks[transposed] // BLOCK)
        if (scale.dtype, list(scale.shape)) != ("F32", blocks):
            raise CheckpointError(
                f"{folder}: the tensor {name + SCALE} is {scale.dtype} {list(scale.shape)}, "
                f"but must be F32 {blocks}: make the folder again with `gpt-cli quantize`"
            )
        joined[name] = Int8Rows(weight, scale, transposed)
        del joined[name + SCALE]
    return joined


def weight_files(folder: Path) -> list[Path]:
    """Return the one file `model.safetensors`, or the shards that its index names."""
    single, index = folder / "model.safetensors", folder / INDEX
    if single.is_file():
        return [single]
    if not index.is_file():
        raise CheckpointError(
            f"{folder} has no model.safetensors: get the model as safetensors, as other formats, "
            "which may run code, are not opened"
        )
    try:
        names = sorted(set(json.loads(read_small(index))["weight_map"].values()))
        shards = [folder / name for name in names]
    except (OSError, *MALFORMED) as error:
        raise CheckpointError(f"{index} is damaged ({error!r:.80}): download it again") from None
    for shard in shards:
        if shard.parent != folder or shard.suffix != ".safetensors":
            raise CheckpointError(
                f"{index} names {str(shard)!r:.80}, which is no file beside it: do not trust this "
                "model, and get another copy"
            )
        if not os.path.isfile(shard):  # noqa: PTH113 (never raises, however long the name is)
            raise CheckpointError(
                f"{shard!s:.200} is missing, and {index} names it: download it too"
            )
    return shards


def read_header(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and place of each tensor in a safetensors file.

    Raises:
        CheckpointError: the file is not a whole and well-formed safetensors file.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _LARGEST_HEADER:
                raise ValueError(f"its header claims {length} bytes")
            header = file.read(length)
            if not path.stat().st_size:
                raise ValueError("it is empty")
            if not header.startswith(b"{"):  # which the library lets pass
                raise ValueError("its header does not begin with a brace")
            read = version(file.fileno())
        with safe_open(path, framework="np"):
            pass  # this has checked the lengths, the offsets and the shapes
        tensors = [
            (name, _tensor(path, read, 8 + length, dict(fields)))
            for name, fields in json.loads(header, object_pairs_hook=list)
            if name != "__metadata__"
        ]
    except (SafetensorError, OSError, *MALFORMED) as error:
        raise CheckpointError(f"{path} is not safetensors: {_what_it_is(path, error)}") from None
    yield from tensors


def _tensor(path: Path, read: tuple[int, int] | None, start: int, entry: dict[str, Any]) -> Tensor:
    """Return the tensor of which a header has this entry; its offsets count from `start`."""
    dtype = entry["dtype"]
    if not isinstance(dtype, str):  # the library also knows JSON's other ways to write an enum
        raise TypeError(f"{dtype!r:.40} is no dtype")
    offset = start + entry["data_offsets"][0]
    return Tensor(path, read, offset, dtype, tuple(entry["shape"]))


def _what_it_is(path: Path, error: Exception) -> str:
    reason = str(error).removeprefix("Error while deserializing header: ")
    damaged = f"{reason}; it is damaged or not whole, so download it again"
    try:
        with path.open("rb") as file:
            start = file.read(64).lstrip()
    except OSError:
        return damaged
    return next((what for magic, what in _IMPOSTORS.items() if start.startswith(magic)), damaged)


def expected_shapes(
    config: GPT2Config, *, head: bool = False
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of every tensor of a GPT-2, with the head if it is not tied.

    A tied head may be stored all the same; `head` says that it is.
    """
    C, inner = config.n_embd, config.inner_size
    yield "wte.weight", (config.vocab_size, C)
    yield "wpe.weight", (config.n_positions, C)
    for layer in range(config.n_layer):
        h = f"h.{layer}."
        for name, n_in, n_out in (
            ("attn.c_attn", C, 3 * C),
            ("attn.c_proj", C, C),
            ("mlp.c_fc", C, inner),
            ("mlp.c_proj", inner, C),
        ):
            yield f"{h}{name}.weight", (n_in, n_out)
            yield f"{h}{name}.bias", (n_out,)
        for name in ("ln_1", "ln_2"):
            yield f"{h}{name}.weight", (C,)
            yield f"{h}{name}.bias", (C,)
    yield "ln_f.weight", (C,)
    yield "ln_f.bias", (C,)
    if head or not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, C)


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor is what `Ops.place_matrix` takes, and may be in int8."""
    return len(shape) == 2 and name != "wpe.weight"


def is_transposed(name: str) -> bool:
    """Return whether a matrix is stored as (n_out, n_in)."""
    return name in ("wte.weight", "lm_head.weight")


def memory(config: GPT2Config, dtype: str = "float32") -> dict[str, int]:
    """Count a model's parameters, and the bytes that it takes: its weights, and a full context."""
    parameters = matrices = 0
    # All layers are alike, and a damaged file may tell of a million.
    for name, shape in expected_shapes(replace(config, n_layer=1)):
        count = math.prod(shape) * (config.n_layer if name.startswith("h.") else 1)
        parameters += count
        matrices += count if is_matrix(name, shape) else 0
    halves = 2 * matrices
    saved = {"float16": halves, "bfloat16": halves, "int8": 3 * matrices - halves // BLOCK}
    weights = 4 * parameters - saved.get(dtype, 0)
    number = 2 if dtype in ("int8", "float16") else 4  # bytes in the cache
    per_token = 2 * number * config.n_layer * config.n_embd  # a key and a value in each layer
    return {
        "parameters": parameters,
        "weights_bytes": weights,
        "kv_cache_bytes": per_token * config.n_positions,
    }


def check_tensors(
    tensors: Mapping[str, Tensor | Int8Rows], config: GPT2Config, folder: Path
) -> None:
    """Compare what is there with what must be there.

    Raises:
        CheckpointError: names the first tensor that is missing, unknown, or of a wrong shape.
    """
    known = set()
    for name, shape in expected_shapes(config, head="lm_head.weight" in tensors):
        known.add(name)
        if name not in tensors:
            raise CheckpointError(f"{folder}: the tensor {name} is missing: {_MATCHING}")
        if tensors[name].shape != shape:
            raise CheckpointError(
                f"{folder}: the tensor {name} has the shape {list(tensors[name].shape)}, "
                f"but config.json asks for {list(shape)}: {_MATCHING}"
            )
    if unknown := sorted(tensors.keys() - known):
        raise CheckpointError(
            f"{folder}: {len(unknown)} tensors that GPT-2 does not have, such as "
            f"{', '.join(unknown[:3])}: {_MATCHING}"
        )
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.dtype not in ("F32", "F16", "BF16"):
            raise CheckpointError(
                f"{folder}: the tensor {name} is {tensor.dtype}, which cannot be read: "
                "save the model in F32, F16 or BF16"
            )


def assemble(config: GPT2Config, ops: Ops, tensors: Mapping[str, Rows]) -> GPT2:
    """Place tensors, on disk or in memory, with `ops`, and put them together; names are the same.

    A head that is stored although it is tied wins where it differs, as in transformers.
    """
    tensors = without_tied_head(tensors, config)
    with ThreadPoolExecutor(_READERS) as pool:
        placed = pool.map(lambda item: _place(ops, *item), tensors.items())
        arrays = dict(zip(tensors, placed, strict=True))

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
    """Leave out a head that is stored although it is tied, and no other than wte."""
    wte, head = tensors["wte.weight"], tensors.get("lm_head.weight")
    if head is None or not config.tie_word_embeddings or not _equal(wte, head):
        return dict(tensors)
    return {name: tensor for name, tensor in tensors.items() if tensor is not head}


def _equal(one: Rows, other: Rows) -> bool:
    """Compare two matrices of one shape, some rows at a time."""
    starts = range(0, one.shape[0], _COMPARED)
    return all(
        np.array_equal(one[start : start + _COMPARED], other[start : start + _COMPARED])
        for start in starts
    )


def _place(ops: Ops, name: str, tensor: Rows) -> Any:
    if is_matrix(name, tensor.shape):
        return ops.place_matrix(tensor, transposed=is_transposed(name))
    return ops.place(tensor[:])
