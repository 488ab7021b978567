"""Which files a model consists of."""

import re
from collections.abc import Callable, Collection
from pathlib import Path

from gpt_cli.errors import MALFORMED, CheckpointError, ModelNotFoundError
from gpt_cli.system.files import read_json

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"  # names the files of a model in shards
_SHARD = re.compile(r"\w[\w.-]*\.safetensors", re.ASCII)  # a plain name, never a path
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")


def model_files(names: Collection[str], repo: str, get_index: Callable[[], Path]) -> list[str]:
    """Select the files of the model from `names`.

    config.json is last: in the cache, its presence means that the download is complete.
    """
    weights = [WEIGHTS]
    if WEIGHTS not in names and INDEX in names:
        weights = [INDEX, *read_index(get_index())]
    elif WEIGHTS not in names and (pickles := [n for n in names if n.endswith(_PICKLES)]):
        raise CheckpointError(
            f"{repo} has its weights only in {pickles[0]}, a format that can run code: "
            "use a model that has safetensors"
        )
    needed = [*weights, *other_files(names), CONFIG]
    if missing := [name for name in needed if name not in names]:
        raise ModelNotFoundError(f"{repo} has no {', '.join(missing)}: use a complete GPT-2")
    return needed


def other_files(names: Collection[str]) -> list[str]:
    """Select the files other than the weights and config.json from `names`."""
    return tokenizer_files(names) + [name for name in names if name == "generation_config.json"]


def tokenizer_files(names: Collection[str]) -> list[str]:
    """Select the files of the tokenizer from `names`."""
    files = ["vocab.json", "merges.txt"]
    if "tokenizer.json" in names and not all(name in names for name in files):
        files = ["tokenizer.json"]
    return files + [name for name in names if name == "added_tokens.json"]


def read_index(path: Path) -> list[str]:
    """Return the names of the shards that an index lists; they are files beside it."""
    try:
        names = sorted(set(read_json(path)["weight_map"].values()))
        unsafe = next((name for name in names if not _SHARD.fullmatch(name)), None)
        if not names:
            raise ValueError("it lists no files")
    except MALFORMED as error:
        raise CheckpointError(f"{path} is damaged ({error!r:.80}): get another copy") from None
    if unsafe is not None:
        raise CheckpointError(
            f"{path} names {unsafe!r:.80}, not a safetensors file beside it: do not trust this "
            "model, get another copy"
        )
    return names
