"""Tables on a terminal and in a pipe."""

import pytest

from gpt_cli.cli import table
from gpt_cli.cli.table import Column, Table, facts_table

COLUMNS = (
    Column("name", width=6),
    Column("text", free=True),
    Column("share", width=7, align=">", format=".1%"),
)
ROWS = [["a", "one two", 0.5], ["long name", "", 1]]


@pytest.fixture(params=["pipe", "terminal"])
def output(request, monkeypatch):
    monkeypatch.setattr(table, "on_terminal", lambda stream: request.param == "terminal")
    monkeypatch.setenv("COLUMNS", "20")
    return request.param


def test_a_terminal_gets_aligned_cells_under_a_header_and_a_pipe_tabs(output):
    lines = [*Table(*COLUMNS).lines(ROWS)]
    growing = Table(*COLUMNS)
    assert "".join(growing.line(*row) for row in ROWS) == "".join(lines)
    if output == "pipe":
        assert lines == ["", "a\tone two\t50.0%\n", "long name\t\t100.0%\n"]
    else:
        header = "name      share  text\n"
        assert lines == [header, "a         50.0%  one two\n", "long name   100.0%\n"]


def test_a_table_without_rows_has_its_header(output):
    header = "" if output == "pipe" else "name      share  text\n"
    assert "".join(Table(*COLUMNS).lines([])) == header


def test_a_whole_table_is_as_wide_as_its_cells(output):
    columns = Column("name"), Column("tokens", align=">", format=",")
    table = Table(*columns, aligned=True)
    assert (
        table.whole([["a", 1], ["b c d", 12345]]) == "name   tokens\na           1\nb c d  12,345\n"
    )
    assert facts_table({"a": 1, "bcd": "x y"}) == "a    1\nbcd  x y\n"


def test_text_is_wrapped_beside_its_head_on_a_terminal(output):
    words = Table(Column(width=4), Column(wrap=True), aligned=True)
    shown = words.line("ok", "one two three four")
    if output == "pipe":
        assert shown == "ok    one two three four\n"
    else:
        assert shown == "ok    one two three\n      four\n"
        assert words.line("a long head", "one two") == "a long head\n    one two\n"
        assert words.line("ok", "a " + 18 * "x") == f"ok\n    a\n    {18 * 'x'}\n"
