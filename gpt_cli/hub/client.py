"""The Hub's client, which is imported only when something must be fetched."""

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
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gpt_cli.atomic import new_folder
from gpt_cli.errors import CheckpointError, InputError, ModelNotFoundError, ResourceError
from gpt_cli.files import INDEX, git_hash, read_small, sha256
from gpt_cli.hub.local import CONFIG, cache_folder, model_files, repo_folder
from gpt_cli.machine import format_size

if TYPE_CHECKING:
    from huggingface_hub import HfApi, ModelInfo
    from huggingface_hub.hf_api import RepoSibling

# How long the Hub may take for its first answer, in seconds: with the start of Python and of the
# client, a dead network is reported within 3. Every later request has the client's own patience.
_FIRST_ANSWER = 2.0
_PAUSES = (1.0, 2.0)  # seconds before that first question is put again to a Hub that is overloaded
_OVERLOADED = (429, 500, 502, 503, 504)
_HEAD_ANSWER = 10.0  # seconds for a later question; the client would wait for 6 times 60
_LONGEST_WAIT = 20  # seconds that an overloaded server may ask for; the client would wait silently

T = TypeVar("T")

WAY_OUT = "or use a model that is here (`gpt-cli models` lists them), such as `--model tiny`"


def fetch_folder(repo: str, revision: str, to: Path, quiet: bool) -> Path:
    """Fetch the files that make the model into a new folder, which appears when it is whole."""
    with new_folder(to) as folder:
        # The client takes what its cache has, and fetches the rest straight into the folder.
        fetch_model(repo, revision, folder, quiet)
        shutil.rmtree(folder / ".cache")  # the client's own notes
    return to


@contextmanager
def fetch_few(
    repo: str, revision: str, choose: Callable[[Collection[str]], list[str]]
) -> Iterator[Path]:
    """Fetch the files that `choose` picks of all names, into a folder that is there for a while.

    They go past the cache, where config.json marks a model that is whole.
    """
    with tempfile.TemporaryDirectory() as scratch:
        with _client(repo, revision):
            from huggingface_hub import HfApi

            api = HfApi(endpoint=_endpoint())
            info = _ask(api, repo, revision)
            listed = {file.rfilename: file for file in info.siblings or ()}
            paths = {
                name: api.hf_hub_download(
                    repo, name, revision=info.sha, cache_dir=cache_folder(), local_dir=scratch
                )
                for name in choose(listed)
            }
        for name, path in paths.items():
            _check_hash(Path(path), listed[name], f"{repo}/{name}")
        yield Path(scratch)


def fetch_model(repo: str, revision: str, to: Path | None, quiet: bool) -> Path:
    """Fetch the files that make the model into the folder `to` or into the cache."""
    with _client(repo, revision):
        from huggingface_hub import HfApi

        api = HfApi(endpoint=_endpoint())
        info = _ask(api, repo, revision)
    commit = str(info.sha)
    listed = {file.rfilename: file for file in info.siblings or ()}
    quiet = quiet or sys.stderr is None
    bars = not quiet and sys.stderr.isatty()

    def fetch(name: str, revision: str = commit) -> Path:
        with _client(repo, revision, bars):
            return Path(
                api.hf_hub_download(
                    repo, name, revision=revision, cache_dir=cache_folder(), local_dir=to
                )
            )

    def fetch_checked(name: str) -> Path:
        path = fetch(name)
        _check_hash(path, listed[name], f"{repo}/{name}")
        return path

    names = model_files(listed, repo, lambda: read_small(fetch_checked(INDEX)))
    _check_space(repo, [listed[name] for name in names], to, say=not quiet and not bars)
    for name in names[:-1]:
        fetch_checked(name)
    # By its revision's name and not by the commit: so the client records what the name stands for.
    config = fetch(names[-1], commit if to else revision)
    if not to and config.parent.name != commit:
        raise ModelNotFoundError(f"{repo} changed during the download: run the command again")
    _check_hash(config, listed[CONFIG], f"{repo}/{CONFIG}")
    return config.parent


def check_reachable() -> None:
    """Ask the Hub for anything.

    Raises:
        ModelNotFoundError: it does not answer.
    """
    url = f"{_endpoint()}/api/models?limit=1"
    try:
        with _client("", ""):
            from huggingface_hub import get_session

            session = get_session()
            answer = _within(_FIRST_ANSWER, lambda: session.get(url, timeout=_FIRST_ANSWER))
            if answer.status_code >= 500:
                raise ValueError(f"status {answer.status_code}")
    except ModelNotFoundError as error:
        cause = error.__cause__
        reason = _reason(cause) if cause and str(cause) else type(cause).__name__
        raise ModelNotFoundError(f"{_endpoint()} does not answer ({reason})") from error


def _check_space(repo: str, files: "list[RepoSibling]", to: Path | None, *, say: bool) -> None:
    blobs = repo_folder(repo) / "blobs"  # the cache's files, each named by its hash
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


def _check_hash(path: Path, listed: "RepoSibling", name: str) -> None:
    """Compare a file with its sha256, or a small one with the hash that git has of it."""
    kind, expected = ("sha256", listed.lfs.sha256) if listed.lfs else ("git hash", listed.blob_id)
    if expected is None:  # a mirror need not list those of small files
        return
    found = sha256(path) if listed.lfs else git_hash(path)
    if found == expected:
        return
    while path.is_symlink():  # a snapshot's file is a link to a blob, and a blob may be one too
        target = path.parent / path.readlink()
        path.unlink()
        path = target
    path.unlink()
    raise CheckpointError(
        f"{name} is damaged: its {kind} is {found:.12}… and not {expected:.12}…; "
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


def _within(seconds: float, ask: Callable[[], T]) -> T:
    """Call in a thread: no socket's timeout covers the resolver, or a host of many addresses."""
    from concurrent.futures import Future

    answer: Future[T] = Future()

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
        try:
            from huggingface_hub import get_session
            from huggingface_hub.utils import logging as client_log
            from huggingface_hub.utils.tqdm import (
                are_progress_bars_disabled,
                disable_progress_bars,
                enable_progress_bars,
            )

            hooks = get_session().event_hooks
        except (ImportError, OSError, ValueError) as error:
            raise InputError(
                f"the Hub's client cannot begin ({_reason(error)}): check the variables whose "
                "names begin with HF_ or SSL_ or end with _PROXY"
            ) from error

        verbosity, had_bars = client_log.get_verbosity(), not are_progress_bars_disabled()
        client_log.set_verbosity(logging.CRITICAL)
        if not bars:
            disable_progress_bars()
        hooks["request"].append(_limit_patience)
        hooks["response"].append(_refuse_long_waits)
        try:
            yield
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # of the disk
            raise ModelNotFoundError(_explain(error, repo, revision)) from error
        finally:
            hooks["request"].remove(_limit_patience)
            hooks["response"].remove(_refuse_long_waits)
            client_log.set_verbosity(verbosity)
            if had_bars:
                enable_progress_bars()


def _reason(error: BaseException) -> str:
    """Return the first line of what an error says."""
    return next(iter(str(error).strip().splitlines()), "")[:150]


def _limit_patience(request: Any) -> None:
    """Let the question before a file wait no longer than the client does where one is cached."""
    if request.method == "HEAD":
        most = float(os.getenv("HF_HUB_ETAG_TIMEOUT") or _HEAD_ANSWER)
        timeouts = request.extensions.get("timeout", {})
        timeouts.update((kind, min(seconds or most, most)) for kind, seconds in timeouts.items())


def _refuse_long_waits(response: Any) -> None:
    """Raise the client's own error where it would wait for as long as the server asks."""
    if response.status_code in _OVERLOADED and _wait(response) > _LONGEST_WAIT:
        from huggingface_hub.errors import HfHubHTTPError

        raise HfHubHTTPError("the server asks for too long a wait", response=response)


def _wait(response: Any) -> int:
    """How many seconds an answer asks to wait, in one of the two headers that the client heeds."""
    asked = re.findall(r"^\d+$", response.headers.get("Retry-After", ""))
    if response.status_code == 429:
        asked += re.findall(r"r\s*=\s*0\s*;\s*t\s*=\s*(\d+)", response.headers.get("RateLimit", ""))
    return max(map(int, asked), default=0)


def _explain(error: BaseException, repo: str, revision: str) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__:
        error = error.__cause__  # the client adds only that the cache has no such file either
    endpoint = _endpoint()
    reason = _reason(error)
    match error:
        case errors.GatedRepoError():
            return (
                f"{repo} is gated: accept its terms at {endpoint}/{repo}, "
                "then set HF_TOKEN or run `hf auth login`"
            )
        case errors.RepositoryNotFoundError():
            return (
                f"the Hub has no model {repo}, and there is no such folder: check the name; "
                "a private one needs HF_TOKEN or `hf auth login`"
            )
        case errors.RevisionNotFoundError():
            return f"{repo} has no revision {revision}: give one of its branches, tags or commits"
        case errors.RemoteEntryNotFoundError():
            return f"{repo} has no file {Path(error.response.url.path).name} at {revision}"
        case errors.HfHubHTTPError():
            return _explain_status(error.response.status_code, _wait(error.response), repo)
        case errors.HFValidationError():
            return f"{repo} cannot be a name on the Hub: {reason}"
        case errors.FileMetadataError():
            return f"{endpoint} does not answer as a Hub does: check HF_ENDPOINT and the proxy"
    kind = type(error).__name__  # httpx's, or httpx2's from version 2 of the client
    if "Timeout" in kind:
        return (
            f"{endpoint} does not answer for {repo}, which is no folder here: check the network "
            f"and the proxy (HF_HUB_ETAG_TIMEOUT=30 waits longer for a slow one), {WAY_OUT}"
        )
    if kind in ("ConnectError", "ProxyError"):
        return (
            f"cannot reach {endpoint} for {repo}, which is no folder here ({reason}): "
            f"check the network and the proxy, {WAY_OUT}"
        )
    return f"the download of {repo} failed ({kind}: {reason}): run the command again"


def _explain_status(status: int, wait: int, repo: str) -> str:
    if status in (401, 403):
        return f"the Hub refuses {repo} to this token ({status}): set HF_TOKEN, or `hf auth login`"
    if status == 404:
        return f"{_endpoint()} has no {repo} (404): check the name, and HF_ENDPOINT if it is set"
    if status == 429:
        time = f"{wait} seconds" if wait else "some minutes"
        return f"the Hub gets too many requests from here (429): wait {time}, or set HF_TOKEN"
    if status >= 500:
        return f"the Hub is out of order ({status}): try again later, {WAY_OUT}"
    return f"the Hub refuses {repo} ({status}): try again later, {WAY_OUT}"


def _endpoint() -> str:
    return os.getenv("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
