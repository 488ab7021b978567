"""`gpt-cli batch` and `score` with tables, folders and addresses: the records are the same."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.local import LocalFileOpener
from processes import COMMAND, posix

from gpt_cli.cli import app
from gpt_cli.jobs import parts
from gpt_cli.jobs.parts import Folder
from gpt_cli.startup import THREAD_VARIABLES

FLAGS = {"batch": ["-n", "2", "-s", "1", "--ignore-eos"], "score": []}
FIELD = {"batch": "prompt", "score": "text"}
TEXTS = [f"{'Once upon a time, ' * (place % 4)}number {place} 🦊" for place in range(20)]


@pytest.fixture(scope="module", autouse=True)
def fast(case_folder):
    """Use a very small model, and take the command line apart only once: there are many runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPT_CLI_MODEL", str(case_folder("saved")))
        patch.setattr(app, "application", functools.cache(app.application))
        patch.setattr(app, "get_command", functools.cache(app.get_command))
        for name in THREAD_VARIABLES:  # which `--threads` sets, and which are then as before
            patch.setenv(name, os.environ.get(name, "1"))
        yield


@pytest.fixture
def pa():
    pytest.importorskip("pyarrow.parquet")
    return pytest.importorskip("pyarrow")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Be in a new folder, so that names are short."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def row_parts(monkeypatch):
    """Let each row be a part of its own."""
    monkeypatch.setattr(parts, "BYTES", 1)


def run(command, *arguments):
    return app.run([command, *FLAGS[command], "--threads", "1", *map(str, arguments)])


@pytest.fixture
def refused(capfd):
    """Run a command that is refused: an exit code and one line, which is returned."""

    def refused(*arguments, code=2):
        capfd.readouterr()
        assert run(*arguments) == code
        out, errors = capfd.readouterr()
        assert out == ""
        (line,) = errors.splitlines()
        assert line.startswith("gpt-cli: error: ")
        return line

    return refused


NO_MODEL = ["-m", "no/model", "--offline"]  # exit code 3 where it is looked for


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write_jsonl(file, rows):
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(jsonl(rows))
    return file


def write_parquet(file, rows, **options):
    import pyarrow
    from pyarrow.parquet import write_table

    file.parent.mkdir(exist_ok=True)
    write_table(pyarrow.Table.from_pylist(rows), file, **options)
    return file


def told(value):
    """A record less its times, and less what is null, which JSON Lines leave out."""
    if isinstance(value, list):
        return [told(item) for item in value]
    if not isinstance(value, dict):
        return value
    known = {key: told(item) for key, item in value.items() if key != "timing"}
    return {key: item for key, item in known.items() if item is not None}


def records_of(output):
    """The records in a file, or in the files of a folder, of any kind."""
    fs, path = fsspec.core.url_to_fs(str(output))
    found = []
    files = sorted(fs.ls(path, detail=False)) if fs.isdir(path) else [path]
    for file in files:
        if file.rpartition("/")[2].startswith((".", "_")):
            continue
        with fs.open(file, "rb") as stream:
            if file.endswith(".parquet"):
                from pyarrow.parquet import read_table

                found += read_table(stream).to_pylist()
            else:
                found += [json.loads(line) for line in stream]
    return told(found)


def close(records):
    """Scores, of which rows that are computed beside others change the last digits."""
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
    """The records of TEXTS in a file of JSON Lines, for each command."""
    folder = tmp_path_factory.mktemp("expected")
    found = {}
    for command, field in FIELD.items():
        rows = [{"id": 100 + place, field: text} for place, text in enumerate(TEXTS)]
        file = write_jsonl(folder / f"{command}.jsonl", rows)
        output = folder / f"{command}.out"
        assert run(command, file, "-o", output, "-q") == 0
        found[command] = records_of(output)
        assert len(found[command]) == len(TEXTS)
    return found


# --- the same records ----------------------------------------------------------------------------


def write_inputs(folder, command):
    """The rows in all the ways in which they can be given."""
    rows = [{"id": 100 + place, FIELD[command]: text} for place, text in enumerate(TEXTS)]
    write_parquet(folder / "in.parquet", rows, row_group_size=6)
    write_jsonl(folder / "in.jsonl", rows)
    for place, (start, end) in enumerate([(0, 7), (7, 8), (8, 20)]):
        write_jsonl(folder / "lines" / f"{place}", rows[start:end])
        write_parquet(folder / "tables" / f"{place}.parquet", rows[start:end])
    (folder / "lines" / "_SUCCESS").touch()
    (folder / "tables" / "notes.txt").touch()


INPUTS = ["in.parquet", "in.jsonl", "lines", "lines/", "tables/*.parquet"]
OUTPUTS = {  # and what is there then
    "out": ["out"],
    "out.parquet": ["out.parquet"],
    "out/": ["_job.json", "part-000000000000", "part-000000000008", "part-000000000016"],
    "out/*.parquet": ["_job.json", *(f"part-{row:012}.parquet" for row in (0, 8, 16))],
    "out/*.jsonl": ["_job.json", *(f"part-{row:012}.jsonl" for row in (0, 8, 16))],
    "file://{}/out.jsonl": ["out.jsonl"],
    "file://{}/out.parquet": ["out.parquet"],
    "file://{}/out/": ["_job.json", "part-000000000000", "part-000000000008", "part-000000000016"],
}


@pytest.fixture
def parts_of_8(monkeypatch):
    """Let a part end with each eighth row."""
    write = Folder.write

    def counted(self, line):
        write(self, line)
        if len(self._part) == 8:
            self._write_part()

    monkeypatch.setattr(Folder, "write", counted)


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("command", FIELD)
def test_the_records_are_the_same_wherever_they_come_from_and_go(
    command, output, expected, here, pa, parts_of_8
):
    write_inputs(here, command)
    for number, name in enumerate(INPUTS):
        folder = here / str(number)
        folder.mkdir()
        place = output.format(folder) if "://" in output else f"{number}/{output}"
        assert run(command, name, "-o", place, "-q") == 0
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
            records = [record | {"id": int(record["id"])} for record in records]
        assert records == expected[command]


@pytest.mark.parametrize("output", ["out.jsonl", "out.parquet", "out/", "out/*.parquet"])
def test_records_go_to_another_file_system(output, expected, here, pa, memory, row_parts):
    write_inputs(here, "score")
    memory.put(str(here / "tables" / "0.parquet"), "/in/0.parquet")
    memory.put(str(here / "tables" / "2.parquet"), "/in/2.parquet")
    assert run("score", "memory://in", "-o", f"memory://bucket/{output}", "-q") == 0
    records = records_of(f"memory://bucket/{output.partition('*')[0]}")
    rows = expected["score"][:7] + expected["score"][8:]
    assert records == close(row | {"index": index} for index, row in enumerate(rows))
    assert not [file for file in memory.find("/") if "/." in file or ".parts" in file]


@pytest.mark.parametrize("command", FIELD)
def test_lines_at_an_address_are_read(command, expected, here, memory):
    write_inputs(here, command)
    memory.put(str(here / "in.jsonl"), "/bucket/in.jsonl")
    assert run(command, "memory://bucket/in.jsonl", "-o", "out.jsonl", "-q") == 0
    assert records_of("out.jsonl") == expected[command]


def test_a_folder_is_made_only_where_its_own_place_is_there(here, pa, memory, capfd):
    write_jsonl(here / "in.jsonl", [{"text": "Once"}])
    for output in ("no/out", "no/out.parquet", "no/out/", "no/out/*.jsonl"):
        assert run("score", "in.jsonl", "-o", output, "-q") == 2
        assert "there is no folder no\n" in capfd.readouterr().err
    for output in ("no/out/", "no/out.jsonl", "no/", "no/*.parquet"):
        output = f"memory://{output}"
        assert run("score", "in.jsonl", "-o", output, "-q") == 5
        told = capfd.readouterr().err
        assert told.startswith(
            f"gpt-cli: error: cannot write {output.partition('/*')[0].rstrip('/')}"
        )
        assert "No such file or directory" in told
    assert names(here) == ["in.jsonl"]
    assert not memory.exists("/no")


def test_records_with_log_probabilities_fit_in_a_table(here, pa):
    for command, flags in (("batch", ["--logprobs", "2"]), ("score", ["--tokens"])):
        file = write_jsonl(here / f"{command}.in", [{FIELD[command]: "Once 🦊"}])
        for output in (f"{command}.parquet", f"{command}.jsonl"):
            assert run(command, file, "-o", output, "-q", *flags) == 0
        (record,) = records_of(f"{command}.parquet")
        assert [record] == records_of(f"{command}.jsonl")
        assert record["logprobs"][-1]["bytes"]


def test_rows_of_a_table_may_have_options_of_their_own(here, pa):
    rows = [
        {"prompt": "Once", "max_tokens": 2, "temperature": 0.0, "seed": 5, "stop": ["x"]},
        {"prompt": "Once", "max_tokens": None, "temperature": None, "seed": None, "stop": None},
        {"prompt": "Once", "max_tokens": 3, "temperature": 1.5, "seed": 7, "stop": ["e", "a"]},
    ]
    write_parquet(here / "in.parquet", rows)
    write_jsonl(here / "in.jsonl", rows)
    for name in ("in.parquet", "in.jsonl"):
        assert run("batch", name, "-o", f"{name}.out", "-q") == 0
    records = records_of("in.parquet.out")
    assert records == records_of("in.jsonl.out")
    assert [record["seed"] for record in records] == [5, 1, 7]
    assert records[0]["usage"]["completion_tokens"] == 2


def test_whole_ids_of_tables_are_whole_in_tables(here, pa):
    write_parquet(here / "in.parquet", [{"id": 2**62, "text": "Once"}, {"text": "One"}])
    huge = {"id": pa.array([2**64 - 1], pa.uint64()), "text": ["Once"]}
    pa.parquet.write_table(pa.table(huge), here / "huge.parquet")
    assert run("score", "in.parquet", "-o", "out.parquet", "-q") == 0
    assert run("score", "huge.parquet", "-o", "huge-out.parquet", "-q") == 0
    assert [record.get("id") for record in records_of("out.parquet")] == [2**62, None]
    assert [record["id"] for record in records_of("huge-out.parquet")] == [str(2**64 - 1)]


@pytest.mark.parametrize("output", ["out.parquet", "out/", "out/*.parquet", "file://{}/out.jsonl"])
def test_no_rows_are_no_records(output, here, pa):
    (here / "in").touch()
    output = output.format(here)
    assert run("score", "in", "-o", output, "-q") == 0
    assert records_of(output.partition("*")[0]) == []


def test_a_pipe_can_go_into_parts(here, row_parts, monkeypatch):
    (here / "in").write_bytes(b"Once\nOne\n")
    with (here / "in").open() as stream:
        monkeypatch.setattr("sys.stdin", stream)
        assert run("batch", "-o", "out/", "-q") == 0
    assert [record["prompt"] for record in records_of("out")] == ["Once", "One"]


# --- when parts are written ----------------------------------------------------------------------


@pytest.mark.parametrize(("name", "value"), [("BYTES", 1), ("SECONDS", 0)])
def test_a_part_is_written_when_it_is_large_or_late(name, value, here, monkeypatch):
    (here / "in").write_bytes(b"Once\nOne\nThe\n")
    assert run("score", "in", "-o", "one/", "-q") == 0
    monkeypatch.setattr(parts, name, value)
    assert run("score", "in", "-o", "many/", "-q") == 0
    assert names(here / "one") == ["_job.json", "part-000000000000.jsonl"]
    assert names(here / "many") == ["_job.json", *(f"part-{i:012}.jsonl" for i in range(3))]
    assert records_of("many") == records_of("one")


def test_what_was_done_before_an_interrupt_is_kept(here, monkeypatch):
    (here / "in").write_bytes(b"Once\nOne\nThe\n")
    assert run("score", "in", "-o", "whole/", "-q") == 0
    write = Folder.write

    def interrupted(self, line):
        write(self, line)
        if len(self._part) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "write", interrupted)
        assert run("score", "in", "-o", "out/", "-q") == 130
    assert len(records_of("out")) == 2
    assert run("score", "in", "-o", "out/", "-q", "--resume") == 0
    assert records_of("out") == close(records_of("whole"))


def test_an_interrupt_before_the_first_record_leaves_nothing(here, monkeypatch, pa):
    (here / "in").write_bytes(b"Once\n")

    def interrupted(self, line):
        raise KeyboardInterrupt

    monkeypatch.setattr(Folder, "write", interrupted)
    for output in ("out/", "out.parquet", f"file://{here}/out.jsonl"):
        assert run("score", "in", "-o", output, "-q") == 130
    assert names(here) == ["in"]


# --- rows that fail ------------------------------------------------------------------------------


@pytest.mark.parametrize("output", ["out.jsonl", "out.parquet", "out/"])
def test_an_error_says_its_file_and_line(output, here, pa, capfd):
    write_jsonl(here / "in" / "a", [{"prompt": "Once"}])
    (here / "in" / "b").write_bytes(b'\n{"id": 7, "prompt": "One"}\n\n{"id": 8}\nno JSON')
    assert run("batch", "in", "-o", output) == 6
    good, other, no_prompt, no_json = records_of(output)
    assert "error" not in good
    assert ("file" in other, "line" in other) == (False, False)
    for record, index, line, id in ((no_prompt, 2, 4, 8), (no_json, 3, 5, None)):
        message = record["error"].pop("message")
        assert message
        code = {"code": "invalid_input"}
        found = {"index": index, "file": "in/b", "line": line, "error": code}
        id = id if id is None or not output.endswith("parquet") else str(id)
        assert record == found | ({} if id is None else {"id": id})
    progress, error = capfd.readouterr().err.splitlines()
    assert progress.startswith("gpt-cli: 4 of 4 rows (2 failed), ")
    assert error == "gpt-cli: error: 2 of 4 rows failed: their records say why"


def test_the_line_of_a_row_of_a_table_is_its_number(here, pa):
    rows = [{"prompt": "Once", "max_tokens": tokens} for tokens in (1, 1, 1, 0, 1, -1)]
    write_parquet(here / "in.parquet", rows, row_group_size=2)
    assert run("batch", "in.parquet", "-o", "out.jsonl", "-q") == 6
    failed = [record for record in records_of("out.jsonl") if "error" in record]
    assert [(record["index"], record["line"]) for record in failed] == [(3, 4), (5, 6)]
    assert not any("file" in record for record in failed)


def test_columns_that_are_not_read_are_noted(here, pa, capfd):
    write_parquet(here / "in.parquet", [{"title": "x", "text": "Once", "lang": "en"}])
    assert run("score", "in.parquet", "-o", "a", "-v") == 0
    note, progress = capfd.readouterr().err.splitlines()
    assert note == "gpt-cli: note: columns that are not read: title, lang"
    assert progress.startswith("gpt-cli: 1 of 1 row, ")
    assert run("score", "in.parquet", "-o", "b", "-q") == 0
    assert capfd.readouterr().err == ""


# --- going on ------------------------------------------------------------------------------------


@pytest.fixture
def job(here, row_parts, capfd):
    """A folder of an input of six rows, of which one fails, and of a finished output."""
    rows = [{"id": place, "prompt": text} for place, text in enumerate(TEXTS[:5])]
    write_jsonl(here / "in" / "a", [*rows[:2], {"id": "bad"}])
    write_jsonl(here / "in" / "b", rows[2:])
    assert run("batch", "in", "-o", "out/", "-q") == 6
    assert len(names(here / "out")) == 7
    return here


def resume(*flags, input="in", output="out/"):
    return run("batch", input, "-o", output, "--resume", *flags)


@pytest.mark.parametrize("kept", range(7))
def test_resume_does_what_is_missing_at_the_end(job, kept, capfd):
    whole = records_of("out")
    before = {}
    for name in names(job / "out")[1:]:
        file = job / "out" / name
        if len(before) < kept:
            before[name] = file.read_bytes()
        else:
            file.unlink()
    capfd.readouterr()
    assert resume() == 6
    assert records_of("out") == whole
    assert before.items() <= snapshot(job / "out").items()
    *_, error = capfd.readouterr().err.splitlines()
    assert error == "gpt-cli: error: 1 of 6 rows failed: their records say why"


def test_resume_changes_nothing_of_what_is_finished(job):
    before = snapshot(job)
    assert resume("-q") == 6
    assert snapshot(job) == before


def test_resume_begins_where_there_is_nothing(job):
    assert resume("-q", output="other/") == 6
    assert records_of("other") == records_of("out")


def test_progress_counts_what_was_done_earlier(job, capfd):
    for name in names(job / "out")[4:]:
        (job / "out" / name).unlink()
    capfd.readouterr()
    assert resume() == 6
    assert capfd.readouterr().err.startswith("gpt-cli: 6 of 6 rows (1 failed), 6 tokens, ")


def test_resume_goes_on_at_an_address(job, memory):
    assert resume("-q", output="memory://bucket/out/") == 6
    whole = records_of("memory://bucket/out")
    assert whole == records_of("out")
    memory.rm_file("/bucket/out/part-000000000005.jsonl")
    memory.rm_file("/bucket/out/part-000000000004.jsonl")
    before = memory.cat(memory.find("/bucket/out"))
    assert len(before) == 5
    assert resume("-q", output="memory://bucket/out") == 6
    assert before.items() <= memory.cat(memory.find("/bucket/out")).items()
    assert records_of("memory://bucket/out") == whole


@posix
@pytest.mark.parametrize("output", ["out/", "out/*.parquet"])
def test_files_whose_names_are_no_unicode_can_be_resumed(output, here, pa):
    try:
        write_jsonl(here / "in" / "b\udcff", [{"other": 1}])
    except OSError:
        pytest.skip("the file system takes only Unicode")
    write_jsonl(here / "in" / "a", [{"text": "Once"}])
    for _ in range(2):
        assert run("score", "in", "-o", output, "-q", "--resume") == 6
        assert len(names(here / "out")) == 2


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_one_file_is_made_of_parts_that_can_be_resumed(ending, job, pa, monkeypatch):
    output = f"file://{job}/one.{ending}"
    assert resume("-q", output=output) == 6
    whole = records_of(f"one.{ending}")
    (job / f"one.{ending}").unlink()
    write, rows = Folder.write, []

    def interrupted(self, line):
        write(self, line)
        rows.append(line)
        if len(rows) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(Folder, "write", interrupted)
    assert resume("-q", output=output) == 130
    assert names(job) == ["in", f"one.{ending}.parts", "out"]
    assert len(names(job / f"one.{ending}.parts")) == 5
    assert resume("-q", output=output) == 6
    assert len(rows) == 6
    assert records_of(f"one.{ending}") == whole
    assert names(job) == ["in", f"one.{ending}", "out"]


def test_a_file_of_lines_that_was_made_of_a_table_can_be_resumed(here, pa):
    rows = [{"id": place + 0.0, "prompt": text} for place, text in enumerate(TEXTS[:6])]
    write_parquet(here / "in.parquet", rows, row_group_size=4)
    assert run("batch", "in.parquet", "-o", "out", "-q") == 0
    whole = records_of("out")
    kept = (here / "out").read_bytes().splitlines(keepends=True)[:2]
    (here / "out").write_bytes(b"".join(kept))
    assert run("batch", "in.parquet", "-o", "out", "-q", "--resume") == 0
    assert records_of("out") == whole


CHANGES = {
    "a longer file": lambda file: file.write_bytes(file.read_bytes() + b'{"prompt": "x"}\n'),
    "a shorter file": lambda file: file.write_bytes(file.read_bytes()[:-20]),
    "another file": lambda file: write_jsonl(file.parent / "c", [{"prompt": "Once"}]),
    "a file less": lambda file: file.unlink(),
    "a file of another name": lambda file: file.rename(file.parent / "c"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_resume_refuses_another_input(name, job, refused):
    CHANGES[name](job / "in" / "b")
    (job / "out" / "part-000000000005.jsonl").unlink()
    before = snapshot(job)
    assert "out was made from another input: name another" in refused(
        "batch", "in", "-o", "out/", "--resume"
    )
    assert snapshot(job) == before


def test_resume_refuses_an_input_of_the_same_size(job, refused):
    file = job / "in" / "b"
    file.write_bytes(file.read_bytes().replace(b"\n", b" ", 1))
    before = snapshot(job)
    assert "out was made from another input: name another" in refused(
        "batch", "in", "-o", "out/", "--resume"
    )
    assert snapshot(job) == before


OTHER_FLAGS = {
    "max_tokens": ["-n", "5"],
    "temperature": ["--temperature", "0.5"],
    "stop": ["--stop", "x"],
    "seed": ["-s", "2"],
    "logprobs": ["--logprobs", "0"],
    "overflow": ["--overflow", "shift"],
    "dtype": ["--dtype", "int8"],
    "revision": ["--revision", "v1"],
    "model": ["-m", "other"],
}


@pytest.mark.parametrize("name", OTHER_FLAGS)
def test_resume_refuses_other_flags(name, job, refused):
    (job / "out" / "part-000000000005.jsonl").unlink()
    before = snapshot(job)
    line = refused("batch", "in", "-o", "out/", "--resume", *OTHER_FLAGS[name])
    assert f"out was made with {name} " in line
    assert snapshot(job) == before


def test_resume_refuses_records_of_another_command(job, refused):
    before = snapshot(job)
    line = refused("score", "in", "-o", "out/", "--resume")
    assert 'out was made with task "generation", not "scoring"' in line
    assert snapshot(job) == before


def test_resume_takes_other_flags_that_change_no_record(job):
    (job / "out" / "part-000000000005.jsonl").unlink()
    assert resume("--batch-size", "1", "--device", "cpu", "-q") == 6
    assert len(names(job / "out")) == 7


@pytest.mark.parametrize("output", ["out/", "out/*.parquet", "file://{}/out.parquet"])
def test_a_drawn_seed_is_known_from_the_job(output, here, pa, monkeypatch):
    output = output.format(here)
    write_jsonl(here / "in", [{"prompt": "Once"}] * 6)
    monkeypatch.setattr(parts, "BYTES", 1)
    unseeded = ["batch", "in", "-n", "6", "-q"]
    write, left = Folder.write, 3

    def interrupted(self, line):
        nonlocal left
        write(self, line)
        left -= 1
        if not left:
            raise KeyboardInterrupt

    monkeypatch.setattr(Folder, "write", interrupted)
    assert app.run([*unseeded, "-o", output]) == 130
    assert app.run([*unseeded, "-o", output, "--resume"]) == 0
    records = records_of(output.partition("*")[0])
    (seed,) = {record["seed"] for record in records}
    assert app.run([*unseeded, "-o", "one", "-s", str(seed)]) == 0
    assert records == records_of("one")


def test_the_seed_of_the_job_may_be_given_again(job):
    (job / "out" / "part-000000000005.jsonl").unlink()
    assert json.loads((job / "out" / "_job.json").read_bytes())["seed"] == 1
    assert resume("-s", "1", "-q") == 6
    assert len(names(job / "out")) == 7


# Parts after each row, so that there is something to kill.
IN_PARTS = (
    "from gpt_cli.cli import app; from gpt_cli.jobs import parts; parts.SECONDS = 0; app.main()"
)


@posix
@pytest.mark.parametrize("output", ["out/", "out.parquet"])
def test_after_a_kill_no_row_is_lost_and_none_is_there_twice(output, here, pa):
    texts = [f"{'Once ' * (i % 5)}{i}" for i in range(400)]
    write_jsonl(here / "in", [{"prompt": text} for text in texts])
    flags = ["batch", "in", "-n", "4", "-q"]
    folder = here / ("out" if output == "out/" else "out.parquet.parts")
    command = [*COMMAND[:2], "-c", IN_PARTS, *flags, "-o", output, "--batch-size", "1"]
    end = time.monotonic() + 60
    with subprocess.Popen(command) as process:
        while not (folder.exists() and len(names(folder)) > 4):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    before = {name: (folder / name).read_bytes() for name in names(folder) if name[0] != "."}
    assert 2 < len(before) < 400  # one of those that were seen may be hidden: not yet whole
    assert app.run([*flags, "-o", output, "--resume"]) == 0
    if output == "out/":
        assert before.items() <= snapshot(folder).items()
    else:
        assert names(here) == ["in", "out.parquet"]
    records = records_of(output)
    assert [record["prompt"] for record in records] == texts
    seed = str(records[0]["seed"])
    assert app.run([*flags, "-o", "one", "-s", seed]) == 0
    assert records == records_of("one")


# --- outputs that are refused --------------------------------------------------------------------


def test_a_folder_of_an_earlier_run_is_refused_without_resume(job, refused, pa):
    before = snapshot(job)
    for output in ("out/", "out", "out/*.parquet", f"file://{job}/out"):
        line = refused("batch", "in", "-o", output)
        assert "out exists: continue it with --resume, or name another --output" in line
    assert snapshot(job) == before


@pytest.mark.parametrize("output", ["out.parquet", "file://{}/out.parquet", "file://{}/out.jsonl"])
def test_a_file_that_is_there_is_refused_or_whole(output, here, refused, capfd, pa):
    (here / "in").write_bytes(b"Once\n")
    output = output.format(here)
    file = here / output.rpartition("/")[2]
    file.write_bytes(b"mine")
    assert f"{output} exists: name another" in refused("score", "in", "-o", output)
    assert (
        run("score", "in", "-o", output, "--resume", "-v") == 0
    )  # as a script does until it is done
    told = "is complete; its content was not checked"
    assert capfd.readouterr().err == f"gpt-cli: note: {output} {told}\n"
    assert file.read_bytes() == b"mine"
    assert names(here) == sorted(["in", file.name])


def test_parts_of_an_earlier_run_beside_a_file_are_refused_without_resume(here, refused, pa):
    (here / "in").write_bytes(b"Once\n")
    (here / "out.parquet.parts").mkdir()
    (here / "out.parquet.parts" / "_job.json").write_bytes(b"{}")
    assert "out.parquet.parts exists: continue it with --resume" in refused(
        "score", "in", "-o", "out.parquet"
    )


@pytest.mark.parametrize("flags", [[], ["--resume"]])
@pytest.mark.parametrize("foreign", ["notes.txt", "part-000000000000.jsonl", "folder/x"])
def test_a_folder_of_something_else_is_refused(foreign, flags, here, refused):
    (here / "in").write_bytes(b"Once\n")
    (here / "out" / foreign).parent.mkdir(parents=True)
    (here / "out" / foreign).write_bytes(b"mine")
    before = snapshot(here)
    assert "out has other files" in refused("score", "in", "-o", "out/", *flags)
    assert snapshot(here) == before


def test_an_empty_folder_is_taken_and_stays_when_nothing_can_begin(here, refused):
    (here / "in").write_bytes(b"Once\n")
    (here / "out").mkdir()
    refused("score", "in", "-o", "out", *NO_MODEL, code=3)
    assert names(here / "out") == []
    assert run("score", "in", "-o", "out", "-q") == 0
    assert len(records_of("out")) == 1


@pytest.mark.parametrize("name", ["notes.txt", "part-000000000007.jsonl", "part-1.parquet"])
def test_a_file_of_something_else_among_parts_is_refused(name, job, refused):
    (job / "out" / name).write_bytes(b"mine")
    before = snapshot(job)
    line = refused("batch", "in", "-o", "out/", "--resume")
    assert f"out/{name} is not the part that begins with row" in line
    assert snapshot(job) == before


def test_a_part_is_not_continued_as_if_it_were_the_whole(job, refused):
    before = snapshot(job)
    for name in ("out/part-000000000003.jsonl", f"file://{job}/out/part-000000000003.jsonl"):
        line = refused("batch", "in", "-o", name, "--resume")
        pattern = name.replace("part-000000000003", "*")
        assert line.endswith(f"{name} is a part of the output {pattern}: put --output in quotes")
    assert snapshot(job) == before


def test_a_gap_between_parts_is_refused(job, refused):
    (job / "out" / "part-000000000002.jsonl").unlink()
    before = snapshot(job)
    line = refused("batch", "in", "-o", "out/", "--resume")
    assert "part-000000000003.jsonl is not the part that begins with row 2" in line
    assert snapshot(job) == before


def test_parts_of_another_kind_are_refused(job, refused, pa):
    before = snapshot(job)
    line = refused("batch", "in", "-o", "out/*.parquet", "--resume")
    assert "part-000000000000.jsonl is not the part that begins with row 0" in line
    assert snapshot(job) == before


@pytest.mark.parametrize("data", [b"{", b"7", b"\xff", b"null"])
def test_a_job_that_cannot_be_read_is_refused(data, job, refused):
    (job / "out" / "_job.json").write_bytes(data)
    line = refused("batch", "in", "-o", "out/", "--resume")
    assert line == "gpt-cli: error: out/_job.json is not a manifest: name another --output"


@pytest.mark.parametrize("data", [b"notes\n", b"7\n", b"\xff", b"[" * 100_000])
def test_a_part_that_holds_no_records_is_refused(data, job, refused):
    (job / "out" / "part-000000000002.jsonl").write_bytes(data)
    line = refused("batch", "in", "-o", "out/", "--resume")
    assert "out/part-000000000002.jsonl has no records of this command" in line


def test_a_table_that_holds_no_records_is_refused(here, pa, refused):
    (here / "in").write_bytes(b"Once\n")
    assert run("score", "in", "-o", "out/*.parquet", "-q") == 0
    part = here / "out" / "part-000000000000.parquet"
    for damage in (b"", b"notes" * 9, part.read_bytes()[:-9]):
        part.write_bytes(damage)
        line = refused("score", "in", "-o", "out/*.parquet", "--resume")
        assert "part-000000000000.parquet has no records of this command" in line
    write_parquet(part, [{"text": "x"}])
    refused("score", "in", "-o", "out/*.parquet", "--resume")


@posix
def test_two_runs_do_not_write_one_folder(job, refused):
    about = json.loads((job / "out" / "_job.json").read_bytes())
    before = snapshot(job)
    with Folder("out", ".jsonl", {}, about, resume=True):
        line = refused("batch", "in", "-o", "out/", "--resume", code=5)
        assert line.endswith("out is being written by another run: wait until it ends")
        command = [*COMMAND, "batch", "in", "-o", "out/", "--resume", *FLAGS["batch"]]
        finished = subprocess.run(command, capture_output=True, timeout=60)
        assert finished.returncode == 5, finished.stderr
    assert snapshot(job) == before
    assert resume("-q") == 6


@pytest.mark.parametrize(
    "output", ["out/", "out.parquet", "out/*.parquet", "file://{}/a/out.jsonl"]
)
@pytest.mark.parametrize(("source", "code"), [("in", 3), ("missing", 2)])
def test_what_cannot_begin_leaves_nothing(source, code, output, here, refused, pa):
    (here / "in").write_bytes(b"Once\n")
    refused("batch", source, "-o", output.format(here), *NO_MODEL, code=code)
    assert names(here) == ["in"]


@pytest.mark.parametrize("pattern", ["*/*.txt", "deep/*.txt", "**/*.txt"])
def test_an_output_among_the_files_of_a_pattern_is_refused(pattern, here, refused):
    (here / "deep").mkdir()
    (here / "deep" / "a.txt").write_bytes(b"Once\n")
    line = refused("score", pattern, "-o", "deep/out.txt")
    assert f"deep/out.txt would be among the files of {pattern}" in line


def test_a_full_disk_is_told_and_what_was_written_is_kept(job, refused, monkeypatch):
    for name in names(job / "out")[3:]:
        (job / "out" / name).unlink()
    before = snapshot(job)

    def full(stream, data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(LocalFileOpener, "write", full, raising=False)
        line = refused("batch", "in", "-o", "out/", "--resume", "-q", code=5)
    assert "cannot write out: No space left on device; --resume continues when" in line
    assert snapshot(job) == before
    assert resume("-q") == 6
    assert len(records_of("out")) == 6


# --- flags that do not go together ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("batch", "in --resume"),
        ("batch", "in -o out/*.csv"),
        ("batch", "in -o out/part-*.jsonl"),
        ("batch", "in -o /"),
        ("batch", "in -o s3:///"),
        ("batch", "in -o /*.jsonl"),
        ("batch", "in -o in"),
        ("batch", "in -o nope://out/"),
        ("batch", "in -o missing/out.jsonl"),
        ("batch", "in --format parquet"),
        ("batch", "in --format csv"),
        ("batch", "in --workers 2"),
        ("batch", "in --address auto"),
        ("batch", "in --gpus-per-worker 1"),
        ("batch", "- --format parquet"),
        ("batch", "nope://in"),
        ("batch", "empty"),
        ("batch", "*.none"),
        ("batch", "mixed"),
        ("score", "in --resume"),
        ("score", "in --format lines --resume"),
        ("score", "in --engine ray"),
        ("score", "in --workers 2"),
        ("score", "in --workers 2 -o out"),
        ("score", "in -o out --max-perplexity 9"),
        ("score", "in --format lines --min-perplexity 9"),
        ("score", "empty"),
        ("score", "table.parquet -o out"),
    ],
)
def test_flags_that_do_not_go_together_are_one_line(command, flags, here, refused):
    (here / "in").write_bytes(b"Once\n")
    (here / "empty").mkdir()
    (here / "mixed").mkdir()
    (here / "mixed" / "a.parquet").touch()
    (here / "mixed" / "b.jsonl").touch()
    (here / "table.parquet").write_bytes(b"no table")
    if "table" in flags or "--format parquet" in flags:
        pytest.importorskip("pyarrow")
    before = snapshot(here)
    refused(command, *NO_MODEL, *flags.split())
    assert snapshot(here) == before


def test_resume_of_parts_needs_an_input_that_can_be_read_again(here, refused, monkeypatch):
    (here / "in").write_bytes(b"Once\n")
    for output in ("out/", "out.parquet", "memory://out/"):
        with (here / "in").open() as stream:
            monkeypatch.setattr("sys.stdin", stream)
            line = refused("batch", "-o", output, "--resume", *NO_MODEL)
            assert f"--resume: {output} cannot be resumed with a pipe" in line


def test_an_output_may_be_beside_the_files_of_the_input(here, refused):
    write_jsonl(here / "in" / "a", [{"text": "Once"}])
    assert run("score", "in", "-o", "in/_out", "-q") == 0
    assert run("score", "in/*", "-o", "in/out/", "-q") == 0
    assert run("score", f"{here}/in", "-o", "in/folder/", "-q") == 0
    assert "in/a would be among the files of in" in refused("score", "in", "-o", "in/a")
    for name, output in [
        ("in/*", "in/b.parquet"),
        ("./in/*", "in/b.parquet"),
        ("in/*", here / "in" / "b"),
        ("./in/", "in/b"),
        ("**/a", "in/out/a"),
        (f"file://{here}/in/*", f"file://{here}/in/b"),
    ]:
        assert f"{output} would be among the files of {name}:" in refused(
            "score", name, "-o", output, "--format", "auto"
        )
    assert "in has other files" in refused("score", "in", "-o", "in/")


@pytest.mark.parametrize("name", ["run*/", "run?/out.jsonl", "[1].jsonl", "run*/*.jsonl"])
def test_an_output_at_an_address_is_no_pattern(name, here, refused, memory):
    (here / "in").write_bytes(b"Once\n")
    memory.pipe_file("/bucket/run1/theirs", b"theirs")
    line = refused("score", "in", "-o", f"memory://bucket/{name}", *NO_MODEL)
    assert f"{name}: an address must not contain *, ? or [" in line
    assert memory.find("/bucket") == ["/bucket/run1/theirs"]


@pytest.mark.parametrize("output", ["memory://bucket/out/", "memory://bucket/out.jsonl"])
def test_another_run_that_writes_there_is_noticed(output, here, refused, memory, monkeypatch):
    (here / "in").write_bytes(b"Once\nupon\n")
    put = Folder._put

    def with_others(self, name, data):
        put(self, name, data)
        put(self, "part-000000000001.jsonl", data)

    monkeypatch.setattr(Folder, "_put", with_others)
    assert "has files of another run" in refused("score", "in", "-o", output, "-q")
    assert not memory.exists("/bucket/out.jsonl")


def test_without_pyarrow_tables_are_refused_before_a_model_is_loaded(here, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (here / "in.parquet").touch()
    line = refused("batch", "in.parquet", *NO_MODEL, code=5)
    assert "pip install pyarrow" in line


def test_without_pyarrow_a_table_as_output_is_refused_before_rows_are_computed(
    here, refused, monkeypatch
):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (here / "in").write_bytes(b"Once\n")
    for output in ("out.parquet", "out/*.parquet", "memory://out.parquet"):
        line = refused("batch", "in", "-o", output, *NO_MODEL, code=5)
        assert "pip install pyarrow" in line
    assert names(here) == ["in"]


# --- score as rows -------------------------------------------------------------------------------


def test_score_has_a_record_for_each_row(here, capfd):
    rows = [{"id": "a", "text": "Once upon a time"}, {"id": "b", "text": "x"}, {"other": 1}]
    write_jsonl(here / "in", rows)
    assert run("score", "in", "--format", "auto", "-q") == 6
    out, errors = capfd.readouterr()
    first, short, bad = map(json.loads, out.splitlines())
    assert set(first) == {
        *("index", "id", "text", "model", "tokens", "tokens_scored"),
        *("total_logprob", "perplexity", "bits_per_byte"),
    }
    assert (first["id"], first["text"]) == ("a", "Once upon a time")
    assert short["perplexity"] is None
    assert (bad["index"], bad["line"], bad["error"]["code"]) == (2, 3, "invalid_input")
    assert errors == "gpt-cli: error: 1 of 3 rows failed: their records say why\n"


def test_score_of_rows_is_that_of_a_text(here, capfd):
    (here / "in").write_text("".join(f"{text}\n" for text in TEXTS[:4]), encoding="utf-8")
    assert run("score", "in", "--lines", "--json", "-q") == 0
    alone = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert run("score", "in", "--format", "lines", "-q") == 0
    for line, record in zip(alone, capfd.readouterr().out.splitlines(), strict=True):
        record = json.loads(record)
        shared = record.keys() & line.keys()
        assert {"tokens", "perplexity", "total_logprob", "bits_per_byte"} <= shared
        assert all(record[key] == pytest.approx(line[key]) for key in shared)


def test_score_of_rows_goes_on(here):
    write_jsonl(here / "in", [{"text": text} for text in TEXTS])
    assert run("score", "in", "-o", "out", "-q") == 0
    whole = records_of("out")
    kept = b"".join((here / "out").read_bytes().splitlines(keepends=True)[:7])
    (here / "out").write_bytes(kept + b'{"index": 7, "te')
    assert run("score", "in", "-o", "out", "-q", "--resume") == 0
    assert (here / "out").read_bytes().startswith(kept)
    assert records_of("out") == close(whole)


def test_an_output_of_another_command_is_no_output_of_score(here, refused):
    write_jsonl(here / "in", [{"text": "Once", "prompt": "Once"}])
    (here / "b").write_bytes(jsonl([{"prompt": "Once"}]))
    assert run("batch", "b", "-o", "out", "-q") == 0
    before = (here / "out").read_bytes()
    assert 'out was made with task "generation", not "scoring"' in refused(
        "score", "in", "-o", "out", "--resume"
    )
    assert (here / "out").read_bytes() == before
