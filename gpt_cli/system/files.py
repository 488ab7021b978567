"""Read untrusted files: only regular files, and only up to a limit."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from gpt_cli.errors import MALFORMED, CheckpointError

LARGEST = 64_000_000  # bytes; GPT-2's tokenizer.json, the largest of the small files, has 1.4 MB

# The first bytes of files that often stand in for others.
IMPOSTORS = {
    b"version https://git-lfs": "a Git LFS pointer, not the file; run `git lfs pull`",
    b"<": "a web page, not the file; get it again",
}


def version(where: Path | int) -> tuple[int, int] | None:
    """Return a value that changes when a file (a path or a descriptor) changes; None if missing.

    A link to itself counts as missing.
    It does not contain the inode, because network file systems may renumber inodes.
    """
    try:
        about = os.stat(where)  # noqa: PTH116 (`where` may be a descriptor)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP):
            raise
        return None
    return about.st_size, about.st_mtime_ns


def file_hash(path: Path, digits: int = 64) -> str:
    """Return the sha256 of a file in hexadecimal; with 40 digits, git's hash of a small file."""
    import hashlib  # loads OpenSSL: 4 MB that few commands need

    if digits == 40:
        data = path.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_small(path: Path) -> bytes:
    """Return the content of a small file; raise ValueError if it is large or not regular."""
    about = path.stat()  # before opening, which would wait for the other end of a pipe
    if not stat.S_ISREG(about.st_mode):
        raise ValueError("it is not a regular file")
    if about.st_size > LARGEST:
        raise ValueError(f"it has {about.st_size} bytes, more than the limit of {LARGEST}")
    with path.open("rb") as file:
        return file.read(LARGEST)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a small JSON file; raise CheckpointError if there is none."""
    data = b""
    try:
        data = read_small(path)
        value = json.loads(data)
    except (OSError, *MALFORMED) as error:
        for start, kind in IMPOSTORS.items():
            if data.lstrip().startswith(start):
                raise CheckpointError(f"{path} is not JSON: {kind}") from None
        raise CheckpointError(
            f"{path} cannot be read as JSON ({error!s:.100}): get it again"
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object: get it again")
    return value
