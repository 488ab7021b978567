"""What hatch_build.py adds to a wheel and to an editable install. No network, and no pip."""

import ctypes
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

pytestmark = pytest.mark.skipif(
    platform.system() not in ("Linux", "Darwin"), reason="the library is for Linux and macOS"
)
needs_compiler = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "aarch64", "arm64") or not shutil.which("cc"),
    reason="there is no C compiler `cc`, or this processor has no kernels",
)


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """What a wheel is built from, as the working folder."""
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / NATIVE, tree / NATIVE, ignore=shutil.ignore_patterns("libkernels.*"))
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "gpt_cli/__init__.py"):
        shutil.copy(ROOT / name, tree / name)
    (tree / "weights" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tree)
    return tree


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Write a script that is the compiler."""

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


def names(wheel):
    with zipfile.ZipFile(wheel) as file:
        return file.namelist()


def without_kernels(tree):
    """Make the source files empty, so that they compile sooner."""
    for path in (tree / NATIVE).glob("*.c"):
        path.write_text("typedef int nothing;")


def libraries(tree):
    return list(tree.rglob("libkernels.*"))


@needs_compiler
def test_a_wheel_with_the_library_is_for_this_platform_and_every_python(tree, compiler):
    without_kernels(tree)
    compiler('exec cc "$@"')
    wheel = build_wheel(tree)
    assert wheel.stem.startswith("gpt2_cli-")
    assert "-py3-none-" in wheel.stem
    assert wheel.stem.endswith(platform.machine())
    assert [name for name in names(wheel) if "libkernels" in name]
    assert not any(name.endswith((".c", ".h")) for name in names(wheel))
    assert libraries(tree) == []


@needs_compiler
def test_an_editable_install_has_the_library_in_the_tree(tree, compiler):
    without_kernels(tree)
    compiler('exec cc "$@"')
    build_editable(tree)
    (library,) = libraries(tree)
    assert library.parent == tree / NATIVE


@needs_compiler
@pytest.mark.slow
def test_the_library_is_small_and_compiles_without_a_warning(tree, compiler):
    compiler('exec cc "$@" -Werror')
    build_editable(tree)
    (library,) = libraries(tree)
    assert library.stat().st_size <= 400_000
    assert ctypes.CDLL(str(library)).gpt2_linear


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX-VNNI is of x86-64")
def test_a_compiler_that_does_not_know_avxvnni_makes_the_other_levels(tree, compiler):
    compiler('case "$*" in *mavxvnni*) exit 1;; esac; exec cc "$@" -O0')
    build_editable(tree)
    (library,) = libraries(tree)
    named = re.findall(rb"(?<!\w)avx\w+(?=\0)", library.read_bytes())
    assert set(named) == {b"avx512vnni", b"avx512", b"avx2"}


# By which a compiler can leave us without a library, and what is said of it.
FAILURES = {
    "printf 'In file x.c:\nx.c:1: \aerror: no\n' >&2; exit 1": "NumPy computes: x.c:1: error: no",
    "exit 3": "the C compiler compiler: exit code 3",
    'case "$*" in *-shared*) echo "ld: error: no" >&2; exit 1;; esac': "ld: error: no",
    "exit 0": "cannot be loaded",
}


@pytest.mark.parametrize(("script", "said"), FAILURES.items())
def test_where_the_compiler_fails_there_is_a_pure_wheel_and_one_line_that_says_why(
    tree, compiler, capfd, script, said
):
    compiler(script)
    wheel = build_wheel(tree)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not any("libkernels" in name for name in names(wheel))
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("the C library was not compiled, so NumPy computes: ")
    assert said in line


def test_where_there_is_no_compiler_the_wheel_is_pure(tree, monkeypatch, capfd):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tree))
    assert build_wheel(tree).name.endswith("-py3-none-any.whl")
    assert "the C compiler cc: No such file" in capfd.readouterr().err


@pytest.mark.parametrize("system", ["linux_riscv64", "win_arm64", "linux_i686"])
def test_a_platform_without_kernels_gets_a_pure_wheel_and_asks_no_compiler(
    tree, compiler, monkeypatch, capfd, system
):
    compiler("touch asked")
    monkeypatch.setattr(WheelBuilder, "get_best_matching_tag", lambda _: f"cp311-cp311-{system}")
    assert build_wheel(tree).name.endswith("-py3-none-any.whl")
    assert system in capfd.readouterr().err
    assert not (tree / "asked").exists()


@pytest.mark.parametrize("make", [build_wheel, build_editable])
def test_no_library_of_before_is_taken_for_the_one_that_failed(tree, compiler, make):
    """The wheel has none, but what is in the tree is no concern of a wheel."""
    compiler("exit 1")
    before = tree / NATIVE / "libkernels.so"
    before.write_bytes(b"stale")
    wheel = make(tree)
    assert before.exists() == (wheel is not None)
    assert wheel is None or not any("libkernels" in name for name in names(wheel))


def test_no_flag_from_outside_changes_what_is_computed(tree, compiler, monkeypatch):
    monkeypatch.setenv("CFLAGS", "-Ofast")
    compiler(f'echo "$*" >> {tree}/asked')
    build_wheel(tree)
    compiled = [line for line in (tree / "asked").read_text().splitlines() if " -c " in line]
    assert len(compiled) > 3
    for line in compiled:
        assert "-ffp-contract=off" in line
        assert "fast" not in line
        assert "native " not in line.replace(str(NATIVE), "")


def test_a_source_distribution_has_what_the_library_is_made_of(tree, compiler):
    (tree / NATIVE / "libkernels.so").write_bytes(b"of this machine")
    with tarfile.open(tree / build.build_sdist(str(tree))) as file:
        packed = {Path(*Path(name).parts[1:]) for name in file.getnames()}
    assert {NATIVE / path.name for path in (tree / NATIVE).glob("*.[ch]")} <= packed
    assert {Path("hatch_build.py"), Path("pyproject.toml")} <= packed
    assert NATIVE / "libkernels.so" not in packed


def test_no_text_says_to_install_the_other_program_of_that_name():
    """On the Python index, `gpt-cli` is not this package."""
    files = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("gpt_cli/**/*.py")]
    wrong = re.compile(r"\b(re)?install\s+(-\S+\s+)*['\"]?gpt-cli")
    assert [str(file) for file in files if wrong.search(file.read_text("utf-8"))] == []
