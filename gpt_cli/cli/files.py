"""The files that commands write: whole, or not at all."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gpt_cli.errors import InputError, ResourceError


def check_file(option: str, file: Path, endings: Sequence[str]) -> None:
    """Raise InputError unless this file can be written, before anything costly is done for it."""
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
    part = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        part.write_bytes(data)
        part.replace(file)
    except OSError as error:
        raise ResourceError(f"cannot write {file}: {error.strerror}") from None
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
