"""Files of rows that are not what they say: their names, their encoding, their headers, their ends.

A file that cannot be read as rows is refused before the output is begun. A damaged row has an error
in its place, and all other rows have their results.
"""

import gzip
import io
import json

import pytest

from support.in_process import records_here
from support.world import fault_row

TEXTS = ["Once upon a time", "the cat sat", "a dog ran", "the man said"]
JSONL = b"".join(b'{"text": "%s"}\n' % text.encode() for text in TEXTS)
CSV = b"id,text\n" + b"".join(b"%d,%s\n" % (id, text.encode()) for id, text in enumerate(TEXTS))
LONG = b'{"text": "the end"}\n' * 20_000


def parquet():
    pyarrow = pytest.importorskip("pyarrow")
    stream = io.BytesIO()
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"text": TEXTS}), stream)
    return stream.getvalue()


def zstandard():
    return pytest.importorskip("zstandard").ZstdCompressor().compress(LONG)


def utf16(data, order, mark="\ufeff"):
    return (mark + data.decode()).encode(f"UTF-16-{order}")


# --- files ---------------------------------------------------------------------------------------


def file(name, file, data, says, do):
    return fault_row(136, name, 2, file, data, says, do, intact="there is no output")


# fmt: off
FILES = [
    file("a .gz that is not compressed", "in.jsonl.gz", JSONL, "not compressed as its name says",
         "rename it"),
    file("a .jsonl that is compressed", "in.jsonl", gzip.compress(JSONL), "compressed by gzip",
         "rename it to in.jsonl.gz"),
    file("a .gz compressed by another program", "in.csv.zst", gzip.compress(CSV),
         "not compressed as its name says", "rename it"),
    file("a .jsonl with Parquet inside", "in.jsonl", parquet, "is Parquet, not JSON Lines",
         "rename it, or set its format to parquet"),
    file("a .csv with Parquet inside", "in.csv", parquet, "is Parquet, not CSV", "rename it"),
    file("a .parquet with JSON Lines inside", "in.parquet", JSONL, "cannot be read as Parquet",
         "write it again"),
    file("a .parquet without its end", "in.parquet", lambda: parquet()[:-20],
         "cannot be read as Parquet", "write it again"),
    file("a .json of one array", "in.json", b"[" + JSONL.replace(b"\n", b",") + b"{}]",
         "like a JSON array", "jq -c '.[]'"),
    file("a table in UTF-16", "in.csv", utf16(CSV, "LE"), "is UTF-16, by its byte order mark",
         "iconv -f UTF-16 -t UTF-8"),
    file("JSON Lines in UTF-16, big-endian", "in.jsonl", utf16(JSONL, "BE"), "is UTF-16", "iconv"),
    file("a compressed table in UTF-16", "in.csv.gz", gzip.compress(utf16(CSV, "LE")),
         "is UTF-16", "iconv"),
    file("a table in UTF-16 without its mark", "in.csv", utf16(CSV, "LE", mark=""), "NUL bytes",
         "UTF-16"),
    file("a gzip file without its end", "in.jsonl.gz", gzip.compress(LONG)[:-9],
         "is damaged, or its end is missing", "copy or compress it again"),
    file("a gzip file with other bytes inside", "in.jsonl.gz",
         gzip.compress(LONG)[:60] + bytes(40) + gzip.compress(LONG)[100:], "is damaged",
         "copy or compress it again"),
    file("a Zstandard file without its end", "in.jsonl.zst", lambda: zstandard()[:-9],
         "is damaged, or its end is missing", "copy or compress it again"),
    file("a header with a column twice", "in.csv", CSV.replace(b"id,", b"text,"),
         "several columns 'text'", "keep one of them"),
    file("a header without the text", "in.csv", CSV.replace(b"text", b"prose"),
         "has no column 'text'", "its columns are ['id', 'prose']"),
    file("a header with another delimiter", "in.csv", CSV.replace(b",", b";"),
         "has no column 'text'", "is its delimiter ';'?"),
    file("a header with a quote that never closes", "in.csv", b'"' + CSV, "quote of the row never",
         "up to the end of the file"),
]
# fmt: on


@pytest.mark.parametrize(("name", "data", "says", "do"), FILES)
def test_a_file_that_lies_is_refused(name, data, says, do, model, world, suffer_here):
    (world.place / name).write_bytes(data() if callable(data) else data)
    for command in (("score", "-m", model, name, "-o", "out"), ("score", "-m", model, name)):
        suffer_here(*command, code=2, says=says, do=do)


# --- rows ----------------------------------------------------------------------------------------


def row(name, file, data, says, bad):
    return fault_row(137, name, 6, file, data, says, bad, intact="the results of all other rows")


# fmt: off
ROWS = [  # with the index of the row that is damaged
    row("a message before JSON Lines", "in.jsonl", b"Loading...\n" + JSONL, "not valid JSON", 0),
    row("a NUL tail of JSON Lines", "in.jsonl", JSONL + bytes(4096), "not valid JSON", 4),
    row("a row cut short at the end", "in.jsonl", JSONL + JSONL[:9], "not valid JSON", 4),
    row("a row that is no object", "in.jsonl", b"[1]\n" + JSONL, "must be a JSON object", 0),
    row("a row that is not UTF-8", "in.jsonl", JSONL + b'{"text": "caf\xe9"}', "not UTF-8", 4),
    row("a row of a table with a cell too few", "in.csv", CSV.replace(b"\n1,", b"\n1\n1,"),
        "the row has 1 cell, not 2", 1),
    row("a header that comes again", "in.csv", CSV + CSV.partition(b"\n")[0], "the header again",
        4),
    row("a quote that never closes", "in.csv", CSV + b'7,"the\nend\n', "never closes", 4),
    row("a NUL tail of a table", "in.csv", CSV + bytes(4096), "NUL bytes", 4),
]
# fmt: on


@pytest.mark.parametrize(("name", "data", "says", "bad"), ROWS)
def test_a_damaged_row_costs_no_other(name, data, says, bad, model, world, suffer_here):
    (world.place / name).write_bytes(data)
    (world.place / "good").write_bytes(JSONL)
    command = ("score", "-m", model, "-q")
    options = {"says": f"1 of {len(TEXTS) + 1} rows failed", "do": "the records say why"}
    suffer_here(*command, name, "-o", "out", code=6, changes=True, **options)
    records = [json.loads(line) for line in (world.place / "out").read_bytes().splitlines()]
    assert [record["index"] for record in records] == [*range(len(TEXTS) + 1)]
    assert says in records.pop(bad)["error"]["message"]
    expected = records_here(*command, world.place / "good", "--format", "jsonl")
    for record, alone in zip(records, expected, strict=True):
        assert record | {"index": 0, "id": 0} == alone | {"index": 0, "id": 0}


@pytest.mark.fault(137, "a byte order mark of UTF-8", 0, intact="every row")
@pytest.mark.parametrize(("name", "data"), [("in.jsonl", JSONL), ("in.csv", CSV)])
def test_a_mark_of_utf8_is_no_part_of_a_row(name, data, model, world):
    (world.place / name).write_bytes(b"\xef\xbb\xbf" + data)
    command = ("score", "-m", model, "-q", "--format", "auto")
    records = records_here(*command, world.place / name)
    assert [record["text"] for record in records] == TEXTS
