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


def test_a_grammar_is_a_file_or_a_text(tmp_path):
    (tmp_path / "talk.lark").write_text(GRAMMAR)
    for grammar in (tmp_path / "talk.lark", GRAMMAR, f"A: /y/\n{GRAMMAR}"):
        assert run_here(*GENERATE, "--grammar", grammar)[0] in (b"yes", b"no")
    assert run_here(*GENERATE, "--grammar", "-", input=GRAMMAR.encode())[0] in (b"yes", b"no")


@pytest.mark.parametrize(
    ("flag", "form"), [("--json-schema", "begin with {"), ("--grammar", "have a rule start:")]
)
def test_what_is_neither_a_file_nor_a_text_is_refused(flag, form):
    assert f"error: {flag} is empty: give a file or a text" in refusal(*GENERATE, flag, "")
    missing = f"error: {flag} no.file: No such file or directory, and a text must {form}"
    assert missing in refusal(*GENERATE, flag, "no.file")


def test_choices_may_be_the_lines_of_a_file(tmp_path):
    file = tmp_path / "choices.txt"
    file.write_bytes(b"red\r\n\n two words\n")
    listed = run_here(*GENERATE, "--choices", "red,two words")[0]
    assert listed in (b" red", b" two words", b"red", b"two words")
    for source, more in ((file, {}), ("-", {"input": file.read_bytes()})):
        assert run_here(*GENERATE, "--choices-file", source, **more)[0] == listed
    rows = run_here("batch", "-q", "-m", "tiny", "--choices-file", file, input=b"The fox was\n")[0]
    assert json.loads(rows)["text"] in (" red", " two words")
    file.write_bytes(b"\n")
    assert "--choices must be one or more" in refusal(*GENERATE, "--choices-file", file)
    twice = refusal(*GENERATE, "--choices", "a", "--choices-file", file)
    assert "--choices-file cannot be used with --choices" in twice
    both = refusal("batch", "-m", "tiny", "--choices-file", "-", input=b"x")
    assert "cannot both be read from the pipe" in both


def test_a_file_and_its_text_are_the_same_job(tmp_path):
    schema, out = tmp_path / "schema.json", tmp_path / "out.jsonl"
    schema.write_text(f"{SCHEMA}\n")
    batch = ["batch", "--model", "tiny", "--seed", "1", "-o", out, "--json-schema"]
    (tmp_path / "in.txt").write_text("Say:\n")
    run_here(*batch, schema, tmp_path / "in.txt")
    run_here(*batch, SCHEMA, tmp_path / "in.txt", "--resume")
    assert json.loads(out.read_text())["finish_reason"] == "complete"


# The part that follows "a" is empty, which nobody can see before.
STUCK = 'start: "a" X\nX: /b+/ & /c+/'


def test_a_text_that_cannot_go_on_is_written_and_an_error():
    cure = ": the constraint has no end there, or is too complex\n"
    out, told = run_here(*GENERATE, "--grammar", STUCK, code=6)
    assert (out, told) == (b"a", f"gpt-cli: error: no token can follow the text{cure}")
    out, told = run_here(*GENERATE, "--grammar", STUCK, "--json", "--samples", 2, code=6)
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["finish_reason"] for record in records] == ["stuck"] * 2
    assert told == f"gpt-cli: error: no token can follow 2 of 2 texts{cure}"


def test_a_row_that_cannot_go_on_is_an_error():
    rows = [{"prompt": "a", "grammar": STUCK}, {"prompt": "a", "choices": ["b"]}]
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    out, told = run_here("batch", "--model", "tiny", input=lines.encode(), code=6)
    stuck, done = map(json.loads, out.splitlines())
    assert stuck == {"index": 0, "line": 1, "error": stuck["error"]}
    assert stuck["error"]["code"] == "stuck"
    assert stuck["error"]["message"].startswith('no token can follow "a": ')
    assert done["text"] == " b"
    assert "1 of 2 rows failed" in told


def test_the_choices_of_a_row_are_not_empty():
    rows = b'{"prompt": "a", "choices": []}\n{"prompt": "a", "choices": ["b"]}\n'
    out, _ = run_here("batch", "--model", "tiny", input=rows, code=6)
    first, second = map(json.loads, out.splitlines())
    assert '"choices" of a row must be a list of one or more' in first["error"]["message"]
    assert second["text"] == " b"
