"""The flags of constraints as a user meets them: files, texts and errors."""

import json

import pytest

from support.in_process import refusal, run_here

pytest.importorskip("llguidance", reason="the extra constrain is not installed")

GENERATE = ["generate", "--model", "tiny", "--seed", "1", "Say:\n"]
SCHEMA = '{"type": "integer", "minimum": 3, "maximum": 5}'
GRAMMAR = 'start: "yes" | "no"'


@pytest.mark.parametrize("content", [SCHEMA, f"{SCHEMA}\n", f"\ufeff{SCHEMA}\r\n"])
def test_a_schema_is_a_file_or_a_text(tmp_path, content):
    (tmp_path / "schema.json").write_text(content, newline="")
    for schema in (SCHEMA, f" {SCHEMA}", tmp_path / "schema.json"):
        assert run_here(*GENERATE, "--json-schema", schema)[0] in (b"3", b"4", b"5")


def test_a_grammar_is_a_file(tmp_path):
    (tmp_path / "talk.lark").write_text(GRAMMAR)
    assert run_here(*GENERATE, "--grammar", tmp_path / "talk.lark")[0] in (b"yes", b"no")
    assert "cannot read start: " in refusal(*GENERATE, "--grammar", GRAMMAR)


@pytest.mark.parametrize("flag", ["--json-schema", "--grammar"])
def test_a_file_needs_a_name(flag):
    assert f"error: {flag} is empty: name a file" in refusal(*GENERATE, flag, "")


def test_a_file_and_its_text_are_the_same_job(tmp_path):
    schema, out = tmp_path / "schema.json", tmp_path / "out.jsonl"
    schema.write_text(f"{SCHEMA}\n")
    batch = ["batch", "--model", "tiny", "--seed", "1", "-o", out, "--json-schema"]
    (tmp_path / "in.txt").write_text("Say:\n")
    run_here(*batch, schema, tmp_path / "in.txt")
    run_here(*batch, SCHEMA, tmp_path / "in.txt", "--resume")
    assert json.loads(out.read_text())["finish_reason"] == "complete"


def test_the_choices_of_a_row_are_not_empty():
    rows = b'{"prompt": "a", "choices": []}\n{"prompt": "a", "choices": ["b"]}\n'
    out, _ = run_here("batch", "--model", "tiny", input=rows, code=6)
    first, second = map(json.loads, out.splitlines())
    assert '"choices" of a row must be a list of one or more' in first["error"]["message"]
    assert second["text"] == " b"
