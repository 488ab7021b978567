"""The files that commands write: whole, or not at all."""

import shutil
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gpt_cli.errors import InputError, ResourceError


def check_file(option: str, file: Path, endings: Sequence[str]) -> None:
    """Raise InputError unless a file may have this name, before anything costly is done for it."""
    if file.suffix.lower() not in endings:
        raise InputError(f"{option} {file}: the name must end with {' or '.join(endings)}")
    if not file.parent.is_dir():
        raise InputError(f"{option} {file}: there is no folder {file.parent}")
    if file.is_dir():
        raise InputError(f"{option} {file}: it is a folder")


def write_file(file: Path, data: bytes) -> None:
    """Write a file, in place of one that may be there.

    Raises:
        ResourceError: it cannot be written; what was there is as before.
    """
    target = file.resolve()  # a link stays one
    part = target.with_name(f".{uuid.uuid4().hex}")
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(data)  # a device or a pipe, in whose place there can be no file
            return
        part.write_bytes(data)
        if target.exists():
            shutil.copymode(target, part)
        part.replace(target)
    except OSError as error:
        raise ResourceError(f"cannot write {file}: {error.strerror}") from None
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
