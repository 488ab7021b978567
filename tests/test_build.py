"""Wheels and editable installs by hatch_build.py, without a network and without pip."""

import ctypes
import filecmp
import os
import platform
import re
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="hatchling builds; it comes with the extra dev")
from hatchling import build
from hatchling.builders.wheel import WheelBuilder

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


def test_without_a_compiler_the_wheel_is_pure(tree, monkeypatch, capfd):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tree))
    assert build_wheel(tree).name.endswith("-py3-none-any.whl")
    assert "the C compiler cc: No such file" in capfd.readouterr().err


@pytest.mark.parametrize("system", ["linux_riscv64", "win_arm64", "linux_i686"])
def test_a_platform_without_kernels_gets_a_pure_wheel_without_a_compilation(
    tree, compiler, monkeypatch, capfd, system
):
    compiler("touch called")
    monkeypatch.setattr(WheelBuilder, "get_best_matching_tag", lambda _: f"cp311-cp311-{system}")
    assert build_wheel(tree).name.endswith("-py3-none-any.whl")
    assert system in capfd.readouterr().err
    assert not (tree / "called").exists()


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
