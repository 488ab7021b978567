"""Sinks of parts: folders, and files that are joined from parts."""

import gzip
import json
import sys
from io import BytesIO
from pathlib import Path

import pytest

from gpt_cli import jobs
from gpt_cli.errors import GPTCLIError, InputError, ResourceError
from gpt_cli.jobs import parquet, parts, storage
from gpt_cli.jobs.jsonl import encode
from gpt_cli.jobs.parts import File, Folder
from gpt_cli.jobs.sinks import Resumed
from gpt_cli.records import ERROR, IDENTITY

SCHEMA = IDENTITY | {"text": "string", "file": "string", "line": "int64"} | ERROR
RECORDS = [{"index": index, "id": "é", "text": "x" * index} for index in range(5)]
TWO = sum(len(encode(record)) for record in RECORDS[:2])
FAILED = {"index": 5, "line": 7, "error": {"code": "c", "message": "m"}}
JOB = {"task": "t", "seed": None}


@pytest.fixture(params=["local", "memory://bucket"])
def base(request, here, memory):
    """A folder for outputs: on this machine, or at an address."""
    if request.param == "local":
        Path("local").mkdir()
    return request.param


@pytest.fixture(params=[".jsonl", ".parquet"])
def ending(request):
    if request.param == ".parquet":
        pytest.importorskip("pyarrow")
    return request.param


def folder(base, ending=".jsonl", *, job=JOB, resume=True):
    return Folder(f"{base}/out", ending, SCHEMA, job, resume=resume)


def file(base, ending=".jsonl", *, job=JOB, resume=True):
    return File(f"{base}/one{ending}", SCHEMA, job, resume=resume)


def write(sink, *records, finish=True):
    """Write records with a sink; return what an earlier run has written."""
    with sink:
        resumed = sink.resume()
        for record in records:
            sink.write(record)
        if finish:
            sink.finish(len(records))
    return resumed


def names(folder):
    fs, path = storage.filesystem(folder)
    return sorted(name.rpartition("/")[2] for name in fs.ls(path, detail=False))


def put(name, data):
    fs, path = storage.filesystem(name)
    fs.pipe_file(path, data)


def texts(name):
    if name.endswith(".parquet"):
        from pyarrow.parquet import read_table

        return read_table(BytesIO(storage.read_bytes(name)))["text"].to_pylist()
    return [json.loads(line).get("text") for line in storage.read_bytes(name).splitlines()]


def refused(function, *arguments, kind=InputError):
    with pytest.raises(kind) as caught:
        function(*arguments)
    return str(caught.value)


# --- folders -------------------------------------------------------------------------------------


def test_a_folder_is_resumed_after_its_last_part(base, ending):
    first = write(folder(base, ending, resume=False), *RECORDS[:2], finish=False)
    assert (first.rows, first.failed) == (0, 0)
    again = write(folder(base, ending), RECORDS[2], FAILED, finish=False)
    assert again == Resumed(2, 0, first.seed)
    assert write(folder(base, ending)) == Resumed(4, 1, first.seed)
    out, parts = f"{base}/out", [f"part-{row:012}{ending}" for row in (0, 2)]
    assert names(out) == ["_job.json", *parts]
    assert [texts(f"{out}/{name}") for name in parts] == [["", "x"], ["xx", None]]
    assert json.loads(storage.read_bytes(f"{out}/_job.json")) == JOB | {"seed": first.seed}


@pytest.mark.parametrize(("name", "value"), [("BYTES", TWO), ("SECONDS", 5.0)])
def test_a_part_ends_when_it_is_large_or_late(name, value, base, monkeypatch):
    now = 0.0
    assert (parts.BYTES, parts.SECONDS) == (64 << 20, 60)
    monkeypatch.setattr(parts.time, "perf_counter", lambda: now)
    monkeypatch.setattr(parts, name, value)
    sink = folder(base)
    with sink:
        sink.resume()
        counts = []
        for record in RECORDS:
            now += 2.5
            sink.write(record)
            counts.append(len(names(f"{base}/out")) - 1)
        sink.finish(5)
    assert counts == [0, 1, 1, 2, 2]
    written = [texts(f"{base}/out/{name}") for name in names(f"{base}/out")[1:]]
    assert written == [["", "x"], ["xx", "xxx"], ["xxxx"]]


def test_records_that_are_not_unicode_are_counted(base):
    write(folder(base), RECORDS[0] | {"text": "\udcff"})
    assert write(folder(base)).rows == 1


def test_a_folder_of_an_earlier_run_needs_resume(base):
    write(folder(base), RECORDS[0])
    message = (
        f"resume is not set, and {base}/out exists: set it to continue, or name another output"
    )
    assert refused(lambda: folder(base, resume=False)) == message
    message = f'task of {base}/out was "t", and is now "u": name another output'
    assert refused(lambda: folder(base, job={"task": "u", "seed": None})) == message


@pytest.mark.parametrize("name", ["notes", "part-000000000000.jsonl"])
def test_a_folder_of_other_files_is_refused(name, base):
    if base == "local":
        Path("local/out").mkdir()
    put(f"{base}/out/{name}", b"mine")
    assert refused(folder, base) == f"{base}/out has other files: name another output"


def test_hidden_files_are_left_out(base):
    write(folder(base), *RECORDS[:2])
    put(f"{base}/out/.hidden", b"mine")
    put(f"{base}/out/_SUCCESS", b"mine")
    assert write(folder(base)).rows == 2


@pytest.mark.parametrize(
    ("name", "row"),
    [("part-000000000003.jsonl", 2), ("part-000000000002.parquet", 2), ("notes.txt", 0)],
)
def test_a_part_of_something_else_is_refused(name, row, base):
    write(folder(base), *RECORDS[:2])
    put(f"{base}/out/{name}", b"{}\n")
    with folder(base) as sink:
        assert refused(sink.resume) == (
            f"{base}/out/{name} is not the part that begins with row {row}: name another output"
        )
    assert storage.read_bytes(f"{base}/out/{name}") == b"{}\n"


@pytest.mark.parametrize(
    "data", [b"[", b"7\n", b"{}\n\n", b"notes" * 9, b"\xff", b"[" * 100_000, "cut", "table"]
)
def test_a_part_that_is_damaged_is_refused(data, ending, tmp_path):
    write(folder(tmp_path, ending), *RECORDS[:2], finish=False)
    write(folder(tmp_path, ending), *RECORDS[2:4])
    part = tmp_path / "out" / f"part-000000000002{ending}"
    if data == "table":  # without the columns of a record
        data = BytesIO()
        parquet.Parquet().write([{"id": "x"}], {"id": "string"}, data)
        data = data.getvalue()
    part.write_bytes(part.read_bytes()[:-9] if data == "cut" else data)
    with folder(tmp_path, ending) as sink:
        said = refused(sink.resume)
    assert said.endswith(f"out/{part.name} has no records of this command: name another output")


@pytest.mark.parametrize(("sink", "name"), [(folder, "out"), (file, "one.jsonl.parts")])
def test_parts_of_another_run_are_noticed_at_the_end(sink, name, base):
    with sink(base) as sink:
        sink.resume()
        sink.write(RECORDS[0])
        put(f"{base}/{name}/part-000000000009.jsonl", b"")
        said = refused(sink.finish, 1)
    assert said == f"{base}/{name} has files of another run: name another output"
    assert not storage.exists(f"{base}/one.jsonl")


def test_another_run_may_have_begun_in_between(base):
    sink = folder(base, resume=False)
    write(folder(base), RECORDS[0])
    with sink:
        assert "exists: set it to continue" in refused(sink.resume)
    sink = folder(base)
    with sink:
        assert sink.resume().rows == 1


@pytest.mark.parametrize("written", [0, 1])
@pytest.mark.parametrize("there", [False, True])
def test_a_new_folder_without_parts_is_removed_after_an_error(there, written, base):
    fs, path = storage.filesystem(f"{base}/out")
    if there:
        fs.mkdir(path)
        write(folder(base), finish=False)
    with pytest.raises(KeyError), folder(base) as sink:
        sink.resume()
        for record in RECORDS[:written]:
            sink.write(record)
        raise KeyError
    assert storage.exists(f"{base}/out") is bool(there or written)
    assert len(texts(f"{base}/out/part-000000000000.jsonl") if written else []) == written


def test_a_folder_without_rows_stays(base):
    write(folder(base))
    assert names(f"{base}/out") == ["_job.json"]


def test_only_one_run_writes_a_folder(base):
    pytest.importorskip("fcntl")
    with folder(base) as sink:
        sink.resume()
        if base == "local":
            message = "local/out is being written by another run: wait until it ends"
            assert refused(folder(base).__enter__, kind=ResourceError) == message
        else:
            with folder(base):  # an address cannot be locked
                pass
    with folder(base):
        pass


def test_no_folder_is_created_above_a_folder(here, memory):
    for name in ("no/out", "memory://no/out", "memory://no"):
        sink = Folder(name, ".jsonl", SCHEMA, JOB, resume=False)
        said = refused(sink.__enter__, kind=ResourceError)
        assert said == f"cannot write {name}: No such file or directory; name another output"
    assert not memory.exists("/no")
    Folder("file", ".jsonl", SCHEMA, JOB, resume=False).__enter__().__exit__(None, None, None)


def full(*arguments, **options):
    raise OSError(28, "full")


def test_a_part_is_complete_or_absent(base, monkeypatch):
    fs, _ = storage.filesystem(base)
    real = type(fs).open

    def open(self, path, mode="rb", **options):
        stream = real(self, path, mode, **options)
        if mode == "wb":
            assert storage.is_hidden(path)
            stream.write = full
        return stream

    with folder(base) as sink:
        sink.resume()
        sink.write(RECORDS[0])
        with monkeypatch.context() as patch:
            patch.setattr(type(fs), "open", open)
            said = refused(sink.finish, 1, kind=ResourceError)
    assert said == f"cannot write {base}/out: full; resume the job when that is fixed"
    assert names(f"{base}/out") == ["_job.json"]


def test_a_manifest_that_cannot_be_written_is_an_error(base, monkeypatch):
    fs, _ = storage.filesystem(base)
    monkeypatch.setattr(fs, "pipe_file", full)
    with folder(base) as sink:
        said = refused(sink.resume, kind=ResourceError)
    assert said == f"cannot write {base}/out: full; resume the job when that is fixed"


# --- one file ------------------------------------------------------------------------------------


def test_a_file_is_joined_from_its_parts(base, ending, monkeypatch):
    monkeypatch.setattr(parts, "BYTES", 60)
    one = f"{base}/one{ending}"
    seed = write(file(base, ending), *RECORDS[:3], finish=False).seed
    assert not storage.exists(one)
    _, *written = names(f"{one}.parts")
    assert len(written) > 1
    assert all(name.endswith(ending) for name in written)
    assert write(file(base, ending), *RECORDS[3:], FAILED) == Resumed(3, 0, seed)
    assert texts(one) == ["", "x", "xx", "xxx", "xxxx", None]
    side = [] if ending == ".parquet" else [f".one{ending}.job.json"]  # which has the manifest
    assert sorted(names(base)) == [*side, f"one{ending}"]
    for resume in (True, False):
        message = refused(lambda resume=resume: file(base, ending, resume=resume))
        assert message == f"{one} exists: name another output"


@pytest.mark.parametrize(
    ("function", "fails", "says"),
    [
        ("open", "wb", "cannot write {}: full; resume the job when that is fixed"),
        ("open", "rb", "cannot read {}.parts: full; name a file that can be read"),
        ("rm", None, "cannot write {}.parts: full; remove it by hand"),
    ],
)
def test_a_file_that_cannot_be_joined_is_an_error(function, fails, says, base, monkeypatch):
    fs, _ = storage.filesystem(base)
    real = getattr(type(fs), function)

    def failing(self, path, *mode, **options):
        if fails in mode or (function == "rm" and path.endswith(".parts")):
            full()
        return real(self, path, *mode, **options)

    write(file(base), RECORDS[0], finish=False)
    with file(base) as sink:
        sink.resume()
        with monkeypatch.context() as patch:
            patch.setattr(type(fs), function, failing)
            said = refused(sink.finish, 1, kind=GPTCLIError)
    assert said == says.format(f"{base}/one.jsonl")
    side = [".one.jsonl.job.json"]  # the manifest
    assert names(base) == [*side, "one.jsonl"] * (function == "rm") + ["one.jsonl.parts"]
    assert "part-000000000000.jsonl" in names(f"{base}/one.jsonl.parts")


def test_parts_of_a_file_need_resume(base):
    write(file(base), RECORDS[0], finish=False)
    message = (
        f"resume is not set, and {base}/one.jsonl.parts exists: set it to continue, "
        "or name another output"
    )
    assert refused(lambda: file(base, resume=False)) == message


def test_a_file_may_have_no_records(base, ending):
    write(file(base, ending))
    assert texts(f"{base}/one{ending}") == []
    assert [name for name in names(base) if not name.startswith(".")] == [f"one{ending}"]


def test_tables_need_pyarrow(base, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    said = refused(lambda: folder(base, ".parquet"), kind=ResourceError)
    assert said.startswith("Parquet needs pyarrow (import of pyarrow halted")
    assert said.endswith("): pip install pyarrow")


# --- rows that pass a filter ---------------------------------------------------------------------


class Short(jobs.Filtering):
    """A filter whose perplexity of a text is its length."""

    def results(self, engine, rows):
        return [row.fields["text"] for row in rows]

    def record(self, engine, row, result):
        return {"tokens_scored": len(result), "perplexity": len(result) or None}


class Stopping(jobs.Observer):
    """An observer that interrupts a job after a number of rows, and receives errors."""

    def __init__(self, rows):
        self.rows = rows
        self.dropped_lines = []

    def dropped(self, record):
        self.dropped_lines.append(record["line"])

    def advance(self, tokens, failed):
        self.rows -= 1
        if self.rows == 0:
            raise KeyboardInterrupt


# The header, the rows, those that pass, and the number of the line that is damaged.
LINES = [
    b"\xef\xbb\xbfOne\r\n",
    b"\n",
    b"too long\n",
    b"\xff\n",
    "Zo\u00eb\u2028\0\n".encode(),
    b"two",
]
FILES = {
    "rows.txt": (b"", LINES, [0, 4, 5], 4),
    "rows.jsonl": (
        b"",
        [b'{"text":  "One", "n": 1}\r\n', b'{"text": "too long"}\n', b"{}\n",
         b'{"text": "\\u0000"}\n'],
        [0, 3],
        3,
    ),
    "rows.csv": (
        b'\xef\xbb\xbf"n","text"\r\n',
        [b"1,One\r\n", b"ragged\n", b'2,"t\nw"\r\n', b"3,too long\n", b"4,four"],
        [0, 2, 4],
        3,
    ),
}  # fmt: skip
FILES["rows.csv.gz"] = FILES["rows.csv"]


@pytest.mark.parametrize("name", FILES)
def test_a_filter_that_is_killed_at_any_row_loses_and_doubles_nothing(name, base, monkeypatch):
    monkeypatch.setattr("gpt_cli.jobs.runner.load", lambda *names, **options: None)
    monkeypatch.setattr(parts, "BYTES", 1)
    header, rows, passing, damaged = FILES[name]
    data = header + b"".join(rows)
    Path(name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    twice = [name, name]
    ends = b"\n" if not rows[-1].endswith(b"\n") else b""
    kept = b"".join(rows[index] for index in passing)
    expected = header + kept + ends + kept
    task = Short(max_perplexity=5)
    complete = jobs.Summary(2 * len(rows), 2, None, 2 * len(passing))
    for stop in range(1, 2 * len(rows) + 1):
        out = f"{base}/{stop}.{name.split('.')[1]}"
        with pytest.raises(KeyboardInterrupt):
            jobs.run(task, twice, out, observer=Stopping(stop))
        assert not storage.exists(out)
        assert len(names(f"{out}.parts")) == 1 + stop
        if stop > 1 and stop % 2:  # the run was killed while it wrote the last part
            fs, path = storage.filesystem(f"{out}.parts/part-{stop - 1:012}.jsonl")
            fs.mv(path, path.replace("/part", "/.part"))
        observer = Stopping(0)
        assert jobs.run(task, twice, out, resume=True, observer=observer) == complete
        assert storage.read_bytes(out) == expected
        assert not storage.exists(f"{out}.parts")
        assert set(observer.dropped_lines) <= {damaged}
        fs, path = storage.filesystem(f"{out}.parts")  # which a run was killed before it removed
        fs.makedirs(path)
        assert jobs.run(task, twice, out, resume=True) == complete
    assert len(observer.dropped_lines) == 0
    jobs.run(task, name, f"{base}/whole", observer=observer)
    assert observer.dropped_lines == [damaged]
