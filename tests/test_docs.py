"""README.md and the pages of docs/ are true: commands print what is shown, and links resolve.

One bash runs the lines after `$ ` in the ```console blocks of a page, in order, on a terminal of 80
columns, in a new folder. So a page can create a file in one line and use it in the next. If `cat`
shows a file that no line has created, the file is created from what is shown.
"""

import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from gpt_cli.options.request import Options, SamplingParams
from gpt_cli.system.library import native_library
from support.processes import COMMAND, on_terminal, path_with_command

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
LINKING = [*PAGES, *ROOT.glob("[CS]*.md"), ROOT / "weights/README.md"]
LINKING += ROOT.glob("benchmarks/**/*.md")

# Lines that are not run, with the reason.
SKIPPED = {
    r"^(docker|make|pip|python3 -m venv) ": "takes minutes, or asks the Python index",
    r"\bgpt2\b|\"Alan Turing": "needs the weights of gpt2",
    r"--device cuda": "needs a GPU",
    r"goldfish-models/": "needs the Hub",
}
if find_spec("lm_eval") is None:
    SKIPPED[r"^python (-m gpt_cli\.lm_eval|evaluate\.py)"] = "needs lm-eval: `make test-eval`"
if find_spec("openai") is None:
    SKIPPED[r"^python ask\.py"] = "needs openai: `make test-serve`"
if find_spec("sklearn") is None:
    SKIPPED[r"^python probe\.py"] = "needs scikit-learn"
if find_spec("llm") is None:
    SKIPPED["llm -m tiny-local"] = "needs llm: `make test-serve`"
# Pages that have such a line are run only if this is installed.
NEEDS = {
    "jq ": shutil.which("jq"),
    "curl ": shutil.which("curl"),
    "gpt-cli serve": find_spec("uvicorn"),
    "gpt-cli compress": native_library(),
    "@int8 ": native_library(),
    "--png ": find_spec("matplotlib"),
    ".parquet": find_spec("pyarrow"),
    "--engine ray": find_spec("ray"),  # `make test-ray`
    "serve run ": find_spec("ray") and find_spec("fastapi"),
    "--regex ": find_spec("llguidance"),
}
# Replacements in lines that would take 30 s.
SHORTER = {" -p 32 -n 400": " -p 32 -n 50", " -n 450 --ignore-eos": " -n 100 --ignore-eos"}
# The numbers and charts of these commands are measurements: only words are compared.
MEASURES = re.compile(r"gpt-cli (bench|verify)\b| --stats\b")
# Output that varies between runs or machines, with its replacement.
VARIES = {
    r"\x1b\[[\d;?]*[A-Za-z]|^[^\n]*\r(?!\n)": "",  # colours and overwritten progress
    r'"timing": \{.*?\}': '"timing": {}',
    r"\d[\d.,]*(?= ?(s|ms|kB|MB|GB|tokens/s|(tokens )?a second)\b)": "N",
    r"(?<![\w.~)])(/[\w.+-]+){2,}/?": "PATH",
    # These print more if the compiled library or a GPU is available.
    r"^(ok|not checked) +bits in int8\b.*\n( {4}.*\n)*": "",
    r"^(ok|not checked) +(cache on = off|batch = single|bits|native = numpy|hooks|"
    r"compress, decompress|c\w+ in \w+ = float32)\b.*(\n {4}.*)*": r"\2",
    r"computed by (native|numpy) with \d+ threads?": "computed",
}
# Run after each line: print its exit codes between two bytes that nothing else prints.
PRINT_CODES = r"""printf '\036%s\036' "${PIPESTATUS[*]}" """


@dataclass
class Step:
    """A line of a page, with the output that the page shows; None if it shows no output."""

    line: str
    shown: str | None

    def is_run(self) -> bool:
        return not any(re.search(pattern, self.line) for pattern in SKIPPED)

    def script(self) -> str:
        """Return the line as bash runs it."""
        line = self.line
        for long, short in SHORTER.items():
            line = line.replace(long, short)
        cat = re.fullmatch(r"cat ([\w.-]+)", line)
        if cat and self.shown:
            line = f"[ -e {cat[1]} ] || printf %s {shlex.quote(self.shown)} > {cat[1]}\n{line}"
        return f"{line}\n{PRINT_CODES}\n"

    def problem(self, codes: str, printed: str) -> str:
        """Return the difference from what the page shows, or an empty string."""
        fails = self.shown is not None and "gpt-cli: error: " in self.shown
        # 141: the reader of a pipe ended first, as `head` does.
        if fails != bool(set(codes.split()) - {"0", "141"}):
            return f"$ {self.line}\nexit codes: {codes}\n{printed}"
        if self.shown is None:
            return ""
        words, shown_words = self.compared(printed), self.compared(self.shown)
        if len(words) == len(shown_words) and all(map(alike, words, shown_words)):
            return ""
        return f"$ {self.line}\nis shown as\n{self.shown}\nand prints\n{printed}"

    def compared(self, output: str) -> list[str]:
        """Return the words of an output that are the same in every run, however it is wrapped."""
        for pattern, replacement in VARIES.items():
            output = re.sub(pattern, replacement, output, flags=re.MULTILINE)
        if MEASURES.search(self.line):
            return [word for word in re.findall(r"[a-z]{2,}", output) if set(word) != {"o"}]
        return output.split()


def alike(word: str, other: str) -> bool:
    """Return whether words are equal; if NumPy computes, the last digits may differ."""
    if native_library():
        return word == other
    number = r"\d+(?:\.\d+)?"  # 5.0 may be printed as 5
    if re.sub(number, "", word) != re.sub(number, "", other):
        return False
    pairs = zip(re.findall(number, word), re.findall(number, other), strict=True)
    return all(
        a == b or ("." in a + b and math.isclose(float(a), float(b), rel_tol=1e-3))
        for a, b in pairs
    )


def blocks_of(page: Path, language: str) -> list[str]:
    """Return the code blocks of a page in this language."""
    pattern = rf"^```{language}\n(.*?)^```$"
    return re.findall(pattern, page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def steps_of(page: Path) -> list[Step]:
    """Return the lines of a page, in order."""
    steps = []
    for block in blocks_of(page, "console"):
        lines = re.findall(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
        shows_output = any(shown for _, shown in lines)
        steps += [Step(line, shown if shows_output else None) for line, shown in lines]
    return steps


def python_of(page: Path) -> str:
    """Return the Python of a page, without blocks quoted word for word from the model."""
    model = (ROOT / "gpt_cli" / "gpt2" / "model.py").read_text("utf-8")
    return "\n".join(block for block in blocks_of(page, "python") if block not in model)


@pytest.mark.skipif(os.name != "posix" or not shutil.which("bash"), reason="needs bash")
@pytest.mark.parametrize("page", [page for page in PAGES if steps_of(page)], ids=lambda p: p.name)
def test_every_line_prints_what_is_shown(page, tmp_path, monkeypatch, prepared_command):
    folder = tmp_path / "folder"
    folder.mkdir()
    steps = [step for step in steps_of(page) if step.is_run()]
    for part, available in NEEDS.items():
        if not available and any(part in step.line for step in steps):
            pytest.skip(f"needs what {part} needs")
    script = tmp_path / "script"
    script.write_text("".join(step.script() for step in steps), encoding="utf-8")
    monkeypatch.delenv("GPT_CLI_MODEL", raising=False)
    command = COMMAND if page.name == "README.md" else prepared_command
    env = {
        "PATH": f"{path_with_command(tmp_path / 'bin', command)}:{Path(sys.executable).parent}",
        "HF_HOME": str(tmp_path / "empty"),
        "HF_HUB_OFFLINE": "1",
    }
    _, printed = on_terminal(["bash", str(script)], columns=80, env=env, folder=folder)
    # Without words that were erased because they became too long for the line.
    printed = re.sub(r" *\S+\x08+ +\x08+(?=\r\n)", "", printed)
    *pieces, rest = printed.replace("\r\n", "\n").split("\x1e")
    assert (len(pieces), rest) == (2 * len(steps), "")
    problems = list(filter(None, map(Step.problem, steps, pieces[1::2], pieces[0::2])))
    assert not problems, "\n\n".join(problems)


def test_every_pattern_matches_a_line():
    lines = [step.line for page in PAGES for step in steps_of(page)]
    for pattern in [*SKIPPED, *map(re.escape, [*SHORTER, *NEEDS])]:
        assert any(re.search(pattern, line) for line in lines), f"no line has {pattern}"


# tests/test_notebook.py runs that of docs/notebook.md.
WITH_PYTHON = [page for page in PAGES if python_of(page) and page.name != "notebook.md"]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda p: p.name)
def test_the_python_of_a_page_runs(page, tmp_path):
    if "json_schema=" in python_of(page):
        pytest.importorskip("llguidance")
    if "engine.compress" in python_of(page) and not native_library():
        pytest.skip("needs the compiled library")
    code = python_of(page)
    env = os.environ | {"PATH": path_with_command(tmp_path / "bin")}
    if find_spec("pandas") is None:
        env["PYTHONPATH"] = str(ROOT / "tests")
        code = code.replace("import pandas as", "from support import data_frames as")
    command = [sys.executable, "-P", "-c", code]
    finished = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True)
    assert (finished.returncode, finished.stderr.decode()) == (0, "")


def prose_of(page: Path) -> str:
    """Return a page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors_of(page: Path) -> set[str]:
    """Return GitHub's anchors of the headings; the second of two equal headings gets -1."""
    anchors: set[str] = set()
    seen: Counter[str] = Counter()
    for heading in re.findall(r"^#+ +(.+)$", prose_of(page), re.MULTILINE):
        text = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading)
        anchor = re.sub(r"[^\w -]", "", text).lower().replace(" ", "-")
        anchors.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return anchors


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_exist(page):
    for link in re.findall(r"\]\(([^)\s]+)\)|\b(?:src|srcset|href)=\"([^\"]+)\"", prose_of(page)):
        target, _, anchor = "".join(link).partition("#")
        if re.match(r"\w+:", target):
            continue
        file = (page.parent / target) if target else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors_of(file), f"{page.name} links to {target}#{anchor}"


def test_each_option_is_in_the_guide():
    pages = {name: (ROOT / f"docs/{name}.md").read_text("utf-8") for name in ("batch", "generate")}
    sampling = SamplingParams.row_fields()
    for option in Options.declarations():
        if option.row:
            if option.name not in sampling:  # which the page links to
                assert f"`{option.name}`" in pages["batch"]
            flag = {"edits": "--edit"}.get(option.name, f"--{option.name.replace('_', '-')}")
            assert flag in pages["generate"]


def test_faults_that_security_names_are_in_the_tables():
    security = (ROOT / "SECURITY.md").read_text("utf-8")
    cited = re.findall(r'"([^"]+)"', " ".join(re.findall(r"\|([^|]*)\|$", security, re.MULTILINE)))
    tables = (ROOT / "tests/faults/RESULTS.md").read_text("utf-8")
    names = set(re.findall(r"^\| (.*?) \|", tables, re.MULTILINE))
    assert cited
    assert set(cited) <= names


def test_actions_are_pinned_and_run_targets_of_the_makefile():
    workflows = "\n".join(path.read_text("utf-8") for path in ROOT.glob(".github/workflows/*.yml"))
    used = re.findall(r"uses: (.*)", workflows)
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v[\d.]+", action) for action in used)
    run = set(re.findall(r"make ([a-z][a-z0-9-]*)", workflows))
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert {"test", "check", "faults", "fuzz", "sanitize"} <= run <= set(targets)
