"""README.md and the pages of docs/ are true: lines print what is shown, links lead somewhere.

The lines after `$ ` in the blocks of ```console of a page are run in their order by one bash, on a
terminal of 80 columns, in a new folder. So a page may make a file in one line and use it in the
next. `export NAME=VALUE` counts between backquotes in the text, too, and a file that `cat` shows
before anything has made it is made from what is shown.
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
from processes import on_terminal, path_with_command

from gpt_cli.machine import native_library

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
LINKING = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *ROOT.glob("benchmarks/*.md")]

# Lines that are not run, and why.
LEFT_OUT = {
    r"^make ": "takes minutes",
    r"^python3 -m venv |^pip install ": "asks the Python index",
    r"^gpt-cli generate (-m gpt2 .*)?\"Alan Turing": "needs the weights of gpt2",
    r"^gpt-cli (download|info|quantize) gpt2": "asks the Hub for gpt2",
    r"^gpt-cli generate -m \./gpt2-int8 ": "needs the weights of gpt2",
    r"--device cuda": "needs a GPU",
}
if find_spec("ray") is None:
    LEFT_OUT[r"--engine ray|^ray |\bcluster\b"] = "needs Ray; `make test-ray` runs them"
# What is run instead in lines that would take 30 s.
SHORTER = {" -p 32 -n 400": " -p 32 -n 100", " -n 450 --ignore-eos": " -n 100 --ignore-eos"}
# The numbers of these are measurements, and so are their charts: only the words are compared.
MEASURES = re.compile(r"gpt-cli (bench|verify)\b| --stats\b")
# What differs from run to run or from machine to machine, and what stands for it.
VARIES = {
    r"\x1b\[[\d;?]*[A-Za-z]|^[^\n]*\r(?!\n)": "",  # colours, and progress that was written over
    r'"timing": \{.*?\}': '"timing": {}',
    r"\d[\d.,]*(?= ?(s|ms|kB|MB|GB|tokens/s|(tokens )?a second)\b)": "N",
    r"(?<![\w.~)])(/[\w.+-]+){2,}/?": "PATH",
    # These say more where gpt-cli has its compiled library, or there is a GPU.
    r"^(ok|not checked) +bits in int8\b.*\n( {4}.*\n)*": "",
    r"^(ok|not checked) +(cache on = off|batch = single|bits|native = numpy|"
    r"c\w+ in \w+ = float32)\b.*(\n {4}.*)*": r"\2",
    r"computed by (native|numpy) with \d+ threads?": "computed",
}

# After each line: the exit codes of its parts between two bytes that nothing prints, and then `$?`
# is again what the line has left.
TELL_CODES = r"""status=$? codes=${PIPESTATUS[*]}; printf '\036%s\036' "$codes"; (exit $status)"""

needs_bash = pytest.mark.skipif(
    os.name != "posix" or shutil.which("bash") is None, reason="needs bash on a terminal"
)


@dataclass
class Step:
    """A line that a page shows, with what it prints; None where nothing is said of that."""

    line: str
    shown: str | None

    def is_run(self) -> bool:
        return not any(re.search(pattern, self.line) for pattern in LEFT_OUT)

    def script(self) -> str:
        """What bash runs for it."""
        line = self.line
        for long, short in SHORTER.items():
            line = line.replace(long, short)
        cat = re.fullmatch(r"cat ([\w.-]+)", line)
        if cat and self.shown:
            line = f"[ -e {cat[1]} ] || printf %s {shlex.quote(self.shown)} > {cat[1]}\n{line}"
        return f"{line}\n{TELL_CODES}\n"

    def problem(self, codes: str, printed: str) -> str:
        """What is wrong with what it did; else nothing."""
        fails = self.shown is not None and "gpt-cli: error: " in self.shown
        # 141: the reader of a pipe, such as `head`, had enough.
        if fails != bool(set(codes.split()) - {"0", "141"}):
            return f"$ {self.line}\nexit codes: {codes}\n{printed}"
        if self.shown is None:
            return ""
        words, shown_words = self.compared(printed), self.compared(self.shown)
        if len(words) == len(shown_words) and all(map(alike, words, shown_words)):
            return ""
        return f"$ {self.line}\nis shown as\n{self.shown}\nand prints\n{printed}"

    def compared(self, output: str) -> list[str]:
        """The words of an output that are the same in each run, however lines are wrapped."""
        for pattern, instead in VARIES.items():
            output = re.sub(pattern, instead, output, flags=re.MULTILINE)
        if MEASURES.search(self.line):
            return [word for word in re.findall(r"[a-z]{2,}", output) if set(word) != {"o"}]
        return output.split()


def alike(word: str, other: str) -> bool:
    """Return whether words are equal; where NumPy computes, the last digits may differ."""
    if native_library():
        return word == other
    number = r"\d+(?:\.\d+)?"  # of which 5.0 may be written as 5
    if re.sub(number, "", word) != re.sub(number, "", other):
        return False
    pairs = zip(re.findall(number, word), re.findall(number, other), strict=True)
    return all(
        a == b or ("." in a + b and math.isclose(float(a), float(b), rel_tol=1e-3))
        for a, b in pairs
    )


def steps_of(page: Path) -> list[Step]:
    """The lines that a page shows, in their order."""
    steps = []
    text = page.read_text(encoding="utf-8")
    console_or_export = r"^```console\n(.*?)^```$|(?<!`)`(export \w+=[^`\n]+)`"
    for block, export in re.findall(console_or_export, text, re.MULTILINE | re.DOTALL):
        if export:
            steps.append(Step(export, ""))
            continue
        lines = re.findall(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)
        is_list = not any(shown for _, shown in lines)  # of lines to try, without what they print
        steps += [Step(line, None if is_list else shown) for line, shown in lines]
    return steps


@needs_bash
@pytest.mark.parametrize("page", [page for page in PAGES if steps_of(page)], ids=lambda p: p.name)
def test_every_line_prints_what_is_shown(page, tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    steps = [step for step in steps_of(page) if step.is_run()]
    missing = {"jq ": shutil.which("jq") is None, "--png ": find_spec("matplotlib") is None}
    missing[".parquet"] = find_spec("pyarrow") is None
    for what in (what for what in missing if missing[what]):
        if any(what in step.line for step in steps):
            pytest.skip(f"needs what {what} needs")
    script = tmp_path / "script"
    script.write_text("".join(step.script() for step in steps), encoding="utf-8")
    monkeypatch.delenv("GPT_CLI_MODEL", raising=False)
    env = {
        "PATH": f"{path_with_command(tmp_path / 'bin')}:{Path(sys.executable).parent}",
        "HF_HOME": str(tmp_path / "empty"),
        "HF_HUB_OFFLINE": "1",
    }
    _, printed = on_terminal(["bash", str(script)], columns=80, env=env, folder=folder)
    *pieces, rest = printed.replace("\r\n", "\n").split("\x1e")
    assert (len(pieces), rest) == (2 * len(steps), "")
    problems = list(filter(None, map(Step.problem, steps, pieces[1::2], pieces[0::2])))
    assert not problems, "\n\n".join(problems)


def test_no_reason_to_leave_a_line_out_has_outlived_it():
    lines = [step.line for page in PAGES for step in steps_of(page)]
    for pattern in [*LEFT_OUT, *map(re.escape, SHORTER)]:
        assert any(re.search(pattern, line) for line in lines), f"no line has {pattern}"


def python_of(page: Path) -> str:
    """The Python of a page, less what it quotes of the model, which must be there word for word."""
    blocks = re.findall(
        r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    model = (ROOT / "gpt_cli" / "model.py").read_text("utf-8")
    return "\n".join(block for block in blocks if block not in model)


@pytest.mark.parametrize("page", [page for page in PAGES if python_of(page)], ids=lambda p: p.name)
def test_the_python_of_a_page_runs(page, tmp_path):
    finished = subprocess.run(
        [sys.executable, "-P", "-c", python_of(page)], cwd=tmp_path, capture_output=True
    )
    assert (finished.returncode, finished.stderr.decode()) == (0, "")


def prose_of(page: Path) -> str:
    """A page without its code."""
    return re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors_of(page: Path) -> set[str]:
    """What GitHub calls the headings of a page; of two that are the same, the second has -1."""
    anchors: set[str] = set()
    seen: Counter[str] = Counter()
    for heading in re.findall(r"^#+ +(.+)$", prose_of(page), re.MULTILINE):
        text = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading)
        anchor = re.sub(r"[^\w -]", "", text).lower().replace(" ", "-")
        same = seen[anchor]
        seen[anchor] += 1
        anchors.add(f"{anchor}-{same}" if same else anchor)
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
