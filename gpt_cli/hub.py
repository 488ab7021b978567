"""A name -> a local folder: bundled, a path, the Hub's cache, or a download into it.

The cache is read here and not by the Hub's client, which takes longer to import than a cached
model takes to find; the client is imported only when something must be fetched.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gpt_cli.errors import (
    CheckpointError,
    GPTCLIError,
    InputError,
    ModelNotFoundError,
    ResourceError,
)

if TYPE_CHECKING:
    from huggingface_hub import HfApi, ModelInfo
    from huggingface_hub.hf_api import RepoSibling

BUNDLED = ("tiny",)
SHORT_NAMES = {
    "distilgpt2": "distilbert/distilgpt2",
    "gpt2": "openai-community/gpt2",
    "gpt2-medium": "openai-community/gpt2-medium",
    "gpt2-large": "openai-community/gpt2-large",
    "gpt2-xl": "openai-community/gpt2-xl",
}

_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_OPTIONAL = ("added_tokens.json", "generation_config.json")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")

_HUB_ID = re.compile(r"([a-zA-Z0-9][\w.-]*/)?[a-zA-Z0-9_]([\w.-]*\w)?", re.ASCII)
_SHARD = re.compile(
    r"\w[\w.-]*\.safetensors", re.ASCII
)  # a plain name, so no way out of the folder
_COMMIT = re.compile(r"[0-9a-f]{40}")

# How long the Hub may take for its first answer, in seconds: with the start of Python and of the
# client, a dead network is reported within 3. Every later request has the client's own patience.
_FIRST_ANSWER = 2.0
_PAUSES = (1.0, 2.0)  # seconds before that first question is put again to a Hub that is overloaded
_OVERLOADED = (429, 500, 502, 503, 504)

_WAY_OUT = "or use a model that is here (`gpt-cli models` lists them), such as `--model tiny`"


@dataclass(frozen=True)
class LocalModel:
    """A whole GPT-2 on this machine."""

    name: str  # what `--model` takes
    folder: Path
    origin: Literal["bundled", "cached"]
    size: int  # of all its files, in bytes
    commit: str | None  # None for a bundled one


def resolve(
    name: str, *, revision: str | None = None, offline: bool = False, quiet: bool = False
) -> Path:
    """The folder of a model, downloaded only if it is not on this machine yet.

    A bundled or short name comes first (`./gpt2` forces a folder of that name), then a folder,
    then a Hub id; a whole cached snapshot of it is used without any request.

    Raises:
        InputError: a revision was given for something that has none.
        ModelNotFoundError: the name is none of these, or the Hub cannot or will not give it.
        CheckpointError: the Hub has no safetensors of it, or a file arrived damaged.
        ResourceError: the disk is full or cannot be written.
    """
    is_folder = name not in SHORT_NAMES and os.path.isdir(name)  # noqa: PTH112 (never raises)
    if name in BUNDLED or is_folder:
        if revision is not None:
            raise InputError(f"{name} has no revisions, as only a model on the Hub has them")
        return _bundled(name) if name in BUNDLED else Path(name)
    if os.path.isfile(name):  # noqa: PTH113 (never raises)
        raise ModelNotFoundError(f"{name} is a file: give the folder that holds the whole model")
    repo = _hub_id(name)
    if cached := _cached_snapshot(repo, _checked_revision(revision)):
        return cached
    if offline:
        raise _offline_error(repo)
    return download(name, revision=revision, quiet=quiet)


def download(
    name: str, *, revision: str | None = None, to: Path | None = None, quiet: bool = False
) -> Path:
    """Fetch a model's files as the Hub has them now, check their sha256, and give their folder.

    They go to the Hub's cache, or to `to`: a plain folder that appears only when it is whole.

    Raises:
        The errors of `resolve`; InputError also where `to` is no new or empty folder.
    """
    if name in BUNDLED:
        raise InputError(f"{name} is bundled: there is nothing to download, use `--model {name}`")
    repo, revision = _hub_id(name), _checked_revision(revision)
    if _is_offline():
        raise _offline_error(repo)
    try:
        if to is None:
            return _fetch_model(repo, revision, None, quiet)
        return _fetch_folder(repo, revision, to.resolve(), quiet)
    except OSError as error:
        path = to or error.filename or cache_folder()
        hint = "HF_HOME sets another place for the cache" if to is None else "name another folder"
        raise ResourceError(f"cannot use {path}: {error.strerror or error}; {hint}") from error


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


def format_size(size: float) -> str:
    """A number of bytes for people: `548 MB`."""
    for unit in ("B", "kB", "MB"):
        if size < 999.5:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def cache_folder() -> Path:
    """The Hub's cache, by the same variables and in the same order as its client."""
    user_cache = os.getenv("XDG_CACHE_HOME", "~/.cache")
    home = _expand(os.getenv("HF_HOME", f"{user_cache}/huggingface"))
    return Path(
        _expand(os.getenv("HF_HUB_CACHE", os.getenv("HUGGINGFACE_HUB_CACHE", f"{home}/hub")))
    )


# --- names, and what is on this machine ---


def _expand(path: str) -> str:
    return os.path.expandvars(os.path.expanduser(path))  # noqa: PTH111 (never raises)


def _bundled_places(name: str) -> list[Path]:
    package = Path(__file__).parent
    return [package / "weights" / name, package.parent / "weights" / name]  # wheel, checkout


def _bundled(name: str) -> Path:
    for folder in _bundled_places(name):
        if folder.is_dir():
            return folder
    raise ModelNotFoundError(f"the bundled model {name} is missing: install gpt-cli again")


def _hub_id(name: str) -> str:
    repo = SHORT_NAMES.get(name, name)
    if not _HUB_ID.fullmatch(repo) or len(repo) > 96 or "--" in repo or ".." in repo:
        raise ModelNotFoundError(
            f"no model {name!r:.80}: it is neither a folder nor a name on the Hub; "
            "use a folder, OWNER/NAME, `gpt2`, or the bundled `tiny`"
        )
    return repo


def _checked_revision(revision: str | None) -> str:
    """The revision, which also names a file below `refs`; `main` where none was given."""
    if revision is None:
        return "main"
    if not revision.isprintable() or not revision.strip("/") or ".." in revision:
        raise InputError(f"{revision!r:.80} cannot be a revision: give a branch, a tag or a commit")
    return revision.strip("/")


def _cached_snapshot(repo: str, revision: str) -> Path | None:
    # Other tools may have cached a model that has a short name under that name.
    names = [repo, *(short for short, full in SHORT_NAMES.items() if full == repo)]
    for name in names:
        folder = _repo_folder(name)
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


def _repo_folder(repo: str) -> Path:
    return cache_folder() / f"models--{repo.replace('/', '--')}"


def _model_files(
    names: Collection[str], repo: str, read_index: Callable[[], str | bytes]
) -> list[str]:
    """Which of the files `names` make the model, config.json last: who has that has them all.

    Raises:
        ModelNotFoundError: some are not there.
        CheckpointError: the weights are no safetensors, or their index is damaged.
    """
    weights = [_WEIGHTS]
    if _WEIGHTS not in names and _INDEX in names:
        weights = [_INDEX, *_shards(read_index(), repo)]
    elif _WEIGHTS not in names and (pickles := [n for n in names if n.endswith(_PICKLES)]):
        raise CheckpointError(
            f"{repo} has its weights only as {pickles[0]}, which may run code when it is opened; "
            "only safetensors are opened"
        )
    tokenizer = ["vocab.json", "merges.txt"]
    if "tokenizer.json" in names and not all(name in names for name in tokenizer):
        tokenizer = ["tokenizer.json"]
    needed = [*weights, *tokenizer, *(name for name in _OPTIONAL if name in names), _CONFIG]
    if missing := [name for name in needed if name not in names]:
        raise ModelNotFoundError(f"{repo} has no {', '.join(missing)}: it is not a whole GPT-2")
    return needed


def _shards(index: str | bytes, repo: str) -> list[str]:
    try:
        names = sorted(set(json.loads(index)["weight_map"].values()))
        if names and all(_SHARD.fullmatch(name) for name in names):
            return names
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise CheckpointError(f"{repo}: {_INDEX} does not name the files of its weights")


def _is_whole(folder: Path) -> bool:
    try:
        names = {path.name for path in folder.iterdir() if path.is_file()}  # no dangling links
        return bool(_model_files(names, str(folder), (folder / _INDEX).read_bytes))
    except (OSError, GPTCLIError):
        return False


def _model_type(folder: Path) -> Any:
    try:
        config = json.loads((folder / _CONFIG).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return config.get("model_type") if isinstance(config, dict) else None


def _folder_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


# --- the Hub ---


def _endpoint() -> str:
    return os.getenv("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def _is_offline() -> bool:
    value = os.getenv("HF_HUB_OFFLINE") or os.getenv("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in ("1", "ON", "YES", "TRUE")


def _fetch_folder(repo: str, revision: str, to: Path, quiet: bool) -> Path:
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise InputError(f"{to} exists and is not an empty folder: name a new one")
    beside = next(parent for parent in to.parents if parent.exists())
    # The client takes what its cache has, and fetches the rest straight into the folder. The model
    # lies one level down because the scratch folder itself is readable for its owner only.
    with tempfile.TemporaryDirectory(prefix=f".{to.name}-", dir=beside) as scratch:
        folder = Path(scratch, "model")
        folder.mkdir()
        _fetch_model(repo, revision, folder, quiet)
        shutil.rmtree(folder / ".cache")  # the client's own notes
        to.parent.mkdir(parents=True, exist_ok=True)
        folder.replace(to)
    return to


def _fetch_model(repo: str, revision: str, to: Path | None, quiet: bool) -> Path:
    """Fetch the files that make the model into the folder `to` or into the cache."""
    with _client(repo, revision):
        from huggingface_hub import HfApi

        api = HfApi(endpoint=_endpoint())
        info = _ask(api, repo, revision)
    commit = str(info.sha)
    listed = {file.rfilename: file for file in info.siblings or ()}
    bars = sys.stderr.isatty() and not quiet

    def fetch(name: str, revision: str = commit) -> Path:
        with _client(repo, revision, bars):
            path = Path(
                api.hf_hub_download(
                    repo, name, revision=revision, cache_dir=cache_folder(), local_dir=to
                )
            )
        if lfs := listed[name].lfs:
            _check_sha256(path, lfs.sha256, f"{repo}/{name}")
        return path

    names = _model_files(listed, repo, lambda: fetch(_INDEX).read_bytes())
    _check_space(repo, [listed[name] for name in names], to, say=not quiet and not bars)
    for name in names[:-1]:
        fetch(name)
    # By its revision's name and not by the commit: so the client records what the name stands for.
    config = fetch(names[-1], commit if to else revision)
    if not to and config.parent.name != commit:
        raise ModelNotFoundError(f"{repo} changed during the download: run the command again")
    return config.parent


def _check_space(repo: str, files: "list[RepoSibling]", to: Path | None, *, say: bool) -> None:
    blobs = _repo_folder(repo) / "blobs"  # the cache's files, each named by its hash
    missing = sum(
        file.size or 0
        for file in files
        if to or not (blobs / str(file.lfs.sha256 if file.lfs else file.blob_id)).exists()
    )
    place = to.parents[1] if to else blobs  # `to` lies in a scratch folder, which no one knows
    free = shutil.disk_usage(next(path for path in (place, *place.parents) if path.exists())).free
    if missing > free:
        raise ResourceError(
            f"{repo} needs {format_size(missing)} of disk, and {place} has {format_size(free)} left"
        )
    if missing and say:
        print(f"downloading {repo} ({format_size(missing)})", file=sys.stderr)


def _check_sha256(path: Path, expected: str, name: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found == expected:
        return
    while path.is_symlink():  # a snapshot's file is a link to a blob, and a blob may be one too
        target = path.parent / path.readlink()
        path.unlink()
        path = target
    path.unlink()
    raise CheckpointError(
        f"{name} is damaged: its sha256 is {found:.12}… and not {expected:.12}…; "
        "it was deleted, run the command again"
    )


def _ask(api: "HfApi", repo: str, revision: str) -> "ModelInfo":
    """Ask for the commit of a revision and its files, with their sizes and sha256."""
    from huggingface_hub.errors import HfHubHTTPError

    patience = float(os.getenv("HF_HUB_ETAG_TIMEOUT") or _FIRST_ANSWER)

    def ask() -> "ModelInfo":
        return api.model_info(repo, revision=revision, timeout=patience, files_metadata=True)

    for pause in _PAUSES:
        try:
            return _within(patience, ask)
        except HfHubHTTPError as error:
            if error.response.status_code not in _OVERLOADED:
                raise
        time.sleep(pause)
    return _within(patience, ask)


def _within(seconds: float, ask: "Callable[[], ModelInfo]") -> "ModelInfo":
    """Call in a thread: no socket's timeout covers the resolver, or a host of many addresses."""
    from concurrent.futures import Future

    answer: Future[ModelInfo] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer.result(seconds)


@contextmanager
def _client(repo: str, revision: str, bars: bool = False) -> Iterator[None]:
    """Around each use of the Hub's client: its chatter is muted, its errors become ours."""
    # Set before its import, and read only then: else the client's first request is one of its own,
    # to learn whether an agent runs it, and on a dead network that one waits for 3 seconds.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from huggingface_hub.utils import logging as client_log
        from huggingface_hub.utils.tqdm import (
            are_progress_bars_disabled,
            disable_progress_bars,
            enable_progress_bars,
        )

        verbosity, had_bars = client_log.get_verbosity(), not are_progress_bars_disabled()
        client_log.set_verbosity(logging.CRITICAL)
        if not bars:
            disable_progress_bars()
        try:
            yield
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # of the disk
            raise ModelNotFoundError(_explain(error, repo, revision)) from error
        finally:
            client_log.set_verbosity(verbosity)
            if had_bars:
                enable_progress_bars()


def _explain(error: BaseException, repo: str, revision: str) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__:
        error = error.__cause__  # the client adds only that the cache has no such file either
    endpoint = _endpoint()
    reason = next(iter(str(error).strip().splitlines()), "")[:150]
    match error:
        case errors.GatedRepoError():
            return (
                f"{repo} is gated: accept its terms at {endpoint}/{repo}, "
                "then set HF_TOKEN or run `hf auth login`"
            )
        case errors.RepositoryNotFoundError():
            return (
                f"the Hub has no model {repo}: check the name; "
                "a private one needs HF_TOKEN or `hf auth login`"
            )
        case errors.RevisionNotFoundError():
            return f"{repo} has no revision {revision}: give one of its branches, tags or commits"
        case errors.RemoteEntryNotFoundError():
            return f"{repo} has no file {Path(error.response.url.path).name} at {revision}"
        case errors.HfHubHTTPError():
            return _explain_status(error.response.status_code, repo)
        case errors.HFValidationError():
            return f"{repo} cannot be a name on the Hub: {reason}"
        case errors.FileMetadataError():
            return f"{endpoint} does not answer as a Hub does: check HF_ENDPOINT and the proxy"
    kind = type(error).__name__  # httpx's, or httpx2's from version 2 of the client
    if "Timeout" in kind:
        return (
            f"{endpoint} does not answer: check the network and the proxy "
            f"(HF_HUB_ETAG_TIMEOUT=30 waits longer for a slow one), {_WAY_OUT}"
        )
    if kind in ("ConnectError", "ProxyError"):
        return f"cannot reach {endpoint} ({reason}): check the network and the proxy, {_WAY_OUT}"
    return f"the download of {repo} failed ({kind}: {reason}): run the command again"


def _explain_status(status: int, repo: str) -> str:
    if status in (401, 403):
        return f"the Hub refuses {repo} to this token ({status}): set HF_TOKEN, or `hf auth login`"
    if status == 404:
        return f"{_endpoint()} has no {repo} (404): check the name, and HF_ENDPOINT if it is set"
    if status == 429:
        return "the Hub gets too many requests from here (429): wait some minutes, or set HF_TOKEN"
    if status >= 500:
        return f"the Hub is out of order ({status}): try again later, {_WAY_OUT}"
    return f"the Hub refuses {repo} ({status})"


def _offline_error(repo: str) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"cannot fetch {repo}: the Hub is switched off (--offline, or HF_HUB_OFFLINE is set); "
        f"go online once to download it, {_WAY_OUT}"
    )
