"""Downloads from the Hub. Its client is imported only when something must be fetched."""

import logging
import re
import shutil
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from gpt_cli.errors import CheckpointError, ModelNotFoundError, ResourceError
from gpt_cli.folder.contents import has_safetensors
from gpt_cli.hub import connection, messages
from gpt_cli.hub.local import Select, cache_folder, short_name
from gpt_cli.hub.messages import AGAIN, endpoint
from gpt_cli.hub.progress import DownloadProgress
from gpt_cli.hub.storage import Storage, without_xet
from gpt_cli.hub.target import Cache, TargetFolder, hash_of
from gpt_cli.system.files import file_hash
from gpt_cli.system.machine import format_size

_SHA256 = re.compile(r"[0-9a-f]{64}")

_log = logging.getLogger(__name__)


class Snapshot:
    """A model on the Hub at one commit, to be fetched into the folder `to` or into the cache."""

    progress: DownloadProgress | None = None  # of the download of all its files
    over_http = False  # whether files come from the Hub itself, even if they are in its storage

    def __init__(self, repo: str, revision: str, to: Path | None):
        with connection.client(partial(messages.of_download, repo, revision)):
            from huggingface_hub import HfApi

            self.api = HfApi(endpoint=endpoint())
            info = connection.ask(self.api, repo, revision)
        self.repo = repo
        self.revision = revision
        self.commit = str(info.sha)
        self.files = {file.rfilename: file for file in info.siblings or ()}
        self.target = TargetFolder(to) if to else Cache(repo)

    def fetch(self, name: str, revision: str | None = None) -> Path:
        """Fetch a file and check its hash; the cache records the commit of a `revision`."""
        revision = revision or self.commit
        if name not in self.files:
            raise ModelNotFoundError(f"{self.repo} has no file {name} at {revision}")
        expected = self._expected_hash(name)
        path = self._download(name, revision)
        if not self.target.folder and path.parent.name != self.commit:
            raise ModelNotFoundError(f"{self.repo} changed during the download: {AGAIN}")
        if expected:
            self._check_hash(path, name, expected)
        return path

    def _download(self, name: str, revision: str) -> Path:
        """Fetch a file from the storage that speaks Xet if it is there, or else over HTTP."""
        progress = self.progress or DownloadProgress(self.repo, 0, quiet=True)
        with (
            connection.client(self._explain) as exchange,
            nullcontext() if self.progress else progress,
        ):
            storage = Storage(exchange, progress)
            # HTTP has left a part of the file, probably because the storage had failed.
            has_part = self.target.size_of_part(self.files[name]) > 0
            if not (self.over_http or has_part):
                try:
                    return self._request(name, revision, storage)
                except Exception as error:
                    if not storage.has_failed(error):
                        raise
                    storage.leave()
                    _log.info("the storage: %s", error)
                    progress.say(
                        "%s: fetching %s over HTTP (HF_HUB_DISABLE_XET=1 does so from the start)",
                        storage.reason(error),
                        short_name(self.repo),
                    )
                self.over_http = True
            with without_xet():
                return self._request(name, revision, storage)

    def _request(self, name: str, revision: str, storage: Storage) -> Path:
        progress = storage.progress
        progress.begin_file(storage.leave_if_silent)
        self.target.fetch_large(self.files[name], self.commit, progress.bar_class)
        path = self.api.hf_hub_download(
            self.repo,
            name,
            revision=revision,
            cache_dir=cache_folder(),
            local_dir=self.target.folder,
            tqdm_class=progress.bar_class,
        )
        progress.end_file()
        return Path(path)

    def _explain(self, error: BaseException) -> str:
        return messages.of_download(self.repo, self.revision, error)

    def _expected_hash(self, name: str) -> str | None:
        """Return the sha256 or git hash of a file, or None if the server has neither."""
        listed = hash_of(self.files[name])
        if listed:
            return listed
        # The list of a mirror may have no hashes. The ETag of an LFS file is its sha256.
        with connection.client(self._explain):
            from huggingface_hub import hf_hub_url

            url = hf_hub_url(self.repo, name, revision=self.commit, endpoint=endpoint())
            etag = self.api.get_hf_file_metadata(url=url).etag
        return etag if etag and _SHA256.fullmatch(etag) else None

    def _check_hash(self, path: Path, name: str, expected: str) -> None:
        """Raise CheckpointError for a file with another hash, and delete the file."""
        actual = file_hash(path, len(expected))
        if actual == expected:
            return
        _delete(path)
        kind = "git hash" if len(expected) == 40 else "sha256"
        problem = f"its {kind} is {actual:.12}…, not {expected:.12}…"
        raise CheckpointError(f"{self.repo}/{name} is damaged: {problem}; it was deleted, {AGAIN}")


def _delete(path: Path) -> None:
    """Delete a file, and the links that lead to it from a snapshot through stores of blobs."""
    while path.is_symlink():
        target = path.parent / path.readlink()
        path.unlink()
        path = target
    path.unlink(missing_ok=True)


def fetch_model(
    repo: str, revision: str | None, to: Path | None, quiet: bool, select: Select
) -> Path:
    """Fetch the files that `select` chooses into the folder `to`, or into the cache."""
    quiet = quiet or sys.stderr is None
    snapshot = Snapshot(repo, revision or "main", to)
    *others, config = select(snapshot.files, repo, snapshot.fetch)
    if not quiet and not has_safetensors(snapshot.files):
        _log.warning("%s has no safetensors: taking %s", repo, others[0])  # shown by default
    size = _check_space(snapshot, [*others, config])
    with DownloadProgress(repo, size, quiet=quiet) as snapshot.progress:
        for name in others:
            snapshot.fetch(name)
        # Last, because it marks a complete model; then the cache records what the revision is.
        return snapshot.fetch(config, None if to else snapshot.revision).parent


def _check_space(snapshot: Snapshot, names: list[str]) -> int:
    """Return the bytes that must be fetched; raise ResourceError if the disk has no space."""
    target = snapshot.target
    files = [snapshot.files[name] for name in names]
    absent = [file for file in files if not target.has(file)]
    size = sum(file.size or 0 for file in absent)
    kept = sum(target.size_of_part(file) for file in absent)
    existing = next(path for path in (target.disk, *target.disk.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if size - kept > free:
        raise ResourceError(
            f"{snapshot.repo} needs {format_size(size)} of disk space, but {target.disk} has only "
            f"{format_size(free)}: free some, or use another disk"
        )
    return size
