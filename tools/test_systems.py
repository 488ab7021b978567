"""Run the library on other systems, without Python: `make test-windows`, on Linux with x86-64.

zig compiles the library and `tests/native/driver.c` for Linux with musl, and for Windows, whose
place Wine takes. The driver prints hashes of what each operation returns, at each level of the
processor. They must be those that the package computes here (`hashes.py`). `make test-arm` does the
same under qemu.
"""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import hatch_build
from gpt_cli.ops import bindings
from gpt_cli.system.library import native_library
from tools.hashes import THREADS, hashes
from tools.other_builds import BUILD, ROOT
from tools.wheels import problem_with

FOLDER = BUILD / "systems"
SOURCES = ROOT / hatch_build.NATIVE
DRIVER = ROOT / "tests" / "native" / "driver.c"
CC = shlex.split(os.environ.get("CC") or "cc")
WINE = ("wine64", "wine", "/usr/lib/wine/wine64")  # Debian's wine64 is not on the PATH
MUSL = Path("/lib/ld-musl-x86_64.so.1")


@dataclass(frozen=True)
class System:
    """A system that zig compiles for, and what runs its programs here."""

    platform: str  # of its wheel
    program: str
    link: list[str]  # flags of the program
    runner: list[str]
    variables: dict[str, str] = field(default_factory=dict)


def main() -> None:
    """Compile for each system and compare; the first difference ends the program."""
    wine = next(filter(None, map(shutil.which, WINE)), None)
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
        System("musllinux_1_2_x86_64", "driver", ["-dynamic"], [str(MUSL)]),
        System("win_amd64", "driver.exe", [], [wine], variables),
    ]
    driver = FOLDER / "driver"
    FOLDER.mkdir(parents=True, exist_ok=True)
    compile_driver(CC, driver, "-ldl")
    check(f"this system, by {CC[0]}", [str(driver), str(library)], bindings.levels())
    for system in systems:
        folder = FOLDER / system.platform
        folder.mkdir(exist_ok=True)
        zig = hatch_build.zig(system.platform)
        library = hatch_build.compile_library(SOURCES, system.platform, zig, folder)
        if problem := problem_with(library.read_bytes(), system.platform):
            sys.exit(f"{system.platform}, by zig: the library {problem}")
        compile_driver(zig, folder / system.program, *system.link)
        command = [*system.runner, str(folder / system.program), str(library)]
        check(f"{system.platform}, by zig", command, bindings.levels(), system.variables)


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
    for (level, threads), actual in printed.items():
        names = expected.keys() | actual.keys()
        wrong = sorted(what for what in names if actual.get(what) != expected.get(what))
        if wrong:
            return f"{level}, {threads} threads: {len(wrong)} of {len(names)}: {', '.join(wrong)}"
    return None


@cache
def _expected() -> dict[str, str]:
    return hashes()


def _run(command: Sequence[str]) -> None:
    """Run a compiler; quit if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{shlex.join(command)}: {done.stderr.strip()[:2000]}")


if __name__ == "__main__":
    main()
