"""docs/notebook.md as a notebook: it is executed (`make test-notebook`) and looked at."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.pages import Parts

for needed in ("nbclient", "ipykernel", "ipywidgets", "pandas"):
    pytest.importorskip(needed, reason="make test-notebook")

PAGE = Path(__file__).parents[1] / "docs" / "notebook.md"
EXECUTE = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], 4)
nbclient.NotebookClient(notebook, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[1])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def notebook(folder):
    """Return the page as a notebook, with the outputs of its cells."""
    sources = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.DOTALL)
    code = [
        {"cell_type": "code", "id": str(number), "metadata": {}, "source": source}
        | {"outputs": [], "execution_count": None}
        for number, source in enumerate(sources)
    ]
    file = folder / "page.ipynb"
    file.write_text(json.dumps({"cells": code, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    start = time.perf_counter()
    command = [sys.executable, "-c", EXECUTE, file.name]
    finished = subprocess.run(command, cwd=folder, capture_output=True, timeout=300)
    assert finished.returncode == 0, finished.stderr.decode()
    assert time.perf_counter() - start < 30
    return json.loads(file.read_bytes())


def data_of(notebook, kind):
    """Return the data of a kind, such as text/html, that the cells display."""
    outputs = [output for cell in notebook["cells"] for output in cell["outputs"]]
    assert all("data" in output for output in outputs), "a cell writes to a stream"
    return ["".join(output["data"][kind]) for output in outputs if kind in output["data"]]


def test_each_cell_shows_a_line_and_a_picture(notebook, folder):
    assert len(notebook["cells"]) == 12
    lines = [text for text in data_of(notebook, "text/plain") if text.startswith("<")]
    assert len(lines) == 6
    assert max(map(len, lines)) <= 110
    (quoted,) = re.findall(r"^`(<.*>)`", PAGE.read_text("utf-8"), re.MULTILINE)
    assert quoted in lines
    pictures = data_of(notebook, "text/html")
    texts = [html for html in pictures if html.startswith("<div><small>")]
    tables = [html for html in pictures if "dataframe" in html]
    frames = [html for html in pictures if html.startswith("<iframe")]
    assert (len(texts), len(tables), len(frames)) == (2, 5, 3)
    assert len(pictures) == 2 + 5 + 3
    assert {tag for html in texts for tag, _ in Parts(html).tags} == {"div", "small", "span"}
    assert (folder / "tree.html").read_text("utf-8").startswith("<!doctype html>")
    (_bar,) = data_of(notebook, "application/vnd.jupyter.widget-view+json")
    assert "19/19" in json.dumps(notebook["metadata"]["widgets"])


@pytest.mark.browser
def test_the_pictures_are_readable_in_a_notebook(notebook, folder, window):
    api = pytest.importorskip("playwright.sync_api")
    file = folder / "outputs.html"
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    style = "<style>:root { color-scheme: light dark }</style>"
    body = "".join(data_of(notebook, "text/html"))
    file.write_text(f"<!doctype html>{head}{style}{body}", encoding="utf-8")
    tab = window.new_page()
    messages = []
    tab.on("console", lambda message: messages.append(message.text))
    tab.on("pageerror", lambda error: messages.append(str(error)))
    tab.goto(file.as_uri())
    frames = tab.frames[1:]
    titles = [frame.locator("h1").inner_text() for frame in frames]
    assert titles == ["tiny · attention", "tiny · lens", "tiny · tree", "tiny · patch"]
    attention, *others = frames
    attention.locator(".flow .token").nth(3).click()
    assert "→ token" in attention.locator(".panel strong").inner_text()
    for frame in others:
        assert frame.locator(".panel").inner_text()  # of what is chosen
    for frame in others[:1] + others[2:]:  # the tables
        frame.frame_element().scroll_into_view_if_needed()  # before, it draws nothing
        cell = frame.locator("td[aria-selected=true]")
        api.expect(cell).to_be_in_viewport(ratio=0.9)
        place = cell.bounding_box()
        assert place["y"] + place["height"] <= frame.locator(".panel").bounding_box()["y"]
    for frame in frames:
        assert frame.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        assert frame.evaluate("window.origin") == "null"  # it cannot reach the notebook
    spans = tab.locator("div[dir=auto] > span")
    assert "".join(spans.all_inner_texts()).startswith(",therewasabrave")
    shown = "one => [getComputedStyle(one).color, getComputedStyle(one).backgroundColor]"
    brave = tab.get_by_text("brave", exact=True)
    assert brave.evaluate(shown) == ["rgb(0, 0, 0)", "rgb(252, 141, 89)"]
    assert re.fullmatch(r"\d\.\d\d bits", brave.get_attribute("title"))
    assert messages == []
