"""Copies of the package with a differently compiled library."""

import ctypes
import shutil
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import hatch_build

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"


def copy_package(
    folder: Path, platform: str, compiler: Sequence[str], optimize: str = "-O3"
) -> None:
    """Copy gpt_cli into a folder, with a library for this platform by this compiler.

    Raises:
        hatch_build.NotCompiledError: the compiler is missing or failed.
    """
    package = folder / "gpt_cli"
    shutil.rmtree(package, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__", *hatch_build.LIBRARIES.values())
    shutil.copytree(ROOT / "gpt_cli", package, ignore=ignored)
    shutil.copytree(ROOT / "weights" / "tiny", package / "weights" / "tiny")
    flags = hatch_build.FLAGS.replace("-O3", optimize)
    with (
        mock.patch.object(hatch_build, "FLAGS", flags),
        mock.patch.object(ctypes, "CDLL"),  # it may need a sanitizer, which this process lacks
    ):
        sources = ROOT / hatch_build.NATIVE
        library = hatch_build.compile_library(sources, platform, [*compiler], folder)
    library.rename(folder / hatch_build.NATIVE / library.name)
    for made in folder.glob("*.o"):
        made.unlink()
