"""Texts on a terminal break between words."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt_cli.cli.wrap import WordWrap
from support.processes import posix, run_on_terminal

pyte = pytest.importorskip("pyte", reason="pyte shows what a terminal shows")

PIECES = st.lists(st.text("ab \n", max_size=6), max_size=30)


def shown(pieces, columns, monkeypatch):
    """Return the lines of a terminal after a text, which is written in pieces."""
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((columns, 24)))
    screen = pyte.Screen(columns, 400)
    screen.set_mode(pyte.modes.LNM)
    stream = pyte.Stream(screen)
    wrap = WordWrap()
    for piece in pieces:
        stream.feed(wrap.add(piece))
    return [line.rstrip() for line in "\n".join(screen.display).rstrip().split("\n")]


@given(PIECES, st.integers(8, 12))
def test_lines_break_between_words_however_a_text_is_cut(pieces, columns):
    with pytest.MonkeyPatch.context() as patch:
        lines = shown(pieces, columns, patch)
        words = "".join(pieces).split()
        if all(len(word) < columns for word in words):
            assert " ".join(lines).split() == words
        else:
            assert "".join("".join(lines).split()) == "".join(words)
        assert shown(["".join(pieces)], columns, patch) == lines


def test_line_ends_stay_and_lines_are_full(monkeypatch):
    text = "one two three\n\n  four five six seven"
    expected = ["one two", "three", "", "  four five", "six seven"]
    assert shown([text], 12, monkeypatch) == expected
    assert shown(list(text), 12, monkeypatch) == expected


def test_control_characters_are_visible_and_wide_ones_are_not_moved(monkeypatch):
    assert shown(["a \x1b[2Jb\tc"], 40, monkeypatch) == ["a ␛[2Jb        c"]
    wide = "中文字很宽"
    assert "".join(shown(["a ", *wide], 8, monkeypatch)).replace(" ", "") == "a" + wide


@posix
def test_generate_breaks_lines_on_a_terminal(tiny):
    text = "Once upon a time" + tiny.generate(["Once upon a time"], max_tokens=40, seed=2)[0].text
    flags = ("--echo", "-s", "2", "-n", "40", "-m", "tiny")
    code, output = run_on_terminal("generate", *flags, "Once upon a time", columns=30)
    lines = output.replace("\b", "").splitlines()
    assert code == 0
    assert " ".join(lines).split() == text.split()
    assert all(len(line) < 30 for line in lines)
