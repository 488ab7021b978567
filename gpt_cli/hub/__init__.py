"""From a model's name to its folder: bundled, a path, cached, or downloaded."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpt_cli.errors import GPTCLIError, InputError, ModelNotFoundError, ResourceError, import_extra
from gpt_cli.folder import contents
from gpt_cli.folder.config import GPT2Config
from gpt_cli.folder.settings import read_config
from gpt_cli.hub import client, local, messages
from gpt_cli.hub.connection import problem as problem
from gpt_cli.hub.connection import switched_off as switched_off
from gpt_cli.hub.local import BUNDLED, SHORT_NAMES, checked_revision, hub_id
from gpt_cli.options.declare import OptionError
from gpt_cli.system.atomic import new_folder
from gpt_cli.system.files import read_json

if TYPE_CHECKING:
    from gpt_cli.folder.tokenizer import Tokenizer


def find(name: str, revision: str | None = None) -> Path | None:
    """Return the folder of a local model, or None; use no network.

    A bundled or short name comes first (`./gpt2` forces a folder of that name), then a folder,
    then a Hub id with a complete snapshot in the cache. Raise OptionError for a revision of a
    bundled model or a folder, and ModelNotFoundError for a name that is not valid.
    """
    if name in BUNDLED or is_folder(name):
        if revision is not None:
            complaint = f"{revision:.80}: {name} is not a model on the Hub, so it has no revisions"
            raise OptionError("revision", complaint)
        return local.bundled(name) if name in BUNDLED else local.check_folder(Path(name))
    if os.path.isfile(name):  # noqa: PTH113 (never raises)
        raise ModelNotFoundError(f"{name} is a file: give the folder that holds the model")
    return local.cached_snapshot(hub_id(name), checked_revision(revision))


def resolve(
    name: str, *, revision: str | None = None, offline: bool = False, quiet: bool = False
) -> Path:
    """Return the folder of a model; download it if it is not local. See `find`, `download`."""
    return find(name, revision) or download(name, revision=revision, offline=offline, quiet=quiet)


@dataclass(frozen=True)
class Description:
    """The facts about a model that are known without reading its weights."""

    config: GPT2Config  # with the start and end tokens of the tokenizer, if that is known
    folder: Path | None  # None if the model is not on this machine
    weights: str | None  # the name of their file, or of the index of their shards
    vocabulary: tuple[str, ...]  # the files of the tokenizer; empty if there are none
    tokenizer: "Tokenizer | None"  # None if it cannot be read, or is not on this machine
    problem: str | None  # why the model cannot be used as it is


def describe(name: str, *, revision: str | None = None, offline: bool = False) -> Description:
    """Describe a model; fetch only config.json if it is not local. Errors are those of a download.

    A folder may have no weights and no tokenizer.
    """
    folder = find(name, revision)
    if folder:
        return _describe_folder(name, folder)
    with _temporary(name, revision, offline) as snapshot:
        return _describe_snapshot(snapshot)


def _describe_folder(name: str, folder: Path) -> Description:
    from gpt_cli.folder.tokenizer import read_tokenizer, with_special_tokens  # imports tiktoken

    files = {path.name for path in folder.iterdir()}
    vocabulary = contents.vocabulary(files) or ()
    weights = contents.select_weights(files, str(folder), folder.joinpath)[0]
    config = read_config(folder)
    if weights not in files:
        absent = f"{name} has no weights: add its model.safetensors or pytorch_model.bin"
        return Description(config, folder, None, vocabulary, None, absent)
    tokenizer: Tokenizer | None = None
    problem: str | None = None
    try:
        tokenizer = read_tokenizer(folder)
        config = with_special_tokens(config, tokenizer, folder)
    except GPTCLIError as error:
        problem = str(error)
    return Description(config, folder, weights, vocabulary, tokenizer, problem)


def _describe_snapshot(snapshot: client.Snapshot) -> Description:
    vocabulary = contents.vocabulary(snapshot.files) or ()
    weights = contents.model_files(snapshot.files, snapshot.repo, snapshot.fetch)[0]
    raw = read_json(snapshot.fetch(contents.CONFIG))
    config = GPT2Config.from_dict(raw, f"{snapshot.repo}/{contents.CONFIG}")
    problem = None
    # With these files, the tokenizer is nearly always of GPT-2's own kind.
    if any(file not in snapshot.files for file in contents.BYTE_BPE):
        doubt = ", unless it is of GPT-2's own kind" if vocabulary[0] == "tokenizer.json" else ""
        purpose = f"{vocabulary[0]} needs the package tokenizers{doubt}"
        try:
            import_extra(purpose, "tokenizers", "tokenizers")
        except ResourceError as error:
            problem = str(error)
    return Description(config, None, weights, vocabulary, None, problem)


def resolve_all(
    name: str,
    adapter: str | None = None,
    *,
    revision: str | None = None,
    offline: bool = False,
    quiet: bool = False,
) -> list[Path]:
    """Return the folder of a model, then that of its adapter, if there is one."""
    folders = [resolve(name, revision=revision, offline=offline, quiet=quiet)]
    if adapter is not None:
        folders.append(_resolve_adapter(adapter, offline, quiet))
    return folders


def _resolve_adapter(name: str, offline: bool, quiet: bool) -> Path:
    """Return the folder of an adapter; download it from the main branch if it is not local."""
    if os.path.isdir(name):  # noqa: PTH112 (never raises)
        return Path(name)
    try:
        if os.path.isfile(name):  # noqa: PTH113 (never raises)
            raise ModelNotFoundError
        cached = local.cached_snapshot(hub_id(name), None, contents.adapter_download)
    except ModelNotFoundError:
        cure = "give the folder of an adapter, or OWNER/NAME on the Hub"
        raise ModelNotFoundError(f"no adapter {name!r:.80}: {cure}") from None
    return cached or download(name, offline=offline, quiet=quiet, select=contents.adapter_download)


def read_tokenizer(name: str, *, revision: str | None = None, offline: bool = False) -> "Tokenizer":
    """Return the tokenizer of a model; fetch only its files if the model is not local.

    The folder of an adapter may have a tokenizer, too.
    """
    from gpt_cli.folder.tokenizer import read_tokenizer  # imports tiktoken

    if _is_adapter_with_tokenizer(Path(name)):
        return read_tokenizer(Path(name))
    folder = find(name, revision)
    if folder:
        return read_tokenizer(folder)
    with _temporary(name, revision, offline) as snapshot:
        files = contents.tokenizer_files(snapshot.files)
        if contents.CONFIG in snapshot.files:  # it may name the kind of tokenizer
            files.append(contents.CONFIG)
        paths = [snapshot.fetch(file) for file in files]
        return read_tokenizer(paths[0].parent)


def _is_adapter_with_tokenizer(folder: Path) -> bool:
    if not (folder / contents.ADAPTER_CONFIG).is_file():
        return False
    return contents.vocabulary({path.name for path in folder.iterdir()}) is not None


@contextmanager
def _temporary(name: str, revision: str | None, offline: bool) -> Iterator[client.Snapshot]:
    """Yield a model on the Hub whose files are fetched to a temporary folder.

    They do not go to the cache, because a config.json there marks a complete model.
    """
    repo, revision = _on_hub(name, revision, offline)
    with tempfile.TemporaryDirectory() as scratch:
        yield client.Snapshot(repo, revision or "main", Path(scratch))


def download(
    name: str,
    *,
    revision: str | None = None,
    to: Path | None = None,
    offline: bool = False,
    quiet: bool = False,
    select: local.Select = contents.model_files,
) -> Path:
    """Fetch the current files of a model, check their hashes, and return their folder.

    `select` chooses the files. They go to the Hub's cache, or to `to`: a plain folder that appears
    only when it is complete.

    Raise InputError if the model is local or `to` is not a new or empty folder, ModelNotFoundError
    if the Hub does not provide the model, CheckpointError if its weights have another format or a
    file arrived damaged, and ResourceError if the disk is full or not writable.
    """
    if name in BUNDLED or is_folder(name):
        kind = "bundled" if name in BUNDLED else "a folder"
        raise InputError(f"{name} is {kind}: use it as it is, without a download")
    repo, revision = _on_hub(name, revision, offline)
    try:
        if to is None:
            return client.fetch_model(repo, revision, None, quiet, select)
        with new_folder(to) as folder:
            client.fetch_model(repo, revision, folder, quiet, select)
            shutil.rmtree(folder / ".cache")  # of the client
        return to.resolve()
    except OSError as error:
        path = to or error.filename or local.cache_folder()
        hint = "set HF_HOME to another place" if to is None else "give another folder"
        raise ResourceError(f"cannot use {path}: {error.strerror or error}; {hint}") from error


def is_folder(name: str) -> bool:
    """Return whether a model's name means a local folder."""
    is_short = name in BUNDLED or name in SHORT_NAMES
    return not is_short and os.path.isdir(name)  # noqa: PTH112 (never raises)


def shown_name(name: str) -> str:
    """Return the name of a model for others, which for a folder is not its path."""
    return Path(name).resolve().name if is_folder(name) else name


def _on_hub(name: str, revision: str | None, offline: bool) -> tuple[str, str | None]:
    """Return the Hub id and the revision of a model; raise an error if the Hub is switched off."""
    repo = hub_id(name)
    if offline or switched_off():
        commits = local.cached_commits(repo)
        if commits and revision is None and local.cached_snapshot(repo, None) is None:
            cure = f"add --revision {commits[0]}"
            raise ModelNotFoundError(f"the cache has {repo}, but not what main is: {cure}")
        raise ModelNotFoundError(
            f"cannot fetch {repo}{local.nearest(repo)}: the Hub is switched off (by "
            f"--offline, or by HF_HUB_OFFLINE); download it once online, {messages.WAY_OUT}"
        )
    return repo, checked_revision(revision)
