"""Add the pages of docs/ to a wheel, and compile gpt_cli/ops/native for it.

If the compilation fails, the wheel has no library, and NumPy is the fallback. An editable install
reads the pages in docs/, and has its library in the source tree.
"""

import ctypes
import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent))
from gpt_cli.system.library import LIBRARIES, NATIVE, sources_digest

LIBRARY = LIBRARIES.get(sys.platform, LIBRARIES["linux"])

# Every compiler must give the same bits: only `multiply_add` fuses, and nothing is reordered.
# $CFLAGS is ignored, because it may contain -ffast-math or -march=native.
FLAGS = (
    "-std=c11 -O3 -ffp-contract=off -fno-math-errno -fPIC -fvisibility=hidden "
    "-Wall -Wextra -Wno-unused-parameter"
)

# kernels.c is compiled once for each level of the processor.
_AVX2 = "-mavx2 -mfma -mf16c"
_AVX512 = f"{_AVX2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512"
_X86 = {
    "avx512vnni": f"{_AVX512} -mavx512vnni",
    "avx512": _AVX512,
    "avxvnni": f"{_AVX2} -mavxvnni",
    "avx2": _AVX2,
}
_ARM = {"neondot": "-march=armv8.2-a+dotprod", "neon": ""}
LEVELS = {"x86_64": _X86, "aarch64": _ARM, "arm64": _ARM}


class NotCompiledError(Exception):
    """The reason why there is no library."""


class BuildHook(BuildHookInterface[Any]):
    """The hook that hatchling calls before it builds a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add pages and library to the wheel, or, if editable, the library to the source tree."""
        sources = Path(self.root, NATIVE)
        editable = version == "editable"
        if editable:
            for name in LIBRARIES.values():
                (sources / name).unlink(missing_ok=True)
        else:
            for page in sorted(Path(self.root, "docs").glob("*.md")):  # not the pictures
                build_data["force_include"][str(page)] = f"gpt_cli/docs/{page.name}"
        platform = self.build_config.builder.get_best_matching_tag().rpartition("-")[2]
        self._folder = TemporaryDirectory()
        try:
            library = compile_library(sources, platform, Path(self._folder.name))
        except NotCompiledError as reason:
            self.app.display_warning(f"the C library was not compiled, so NumPy computes: {reason}")
            return
        if editable:
            shutil.move(library, sources / LIBRARY)
        else:
            build_data["force_include"][str(library)] = str(NATIVE / LIBRARY)
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary library."""
        self._folder.cleanup()


def compile_library(sources: Path, platform: str, folder: Path) -> Path:
    """Compile `sources` for the platform of a wheel into `folder`; return the library.

    Raises:
        NotCompiledError: the platform has no kernels, or the compiler failed.
    """
    levels = next((LEVELS[name] for name in LEVELS if platform.endswith(name)), None)
    if levels is None or not platform.startswith(("linux", "macosx")):
        raise NotCompiledError(f"there are no kernels for {platform}")
    compiler = shlex.split(os.environ.get("CC") or "cc")
    flags = FLAGS.split()
    probe = [*compiler, "-mavxvnni", "-fsyntax-only", "-x", "c", os.devnull]
    if "avxvnni" in levels and _problem(probe):  # unknown to GCC 10 and Clang 11
        levels = {name: levels[name] for name in levels if name != "avxvnni"}
        flags.append("-DWITHOUT_AVXVNNI")
    parts = {
        path.stem: [str(path)] for path in sorted(sources.glob("*.c")) if path.stem != "kernels"
    }
    parts["native"].append(f'-DSOURCES="{sources_digest(sources.parents[2])}"')
    for name, its_flags in levels.items():
        parts[name] = [str(sources / "kernels.c"), f"-DLEVEL={name}", *its_flags.split()]
    objects = {name: str(folder / f"{name}.o") for name in parts}
    library = folder / LIBRARY
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        commands = [[*compiler, *flags, "-c", *parts[name], "-o", objects[name]] for name in parts]
        problem = next(filter(None, pool.map(_problem, commands)), None)
    link = [*compiler, "-shared", *objects.values(), "-o", str(library), "-pthread", "-lm"]
    if sys.platform == "darwin":  # otherwise the path in `folder`, a new one in each build
        link.append(f"-Wl,-install_name,{LIBRARY}")
    if problem := problem or _problem(link):
        raise NotCompiledError(problem)
    try:
        ctypes.CDLL(str(library))
    except OSError as error:
        raise NotCompiledError(f"the library of {compiler[0]} cannot be loaded: {error}") from None
    return library


def _problem(command: list[str]) -> str | None:
    """Run the compiler; return its first error line, or None on success."""
    name, english = Path(command[0]).name, os.environ | {"LC_ALL": "C"}
    try:
        done = subprocess.run(command, env=english, capture_output=True, errors="replace")
    except OSError as error:
        return f"the C compiler {name}: {error.strerror}"
    if not done.returncode:
        return None
    lines = done.stderr.splitlines() or [f"the C compiler {name}: exit code {done.returncode}"]
    line = next((line for line in lines if "error:" in line), lines[0])
    return "".join(filter(str.isprintable, line))[:200]
