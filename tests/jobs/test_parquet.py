"""Tables in Parquet: rows as JSON, records as tables, and errors."""

import math
import random
import sys
import zlib
from datetime import date
from decimal import Decimal
from io import BytesIO
from pathlib import Path

import pytest

from gpt_cli.errors import InputError, ResourceError
from gpt_cli.jobs import Generation, Scoring, parquet
from gpt_cli.jobs.formats import Ranges
from gpt_cli.jobs.layout import Layout
from gpt_cli.jobs.rows import Source
from gpt_cli.options.request import Options
from gpt_cli.records import ERROR, IDENTITY

LAYOUT = Layout(("prompt", "max_tokens", "temperature", "seed", "stop"))


@pytest.fixture
def pa():
    return pytest.importorskip("pyarrow")


@pytest.fixture
def write(pa, tmp_path):
    """Write a table; return the name of its file."""
    from pyarrow.parquet import write_table

    def write(columns, name="in.parquet", **options):
        table = columns if isinstance(columns, pa.Table) else pa.table(columns)
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        write_table(table, file, **options)
        return str(file)

    return write


def read(file):
    """Return all rows of a table as JSON values."""
    sizes, columns, *_ = parquet.survey(file, LAYOUT)
    groups = [parquet.read(file, group, 0, size, columns) for group, size in enumerate(sizes)]
    return [row for rows in groups for row in rows]


def source(name, together=4, form="auto"):
    return Source([str(name)], form, LAYOUT, together)


def rows_of(name, *, together=4, form="auto"):
    blocks = list(source(name, together, form).rows())
    assert all(len(block) == together for block in blocks[:-1])
    return [row for block in blocks for row in block]


# --- rows as JSON --------------------------------------------------------------------------------


def test_a_row_has_the_values_of_its_columns(write):
    file = write({"id": ["a", "b"], "prompt": ["One 🦊", ""], "max_tokens": [3, 4]})
    assert read(file) == [
        {"id": "a", "prompt": "One 🦊", "max_tokens": 3},
        {"id": "b", "prompt": "", "max_tokens": 4},
    ]


def test_nulls_are_read_and_missing_columns_are_left_out(write, pa):
    assert read(write({"prompt": ["a", "b"]})) == [{"prompt": "a"}, {"prompt": "b"}]
    rows = read(write({"id": [None, 1], "prompt": ["a", None], "seed": [None, None]}))
    assert rows == [
        {"id": None, "prompt": "a", "seed": None},
        {"id": 1, "prompt": None, "seed": None},
    ]
    assert read(write({"prompt": pa.nulls(2)})) == [{"prompt": None}, {"prompt": None}]


def test_whole_floats_are_integers(write):
    # As pandas has a column of integers with a gap.
    columns = {"id": [1.0, math.nan, 3.5], "prompt": ["a"] * 3, "max_tokens": [2.0, None, 5.0]}
    rows = rows_of(write(columns))
    values = [(row.id, row.fields.get("max_tokens")) for row in rows]
    assert list(map(repr, values)) == ["(1, 2)", "(None, None)", "(3.5, 5)"]


def test_floats_that_are_not_exact_stay_floats():
    for value in (2.0**53, -(2.0**53), 0.0):
        assert type(parquet.whole(value)) is int
    for value in (2.0**53 + 2, math.inf, 0.5):
        assert type(parquet.whole(value)) is float
    assert parquet.whole(math.nan) is None
    assert parquet.whole("1.0") == "1.0"


def test_texts_of_any_type_of_string_are_read(write, pa):
    texts = pa.array(["a", "b", "a", None])
    kinds = [pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
    for kind in kinds:
        rows = read(write({"id": texts.cast(kind), "prompt": texts.cast(kind)}))
        assert [row.get("prompt") for row in rows] == ["a", "b", "a", None]
        assert [row.get("id") for row in rows] == ["a", "b", "a", None]


@pytest.mark.parametrize("kind", ["string", "large_string"])
def test_a_text_that_is_not_utf8_is_read(write, pa, kind):
    bytes_type = pa.binary() if kind == "string" else pa.large_binary()
    texts = pa.array([b"a\xff"], bytes_type).view(getattr(pa, kind)())
    assert read(write({"prompt": texts})) == [{"prompt": "a\udcff"}]


def test_types_that_json_lacks_become_texts(write):
    columns = {
        "id": [date(2020, 2, 1), None],
        "prompt": ["a", "b"],
        "stop": [["x", "y"], []],
    }
    assert read(write(columns)) == [
        {"id": "2020-02-01", "prompt": "a", "stop": ["x", "y"]},
        {"id": None, "prompt": "b", "stop": []},
    ]
    assert read(write({"id": [Decimal("1.50")], "prompt": ["a"]}))[0]["id"] == "1.50"


def test_an_infinite_id_is_an_error_of_its_row(write):
    columns = {"id": [[1.0], [math.inf], [2.0]], "prompt": ["a", "b", "c"]}
    good, bad, last = rows_of(write(columns))
    assert isinstance(bad.error, InputError)
    assert (good.id, last.id) == ([1.0], [2.0])


def test_other_columns_are_listed_once(write, tmp_path):
    file = write({"title": ["x"], "prompt": ["a"], "id": [1], "text": ["y"]})
    assert read(file) == [{"id": 1, "prompt": "a"}]
    assert source(file).ignored == ["title", "text"]
    write({"prompt": ["a"], "x": [1], "y": [1]}, "in/a.parquet")
    write({"prompt": ["a"], "z": [1], "x": [1]}, "in/b.parquet")
    assert source(tmp_path / "in").ignored == ["x", "y", "z"]


def test_the_checksum_is_that_of_the_metadata_at_the_end(write):
    data = Path(file := write({"prompt": ["a", "b"]})).read_bytes()
    size = int.from_bytes(data[-8:-4], "little")
    assert parquet.survey(file, LAYOUT)[-1] == zlib.crc32(data[-8 - size :])


# --- cutting -------------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [1, 3, 4, 100])
@pytest.mark.parametrize("group", [1, 2, 5, 100])
def test_rows_do_not_depend_on_how_tables_are_cut(write, tmp_path, together, group):
    sizes = [7, 0, 1, 12]
    expected = []
    for index, size in enumerate(sizes):
        prompts = [f"{index} {number}" for number in range(size)]
        file = write({"prompt": prompts}, f"in/{index}.parquet", row_group_size=group)
        expected += [(file, number, {"prompt": text}) for number, text in enumerate(prompts, 1)]
    cut = source(tmp_path / "in", together)
    rows = rows_of(tmp_path / "in", together=together)
    assert [(row.file, row.line, row.fields) for row in rows if row.fields] == expected
    assert [row.index for row in rows] == list(range(20))
    assert cut.total == 20
    for file_range in cut.ranges:
        assert 0 < file_range.rows <= together - file_range.index % together


def test_ranges_can_be_read_in_any_order(write):
    file = write({"prompt": [str(number) for number in range(50)]}, row_group_size=20)
    cut, rows = source(file, 7), {}
    for file_range in random.Random(1).sample(cut.ranges, len(cut.ranges)):
        rows |= {row.index: row.fields for row in cut.reader.read(file_range, Ranges())}
    assert rows == {number: {"prompt": str(number)} for number in range(50)}


def test_a_row_group_is_read_once(write, monkeypatch):
    file = write({"prompt": ["x"] * 40}, row_group_size=20)
    cut, opened, real = source(file, 2), [], parquet.open_file
    monkeypatch.setattr(parquet, "open_file", lambda name: opened.append(name) or real(name))
    assert sum(map(len, cut.rows())) == 40
    assert opened == [file, file]


def test_a_table_that_was_replaced_is_read_again(write):
    for text in ("first", "second"):
        (row,) = rows_of(write({"prompt": [text]}))
        assert row.fields == {"prompt": text}


def test_tables_at_an_address_are_read(write, memory):
    file = write({"prompt": ["a", "b"]})
    memory.put(file, "/bucket/in.parquet")
    for name in (f"file://{file}", "memory://bucket/*.parquet"):
        assert [row.fields for row in rows_of(name)] == [{"prompt": "a"}, {"prompt": "b"}]


def test_another_ending_needs_the_format(write):
    file = write({"prompt": ["a"]}, "in.table")
    assert [row.fields for row in rows_of(file, form="parquet")] == [{"prompt": "a"}]


# --- ids -----------------------------------------------------------------------------------------


def test_ids_are_integers_if_they_are_in_every_table(write, pa, tmp_path):
    kinds = dict.fromkeys(["int64", "int8", "uint32"], True)
    # Not all of uint64 fits int64, as which ids are written.
    kinds |= dict.fromkeys(["uint64", "double", "string", "null"], False)
    for kind, whole in kinds.items():
        ids = pa.array([1]).cast(kind) if kind != "null" else pa.nulls(1)
        assert source(write({"id": ids, "prompt": ["a"]})).whole_ids is whole, kind
    write({"id": [1], "prompt": ["a"]}, "in/a.parquet")
    assert source(tmp_path / "in").whole_ids
    write({"prompt": ["a"]}, "in/b.parquet")
    assert not source(tmp_path / "in").whole_ids
    (tmp_path / "lines").write_bytes(b'{"id": 1, "prompt": "a"}\n')
    assert not source(tmp_path / "lines").whole_ids


# --- writing -------------------------------------------------------------------------------------


def written(records, schema):
    from pyarrow.parquet import read_table

    stream = BytesIO()
    parquet.Parquet().write(records, schema, stream)
    return read_table(BytesIO(stream.getvalue()))


@pytest.mark.parametrize(
    "task", [Generation(Options(), None, True), Generation(Options()), Scoring()]
)
def test_all_parts_have_the_same_columns(pa, task):
    columns = IDENTITY | task.schema | task.layout.origin | ERROR
    empty = written([], columns)
    failed = written([{"index": 0, "line": 1, "error": {"code": "c", "message": "m"}}], columns)
    assert empty.schema == failed.schema
    assert empty.column_names == list(columns)
    assert failed.to_pylist()[0]["error"] == {"code": "c", "message": "m"}


@pytest.mark.parametrize(
    ("id", "text"), [(7, "7"), ("7", "7"), ("é", "é"), ([1, "é"], '[1, "é"]'), (True, "true")]
)
def test_ids_of_any_type_are_texts(pa, id, text):
    assert written([{"index": 0, "id": id}], IDENTITY).to_pylist() == [{"index": 0, "id": text}]


@pytest.mark.parametrize(
    ("schema", "name", "value", "expected"),
    [
        (IDENTITY | {"id": "int64"}, "id", -(2**63), -(2**63)),
        (IDENTITY | Generation(Options()).schema, "seed", 2**64 - 1, 2**64 - 1),
        (IDENTITY | Scoring().schema, "model", "m\udcff", "m\ufffd"),  # a path that is not Unicode
    ],
)
def test_a_value_fits_in_its_column(pa, schema, name, value, expected):
    assert written([{"index": 0, name: value}, {}], schema)[name].to_pylist() == [expected, None]


def test_records_and_failures_are_counted(pa):
    error = {"error": {"code": "c", "message": "m"}}
    stream = BytesIO()
    records = [{"index": 0}, {"index": 1} | error, {"index": 2} | error]
    parquet.Parquet().write(records, IDENTITY | ERROR, stream)
    assert parquet.Parquet().count(stream) == (3, 2)


def test_tables_are_joined_in_order(pa):
    from pyarrow.parquet import read_table

    streams = [BytesIO() for _ in range(3)]
    for stream, rows in zip(streams, [[{"index": 0}], [], [{"index": 1}]], strict=True):
        parquet.Parquet().write(rows, IDENTITY, stream)
    target = BytesIO()
    parquet.Parquet().join(lambda: streams, IDENTITY, target, b"")
    assert read_table(target).to_pylist() == [{"index": 0, "id": None}, {"index": 1, "id": None}]


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"PAR1", b"Once\n" * 9, b"PAR1" + b"x" * 90 + b"PAR1"])
def test_a_file_that_is_not_parquet_is_an_error(pa, data, tmp_path):
    file = tmp_path / "in.parquet"
    file.write_bytes(data)
    with pytest.raises(InputError, match=r"in\.parquet"):
        parquet.survey(str(file), LAYOUT)


def test_a_damaged_table_is_an_error(write):
    file = write({"prompt": [f"text {number}" for number in range(1000)]})
    cut = source(file)
    with Path(file).open("r+b") as stream:  # the first page, under a footer that is whole
        stream.write(b"PAR1" + b"\xff" * 200)
    with pytest.raises(InputError, match=r"in\.parquet"):
        list(cut.rows())


def test_the_error_of_a_missing_column_lists_the_others(write):
    file = write({"id": [1], "title": ["a"]})
    with pytest.raises(InputError) as caught:
        parquet.survey(file, LAYOUT)
    columns = "no column 'prompt' or 'text'; its columns are ['id', 'title']"
    assert str(caught.value) == f"{file} has {columns}"


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1], "int64"),
        ("dictionary", "int64"),
        ([1.5], "double"),
        ([b"bytes"], "binary"),
        ([["a"]], "list<.*>"),
        ([{"a": "b"}], "struct<.*>"),
        ([True], "bool"),
    ],
)
def test_a_column_of_texts_must_have_texts(write, pa, values, kind):
    column = pa.array([1, 1, 2]).dictionary_encode() if values == "dictionary" else values
    with pytest.raises(InputError, match=f"the column 'prompt' has the type {kind}, not string"):
        parquet.survey(write({"prompt": column}), LAYOUT)


@pytest.mark.parametrize("name", ["id", "prompt", "seed"])
def test_columns_of_the_same_name_are_an_error(write, pa, name):
    names = list(dict.fromkeys(["prompt", name]))
    table = pa.Table.from_arrays([pa.array(["a"])] * (len(names) + 1), names=[*names, name])
    with pytest.raises(InputError, match=f"several columns '{name}'"):
        parquet.survey(write(table), LAYOUT)


def test_every_table_of_a_folder_is_checked_first(write, tmp_path):
    write({"prompt": ["a"]}, "in/a.parquet")
    bad = write({"title": ["a"]}, "in/b.parquet")
    with pytest.raises(InputError, match="no column 'prompt'") as caught:
        source(tmp_path / "in")
    assert bad in str(caught.value)


@pytest.mark.parametrize("missing", ["pyarrow", "pyarrow.parquet"])
def test_tables_need_pyarrow(missing, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    file = tmp_path / "in.parquet"
    file.write_bytes(b"PAR1")
    with pytest.raises(ResourceError) as caught:
        source(file)
    reason = f"import of {missing} halted; None in sys.modules"
    assert str(caught.value) == f"Parquet needs pyarrow ({reason}): pip install pyarrow"
    with pytest.raises(ResourceError):
        parquet.Parquet().write([], IDENTITY, BytesIO())
