"""Wheels and editable installs by hatch_build.py, without a network and without pip."""

import ctypes
import filecmp
import os
import platform
import re
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import packaging.tags
import pytest

pytest.importorskip("hatchling", reason="hatchling builds; it comes with the extra dev")
from hatchling import build
from hatchling.builders.wheel import WheelBuilder

import hatch_build
from tools import wheels

ROOT = Path(__file__).parents[1]
NATIVE = Path("gpt_cli", "ops", "native")
CUDA = Path("gpt_cli", "ops", "cuda")
CONSTANTS = "gpt_cli/ops/constants.inc"

pytestmark = pytest.mark.skipif(
    platform.system() not in ("Linux", "Darwin"), reason="the library is for Linux and macOS"
)
needs_compiler = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "aarch64", "arm64") or not shutil.which("cc"),
    reason="there is no C compiler `cc`, or this processor has no kernels",
)


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Return a folder with the files of a wheel, which is the working folder."""
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / NATIVE, tree / NATIVE, ignore=shutil.ignore_patterns("libkernels.*"))
    shutil.copytree(ROOT / CUDA, tree / CUDA)
    names = ["pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "gpt_cli/__init__.py"]
    names += ["gpt_cli/system/__init__.py", "gpt_cli/system/library.py", CONSTANTS]
    for name in names:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    shutil.copytree(ROOT / "docs", tree / "docs")
    (tree / "weights" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tree)
    return tree


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Return a function that makes a script the compiler."""

    def write(script):
        path = tmp_path / "compiler"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CC", str(path))

    return write


@pytest.fixture
def no_cc(tmp_path, monkeypatch):
    """Take the compiler `cc` away, and zig."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ziglang", None)


@pytest.fixture
def platform_is(monkeypatch):
    """Return a function that sets the platform of wheels."""

    def set_platform(platform):
        tag = f"cp311-cp311-{platform}"
        monkeypatch.setattr(WheelBuilder, "get_best_matching_tag", lambda _: tag)

    return set_platform


def build_wheel(tree):
    return tree / build.build_wheel(str(tree))


def build_editable(tree):
    """Do what the hook does for an editable install."""
    (hook,) = WheelBuilder(str(tree)).get_build_hooks(str(tree)).values()
    hook.initialize("editable", {})
    hook.finalize("editable", {}, "")


def build_everything(tree, umask):
    """Return the source distribution and the wheel of a tree."""
    os.chdir(tree)
    before = os.umask(umask)
    try:
        return Path(build.build_sdist("dist")), Path(build.build_wheel("dist"))
    finally:
        os.umask(before)


def names(wheel):
    with zipfile.ZipFile(wheel) as file:
        return file.namelist()


@pytest.fixture
def no_kernels(tree):
    """Replace the kernels of a level by its name, which compiles sooner."""
    (tree / NATIVE / "kernels.c").write_text(
        '#include "kernels.h"\n'
        "#define NAMED(name) const struct kernels kernels_##name = {.level = #name};\n"
        "#define EXPANDED(name) NAMED(name)\n"
        "EXPANDED(LEVEL)\n"
    )


def libraries(tree):
    return list(tree.rglob("libkernels.*"))


@needs_compiler
@pytest.mark.usefixtures("no_kernels")
def test_a_wheel_with_the_library_is_for_this_platform_and_every_python(tree, compiler):
    compiler('exec cc "$@" -O0')
    wheel = build_wheel(tree)
    assert wheel.stem.startswith("gpt2_cli-")
    assert "-py3-none-" in wheel.stem
    assert wheel.stem.endswith(platform.machine())
    assert [name for name in names(wheel) if "libkernels" in name]
    assert not any(name.endswith((".c", ".h")) for name in names(wheel))
    assert [name for name in names(wheel) if name.endswith("/licenses/LICENSE")]
    assert libraries(tree) == []


@needs_compiler
@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize(
    ("script", "unknown"), [("", set()), ('case "$*" in *mavxvnni*) exit 1;; esac;', {b"avxvnni"})]
)
def test_an_editable_install_has_the_levels_that_the_compiler_knows(
    tree, compiler, script, unknown
):
    compiler(f'{script} exec cc "$@" -O0')
    build_editable(tree)
    (library,) = libraries(tree)
    assert library.parent == tree / NATIVE
    if platform.machine() == "x86_64":
        levels = set(re.findall(rb"(?<!\w)avx\w+(?=\0)", library.read_bytes()))
        assert levels == {b"avx512vnni", b"avx512", b"avxvnni", b"avx2"} - unknown


@needs_compiler
@pytest.mark.slow
def test_the_library_is_small_and_compiles_without_a_warning(tree, compiler):
    compiler('exec cc "$@" -Werror')
    build_editable(tree)
    (library,) = libraries(tree)
    assert library.stat().st_size <= 400_000
    assert ctypes.CDLL(str(library)).gpt2_linear


@needs_compiler
@pytest.mark.slow
def test_a_later_build_elsewhere_from_the_source_distribution_gives_the_same_bytes(
    tmp_path, monkeypatch
):
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    monkeypatch.chdir(ROOT)
    ignored = shutil.ignore_patterns(".git", ".venv*", ".*_cache", "build", "dist", "libkernels.*")
    first, second = tmp_path / "first", tmp_path / "another" / "folder"
    shutil.copytree(ROOT, first, ignore=ignored)
    files = build_everything(first, 0o022)
    with tarfile.open(first / "dist" / files[0]) as packed:
        packed.extractall(second, filter="data")
    (second,) = second.iterdir()
    for path in second.rglob("*"):
        path.chmod(path.stat().st_mode & 0o700)
        os.utime(path)
    assert build_everything(second, 0o077) == files
    for file in files:
        assert filecmp.cmp(first / "dist" / file, second / "dist" / file, shallow=False), file


# Compilers that make no library, and what the warning says.
FAILURES = {
    "printf 'In file x.c:\nx.c:1: \aerror: no\n' >&2; exit 1": "NumPy computes: x.c:1: error: no",
    "exit 3": "the C compiler compiler: exit code 3",
    'case "$*" in *-shared*) echo "ld: error: no" >&2; exit 1;; esac': "ld: error: no",
    "exit 0": "cannot be loaded",
}


@pytest.mark.parametrize(("script", "message"), FAILURES.items())
def test_a_compiler_that_fails_gives_a_pure_wheel_and_a_warning(
    tree, compiler, capfd, script, message
):
    compiler(script)
    wheel = build_wheel(tree)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not any("libkernels" in name for name in names(wheel))
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("the C library was not compiled, so NumPy computes: ")
    assert message in line


@pytest.mark.usefixtures("no_cc")
def test_without_a_compiler_the_wheel_is_pure(tree, capfd):
    assert build_wheel(tree).name.endswith("-py3-none-any.whl")
    assert "there is no C compiler `cc`, and the package ziglang is" in capfd.readouterr().err


@pytest.mark.parametrize(
    "platform", ["linux_riscv64", "linux_i686", "win32", "macosx_11_0_universal2"]
)
def test_a_platform_without_kernels_gets_a_pure_wheel_without_a_compilation(
    tree, compiler, platform_is, capfd, platform
):
    compiler("touch called")
    platform_is(platform)
    assert build_wheel(tree).name.endswith("-py3-none-any.whl")
    assert f"there are no kernels for {platform}" in capfd.readouterr().err
    assert not (tree / "called").exists()


# What zig compiles for, and the library's name, for the platforms of a release and others.
TARGETS = {
    "manylinux_2_17_x86_64.manylinux2014_x86_64": ("x86_64-linux-gnu.2.17", "libkernels.so"),
    "manylinux_2_28_aarch64": ("aarch64-linux-gnu.2.28", "libkernels.so"),
    "musllinux_1_2_x86_64": ("x86_64-linux-musl", "libkernels.so"),
    "musllinux_1_2_aarch64": ("aarch64-linux-musl", "libkernels.so"),
    "macosx_10_13_x86_64": ("x86_64-macos.10.13", "libkernels.dylib"),
    "macosx_11_0_arm64": ("aarch64-macos.11.0", "libkernels.dylib"),
    "win_amd64": ("x86_64-windows-gnu", "kernels.dll"),
    "win_arm64": ("aarch64-windows-gnu", "kernels.dll"),
}


@pytest.mark.parametrize(("platform", "target", "library"), [(p, *t) for p, t in TARGETS.items()])
def test_the_platform_decides_what_is_compiled(
    tree, compiler, platform_is, platform, target, library
):
    compiler(f"""echo "$*" >> {tree}/called; for out; do :; done; while [ $# -gt 1 ]; do
        [ "$1" != -o ] || echo built > "$2"; shift; done""")
    platform_is(platform)
    wheel, runs_here = build_wheel(tree), {*platform.split(".")} & {*packaging.tags.platform_tags()}
    assert [Path(name).name for name in names(wheel) if "kernels." in name] == (
        [] if runs_here else [library]  # `built` cannot be loaded
    )
    assert wheel.name.endswith("any.whl" if runs_here else f"-py3-none-{platform}.whl")
    *compiled, link = (tree / "called").read_text().splitlines()
    levels = {word[8:] for line in compiled for word in line.split() if word.startswith("-DLEVEL=")}
    x86 = {"avx2", "avxvnni", "avx512", "avx512vnni"}
    assert levels == (x86 if target.startswith("x86") else {"neon", "neondot"})
    assert ("-install_name" in link) == (library == "libkernels.dylib")
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", target, "-s"]
    assert hatch_build.zig(platform) == zig


ZIG = [hatch_build.ZIG]
# The system, its platforms, the compiler `cc` (a script), CC, and what a build then requires.
REQUIREMENTS = [
    ("linux", ["manylinux_2_36_x86_64", "manylinux_2_17_x86_64"], None, None, ZIG),
    ("linux", ["manylinux_2_17_aarch64"], "exit 1", None, ZIG),  # it has no headers
    ("linux", ["musllinux_1_2_aarch64", "musllinux_1_1_aarch64"], None, "", ZIG),
    ("linux", ["manylinux_2_17_x86_64"], "exit 0", None, []),
    ("linux", ["manylinux_2_17_x86_64"], None, "clang", []),
    ("linux", ["manylinux_2_17_x86_64"], None, "false", []),
    ("linux", ["manylinux_2_31_riscv64", "linux_riscv64"], None, None, []),
    ("darwin", ["macosx_13_0_arm64", "macosx_12_0_arm64"], "exit 0", None, ZIG),  # no xcode-select
    ("darwin", ["macosx_11_0_x86_64", "macosx_10_13_x86_64"], None, None, []),
    ("win32", ["win_amd64"], "exit 0", None, ZIG),
    ("win32", ["win_amd64"], None, "clang", []),
    ("win32", ["win32"], None, None, []),
]


@pytest.mark.parametrize(("system", "platforms", "cc", "variable", "required"), REQUIREMENTS)
@pytest.mark.usefixtures("tree", "no_cc")
def test_zig_is_required_only_where_there_is_no_other_compiler(
    tmp_path, monkeypatch, system, platforms, cc, variable, required
):
    if cc:
        (tmp_path / "cc").write_text(f"#!/bin/sh\n{cc}\n")
        (tmp_path / "cc").chmod(0o755)
    if variable is not None:
        monkeypatch.setenv("CC", variable)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(packaging.tags, "platform_tags", lambda: iter(platforms))
    assert build.get_requires_for_build_wheel() == required
    assert build.get_requires_for_build_editable()[:-1] == required
    assert build.get_requires_for_build_sdist() == []


@needs_compiler
@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_zig_compiles_where_there_is_no_other_compiler(tree, tmp_path, monkeypatch, request, kind):
    package = tmp_path / "packages" / "ziglang"  # `cc` by another name
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        "import os, sys\n"
        f"with open({str(tmp_path / 'called')!r}, 'a') as file:\n"
        "    print(*sys.argv[1:5], os.environ['ZIG_GLOBAL_CACHE_DIR'], file=file)\n"
        f"command, path = ['cc', '-O0', *sys.argv[5:]], {os.environ['PATH']!r}\n"
        f"os.execve({shutil.which('cc')!r}, command, os.environ | {{'PATH': path}})\n"
    )
    request.getfixturevalue("no_cc")
    monkeypatch.delitem(sys.modules, "ziglang")
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    if kind == "editable":
        build_editable(tree)
        assert [path.parent for path in libraries(tree)] == [tree / NATIVE]
    else:
        assert [name for name in names(build_wheel(tree)) if "kernels." in name]
    calls = {tuple(line.split()) for line in (tmp_path / "called").read_text().splitlines()}
    ((cc, option, target, strip, cache),) = calls
    assert (cc, option, strip) == ("cc", "-target", "-s")
    here = hatch_build.ZIG_PLATFORMS & {*packaging.tags.platform_tags()}
    assert [target] == [hatch_build.zig(own)[5] for own in here]
    assert not Path(cache).is_relative_to(Path.home())
    assert not Path(cache).exists()


# Headers of libraries as their formats define them, and one of nothing.
HEADERS = {
    "ELF x86-64": b"\x7fELF\2\1\1" + bytes(9) + b"\3\0\x3e\0",
    "ELF ARM": b"\x7fELF\2\1\1" + bytes(9) + b"\3\0\xb7\0",
    "ELF None": b"\x7fELF\2\1\1" + bytes(9) + b"\3\0\xf3\0",
    "Mach-O x86-64": b"\xcf\xfa\xed\xfe\7\0\0\1",
    "Mach-O ARM": b"\xcf\xfa\xed\xfe\x0c\0\0\1",
    "PE x86-64": b"MZ" + bytes(0x3A) + b"\x48\0\0\0" + bytes(8) + b"PE\0\0\x64\x86",
    "PE ARM": b"MZ" + bytes(0x3A) + b"\x40\0\0\0PE\0\0\x64\xaa",
    "unknown": b"<html>",
}


# What libraries contain, and why they are not for all systems of a platform.
GLIBC = b"\0GLIBC_2.9\0GLIBC_2.17\0GLIBC_2.2.5\0GLIBC_PRIVATE\0"
RUNTIME = b"KERNEL32.dll\0api-ms-win-crt-heap-l1-1-0.dll\0kernels.dll\0"
CONTENTS = [
    ("manylinux_2_17_aarch64.manylinux2014_aarch64", HEADERS["ELF ARM"] + GLIBC, None),
    ("musllinux_1_2_x86_64", HEADERS["ELF x86-64"], None),
    ("musllinux_1_2_x86_64", HEADERS["ELF ARM"], "is ELF ARM, not ELF x86-64"),
    ("musllinux_1_2_aarch64", HEADERS["ELF ARM"] + b"\0GLIBC_2.28\0", "needs glibc (2, 28)"),
    ("win_amd64", HEADERS["PE x86-64"] + RUNTIME, None),
    ("win_amd64", HEADERS["PE x86-64"] + RUNTIME + b"msvcrt.dll", "needs msvcrt.dll, and not only"),
    ("macosx_11_0_arm64", HEADERS["PE ARM"], "is PE ARM, not Mach-O ARM"),
    ("macosx_11_0_arm64", HEADERS["unknown"], "is unknown, not Mach-O ARM"),
]


def test_a_library_is_for_all_systems_of_its_wheel():
    assert {wheels.kind(header): header for header in HEADERS.values()} == HEADERS
    assert {*wheels.PLATFORMS.values()} == {*HEADERS} - {"ELF None", "unknown"}
    for system, library, reason in CONTENTS:
        problem = wheels.problem_with(library, system)
        assert problem == reason or problem.startswith(reason), (system, problem)


@pytest.mark.slow
@pytest.mark.parametrize("platform", wheels.PLATFORMS)
def test_zig_gives_the_same_bytes_twice(tree, tmp_path, platform):
    pytest.importorskip("ziglang", reason="needs the extra wheels")
    shutil.copytree(tree, tmp_path / "another" / "folder")
    libraries = []
    for root in (tree, tmp_path / "another" / "folder"):
        (root / "build").mkdir()
        arguments = (platform, hatch_build.zig(platform), root / "build")
        libraries.append(hatch_build.compile_library(root / NATIVE, *arguments).read_bytes())
    assert libraries[0] == libraries[1]
    assert wheels.problem_with(libraries[0], platform) is None
    assert len(libraries[0]) <= 600_000


def test_a_wheel_has_the_pages_of_the_guide_and_the_man_pages(tree, compiler):
    compiler("exit 1")
    with zipfile.ZipFile(build_wheel(tree)) as wheel:
        pages = {Path(entry.filename): entry for entry in wheel.infolist()}
    guide = {path for path in pages if path.parent == Path("gpt_cli", "docs")}
    man = {path for path in pages if path.parts[1:-1] == ("data", "share", "man", "man1")}
    assert {path.name for path in guide} == {path.name for path in ROOT.glob("docs/*.md")}
    assert {path.name for path in man} == {path.name for path in ROOT.glob("docs/man/*")}
    assert sum(pages[path].file_size for path in guide | man) < 1_000_000


def test_a_wheel_has_what_kernels_of_a_gpu_are_compiled_from(tree, compiler):
    compiler("exit 1")
    packed = names(build_wheel(tree))
    kernels = {(CUDA / path.name).as_posix() for path in (ROOT / CUDA).glob("*.cu")}
    assert len(kernels) > 8
    assert kernels | {CONSTANTS} <= {*packed}
    assert not any(name.endswith((".c", ".h")) for name in packed)


def test_a_library_of_an_earlier_build_is_not_used_after_a_failure(tree, compiler):
    compiler("exit 1")
    before = tree / NATIVE / "libkernels.so"
    before.write_bytes(b"stale")
    assert not any("libkernels" in name for name in names(build_wheel(tree)))
    assert before.exists()  # a wheel leaves the tree as it is
    build_editable(tree)
    assert not before.exists()


def test_cflags_do_not_change_what_is_computed(tree, compiler, monkeypatch):
    monkeypatch.setenv("CFLAGS", "-Ofast")
    compiler(f'echo "$*" >> {tree}/called')
    build_wheel(tree)
    compiled = [line for line in (tree / "called").read_text().splitlines() if " -c " in line]
    assert len(compiled) > 3
    for line in compiled:
        assert "-ffp-contract=off" in line
        assert "fast" not in line
        assert "native " not in line.replace(str(NATIVE), "")


def test_a_source_distribution_has_the_sources_of_the_library_and_the_man_pages(tree):
    (tree / NATIVE / "libkernels.so").write_bytes(b"of this machine")
    with tarfile.open(tree / build.build_sdist(str(tree))) as file:
        packed = {Path(*Path(name).parts[1:]) for name in file.getnames()}
    assert {NATIVE / path.name for path in (tree / NATIVE).glob("*.[ch]")} <= packed
    assert {CUDA / path.name for path in (tree / CUDA).glob("*.cu")} | {Path(CONSTANTS)} <= packed
    assert {Path("hatch_build.py"), Path("pyproject.toml"), Path("docs/man/gpt-cli.1")} <= packed
    assert NATIVE / "libkernels.so" not in packed


def test_no_text_says_to_install_another_program_of_this_name():
    """On the Python index, `gpt-cli` is not this package."""
    files = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("gpt_cli/**/*.py")]
    wrong = re.compile(r"\b(re)?install\s+(-\S+\s+)*['\"]?gpt-cli")
    assert [str(file) for file in files if wrong.search(file.read_text("utf-8"))] == []
