"""A name -> a local folder: bundled, a path, the Hub's cache, or a download into it."""

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from gpt_cli.config import GPT2Config
from gpt_cli.errors import GPTCLIError, InputError, ModelNotFoundError, ResourceError
from gpt_cli.hub import client
from gpt_cli.hub.local import (
    BUNDLED,
    CONFIG,
    SHORT_NAMES,
    LocalModel,
    bundled,
    cache_folder,
    cached_snapshot,
    checked_revision,
    hub_id,
    list_models,
    other_files,
    tokenizer_files,
)

if TYPE_CHECKING:
    from gpt_cli.tokenizer import Tokenizer

__all__ = [
    "LocalModel",
    "cache_folder",
    "download",
    "find",
    "is_folder",
    "list_models",
    "other_files",
    "problem",
    "read_config",
    "read_tokenizer",
    "resolve",
]


def find(name: str, revision: str | None = None) -> Path | None:
    """The folder of a model that is on this machine, else None; asks no network.

    A bundled or short name comes first (`./gpt2` forces a folder of that name), then a folder,
    then a Hub id, of which the cache must hold a whole snapshot.

    Raises:
        InputError: a revision was given for something that has none.
        ModelNotFoundError: the name can be none of these.
    """
    if name in BUNDLED or is_folder(name):
        if revision is not None:
            raise InputError(f"{name} has no revisions, as only a model on the Hub has them")
        return bundled(name) if name in BUNDLED else Path(name)
    if os.path.isfile(name):  # noqa: PTH113 (never raises)
        raise ModelNotFoundError(f"{name} is a file: give the folder that holds the whole model")
    return cached_snapshot(hub_id(name), checked_revision(revision))


def resolve(
    name: str, *, revision: str | None = None, offline: bool = False, quiet: bool = False
) -> Path:
    """The folder of a model, downloaded only if it is not on this machine yet.

    Raises:
        InputError: a revision was given for something that has none.
        ModelNotFoundError: the name is unknown, or the Hub cannot or will not give the model.
        CheckpointError: the Hub has no safetensors of it, or a file arrived damaged.
        ResourceError: the disk is full or cannot be written.
    """
    if found := find(name, revision):
        return found
    _go_online(hub_id(name), offline)
    return download(name, revision=revision, quiet=quiet)


def read_config(name: str, *, revision: str | None = None, offline: bool = False) -> GPT2Config:
    """The configuration of a model, for which no more than its config.json is fetched.

    Raises:
        The errors of `resolve`.
    """
    with _folder_of(lambda names: [CONFIG], name, revision, offline) as folder:
        return GPT2Config.from_folder(folder)


def read_tokenizer(name: str, *, revision: str | None = None, offline: bool = False) -> "Tokenizer":
    """The tokenizer of a model, for which no more than its few files are fetched.

    Raises:
        The errors of `resolve`.
    """
    from gpt_cli.tokenizer import Tokenizer  # here, as it brings tiktoken

    with _folder_of(tokenizer_files, name, revision, offline) as folder:
        return Tokenizer.from_folder(folder)


@contextmanager
def _folder_of(
    choose: Callable[[Collection[str]], list[str]], name: str, revision: str | None, offline: bool
) -> Iterator[Path]:
    """The folder of a model that is here, else one for a while of the files that `choose` picks."""
    if found := find(name, revision):
        yield found
        return
    repo = hub_id(name)
    _go_online(repo, offline)
    with client.fetch_few(repo, checked_revision(revision), choose) as folder:
        yield folder


def download(
    name: str, *, revision: str | None = None, to: Path | None = None, quiet: bool = False
) -> Path:
    """Fetch a model's files as the Hub has them now, check their hashes, and give their folder.

    They go to the Hub's cache, or to `to`: a plain folder that appears only when it is whole.

    Raises:
        The errors of `resolve`; InputError also where `to` is no new or empty folder.
    """
    if name in BUNDLED:
        raise InputError(f"{name} is bundled: there is nothing to download, use `--model {name}`")
    if is_folder(name):
        raise InputError(f"{name} is a folder: there is nothing to download, use it with --model")
    repo, revision = hub_id(name), checked_revision(revision)
    _go_online(repo)
    try:
        if to is None:
            return client.fetch_model(repo, revision, None, quiet)
        return client.fetch_folder(repo, revision, to.resolve(), quiet)
    except OSError as error:
        path = to or error.filename or cache_folder()
        hint = "HF_HOME sets another place for the cache" if to is None else "name another folder"
        raise ResourceError(f"cannot use {path}: {error.strerror or error}; {hint}") from error


def switched_off() -> bool:
    """Return whether the environment forbids to ask the Hub, as its client understands it."""
    value = os.getenv("HF_HUB_OFFLINE") or os.getenv("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in ("1", "ON", "YES", "TRUE")


def problem() -> str | None:
    """Why nothing can be fetched from the Hub; None where it answers."""
    try:
        _go_online("any model")
        client.check_reachable()
    except GPTCLIError as error:
        return str(error)
    return None


def is_folder(name: str) -> bool:
    """Return whether the name of a model is that of a folder here, and of nothing else."""
    return name not in (*BUNDLED, *SHORT_NAMES) and os.path.isdir(name)  # noqa: PTH112 (never raises)


def _go_online(repo: str, offline: bool = False) -> None:
    """Raise an error if the Hub must not be asked for `repo`, or has no address."""
    if not os.getenv("HF_ENDPOINT", "https://").startswith(("http://", "https://")):
        raise InputError("HF_ENDPOINT must begin with http:// or https://")
    if offline or switched_off():
        raise ModelNotFoundError(
            f"cannot fetch {repo}: the Hub is switched off (--offline, or HF_HUB_OFFLINE is set); "
            f"go online once to download it, {client.WAY_OUT}"
        )
