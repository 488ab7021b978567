"""Files and folders appear complete, or not at all."""

import os

import pytest

from gpt_cli.errors import InputError
from gpt_cli.system.atomic import new_folder, write_file
from support.processes import posix


@posix
def test_a_link_stays_a_link_and_a_device_a_device(tmp_path):
    page, link = tmp_path / "page.html", tmp_path / "link.html"
    page.write_text("before", encoding="utf-8")
    page.chmod(0o600)
    link.symlink_to(page)
    write_file(link, b"after", replace=True)
    assert (link.is_symlink(), page.read_bytes()) == (True, b"after")
    assert page.stat().st_mode & 0o777 == 0o600
    with pytest.raises(InputError, match=r"link\.html exists: name another output"):
        write_file(link, b"x", replace=False)
    with pytest.raises(InputError, match="exists"):
        write_file(tmp_path, b"x", replace=True)
    assert page.read_bytes() == b"after"
    nothing = tmp_path / "nothing.html"
    nothing.symlink_to(os.devnull)
    write_file(nothing, b"x", replace=False)
    assert nothing.is_symlink()
    assert not nothing.is_file()
    assert len([*tmp_path.iterdir()]) == 3


@posix
def test_a_link_to_itself_is_replaced_by_a_file_and_refused_as_a_folder(tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    with (
        pytest.raises(InputError, match="loop exists and is not an empty folder"),
        new_folder(loop),
    ):
        pass
    write_file(loop, b"x", replace=True)
    assert not loop.is_symlink()
    assert loop.read_bytes() == b"x"


def test_a_folder_appears_only_if_the_block_succeeds(tmp_path):
    to = tmp_path / "deep" / "new"
    with pytest.raises(ZeroDivisionError), new_folder(to) as folder:
        (folder / "half").touch()
        1 / 0  # noqa: B018
    assert [*tmp_path.iterdir()] == []
    with new_folder(to) as folder:
        (folder / "file").touch()
        assert not to.exists()
    assert [path.name for path in to.iterdir()] == ["file"]
