"""Downloads from the Hub. Its client is imported only when something must be fetched."""

import logging
import re
import shutil
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gpt_cli.errors import CheckpointError, ModelNotFoundError, ResourceError
from gpt_cli.folder.contents import has_safetensors
from gpt_cli.hub import connection, messages, resume
from gpt_cli.hub.local import Select, cache_folder, repo_folder, short_name
from gpt_cli.hub.messages import AGAIN, endpoint
from gpt_cli.hub.progress import Progress
from gpt_cli.hub.storage import Storage, without_xet
from gpt_cli.system.files import file_hash
from gpt_cli.system.machine import format_size

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

_SHA256 = re.compile(r"[0-9a-f]{64}")

_log = logging.getLogger(__name__)


class Snapshot:
    """A model on the Hub at one commit, to be fetched into the folder `to` or into the cache."""

    progress: Progress | None = None  # of the download of all its files
    over_http = False  # whether files come from the Hub itself, even if they are in its storage

    def __init__(self, repo: str, revision: str, to: Path | None):
        with connection.client(partial(messages.of_download, repo, revision)):
            from huggingface_hub import HfApi

            self.api = HfApi(endpoint=endpoint())
            info = connection.ask(self.api, repo, revision)
        self.repo, self.revision, self.commit, self.to = repo, revision, str(info.sha), to
        self.files = {file.rfilename: file for file in info.siblings or ()}

    def fetch(self, name: str, revision: str | None = None) -> Path:
        """Fetch a file and check its hash; the cache records the commit of a `revision`."""
        revision = revision or self.commit
        if name not in self.files:
            raise ModelNotFoundError(f"{self.repo} has no file {name} at {revision}")
        expected = self._expected_hash(name)
        path = self._download(name, revision)
        if self.to is None and path.parent.name != self.commit:
            raise ModelNotFoundError(f"{self.repo} changed during the download: {AGAIN}")
        if expected and (actual := file_hash(path, len(expected))) != expected:
            _delete(path)
            kind = "git hash" if len(expected) == 40 else "sha256"
            problem = f"its {kind} is {actual:.12}…, not {expected:.12}…"
            raise CheckpointError(
                f"{self.repo}/{name} is damaged: {problem}; it was deleted, {AGAIN}"
            )
        return path

    def _download(self, name: str, revision: str) -> Path:
        """Fetch a file from the storage that speaks Xet if it is there, or else over HTTP."""
        progress = self.progress or Progress(self.repo, 0, quiet=True)
        with (
            connection.client(self._explain) as exchange,
            nullcontext() if self.progress else progress,
        ):
            storage = Storage(exchange, progress)
            # HTTP has left a part of the file, probably since the storage had failed.
            goes_on = not self.to and resume.size_of_part(self.repo, self.files[name]) > 0
            if not (self.over_http or goes_on):
                try:
                    return self._request(name, revision, storage)
                except Exception as error:
                    if not storage.has_failed(error):
                        raise
                    storage.leave()
                    _log.info("the storage: %s", error)
                    progress.say(
                        "%s: fetching %s over HTTP (HF_HUB_DISABLE_XET=1 does so from the start)",
                        storage.reason(error), short_name(self.repo),
                    )  # fmt: skip
                self.over_http = True
            with without_xet():
                return self._request(name, revision, storage)

    def _request(self, name: str, revision: str, storage: Storage) -> Path:
        progress = storage.progress
        file = self.files[name]
        progress.begin_file(storage.leave_if_silent)
        part = None if self.to else resume.part_of(self.repo, file)
        if part and resume.is_over_http(self.repo, file, self.commit):
            resume.fetch_blob(self.repo, file, self.commit, progress.bar_class)
        fetched = self.api.hf_hub_download(
            self.repo, name, revision=revision, cache_dir=cache_folder(), local_dir=self.to,
            tqdm_class=progress.bar_class,
        )  # fmt: skip
        progress.end_file()
        return Path(fetched)

    def _explain(self, error: BaseException) -> str:
        return messages.of_download(self.repo, self.revision, error)

    def _expected_hash(self, name: str) -> str | None:
        """Return the sha256 or git hash of a file, or None if the server has neither."""
        if listed := _hash_of(self.files[name]):
            return listed
        # The list of a mirror may have no hashes. The ETag of an LFS file is its sha256.
        with connection.client(self._explain):
            from huggingface_hub import hf_hub_url

            url = hf_hub_url(self.repo, name, revision=self.commit, endpoint=endpoint())
            etag = self.api.get_hf_file_metadata(url=url).etag
        return etag if etag and _SHA256.fullmatch(etag) else None


def _delete(path: Path) -> None:
    """Delete a file, and the links that lead to it from a snapshot through stores of blobs."""
    while path.is_symlink():
        target = path.parent / path.readlink()
        path.unlink()
        path = target
    path.unlink(missing_ok=True)


def _hash_of(file: "RepoSibling") -> str | None:
    """Return the hash that the Hub lists for a file, which is its blob's name in the cache."""
    return file.lfs.sha256 if file.lfs else file.blob_id


def fetch_model(
    repo: str, revision: str | None, to: Path | None, quiet: bool, select: Select
) -> Path:
    """Fetch the files that `select` chooses into the folder `to`, or into the cache."""
    quiet = quiet or sys.stderr is None
    snapshot = Snapshot(repo, revision or "main", to)
    *others, config = select(snapshot.files, repo, snapshot.fetch)
    files = [snapshot.files[name] for name in (*others, config)]
    if not quiet and not has_safetensors(snapshot.files):
        _log.warning("%s has no safetensors: taking %s", repo, others[0])  # shown by default
    with Progress(repo, _check_space(repo, files, to), quiet=quiet) as snapshot.progress:
        for name in others:
            snapshot.fetch(name)
        return snapshot.fetch(config, None if to else snapshot.revision).parent


def _check_space(repo: str, files: "list[RepoSibling]", to: Path | None) -> int:
    """Return the bytes that must be fetched; raise ResourceError if the disk has no space."""
    blobs = repo_folder(repo) / "blobs"
    absent = [file for file in files if to or not (blobs / str(_hash_of(file))).exists()]
    missing = sum(file.size or 0 for file in absent)
    kept = 0 if to else sum(resume.size_of_part(repo, file) for file in absent)
    target = to.parents[1] if to else blobs  # `to` is in a temporary folder
    free = shutil.disk_usage(next(path for path in (target, *target.parents) if path.exists())).free
    if missing - kept > free:
        raise ResourceError(
            f"{repo} needs {format_size(missing)} of disk space, but {target} has only "
            f"{format_size(free)}: free some, or use another disk"
        )
    return missing
