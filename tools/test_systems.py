"""Run the library on other systems, without Python: `make test-windows`, on Linux with x86-64.

zig compiles the library and `tests/native/driver.c` for Linux with musl, and for Windows, whose
place Wine takes. The driver prints hashes of what each operation returns, at each level of the
processor. They must be those that the package computes here (`hashes.py`). `make test-arm` does the
same under qemu.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import hatch_build
from gpt_cli.ops import bindings
from gpt_cli.system.library import native_library
from tools.hashes import THREADS, hashes
from tools.other_builds import BUILD, ROOT

FOLDER = BUILD / "systems"
SOURCES = ROOT / hatch_build.NATIVE
DRIVER = ROOT / "tests" / "native" / "driver.c"
CC = shlex.split(os.environ.get("CC") or "cc")
WINE = ("wine64", "wine", "/usr/lib/wine/wine64")  # Debian's wine64 is not on the PATH
MUSL = Path("/lib/ld-musl-x86_64.so.1")


@dataclass(frozen=True)
class System:
    """A system that zig compiles for, and what runs its programs here."""

    name: str
    target: str
    library: str
    program: str
    link: list[str]  # flags of the program
    runner: list[str]
    variables: dict[str, str] = field(default_factory=dict)


def main() -> None:
    """Compile for each system and compare; the first difference ends the program."""
    zig, wine = find_zig(), next(filter(None, map(shutil.which, WINE)), None)
    if zig is None:
        sys.exit("zig not found: pip install 'ziglang>=0.13'")
    if wine is None:
        sys.exit("wine not found: on Debian, apt-get install --no-install-recommends wine64")
    if not MUSL.exists():
        sys.exit(f"{MUSL} not found: on Debian, apt-get install musl")
    library = native_library()
    if library is None:
        sys.exit("the library was not compiled here")
    # Wine creates the folder, without looking for a browser and for .NET.
    variables = {"WINEPREFIX": str(FOLDER / "wine"), "WINEDEBUG": "-all"}
    variables["WINEDLLOVERRIDES"] = "mscoree=;mshtml="
    systems = [
        System("musl", "x86_64-linux-musl", "libkernels.so", "driver", ["-dynamic"], [str(MUSL)]),
        System("windows", "x86_64-windows-gnu", "kernels.dll", "driver.exe", [], [wine], variables),
    ]
    driver = FOLDER / "driver"
    FOLDER.mkdir(parents=True, exist_ok=True)
    compile_driver(CC, driver, "-ldl")
    check(f"this system, by {CC[0]}", [str(driver), str(library)], bindings.levels())
    for system in systems:
        folder = FOLDER / system.name
        folder.mkdir(exist_ok=True)
        compiler = [*zig, "cc", "-target", system.target]
        _compile_library(compiler, folder, system.library)
        _check_runtime(folder / system.library)
        compile_driver(compiler, folder / system.program, *system.link)
        command = [*system.runner, str(folder / system.program), str(folder / system.library)]
        check(f"{system.name}, by zig", command, bindings.levels(), system.variables)


def find_zig() -> list[str] | None:
    """Return the command of zig, of the package ziglang or on the PATH; None if there is none."""
    if find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang"]
    return ["zig"] if shutil.which("zig") else None


def compile_driver(compiler: Sequence[str], program: Path, *link: str) -> None:
    """Compile the driver, which loads a library at run time."""
    flags = ["-std=c11", "-O2", "-ffp-contract=off", f"-I{SOURCES}"]
    _run([*compiler, *flags, str(DRIVER), "-o", str(program), *link])


def check(
    name: str,
    command: Sequence[str],
    levels: Collection[str],
    variables: dict[str, str] | None = None,
) -> None:
    """Run the driver; quit unless it prints the hashes of this machine at these levels."""
    done = subprocess.run(
        command, env=os.environ | (variables or {}), capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{name}: exit code {done.returncode}: {done.stderr.strip()[-500:]}")
    if problem := difference(done.stdout, levels):
        sys.exit(f"{name}: {problem}")
    print(f"{name}: the hashes of this machine, at {', '.join(sorted(levels))}", flush=True)


def difference(output: str, levels: Collection[str]) -> str | None:
    """Return how what the driver printed differs from the hashes of this machine; None if not."""
    printed: dict[tuple[str, int], dict[str, str]] = {}
    for line in output.splitlines():
        level, threads, crc, what = line.split(" ", 3)
        printed.setdefault((level, int(threads)), {})[what] = crc
    wanted = {(level, threads) for level in levels for threads in THREADS}
    if printed.keys() != wanted:
        return f"it has the levels {sorted(printed)}, not {sorted(wanted)}"
    expected = _expected()
    for (level, threads), found in printed.items():
        names = expected.keys() | found.keys()
        wrong = sorted(what for what in names if found.get(what) != expected.get(what))
        if wrong:
            return f"{level}, {threads} threads: {len(wrong)} of {len(names)}: {', '.join(wrong)}"
    return None


@cache
def _expected() -> dict[str, str]:
    return hashes()


def _compile_library(compiler: Sequence[str], folder: Path, library: str) -> None:
    """Compile the library for x86-64, with the flags of hatch_build.py."""
    parts = {path.stem: [str(path)] for path in SOURCES.glob("*.c") if path.stem != "kernels"}
    for level, flags in hatch_build.LEVELS["x86_64"].items():
        parts[level] = [str(SOURCES / "kernels.c"), f"-DLEVEL={level}", *flags.split()]
    objects = {name: str(folder / f"{name}.o") for name in parts}
    base = [*compiler, *hatch_build.FLAGS.split()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        commands = ([*base, "-c", *parts[name], "-o", objects[name]] for name in parts)
        list(pool.map(_run, commands))
    _run([*compiler, "-shared", *objects.values(), "-o", str(folder / library), "-lpthread", "-lm"])


def _check_runtime(library: Path) -> None:
    """Quit if a library for Windows needs another C runtime than Python's.

    Python's descriptors of files would then have no meaning in it (`read_at` in system.c).
    """
    for name in re.findall(rb"[\w-]+\.dll", library.read_bytes(), re.IGNORECASE):
        if not name.lower().startswith((b"kernel", b"api-ms-win-")):
            sys.exit(f"{library.name} needs {name.decode()}, and not only Windows' C runtime")


def _run(command: Sequence[str]) -> None:
    """Run a compiler; quit if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{shlex.join(command)}: {done.stderr.strip()[:2000]}")


if __name__ == "__main__":
    main()
