"""Edits of rows, and rows whose activations other rows take."""

import json
from pathlib import Path

import numpy as np
import pytest

from gpt_cli import jobs
from gpt_cli.cli.app import run as run_command
from gpt_cli.jobs import Activations, Generation, Ranking, Scoring
from gpt_cli.jobs.donors import with_donors
from gpt_cli.jobs.layout import InputRow
from gpt_cli.options.request import Options
from support.scores import same

HOOK = "blocks.1.hook_resid_pre"
TEXTS = ["Once upon a time there was a boy.", "Once upon a time there was a girl."]


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


def test_a_row_takes_activations_of_a_row_before_or_after_it(here, tiny):
    rows = [
        {"id": 1, "text": TEXTS[0], "edits": [f"{HOOK}@3:=row:b"]},
        {"id": "b", "text": TEXTS[1], "edits": ["blocks.0.attn.hook_z[1]=0"]},
        {"id": "c", "text": TEXTS[0], "edits": f"{HOOK}@3:=row:b"},
    ]
    scored = records(Scoring(), rows)
    (values,) = tiny.with_edits(rows[1]["edits"]).activations([TEXTS[1]], [HOOK])
    np.save(here / "b.npy", values[HOOK])
    expected = tiny.with_edits([f"{HOOK}@3:=b.npy"]).score(TEXTS[0]).total_logprob
    assert scored[1]["total_logprob"] == scored["c"]["total_logprob"] == expected
    assert expected != tiny.score(TEXTS[0]).total_logprob


def test_donors_may_form_a_long_chain(tiny, monkeypatch):
    task = Scoring()
    monkeypatch.setattr(type(tiny), "recorded", lambda *_: {"hook_embed": np.ones((1, 192))})
    rows = [
        InputRow(n, n, None, n, {"text": "a", "edits": [f"hook_embed=row:{n + 1}"]})
        for n in range(1100)
    ]
    rows.append(InputRow(1100, 1100, None, 1100, {"text": "a"}))
    assert len(with_donors(tiny, rows, task.donor).loaded.donors) == 1100


def test_rows_without_an_id_are_no_donors(here):
    rows = [{"text": "A b"}, {"id": "b", "text": "A b", "edits": ["hook_embed=row:None"]}]
    assert "row None is no row" in records(Scoring(), rows)["b"]["error"]["message"]


def test_rows_that_cannot_give_activations_are_errors_of_the_rows_that_need_them(here):
    rows = [
        {"id": "circle", "text": "A b", "edits": ["hook_embed=row:other"]},
        {"id": "other", "text": "A b", "edits": ["hook_embed=row:circle"]},
        {"id": "alone", "text": "A b", "edits": ["hook_embed=row:nobody"]},
        {"id": "long", "text": "A b c d", "edits": ["hook_embed=row:short"]},
        {"id": "short", "text": "A b"},
        {"id": "wrong", "text": "A b", "edits": [3]},
        {"id": "number", "text": "A b", "edits": 3},
        {"id": "wrongs", "text": "A b", "edits": ["hook_embed=row:wrong"]},
        {"id": "1", "text": "A b"},
        {"id": 1, "text": "A b c"},
        {"id": "two", "text": "A b", "edits": ["hook_embed=row:1"]},
    ]
    scored = records(Scoring(), rows)
    problems = {
        id: record["error"]["message"] for id, record in scored.items() if "error" in record
    }
    assert [*problems] == [
        *("circle", "other", "alone", "long", "wrong", "number", "wrongs", "two"),
    ]
    assert "row other takes from a circle of rows" in problems["circle"]
    assert "row circle takes from a circle of rows" in problems["other"]
    assert "row nobody is no row, or several" in problems["alone"]
    assert "the activations have 2 positions" in problems["long"]
    assert "row wrong has an error: edits" in problems["wrongs"]
    assert "row 1 is no row, or several" in problems["two"]


def test_a_row_that_others_need_may_have_edits_of_tokens_after_its_prompt(here):
    rows = [
        {"id": "a", "prompt": "There was a", "edits": ["hook_embed@2:4*=0.5"]},
        {"id": "b", "prompt": "There was a", "edits": ["hook_embed@2=row:a"]},
        {"id": "c", "prompt": "There was a", "edits": ["hook_embed@2*=0.5"]},
        {"id": "never", "prompt": "There was a", "edits": ["hook_embed@9=0"]},
    ]
    results = records(Generation(Options(max_tokens=3, temperature=0, seed=1)), rows)
    assert [id for id, record in results.items() if "error" in record] == ["never"]
    assert "@9 is not in a text of 3 tokens and 3 new" in results["never"]["error"]["message"]
    assert results["b"]["text"] == results["c"]["text"]


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
        (Generation(Options(max_tokens=5, temperature=0, seed=1)), "prompt"),
        (Scoring(), "text"),
        (Ranking(("boy", "girl")), "prompt"),
    ],
)
def test_each_task_takes_edits_and_other_rows(here, tiny, task, name):
    edits = ["blocks.2.hook_mlp_out=0"]
    rows = [
        {"id": "a", name: "There was a"},
        {"id": "b", name: "There was a", "edits": edits},
        {"id": "c", name: "There was a", "edits": ["blocks.2.hook_mlp_out@0:3=row:z"]},
        {"id": "z", name: "There was a", "edits": ["blocks.2.hook_mlp_out=0"]},
    ]
    results = records(task, rows)
    for record in results.values():
        for field in ("index", "id", "timing", "edits"):
            record.pop(field, None)
    expected = same(tiny.model, results["b"])
    assert results["a"] != results["b"]
    assert results["z"] == expected
    if name == "text" or isinstance(task, Ranking):  # all tokens before the scored ones are patched
        assert results["c"] == expected
    alone = records(task, [{"id": "b", **rows[1]}], "one.jsonl", "one-out.jsonl")["b"]
    for field in ("index", "id", "timing"):
        alone.pop(field, None)
    assert alone == expected


def test_a_resumed_job_finds_the_rows_that_others_need(here):
    rows = [{"id": "z", "text": TEXTS[1]}]
    rows += [{"id": n, "text": TEXTS[0], "edits": [f"{HOOK}@-1=row:z"]} for n in range(5)]
    whole = records(Scoring(), rows)
    output = Path("out.jsonl")
    lines = output.read_text(encoding="utf-8").splitlines(keepends=True)
    output.write_text("".join(lines[:3]), encoding="utf-8")
    jobs.run(Scoring(), "in.jsonl", "out.jsonl", model="tiny", resume=True)
    assert read("out.jsonl") == whole


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
        ("hook_embed=row:1", "row: needs the rows of a batch; name a file"),
    ],
)
def test_commands_refuse_a_wrong_edit_before_any_work(here, command, edit, problem, capfd):
    Path("in.txt").write_text("a\nb\n", encoding="utf-8")
    code = run_command([*command.split(), "-m", "tiny", "--edit", edit])
    captured = capfd.readouterr()
    assert (code, captured.out) == (2, "")
    assert f"--edit {edit!r}: {problem}" in captured.err
    assert not Path("out.jsonl").exists()
