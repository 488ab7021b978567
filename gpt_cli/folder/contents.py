"""Which files a model consists of."""

import re
from collections.abc import Callable, Collection
from pathlib import Path

from gpt_cli.errors import MALFORMED, CheckpointError, ModelNotFoundError
from gpt_cli.system.files import read_json

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
HPARAMS = "hparams.json"  # OpenAI's own
NANOGPT = "ckpt.pt"  # a checkpoint with its settings
ADAPTER_CONFIG = "adapter_config.json"
# The files of a tokenizer's vocabulary. If a folder has several of these, the first counts.
BYTE_BPE = ("vocab.json", "merges.txt")
OPENAI_BPE = ("encoder.json", "vocab.bpe")  # the same, by the names that OpenAI gave them
VOCABULARIES = (
    ("tokenizer.json",),
    BYTE_BPE,
    OPENAI_BPE,
    ("vocab.txt",),
    ("spiece.model",),
    ("sentencepiece.bpe.model",),
)
TOKENIZER = (
    "tokenizer.json",
    "vocab.json",
    "merges.txt",
    *OPENAI_BPE,
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "added_tokens.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
# Files of weights, the preferred ones first; an index names the files of a model in shards.
_WEIGHTS = ("model.safetensors", "pytorch_model.bin", NANOGPT)
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
_INDEX = ".index.json"  # after the name of the file that is in shards
_SHARD = r"\w[\w.-]*"  # a plain name, never a path
_TENSORFLOW = "model.ckpt"
_OTHERS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")


def select_weights(
    names: Collection[str], folder: str, get_index: Callable[[str], Path]
) -> list[str]:
    """Return the file of the weights, or an index and then the shards that it names.

    CheckpointError if `names` has weights only in another format.
    """
    for name in _WEIGHTS:
        if name in names:
            return [name]
        if name + _INDEX in names:
            index = name + _INDEX
            return [index, *_read_index(get_index(index), Path(name).suffix)]
    for name in _WEIGHTS:
        shard = re.compile(r"-\d+-of-\d+\.".join(map(re.escape, name.split("."))))
        if any(map(shard.fullmatch, names)):
            raise CheckpointError(f"{folder} has shards without their index: add {name}{_INDEX}")
    if any(name.startswith(_TENSORFLOW) for name in names):
        raise CheckpointError(
            f"{folder} has its weights only in a TensorFlow checkpoint, which is not supported: "
            "load OpenAI's from the Hub (gpt2, gpt2-medium, gpt2-large, gpt2-xl), or convert yours "
            "with transformers 4 (transformers-cli convert --model_type gpt2)"
        )
    if others := [name for name in names if name.endswith(_OTHERS)]:
        raise CheckpointError(
            f"{folder} has its weights only in {min(others)}, which is not supported: use a model "
            f"that has {' or '.join(_WEIGHTS[:2])}"
        )
    return [_WEIGHTS[0]]  # which is missing


def has_safetensors(names: Collection[str]) -> bool:
    """Return whether `names` has weights of a model or an adapter in safetensors."""
    return any(name in names for name in (_WEIGHTS[0], _WEIGHTS[0] + _INDEX, _ADAPTER_WEIGHTS[0]))


def model_files(names: Collection[str], repo: str, get_index: Callable[[str], Path]) -> list[str]:
    """Select the files of the model from `names`.

    config.json is last: in the cache, its presence means that the download is complete.
    """
    needed = [*select_weights(names, repo, get_index), *other_files(names), CONFIG]
    if missing := [name for name in needed if name not in names]:
        raise ModelNotFoundError(f"{repo} has no {', '.join(missing)}: use a complete GPT-2")
    return needed


def adapter_files(names: Collection[str], repo: str, *_: object) -> list[str]:
    """Select the files of a LoRA adapter from `names`: weights, then configuration."""
    weights = next((name for name in _ADAPTER_WEIGHTS if name in names), _ADAPTER_WEIGHTS[0])
    needed = [weights, ADAPTER_CONFIG]
    if missing := [name for name in needed if name not in names]:
        raise CheckpointError(f"{repo} has no {' and no '.join(missing)}: give an adapter of PEFT")
    return needed


def adapter_download(names: Collection[str], repo: str, *_: object) -> list[str]:
    """Select the files of an adapter and of its tokenizer, if it has one, from `names`."""
    return [name for name in TOKENIZER if name in names] + adapter_files(names, repo)


def other_files(names: Collection[str]) -> list[str]:
    """Select the files other than the weights and config.json from `names`."""
    return tokenizer_files(names) + [name for name in names if name == GENERATION_CONFIG]


def tokenizer_files(names: Collection[str]) -> list[str]:
    """Select the files of the tokenizer from `names`."""
    missing = [] if vocabulary(names) else [name for name in BYTE_BPE if name not in names]
    return [name for name in TOKENIZER if name in names] + missing


def vocabulary(names: Collection[str]) -> tuple[str, ...] | None:
    """Return the files of the vocabulary among `names`, or None; see VOCABULARIES."""
    return next((files for files in VOCABULARIES if all(name in names for name in files)), None)


def _read_index(path: Path, ending: str) -> list[str]:
    """Return the names of the shards that an index lists; they are files beside it."""
    shard = re.compile(_SHARD + re.escape(ending), re.ASCII)
    try:
        names = sorted(set(read_json(path)["weight_map"].values()))
        unsafe = next((name for name in names if not shard.fullmatch(name)), None)
        if not names:
            raise ValueError("it lists no files")
    except MALFORMED as error:
        raise CheckpointError(f"{path} is damaged ({error!r:.80}): get another copy") from None
    if unsafe is not None:
        raise CheckpointError(
            f"{path} names {unsafe!r:.80}, not a {ending[1:]} file beside it: do not trust this "
            "model, get another copy"
        )
    return names
