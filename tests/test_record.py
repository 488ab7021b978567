"""`tools/record.py`: the contents of the moving picture, and their times."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from support.processes import posix

pytest.importorskip("pyte", reason="the extra docs is not installed")
pytestmark = posix
SVG = "{http://www.w3.org/2000/svg}"
COMMAND = "cat what.is | cat"
WRITES = "\033[1;38;2;1;2;3mred\033[0m a  <b>\n\033[48;5;196m長 x\033[0m ██▌\n"


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "tools")
    import record

    return record


@pytest.fixture
def svg(recorder, tmp_path):
    (tmp_path / "what.is").write_text(WRITES, encoding="utf-8")
    return recorder.picture(recorder.record([(COMMAND, 1.0)], tmp_path))


def parts(svg, name, *, hidden):
    """The texts or rectangles that are there at the end, or the others."""
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        if (group.get("visibility") == "hidden") is hidden:
            yield from group.iter(f"{SVG}{name}")


def test_the_command_is_typed_letter_by_letter_and_the_last_screen_stays(svg):
    shown = [text.text for text in parts(svg, "text", hidden=False)]
    assert sorted(shown) == sorted(["$", COMMAND, "red", "a", "<b>", "長", "x", "$"])
    typed = [text.text for text in parts(svg, "text", hidden=True) if text.text != "$"]
    assert typed == sorted(typed, key=len)
    assert all(map(COMMAND.startswith, typed))
    assert len(typed) > len(COMMAND) / 2  # there are 15 frames and 25 letters a second


def test_the_animation_begins_with_the_last_screen(svg, recorder):
    seconds, delay = re.search(r"animation:(\S+)s step-end (\S+)s infinite", svg).groups()
    assert float(seconds) + float(delay) == pytest.approx(recorder.PAUSE)


def test_cells_have_their_places_and_colours(svg, recorder):
    texts = {text.text: text for text in parts(svg, "text", hidden=False)}

    def cells(element, name, margin=0):
        return (float(element.get(name)) - margin) / recorder.CELL

    columns = {text: cells(texts[text], "x", recorder.MARGIN) for text in texts}
    expected = {"$": 0, COMMAND: 2, "red": 0, "a": 4, "<b>": 7, "長": 0, "x": 3}
    assert columns == pytest.approx(expected)
    assert cells(texts["長"], "textLength") == pytest.approx(2)
    assert (texts["red"].get("fill"), texts["red"].get("font-weight")) == ("#010203", "bold")
    boxes = [
        (box.get("fill"), round(cells(box, "x", recorder.MARGIN), 3), round(cells(box, "width"), 3))
        for box in parts(svg, "rect", hidden=False)
    ]
    red, light = "#ff0000", recorder.FOREGROUND
    assert {(light, 5, 2.5), (light, 2, 1)} < set(boxes)  # the bar and the cursor
    assert sum(width for colour, _, width in boxes if colour == red) == pytest.approx(4)


def test_each_group_is_moved_by_css_in_the_order_of_time(svg):
    assert "<script" not in svg
    starts = re.findall(r"@keyframes (\w+)\{0%\{visibility:hidden\}([\d.]+)%", svg)
    names = [group.get("class") for group in ElementTree.fromstring(svg).iter(f"{SVG}g")]
    assert sorted(name for name, _ in starts) == sorted(names)
    assert all(0 <= float(start) <= 100 for _, start in starts)


def test_a_command_that_fails_is_not_recorded(recorder, tmp_path):
    with pytest.raises(SystemExit, match=r"exit code 3: \(exit 3\) \| cat"):
        recorder.record([("(exit 3) | cat", 1.0)], tmp_path)
