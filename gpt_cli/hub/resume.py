"""Large files over HTTP, which go on where an interrupted download has ended.

The Hub's client can go on with a file, but deletes what it has if it ends early.
"""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt_cli.errors import CheckpointError
from gpt_cli.hub.local import cache_folder, repo_folder
from gpt_cli.hub.messages import AGAIN, endpoint
from gpt_cli.system.files import file_hash

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

_LARGE = 10_000_000  # bytes: smaller files are fetched again


def part_of(repo: str, file: "RepoSibling") -> Path | None:
    """Return where the part of a file is kept that has arrived; None if it would not be."""
    if file.lfs is None or (file.size or 0) < _LARGE:
        return None
    return _blob(repo, file).with_name(f"{file.lfs.sha256}.gpt-cli.incomplete")


def size_of_part(repo: str, file: "RepoSibling") -> int:
    """Return the bytes of a file that an interrupted download has left."""
    part = part_of(repo, file)
    with suppress(FileNotFoundError):
        return part.stat().st_size if part else 0
    return 0


def is_over_http(repo: str, file: "RepoSibling", commit: str) -> bool:
    """Return whether the client would fetch a file over HTTP, which the Hub is asked."""
    from huggingface_hub import get_hf_file_metadata
    from huggingface_hub.utils._runtime import is_xet_available

    if not is_xet_available():
        return True
    url = _url(repo, file, commit)
    metadata = get_hf_file_metadata(url, endpoint=endpoint(), retry_on_errors=True)
    return metadata.xet_file_data is None


def fetch_blob(repo: str, file: "RepoSibling", commit: str, bar_class: type[Any]) -> None:
    """Fetch a large file to where the client looks for it before it fetches it itself.

    Raise CheckpointError if it is damaged, and the client's errors.
    """
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        WeakFileLock,
        build_hf_headers,
    )

    part = part_of(repo, file)
    if part is None:
        return
    blob = _blob(repo, file)
    url = _url(repo, file, commit)
    lock = cache_folder() / ".locks" / repo_folder(repo).name / f"{blob.name}.lock"  # the client's
    for path in (blob, lock):
        path.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if blob.exists():
            part.unlink(missing_ok=True)
            return
        try:
            with part.open("ab") as target:
                http_get(
                    url, target, resume_size=target.tell(), headers=build_hf_headers(),
                    expected_size=file.size, tqdm_class=bar_class,
                )  # fmt: skip
        except HfHubHTTPError as error:
            if error.response.status_code == 416:  # the rest is refused: begin anew the next time
                part.unlink()
            raise
        except OSError:
            if part.stat().st_size > (file.size or 0):
                part.unlink()
            raise
        if file_hash(part, len(blob.name)) != blob.name:
            part.unlink()
            raise CheckpointError(
                f"{repo}/{file.rfilename} is damaged: its sha256 is not {blob.name:.12}…; it was "
                f"deleted, {AGAIN}"
            )
        part.replace(blob)


def _blob(repo: str, file: "RepoSibling") -> Path:
    return repo_folder(repo) / "blobs" / (file.lfs.sha256 if file.lfs else "")


def _url(repo: str, file: "RepoSibling", commit: str) -> str:
    from huggingface_hub import hf_hub_url

    return hf_hub_url(repo, file.rfilename, revision=commit, endpoint=endpoint())
