"""Small GPT-2 checkpoint folders, in every layout of published checkpoints.

Their bytes are the same on every machine. The weights come from the raw output of a counter-based
generator, which NumPy keeps stable (unlike its distributions), by arithmetic that IEEE 754 defines.
Only NumPy is needed.
"""

import json
import math
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Head = Literal["omitted", "wte", "own"]

# --- a tokenizer: the 256 bytes, some merges, the end token --------------------------------------

END = "<|endoftext|>"

_VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = [byte for byte in range(256) if byte not in _VISIBLE]
# The character of each byte in the files, in the order of the first 256 ids.
ALPHABET = {byte: chr(byte) for byte in _VISIBLE} | {
    byte: chr(0x100 + place) for place, byte in enumerate(_HIDDEN)
}

_MERGES = [
    (b" ", b"t"), (b"h", b"e"), (b" ", b"a"), (b"i", b"n"), (b"r", b"e"), (b"o", b"n"),
    (b" t", b"he"), (b"e", b"r"), (b" ", b"s"), (b"n", b"d"), (b" a", b"nd"), (b"in", b"g"),
    (b"l", b"l"), (b"'", b"s"), (b" ", b" "), (b"  ", b"  "), (b"\n", b"\n"), (b"0", b"0"),
    (b"\xc3", b"\xa9"), (b"\xf0", b"\x9f"), (b"\xf0\x9f", b"\x98"), (b"\xe2", b"\x80"),
    (b"\xe2\x80", b"\x8d"), (b"\xe4", b"\xb8"), (b"\xe4\xb8", b"\xad"), (b"\xd8", b"\xa7"),
    (b"'", b"t"), (b"'", b"m"), (b"'", b"d"), (b"'", b"ll"), (b"'", b"re"), (b"v", b"e"),
    (b"'", b"ve"),
]  # fmt: skip


def written(token: bytes) -> str:
    """Write a token as vocab.json and merges.txt do."""
    return "".join(ALPHABET[byte] for byte in token)


MERGES = [f"{written(left)} {written(right)}" for left, right in _MERGES]
TOKENS = [*ALPHABET.values(), *(merge.replace(" ", "") for merge in MERGES), END]
VOCAB = {token: id for id, token in enumerate(TOKENS)}
END_ID = VOCAB[END]


def write_tokenizer(folder: Path) -> None:
    """Write vocab.json and merges.txt as transformers does."""
    (folder / "vocab.json").write_text(json.dumps(VOCAB), encoding="utf-8")
    (folder / "merges.txt").write_text(
        "\n".join(["#version: 0.2", *MERGES, ""]), encoding="utf-8", newline="\n"
    )


# --- weights -------------------------------------------------------------------------------------


def noise(name: str, *shape: int, seed: int = 0) -> NDArray[np.float64]:
    """Return nearly normal numbers of mean 0 and variance 1, from the name and the seed only."""
    count = math.prod(shape)
    key = np.array([seed, zlib.crc32(name.encode())], np.uint64)
    uniforms = np.random.Philox(key=key).random_raw(count).astype("<u8").view("<u2")
    sums = sum(uniforms.reshape(count, 4).T, start=np.int64(-2 * 0xFFFF))
    return (sums / 0x10000 * math.sqrt(3)).reshape(shape)


def make_weights(
    config: dict[str, Any], *, seed: int = 0, head: Head | None = None
) -> dict[str, NDArray[np.float32]]:
    """Return all tensors of a GPT-2, without the prefix that some files give their names.

    Args:
        config: as in config.json, where the sizes may have either of their two names.
        seed: of the weights.
        head: the content of lm_head, if it is stored; by default as in `config`.
    """
    C = config.get("n_embd") or config["hidden_size"]
    n_layer = config.get("n_layer") or config["num_hidden_layers"]
    n_positions = config.get("n_positions") or config["max_position_embeddings"]
    vocab_size, inner = config["vocab_size"], config.get("n_inner") or 4 * C
    shapes = {  # and the scale of the values
        "wte.weight": ((vocab_size, C), 0.1),
        "wpe.weight": ((n_positions, C), 0.05),
    }
    for h in (f"h.{layer}." for layer in range(n_layer)):
        for name, n_in, n_out, scale in (
            ("attn.c_attn", C, 3 * C, 0.2),
            ("attn.c_proj", C, C, 0.1),
            ("mlp.c_fc", C, inner, 0.3),
            ("mlp.c_proj", inner, C, 0.05),
        ):
            shapes[f"{h}{name}.weight"] = (n_in, n_out), scale
            shapes[f"{h}{name}.bias"] = (n_out,), 0.05
        for name in ("ln_1", "ln_2"):
            shapes[f"{h}{name}.weight"] = shapes[f"{h}{name}.bias"] = (C,), 0.1
    shapes["ln_f.weight"] = shapes["ln_f.bias"] = (C,), 0.1

    weights = {}
    for name, (shape, scale) in shapes.items():
        values = scale * noise(name, *shape, seed=seed)
        if "ln_" in name and name.endswith("weight"):
            values += 1
        if name == "wte.weight" or "ln_" in name:
            values[..., [1, C // 2]] *= 3  # trained models have such channels
        weights[name] = values.astype(np.float32)
    if head is None:
        head = "omitted" if config.get("tie_word_embeddings", True) else "own"
    if head == "wte":
        weights["lm_head.weight"] = weights["wte.weight"]
    elif head == "own":
        own = 0.1 * noise("lm_head.weight", vocab_size, C, seed=seed)
        weights["lm_head.weight"] = own.astype(np.float32)
    return weights


def filed(matrix: NDArray[Any], dtype: str = "float32") -> Any:
    """Store a matrix in a file; return its `tensors.Tensor`."""
    from gpt_cli.folder.tensors import Tensor
    from gpt_cli.system.files import version

    kind = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int8": "I8"}[dtype]
    halves = kind == "BF16"  # the upper half of each float32
    stored = (matrix.view("u4") >> 16).astype("u2") if halves else matrix.astype(dtype)
    with NamedTemporaryFile(delete=False) as file:
        file.write(b"{}" + stored.tobytes())
    path = Path(file.name)
    tensor = Tensor(path, version(path), 2, kind, matrix.shape)
    weakref.finalize(tensor, path.unlink)
    return tensor


# --- files ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """A tensor as a safetensors file holds it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def store(array: NDArray[np.float32], dtype: str = "F32") -> Stored:
    """Encode an array; BF16 keeps the upper half of each float32."""
    little = np.ascontiguousarray(array, "<f4")
    if dtype == "F16":
        data = little.astype("<f2").tobytes()
    elif dtype == "BF16":
        data = little.view("<u2").reshape(-1, 2)[:, 1].tobytes()
    else:
        data = little.tobytes()
    return Stored(dtype, array.shape, data)


def safetensors_bytes(tensors: dict[str, Stored], *, odd: bool = False) -> bytes:
    """Encode a file; `odd` pads the header so that the data starts at an odd byte."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + len(tensor.data)
        header[name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + odd)
    data = b"".join(tensor.data for tensor in tensors.values())
    return len(text).to_bytes(8, "little") + text + data


def stored_tensors(
    config: dict[str, Any],
    *,
    seed: int = 0,
    layout: Literal["hub", "saved"] = "hub",
    dtype: str = "F32",
    head: Head | None = None,
) -> dict[str, Stored]:
    """Return the tensors of a checkpoint under the names that its file gives them.

    The layout "hub" is that of the published models: no prefix, and causal masks among the
    weights. "saved" is what transformers writes today.
    """
    weights = make_weights(config, seed=seed, head=head)
    tensors = {name: store(array, dtype) for name, array in weights.items()}
    if layout == "saved":
        return {
            name if name == "lm_head.weight" else f"transformer.{name}": tensor
            for name, tensor in tensors.items()
        }
    n_positions = len(weights["wpe.weight"])
    mask = np.tril(np.ones((1, 1, n_positions, n_positions), np.float32))
    layers = [name.removesuffix(".ln_1.bias") for name in weights if name.endswith("ln_1.bias")]
    return tensors | {f"{h}.attn.bias": store(mask) for h in layers}


def write_weights(
    path: Path,
    tensors: dict[str, Stored],
    encode: Callable[[dict[str, Stored]], bytes],
    shards: int = 1,
) -> None:
    """Write tensors as a file, or as shards of it with an index."""
    if shards == 1:
        path.write_bytes(encode(tensors))
        return
    weight_map = {}
    for number in range(1, shards + 1):
        shard = path.with_stem(f"{path.stem}-{number:05}-of-{shards:05}")
        part = dict(list(tensors.items())[number - 1 :: shards])
        shard.write_bytes(encode(part))
        weight_map |= dict.fromkeys(part, shard.name)
    size = sum(len(tensor.data) for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    path.with_name(f"{path.name}.index.json").write_text(json.dumps(index), encoding="utf-8")


def write_checkpoint(
    folder: Path,
    config: dict[str, Any],
    *,
    seed: int = 0,
    layout: Literal["hub", "saved"] = "hub",
    dtype: str = "F32",
    shards: int = 1,
    head: Head | None = None,
) -> Path:
    """Write a whole model folder, tokenizer included, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    write_tokenizer(folder)
    tensors = stored_tensors(config, seed=seed, layout=layout, dtype=dtype, head=head)
    encode = partial(safetensors_bytes, odd=layout == "hub")
    write_weights(folder / "model.safetensors", tensors, encode, shards)
    return folder


# --- the checkpoints whose reference results are in tests/golden ---------------------------------

CONFIG: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": len(VOCAB),
    "n_positions": 80,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "bos_token_id": END_ID,
    "eos_token_id": END_ID,
}
MINIMAL_CONFIG: dict[str, Any] = {  # the other names of the sizes, and defaults for the rest
    "model_type": "gpt2",
    "vocab_size": len(VOCAB),
    "max_position_embeddings": 80,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


def write_damaged(folder: Path, name: str, number: np.float32) -> Path:
    """Write a checkpoint in which one column of a tensor is all `number`."""
    weights = make_weights(CONFIG)
    weights[name].view(np.uint32)[..., 5] = number.view(np.uint32)  # keeps the bits of a NaN
    tensors = stored_tensors(CONFIG) | {name: store(weights[name])}
    write_checkpoint(folder, CONFIG)
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    return folder


@dataclass(frozen=True)
class Case:
    """A configuration, and how its checkpoint is written."""

    config: dict[str, Any] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Write the checkpoint and return its folder."""
        return write_checkpoint(folder, self.config, **self.files)


CASES = {
    "hub": Case(CONFIG),
    "saved": Case(CONFIG, {"layout": "saved"}),
    "shards": Case(CONFIG, {"layout": "saved", "shards": 3, "seed": 1}),
    "f16": Case(CONFIG, {"dtype": "F16"}),
    "bf16": Case(CONFIG, {"dtype": "BF16", "layout": "saved"}),
    "untied": Case(CONFIG | {"tie_word_embeddings": False}),
    "tied_but_stored": Case(CONFIG, {"layout": "saved", "head": "wte", "seed": 2}),
    "tied_but_different": Case(CONFIG, {"layout": "saved", "head": "own"}),
    "n_inner": Case(CONFIG | {"n_inner": 48}),
    "gelu": Case(CONFIG | {"activation_function": "gelu"}),
    "relu": Case(CONFIG | {"activation_function": "relu"}),
    "silu": Case(CONFIG | {"activation_function": "silu"}),
    "tanh": Case(CONFIG | {"activation_function": "tanh"}),
    "unscaled": Case(CONFIG | {"scale_attn_weights": False}),
    "inverse_layer": Case(CONFIG | {"scale_attn_by_inverse_layer_idx": True}),
    "upcast": Case(CONFIG | {"reorder_and_upcast_attn": True}),
    "epsilon": Case(CONFIG | {"layer_norm_epsilon": 1e-3}),
    "minimal": Case(MINIMAL_CONFIG, {"seed": 3}),
    "padded_vocabulary": Case(CONFIG | {"vocab_size": len(VOCAB) + 20}),
    "one_head": Case(CONFIG | {"n_head": 1, "n_embd": 48}),
}
HOOKED = [  # those that differ between the embeddings and ln_f
    *("hub", "n_inner", "gelu", "relu", "silu", "tanh", "unscaled", "inverse_layer", "upcast"),
    *("epsilon", "minimal", "one_head"),
]
