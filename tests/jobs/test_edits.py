"""Edits of rows."""

import json
from pathlib import Path

import numpy as np
import pytest

from gpt_cli import jobs
from gpt_cli.cli.app import run as run_command
from gpt_cli.jobs import Activations, Generation, Ranking, Scoring
from gpt_cli.options.request import Options
from support.scores import same


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def records(task, rows, name="in.jsonl", output="out.jsonl"):
    """Return the records of rows, by their ids."""
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    jobs.run(task, name, output, model="tiny")
    return read(output)


def read(output):
    lines = Path(output).read_text(encoding="utf-8").splitlines()
    return {record.get("id"): record for record in map(json.loads, lines)}


@pytest.mark.parametrize(
    ("task", "name", "output"),
    [
        (Generation(Options(max_tokens=2, temperature=0, seed=1)), "prompt", "out.jsonl"),
        (Scoring(), "text", "out.jsonl"),
        (Ranking(("boy", "girl")), "prompt", "out.jsonl"),
        (Activations(("hook_embed",), pool="mean"), "text", "out.parquet"),
    ],
)
def test_an_edit_that_makes_values_overflow_is_an_error_of_its_row(here, task, name, output):
    rows = [{"id": n, name: "There was a"} for n in range(5)]
    rows[3]["edits"] = ["hook_embed=3e38"]
    source = "".join(json.dumps(row) + "\n" for row in rows)
    Path("in.jsonl").write_text(source, encoding="utf-8")
    assert jobs.run(task, "in.jsonl", output, model="tiny").failed == 1
    if output == "out.jsonl":
        errors = [record.get("error", {}).get("message", "") for record in read(output).values()]
        assert [*map(bool, errors)] == [False, False, False, True, False]
        assert "edits make values overflow" in errors[3]


@pytest.mark.parametrize(
    ("task", "name"),
    [
        (Generation(Options(max_tokens=5, temperature=0, seed=1), keep_fields="id"), "prompt"),
        (Scoring(keep_fields="id"), "text"),
        (Ranking(("boy", "girl"), keep_fields="id"), "prompt"),
    ],
)
def test_each_task_takes_edits(here, tiny, task, name):
    edits = ["blocks.2.hook_mlp_out=0"]
    rows = [
        {"id": "a", name: "There was a"},
        {"id": "b", name: "There was a", "edits": edits},
        {"id": "z", name: "There was a", "edits": ["blocks.2.hook_mlp_out=0"]},
    ]
    results = records(task, rows)
    for record in results.values():
        for field in ("index", "id", "timing", "edits"):
            record.pop(field, None)
    expected = same(tiny.model, results["b"])
    assert results["a"] != results["b"]
    assert results["z"] == expected
    alone = records(task, [{"id": "b", **rows[1]}], "one.jsonl", "one-out.jsonl")["b"]
    for field in ("index", "id", "timing"):
        alone.pop(field, None)
    assert alone == expected


def test_activations_have_the_edits_of_their_rows(here, tiny):
    rows = ({"text": "There was a", "edits": edits} for edits in ([], ["hook_embed@1=0"]))
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    jobs.run(Activations(("hook_embed",)), "in.jsonl", "out.npz", model="tiny")
    values = np.load("out.npz")["hook_embed"].reshape(2, -1, 192)
    assert not values[1, 1].any() and np.array_equal(values[0, ::2], values[1, ::2])


@pytest.mark.parametrize(
    "command",
    [
        "generate -n 3 There",
        "next There",
        "score --lines",
        "rank --choices a,b There",
        "batch -o out.jsonl in.txt",
        "show tree a",
    ],
)
@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        ("blocks.0.hook_attn_ot=0", "'blocks.0.hook_attn_ot' is not a hook point"),
        ("hook_embed=gone.npy", "gone.npy"),
    ],
)
def test_commands_refuse_a_wrong_edit_before_any_work(here, command, edit, problem, capfd):
    Path("in.txt").write_text("a\nb\n", encoding="utf-8")
    code = run_command([*command.split(), "-m", "tiny", "--edit", edit])
    captured = capfd.readouterr()
    assert (code, captured.out) == (2, "")
    assert f"--edit {edit!r}: {problem}" in captured.err
    assert not Path("out.jsonl").exists()
