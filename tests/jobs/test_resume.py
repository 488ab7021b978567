"""Jobs that must not resume an output."""

import json

import pytest

from gpt_cli import jobs
from gpt_cli.errors import InputError
from gpt_cli.options.request import Options


@pytest.mark.parametrize("formats", [("text", "auto"), ("auto", "text")])
def test_an_output_of_whole_files_and_one_of_lines_are_not_mixed(tmp_path, formats):
    file, output = tmp_path / "in.txt", tmp_path / "out.jsonl"
    file.write_text("Once upon a time\n", encoding="utf-8")
    jobs.run(jobs.Scoring(), file, output, model="tiny", format=formats[0])
    record = json.loads(output.read_text(encoding="utf-8"))
    assert ("file" in record) == (formats[0] == "text")
    assert "line" not in record
    file.write_text("Once upon a time\nThere was\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"format of|without format"):
        jobs.run(jobs.Scoring(), file, output, model="tiny", format=formats[1], resume=True)


def test_a_job_with_edits_is_not_resumed_without(tmp_path):
    file, output = tmp_path / "in.txt", tmp_path / "out.jsonl"
    file.write_text("Once upon a time\n", encoding="utf-8")
    jobs.run(jobs.Scoring(), file, output, model="tiny", edits=["hook_embed*=0.5"])
    with pytest.raises(InputError, match=r"edits of .* was .* and is not set now"):
        jobs.run(jobs.Scoring(), file, output, model="tiny", resume=True)


@pytest.mark.parametrize(
    ("name", "task", "other"),
    [
        ("context", jobs.Scoring(context="Once"), jobs.Scoring()),
        ("special", jobs.Generation(Options(special=True)), jobs.Generation(Options())),
        ("bad_words", jobs.Generation(Options(bad_words=["a"])), jobs.Generation(Options())),
        ("min_tokens", jobs.Generation(Options(min_tokens=2)), jobs.Generation(Options())),
    ],
)
def test_an_option_that_older_outputs_lack_must_stay_set(tmp_path, name, task, other):
    file, output = tmp_path / "in.txt", tmp_path / "out.jsonl"
    file.write_text("Once upon a time\n", encoding="utf-8")
    jobs.run(task, file, output, model="tiny")
    with pytest.raises(InputError, match=rf"{name} of .* was .* and is not set now"):
        jobs.run(other, file, output, model="tiny", resume=True)
    assert jobs.run(task, file, output, model="tiny", resume=True).rows == 1
