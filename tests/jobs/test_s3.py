"""Files at s3://: by s3fs, from a server of moto on this machine. `make test-s3` installs both."""

import json
import subprocess

import pytest

from support.processes import COMMAND

server = pytest.importorskip("moto.server")
s3fs = pytest.importorskip("s3fs")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

ROWS = [{"id": index, "text": f"Once upon a time {index}. "} for index in range(600)]
del ROWS[400]["text"]


@pytest.fixture(scope="module")
def s3():
    """A server with one bucket, which holds the rows in two files."""
    running = server.ThreadedMotoServer(port=0)
    running.start()
    host, port = running.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "anyone")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "anything")
        fs = s3fs.S3FileSystem(use_listings_cache=False)
        fs.mkdir("bucket")
        for name, rows in (("a", ROWS[:300]), ("b", ROWS[300:])):
            fs.pipe_file(f"bucket/in/{name}.jsonl", lines(rows))
        yield fs
    running.stop()


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The records of the rows on this machine."""
    file = tmp_path_factory.mktemp("here") / "in.jsonl"
    file.write_bytes(lines(ROWS))
    return [known(json.loads(line)) for line in score(file).splitlines()]


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def score(*arguments, code=6):
    """Score rows in a new process; return its standard output, or what is wrong."""
    command = [*COMMAND, "score", "-m", "tiny", "-q", "--format", "auto", *map(str, arguments)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == code, finished.stderr
    return finished.stdout if code == 6 else finished.stderr


def known(record):
    """A record without what tables change: nulls, and the line and the message of an error."""
    values = {key: value for key, value in record.items() if value is not None} | {"line": 0}
    if "error" in values:
        values["error"] = values["error"]["code"]
    return values


def test_rows_come_from_there_and_records_go_there(s3, expected):
    for output in ("out.jsonl", "lines/", "one.parquet", "tables/*.parquet"):
        score("s3://bucket/in", "-o", f"s3://bucket/{output}")
    hidden = ".out.jsonl.job.json"  # what a later --resume compares
    assert sorted(s3.ls("bucket")) == [
        f"bucket/{name}" for name in (hidden, "in", "lines", "one.parquet", "out.jsonl", "tables")
    ]
    for name in ("out.jsonl", "lines/part-000000000000.jsonl"):
        actual = map(json.loads, s3.cat_file(f"bucket/{name}").splitlines())
        assert [known(record) | {"file": None} for record in actual] == [
            record | {"file": None} for record in expected
        ]
    for name in ("one.parquet", "tables/part-000000000000.parquet"):
        with s3.open(f"bucket/{name}", "rb") as stream:
            actual = parquet.read_table(stream).to_pylist()
        assert [record["perplexity"] for record in actual] == [
            record.get("perplexity") for record in expected
        ]


def test_a_table_is_read_from_there(s3, expected):
    with s3.open("bucket/in.parquet", "wb") as stream:
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), stream, row_group_size=100)
    actual = map(json.loads, score("s3://bucket/in.parquet").splitlines())
    assert [known(record) for record in actual] == expected


def test_a_job_is_resumed_there(s3):
    score("s3://bucket/in", "-o", "s3://bucket/done/")
    before = {file: s3.cat_file(file) for file in s3.find("bucket/done")}
    assert "exists: set it to continue" in score(
        "s3://bucket/in", "-o", "s3://bucket/done/", code=2
    )
    score("s3://bucket/in", "-o", "s3://bucket/done/", "--resume")
    assert {file: s3.cat_file(file) for file in s3.find("bucket/done")} == before
    s3.rm_file("bucket/done/part-000000000000.jsonl")
    score("s3://bucket/in", "-o", "s3://bucket/done/", "--resume")
    assert {file: s3.cat_file(file) for file in s3.find("bucket/done")} == before


def test_data_is_compressed_there_and_back(s3):
    s3.pipe_file("bucket/stories/a.txt", b"Once upon a time. " * 100)

    def run(*arguments, code=0):
        command = [*COMMAND, *arguments, "-m", "tiny"]
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        assert finished.returncode == code, finished.stderr
        return finished.stderr

    stories = "s3://bucket/stories"
    run("compress", f"{stories}/a.txt", f"{stories}/a.txt", "-o", f"{stories}/a.gptz")
    run("decompress", f"{stories}/a.gptz", "-o", f"{stories}/b.txt")
    assert s3.cat_file("bucket/stories/b.txt") == b"Once upon a time. " * 200
    assert "exists: name another output" in run(
        "decompress", f"{stories}/a.gptz", "-o", f"{stories}/b.txt", code=2
    )
    told = run("compress", f"{stories}/a.txt", "-o", "s3://bukket/a.gptz", code=5)
    assert told.startswith("gpt-cli: error: cannot write s3://bukket/a.gptz: ")
    assert sorted(s3.ls("bucket/stories", detail=False)) == [
        f"bucket/stories/{name}" for name in ("a.gptz", "a.txt", "b.txt")
    ]


def test_no_bucket_is_made(s3):
    told = score("s3://bucket/in", "-o", "s3://bukket/out.jsonl", code=5)
    assert told.startswith("gpt-cli: error: cannot write s3://bukket/out.jsonl")
    assert not s3.exists("bukket")
    assert "cannot write s3://bukket" in score("s3://bucket/in", "-o", "s3://bukket/", code=5)
    assert not s3.exists("bukket")
    told = score("s3://bukket/in.jsonl", code=2)
    assert told.startswith("gpt-cli: error: cannot read s3://bukket/in.jsonl: No such file")
