"""`gpt-cli batch` and `score` with tables, folders and addresses: the records are the same."""

import csv
import gzip
import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import pytest

from gpt_cli.cli.progress import Progress
from gpt_cli.jobs import parts
from gpt_cli.jobs.parts import Folder
from support import in_process
from support.processes import COMMAND, LimitedProcess, posix

FLAGS = {"batch": ["-n", "2", "-s", "1", "--ignore-eos"], "score": []}
FIELD = {"batch": "prompt", "score": "text"}
TEXTS = [f"{'Once upon a time, ' * (index % 4)}number {index} 🦊" for index in range(20)]


@pytest.fixture(scope="module", autouse=True)
def fast(case_folder):
    """Use a very small model: there are many runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPT_CLI_MODEL", str(case_folder("saved")))
        yield


@pytest.fixture
def pa():
    pytest.importorskip("pyarrow.parquet")
    return pytest.importorskip("pyarrow")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Change to a new folder, so that names are short."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def row_parts(monkeypatch):
    """Make a part of every row."""
    monkeypatch.setattr(parts, "BYTES", 1)


def run(command, *arguments, code=0):
    """Run a command that writes no records to standard output; return its lines of notes."""
    finished = in_process.finished(command, *FLAGS[command], "--threads", "1", *arguments)
    assert (finished.returncode, finished.stdout) == (code, b""), finished.stderr
    return finished.stderr.decode().splitlines()


def refused(*arguments, code=2):
    """Run a command that is refused; return its error message."""
    (line,) = run(*arguments, code=code)
    assert line.startswith("gpt-cli: error: ")
    return line


NO_MODEL = ["-m", "no/model", "--offline"]  # exit code 3 where the model is searched


def write_jsonl(file, rows):
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_parquet(file, rows, **options):
    import pyarrow
    from pyarrow.parquet import write_table

    file.parent.mkdir(exist_ok=True)
    write_table(pyarrow.Table.from_pylist(rows), file, **options)


def known(value):
    """Return a record without its times, and without nulls, which JSON Lines leave out."""
    if isinstance(value, list):
        return [known(item) for item in value]
    if not isinstance(value, dict):
        return value
    items = {key: known(item) for key, item in value.items() if key != "timing"}
    return {key: item for key, item in items.items() if item is not None}


def value_of(cell):
    """Return the value of a cell: JSON, or a text."""
    try:
        return json.loads(cell or "null")
    except ValueError:
        return cell


def write_csv(file, rows, delimiter=","):
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, rows[0], delimiter=delimiter, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    data = text.getvalue().encode()
    file.write_bytes(gzip.compress(data) if file.suffix == ".gz" else data)


def records_of(output):
    """Return the records in a file, or in the files of a folder, of any kind."""
    fs, path = fsspec.core.url_to_fs(str(output))
    records = []
    files = sorted(fs.ls(path, detail=False)) if fs.isdir(path) else [path]
    for file in files:
        if file.rpartition("/")[2].startswith((".", "_")):
            continue
        with fs.open(file, "rb") as stream:
            if file.endswith(".parquet"):
                from pyarrow.parquet import read_table

                records += read_table(stream).to_pylist()
            elif file.endswith((".csv", ".tsv")):
                lines = stream.read().decode().splitlines(keepends=True)
                rows = csv.DictReader(lines, delimiter="," if file.endswith("csv") else "\t")
                records += [{name: value_of(cell) for name, cell in row.items()} for row in rows]
            else:
                records += [json.loads(line) for line in stream]
    return known(records)


def close(records):
    """Return scores for a comparison within rounding, since rows are computed beside others."""
    return [
        {
            key: pytest.approx(value, rel=1e-5) if isinstance(value, float) else value
            for key, value in record.items()
        }
        for record in records
    ]


def snapshot(folder):
    return {
        str(file.relative_to(folder)): file.is_file() and file.read_bytes()
        for file in folder.rglob("*")
    }


def names(folder):
    return sorted(file.name for file in folder.iterdir())


@pytest.fixture(scope="module")
def expected(tmp_path_factory, fast):
    """The records of TEXTS in a file of JSON Lines, by command."""
    folder = tmp_path_factory.mktemp("expected")
    by_command = {}
    for command, field in FIELD.items():
        rows = [{"id": 100 + index, field: text} for index, text in enumerate(TEXTS)]
        file = write_jsonl(folder / f"{command}.jsonl", rows)
        output = folder / f"{command}.out"
        run(command, file, "-o", output, "-q")
        by_command[command] = records_of(output)
        assert len(by_command[command]) == len(TEXTS)
    return by_command


# --- the same records ----------------------------------------------------------------------------


PARTS = [(0, 7), (7, 8), (8, 20)]


def located(records, name):
    """Return the records of several files with their files and lines."""
    places = [
        (part, line) for part, (start, end) in enumerate(PARTS) for line in range(end - start)
    ]
    return [
        record | {"file": name.format(part), "line": line + 1}
        for record, (part, line) in zip(records, places, strict=True)
    ]


def write_inputs(folder, command):
    """Write the rows in all forms that an input may have."""
    rows = [{"id": 100 + index, FIELD[command]: text} for index, text in enumerate(TEXTS)]
    write_parquet(folder / "in.parquet", rows, row_group_size=6)
    write_jsonl(folder / "in.jsonl", rows)
    write_csv(folder / "in.csv", rows)
    write_csv(folder / "in.tsv.gz", rows, "\t")
    for part, (start, end) in enumerate(PARTS):
        write_jsonl(folder / "lines" / f"{part}", rows[start:end])
        write_parquet(folder / "tables" / f"{part}.parquet", rows[start:end])
    (folder / "lines" / "_SUCCESS").touch()
    (folder / "tables" / "notes.txt").touch()


# And the names of several files, which their records have.
INPUTS = {
    "in.parquet": None,
    "in.jsonl": None,
    "in.csv": None,
    "in.tsv.gz": None,
    "lines": "lines/{}",
    "lines/0 lines/1 lines/2": "lines/{}",
    "tables/*.parquet": "tables/{}.parquet",
}
OUTPUTS = {  # and the files that are written
    "out": ["out"],
    "out.parquet": ["out.parquet"],
    "out.csv": ["out.csv"],
    "out/*.tsv": ["_job.json", *(f"part-{row:012}.tsv" for row in (0, 8, 16))],
    "out/": ["_job.json", "part-000000000000", "part-000000000008", "part-000000000016"],
    "out/*.parquet": ["_job.json", *(f"part-{row:012}.parquet" for row in (0, 8, 16))],
    "out/*.jsonl": ["_job.json", *(f"part-{row:012}.jsonl" for row in (0, 8, 16))],
    "file://{}/out.jsonl": ["out.jsonl"],
    "file://{}/out.parquet": ["out.parquet"],
    "file://{}/out/": ["_job.json", "part-000000000000", "part-000000000008", "part-000000000016"],
}


@pytest.fixture
def parts_of_8(monkeypatch):
    """Let a part end after every eighth row."""
    write_row = Folder.write_row

    def counted(self, records):
        write_row(self, records)
        if len(self._part) == 8:
            self._write_part()

    monkeypatch.setattr(Folder, "write_row", counted)


@pytest.mark.parametrize(
    ("command", "output", "inputs"),
    [
        *(
            (command, output, INPUTS)
            for command in FIELD
            for output in ("out.parquet", "out/*.jsonl")
        ),
        *(("score", output, ["in.parquet", "in.csv", "lines"]) for output in OUTPUTS),
    ],
)
def test_records_do_not_depend_on_the_form_of_input_and_output(
    command, output, inputs, expected, here, pa, parts_of_8
):
    write_inputs(here, command)
    for number, name in enumerate(inputs):
        file = INPUTS[name]
        folder = here / str(number)
        folder.mkdir()
        target = output.format(folder) if "://" in output else f"{number}/{output}"
        run(command, *name.split(), "-o", target, "-q")
        shown = names(folder / "out") if (folder / "out").is_dir() else names(folder)
        shown = [name for name in shown if not name.startswith(".")]
        assert len(shown) == len(OUTPUTS[output])
        assert all(map(str.startswith, shown, OUTPUTS[output]))
        table = name.endswith(".parquet")
        (ending,) = {Path(name).suffix for name in shown if not name.startswith("_")}
        if output.endswith("/"):
            assert ending == (".parquet" if table else ".jsonl")
        records = records_of(folder / "out" if (folder / "out").exists() else folder / shown[0])
        if ending == ".parquet" and not table:  # ids of JSON may be anything
            assert {type(record["id"]) for record in records} == {str}
        if ending != ".jsonl" or name.startswith(("in.csv", "in.tsv")):
            records = [record | {"id": int(record["id"])} for record in records]
        assert records == (located(expected[command], file) if file else expected[command])


@pytest.mark.parametrize("output", ["out.jsonl", "out.parquet", "out/", "out/*.parquet"])
def test_input_and_output_may_be_at_an_address(output, expected, here, pa, memory, row_parts):
    write_inputs(here, "score")
    memory.put(str(here / "tables" / "0.parquet"), "/in/0.parquet")
    memory.put(str(here / "tables" / "2.parquet"), "/in/2.parquet")
    run("score", "memory://in", "-o", f"memory://bucket/{output}", "-q")
    records = records_of(f"memory://bucket/{output.partition('*')[0]}")
    rows = located(expected["score"], "memory:///in/{}.parquet")
    rows = rows[:7] + rows[8:]
    assert records == close(row | {"index": index} for index, row in enumerate(rows))
    others = [file for file in memory.find("/") if "/." in file or ".parts" in file]
    assert others == ["/bucket/.out.jsonl.job.json"] * (output == "out.jsonl")
    memory.put(str(here / "in.jsonl"), "/bucket/in.jsonl")
    run("score", "memory://bucket/in.jsonl", "-o", "out.jsonl", "-q")
    assert records_of("out.jsonl") == expected["score"]


def test_records_with_log_probabilities_fit_in_a_table(here, pa):
    for command, flags in (("batch", ["--logprobs", "2"]), ("score", ["--tokens"])):
        file = write_jsonl(here / f"{command}.in", [{FIELD[command]: "Once 🦊"}])
        for output in (f"{command}.parquet", f"{command}.jsonl"):
            run(command, file, "-o", output, "-q", *flags)
        (record,) = records_of(f"{command}.parquet")
        assert [record] == records_of(f"{command}.jsonl")
        assert record["logprobs"][-1]["bytes"]


def test_words_fit_in_a_table_and_are_resumed_with_the_same_flags_only(here, pa):
    file = write_jsonl(here / "in.jsonl", [{"text": "Once  🦊"}, {"text": ""}])
    for output in ("out.parquet", "out.jsonl"):
        run("score", file, "-o", output, "-q", "--words", "--bos")
    first, empty = records_of("out.parquet")
    assert [first, empty] == records_of("out.jsonl")
    assert [(word["word"], word["start"], word["end"]) for word in first["words"]] == [
        ("Once", 0, 4), ("🦊", 6, 10)
    ]  # fmt: skip
    assert empty["words"] == []
    assert "--bos of out.jsonl was true" in refused(
        "score", file, "-o", "out.jsonl", "-q", "--words", "--resume"
    )


def test_rows_of_a_table_may_have_ids_and_options_of_their_own(here, pa):
    rows = [
        {"prompt": "Once", "max_tokens": 2, "temperature": 0.0, "seed": 5, "stop": ["x"]},
        {"prompt": "Once", "max_tokens": None, "temperature": None, "seed": None, "stop": None},
        {"prompt": "Once", "max_tokens": 3, "temperature": 1.5, "seed": 7, "stop": ["e", "a"]},
    ]
    rows = [row | {"id": index + 0.0} for index, row in enumerate(rows)]
    write_parquet(here / "in.parquet", rows)
    write_jsonl(here / "in.jsonl", rows)
    for name in ("in.parquet", "in.jsonl"):
        run("batch", name, "-o", f"{name}.out", "-q")
    records = records_of("in.parquet.out")
    assert records == records_of("in.jsonl.out")
    assert [record["seed"] for record in records] == [5, 1, 7]
    assert records[0]["usage"]["completion_tokens"] == 2
    output = here / "in.parquet.out"
    output.write_bytes(b"".join(output.read_bytes().splitlines(keepends=True)[:2]))
    run("batch", "in.parquet", "-o", output, "-q", "--resume")
    assert records_of(output) == records


def test_integer_ids_of_tables_stay_integers_in_tables(here, pa):
    write_parquet(here / "in.parquet", [{"id": 2**62, "text": "Once"}, {"text": "One"}])
    huge = {"id": pa.array([2**64 - 1], pa.uint64()), "text": ["Once"]}
    pa.parquet.write_table(pa.table(huge), here / "huge.parquet")
    run("score", "in.parquet", "-o", "out.parquet", "-q")
    run("score", "huge.parquet", "-o", "huge-out.parquet", "-q")
    assert [record.get("id") for record in records_of("out.parquet")] == [2**62, None]
    assert [record["id"] for record in records_of("huge-out.parquet")] == [str(2**64 - 1)]


def test_score_has_a_record_for_each_row(here):
    rows = [{"id": "a", "text": "Once upon a time"}, {"id": "b", "text": "x"}, {"other": 1}]
    write_jsonl(here / "in", rows)
    finished = in_process.finished("score", "in", "--format", "auto", "-q")
    assert finished.returncode == 6
    first, short, bad = map(json.loads, finished.stdout.splitlines())
    assert set(first) == {
        *("index", "id", "text", "model", "adapter", "tokens", "tokens_scored"),
        *("total_logprob", "perplexity", "bits_per_byte"),
    }
    assert (first["id"], first["text"]) == ("a", "Once upon a time")
    assert short["perplexity"] is None
    assert (bad["index"], bad["line"], bad["error"]["code"]) == (2, 3, "invalid_input")
    assert finished.stderr == b"gpt-cli: error: 1 of 3 rows failed: the records say why\n"


# --- rows that fail ------------------------------------------------------------------------------


@pytest.mark.parametrize("output", ["out.jsonl", "out.parquet", "out/"])
def test_an_error_names_its_file_and_line(output, here, pa):
    write_jsonl(here / "in" / "a", [{"prompt": "Once"}])
    (here / "in" / "b").write_bytes(b'\n{"id": 7, "prompt": "One"}\n\n{"id": 8}\nno JSON')
    progress, error = run("batch", "in", "-o", output, code=6)
    good, other, no_prompt, no_json = records_of(output)
    assert "error" not in good
    assert (good["file"], good["line"]) == ("in/a", 1)
    assert (other["file"], other["line"]) == ("in/b", 2)
    for record, index, line, id in ((no_prompt, 2, 4, 8), (no_json, 3, 5, None)):
        assert record["error"].pop("message")
        code = {"code": "invalid_input"}
        expected = {"index": index, "file": "in/b", "line": line, "error": code}
        id = id if id is None or not output.endswith("parquet") else str(id)
        assert record == expected | ({} if id is None else {"id": id})
    assert progress.startswith("gpt-cli: 4 of 4 rows (2 failed), ")
    assert error == "gpt-cli: error: 2 of 4 rows failed: the records say why"


def test_columns_that_are_not_read_are_noted(here, pa):
    write_parquet(here / "in.parquet", [{"title": "x", "text": "Once", "lang": "en"}])
    finished = in_process.finished("score", "in.parquet", "--lines")
    assert finished.stderr == b"gpt-cli: note: ignored columns: title, lang\n"
    assert run("score", "in.parquet", "-o", "a", "-q") == []
    (progress,) = run("score", "in.parquet", "-o", "b", "--keep-fields", "id")
    assert progress.startswith("gpt-cli: 1 of 1 row, ")


# --- resumed jobs --------------------------------------------------------------------------------


@pytest.mark.parametrize("output", ["out.jsonl", "out.parquet", "out/", "file://{}/out.jsonl"])
def test_a_finished_output_is_resumed_with_exit_code_6_where_rows_failed(output, here, pa):
    write_jsonl(here / "in", [{"text": "Once"}, {"other": 1}])
    for flags in ([], ["--resume"]):
        *notes, error = run("score", "in", "-o", output.format(here), "-v", *flags, code=6)
        assert error == "gpt-cli: error: 1 of 2 rows failed: the records say why"
        complete = [line for line in notes if "nothing is missing" in line or "is complete" in line]
        assert len(complete) == len(flags)


@pytest.fixture
def job(here, row_parts):
    """A folder of an input of six rows, of which one fails, and of a finished output."""
    rows = [{"id": index, "prompt": text} for index, text in enumerate(TEXTS[:5])]
    write_jsonl(here / "in" / "a", [*rows[:2], {"id": "bad"}])
    write_jsonl(here / "in" / "b", rows[2:])
    run("batch", "in", "-o", "out/", "-q", code=6)
    assert len(names(here / "out")) == 7
    assert json.loads((here / "out" / "_job.json").read_bytes())["seed"] == 1
    return here


@pytest.mark.parametrize("kept", [0, 2, 3, 6])
def test_resume_does_the_missing_rows(job, kept):
    whole = records_of("out")
    for name in names(job / "out")[1 + kept :]:
        (job / "out" / name).unlink()
    before = snapshot(job / "out")
    # These flags change no record.
    *progress, error = run("batch", "in", "-o", "out", "--resume", "--batch-size", "1", code=6)
    assert records_of("out") == whole
    assert before.items() <= snapshot(job / "out").items()
    assert len(names(job / "out")) == 7
    assert error == "gpt-cli: error: 1 of 6 rows failed: the records say why"
    if kept == 6:
        note = "gpt-cli: note: nothing is missing: an earlier run has written all rows"
        assert progress == [note]
    elif kept == 3:
        assert progress[0].startswith("gpt-cli: 6 of 6 rows (1 failed), 6 tokens, ")
    assert len(progress) == 1


@posix
@pytest.mark.parametrize("output", ["out/", "out/*.parquet"])
def test_files_whose_names_are_not_unicode_can_be_resumed(output, here, pa):
    try:
        write_jsonl(here / "in" / "b\udcff", [{"other": 1}])
    except OSError:
        pytest.skip("the file system takes only Unicode")
    write_jsonl(here / "in" / "a", [{"text": "Once"}])
    for _ in range(2):
        run("score", "in", "-o", output, "-q", "--resume", code=6)
        assert len(names(here / "out")) == 2


@pytest.mark.parametrize("output", ["out.parquet", "file://{}/out.parquet"])
def test_a_finished_table_is_resumed_only_by_the_same_job(output, here, pa):
    write_jsonl(here / "in", [{"prompt": "Once"}])
    write_jsonl(here / "other", [{"prompt": "The"}])
    output = output.format(here)
    run("batch", "in", "-o", output, "-q")
    run("batch", "in", "-o", output, "-q", "--resume")
    for flags in (["--seed", "2"], ["--model", "other"], ["--logprobs", "0"]):
        said = refused("batch", "in", "-o", output, "--resume", *flags)
        assert f"{flags[0]} of {output} was" in said
    said = refused("batch", "other", "-o", output, "--resume")
    assert f"{output} was made from another input, other is new: name another" in said
    table = pa.parquet.read_table("out.parquet")
    pa.parquet.write_table(table.replace_schema_metadata(), "out.parquet")
    said = refused("batch", "in", "-o", output, "--resume")
    assert f"{output} has no manifest, so it may be of another job or an old version: name" in said


OTHER_FLAGS = {
    "max_tokens": ["-n", "5"],
    "min_tokens": ["--min-tokens", "2"],
    "bad_words": ["--bad-words", "x"],
    "samples": ["--samples", "2"],
    "temperature": ["--temperature", "0.5"],
    "stop": ["--stop", "x"],
    "logit_bias": ["--logit-bias", "7=-1"],
    "use_cache": ["--no-cache"],
    "seed": ["-s", "2"],
    "logprobs": ["--logprobs", "0"],
    "overflow": ["--overflow", "shift"],
    "dtype": ["--dtype", "int8"],
    "revision": ["--revision", "v1"],
    "adapter": ["--adapter", "other"],
    "model": ["-m", "other"],
}


def test_resume_refuses_other_flags_another_command_and_another_input(job):
    (job / "out" / "part-000000000005.jsonl").unlink()
    run("batch", "in", "-o", "lines", "-q", code=6)
    run("batch", "in", "-o", "likely", "-q", "--logprobs", "0", code=6)
    assert "--logprobs of likely was 0" in refused(
        "batch", "in", "-o", "likely", "--resume", "--logprobs", "1"
    )
    run("score", "in", "-o", "scores", "-q", code=6)
    said = refused("score", "in", "-o", "scores", "--tokens", "--resume")
    assert "--tokens of scores was false, and is now true" in said
    before = snapshot(job)
    for name, flags in OTHER_FLAGS.items():
        line = refused("batch", "in", "-o", "out", "--resume", *flags)
        flag = f"--{name.removeprefix('use_').replace('_', '-')}"
        assert f"error: {flag} of out was " in line
    for output in ("out", "lines"):
        line = refused("score", "in", "-o", output, "--resume")
        assert f'task of {output} was "generation", and is now "scoring"' in line
    assert snapshot(job) == before
    write_jsonl(job / "in" / "c", [{"prompt": "Once"}])
    for output in ("out", "lines"):
        line = refused("batch", "in", "-o", output, "--resume")
        assert f"{output} was made from another input, c is new: name another" in line


@pytest.mark.parametrize("output", ["out", "out/", "file://{}/out.jsonl"])
def test_a_job_over_several_files_is_resumed_with_the_same_list_only(output, here):
    names = [str(write_jsonl(here / name, [{"text": "Once"}])) for name in "abc"]
    job = ["score", "-o", output.format(here), "--resume", "-q"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Progress, "advance", interrupt)
        assert in_process.finished(*job, *names[:2]).returncode == 130
    missing = "" if output == "out" else ", b is missing"  # lines of one file may be of any
    changes = [
        (missing, names[:1]),
        (", c is new", names),
        (", c is new", names[::2]),
        (", its files have another order", names[1::-1]),
    ]
    for change, others in changes:
        assert f"was made from another input{change}: name another" in refused(*job, *others)
    run(*job, *names[:2])
    records = records_of(output.format(here))
    assert [(row["index"], row["file"], row["line"]) for row in records] == [
        (0, names[0], 1), (1, names[1], 1)
    ]  # fmt: skip


def interrupt(self, *arguments):
    raise KeyboardInterrupt


HINT = b"gpt-cli: interrupted after %d rows: the same command with --resume continues\n"


@pytest.mark.parametrize("output", ["out", "out/", "out/*.parquet", "file://{}/out.parquet"])
def test_resume_takes_the_seed_that_was_drawn(output, here, pa, row_parts, monkeypatch):
    output = output.format(here)
    rows = [{"prompt": "Once"}, {"prompt": "One", "seed": 3}, *[{"prompt": "The"}] * 4]
    write_jsonl(here / "in", rows)
    command = ["batch", "in", "-n", "6", "-o"]

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "advance", interrupt)
        for done, flags in enumerate(([], ["--resume"], ["--resume"])):
            finished = in_process.finished(*command, output, *flags)
            assert finished.returncode == 130
            assert finished.stderr == (HINT % done).replace(b"1 rows", b"1 row")
    assert in_process.finished(*command, output, "--resume").returncode == 0
    records = records_of(output.partition("*")[0])
    assert len(records) == 6
    (seed,) = {record["seed"] for record in records} - {3}
    assert in_process.finished(*command, "one", "-s", seed).returncode == 0
    assert records == records_of("one")


LONG = "".join(f"{'Once ' * (i % 5)}{i}\n" for i in range(400)).encode()


@pytest.fixture(scope="module")
def long_job(fast, tmp_path_factory):
    """Flags of a job that takes a while, and its records."""
    pytest.importorskip("pyarrow")
    flags = ["batch", "in", "-n", "4", "-q", "-s", "1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("long"))
        Path("in").write_bytes(LONG)
        assert in_process.finished(*flags, "-o", "out").returncode == 0
        records = records_of("out")
    assert len(records) == 400
    return flags, records


# Parts after every row, so that a run can be killed between two.
IN_PARTS = (
    "from gpt_cli.cli import app; from gpt_cli.jobs import parts; parts.SECONDS = 0; app.main()"
)


@posix
@pytest.mark.parametrize(
    ("name", "code", "output"),
    [
        ("SIGINT", 130, "out"),
        ("SIGKILL", -9, "out"),
        ("SIGKILL", -9, "out.parquet"),
        pytest.param("SIGKILL", -9, "out/", marks=pytest.mark.slow),
        pytest.param("SIGHUP", 129, "out", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_ends_early_loses_and_repeats_no_row(name, code, output, long_job, here):
    flags, expected = long_job
    (here / "in").write_bytes(LONG)
    result = here / {"out.parquet": "out.parquet.parts"}.get(output, "out")

    def written():
        """Return the parts, or the lines of a file."""
        if result.is_dir():
            return {name: (result / name).read_bytes() for name in names(result) if name[0] != "."}
        lines = result.read_bytes().splitlines(keepends=True) if result.exists() else []
        return {row: line for row, line in enumerate(lines) if line.endswith(b"\n")}

    command = [*COMMAND[:2], "-c", IN_PARTS, *flags, "-o", output, "--batch-size", "1", "--resume"]
    end = time.monotonic() + 60
    with LimitedProcess(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while not (result.exists() and len(written()) > 3):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.01)
        process.send_signal(getattr(signal, name))
        assert process.communicate(timeout=60) == (b"", b"")
    assert process.returncode == code
    before = written()
    assert 2 < len(before) < 400
    assert in_process.finished(*flags, "-o", output, "--resume").returncode == 0
    if output == "out.parquet":
        assert names(here) == ["in", "out.parquet"]
    else:
        assert before.items() <= written().items()
    assert records_of(output) == expected


@posix
def test_two_processes_do_not_write_one_output(job):
    about = json.loads((job / "out" / "_job.json").read_bytes())
    before = snapshot(job)
    with Folder("out", ".jsonl", {}, about, resume=True):
        command = [*COMMAND, "batch", "in", "-o", "out/", "--resume", *FLAGS["batch"]]
        finished = subprocess.run(command, capture_output=True, timeout=60)
    assert finished.returncode == 5, finished.stderr
    assert finished.stderr.endswith(b" out is being written by another run: wait until it ends\n")
    assert snapshot(job) == before
    run("batch", "in", "-o", "out/", "--resume", "-q", code=6)


# --- refused before a model is searched ----------------------------------------------------------


@pytest.mark.parametrize(
    "output", ["out", "out/", "out.parquet", "out/*.parquet", "file://{}/a/out.jsonl"]
)
def test_a_job_that_cannot_begin_leaves_no_output(output, here, pa):
    (here / "in").write_bytes(b"Once\n")
    for source, code in (("in", 3), ("missing", 2)):
        refused("batch", source, "-o", output.format(here), *NO_MODEL, code=code)
        assert names(here) == ["in"]


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("batch", "in --resume"),
        ("batch", "in -o in"),
        ("batch", "in -o out/*.xls"),
        ("batch", "in -o in/out"),
        ("batch", "in --format parquet"),
        ("batch", "in --format csv"),
        ("batch", "in --workers 2"),
        ("batch", "in --address auto"),
        ("batch", "in --gpus-per-worker 1"),
        ("batch", "- --format parquet"),
        ("batch", "empty"),
        ("score", "in --resume"),
        ("score", "in --format lines --resume"),
        ("score", "in --engine ray"),
        ("score", "in --workers 2"),
        ("score", "in --workers 2 -o out"),
        ("score", "in -o out --max-perplexity 9 --json"),
        ("score", "in -o out/ --max-perplexity 9"),
        ("score", "in -o out.csv --max-perplexity 9"),
        ("score", "in -o out --max-perplexity 9 --template {line}"),
        ("score", "- -o out --max-perplexity 9 --resume"),
        ("score", "in --template {line} --min-perplexity 9"),
        ("score", "empty"),
        ("score", "table.parquet -o out"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(command, flags, here):
    (here / "in").write_bytes(b"Once\n")
    (here / "empty").mkdir()
    (here / "table.parquet").write_bytes(b"no table")
    if "parquet" in flags:
        pytest.importorskip("pyarrow")
    before = snapshot(here)
    refused(command, *NO_MODEL, *flags.split())
    assert snapshot(here) == before


@pytest.mark.parametrize(
    "flags",
    ["in.parquet", "in -o out.parquet", "in -o out/*.parquet", "in -o memory://out.parquet"],
)
def test_tables_need_pyarrow(flags, here, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (here / "in.parquet").touch()
    (here / "in").write_bytes(b"Once\n")
    line = refused("batch", *flags.split(), *NO_MODEL, code=5)
    assert "pip install pyarrow" in line
    assert names(here) == ["in", "in.parquet"]
