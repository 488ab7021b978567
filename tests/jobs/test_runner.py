"""`gpt_cli.jobs` in Python: custom tasks, sinks and observers."""

import json
import re
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import gpt_cli
from gpt_cli import jobs
from gpt_cli.errors import InputError, ResourceError
from gpt_cli.jobs import runner
from gpt_cli.jobs.layout import Layout
from gpt_cli.jobs.sinks import JSONLines, Manifest

TEXTS = ["one", "two", "", "three four", "five"]  # the third is no row
DONE = [text.upper() for text in TEXTS if text]


class Upper(jobs.Task):
    """Write texts in capital letters; an exclamation mark is refused."""

    fields = ("text",)
    schema = {"upper": "string"}  # noqa: RUF012
    rows_together = 2

    def __init__(self):
        self.seen = []

    def results(self, engine, rows):
        for row in rows:
            self.seen.append(row.index)
            text = row.fields["text"]
            yield InputError("too loud") if "!" in text else {"upper": text.upper()}

    def tokens(self, record):
        return len(record["text"].split())


class Calls(jobs.Observer):
    """An observer that records all calls."""

    def __init__(self):
        self.received = []

    def note(self, message):
        self.received.append(("note", message))

    def start(self, total, done, failed):
        self.received.append(("start", total, done, failed))

    def advance(self, tokens, failed):
        self.received.append(("advance", tokens, failed))

    def interrupted(self):
        self.received.append("interrupted")


class Recorder(jobs.Sink):
    """A sink that records all calls; an earlier run has written rows."""

    def __init__(self, earlier=None, compares=False):
        self.earlier = earlier or jobs.Resumed()
        self.compares = compares
        self.calls = []

    def __enter__(self):
        self.calls.append("enter")
        return self

    def __exit__(self, kind, error, trace):
        self.calls.append(f"exit {kind.__name__}" if kind else "exit")

    def resume(self):
        self.calls.append("resume")
        return self.earlier

    def check(self, row):
        self.calls.append(f"check {row.index}")

    def write(self, record):
        self.calls.append(record.get("upper", "failed"))

    def finish(self, rows):
        self.calls.append(f"finish {rows}")


@pytest.fixture(autouse=True)
def loaded(monkeypatch):
    """Load no model; return the list of the arguments of `load`."""
    calls = []
    monkeypatch.setattr(runner, "load", lambda name, **options: calls.append((name, options)))
    return calls


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Be in a new folder with an input."""
    monkeypatch.chdir(tmp_path)
    Path("in").write_text("".join(f"{text}\n" for text in TEXTS))
    return tmp_path


def uppers(output):
    """Return the results in an output of lines; None for an error."""
    path = Path(output)
    files = sorted(path.glob("part-*")) if path.is_dir() else [path]
    lines = [line for file in files for line in file.read_text().splitlines()]
    return [json.loads(line).get("upper") for line in lines]


def run(output="out", task=None, input="in", **options):
    return jobs.run(task or Upper(), input, output, **options)


@pytest.fixture(params=["out", "out/", "out/*.jsonl", "an address"])
def output(request, here):
    return f"file://{here}/out" if request.param == "an address" else request.param


def test_a_job_loads_its_model(here, case_folder, monkeypatch):
    monkeypatch.setattr(runner, "load", gpt_cli.load)

    class Count(Upper):
        def records(self, engine, rows, first=0):
            for row in rows:
                yield [{"index": row.index, "text": "", "upper": len(engine.encode("the"))}]

    model = str(case_folder("saved"))
    assert run(task=Count(), model=model, threads=1) == jobs.Summary(4, 0)
    assert uppers("out") == [len(gpt_cli.load(model).encode("the"))] * 4


def test_a_custom_task_prints_nothing(output, loaded, capfd):
    summary = run(output, model="some/model", revision="v1", threads=2)
    assert summary == jobs.Summary(rows=4, failed=0)
    assert uppers("out") == DONE
    assert loaded == [("some/model", {"revision": "v1", "threads": 2})]
    assert capfd.readouterr() == ("", "")


def test_the_records_of_a_custom_task_fit_in_a_table(here):
    table = pytest.importorskip("pyarrow.parquet")
    run("out.parquet")
    values = {"index": 2, "id": None, "text": "three four", "upper": "THREE FOUR"}
    values |= dict.fromkeys(["file", "line", "error"])
    assert table.read_table("out.parquet").to_pylist()[2] == values
    calls = Calls()
    assert run("out.parquet", resume=True, observer=calls) == jobs.Summary(4, 0)
    assert calls.received == [("note", "out.parquet is complete; its content was not checked")]
    Path("in").write_text("")
    with pytest.raises(InputError, match="another input, in has changed"):
        run("out.parquet", resume=True)
    calls = Calls()
    jobs.run(Upper(), "out.parquet", "again.parquet", observer=calls)
    names = ["index", "upper", "file", "line", "error"]
    note = f"renamed fields: in the records, {', '.join(f'{name} is row_{name}' for name in names)}"
    assert calls.received[:2] == [("start", 4, 0, 0), ("note", note)]


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet", "file:{}/out.jsonl"])
def test_a_finished_output_is_resumed_with_the_rows_that_failed(name, here):
    pytest.importorskip("pyarrow")
    Path("in").write_text("one\ntwo!\nthree\n")
    for resume in (False, True):
        assert run(name.format(f"//{here}"), resume=resume) == jobs.Summary(3, 1)


def test_a_summary_has_the_reason_for_which_all_rows_failed(here):
    Path("in").write_text("one!\ntwo!\n")
    assert run() == jobs.Summary(2, 2, "too loud")
    Path("out").write_bytes(Path("out").read_bytes().splitlines(keepends=True)[0])
    assert run(resume=True) == jobs.Summary(2, 2)  # that of the first row is not read again


def test_an_observer_receives_each_row(here):
    Path("in").write_text("one\ntwo!\nthree four\n")
    calls = Calls()
    assert run(observer=calls) == jobs.Summary(3, 1)
    advances = [("advance", 1, False), ("advance", 0, True), ("advance", 2, False)]
    assert calls.received == [("start", 3, 0, 0), *advances]
    Path("out").write_bytes(b"".join(Path("out").read_bytes().splitlines(keepends=True)[:2]))
    calls = Calls()
    assert run(observer=calls, resume=True) == jobs.Summary(3, 1)
    assert calls.received == [("start", 3, 2, 1), ("advance", 2, False)]


def test_a_pipe_has_no_total_before_its_end(here, loaded, monkeypatch):
    calls, sink = Calls(), Recorder()
    for output in (sink, "out/"):
        with Path("in").open() as stream:
            monkeypatch.setattr("sys.stdin", stream)
            assert jobs.run(Upper(), "-", output, observer=calls) == jobs.Summary(4, 0)
    assert calls.received[0] == ("start", None, 0, 0)
    assert sink.calls[-2:] == ["finish 4", "exit"]
    assert loaded == [("gpt2", {})] * 2
    assert json.loads(Path("out/_job.json").read_text())["input"] is None


@pytest.mark.parametrize(
    ("done", "compares", "seen", "called"),
    [
        (0, False, [0, 1, 2, 3], DONE),
        (2, False, [2, 3], DONE[2:]),
        (3, True, [3], ["check 0", "check 1", "check 2", *DONE[3:]]),
        (4, True, [], [f"check {row}" for row in range(4)]),
    ],
)
def test_a_custom_sink_receives_the_missing_rows(done, compares, seen, called, here):
    task, sink = Upper(), Recorder(jobs.Resumed(done, 1), compares)
    assert run(sink, task) == jobs.Summary(4, 1)
    assert task.seen == seen
    assert sink.calls == ["enter", "resume", *called, "finish 4", "exit"]


def test_a_task_prepares_its_rows_and_makes_records_of_results(here):
    class Shout(Upper):
        def prepare(self, row):
            row = super().prepare(row)
            if row.fields["text"] == "two":
                raise InputError("not two")
            return replace(row, fields={"text": row.fields["text"] + "?"})

        def results(self, engine, rows):
            return (row.fields["text"].upper() for row in rows)

        def record(self, engine, row, result):
            return {"upper": result, "length": len(row.fields["text"])}

    assert run(task=Shout()) == jobs.Summary(4, 1)
    first, second, *_ = map(json.loads, Path("out").read_text().splitlines())
    assert first == {"index": 0, "text": "one", "upper": "ONE?", "length": 3}
    error = {"code": "invalid_input", "message": "not two"}
    assert second == {"index": 1, "line": 2, "error": error}


def test_a_custom_sink_needs_only_write(here):
    written = []

    class Prompts(jobs.Sink):
        def write(self, record):
            written.append(record["upper"])

    assert run(Prompts()) == jobs.Summary(4, 0)
    assert written == DONE


def test_a_task_takes_the_seed_of_the_sink(here):
    class Seeded(Upper):
        def with_seed(self, seed):
            assert seed == 7
            return Upper()

    sink = Recorder(jobs.Resumed(seed=7))
    run(sink, Seeded())
    assert sink.calls[2:6] == DONE
    assert Upper().with_seed(7).seen == []


def test_a_bug_of_a_task_ends_the_job_and_reaches_the_sink(here):
    class Broken(Upper):
        def records(self, engine, rows, first=0):
            yield from super().records(engine, rows[:1])
            raise ZeroDivisionError

    sink = Recorder()
    for output in (sink, "out", "folder/"):
        with pytest.raises(ZeroDivisionError):
            run(output, Broken())
    assert sink.calls == ["enter", "resume", "ONE", "exit ZeroDivisionError"]
    assert uppers("out") == uppers("folder/") == ["ONE"]


@pytest.mark.parametrize("task", [jobs.Generation, "generation"])
def test_a_task_of_a_wrong_type_is_refused(task):
    with pytest.raises(TypeError, match="task must be Task, not "):
        jobs.run(task, "in", "out")


def test_a_cluster_computes_the_missing_rows(here, loaded, monkeypatch):
    passed = []

    def compute(cluster, source, done, task, model, loading):
        passed.append((cluster, source.names, done, task, model, loading))
        rows = [row for block in source.rows() for row in block]
        yield from task.records(None, rows[done:])

    monkeypatch.setattr("gpt_cli.jobs.cluster.library", lambda: None)
    monkeypatch.setattr("gpt_cli.jobs.cluster.compute", compute)
    cluster, task = jobs.Cluster(), Upper()
    where = {"cluster": cluster, "model": "m", "threads": 1}
    for compares, checks in ((True, ["check 0", "check 1", "check 2"]), (False, [])):
        sink = Recorder(jobs.Resumed(3), compares)
        assert run(sink, task, **where) == jobs.Summary(4, 0)
        assert sink.calls == ["enter", "resume", *checks, "FIVE", "finish 4", "exit"]
    assert passed == [(cluster, ["in"], 3, task, "m", {"threads": 1})] * 2
    assert loaded == []
    with pytest.raises(InputError, match="reads files, not a pipe"):
        jobs.run(task, "-", "out", **where)


def test_defaults_of_a_task():
    class Plain(jobs.Task):
        fields = ("text",)
        schema = {}  # noqa: RUF012

        def results(self, engine, rows):
            yield from ()

    task = Plain()
    assert (task.rows_together, task.settings, task.tokens({})) == (256, {}, 0)
    assert jobs.Resumed() == jobs.Resumed(rows=0, failed=0, seed=None)
    assert not jobs.Sink.compares
    assert task.with_seed(1) is task


# --- resumed outputs -----------------------------------------------------------------------------


def interrupted(output, rows=2, **options):
    """Run a job that is interrupted after a number of rows."""

    class Stopped(Upper):
        def records(self, engine, batch, first=0):
            for of_row in super().records(engine, batch):
                if of_row[0]["index"] == rows:
                    raise KeyboardInterrupt
                yield of_row

    Stopped.__name__ = Upper.__name__
    with pytest.raises(KeyboardInterrupt):
        run(output, Stopped(), **options)


def test_a_job_is_resumed(output, capfd):
    interrupted(output)
    task = Upper()
    assert run(output, task, resume=True) == jobs.Summary(4, 0)
    assert task.seen == [2, 3]
    assert uppers("out") == DONE
    assert capfd.readouterr() == ("", "")
    with pytest.raises(InputError, match="out exists: "):
        run(output, task)
    if output == "out":  # the input may grow
        Path("in").write_text("\n".join([*TEXTS, "six"]))
        assert run(output, task, resume=True) == jobs.Summary(5, 0)
        assert task.seen == [2, 3, 4]
        assert uppers("out") == [*DONE, "SIX"]
    Path("in").write_text("another\n" * 5)
    with pytest.raises(InputError, match="out was made from another input"):
        run(output, task, resume=True)


@pytest.mark.parametrize("name", ["out.csv", "out.tsv"])
def test_a_complete_table_of_another_input_is_refused(here, name):
    assert run(name) == run(name, resume=True) == jobs.Summary(4, 0)
    Path("in").write_text("another\n" * 5)
    with pytest.raises(InputError, match=f"{name} was made from another input, in has changed"):
        run(name, resume=True)


def test_an_interrupt_is_told_if_the_job_can_be_resumed(here, monkeypatch):
    for input, output, told in (
        *(("in", "out", True), ("in", "parts/", True)),
        *(("-", "piped", True), ("-", "piped parts/", False)),  # its parts do not have the input
    ):
        calls = Calls()
        with Path("in").open() as stream:
            monkeypatch.setattr("sys.stdin", stream)
            interrupted(output, input=input, observer=calls)
        assert ("interrupted" in calls.received) is told


def test_an_interrupt_before_the_first_record_leaves_nothing(output, here):
    interrupted(output, 0)
    assert [file.name for file in here.iterdir()] == ["in"]
    if "://" in output:
        return
    Path("out").touch() if output == "out" else Path("out").mkdir()
    interrupted(output, 0, resume=True)
    assert Path("out").exists()  # it was there before


def test_the_manifest_has_all_that_records_depend_on(here):
    class Shout(Upper):
        @property
        def settings(self):
            return {"mark": ("!", 1), "seed": None}

    job = {"task": "shout", "format": "lines", "input": [], "model": "m"}
    job["input"] = [["in", 25, zlib.crc32(Path("in").read_bytes())]]
    job |= {"revision": None, "adapter": None, "dtype": "auto", "mark": ["!", 1]}
    for output, file in (("out", ".out.job.json"), ("folder/", "folder/_job.json")):
        run(output, Shout(), model="m")
        actual = json.loads(Path(file).read_text())
        assert 0 <= actual.pop("seed") < 2**32
        known = job if "folder" in file else job.keys() - {"format", "input"}
        assert actual == {name: job[name] for name in known}
        assert Path(file).read_text().startswith('{\n "task": "shout",\n ')
        for options in ({"revision": "v2"}, {"adapter": "a"}, {"dtype": "int8"}):
            (name,) = options
            with pytest.raises(InputError, match=f"^{name} of {output.strip('/')} was "):
                run(output, Shout(), resume=True, **{"model": "m"} | options)


# --- one file of lines ---------------------------------------------------------------------------


def lines(*records):
    return "".join(f"{json.dumps(record)}\n" for record in records).encode()


def row(index, text, id=None):
    return jobs.InputRow(index, index + 1, None, id, {"text": text})


def sink_of(name="out", **job):
    return JSONLines(Path(name), Layout(("text",)), job)


@pytest.fixture
def sink(here):
    """An output with two records and an error, not yet entered."""
    records = {"text": "one"}, {"id": [1], "text": "two"}, {"line": 3, "error": {}}
    Path("out").write_bytes(lines(*({"index": index} | r for index, r in enumerate(records))))
    Path(".out.job.json").write_text('{"seed": 5, "model": "m"}')
    return sink_of(model="m", seed=None, input=[["in", 4, 1]], format=2)


def test_lines_are_appended_at_once(sink):
    with sink:
        assert sink.resume() == jobs.Resumed(rows=3, failed=1, seed=5)
        before = Path("out").read_bytes()
        sink.write({"index": 3, "text": "\udcff"})
        assert Path("out").read_bytes() == before + b'{"index": 3, "text": "\xff"}\n'
        sink.write({"index": 4, "error": {}})
        sink.finish(5)
    with sink_of(model="m", seed=None) as again:
        assert again.resume() == jobs.Resumed(rows=5, failed=2, seed=5)


def test_rows_are_compared_by_id_and_text(sink):
    with sink:
        sink.resume()
        for same in (row(0, "one"), row(1, "two", [1]), row(2, "another")):
            sink.check(same)
        for other in (row(0, "two"), row(0, "one", 0), row(1, "two")):
            with pytest.raises(InputError, match=f"row {other.index} differs from line "):
                sink.check(other)
        with pytest.raises(InputError, match="of at least 3 rows, not 2"):
            sink.finish(2)
        sink.finish(3)


@pytest.mark.parametrize(
    "torn", [b"", b"{", b'{"index": 3, "te', b'{"index": 3, "text": "\xf0\x9f']
)
def test_the_next_record_replaces_a_torn_one(torn, sink):
    whole = Path("out").read_bytes()
    Path("out").write_bytes(whole + torn)
    with sink:
        assert sink.resume().rows == 3
        assert Path("out").read_bytes() == whole + torn
        sink.write({})
    assert Path("out").read_bytes() == whole + b"{}\n"


@pytest.mark.parametrize(
    "data",
    [
        *map(lines, ({"index": 3}, {"index": 4, "text": ""}, {"text": ""}, [3], {})),
        b'{"index": 3, "a": ' + b"[" * 100_000 + b"\n",
        *(b"\n", b"notes\n", b"notes", b"\x89PNG\r", b'{"i": 3'),
    ],
)
def test_a_line_that_is_no_record_is_refused(data, sink):
    whole = Path("out").read_bytes() + data
    Path("out").write_bytes(whole)
    with sink, pytest.raises(InputError, match="out, line 4, is not a record of this command"):
        sink.resume()
    assert Path("out").read_bytes() == whole


def test_only_one_run_writes_a_file_of_lines(sink):
    pytest.importorskip("fcntl")
    other = sink_of()
    with sink:
        with pytest.raises(ResourceError, match=r"^out is being written by another run: wait"):
            other.__enter__()
        assert other._file.closed
    with other:
        pass


def test_lines_need_their_manifest_unless_there_are_none(sink):
    Path(".out.job.json").unlink()
    message = r"^out cannot be resumed without its manifest \.out\.job\.json: name"
    with sink, pytest.raises(InputError, match=message):
        sink.resume()
    Path("out").write_bytes(b'{"ind')
    with sink_of(seed=9, input=None) as torn:
        assert torn.resume() == jobs.Resumed(0, 0, 9)
    assert json.loads(Path(".out.job.json").read_text()) == {"seed": 9}
    Path("out").write_bytes(b"")  # of a run that was killed before its first row
    with sink_of(seed=None) as empty:
        assert empty.resume().seed == 9
    message = r"^seed of out was 9, and is now 8: name"
    with sink_of(seed=8) as empty, pytest.raises(InputError, match=message):
        empty.resume()


@pytest.mark.parametrize("there", [False, True])
def test_an_output_without_a_record_is_removed_after_an_error(there, here):
    if there:
        Path("out").touch()
    with pytest.raises(KeyError), sink_of() as sink:
        sink.resume()
        raise KeyError
    assert (Path("out").exists(), Path(".out.job.json").exists()) == (there, there)
    with sink_of("new") as sink:
        sink.resume()
    assert Path("new").read_bytes() == b""  # of an input without rows
    with pytest.raises(KeyError), sink_of("third") as sink:
        sink.resume()
        sink.write({})
        raise KeyError
    assert Path("third").read_bytes() == b"{}\n"
    with pytest.raises(KeyError), sink_of("other"):
        raise KeyError
    assert not Path("other").exists()
    Path(".other.job.json").mkdir()
    message = r"^cannot write \.other\.job\.json: .*; name another output$"
    with pytest.raises(ResourceError, match=message), sink_of("other") as sink:
        sink.resume()


def test_a_full_disk_is_an_error_of_the_output(sink):
    class Full:
        def truncate(self):
            raise OSError(28, "full")

        close = truncate

    message = r"^cannot write out: full; resume the job when that is fixed$"
    with pytest.raises(ResourceError, match=message), sink:
        sink.resume()
        sink._file.close()
        sink._file = Full()
        sink.write({})
    with pytest.raises(OSError, match="full"):
        sink.__exit__(None, None, None)
    Path("folder").mkdir()
    for name in ("no/out", "folder"):
        with pytest.raises(ResourceError, match=f"^cannot write {name}: .*; name another output$"):
            sink_of(name).__enter__()


# --- the manifest --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("earlier", "job", "says"),
    [
        ({"a": 1}, {"a": 1}, None),
        ({"a": 1, "b": 2}, {"a": 1}, "b of out was 2, and is not set now: name another output"),
        ({"a": 1, "b": None, "c": ""}, {"a": 1}, None),
        ({"a": [1]}, {"a": (1,)}, None),
        ({"a": None}, {"a": None}, None),
        ({"input": 1}, {"input": 1}, None),
        ({"a": 1}, {"a": 2}, "a of out was 1, and is now 2: name another output"),
        ({"a": "x" * 400}, {"a": "x" * 401}, "a of out differs: name another output"),
        ({"a": []}, {"a": ((7, -1.0),)}, "a of out was [], and is now [[7, -1.0]]: name"),
        ({"a": 1}, {"a": 1, "b": None}, "out was made by a version without b: name"),
        ({"a": "x" * 300}, {"a": 1}, 'was "' + "x" * 199 + ", and is now 1: name"),
        ({"a": 1}, {"a": "x" * 300}, 'now "' + "x" * 199 + ": name"),
        ({"input": 1}, {"input": 2}, "out was made from another input: name another output"),
        ({}, {"input": 2}, "out was made from another input"),
        ([], {}, "manifest is not a manifest: name another output"),
        (None, {}, "is not a manifest"),
    ],
)
def test_a_manifest_is_compared(earlier, job, says, here):
    Path("manifest").write_text(json.dumps(earlier))
    manifest = Manifest("out", "manifest", job)
    assert manifest.exists()
    if says is None:
        manifest.compare()
    else:
        with pytest.raises(InputError, match=re.escape(says)):
            manifest.compare()


def test_a_manifest_has_the_seed_of_the_first_run(here):
    manifest = Manifest("out", "manifest", {"a": 1})
    assert (manifest.exists(), manifest.seed, manifest.begin()) == (False, None, b'{\n "a": 1\n}')
    for data in (b"", b"7", b"{", b"\xff"):
        Path("manifest").write_bytes(data)
        assert manifest.exists() is bool(data)
        with pytest.raises(InputError, match=r"^manifest is not a manifest: name"):
            manifest.compare()
    for seed in (None, 7):
        Path("manifest").write_text(json.dumps({"seed": 7}))
        again = Manifest("out", "manifest", {"seed": seed})
        again.compare()
        assert again.seed == 7
    drawn = Manifest("out", "manifest", {"seed": None})
    assert json.loads(drawn.begin()) == {"seed": drawn.seed}
    assert isinstance(drawn.seed, int)
    assert json.loads(Manifest("out", "manifest", {"seed": 0}).begin()) == {"seed": 0}
    with pytest.raises(InputError, match="seed of out was 7, and is now 8"):
        Manifest("out", "manifest", {"seed": 8}).compare()


# --- mistakes of programs ------------------------------------------------------------------------


def test_paths_are_names_and_an_unknown_format_is_refused(here):
    assert jobs.run(Upper(), Path("in"), Path("out")) == jobs.Summary(4, 0)
    message = r"^the format must be one of auto, lines, jsonl, csv, tsv, parquet, text$"
    with pytest.raises(InputError, match=message):
        run("new", format="json")
    assert not Path("new").exists()


def test_the_fields_of_a_dataclass_are_its_settings(here):
    @dataclass(frozen=True)
    class Title(Upper):
        model: str = "none"  # cannot replace that of the job

        def results(self, engine, rows):
            return ({"upper": row.fields["text"].title()} for row in rows)

    assert Title("x").settings == {"model": "x"}
    run(task=Title("x"), model="tiny")
    assert json.loads(Path(".out.job.json").read_text())["model"] == "tiny"
