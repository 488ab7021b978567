"""Build the wheels of all systems on one machine, and check them: `make wheels`.

zig compiles the library for each. The wheel `any`, for all other systems, has no library.
"""

import os
import re
import shlex
import sys
from pathlib import Path
from unittest import mock
from zipfile import ZipFile

from hatchling.builders.wheel import WheelBuilder

import hatch_build

ROOT = Path(__file__).resolve().parent.parent

# The platform of each wheel: the oldest system that it is for, and the processor. glibc 2.17 is of
# 2012, musl 1.2 of 2020; macOS 11 is the first for Apple's own processors, 10.13 is of 2017.
PLATFORMS = {
    "manylinux_2_17_x86_64.manylinux2014_x86_64": "ELF x86-64",
    "manylinux_2_17_aarch64.manylinux2014_aarch64": "ELF ARM",
    "musllinux_1_2_x86_64": "ELF x86-64",
    "musllinux_1_2_aarch64": "ELF ARM",
    "macosx_10_13_x86_64": "Mach-O x86-64",
    "macosx_11_0_arm64": "Mach-O ARM",
    "win_amd64": "PE x86-64",
    "win_arm64": "PE ARM",
}
# How formats number processors.
PROCESSORS = {62: "x86-64", 0x0100_0007: "x86-64", 0x8664: "x86-64"}
PROCESSORS |= {183: "ARM", 0x0100_000C: "ARM", 0xAA64: "ARM"}
GLIBC = (2, 17)


def main(folder: str) -> None:
    """Build all wheels into a folder; print their names and sizes."""
    for platform, expected in PLATFORMS.items():
        wheel = build(platform, shlex.join(hatch_build.zig(platform)), folder)
        library = library_in(wheel)
        if problem := problem_with(library, platform):
            sys.exit(f"wheels: the library in {wheel.name} {problem}")
        print(f"{wheel.stat().st_size:9,}  {wheel.name}: {expected}, {len(library):,}", flush=True)
    wheel = build("any", "false", folder)
    print(f"{wheel.stat().st_size:9,}  {wheel.name}: no library")


def build(platform: str, compiler: str, folder: str) -> Path:
    """Build the wheel for a platform into a folder; return its file."""
    builder = WheelBuilder(str(ROOT))
    tag = f"py3-none-{platform}"
    with (
        mock.patch.dict(os.environ, CC=compiler),
        mock.patch.object(builder, "get_best_matching_tag", return_value=tag),
    ):
        (wheel,) = map(Path, builder.build(directory=folder, versions=["standard"]))
    if not wheel.stem.endswith(f"-{tag}"):
        sys.exit(f"wheels: the wheel for {platform} has no library: {wheel.name}")
    return wheel


def library_in(wheel: Path) -> bytes:
    """Return the only library in a wheel."""
    with ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith((".so", ".dylib", ".dll")))
        return file.read(name)


def problem_with(library: bytes, platform: str) -> str | None:
    """Return why a library is not for all systems of a platform; None if it is."""
    if (actual := kind(library)) != PLATFORMS[platform]:
        return f"is {actual}, not {PLATFORMS[platform]}"
    versions = (tuple(map(int, pair)) for pair in re.findall(rb"\0GLIBC_(\d+)\.(\d+)", library))
    if (newest := max(versions, default=GLIBC)) > GLIBC:
        return f"needs glibc {newest}"
    # With another C runtime than Python's, descriptors of files have no meaning in it (system.c).
    for name in re.findall(rb"[\w-]+\.dll", library, re.IGNORECASE):
        if not name.lower().startswith((b"kernel", b"api-ms-win-")):
            return f"needs {name.decode()}, and not only Windows' C runtime"
    return None


def kind(library: bytes) -> str:
    """Return the format and the processor of a library, from its header."""
    if library.startswith(b"\x7fELF"):
        name, start, size = "ELF", 18, 2
    elif library.startswith(b"\xcf\xfa\xed\xfe"):
        name, start, size = "Mach-O", 4, 4
    elif library.startswith(b"MZ"):
        name, start, size = "PE", int.from_bytes(library[0x3C:0x40], "little") + 4, 2
    else:
        return "unknown"
    return f"{name} {PROCESSORS.get(int.from_bytes(library[start : start + size], 'little'))}"


if __name__ == "__main__":
    main(sys.argv[1])
