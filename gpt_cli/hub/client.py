"""Downloads from the Hub. Its client is imported only when something must be fetched."""

import logging
import os
import re
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt_cli.errors import CheckpointError, InputError, ModelNotFoundError, ResourceError, counted
from gpt_cli.folder.contents import has_safetensors
from gpt_cli.hub.local import Select, cache_folder, mark_conversion, nearest, repo_folder
from gpt_cli.system.files import file_hash
from gpt_cli.system.machine import format_size, within

if TYPE_CHECKING:
    from huggingface_hub import HfApi, ModelInfo
    from huggingface_hub.hf_api import RepoSibling

# Seconds for the first answer: with the start of Python and of the client, a dead network is
# reported within 3. Later requests have the client's timeouts.
_FIRST_ANSWER = 2.0
_PAUSES = (1.0, 2.0)  # seconds before the first request is repeated to an overloaded Hub
_OVERLOADED = (429, 500, 502, 503, 504)
_HEAD_ANSWER = 10.0  # seconds for a later HEAD; the client would wait for 6 times 60
_LONGEST_WAIT = 20  # seconds of Retry-After; the client would wait silently for any time
_BOT = "SFconvertbot"  # opens requests with the same weights as safetensors
_SHA256 = re.compile(r"[0-9a-f]{64}")

_log = logging.getLogger(__name__)

_AGAIN = "run the command again"
WAY_OUT = "or use a local model (`gpt-cli models` lists them), such as `tiny`"


class Snapshot:
    """A model on the Hub at one commit, to be fetched into the folder `to` or into the cache."""

    bars = False  # whether to show the progress of downloads
    request: str | None = None  # the pull request, if it was taken in place of `main`

    def __init__(self, repo: str, revision: str, to: Path | None):
        with _client(partial(_explain, repo, revision)):
            from huggingface_hub import HfApi

            self.api = HfApi(endpoint=_endpoint())
            info = _ask(self.api, repo, revision)
        self.repo, self.revision, self.commit, self.to = repo, revision, str(info.sha), to
        self.files = {file.rfilename: file for file in info.siblings or ()}

    def fetch(self, name: str, revision: str | None = None) -> Path:
        """Fetch a file and check its hash; the cache records the commit of a `revision`."""
        revision = revision or self.commit
        if name not in self.files:
            raise ModelNotFoundError(f"{self.repo} has no file {name} at {revision}")
        expected = self._expected_hash(name)
        with _client(partial(_explain, self.repo, revision), self.bars):
            fetched = self.api.hf_hub_download(
                self.repo, name, revision=revision, cache_dir=cache_folder(), local_dir=self.to
            )
        path = Path(fetched)
        if self.to is None and path.parent.name != self.commit:
            raise ModelNotFoundError(f"{self.repo} changed during the download: {_AGAIN}")
        if expected and (actual := file_hash(path, len(expected))) != expected:
            for damaged in (path, path.resolve()):  # a snapshot's file is a link to a blob
                damaged.unlink(missing_ok=True)
            kind = "git hash" if len(expected) == 40 else "sha256"
            problem = f"its {kind} is {actual:.12}…, not {expected:.12}…"
            raise CheckpointError(
                f"{self.repo}/{name} is damaged: {problem}; it was deleted, {_AGAIN}"
            )
        return path

    def conversion(self) -> str | None:
        """Return the open pull request that adds safetensors to this commit; None if unknown.

        It must be by the Hub's conversion bot, as in transformers: anybody can open a request.
        """
        with suppress(ModelNotFoundError), _client(partial(_explain, self.repo, self.commit)):
            threads = self.api.get_repo_discussions(
                self.repo, author=_BOT, discussion_type="pull_request", discussion_status="open"
            )
            for thread in threads:  # a mirror may ignore the filters
                if thread.author == _BOT and thread.is_pull_request and thread.status == "open":
                    reference = f"refs/pr/{thread.num}"
                    commits = self.api.list_repo_commits(self.repo, revision=reference)
                    if [commit.commit_id for commit in commits[1:2]] == [self.commit]:
                        return reference
        return None

    def _expected_hash(self, name: str) -> str | None:
        """Return the sha256 or git hash of a file, or None if the server has neither."""
        if listed := _hash_of(self.files[name]):
            return listed
        # The list of a mirror may have no hashes. The ETag of an LFS file is its sha256.
        with _client(partial(_explain, self.repo, self.commit)):
            from huggingface_hub import hf_hub_url

            url = hf_hub_url(self.repo, name, revision=self.commit, endpoint=_endpoint())
            etag = self.api.get_hf_file_metadata(url=url).etag
        return etag if etag and _SHA256.fullmatch(etag) else None


def _hash_of(file: "RepoSibling") -> str | None:
    """Return the hash that the Hub lists for a file, which is its blob's name in the cache."""
    return file.lfs.sha256 if file.lfs else file.blob_id


def find_snapshot(repo: str, revision: str | None, to: Path | None = None) -> Snapshot:
    """Return the given revision, or by default `main` or its conversion to safetensors."""
    snapshot = Snapshot(repo, revision or "main", to)
    if revision or has_safetensors(snapshot.files) or not (request := snapshot.conversion()):
        return snapshot
    converted = Snapshot(repo, request, to)
    converted.request = request
    return converted


def fetch_model(
    repo: str, revision: str | None, to: Path | None, quiet: bool, select: Select
) -> Path:
    """Fetch the files that `select` chooses into the folder `to`, or into the cache."""
    quiet = quiet or sys.stderr is None
    snapshot = find_snapshot(repo, revision, to)
    snapshot.bars = not quiet and sys.stderr.isatty()
    *others, config = select(snapshot.files, repo, snapshot.fetch)
    files = [snapshot.files[name] for name in (*others, config)]
    if not quiet and (snapshot.request or not has_safetensors(snapshot.files)):
        taken = snapshot.request or others[0]
        _log.warning("%s has no safetensors: taking %s", repo, taken)  # shown by default
    _check_space(repo, files, to, say=not quiet and not snapshot.bars)
    for name in others:
        snapshot.fetch(name)
    if snapshot.request and not to:
        mark_conversion(repo, snapshot.commit, snapshot.request)
    return snapshot.fetch(config, None if to else snapshot.revision).parent


def switched_off() -> bool:
    """Return whether the environment switches the Hub off, as its client reads it."""
    value = os.getenv("HF_HUB_OFFLINE") or os.getenv("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in ("1", "ON", "YES", "TRUE")


def problem() -> str | None:
    """Return the reason why the Hub cannot be used, or None if it answers a small request."""
    if switched_off():
        return "switched off by HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE"
    url, silent = f"{_endpoint()}/api/models?limit=1", f"{_endpoint()} does not answer"
    try:
        with _client(lambda error: f"{silent} ({_reason(error) or type(error).__name__})"):
            from huggingface_hub import get_session

            session = get_session()
            # A socket's timeout does not cover name resolution.
            answer = within(_FIRST_ANSWER, lambda: session.get(url, timeout=_FIRST_ANSWER))
            if answer.status_code >= 500:
                raise ValueError(f"status {answer.status_code}")
    except (InputError, ModelNotFoundError) as error:
        return str(error)
    return None


def _check_space(repo: str, files: "list[RepoSibling]", to: Path | None, *, say: bool) -> None:
    """Raise ResourceError if the disk has no space for the files; else announce the download."""
    blobs = repo_folder(repo) / "blobs"
    absent = (file for file in files if to or not (blobs / str(_hash_of(file))).exists())
    missing = sum(file.size or 0 for file in absent)
    target = to.parents[1] if to else blobs  # `to` is in a temporary folder
    free = shutil.disk_usage(next(path for path in (target, *target.parents) if path.exists())).free
    if missing > free:
        raise ResourceError(
            f"{repo} needs {format_size(missing)} of disk space, but {target} has only "
            f"{format_size(free)}: free some, or use another disk"
        )
    if missing and say:
        _log.warning("downloading %s (%s)", repo, format_size(missing))  # shown by default


def _ask(api: "HfApi", repo: str, revision: str) -> "ModelInfo":
    """Request the description of a revision; ask an overloaded Hub again."""
    from huggingface_hub.errors import HfHubHTTPError

    patience = float(os.getenv("HF_HUB_ETAG_TIMEOUT") or _FIRST_ANSWER)
    ask = partial(api.model_info, repo, revision=revision, timeout=patience, files_metadata=True)
    for pause in _PAUSES:
        try:
            return within(patience, ask)
        except HfHubHTTPError as error:
            if error.response.status_code not in _OVERLOADED:
                raise
        time.sleep(pause)
    return within(patience, ask)


@contextmanager
def _client(explain: Callable[[Exception], str], bars: bool = False) -> Iterator[None]:
    """Mute the Hub's client and translate its errors for one use of it."""
    if not _endpoint().startswith(("http://", "https://")):
        raise InputError("HF_ENDPOINT must begin with http:// or https://")
    # The client reads this at import. Without it, the client first sends another request, which
    # takes 3 seconds on a dead network.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    with warnings.catch_warnings(action="ignore"):
        try:
            from urllib.parse import urlsplit

            # Its own names print the errors of their imports, so modules are imported first.
            import huggingface_hub
            from huggingface_hub.utils import logging as client_log
            from huggingface_hub.utils.tqdm import (
                are_progress_bars_disabled,
                disable_progress_bars,
                enable_progress_bars,
            )

            _ = urlsplit(_endpoint()).port  # ValueError; older clients accept any port
            hooks = huggingface_hub.get_session().event_hooks
        except (ImportError, OSError, ValueError) as error:
            raise InputError(
                f"the Hub's client cannot start ({_reason(error)}): check the environment "
                "variables HF_*, SSL_* and *_PROXY"
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
                raise  # a disk error
            raise ModelNotFoundError(explain(error)) from error
        finally:
            hooks["request"].remove(_limit_patience)
            hooks["response"].remove(_refuse_long_waits)
            client_log.set_verbosity(verbosity)
            if had_bars:
                enable_progress_bars()


def _reason(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return next(iter(str(error).strip().splitlines()), "")[:150]


def _limit_patience(request: Any) -> None:
    """Limit the timeout of the HEAD request that precedes a file."""
    if request.method == "HEAD":
        most = float(os.getenv("HF_HUB_ETAG_TIMEOUT") or _HEAD_ANSWER)
        timeouts = request.extensions.get("timeout", {})
        timeouts.update((kind, min(seconds or most, most)) for kind, seconds in timeouts.items())


def _refuse_long_waits(response: Any) -> None:
    """Raise an error of the client instead of a long wait for Retry-After."""
    if response.status_code in _OVERLOADED and _wait(response) > _LONGEST_WAIT:
        from huggingface_hub.errors import HfHubHTTPError

        raise HfHubHTTPError("the server asks for a long wait", response=response)


def _wait(response: Any) -> int:
    """Return the seconds to wait according to the two headers that the client respects."""
    waits = re.findall(r"^\d+$", response.headers.get("Retry-After", ""))
    if response.status_code == 429:
        waits += re.findall(r"r\s*=\s*0\s*;\s*t\s*=\s*(\d+)", response.headers.get("RateLimit", ""))
    return max(map(int, waits), default=0)


def _explain(repo: str, revision: str, error: BaseException) -> str:
    """Return the message for an error of the client."""
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__:
        error = error.__cause__  # the outer error only adds that the file is not cached
    endpoint, reason, kind = _endpoint(), _reason(error), type(error).__name__
    match error:
        case errors.GatedRepoError():
            terms = f"accept its terms at {endpoint}/{repo}"
            return f"{repo} is gated: {terms}, then set HF_TOKEN or run `hf auth login`"
        case errors.RepositoryNotFoundError():
            unknown = f"no folder and no model on the Hub is named {repo}{nearest(repo)}"
            return f"{unknown}: check the name; a private model needs HF_TOKEN or `hf auth login`"
        case errors.RevisionNotFoundError():
            return f"{repo} has no revision {revision}: give one of its branches, tags or commits"
        case errors.RemoteEntryNotFoundError():
            return f"{repo} has no file {Path(error.response.url.path).name} at {revision}"
        case errors.HfHubHTTPError():
            return _explain_status(repo, error.response)
        case errors.HFValidationError():
            return f"{repo} cannot be a name on the Hub: {reason}"
        case errors.FileMetadataError():
            return f"{endpoint} does not answer like a Hub: check HF_ENDPOINT and the proxy"
    if "Timeout" in kind:
        failure = "does not answer (HF_HUB_ETAG_TIMEOUT=30 waits longer)"
    elif kind in ("ConnectError", "ProxyError"):  # of httpx, or httpx2 since the client's version 2
        failure = f"cannot be reached ({reason})"
    else:
        return f"the download of {repo} failed ({kind}: {reason}): {_AGAIN}"
    cure = f"check the network and the proxy, {WAY_OUT}"
    return f"{endpoint} {failure}, and {repo} is not local{nearest(repo)}: {cure}"


def _explain_status(repo: str, response: Any) -> str:
    match response.status_code:
        case 401 | 403 as status:
            cure = "set HF_TOKEN to a token that has access, or run `hf auth login`"
            return f"the Hub denies access to {repo} ({status}): {cure}"
        case 404:
            cure = "check the name, and HF_ENDPOINT if it is set"
            return f"{_endpoint()} has no {repo} (404): {cure}"
        case 429:
            wait = counted(seconds, "second") if (seconds := _wait(response)) else "some minutes"
            return f"too many requests to the Hub (429): wait {wait}, or set HF_TOKEN"
        case status:
            return f"the Hub answers {status} for {repo}: try again later, {WAY_OUT}"


def _endpoint() -> str:
    return os.getenv("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
