"""`tools/site_hooks.py`: what the site has beside docs/, and the links between its pages."""

import importlib
import inspect
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def hooks(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import site_hooks

    return site_hooks


def test_the_navigation_has_every_page_of_the_guide():
    _, navigation = (ROOT / "mkdocs.yml").read_text("utf-8").split("\nnav:\n")
    pages = {path.name for path in ROOT.glob("docs/*.md")}
    assert pages <= set(re.findall(r": (\S+\.md)$", navigation, re.MULTILINE))


def test_pages_outside_of_the_guide_are_known(hooks):
    known = (ROOT / "mkdocs.yml").read_text("utf-8").partition("not_in_nav: |")[2]
    folders = re.findall(r"^  /(\S+)", known, re.MULTILINE)
    pages = map(hooks.site_path, hooks.published())
    outside = {
        page for page in pages if page.endswith(".md") and not (ROOT / "docs" / page).exists()
    }
    outside -= {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"}  # in the navigation
    assert all(page.startswith(tuple(folders)) for page in outside)


def test_what_pages_link_to_is_published(hooks):
    paths = hooks.published()
    assert all((ROOT / path).is_file() for path in paths)
    assert {"README.md", "CHANGELOG.md", "docs/install.md", "docs/pictures/heads.png"} <= paths
    assert {"gpt_cli/gpt2/model.py", "benchmarks/results/README.md", "SECURITY.md"} <= paths
    assert not {path for path in paths if path.startswith(("tools/", "build/"))}


@pytest.mark.parametrize(
    ("page", "link", "on_the_site"),
    [
        ("README.md", "docs/install.md", "install.md"),
        ("README.md", "docs/pictures/terminal.svg", "pictures/terminal.svg"),
        ("README.md", "docs/exactness.md#what-is-promised", "exactness.md#what-is-promised"),
        ("README.md", "gpt_cli/gpt2/model.py", "gpt_cli/gpt2/model.py.md"),
        ("docs/show.md", "edits.md", "edits.md"),
        ("docs/how-gpt2-works.md", "../gpt_cli/gpt2/model.py", "gpt_cli/gpt2/model.py.md"),
        ("docs/speed.md", "../benchmarks/README.md#rows", "benchmarks/README.md#rows"),
        ("benchmarks/README.md", "results/README.md", "results/README.md"),
    ],
)
def test_links_lead_to_pages_of_the_site(page, link, on_the_site, hooks):
    changed = hooks.with_links_of_the_site(f"A [page]({link}).", page)
    assert changed == f"A [page]({on_the_site})."


def test_a_link_to_another_host_or_to_no_file_stays(hooks):
    text = "[a](https://example.org/docs/install.md), [b](#install), [c](docs/nothing.md)"
    assert hooks.with_links_of_the_site(text, "README.md") == text


def test_code_in_a_table_may_have_pipes(hooks):
    page = "| `cat a \\| wc <b` | `c` |\n\n`x \\| y`"
    assert hooks.with_pipes(page) == "| <code>cat a &#124; wc &lt;b</code> | `c` |\n\n`x \\| y`"


def test_code_becomes_a_page(hooks):
    path = "gpt_cli/gpt2/model.py"
    code = (ROOT / path).read_text("utf-8")
    assert hooks.code_page(path).endswith(f"\n# {path}\n\n~~~~py\n{code}~~~~\n")


def test_one_line_of_the_guide_writes_the_live_page(hooks):
    ((line, name),) = hooks.LIVE.findall((ROOT / hooks.LIVE_GUIDE).read_text("utf-8"))
    assert line.startswith(f"gpt-cli show attention --html {name} ")


@pytest.mark.parametrize(
    ("tag", "loads"),
    [
        ('<script src="https://example.org/a.js">', True),
        ('<link rel="stylesheet" href="//example.org/a.css">', True),
        ("<img alt=x src=http://example.org/a.png>", True),
        ('<iframe title="a" src="https://example.org/">', True),
        ('<a href="https://example.org/">', False),
        ('<link rel="canonical" href="https://example.org/">', False),
        ('<script src="assets/a.js"></script> // https://example.org', False),
    ],
)
def test_what_loads_from_another_host(tag, loads, hooks):
    assert bool(hooks.LOADS.search(f"<p>{tag}</p>")) == loads


@pytest.mark.parametrize(
    ("html", "escaped"),
    [
        ("<td><code>cat a \\| wc</code></td>", True),
        ("<td>a pipe, as in <code>cat a | wc</code></td>", False),
        ("<td><code>ls</code> \\| </td>", False),
        ("<pre><code>grep 'a\\|b'</code></pre>", False),
    ],
)
def test_what_shows_how_a_pipe_is_escaped(html, escaped, hooks):
    assert bool(hooks.ESCAPED.search(html)) == escaped


def test_the_link_to_the_repository_loads_nothing_from_its_host(hooks):
    link = '<a href="https://example.org/" class="md-source"'
    output = hooks.on_post_page(f'{link} data-md-component="source">', None, None)
    assert output == f"{link}>"


def test_what_is_kept_of_the_python_api_can_be_shown():
    """`tools/site_api.py` shows members that have a docstring, and needs the others to exist."""
    for package in ("pyarrow", "uvicorn"):
        pytest.importorskip(package, reason="gpt_cli.ray or gpt_cli.serve needs it")
    listing = json.loads((ROOT / "tests/kept/listing.json").read_bytes())
    for module, names in listing["Python"].items():
        for name, kept in names.items():
            shown = getattr(importlib.import_module(module), name)
            assert inspect.getdoc(shown)
            for member, described in kept.get("members", {}).items():
                assert "parameters" not in described or inspect.getdoc(getattr(shown, member))
