"""Small files are read whole; other files are refused."""

import os

import pytest

from gpt_cli.system import files
from gpt_cli.system.files import read_small, version
from support.processes import posix


def test_a_small_file_is_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LARGEST", 5)
    (tmp_path / "file").write_bytes(b"12345")
    assert read_small(tmp_path / "file") == b"12345"
    (tmp_path / "file").write_bytes(b"123456")
    with pytest.raises(ValueError, match="it has 6 bytes, more than the limit of 5"):
        read_small(tmp_path / "file")


@posix
def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("pipe", "device", "."):
        with pytest.raises(ValueError, match="not a regular file"):
            read_small(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        read_small(tmp_path / "nothing")


@posix
def test_a_link_to_itself_has_no_version(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    assert version(tmp_path / "loop") is version(tmp_path / "nothing") is None
    with pytest.raises(NotADirectoryError):
        version(tmp_path.joinpath(__file__, "x"))
