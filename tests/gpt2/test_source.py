"""The file of the transformer that a user reads is the file that runs."""

import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gpt_cli
from gpt_cli.gpt2 import source
from support.models import outcomes

ROOT = Path(__file__).parents[2]
RUN = [sys.executable, "-m", "gpt_cli"]  # imports from the working folder


def test_the_layers_in_c_were_written_beside_this_file():
    changed = (
        f"change native/layers.c as model.py was changed, then the digest in {source.__file__}"
    )
    assert not source.is_modified(), changed


@pytest.fixture
def edited(tmp_path, monkeypatch, caplog):
    """Let model.py be another file, of the same layers."""
    monkeypatch.setattr(source, "MODEL", tmp_path / "model.py")
    source.MODEL.write_text("an edit")
    source.is_modified.cache_clear()
    with caplog.at_level(logging.WARNING):
        yield caplog
    source.is_modified.cache_clear()


def test_an_edit_of_words_changes_no_bit(edited, tiny):
    edited_tiny = gpt_cli.load("tiny")
    options = {"max_tokens": 20, "seed": 1, "use_cache": False}
    texts = [engine.generate(["Once upon"], **options) for engine in (edited_tiny, tiny)]
    assert outcomes(texts[0]) == outcomes(texts[1])
    layers = "its layers run in Python, not in one call of C"
    assert edited.messages in (
        [f"{source.MODEL} was modified: {layers}"],
        [],
    )  # NumPy has no such call


def test_an_edit_of_the_run_state_counts(tmp_path, monkeypatch):
    changed = tmp_path / "run_state.py"
    changed.write_text(source._RUN_STATE.read_text("utf-8") + "\n", "utf-8")
    monkeypatch.setattr(source, "_RUN_STATE", changed)
    assert source.is_modified.__wrapped__()


def test_without_the_source_nobody_edited_it(monkeypatch):
    monkeypatch.setattr(source, "MODEL", Path("/nowhere/model.py"))
    assert source.is_modified.__wrapped__() is False


@pytest.mark.parametrize("ops", ["native", "numpy"])
def test_the_edit_of_the_guide_has_the_result_that_it_shows(ops, tmp_path, library):
    guide = (ROOT / "docs" / "how-gpt2-works.md").read_text("utf-8")
    before, after = guide.split("```diff\n-")[1].split("```")[0].rstrip("\n").split("\n+")
    shown = guide.split("```diff\n-")[1].split("```text\n")[1].split("\n```")[0]
    shutil.copytree(ROOT / "gpt_cli", tmp_path / "gpt_cli")
    shutil.copytree(ROOT / "weights" / "tiny", tmp_path / "weights" / "tiny")
    file = tmp_path / "gpt_cli" / "gpt2" / "model.py"
    text = file.read_text("utf-8")
    assert text.count(before) == 1
    file.write_text(text.replace(before, after), encoding="utf-8")
    command = [*RUN, "generate", "-m", "weights/tiny", "-s", "2", "-n", "30", "Once upon a time"]
    completed = subprocess.run(
        command, cwd=tmp_path, env={"GPT_CLI_OPS": ops}, capture_output=True, check=True, text=True,
        stdin=subprocess.DEVNULL, timeout=60,
    )  # fmt: skip
    assert completed.stdout == shown
    assert (f"{file} was modified" in completed.stderr) == (ops == "native")
