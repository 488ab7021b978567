"""The files of flags such as --png: pages and pictures."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpt_cli.errors import InputError, import_extra

_UNDATED = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


def check_file(flag: str, file: Path, endings: Sequence[str], *, force: bool) -> None:
    """Raise InputError if a flag names a file that cannot be written; call it before any work."""
    if file.suffix.lower() not in endings:
        raise InputError(f"{flag} {file}: the name must end with {' or '.join(endings)}")
    if not file.parent.is_dir():
        raise InputError(f"{flag} {file}: the folder {file.parent} does not exist")
    if file.is_dir():
        raise InputError(f"{flag} {file} is a folder: give a file name")
    if file.is_file() and not force:
        raise InputError(f"{flag} {file} exists: name another output, or add --force")


def check_picture(flag: str, file: Path, *, force: bool) -> None:
    """Raise InputError or ResourceError if a picture cannot be written; call it before any work."""
    check_file(flag, file, (".png", ".svg", ".pdf"), force=force)
    import_extra(f"{flag} needs matplotlib", "matplotlib", "matplotlib.figure")


def rendered(figure: Any, file: Path) -> bytes:
    """Return the bytes of a matplotlib figure in the format of a file's ending, without a date."""
    from matplotlib import rc_context

    data = io.BytesIO()
    ending = file.suffix.lower()
    with rc_context({"svg.hashsalt": "gpt-cli"}):  # else ids are random
        figure.savefig(data, format=ending[1:], dpi=150, metadata=_UNDATED.get(ending))
    return data.getvalue()
