"""The line that a terminal replaces fits it, and a terminal that is gone is no error."""

import errno
import io
import os
import sys

import pytest

from gpt_cli.system.terminal import columns, replace_line, silent_stderr, write_error


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def fileno(self):
        return 1000


def use_terminal(monkeypatch) -> Terminal:
    """Put standard error on a terminal of 20 columns."""
    monkeypatch.setattr(os, "get_terminal_size", lambda number: os.terminal_size((20, 24)))
    monkeypatch.setattr(sys, "stderr", Terminal())
    return sys.stderr


@pytest.mark.parametrize("line", ["", "short", "x" * 30])
def test_a_line_has_one_column_less_than_the_terminal(monkeypatch, line):
    terminal = use_terminal(monkeypatch)
    replace_line(line)
    assert terminal.getvalue() == f"\r{line[:19]:19}\r"


def test_the_width_is_that_of_standard_error(monkeypatch):
    use_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "300")
    assert columns() == 20
    monkeypatch.setattr(os, "get_terminal_size", lambda number: os.terminal_size((0, 0)))
    assert columns() == 80
    for stream in (None, io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        assert columns() == 0


def test_standard_error_that_is_closed_or_gone_is_no_error(monkeypatch):
    class Gone(Terminal):
        def write(self, text):
            raise OSError(errno.EIO, "Input/output error")

        def fileno(self):
            raise OSError(errno.EBADF, "Bad file descriptor")

    closed = io.StringIO()
    closed.close()
    for stream in (None, Gone(), closed):
        monkeypatch.setattr(sys, "stderr", stream)
        write_error("text")
        replace_line("text")


def test_what_libraries_write_to_standard_error_is_hidden(capfd):
    with silent_stderr():
        os.write(2, b"hidden")
    with pytest.raises(KeyError), silent_stderr():
        raise KeyError
    os.write(2, b"shown")
    assert capfd.readouterr().err == "shown"


def test_without_standard_error_its_descriptor_is_left_alone(capfd, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with silent_stderr():
        os.write(2, b"of another file")
    assert capfd.readouterr().err == "of another file"


def test_a_closed_descriptor_of_standard_error_is_no_error():
    kept = os.dup(2)
    os.close(2)
    try:
        with silent_stderr():
            pass
        with pytest.raises(OSError):
            os.fstat(2)
    finally:
        os.dup2(kept, 2)
        os.close(kept)
