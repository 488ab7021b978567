"""The compiled library: its file, and the sources that it was built from.

`hatch_build.py` imports this module, too, without the packages that gpt-cli needs.
"""

import ctypes
import json
import sys
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import Distribution

NATIVE = Path("gpt_cli", "ops", "native")  # in a source tree, and where packages are installed
# The library's file, by `sys.platform`.
LIBRARIES = {"linux": "libkernels.so", "darwin": "libkernels.dylib", "win32": "kernels.dll"}
_DISTRIBUTION = "gpt2-cli"
_ROOT = Path(__file__).parents[2]  # of a source tree, or of the installed packages
_BUILD = "hatch_build.py"  # which only a source tree has


def sources_digest(root: Path) -> str:
    """Return a digest of the files of a source tree that determine the library."""
    folder = root / NATIVE
    digest = sha256()
    for path in (root / _BUILD, folder.parent / "constants.inc", *sorted(folder.glob("*.[ch]"))):
        data = path.read_bytes()
        digest.update(f"{path.name} {len(data)}\n".encode() + data)
    return digest.hexdigest()


@cache
def native_library() -> Path | None:
    """Return the file of the compiled library, or None if there is none.

    A source tree without one, as after `pip install .`, uses that of the installed package if it
    was built from the same sources.
    """
    library = _library_in(_ROOT)
    if library is None and _is_source_tree():
        distribution = _distribution()
        if distribution:
            installed = _library_in(_folder_of(distribution))
            if installed and _digest_in(installed) == sources_digest(_ROOT):
                return installed
    return library


def native_computes() -> bool:
    """Return whether the compiled library can be used here, without importing NumPy."""
    path = native_library()
    if path is None:
        return False
    try:
        library = ctypes.CDLL(str(path))
        return any(library.gpt2_has_level(level) for level in (b"avx2", b"neon"))
    except (OSError, AttributeError):  # it cannot be loaded, or is another version
        return False


def source_tree_fault() -> str | None:
    """Return why a source tree has no library, and the cure; None if it has one.

    None, too, where there is no other cure than a compiler: if this tree is the installed one.
    """
    if native_library() or not _is_source_tree() or sys.platform not in LIBRARIES:
        return None
    why = "has no library"
    distribution = _distribution()
    if distribution:
        if _is_editable(distribution):
            return None
        folder = _folder_of(distribution)
        if _library_in(folder):
            why += f", and the installed one in {folder} is of other sources"
    cure = "run `pip install -e .` there"
    return f"gpt_cli was imported from the source tree {_ROOT}, which {why}: {cure}"


def _is_source_tree() -> bool:
    return (_ROOT / _BUILD).is_file()


def _distribution() -> "Distribution | None":
    """Return the installed package, or None."""
    from importlib import metadata  # its imports take 10 ms, and few processes need it

    try:
        return metadata.distribution(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return None


def _folder_of(distribution: "Distribution") -> Path:
    """Return the folder in which packages are installed."""
    return Path(str(distribution.locate_file("")))


def _is_editable(distribution: "Distribution") -> bool:
    """Return whether a distribution was installed with `pip install --editable`."""
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    return bool(origin.get("dir_info", {}).get("editable"))


def _library_in(root: Path) -> Path | None:
    """Return the compiled library of a source tree, or where packages are installed, or None."""
    name = LIBRARIES.get(sys.platform)
    path = root / NATIVE / name if name else None
    return path if path and path.is_file() else None


def _digest_in(path: Path) -> str | None:
    """Return the digest of the sources of a library; None if it cannot be loaded or is older."""
    try:
        function = ctypes.CDLL(str(path)).gpt2_sources
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_char_p
    return bytes(function()).decode()
