"""The compiled library of a source tree, and of an installed package."""

import ctypes
import json
import shutil
from importlib import metadata
from pathlib import Path

import pytest

from gpt_cli.ops import select
from gpt_cli.system import library

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def forget():
    """Let each test find the library again."""
    caches = (library.native_library, select._warn_of_source_tree)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Return a source tree without a library, from which gpt_cli seems to be imported."""
    tree = tmp_path / "tree"
    copied = shutil.ignore_patterns("libkernels.*", "*.pyc")
    shutil.copytree(ROOT / library.NATIVE, tree / library.NATIVE, ignore=copied)
    for name in ("hatch_build.py", "gpt_cli/ops/constants.inc"):
        shutil.copy(ROOT / name, tree / name)
    monkeypatch.setattr(library, "_ROOT", tree)
    return tree


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return a function that installs a package, editable or with a library of a digest."""

    def install(digest=None, *, editable=False):
        folder = tmp_path / "site"
        info = folder / "gpt2_cli-1.0.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.4\nName: gpt2-cli\nVersion: 1.0.0\n")
        (info / "direct_url.json").write_text(json.dumps({"dir_info": {"editable": editable}}))
        if digest:
            (folder / library.NATIVE).mkdir(parents=True)
            (folder / library.NATIVE / "libkernels.so").touch()
        distribution = metadata.PathDistribution(info)
        monkeypatch.setattr(metadata, "distribution", lambda name: distribution)
        monkeypatch.setattr(library, "_digest_in", lambda path: digest)
        return folder

    return install


def absent(name):
    raise metadata.PackageNotFoundError(name)


def test_native_computes_if_the_library_can_be_loaded(monkeypatch, tmp_path):
    assert library.native_computes() == (library.native_library() is not None)
    monkeypatch.setattr(library, "_ROOT", tmp_path)
    library.native_library.cache_clear()
    assert not library.native_computes()
    (tmp_path / library.NATIVE).mkdir(parents=True)
    (tmp_path / library.NATIVE / "libkernels.so").write_bytes(b"no library")
    library.native_library.cache_clear()
    assert library.native_library() is not None
    assert not library.native_computes()


@pytest.mark.usefixtures("library")
def test_the_library_has_the_digest_of_its_sources():
    assert library._digest_in(library.native_library()) == library.sources_digest(ROOT)


def test_any_source_changes_the_digest(tree):
    digests = {library.sources_digest(tree)}
    for name in ("hatch_build.py", "gpt_cli/ops/constants.inc", "gpt_cli/ops/native/pool.h"):
        with (tree / name).open("a") as file:
            file.write("\n")
        digests.add(library.sources_digest(tree))
    assert len(digests) == 4


def test_a_source_tree_uses_the_installed_library_of_the_same_sources(tree, installed, caplog):
    folder = installed(library.sources_digest(tree))
    assert library.native_library() == folder / library.NATIVE / "libkernels.so"
    assert library.source_tree_fault() is None
    select._warn_of_source_tree()
    assert not caplog.records


@pytest.mark.skipif(ctypes.sizeof(ctypes.c_void_p) != 8, reason="no library for this system")
def test_without_one_a_source_tree_warns_once(tree, installed, monkeypatch, caplog):
    monkeypatch.setattr(metadata, "distribution", absent)
    fault = f"gpt_cli was imported from the source tree {tree}, which has no library"
    cure = ": run `pip install -e .` there"
    assert library.source_tree_fault() == fault + cure
    folder = installed("another digest")
    fault += f", and the installed one in {folder} is of other sources{cure}"
    assert (library.native_library(), library.source_tree_fault()) == (None, fault)
    for _ in range(2):
        select.get_ops("cpu", "float32")
    (record,) = caplog.records
    assert record.getMessage().endswith(fault)
    with pytest.raises(select.InputError, match="int8 needs the compiled library, and gpt_cli was"):
        select.get_ops("cpu", "int8")


def test_an_editable_install_without_a_library_has_said_so(tree, installed):
    installed(editable=True)
    assert (library.native_library(), library.source_tree_fault()) == (None, None)
