"""The target of a download: the Hub's cache, or a plain folder."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt_cli.errors import CheckpointError
from gpt_cli.hub.local import cache_folder, repo_folder
from gpt_cli.hub.messages import AGAIN, endpoint
from gpt_cli.system.files import file_hash

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

_LARGE = 10_000_000  # bytes: smaller files are fetched again


class TargetFolder:
    """A new folder, for one download."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.disk = folder.parents[1]  # the folder itself is in a temporary one

    def has(self, file: "RepoSibling") -> bool:
        """Return whether a file is already here."""
        return False

    def size_of_part(self, file: "RepoSibling") -> int:
        """Return the bytes of a file that an interrupted download has left."""
        return 0

    def fetch_large(self, file: "RepoSibling", commit: str, bar_class: type[Any]) -> None:
        """Leave every file to the Hub's client."""


class Cache:
    """The Hub's cache of a model, where an interrupted download of a large file goes on.

    The Hub's client can resume a file, but deletes its part if a download ends early.
    """

    folder = None

    def __init__(self, repo: str):
        self._repo = repo
        self._blobs = repo_folder(repo) / "blobs"
        self.disk = self._blobs

    def has(self, file: "RepoSibling") -> bool:
        """Return whether a file is already here."""
        return (self._blobs / str(hash_of(file))).exists()

    def size_of_part(self, file: "RepoSibling") -> int:
        """Return the bytes of a file that an interrupted download has left."""
        part = self._part_of(file)
        return part.stat().st_size if part and part.exists() else 0

    def fetch_large(self, file: "RepoSibling", commit: str, bar_class: type[Any]) -> None:
        """Fetch a large file to where the client looks for it, if it would come over HTTP.

        Raise CheckpointError if the file is damaged, and the client's errors.
        """
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

        part = self._part_of(file)
        if part is None:
            return
        url = hf_hub_url(self._repo, file.rfilename, revision=commit, endpoint=endpoint())
        if _in_xet(url):
            return
        blob = self._blobs / str(hash_of(file))
        locks = cache_folder() / ".locks" / repo_folder(self._repo).name  # the client's
        blob.parent.mkdir(parents=True, exist_ok=True)
        locks.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(locks / f"{blob.name}.lock"):
            if blob.exists():
                part.unlink(missing_ok=True)
                return
            _fetch_rest(part, file, url, bar_class)
            if file_hash(part, len(blob.name)) != blob.name:
                part.unlink()
                raise CheckpointError(
                    f"{self._repo}/{file.rfilename} is damaged: its sha256 is not "
                    f"{blob.name:.12}…; it was deleted, {AGAIN}"
                )
            part.replace(blob)

    def _part_of(self, file: "RepoSibling") -> Path | None:
        """Return where the part of a large file is kept; None if the file is small."""
        if file.lfs is None or (file.size or 0) < _LARGE:
            return None
        return self._blobs / f"{file.lfs.sha256}.gpt-cli.incomplete"


def hash_of(file: "RepoSibling") -> str | None:
    """Return the hash that the Hub lists for a file, which is the name of its blob in the cache."""
    return file.lfs.sha256 if file.lfs else file.blob_id


def _in_xet(url: str) -> bool:
    """Return whether the client would fetch a file from the storage that speaks Xet."""
    from huggingface_hub import get_hf_file_metadata
    from huggingface_hub.utils._runtime import is_xet_available

    if not is_xet_available():
        return False
    metadata = get_hf_file_metadata(url, endpoint=endpoint(), retry_on_errors=True)
    return metadata.xet_file_data is not None


def _fetch_rest(part: Path, file: "RepoSibling", url: str, bar_class: type[Any]) -> None:
    """Append what is missing to the part of a file; delete a part that cannot be completed."""
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    try:
        with part.open("ab") as target:
            http_get(
                url,
                target,
                resume_size=target.tell(),
                headers=build_hf_headers(),
                expected_size=file.size,
                tqdm_class=bar_class,
            )
    except HfHubHTTPError as error:
        if error.response.status_code == 416:  # the server has no such rest
            part.unlink()
        raise
    except OSError:
        if part.stat().st_size > (file.size or 0):
            part.unlink()
        raise
