"""Hooks of mkdocs for the site: `make site` calls the functions that begin with `on_`.

README.md is the home page. Other Markdown, pictures and code that pages link to are on the site,
too; code becomes a page. The API reference comes from docstrings, and formulas become MathML. The
web page that a line of docs/show.md writes stands below that line.
"""

import os
import posixpath
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[1]
ENTRIES = ["README.md", "CHANGELOG.md"]  # with docs/, where links to other files begin
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[)#])")  # to a file of the repository
PIPED = re.compile(r"`([^`]*\\\|[^`]*)`")  # code in a table
LIVE_GUIDE = "docs/show.md"
LIVE = re.compile(r"^\$ (gpt-cli show .*--html (\S+) .*)\n(?:.*\n)*?```$", re.MULTILINE)
LOADS = re.compile(  # from another host
    r'<(?:img|script|iframe|link(?! rel="canonical"))\b[^>]* (?:src|href)="?(?:https?:)?//.*?>'
)
ESCAPED = re.compile(r"<td.*<code>[^<]*\\\|")  # pipes in a table
API = """# API reference

What [every version 1.x keeps](stability.md) of [`gpt_cli`](#gpt_cli),
[`gpt_cli.jobs`](#gpt_cli.jobs), [`gpt_cli.serve`](#gpt_cli.serve) and
[`gpt_cli.ray`](#gpt_cli.ray). [Use it from Python](api.md) shows examples.

::: gpt_cli
::: gpt_cli.jobs
::: gpt_cli.serve
::: gpt_cli.ray
"""


def linked_files(markdown: str, path: str) -> Iterator[tuple[str, str]]:
    """Yield the links of a page to files, and the paths of these files in the repository."""
    for link in LINK.findall(markdown):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
        if (ROOT / target).is_file():
            yield link, target


def published() -> set[str]:
    """Return the files on the site: docs/, and what can be reached from it by links."""
    todo = [*ENTRIES, *(page.relative_to(ROOT).as_posix() for page in ROOT.glob("docs/**/*.md"))]
    paths = set()
    while todo:
        path = todo.pop()
        if path not in paths and path.endswith(".md"):
            todo += [target for _, target in linked_files((ROOT / path).read_text("utf-8"), path)]
        paths.add(path)
    return paths


def site_path(path: str) -> str:
    """Return the path of a file on the site, where docs/ is the root and code has pages."""
    path = path.removeprefix("docs/")
    return path if path.endswith((".md", ".png", ".svg")) else f"{path}.md"


def with_links_of_the_site(markdown: str, path: str) -> str:
    """Return a page of the repository with links to the paths of the files on the site."""
    folder = posixpath.dirname(site_path(path)) or "."
    links = {
        link: posixpath.relpath(site_path(target), folder)
        for link, target in linked_files(markdown, path)
    }
    return LINK.sub(lambda match: links.get(match[1], match[1]), markdown)


def with_pipes(markdown: str) -> str:
    """Return a page with code with pipes in tables as HTML; Markdown would keep backslashes."""

    def code(match: re.Match[str]) -> str:
        return f"<code>{escape(match[1], quote=False)}</code>".replace("\\|", "&#124;")

    lines = markdown.split("\n")
    return "\n".join(PIPED.sub(code, line) if line.startswith("|") else line for line in lines)


def code_page(path: str) -> str:
    """Return a page that shows a file of code."""
    language = {"": "text", ".cff": "yaml"}.get(Path(path).suffix, Path(path).suffix[1:])
    code = (ROOT / path).read_text("utf-8")
    settings = "---\nhide: [toc]\nsearch: {exclude: true}\n---\n"
    return f"{settings}# {path}\n\n~~~~{language}\n{code}~~~~\n"


def formula(latex: str, *_: Any, **__: Any) -> str:
    """Return the MathML of a block of math; browsers draw it without a script."""
    from latex2mathml.converter import convert

    return f'<div class="math">{convert(latex, display="block")}</div>'


def live_page(line: str, name: str) -> str:
    """Return the web page that a line of the guide writes."""
    env = os.environ | {"GPT_CLI_MODEL": "tiny", "GPT_CLI_OPS": "numpy"}
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "gpt_cli", *shlex.split(line)[1:]]
        subprocess.run(command, cwd=folder, env=env, check=True, stderr=subprocess.DEVNULL)
        return Path(folder, name).read_text("utf-8")


def on_config(config: Any) -> None:
    """Draw blocks of math as formulas, and show the version below each page."""
    from gpt_cli import __version__

    math = {"name": "math", "class": "math", "format": formula}
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [math]}
    config.copyright = f"gpt-cli {__version__}"


def on_files(files: Any, config: Any) -> None:
    """Add the pages and pictures that are not in docs/."""
    from mkdocs.structure.files import File

    for path in sorted(published()):
        if site_path(path) == f"{path}.md":
            files.append(File.generated(config, site_path(path), content=code_page(path)))
        elif not path.startswith("docs/"):
            files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, "api-reference.md", content=API))
    for line, name in LIVE.findall((ROOT / LIVE_GUIDE).read_text("utf-8")):
        files.append(File.generated(config, name, content=live_page(line, name)))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return a page with the links of the site, and with live pages below their lines."""
    uri = page.file.src_uri
    paths = [path for path in (f"docs/{uri}", uri) if (ROOT / path).is_file()]
    if not paths:  # the page was generated
        return markdown

    def with_frame(block: re.Match[str]) -> str:
        source = files.get_file_from_path(block[2]).url_relative_to(page.file)
        frame = f'<iframe class="live" src="{source}" title="The page {block[2]}"></iframe>'
        return f"{block[0]}\n\n{frame}"

    if paths[0] == LIVE_GUIDE:
        markdown = LIVE.sub(with_frame, markdown)
    return with_links_of_the_site(with_pipes(markdown), paths[0])


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Return a page where the dialog of the search has a name, and no host is asked for stars."""
    output = output.replace(' data-md-component="source"', "")
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"', 1)


def on_post_build(config: Any) -> None:
    """Raise an error if a page loads anything from another host, or shows an escaped pipe."""
    from mkdocs.exceptions import PluginError

    for page in Path(config.site_dir).rglob("*.html"):
        html = page.read_text("utf-8")
        if wrong := LOADS.search(html) or ESCAPED.search(html):
            raise PluginError(f"{page} must not have {wrong[0]}")
