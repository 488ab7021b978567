"""`gpt-cli help`: the pages of docs/ on a terminal and in a pipe."""

import re
from pathlib import Path

import pytest

from gpt_cli.cli import guide
from support.in_process import refusal, run_here, terminal_here
from support.processes import posix

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.glob("*.md"))
ESCAPES = re.compile(r"\x1b\[[\d;]*m")
COLOURS = re.compile(r"\x1b\[(\d+;)*[3490][0-7](;|m)")


def shown(topic, columns=80, **env):
    """Return a page on a terminal, without a pager."""
    code, output = terminal_here("help", topic, columns=columns, **{"PAGER": "", **env})
    assert code == 0
    return output.replace("\r\n", "\n")


def squeezed(text):
    return "".join(ESCAPES.sub("", text).split())


def test_the_topics_are_the_pages_with_their_titles():
    out, errors = run_here("help")
    assert errors == ""
    topics = [line.split(maxsplit=1) for line in out.decode().splitlines()]
    titles = [page.read_text("utf-8").split("\n")[0] for page in PAGES]
    assert [name for name, _ in topics] == [page.stem for page in PAGES]
    assert ["# " + title for _, title in topics] == [title.replace("`", "") for title in titles]
    assert "`gpt-cli help TOPIC` shows a page" in terminal_here("help", LINES="50")[1]


def test_a_pipe_gets_a_page_as_it_is():
    for page in PAGES:
        assert run_here("help", page.stem) == (page.read_bytes(), "")


@pytest.mark.parametrize(
    "columns", [40, *(pytest.param(columns, marks=pytest.mark.slow) for columns in (80, 200))]
)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_terminal_shows_a_page_without_markup_and_all_of_its_code(page, columns):
    text, prose = ESCAPES.sub("", shown(page.stem, columns)), page.read_text("utf-8")
    text = re.sub("(?m) +$", "", text)  # as some versions of rich do
    for block, code in re.findall(r"(?ms)(^```\w*\n(.*?)^```$)", prose):
        # Whole, so that a command can be copied.
        lines = "\n".join(line.rstrip() for line in code.expandtabs(8).rstrip().split("\n"))
        assert f"\n{lines}\n" in text
        text = text.replace(f"\n{lines}\n", "\n", 1)
        prose = prose.replace(block, "")
    assert max(map(len, text.splitlines())) <= min(columns, 100)
    text = squeezed(text)
    literal = re.findall(r"(?s)`(.*?)`| ([*]+) ", prose)  # code, and asterisks between spaces
    literals = squeezed("~".join(map("".join, literal)))
    for mark in ("**", "|-", "##", "](", "![", "`"):
        assert text.count(mark) == literals.count(mark), mark
    assert text.count("…") == prose.count("…")  # nothing is cut


def test_links_name_topics_and_no_files_and_pictures_are_described():
    assert "an exit code (gpt-cli help reference)" in ESCAPES.sub("", shown("generate", 100))
    page = squeezed(shown("how-gpt2-works"))
    assert squeezed("The whole network is in gpt_cli/gpt2/model.py, which") in page
    assert squeezed("of this page are LaTeX") in page
    assert squeezed("of this page are LaTeX") not in squeezed(shown("generate"))
    assert squeezed("(Picture: Sixteen maps, four layers of four heads") in page
    assert "thelastproduct(" not in page  # a link within the page


def test_colours_are_only_for_a_terminal_that_wants_them():
    assert COLOURS.search(shown("generate"))
    assert not COLOURS.search(shown("generate", NO_COLOR="1"))
    assert "\x1b" not in shown("generate", TERM="dumb")


@posix
def test_a_pager_gets_what_is_longer_than_the_terminal_and_ctrl_c(tmp_path):
    seen = tmp_path / "seen"
    pager = f"""sh -c 'kill -INT $PPID; echo "$LESS" > {seen}; cat >> {seen}'"""
    whole = shown("api")
    for env in ({"LINES": "500"}, {"PAGER": "no-such-pager"}, {"PAGER": "'"}):
        assert shown("api", **{"PAGER": pager, "LESS": "-i", **env}) == whole
    assert not seen.exists()
    assert shown("api", PAGER=pager, LESS="-i", LINES="24") == ""
    assert seen.read_text("utf-8") == "-i -R\n" + whole
    assert b"\x1b" not in run_here("help", "api", PAGER=pager)[0]


def test_the_name_of_a_command_is_the_topic_of_its_page_or_its_help():
    topics = {"Serve.MD": "serve", "next": "rank", "decompress": "compress", "attention": "show"}
    for name, page in topics.items():
        assert run_here("help", name)[0] == (DOCS / f"{page}.md").read_bytes()
    for names in (["info"], ["help"], ["show", "tree"]):
        assert run_here("help", *names) == run_here(*names, "--help")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["genrate"], "there is no topic 'genrate' (did you mean generate?); see `gpt-cli help`"),
        (["stabilty"], "(did you mean stability?)"),
        (["troubleshoot"], "'troubleshoot'; pages about it: troubleshooting; see `gpt-cli help`"),
        (["Exit codes"], "; pages about it: reference;"),
        (["pipelines"], "; pages about it: recipes;"),
        (["python"], "; pages about it: api, serve, compress;"),  # those with most headings
        (["docker"], "; pages about it: install, service;"),  # only in its text
        ([" "], "there is no topic ' '; see `gpt-cli help`"),
        (["inof"], "(did you mean info?)"),
        (["xyz"], "there is no topic 'xyz'; see `gpt-cli help`"),
        (["show", "tre"], "there is no command tre (did you mean tree?)"),
        (["info", "y"], "unexpected argument y; see `gpt-cli help --help`"),
    ],
)
def test_a_misspelt_topic_gets_the_nearest_one(names, message):
    assert message in refusal("help", *names)


def test_an_installation_without_the_pages_says_so(monkeypatch):
    monkeypatch.setattr(guide, "_FOLDERS", ())
    assert "the pages of the guide are missing" in refusal("help", code=5)
