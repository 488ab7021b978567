"""The format of a file: what a user says, else its name, else its first bytes; names that lie."""

import bz2
import gzip
import io
import json
import lzma
import pickle
import zipfile

import pytest

from gpt_cli.errors import InputError, ResourceError
from gpt_cli.jobs import formats, storage
from gpt_cli.jobs.cluster import _RangeReader
from gpt_cli.jobs.formats import Ranges
from gpt_cli.jobs.layout import Layout
from gpt_cli.jobs.rows import Source
from gpt_cli.options.declare import OptionError

BOM = b"\xef\xbb\xbf"
LAYOUT = Layout(("text", "seed"))
COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
JSONL = b'{"text": "one"}\n{"text": "two"}\n'
CSV = b'text,other\none,1\n"two",2\n'
NO_JSON = "the row is not valid JSON: Exp"
LINES = b"one\ntwo\n"


@pytest.fixture
def compress():
    """Functions that compress, by the endings of files."""
    zstandard = pytest.importorskip("zstandard")
    return COMPRESS | {".zst": zstandard.ZstdCompressor(write_checksum=True).compress}


def source(*names, form="auto", **options):
    return Source([str(name) for name in names], form, LAYOUT, 4, **options)


def rows_of(source):
    return [row for block in source.rows() for row in block]


def texts(source):
    """Return the texts of rows, or the beginnings of their errors."""
    return [str(row.error)[:30] if row.error else row.fields["text"] for row in rows_of(source)]


def refused(*names, kind=InputError, **options):
    with pytest.raises(kind) as caught:
        rows_of(source(*names, **options))
    return str(caught.value)


def parquet_bytes():
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    stream = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": ["one", "two"]}), stream)
    return stream.getvalue()


NAMED = [
    ("rows.jsonl", JSONL, "jsonl"),
    ("rows.ndjson", JSONL, "jsonl"),
    ("rows.JSONL", JSONL, "jsonl"),
    ("rows.json", JSONL, "jsonl"),
    ("rows.csv", CSV, "csv"),
    ("rows.tsv", CSV.replace(b",", b"\t"), "tsv"),
    ("rows.txt", LINES, "lines"),
    ("rows", LINES, "lines"),
    ("rows", JSONL, "jsonl"),
    ("rows.log", BOM + b"\n \n" + JSONL, "jsonl"),
]


@pytest.mark.parametrize(("name", "data", "format"), NAMED)
@pytest.mark.parametrize("ending", ["", ".gz", ".bz2", ".xz", ".zst", ".GZ"])
def test_the_name_or_else_the_first_bytes_say_the_format(
    name, data, format, ending, tmp_path, stdin, compress
):
    file = tmp_path / f"{name}{ending}"
    data = compress[ending.lower()](data) if ending else data
    file.write_bytes(data)
    found = source(file)
    assert (found.formats, texts(found), found.total) == ([format], ["one", "two"], 2)
    assert texts(found) == ["one", "two"]  # again
    assert found.contents[0][:2] == [file.name, len(data)]
    form = format if format in ("csv", "tsv") else "auto"  # a pipe has no name
    stdin(data)
    assert texts(source("-", form=form)) == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "data", "form", "expected"),
    [
        ("rows.txt", JSONL, "auto", ['{"text": "one"}', '{"text": "two"}']),
        ("rows.txt", JSONL, "jsonl", ["one", "two"]),
        ("rows.jsonl", LINES, "lines", ["one", "two"]),
        ("rows.csv", LINES, "lines", ["one", "two"]),
        ("rows.csv", JSONL, "jsonl", ["one", "two"]),
        ("rows.txt", CSV, "csv", ["one", "two"]),
        ("rows.csv", CSV.replace(b",", b"\t"), "tsv", ["one", "two"]),
        ("rows.jsonl", b"Loading...\n" + JSONL, "auto", [NO_JSON, "one", "two"]),
        ("rows", b"Loading...\n", "auto", ["Loading..."]),
        ("rows", b"[Music]\n[1]\n", "auto", ["[Music]", "[1]"]),
        ("rows.jsonl", b"[1]\n", "auto", ["a row must be a JSON object, s"]),
        ("rows", b"[\n", "lines", ["["]),
    ],
)  # fmt: skip
def test_a_format_wins_over_the_name_and_the_name_over_the_first_row(
    name, data, form, expected, tmp_path
):
    (tmp_path / name).write_bytes(data)
    assert texts(source(tmp_path / name, form=form)) == expected


def test_each_file_of_a_folder_has_the_format_of_its_name(tmp_path):
    contents = {
        "a.csv": CSV, "b.jsonl": JSONL, "c.txt": LINES, "d": JSONL, "e": LINES, "f": b"\n",
        "g.csv.gz": gzip.compress(CSV), "h.parquet": parquet_bytes(), "i": parquet_bytes(),
    }  # fmt: skip
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    found = source(tmp_path)
    assert texts(found) == ["one", "two"] * 8
    assert found.formats == ["auto", "csv", "jsonl", "lines", "parquet"]
    assert found.ignored == ["other"]
    rows = rows_of(found)
    assert [row.index for row in rows] == list(range(16))
    assert [row.line for row in rows[:4]] == [2, 3, 1, 2]
    assert not found.whole_ids


@pytest.mark.parametrize("ending", [*COMPRESS, ".zst"])
def test_a_name_that_lies_is_refused(ending, tmp_path, compress):
    def written(name, data):
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    file = written(f"rows{ending}", LINES)
    assert refused(file) == f"{file} is not compressed as its name says: rename it"
    assert "not compressed as its name says" in refused(written(f"empty.csv{ending}", b""))
    data = compress[ending](CSV)
    file = written("rows.csv", data)
    assert refused(file).endswith(f": rename it to {file}{ending}")
    assert f"rename it to {file}{ending}" in refused(file, form="lines")
    assert texts(source(written("rows", data), form="csv")) == ["one", "two"]
    other = ".gz" if ending != ".gz" else ".xz"
    assert "not compressed as its name says" in refused(written(f"rows.csv{other}", data))


@pytest.mark.parametrize("ending", [*COMPRESS, ".zst"])
def test_a_compressed_file_that_is_damaged_is_an_error(ending, tmp_path, compress, stdin):
    data = compress[ending](b"".join(b"%d,%d\n" % (n, n * n) for n in range(9000)))
    file = tmp_path / f"rows{ending}"
    for damaged in (data[:-9], data[:40], data[:50] + b"\xff" * 9 + data[59:]):
        file.write_bytes(damaged)
        assert refused(file).startswith(f"{file} is damaged, or its end is missing (")
        stdin(damaged)
        assert refused("-").startswith("standard input is damaged, or its end is missing (")
        (row,) = rows_of(source(file, form="text"))
        assert str(row.error).startswith(f"{file} is damaged")


def test_compressed_files_may_have_several_parts(tmp_path, compress):
    for ending, function in compress.items():
        file = tmp_path / f"rows.txt{ending}"
        file.write_bytes(function(b"one\n") + function(b"") + function(b"two\n"))
        assert texts(source(file)) == ["one", "two"]


def test_zstandard_needs_its_package(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    (tmp_path / "rows.zst").write_bytes(b"\x28\xb5\x2f\xfd rest")
    assert "pip install zstandard" in refused(tmp_path / "rows.zst", kind=ResourceError)


def test_ranges_of_a_compressed_file_are_read_in_any_order(tmp_path, monkeypatch):
    lines = [b"%d\n" % number for number in range(1000)]
    file = tmp_path / "rows.gz"
    file.write_bytes(gzip.compress(b"".join(lines)))
    opened = []
    monkeypatch.setattr(
        storage, "open_file", lambda name, open=storage.open_file: opened.append(name) or open(name)
    )
    cut = source(file)
    assert len(cut.ranges) == 250
    assert texts(cut) == [str(number) for number in range(1000)]
    assert len(opened) == 2  # it was cut, and read once
    with Ranges() as ranges:
        for place in (3, 200, 7):
            rows = cut.reader.read(cut.ranges[place], ranges)
            assert [row.fields["text"] for row in rows] == [str(place * 4 + n) for n in range(4)]
    assert len(opened) == 4
    file.write_bytes(gzip.compress(b"".join(lines[:500])))
    assert "became shorter while it was read" in refused_again(cut)


@pytest.mark.parametrize("name", ["book.xlsx", "rows.csv", "rows"])
def test_zip_files_are_refused(name, tmp_path):
    with zipfile.ZipFile(tmp_path / name, "w") as archive:
        archive.writestr("sheet.xml", "Once")
    message = f"{tmp_path / name} is a zip file, as .xlsx is: export the workbook as CSV, or unpack"
    assert refused(tmp_path / name).startswith(message)


def refused_again(cut):
    with pytest.raises(InputError) as caught:
        rows_of(cut)
    return str(caught.value)


@pytest.mark.parametrize("encoding", ["UTF-16", "UTF-32"])
@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl", "rows.txt", "rows", "rows.csv.gz"])
def test_other_encodings_are_refused_at_their_mark(encoding, name, tmp_path, stdin):
    for order in ("LE", "BE"):
        data = ("\ufeff" + JSONL.decode()).encode(f"{encoding}-{order}")
        if name.endswith(".gz"):
            data = gzip.compress(data)
        (tmp_path / name).write_bytes(data)
        cure = (
            f"is {encoding}, by its byte order mark: convert it with `iconv -f {encoding} -t UTF-8`"
        )
        assert refused(tmp_path / name) == f"{tmp_path / name} {cure}"
        stdin(data)
        assert refused("-") == f"standard input {cure}"
        (row,) = rows_of(source(tmp_path / name, form="text"))
        assert str(row.error) == f"{tmp_path / name} {cure}"


@pytest.mark.parametrize("data", [b'[{"text": "x"}]', b'[\n {"text": "x"}\n]', b" [ {\n"])
def test_a_json_array_is_refused(data, tmp_path, stdin):
    says = "begins like a JSON array: make a row of each item with `jq -c '.[]'`"
    for name in ("rows.json", "rows", "rows.json.gz"):
        file = tmp_path / name
        file.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
        assert says in refused(file)
    stdin(data)
    assert f"standard input {says}" in refused("-")
    (tmp_path / "rows.json").write_bytes(b"[1, 2]")
    assert says in refused(tmp_path / "rows.json")


def test_parquet_is_known_by_its_first_bytes_and_needs_a_file(tmp_path, stdin):
    data = parquet_bytes()
    (tmp_path / "rows").write_bytes(data)
    assert texts(source(tmp_path / "rows")) == ["one", "two"]
    for name, kind in (("a.jsonl", "JSON Lines"), ("a.csv", "CSV"), ("a.txt", "plain lines")):
        (tmp_path / name).write_bytes(data)
        cure = "rename it, or set its format to parquet"
        assert refused(tmp_path / name) == f"{tmp_path / name} is Parquet, not {kind}: {cure}"
        assert texts(source(tmp_path / name, form="parquet")) == ["one", "two"]
    needs = "is Parquet, which needs a file: name one that ends with .parquet"
    stdin(data)
    assert refused("-") == f"standard input {needs}"
    (tmp_path / "rows.gz").write_bytes(gzip.compress(data))
    assert refused(tmp_path / "rows.gz") == f"{tmp_path / 'rows.gz'} {needs}"
    (tmp_path / "rows.parquet.gz").write_bytes(gzip.compress(data))
    assert "Parquet is not read from a compressed file" in refused(tmp_path / "rows.parquet.gz")
    (tmp_path / "b.parquet").write_bytes(JSONL)
    assert "cannot be read as Parquet" in refused(tmp_path / "b.parquet")


def test_a_delimiter_needs_a_table(tmp_path):
    (tmp_path / "a.csv").write_bytes(CSV.replace(b",", b"|"))
    (tmp_path / "a.txt").write_bytes(LINES)
    assert texts(source(tmp_path, delimiter="|")) == ["one", "two"] * 2
    assert "delimiter" in refused(tmp_path / "a.txt", delimiter="|", kind=OptionError)
    assert texts(source(tmp_path / "a.csv", form="tsv", delimiter="|")) == ["one", "two"]


def test_a_file_can_be_described_without_being_opened():
    assert formats.named("s3://bucket/a.CSV.gz") == formats.InputFile(
        "s3://bucket/a.CSV.gz", "csv", "gzip", ","
    )
    assert formats.named("a.tsv", "lines") == formats.InputFile("a.tsv", "lines")
    assert formats.named("-") == formats.InputFile("-", "auto")


def test_every_line_may_be_a_row_of_an_input_without_a_name(stdin):
    layout = Layout(("text",), every_line=True)
    for data, expected in (
        (b"\n \none\n\n", [b"\n", b" \n", b"one\n", b"\n"]),
        (b"\n" + JSONL + b"\n", [b"", b""]),
    ):
        stdin(data)
        assert [row.data for row in rows_of(Source(["-"], "auto", layout, 4))] == expected


def test_addresses_may_be_compressed(memory):
    lines = "".join(json.dumps({"text": str(n)}) + "\n" for n in range(10)).encode()
    memory.pipe("/in/rows.jsonl.gz", gzip.compress(lines))
    memory.pipe("/in/rows.csv", CSV)
    expected = ["one", "two", *map(str, range(10))]
    assert texts(source("memory://in")) == expected


def test_rows_that_are_passed_on_have_one_format_and_their_data(tmp_path, stdin):
    layout = Layout(("text",), every_line=True, passes_rows=True)
    contents = {
        "a.csv": CSV, "b.csv.gz": gzip.compress(CSV), "c.csv": b"text\nx\n",
        "d.jsonl": b"\n" + JSONL, "e.txt": b"\none", "f.tsv": CSV.replace(b",", b"\t"),
        "g.parquet": parquet_bytes(),
    }  # fmt: skip
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)

    def passed(*names):
        found = Source([str(tmp_path / name) for name in names], "auto", layout, 4)
        return found.header, [row.data for row in rows_of(found)]

    assert passed("a.csv", "b.csv.gz") == (b"text,other\n", [b"one,1\n", b'"two",2\n'] * 2)
    assert passed("d.jsonl") == (b"", JSONL.splitlines(keepends=True))
    assert passed("e.txt") == (b"", [b"\n", b"one"])
    for other in ("c.csv", "d.jsonl", "e.txt", "f.tsv"):
        with pytest.raises(InputError, match="has another format or other columns than the files"):
            passed("a.csv", other)
    with pytest.raises(InputError, match="is Parquet, whose rows cannot pass unchanged"):
        passed("g.parquet")
    stdin(BOM + CSV)
    found = Source(["-"], "csv", layout, 4)
    assert [row.data for row in rows_of(found)] == [b"one,1\n", b'"two",2\n']
    assert found.header == BOM + b"text,other\n"


def test_a_reader_on_another_machine_reads_ranges_of_any_format(tmp_path, compress):
    folder = tmp_path / "in"
    folder.mkdir()
    for name, data in {"a.csv": CSV, "b.jsonl": JSONL, "c.parquet": parquet_bytes()}.items():
        (folder / name).write_bytes(data)
    for ending, function in compress.items():
        (folder / f"d.csv{ending}").write_bytes(function(CSV))
    found = source(folder)
    reader, ranges = pickle.loads(
        pickle.dumps((_RangeReader(found.reader, 3, tmp_path / "elsewhere").rows, found.ranges))
    )
    rows = list(reader(ranges))
    assert rows == rows_of(found)[3:]
    assert [row.fields["text"] for row in rows] == ["two", *["one", "two"] * 5]
