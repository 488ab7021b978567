"""What is on this machine: the bundled model, and the Hub's cache.

The cache is read here and not by the Hub's client, which takes longer to import than a cached
model takes to find.
"""

import json
import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gpt_cli.errors import MALFORMED, CheckpointError, GPTCLIError, InputError, ModelNotFoundError
from gpt_cli.files import INDEX, read_small

BUNDLED = ("tiny",)
SHORT_NAMES = {
    "distilgpt2": "distilbert/distilgpt2",
    "gpt2": "openai-community/gpt2",
    "gpt2-medium": "openai-community/gpt2-medium",
    "gpt2-large": "openai-community/gpt2-large",
    "gpt2-xl": "openai-community/gpt2-xl",
}

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
_ADDED_TOKENS = "added_tokens.json"
_GENERATION_CONFIG = "generation_config.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")

_HUB_ID = re.compile(r"([a-zA-Z0-9][\w.-]*/)?[a-zA-Z0-9_]([\w.-]*\w)?", re.ASCII)
_SHARD = re.compile(r"\w[\w.-]*\.safetensors", re.ASCII)  # a plain name: no way out of the folder
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class LocalModel:
    """A whole GPT-2 on this machine."""

    name: str  # what `--model` takes
    folder: Path
    origin: Literal["bundled", "cached"]
    size: int  # of all its files, in bytes
    commit: str | None  # None for a bundled one


def other_files(folder: Path) -> list[Path]:
    """The files that a model's folder has beside its weights and its configuration."""
    names = {path.name for path in folder.iterdir()}
    return [folder / name for name in _other_names(names)]


def list_models() -> list[LocalModel]:
    """Every whole GPT-2 that is bundled or in the Hub's cache; asks no network."""
    found = [
        LocalModel(name, folder, "bundled", _folder_size(folder), None)
        for name in BUNDLED
        for folder in _bundled_places(name)
        if _is_whole(folder)
    ]
    for folder in sorted(cache_folder().glob("models--*/snapshots/*")):
        if _is_whole(folder) and _model_type(folder) == "gpt2":
            name = folder.parent.parent.name.removeprefix("models--").replace("--", "/")
            found.append(LocalModel(name, folder, "cached", _folder_size(folder), folder.name))
    return found


def cache_folder() -> Path:
    """The Hub's cache, by the same variables and in the same order as its client."""
    user_cache = os.getenv("XDG_CACHE_HOME", "~/.cache")
    home = _expand(os.getenv("HF_HOME", f"{user_cache}/huggingface"))
    return Path(
        _expand(os.getenv("HF_HUB_CACHE", os.getenv("HUGGINGFACE_HUB_CACHE", f"{home}/hub")))
    )


def _expand(path: str) -> str:
    return os.path.expandvars(os.path.expanduser(path))  # noqa: PTH111 (never raises)


def _bundled_places(name: str) -> list[Path]:
    package = Path(__file__).parent.parent
    return [package / "weights" / name, package.parent / "weights" / name]  # wheel, checkout


def bundled(name: str) -> Path:
    """The folder of a model that comes with the package."""
    for folder in _bundled_places(name):
        if folder.is_dir():
            return folder
    raise ModelNotFoundError(f"the bundled model {name} is missing: reinstall gpt2-cli")


def hub_id(name: str) -> str:
    """The name on the Hub of a short name, or of itself."""
    repo = SHORT_NAMES.get(name, name)
    if not _HUB_ID.fullmatch(repo) or len(repo) > 96 or "--" in repo or ".." in repo:
        raise ModelNotFoundError(
            f"no model {name!r:.80}: it is neither a folder nor a name on the Hub; "
            "use a folder, OWNER/NAME, `gpt2`, or the bundled `tiny`"
        )
    return repo


def checked_revision(revision: str | None) -> str:
    """The revision, which also names a file below `refs`; `main` where none was given."""
    if revision is None:
        return "main"
    if not revision.isprintable() or not revision.strip("/") or ".." in revision:
        raise InputError(f"{revision!r:.80} cannot be a revision: give a branch, a tag or a commit")
    return revision.strip("/")


def cached_snapshot(repo: str, revision: str) -> Path | None:
    """The folder of a revision in the Hub's cache, if all of the model is there."""
    # Other tools may have cached a model that has a short name under that name.
    names = [repo, *(short for short, full in SHORT_NAMES.items() if full == repo)]
    for name in names:
        folder = repo_folder(name)
        commit = revision
        if not _COMMIT.fullmatch(revision):
            try:
                commit = (folder / "refs" / revision).read_text().strip()
            except (OSError, ValueError):
                continue
        snapshot = folder / "snapshots" / commit
        if _COMMIT.fullmatch(commit) and _is_whole(snapshot):
            return snapshot
    return None


def repo_folder(repo: str) -> Path:
    """Where the Hub's cache keeps the files of a model, in all revisions."""
    return cache_folder() / f"models--{repo.replace('/', '--')}"


def model_files(
    names: Collection[str], repo: str, read_index: Callable[[], str | bytes]
) -> list[str]:
    """Which of the files `names` make the model, config.json last: who has that has them all.

    Raises:
        ModelNotFoundError: some are not there.
        CheckpointError: the weights are no safetensors, or their index is damaged.
    """
    weights = [WEIGHTS]
    if WEIGHTS not in names and INDEX in names:
        weights = [INDEX, *_shards(read_index, repo)]
    elif WEIGHTS not in names and (pickles := [n for n in names if n.endswith(_PICKLES)]):
        raise CheckpointError(
            f"{repo} has its weights only as {pickles[0]}, which may run code when it is opened; "
            "only safetensors are opened"
        )
    needed = [*weights, *_other_names(names), CONFIG]
    if missing := [name for name in needed if name not in names]:
        raise ModelNotFoundError(f"{repo} has no {', '.join(missing)}: it is not a whole GPT-2")
    return needed


def _other_names(names: Collection[str]) -> list[str]:
    optional = [_GENERATION_CONFIG] if _GENERATION_CONFIG in names else []
    return [*tokenizer_files(names), *optional]


def tokenizer_files(names: Collection[str]) -> list[str]:
    """Which files make the tokenizer of a model that has the files `names`."""
    files = ["vocab.json", "merges.txt"]
    if "tokenizer.json" in names and not all(name in names for name in files):
        files = ["tokenizer.json"]
    return [*files, _ADDED_TOKENS] if _ADDED_TOKENS in names else files


def _shards(read_index: Callable[[], str | bytes], repo: str) -> list[str]:
    try:
        names = sorted(set(json.loads(read_index())["weight_map"].values()))
        if names and all(_SHARD.fullmatch(name) for name in names):
            return names
    except MALFORMED:
        pass
    raise CheckpointError(
        f"{repo}: {INDEX} does not name the files of its weights: use another copy of the model"
    )


def _is_whole(folder: Path) -> bool:
    try:
        names = {path.name for path in folder.iterdir() if path.is_file()}  # no dangling links
        return bool(model_files(names, str(folder), lambda: read_small(folder / INDEX)))
    except (OSError, GPTCLIError):
        return False


def _model_type(folder: Path) -> Any:
    try:
        config = json.loads(read_small(folder / CONFIG))
    except (OSError, *MALFORMED):
        return None
    return config.get("model_type") if isinstance(config, dict) else None


def _folder_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
