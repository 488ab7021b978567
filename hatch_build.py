"""Add the pages of docs/ to a wheel, and compile gpt_cli/ops/native for it.

The compiler is $CC, else `cc`, else zig: a build without `cc` requires the package ziglang. If the
compilation fails, the wheel has no library, and NumPy is the fallback. An editable install reads
the pages in docs/, and has its library in the source tree.
"""

import ctypes
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

sys.path.insert(0, str(Path(__file__).parent))
from gpt_cli.system.library import LIBRARIES, NATIVE, sources_digest

ZIG = "ziglang>=0.16,<0.18"
# The platforms with kernels for which there are wheels of it.
ZIG_PLATFORMS = {"manylinux_2_17_x86_64", "manylinux_2_17_aarch64", "win_amd64", "win_arm64"}
ZIG_PLATFORMS |= {"musllinux_1_1_x86_64", "musllinux_1_1_aarch64"}
ZIG_PLATFORMS |= {"macosx_12_0_x86_64", "macosx_12_0_arm64"}

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
_DOT = "-march=armv8.2-a+dotprod"
_ARM = {"neondot": _DOT, "neon": ""}
LEVELS = {"x86_64": _X86, "amd64": _X86, "aarch64": _ARM, "arm64": _ARM}

# What the platforms of wheels begin with, and Python's names of these systems.
_SYSTEMS = {"linux": "linux", "manylinux": "linux", "musllinux": "linux"}
_SYSTEMS |= {"macosx": "darwin", "win": "win32"}
# The platform in the name of a wheel, such as manylinux_2_17_x86_64: system, version, processor.
_PLATFORM = re.compile(rf"({'|'.join(_SYSTEMS)})_(?:(\d+_\d+)_)?({'|'.join(LEVELS)})")
_ZIG_FLAGS = {_DOT: "-mcpu=generic+dotprod"}  # for zig, which does not know the former
_ZIG_SYSTEMS = {"manylinux": "linux-gnu.{}", "musllinux": "linux-musl"}
_ZIG_SYSTEMS |= {"macosx": "macos.{}", "win": "windows-gnu"}
_DATE = "1580601600"  # 2020-02-02, as hatchling dates files


class NotCompiledError(Exception):
    """The reason why there is no library."""


class BuildHook(BuildHookInterface[Any]):
    """The hook that hatchling calls before it builds a wheel."""

    def dependencies(self) -> list[str]:
        """Return what a build requires besides hatchling: zig, where there is no other compiler."""
        return [ZIG] if not (os.environ.get("CC") or _has_cc()) and _zig_platform() else []

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
        # Windows does not remove a library that is loaded.
        self._folder = TemporaryDirectory(ignore_cleanup_errors=True)
        try:
            library = compile_library(sources, platform, compiler(), Path(self._folder.name))
        except NotCompiledError as reason:
            self.app.display_warning(f"the C library was not compiled, so NumPy computes: {reason}")
            return
        if editable:
            shutil.copy(library, sources)
        else:
            build_data["force_include"][str(library)] = str(NATIVE / library.name)
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary library."""
        self._folder.cleanup()


def compiler() -> list[str]:
    """Return the command of the compiler for this system.

    Raises:
        NotCompiledError: there is none.
    """
    if command := os.environ.get("CC"):
        return shlex.split(command)
    if _has_cc():
        return ["cc"]
    if (platform := _zig_platform()) and find_spec("ziglang"):
        return zig(platform)
    raise NotCompiledError("there is no C compiler `cc`, and the package ziglang is not installed")


def zig(platform: str) -> list[str]:
    """Return the command by which zig compiles for the platform of a wheel, and strips."""
    system, version, processor = _parsed(platform)
    processor = {"amd64": "x86_64", "arm64": "aarch64"}.get(processor, processor)
    target = f"{processor}-{_ZIG_SYSTEMS[system].format(version)}"
    # Without a target, zig would compile for this very processor.
    return [sys.executable, "-m", "ziglang", "cc", "-target", target, "-s"]


def compile_library(sources: Path, platform: str, compiler: list[str], folder: Path) -> Path:
    """Compile `sources` for the platform of a wheel into `folder`; return the library.

    Args:
        sources: the folder of the C files.
        platform: its system and processor decide what is compiled, and how it is named.
        compiler: the command of a compiler for this platform.
        folder: where the library and temporary files are written.

    Raises:
        NotCompiledError: the platform has no kernels, or the compiler failed.
    """
    system, _, processor = _parsed(platform)
    levels, flags = LEVELS[processor], FLAGS.split()
    run = partial(_problem, folder=folder)
    (empty := folder / "empty.c").touch()  # zig fails with -fsyntax-only
    probe = [*compiler, *flags, "-mavxvnni", "-c", str(empty), "-o", f"{empty}.o"]
    if "avxvnni" in levels and run(probe):
        # It is unknown to GCC 10 and Clang 11.
        levels = {name: levels[name] for name in levels if name != "avxvnni"}
        flags.append("-DWITHOUT_AVXVNNI")
    parts = {
        path.stem: [str(path)] for path in sorted(sources.glob("*.c")) if path.stem != "kernels"
    }
    parts["native"].append(f'-DSOURCES="{sources_digest(sources.parents[2])}"')
    if "ziglang" in compiler:
        levels = {name: _ZIG_FLAGS.get(of_level, of_level) for name, of_level in levels.items()}
    for name, its_flags in levels.items():
        parts[name] = [str(sources / "kernels.c"), f"-DLEVEL={name}", *its_flags.split()]
    objects = {name: str(folder / f"{name}.o") for name in parts}
    library = folder / LIBRARIES[_SYSTEMS[system]]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        commands = [[*compiler, *flags, "-c", *parts[name], "-o", objects[name]] for name in parts]
        problem = next(filter(None, pool.map(run, commands)), None)
    link = [*compiler, "-shared", *objects.values(), "-o", str(library), "-pthread", "-lm"]
    if system == "macosx":  # otherwise the path in `folder`, a new one in each build
        link.append(f"-Wl,-install_name,{library.name}")
    if problem := problem or run(link):
        raise NotCompiledError(problem)
    if {*platform.split(".")} & {*platform_tags()}:
        try:
            ctypes.CDLL(str(library))
        except OSError as error:
            reason = f"the library of {compiler[0]} cannot be loaded: {error}"
            raise NotCompiledError(reason) from None
    return library


def _parsed(platform: str) -> tuple[str, str, str]:
    """Return the system, its oldest version and the processor of the platform of a wheel."""
    match = _PLATFORM.match(platform)
    if not match:
        raise NotCompiledError(f"there are no kernels for {platform}")
    system, version, processor = match.groups("")
    return system, version.replace("_", "."), processor


def _has_cc() -> bool:
    """Return whether there is a compiler `cc` with the headers of the system."""
    if sys.platform == "win32":  # GCC misaligns long vectors on its stack (its bug 54412)
        return False
    if sys.platform == "darwin" and _problem(["xcode-select", "--print-path"]):
        return False  # `cc` would open a window that offers to install it
    return not _problem(["cc", "-fsyntax-only", "-include", "pthread.h", "-x", "c", os.devnull])


def _zig_platform() -> str | None:
    """Return the platform that zig compiles for if it compiles for this system, if it can."""
    return next((platform for platform in platform_tags() if platform in ZIG_PLATFORMS), None)


def _problem(command: list[str], folder: Path | None = None) -> str | None:
    """Run a compiler, which may write into a folder; return its first error line, if it fails."""
    name, environment = Path(command[0]).name, os.environ | {"LC_ALL": "C"}
    environment.setdefault("SOURCE_DATE_EPOCH", _DATE)  # linkers write a date into a .dll
    if folder:  # otherwise zig would leave 50 MB in the user's home folder
        cache = str(folder / "zig")
        environment |= {"ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, errors="replace")
    except OSError as error:
        return f"the C compiler {name}: {error.strerror}"
    if not done.returncode:
        return None
    lines = done.stderr.splitlines() or [f"the C compiler {name}: exit code {done.returncode}"]
    line = next((line for line in lines if "error:" in line), lines[0])
    return "".join(filter(str.isprintable, line))[:200]
