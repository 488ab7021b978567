"""The sinks for names of outputs, and the names that are refused."""

import gzip
import json
import os
from io import BytesIO
from pathlib import Path

import pytest

from gpt_cli.errors import InputError
from gpt_cli.jobs import Filtering, Scoring, jsonl, parquet, storage
from gpt_cli.jobs.outputs import open_sink
from gpt_cli.jobs.parts import File, Folder
from gpt_cli.jobs.rows import Source
from gpt_cli.jobs.sinks import JSONLines, Resumed
from gpt_cli.records import ERROR

OTHER = [".xls", ".xlsx", ".arrow", ".feather", ".gz", ".zip", ".zst"]
JOB = {"task": "scoring", "input": [["in", 4, 1]]}


@pytest.fixture(autouse=True)
def inputs(here, memory):
    """Be in a new folder with inputs."""
    Path("in").write_text("one\n")
    for file in ("rows/a.txt", "rows/b.txt", "deep/er/a.txt", "out/x"):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text("one\n")
    memory.pipe_file("/bucket/rows/a", b"one\n")


def open_output(name, *inputs, resume=False, form="lines", task=None):
    task = task or Scoring()
    source = Source(inputs or ["in"], form, task.layout, 4)
    return open_sink(name, source, task, JOB, resume=resume)


def refused(name, *arguments, **options):
    with pytest.raises(InputError) as caught:
        open_output(name, *arguments, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "kind", "folder", "ending"),
    [
        ("new", JSONLines, None, None),
        ("new.txt", JSONLines, None, None),
        ("rows/_new", JSONLines, None, None),
        ("./out/new.jsonl", JSONLines, None, None),
        ("new/", Folder, "new", ".jsonl"),
        ("new//", Folder, "new", ".jsonl"),
        ("new/*.jsonl", Folder, "new", ".jsonl"),
        ("new/*.tsv", Folder, "new", ".tsv"),
        ("new.csv", File, "new.csv.parts", ".csv"),
        ("new.TSV", File, "new.TSV.parts", ".tsv"),
        ("new/*.parquet", Folder, "new", ".parquet"),
        ("deep/er/../new/*.jsonl", Folder, "deep/er/../new", ".jsonl"),
        ("memory://bucket/new/", Folder, "memory://bucket/new", ".jsonl"),
        ("memory://bucket/new/*.jsonl", Folder, "memory://bucket/new", ".jsonl"),
        ("new.parquet", File, "new.parquet.parts", ".parquet"),
        ("memory://bucket/new", File, "memory://bucket/new.parts", ".jsonl"),
        ("memory://bucket/X/", Folder, "memory://bucket/X", ".jsonl"),
        ("memory://bucket/new.csv", File, "memory://bucket/new.csv.parts", ".csv"),
        ("memory://bucket/new.parquet", File, "memory://bucket/new.parquet.parts", ".parquet"),
    ],
)
def test_the_name_chooses_the_sink(name, kind, folder, ending, here):
    pytest.importorskip("pyarrow")
    before = sorted(here.rglob("*"))
    sink = open_output(name)
    assert type(sink) is kind
    assert (getattr(sink, "name", None), getattr(sink, "_ending", None)) == (folder, ending)
    assert sorted(here.rglob("*")) == before


def test_records_of_tables_are_tables():
    table = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    for ids, kind in (([1], "int64"), (["a"], "string")):
        table.write_table(pyarrow.table({"id": ids, "text": ["one"]}), "in.parquet")
        sink = open_output("new/", "in.parquet", form="auto")
        assert (sink._ending, sink._schema["id"]) == (".parquet", kind)
    assert list(sink._schema) == [
        *("index", "id", "text", "model", "adapter", "tokens", "tokens_scored"),
        *("total_logprob", "perplexity", "bits_per_byte", "file", "line", "error"),
    ]
    assert open_output("new/*.jsonl", "in.parquet", form="auto")._ending == ".jsonl"


@pytest.mark.parametrize("name", ["new", "new/"])
def test_parts_have_a_manifest(name, memory):
    with open_output(f"memory://bucket/{name}") as sink:
        sink.resume()
    assert json.loads(memory.cat_file(f"{sink.name}/_job.json")) == JOB


def test_lines_are_compared_by_the_first_field():
    with open_output("new") as sink:
        sink.resume()
        sink.write({"index": 0, "text": "one"})
    assert json.loads(Path(".new.job.json").read_text()) == {"task": "scoring"}
    with open_output("new", resume=True) as sink:
        assert sink.resume().rows == 1
    Path("folder").mkdir()
    assert type(open_output("folder")) is Folder


@pytest.mark.parametrize(
    ("name", "says"),
    [
        *((f"new{ending}", f"output new{ending}: records are JSON Lines") for ending in OTHER),
        ("*.jsonl", ". has other files"),
        ("new.JSONL.GZ", "output new.JSONL.GZ: records are JSON Lines"),
        ("in", "in is the input: name another output"),
        ("./in", "in is the input: name another output"),
        ("out/x", "resume is not set, and out/x exists: set it to continue, or name another"),
        ("", "output is empty: name a file"),
        ("pipe", "pipe is not a file: name another output"),
        ("new/*", "output new/*: name a folder as FOLDER/*.jsonl or FOLDER/*.parquet"),
        ("*.xls", "output *.xls: name a folder as FOLDER/*.jsonl or FOLDER/*.parquet"),
        ("new/a*.jsonl", "output new/a*.jsonl: name a folder as FOLDER/*.jsonl or FOLDER/*.p"),
        ("/", "output / is not a folder that can hold records: name another output"),
        ("memory://", "output memory:// is not a folder that can hold records"),
        ("memory:///*.jsonl", "output memory:///*.jsonl is not a folder that can hold records"),
        ("memory://b*/c", "output memory://b*/c: an address must not contain *, ? or ["),
        ("memory://b?/c/", "output memory://b?/c/: an address must not contain *, ? or ["),
        ("memory://[b/*.jsonl", "output memory://[b/*.jsonl: an address must not contain"),
        ("no/new", "cannot write no/new: there is no folder no"),
        ("no/new/", "cannot write no/new: there is no folder no"),
        ("no/er/*.jsonl", "cannot write no/er: there is no folder no"),
        ("out", "out has other files: name another output"),
    ],
)
def test_an_unsuitable_name_is_refused(name, says):
    if name == "pipe":
        if not hasattr(os, "mkfifo"):
            pytest.skip("needs pipes with names")
        os.mkfifo("pipe")
    assert refused(name).startswith(says)


@pytest.mark.parametrize("name", ["new.parquet", "new/", "memory://bucket/new"])
def test_parts_cannot_be_resumed_with_a_pipe(name):
    pytest.importorskip("pyarrow")
    message = f"resume needs a file as input, not a pipe, for {name}"
    assert refused(name, "-", resume=True) == message
    assert open_output(name, "-")
    assert type(open_output("new.jsonl", "-", resume=True)) is JSONLines


@pytest.mark.parametrize("name", ["new.parquet", "memory://bucket/new.jsonl"])
def test_an_existing_file_is_complete(name):
    pytest.importorskip("pyarrow")
    records = [{"index": 0}, {"index": 1, "error": {"code": "c", "message": "m"}}]
    fs, path = storage.filesystem(name)
    form = parquet.Parquet() if name.endswith(".parquet") else jsonl.Lines()
    with fs.open(path, "wb") as stream:
        part, schema = BytesIO(), {"index": "int64"} | ERROR
        form.write(records, schema, part)
        part.seek(0)
        form.join(lambda: [part], schema, stream, json.dumps(JOB).encode())
    assert open_output(name, resume=True) == Resumed(rows=2, failed=1)
    assert refused(name) == f"{name} exists: name another output"
    fs.pipe_file(path, b"notes")
    message = f"{name} has no records of this command: name another output"
    assert refused(name, resume=True) == message


@pytest.mark.parametrize(
    ("input", "name", "inside"),
    [
        ("rows", "rows/c", True),
        ("rows/", "./rows/c.parquet", True),
        ("rows", "rows/.c", False),
        ("rows", "rows/_c", False),
        ("rows", "c", False),
        ("rows", "deep/c", False),
        ("rows", "rows/c/", False),
        ("rows/*.txt", "rows/c.txt", True),
        ("rows/*.txt", "rows/c.jsonl", False),
        ("rows/*.txt", "deep/c.txt", False),
        ("**/*.txt", "deep/er/c.txt", True),
        ("**/*.txt", "deep/er/c", False),
        ("in", "in2", False),
        ("memory://bucket/rows", "memory://bucket/rows/b", True),
        ("memory://bucket/rows/", "memory://bucket/rows/_b", False),
        ("memory://bucket/rows/", "memory://bucket/rows/b", True),
        ("memory://bucket/rows/*", "memory://bucket/rows/b", True),
        ("memory://bucket/rows/*", "memory://bucket/b", False),
        ("**/*.txt", "rows/new/", False),
    ],
)
def test_an_output_among_the_files_of_the_input_is_refused(input, name, inside):
    pytest.importorskip("pyarrow")
    if inside:
        assert refused(name, "in", input) == among(name, input)
    else:
        assert open_output(name, "in", input)


def among(file, input):
    return f"{file} would be among the files of {input}: name another output"


@pytest.mark.parametrize("name", ["rows/new/", "rows/new", "rows/new/*.jsonl"])
def test_an_output_folder_among_the_files_of_the_input_is_refused(name):
    Path("rows/new").mkdir()
    Path("rows/deep").mkdir()
    Path("rows/deep/a.jsonl").write_text("a")
    for input in ("rows/*/*.jsonl", "**/*.jsonl"):
        assert refused(name, input) == among("rows/new/part-0.jsonl", input)


@pytest.mark.parametrize("base", ["out", "memory://bucket/out"])
def test_a_part_of_an_output_is_refused(base, memory):
    Path("out/_job.json").touch()
    memory.pipe_file("/bucket/out/_job.json", b"")
    part = f"{base}/part-1.jsonl"
    message = f"{part} is a part of the output {base}/*.jsonl: put the output in quotes"
    assert refused(part, resume=True) == message
    assert open_output(f"{base}/new.jsonl")
    assert open_output("part-1.jsonl")


# --- rows that pass a filter ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "input", "says"),
    [
        *((name, "in", None) for name in ("new", "new.txt", "new.log", "memory://bucket/new.txt")),
        ("new.csv", "in", "stay plain lines: name a file with its ending"),
        ("new.jsonl", "-", "stay plain lines"),
        *((f"new{ending}", "rows.csv.gz", None) for ending in (".csv", ".CSV", "")),
        *((f"new.{ending}", "rows.csv.gz", "stay CSV") for ending in ("jsonl", "txt", "parquet")),
        ("new.txt", "text.txt", None),  # whatever its format is
        *(
            (f"new{end}", "in", "are as in the input, uncompressed")
            for end in (".txt.bz2", ".xlsx")
        ),
        *((name, "in", "are in one file: name it") for name in ("new/", "*.jsonl", "rows")),
        ("in", "in", "in exists: name another output"),
        ("rows/c.txt", "rows", "would be among the files of rows"),
        ("no/new", "in", "there is no folder no"),
    ],
)
def test_rows_that_pass_keep_their_format(name, input, says, stdin):
    Path("rows.csv.gz").write_bytes(gzip.compress(b"text\none\n"))
    Path("text.txt").write_bytes(b'{"text": "one"}\n')
    stdin(b"one\n")
    form = "jsonl" if input == "text.txt" else "auto"
    options = {"form": form, "task": Filtering(max_perplexity=9)}
    if says:
        assert says in refused(name, input, **options)
    else:
        assert open_output(name, input, **options).name == f"{name}.parts"
