"""Rows of files, folders, patterns and addresses do not depend on how files are cut."""

import os
import random
import zlib
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt_cli.errors import InputError, ResourceError
from gpt_cli.jobs import storage
from gpt_cli.jobs.formats import InputFile, Ranges
from gpt_cli.jobs.layout import InputRow, Layout
from gpt_cli.jobs.reader import RowReader
from gpt_cli.jobs.rows import Source, ranges_together
from support.processes import posix

BOM = b"\xef\xbb\xbf"
LAYOUT = Layout(("prompt", "max_tokens"))


def source(*names, form="auto", together=4):
    return Source([str(name) for name in names], form, LAYOUT, together)


def files_of(source):
    return [file.name for file in source.files]


def rows_of(source):
    return [row for block in source.rows() for row in block]


def prompts(source):
    return [row.fields["prompt"] for row in rows_of(source)]


def refused(name, kind=InputError, **options):
    """Return the error of an input."""
    with pytest.raises(kind) as caught:
        source(name, **options)
    return str(caught.value)


def write(folder, **files):
    """Write files, with dots for underscores in their names; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name.replace("_", ".")).write_bytes(data)
    return folder


# --- cutting -------------------------------------------------------------------------------------

# The content of a line and its line end.
lines = st.tuples(
    st.text("aé🦊{ \t\r\x0b\u2028\ufeff", max_size=3), st.sampled_from(["\n", "\r\n"])
)
files = st.lists(
    st.tuples(st.lists(lines, max_size=7), st.booleans(), st.booleans()), min_size=1, max_size=6
)


def bytes_of(file):
    """Return a file of lines, perhaps with a byte order mark or without the last line end."""
    lines, marked, open_ended = file
    data = "".join(line + end for line, end in lines).encode()
    return (BOM if marked else b"") + (data.rstrip(b"\r\n") if open_ended else data)


def read_in_one_go(data):
    """Return the number and the text of lines that are not blank."""
    *ended, rest = data.removeprefix(BOM).split(b"\n")
    ended = [line.removesuffix(b"\r") for line in ended]
    numbered = enumerate([*ended, rest], 1)
    return [(number, line.decode()) for number, line in numbered if line.strip()]


@given(files, st.integers(1, 5))
def test_rows_do_not_depend_on_how_files_are_cut(tmp_path_factory, files, together):
    folder = tmp_path_factory.mktemp("cut")
    for number, file in enumerate(files):
        (folder / f"{number}.txt").write_bytes(bytes_of(file))
    cut = source(folder, form="lines", together=together)
    expected = [
        (str(folder / f"{number}.txt") if len(files) > 1 else None, line, {"prompt": text})
        for number, file in enumerate(files)
        for line, text in read_in_one_go(bytes_of(file))
    ]
    actual = rows_of(cut)
    assert [(row.file, row.line, row.fields) for row in actual] == expected
    assert [row.index for row in actual] == list(range(len(expected)))
    assert cut.total == len(expected)
    index = 0
    for file_range in cut.ranges:
        assert file_range.index == index
        assert 0 < file_range.rows <= together - index % together
        assert len(list(cut.reader.read(file_range, Ranges()))) == file_range.rows
        index += file_range.rows
    sizes = [
        sum(file_range.rows for file_range in block)
        for block in ranges_together(cut.ranges, together)
    ]
    assert sizes == [len(block) for block in cut.rows()]
    assert all(size == together for size in sizes[:-1])


def test_ranges_can_be_read_in_any_order(tmp_path):
    file = tmp_path / "in"
    file.write_bytes(BOM + b"\n".join(b"%d" % number for number in range(100)))
    cut = source(file, together=7)
    actual = {}
    for file_range in random.Random(1).sample(cut.ranges, len(cut.ranges)):
        actual |= {row.index: row.fields["prompt"] for row in cut.reader.read(file_range, Ranges())}
    assert len(cut.ranges) == 15
    assert actual == {number: str(number) for number in range(100)}


def test_a_stream_gives_the_rows_of_the_file(tmp_path, stdin):
    data = BOM + b"\n\n" + b'{"prompt": "one"}\r\n\n{"id": 2, "prompt": "two"}'
    (tmp_path / "in").write_bytes(data)
    expected = rows_of(source(tmp_path / "in"))
    stdin(data)
    piped = source("-")
    assert (files_of(piped), piped.streams, piped.total) == (["-"], True, None)
    assert rows_of(piped) == expected
    assert piped.total == 2
    assert [row.line for row in expected] == [3, 5]


def test_files_and_a_stream_give_their_rows_one_after_the_other(tmp_path, stdin):
    folder = write(tmp_path, a=b"\n1\n2\n", b=b"", c=BOM + b"3")
    files = [folder / name for name in "cba"]
    rows = rows_of(source(*files))
    assert [(row.index, row.file, row.line) for row in rows] == [
        (0, str(files[0]), 1), (1, str(files[2]), 2), (2, str(files[2]), 3)
    ]  # fmt: skip
    stdin(files[2].read_bytes())
    piped = rows_of(source(*files[:2], "-"))
    assert piped == [row if row.index == 0 else replace(row, file="-") for row in rows]


@pytest.mark.parametrize(
    ("form", "written"),
    [
        (
            "auto",
            {
                b"\n\none\n": [(0, 3, "one")],
                b"\r\ntwo\nthree\n \n": [(1, 5, "two"), (2, 6, "three")],
                b"four": [(3, 8, "four")],
            },
        ),
        (
            "csv",
            {
                b'prompt\none\n"two': [(0, 2, "one")],
                b'\n"\nthree\n': [(1, 3, "two\n"), (2, 5, "three")],
                b"four": [(3, 6, "four")],
            },
        ),
    ],
)
def test_a_stream_gives_rows_as_they_are_written(form, written, monkeypatch):
    ours, theirs = os.pipe()
    with open(ours) as stream:  # noqa: PTH123 (of a number)
        monkeypatch.setattr("sys.stdin", stream)
        blocks = source("-", form=form).rows()
        for data, rows in written.items():
            os.write(theirs, data)
            if data == b"four":
                os.close(theirs)
            assert [(row.index, row.line, row.fields["prompt"]) for row in next(blocks)] == rows
        assert next(blocks, None) is None


def test_a_stream_gives_the_rows_that_are_computed_together(stdin):
    stdin(b"a\n\nb\nc\nd\ne\n")
    piped = source("-", together=2)
    assert piped.peek() == piped.peek() == ["lines"]
    numbers = [[(row.index, row.line) for row in rows] for rows in piped.rows()]
    assert numbers == [[(0, 1), (1, 3)], [(2, 4), (3, 5)], [(4, 6)]]


@pytest.mark.parametrize(
    ("data", "format"),
    [(b"", "auto"), (b"\n \n", "auto"), (BOM + b"\n\n{", "jsonl"), (b"x", "lines")],
)
def test_the_first_row_of_a_stream_decides_its_format(data, format, tmp_path, stdin):
    (tmp_path / "in").write_bytes(data)
    stdin(data)
    assert source("-").peek() == source(tmp_path / "in").peek() == [format]


@pytest.mark.parametrize("pipe", [False, True])
def test_every_line_may_be_a_row(pipe, tmp_path, stdin):
    lines = [BOM + b"one\r\n", b"\n", b" \t\n", b"caf\xe9\n", b"last"]
    (tmp_path / "in").write_bytes(b"".join(lines))
    stdin(b"".join(lines))
    name = "-" if pipe else str(tmp_path / "in")
    rows = rows_of(Source([name], "lines", Layout(("text",), every_line=True), 2))
    assert [row.data for row in rows] == lines
    assert [(row.index, row.line) for row in rows] == [(n, n + 1) for n in range(5)]
    assert [row.fields.get("text") for row in rows] == ["one", "", " \t", None, "last"]
    assert str(rows[3].error).startswith("the line is not UTF-8 at byte 3: convert the file")
    stdin(b"".join(lines))
    assert {row.data for row in rows_of(source(name, form="lines"))} == {b""}


def test_rows_of_a_single_file_have_no_file_name(tmp_path):
    one = write(tmp_path / "one", a=b"x\n")
    two = write(tmp_path / "two", a=b"x\n", b=b"y\n")
    assert [row.file for row in rows_of(source(one))] == [None]
    assert [row.file for row in rows_of(source(two))] == [str(two / "a"), str(two / "b")]


@pytest.mark.parametrize(
    ("rest", "says"),
    [
        (b"", "in became shorter"),
        (b"ab\ncd\n", "in changed while it was read"),
        (b"\n" * 6, "in changed while it was read"),
    ],
)
def test_a_file_that_changes_is_an_error(rest, says, tmp_path):
    file = tmp_path / "in"
    file.write_bytes(b"one\ntwo\nthree\n")
    cut = source(file, together=2)
    assert cut.total == 3
    file.write_bytes(b"one\ntwo\n" + rest)
    blocks = cut.rows()
    assert [row.fields["prompt"] for row in next(blocks)] == ["one", "two"]
    with pytest.raises(InputError, match=says):
        next(blocks)


def test_a_table_that_loses_rows_is_an_error(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "in.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["a", "b", "c"]}), file)
    cut = source(file, together=2)
    assert cut.total == 3
    parquet.write_table(pyarrow.table({"prompt": ["a", "b"]}), file)
    with pytest.raises(InputError, match=r"in\.parquet changed while it was read"):
        list(cut.rows())


def test_a_folder_that_a_bucket_lists_as_a_file_is_left_out(memory, monkeypatch):
    memory.pipe_file("/bucket/in/a", b"one\n")
    kind = type(memory)
    ls = kind.ls

    def marked(self, path, **options):
        return [{"name": "/bucket/in/", "type": "file", "size": 0}, *ls(self, path, **options)]

    monkeypatch.setattr(kind, "ls", marked)
    assert files_of(source("memory://bucket/in")) == ["memory:///bucket/in/a"]


# --- forms ---------------------------------------------------------------------------------------


def test_the_first_row_of_each_file_decides_its_format(tmp_path):
    lines = BOM + b"\n \n" + b'{"prompt": "x"}\nno JSON'
    folder = write(tmp_path / "in", a=b"", b=BOM + b"\n \n", c=lines, d=b"no JSON")
    good, bad, line = rows_of(source(folder))
    assert [good.fields, line.fields] == [{"prompt": "x"}, {"prompt": "no JSON"}]
    assert (bad.file, bad.line) == (str(folder / "c"), 4)
    assert isinstance(bad.error, InputError)


@pytest.mark.parametrize(
    ("data", "prompts"),
    [
        (b'one\n{"prompt": "two"}\n', ["one", '{"prompt": "two"}']),
        (BOM + b'\n \t{"prompt": "one"} \n \n{"prompt": "two"}', ["one", "two"]),
        (rb'{"prompt": "a\n\ud83e\udd8a"}', ["a\n🦊"]),
    ],
)
def test_the_first_row_decides_the_format(data, prompts, tmp_path):
    (tmp_path / "in").write_bytes(data)
    assert [row.fields["prompt"] for row in rows_of(source(tmp_path / "in"))] == prompts


def test_an_input_without_rows_has_no_ranges(tmp_path):
    folder = write(tmp_path / "in", a=b"", b=b"\n\r\n", c=BOM)
    empty = source(folder)
    assert (empty.ranges, empty.total, rows_of(empty)) == ([], 0, [])


def test_each_file_is_known_by_name_size_and_checksum(tmp_path):
    (tmp_path / "a").write_bytes(b"x\n")
    (tmp_path / "b").write_bytes(b"y\ny")
    contents = [["a", 2, zlib.crc32(b"x\n")], ["b", 3, zlib.crc32(b"y\ny")]]
    assert source(tmp_path).contents == contents


@posix
def test_pipes_with_names_and_devices_are_streams(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in (tmp_path / "pipe", "/dev/null", "-"):
        assert source(name).streams
    (tmp_path / "file").touch()
    assert not source(tmp_path / "file").streams


def test_a_pipe_cannot_be_a_table():
    assert "name a file" in refused("-", form="parquet")


def test_a_row_that_cannot_be_read_has_only_its_position():
    reader = RowReader(LAYOUT, many=True)
    lines = [(7, b'{"prompt": "x"}\n'), (8, b"no JSON")]
    good, bad = reader.parse(lines, 5, InputFile("in", "jsonl"))
    assert good == InputRow(5, 7, "in", None, {"prompt": "x"}, None)
    assert (bad.index, bad.line, bad.file, bad.id, bad.fields) == (6, 8, "in", None, {})
    assert InputRow(0, 1, None) == InputRow(0, 1, None, None, {}, None)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            b'"\xff"',
            "the row is not UTF-8 at byte 1: convert the file, such as by iconv -f CP1252 -t UTF-8",
        ),
        (b"[1", "the row is not valid JSON: Expecting ',' delimiter at character 2"),
        (b"[1]", 'a row must be a JSON object, such as {"prompt": "Once"}'),
        (b'{"id": NaN}', "the row cannot be written as JSON, or is nested too deeply"),
        (b'{"id": "\\ud800"}', "the row cannot be written as JSON, or is nested too deeply"),
        (b'{"a":' * 9**6, "the row cannot be written as JSON, or is nested too deeply"),
    ],
)
def test_a_row_that_cannot_be_read_has_a_reason(line, says):
    (row,) = RowReader(LAYOUT).parse([(1, line)], 0, InputFile("in", "jsonl"))
    assert str(row.error) == says


def test_the_fields_of_a_row_do_not_include_its_id(tmp_path):
    file = tmp_path / "in"
    file.write_bytes(b'{"id": [1], "prompt": "x", "seed": 3}\n{"id": null, "prompt": "y"}')
    first, second = rows_of(source(file))
    assert (first.id, first.fields) == ([1], {"prompt": "x", "seed": 3})
    assert (second.id, second.fields["prompt"]) == (None, "y")


# --- names ---------------------------------------------------------------------------------------


def test_files_of_a_folder_are_sorted(tmp_path):
    names = {"b": b"b\n", "a10": b"a10\n", "a9": b"a9\n", "Z": b"Z\n"}
    assert prompts(source(write(tmp_path / "in", **names))) == ["Z", "a10", "a9", "b"]


def test_hidden_files_and_folders_in_a_folder_are_left_out(tmp_path):
    folder = write(tmp_path / "in", a=b"a\n")
    for name in (".b", "_SUCCESS", "_job.json"):
        (folder / name).write_bytes(b"no row\n")
    write(folder / "deeper", c=b"no row\n")
    assert prompts(source(folder)) == ["a"]
    assert prompts(source(f"{folder}/")) == ["a"]


def test_files_of_a_pattern_are_sorted(tmp_path):
    write(tmp_path / "x", b_txt=b"xb\n", a_txt=b"xa\n", c_csv=b"no row\n")
    write(tmp_path / "y", a_txt=b"ya\n")
    (tmp_path / "x" / "folder.txt").mkdir()
    assert prompts(source(tmp_path / "x" / "*.txt")) == ["xa", "xb"]
    assert prompts(source(tmp_path / "*" / "a.txt")) == ["xa", "ya"]
    assert prompts(source(tmp_path / "**" / "*.txt")) == ["xa", "xb", "ya"]


def test_relative_names_stay_relative(here):
    write(here / "x", b=b"b\n", a=b"a\n")
    assert files_of(source("x/*")) == ["x/a", "x/b"]
    assert files_of(source("x")) == ["x/a", "x/b"]


def test_a_file_with_a_star_in_its_name_is_that_file(tmp_path):
    write(tmp_path, **{"a*": b"star\n", "ab": b"no row\n"})
    assert prompts(source(tmp_path / "a*")) == ["star"]


def test_addresses_of_this_machine_give_the_same_rows(tmp_path):
    folder = write(tmp_path / "in", b_txt=b"b\n", a_txt=BOM + b"a\r\n\n", _hidden=b"no row\n")
    for name in ("", "/", "/*.txt", "/a.txt"):
        here, there = source(f"{folder}{name}"), source(f"file://{folder}{name}")
        assert files_of(there) == [f"file://{file}" for file in files_of(here)]
        assert prompts(there) == prompts(here)


def test_addresses_of_another_file_system_give_the_same_rows(memory):
    memory.pipe({"/in/b.txt": b"b\n", "/in/a.txt": BOM + b"a\r\n\na2", "/in/c": b"c\n"})
    memory.pipe({"/in/_hidden": b"no row\n", "/in/.hidden": b"no row\n", "/in/x.txt/d": b"no\n"})
    assert prompts(source("memory://in", together=2)) == ["a", "a2", "b", "c"]
    assert prompts(source("memory://in/")) == ["a", "a2", "b", "c"]
    assert prompts(source("memory://in/*.txt")) == ["a", "a2", "b"]
    assert [row.line for row in rows_of(source("memory://in/a.txt"))] == [1, 3]
    assert files_of(source("memory://in/*.txt")) == ["memory:///in/a.txt", "memory:///in/b.txt"]


@pytest.mark.parametrize(
    "name", ["missing", "missing/", "in/missing", "file://{}/missing", "memory://missing"]
)
def test_a_missing_file_is_an_error(name, here, memory):
    write(here / "in", a=b"a\n")
    name = name.format(here)
    reason = "No such file or directory; name a file that can be read"
    assert refused(name) == f"cannot read {name}: {reason}"


@pytest.mark.parametrize("name", ["in", "in/*", "file://{}/in", "memory://*.txt"])
def test_a_folder_or_a_pattern_without_files_is_an_error(name, here, memory):
    write(here / "in" / "deeper", a=b"a\n")
    name = name.format(here)
    assert refused(name) == f"cannot read {name}: no files found"


def test_a_missing_package_for_an_address_is_named(monkeypatch):
    # As fsspec does where s3fs is not installed.
    def missing(name, **options):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    said = refused("s3://b/x", ResourceError)
    assert said == "cannot access s3://b/x: Install s3fs to access S3"


def test_any_error_of_a_package_for_addresses_is_an_input_error(memory, monkeypatch):
    class ThrottledError(Exception):
        pass

    def fail(*arguments, **options):
        raise ThrottledError("slow down")

    memory.pipe("/in", b"row\n")
    monkeypatch.setattr(memory, "open", fail)
    assert refused("memory://in") == "cannot read memory://in: slow down"


def test_a_name_that_is_no_address_is_a_path():
    assert storage.is_address("s3://bucket/x")
    assert not any(map(storage.is_address, ["x", "/x", "C:\\x", "s3:/x", str(Path("a:/b"))]))


# --- whole files ---------------------------------------------------------------------------------


def test_in_the_format_text_each_file_is_a_row(tmp_path):
    folder = write(tmp_path, a=BOM + b"Once\n\nupon\r\n", b=b'{"x": 1}', empty=b"", latin=b"\xe9")
    files = [str(folder / name) for name in ("a", "b", "empty", "latin")]
    rows = rows_of(source(*files, form="text", together=3))
    assert [row.file for row in rows] == files
    assert [row.fields.get("prompt") for row in rows] == ["Once\n\nupon", '{"x": 1}', None, None]
    errors = [str(row.error).replace(f"{folder}{os.sep}", "") for row in rows[2:]]
    assert errors[0] == "empty is empty: a text is needed"
    assert errors[1].startswith("latin is not UTF-8: byte 0")
    (alone,) = rows_of(source(files[0], form="text"))
    assert alone == rows[0] and alone.line is None
