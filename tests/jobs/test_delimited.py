"""CSV and TSV: rows with quotes and line ends, wherever a file is cut; and damaged tables."""

import csv
import gzip
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt_cli.errors import MALFORMED, InputError, ResourceError
from gpt_cli.jobs import Activations, Generation, Scoring, delimited, storage
from gpt_cli.jobs.layout import Layout, Template
from gpt_cli.jobs.rows import Source
from gpt_cli.options.request import Options

LAYOUT = Layout(("text", "seed"))


def source(name, *, layout=LAYOUT, together=4, form="csv", **options):
    return Source([str(name)], form, layout, together, **options)


def rows_of(source):
    return [row for block in source.rows() for row in block]


@pytest.fixture
def table(tmp_path):
    """Write a table; return its rows."""

    def write(data, **options):
        (tmp_path / "in.csv").write_bytes(data.encode() if isinstance(data, str) else data)
        return rows_of(source(tmp_path / "in.csv", **options))

    return write


def refused(table, data, **options):
    with pytest.raises(InputError) as caught:
        table(data, **options)
    return str(caught.value).partition("in.csv ")[2]


texts = st.text('aé🦊",;\n \t\u2028x', max_size=5)
rows = st.lists(st.tuples(texts, texts, texts), max_size=9)


@given(rows, st.integers(1, 4), st.sampled_from(",;\t"), st.booleans(), st.data())
def test_rows_are_those_of_a_writer_wherever_the_file_is_cut(
    tmp_path_factory, rows, together, delimiter, marked, data
):
    text = io.StringIO(newline="")
    writer = csv.writer(
        text,
        delimiter=delimiter,
        quoting=data.draw(st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])),
        lineterminator=data.draw(st.sampled_from(["\n", "\r\n"])),
    )
    writer.writerow(["id", "text", "b"])
    writer.writerows(rows)
    file = tmp_path_factory.mktemp("cut") / "in"
    file.write_bytes((b"\xef\xbb\xbf" if marked else b"") + text.getvalue().encode())
    cut = source(file, together=together, delimiter=delimiter)
    found = rows_of(cut)
    assert [(row.id, row.fields["text"]) for row in found] == [
        (id or None, text) for id, text, _ in rows
    ]
    assert [row.index for row in found] == list(range(len(rows))) and cut.total == len(rows)
    assert all(0 < part.rows <= together for part in cut.ranges)
    lines = 1 + file.read_bytes().count(b"\n")
    assert all(1 < row.line <= lines for row in found)
    packed = file.with_suffix(".gz")
    packed.write_bytes(gzip.compress(file.read_bytes()))
    assert rows_of(source(packed, together=together, delimiter=delimiter)) == found
    with pytest.MonkeyPatch.context() as patch:
        stream = io.BufferedReader(io.BytesIO(file.read_bytes()))
        patch.setattr("sys.stdin", io.TextIOWrapper(stream))
        assert rows_of(source("-", together=together, delimiter=delimiter)) == found


def test_lines_are_those_where_rows_begin(table):
    rows = table('\n\ntext,b\n\n"one\n\ntwo",1\nthree,2\n\n')
    assert [(row.line, row.fields["text"]) for row in rows] == [(5, "one\n\ntwo"), (8, "three")]


def test_cells_of_options_are_numbers_or_json_and_others_are_texts(table):
    layout = Generation(Options()).layout
    header = "id,prompt,seed,temperature,stop,regex,logit_bias,choices,beams,unknown\n"
    rows = table(
        header
        + '007,12,3,0.5,7,[0-9],"{""5"": 1}","[""a""]",,x\n,"",,hot,"[""a"", ""b""]",,,,2,\n',
        layout=layout,
    )
    assert [(row.id, row.fields) for row in rows] == [
        (
            "007",
            {"prompt": "12", "seed": 3, "temperature": 0.5, "stop": "7", "regex": "[0-9]",
             "logit_bias": {"5": 1}, "choices": ["a"], "unknown": "x"},
        ),
        (None, {"prompt": "", "temperature": "hot", "stop": ["a", "b"], "beams": 2, "unknown": ""}),
    ]  # fmt: skip


def test_the_layout_says_what_is_read(table):
    data = "id,title,text,context,special\n1,T,one,before,true\n"
    (row,) = table(data, layout=Scoring(keep_fields="id").layout)
    assert row.fields == {"text": "one", "context": "before", "special": True}
    (row,) = table(data, layout=Activations(("x",)).layout)
    assert row.fields == {"title": "T", "text": "one", "context": "before", "special": True}
    (row,) = table('words\n"[""one"", "" two""]"\n', layout=Scoring().layout)
    assert row.fields == {"words": ["one", " two"], "text": "one two"}
    layout = Scoring(template=Template("{title}: {text}")).layout
    (row,) = table(data, layout=layout)
    fields = {"title": "T", "text": "one", "special": True, "context": "before"}
    assert (row.id, row.fields) == ("1", fields)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (b"text,seed", "the row is the header again: remove it"),
        (b"a", "the row has 1 cell, not 2"),
        (b"a,1,", "the row has 3 cells, not 2"),
        (b'"a"b,1', "the row is not valid CSV: ',' expected after '\"'"),
        (b"a\rb,1", "the row has a CR outside of quotes: end lines by LF, such as with tr"),
        (b"a\0,1", "the row has NUL bytes, as a file that was cut off or is in UTF-16"),
        (
            b"caf\xe9,1",
            "the row is not UTF-8 at byte 3: convert the file, such as by iconv -f CP1252 -t UTF-8",
        ),
    ],
)
def test_a_damaged_row_is_an_error_and_the_others_continue(row, says, table, tmp_path):
    rows = table(b"text,seed\nfirst,1\n" + row + b"\nlast,2\n")
    assert [row.fields.get("text") for row in rows] == ["first", None, "last"]
    assert str(rows[1].error).startswith(says)
    assert (rows[1].line, rows[2].line) == (3, 4)


def test_a_quote_that_never_closes_and_a_tail_of_nul_bytes_are_errors(table):
    rows = table('text\none\n"two\nthree\nfour\n', together=1)
    assert [row.fields.get("text") for row in rows] == ["one", None]
    lines = "3 lines, up to the end of the file, are in it"
    assert str(rows[1].error) == f"a quote of the row never closes: {lines}"
    (row,) = table('text\n"one')
    assert "never closes: 1 line, up" in str(row.error)
    first, tail = table(b"text\none\n" + bytes(5000))
    assert first.fields == {"text": "one"} and "NUL bytes" in str(tail.error)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("a,text,text\n", "has several columns 'text': keep one of them"),
        ("text,a,a\n", "has several columns 'a': keep one of them"),
        ("a,b\n", "has no column 'text' or 'prompt'; its columns are ['a', 'b']"),
        (
            "a;text\n",
            "has no column 'text' or 'prompt'; its columns are ['a;text']; is its delimiter ';'?",
        ),
        (
            "a\ttext\n",
            "has no column 'text' or 'prompt'; its columns are ['a\\ttext']; is its delimiter "
            "'\\t'?",
        ),
        ('"text\n', "cannot be read: a quote of the row never closes: 1 line, up to the end"),
        (b"text\0\n", "cannot be read: the row has NUL bytes"),
        (b"text,\xe9\n", "is not UTF-8: convert it with iconv"),
    ],
)
def test_a_header_that_does_not_suit_is_refused(data, says, table):
    assert refused(table, data).startswith(says)


def test_a_table_may_have_columns_without_names_and_no_rows(table):
    assert [row.fields for row in table(",text,,\n0,one,,\n")] == [{"text": "one"}]
    assert table("text\n") == table("") == table("\n\n") == []


def test_a_cell_may_be_long_but_must_fit_the_memory(table, monkeypatch):
    (row,) = table(f"text\n{'x' * 200_000}\n")
    assert len(row.fields["text"]) == 200_000
    monkeypatch.setattr(storage, "memory_limit", lambda: 10_000)
    with pytest.raises(ResourceError, match="does not fit the free memory"):
        table('text\n"' + "x\n" * 6000)


# --- records -------------------------------------------------------------------------------------

SCHEMA = {"index": "int64", "text": "string", "words": ["string"], "score": "float64", "error": {}}
RECORDS = [
    {"index": 0, "text": 'a,"b"\nc\td', "words": ["é", "x"], "score": 0.1},
    {"index": 1, "text": "a\rb", "score": 1e300, 'other, "b"': 5},
    {"index": 2, "error": {"code": "invalid_input"}},
]


@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_records_are_tables_that_can_be_joined(delimiter, table, tmp_path):
    written = delimited.Delimited(delimiter)

    def of(records):
        stream = io.BytesIO()
        written.write(records, SCHEMA, stream)
        return stream.getvalue()

    whole = of(RECORDS)
    target = io.BytesIO()
    parts = [of(RECORDS[:1]), of(RECORDS[1:])]  # with different columns
    written.join(lambda: map(io.BytesIO, parts), SCHEMA, target, b"")
    assert target.getvalue() == whole
    assert next(csv.reader([whole.decode().partition("\n")[0]], delimiter=delimiter)) == [
        *SCHEMA,
        'other, "b"',
    ]
    assert written.count(io.BytesIO(whole)) == (3, 1)
    assert written.count(io.BytesIO(of([]))) == (0, 0)
    assert (written.manifest(io.BytesIO(whole)), written.has_manifest) == (None, False)
    rows = table(whole, layout=Layout(("text", "words", "score", "error")), delimiter=delimiter)
    assert [row.fields for row in rows] == [
        {name: value for name, value in record.items() if name in SCHEMA and name != "index"}
        | {"text": record.get("text", "")}
        for record in RECORDS
    ]


@pytest.mark.parametrize("damaged", [b"no,records\n", b'index,error\n1,"', b"index,error\n1\n"])
def test_what_is_no_table_of_records_cannot_be_counted(damaged):
    with pytest.raises(MALFORMED):
        delimited.Delimited(",").count(io.BytesIO(damaged))
