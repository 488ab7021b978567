"""Jobs that must not resume an output."""

import json
from pathlib import Path

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


ROWS = [
    {"prompt": "Once", "n": 3, "seed": 7},
    {"prompt": "The fox"},
    {"prompt": "x", "n": 0},
    {"prompt": "Long ago", "n": 2, "beams": 3, "temperature": 0},
]


@pytest.fixture
def sampled(tmp_path, monkeypatch):
    """Return a function that runs a job with samples, and returns its summary and its records."""
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), "utf-8")
    task = jobs.Generation(Options(max_tokens=4, seed=1), samples=2)

    def run(output, **options):
        summary = jobs.run(task, "in.jsonl", output, model="tiny", **options)
        files = sorted(Path(output.partition("*")[0]).glob("p*")) or [Path(output)]
        lines = [line for file in files for line in file.read_text("utf-8").splitlines()]
        records = [json.loads(line) for line in lines]
        return summary, [record | {"timing": None} for record in records]

    return run


def test_rows_of_samples_are_resumed_whole(sampled):
    whole = sampled("out.jsonl")
    assert whole[0] == jobs.Summary(4, 1)
    places = [(record["index"], record.get("sample")) for record in whole[1]]
    assert places == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, None), (3, 0), (3, 1)]
    data = Path("out.jsonl").read_bytes()
    for size in {0, 1, *range(0, len(data), 97), len(data) - 1, len(data)}:
        Path("out.jsonl").write_bytes(data[:size])
        assert sampled("out.jsonl", resume=True) == whole
    lines = data.splitlines(keepends=True)
    for wrong in ([0, 2], [0, 1, 3], [1], [0, 1, 1]):
        Path("out.jsonl").write_bytes(b"".join(lines[number] for number in wrong))
        with pytest.raises(InputError, match=f"line {len(wrong)}, is not a record"):
            sampled("out.jsonl", resume=True)


def test_the_samples_of_a_row_are_in_one_part(sampled, monkeypatch):
    whole = sampled("out.jsonl")
    monkeypatch.setattr("gpt_cli.jobs.parts.BYTES", 1)
    (summary, records) = sampled("out/*.jsonl")
    assert records == whole[1]
    names = sorted(path.name for path in Path("out").glob("part*"))
    assert [name[-7] for name in names] == ["0", "1", "2", "3"]
    for kept in range(4):
        for name in names[kept:]:
            Path("out", name).unlink()
        assert sampled("out/*.jsonl", resume=True) == (summary, records)


@pytest.mark.parametrize("output", ["out.csv", "out.parquet"])
def test_a_table_of_samples_counts_its_rows(sampled, output):
    if output.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    task = jobs.Generation(Options(max_tokens=4, seed=1), samples=2)
    for resume in (False, True):
        summary = jobs.run(task, "in.jsonl", output, model="tiny", resume=resume)
        assert summary == jobs.Summary(4, 1)
