"""The fields of rows: which ones a record keeps, and under which names."""

import csv
import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from gpt_cli import jobs
from gpt_cli.errors import InputError
from gpt_cli.jobs import Activations, Classifying, Generation, Ranking, Scoring, Template, parts
from gpt_cli.jobs.layout import Layout
from gpt_cli.jobs.rows import Source
from gpt_cli.options.request import Options

GENERATION = Generation(Options(max_tokens=2, temperature=0, seed=1))
OUR_MODEL = {"model": "tiny", "dtype": "float32"}


class Notes(jobs.Observer):
    """An observer that keeps notes."""

    def __init__(self):
        self.notes = []

    def note(self, message):
        self.notes.append(message)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def run(task, *rows, output="out.jsonl", name="in.jsonl", **options):
    """Run a job with rows; return the notes."""
    observer = Notes()
    Path(name).write_text(lines(*rows), encoding="utf-8")
    jobs.run(task, name, output, observer=observer, **OUR_MODEL, **options)
    return observer.notes


def records(name="out.jsonl"):
    return [json.loads(line) for line in Path(name).read_text(encoding="utf-8").splitlines()]


def error_of(data, layout, name="in.jsonl"):
    """Return the error of the first row, or of the whole file."""
    Path(name).write_text(data, encoding="utf-8")
    try:
        (row, *_) = next(Source([name], "auto", layout, 4).rows())
    except InputError as error:
        return f"(file) {error}"
    return str(row.error)


# --- what a record has ---------------------------------------------------------------------------

ROW = {
    "title": "T", "id": 7, "text": "It was", "meta": {"a": [1, None]}, "none": None,
    "index": 9, "error": "e", "model": "m", "row_model": "r", "seed": 3, "temperature": 0,
    "prompt": "Once upon", "words": ["It", " was"], "choices": ["a", "b"], "sample": 4,
}  # fmt: skip
OWN = "row_index row_error row_row_model row_model"


@pytest.mark.parametrize(
    ("task", "kept"),
    [
        (GENERATION, f"title row_text meta none {OWN} temperature words choices row_sample"),
        (Scoring(), f"title meta none {OWN} seed temperature prompt words choices sample"),
        (Scoring(words=True), f"title meta none {OWN} seed temperature prompt choices sample"),
        (
            Scoring(words=True, template=Template("{title}")),
            f"text meta none {OWN} seed temperature prompt row_words choices sample",
        ),
        (
            Ranking(),
            "title text meta none row_index row_error model row_model seed temperature "
            "words sample",
        ),
    ],
)
def test_a_record_has_the_fields_of_its_row_in_their_order(task, kept):
    fields = {name: value for name, value in ROW.items() if name != "id"}
    values = task.layout.kept(fields)
    assert [*values] == kept.split()
    assert (values["row_index"], values["row_model"], values["none"]) == (9, "r", None)
    for keep in ("id", "none", None):
        assert replace(task, keep_fields=keep).layout.kept(fields) == {}


def test_names_of_arrays_are_those_of_activations():
    row = dict.fromkeys(
        ["text", "word", "token", "arrays", "hook_embed", "blocks.1.x", "webhook_url"]
    )
    for pool, name in {"word": "word", None: "token", "mean": "arrays"}.items():
        renamed = Activations(("*",), pool).layout.renamed(row)
        names = {name, "arrays", "hook_embed", "blocks.1.x"}
        assert renamed == {name: f"row_{name}" for name in names}


def test_each_kind_of_output_has_the_fields(here):
    rows = [{"id": 1, "text": "It was", "title": "T", "model": [1]}, {"text": "Once upon", "n": 1}]
    assert run(Scoring(), *rows) == ["renamed fields: in the records, model is row_model"]
    first, second = records()
    assert [*first][:5] == ["index", "id", "text", "title", "row_model"]
    assert [*second][:3] == ["index", "text", "n"]
    expected = [
        {"title": "T", "row_model": [1], "n": None},
        {"title": None, "row_model": None, "n": 1},
    ]
    for keep, names in {"id": ["index", "id", "text"], "none": ["index", "text"]}.items():
        assert run(Scoring(keep_fields=keep), *rows, output=f"{keep}.jsonl") == []
        assert [*records(f"{keep}.jsonl")[0]][: len(names) + 1] == [*names, "model"]
        assert run(Scoring(keep_fields=keep), *rows, output=f"{keep}.jsonl", resume=True)[-1:] == [
            "nothing is missing: an earlier run has written all rows"
        ]
    run(Scoring(), *rows, output="out.csv")
    with Path("out.csv").open(encoding="utf-8", newline="") as stream:
        table = [*csv.DictReader(stream)]
    assert [{name: row[name] for name in expected[0]} for row in table] == [
        {"title": "T", "row_model": "[1]", "n": ""}, {"title": "", "row_model": "", "n": "1"}
    ]  # fmt: skip
    pytest.importorskip("pyarrow")
    from pyarrow.parquet import read_table

    run(Scoring(), *rows, output="out.parquet")
    table = read_table("out.parquet").select([*expected[0]])
    assert table.to_pylist() == expected
    # A table as input, with the same fields.
    jobs.run(Scoring(keep_fields="all"), "out.parquet", "again.jsonl", **OUR_MODEL)
    again = records("again.jsonl")[0]
    assert (again["title"], again["row_model"], again["row_row_model"]) == ("T", [1], "tiny")


def test_parts_with_other_columns_are_joined(monkeypatch):
    pytest.importorskip("pyarrow")
    from pyarrow.parquet import read_table

    monkeypatch.setattr(parts, "BYTES", 1)
    values = [1, 2.5, None, "x", {}, {"a": 1}, 2**70, [True], 'a,"\n']
    rows = [{"text": "It was", "x": value, f"only {n}": "é\r"} for n, value in enumerate(values)]
    run(Scoring(), *rows, output="out.parquet")
    column = read_table("out.parquet")["x"].to_pylist()
    assert column == [None if value is None else json.dumps(value) for value in values]
    assert read_table("out.parquet")["only 8"].to_pylist() == [None] * 8 + ["é\r"]
    run(Scoring(), *rows, output="out.csv")
    with Path("out.csv").open(encoding="utf-8", newline="") as stream:
        table = [*csv.DictReader(stream)]
    assert [row["only 3"] for row in table] == ["", "", "", "é\r", "", "", "", "", ""]
    assert [row["x"] for row in table] == [
        "1",
        "2.5",
        "",
        "x",
        "{}",
        '{"a": 1}',
        str(2**70),
        "[true]",
        'a,"\n',
    ]
    # Where all parts have the same type, it stays.
    run(Scoring(), *({"text": "It was", "x": x} for x in (1, 2.5)), output="same.parquet")
    assert read_table("same.parquet")["x"].to_pylist() == [1, 2.5]


def test_numbers_that_json_lacks_are_null_and_an_error_has_no_options():
    data = '{"text": "It was", "x": [NaN, 1e400], "y": "a"}\n'
    data += '{"text": "It was", "x": 1, "special": NaN}\n{"text": "It was", "y": "\\ud800"}\n'
    Path("in.jsonl").write_text(data)
    jobs.run(Scoring(), "in.jsonl", "out.jsonl", **OUR_MODEL)
    good, wrong, no_text = records()
    assert (good["x"], good["y"]) == ([None, None], "a")
    assert wrong.keys() == {"index", "line", "x", "error"}
    assert no_text.keys() == {"index", "line", "error"}


def test_columns_of_tables_that_json_lacks_are_texts_or_ignored():
    pa = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    columns = {
        "text": ["It was", "Once upon"],
        "time": pa.array([1_600_000_000_000_000_001, None], pa.timestamp("ns")),
        "pairs": pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.int64())),
        "image": [{"bytes": b"\xff", "path": "p"}, None],
        "number": [1.5, float("nan")],
    }
    write_table(pa.table(columns), "in.parquet")
    observer = Notes()
    jobs.run(Scoring(), "in.parquet", "out.jsonl", observer=observer, **OUR_MODEL)
    assert observer.notes == ["ignored columns: image"]
    first, second = ([record[name] for name in ("time", "pairs", "number")] for record in records())
    assert first == ["2020-09-13 12:26:40", [["a", 1]], 1.5]
    assert second == [None, None, None]


# --- text or prompt ------------------------------------------------------------------------------

ALL = (GENERATION, Scoring(), Ranking(("a",)), Classifying(), Activations(("hook_embed",)))


@pytest.mark.parametrize("task", ALL)
@pytest.mark.parametrize("form", ["jsonl", "csv", "csv.gz", "parquet"])
def test_a_row_has_a_text_or_a_prompt(task, form):
    own = task.fields[0]
    for rows, expected in {
        ("text", "prompt"): own,
        ("title", "text"): "text",
        ("title", "prompt"): "prompt",
    }.items():
        values = [{name: f" {name}" for name in rows}]
        if form == "parquet":
            pa = pytest.importorskip("pyarrow")
            from pyarrow.parquet import write_table

            write_table(pa.Table.from_pylist(values), "in.parquet")
        else:
            table = "\n".join([",".join(rows), ",".join(f" {name}" for name in rows)]) + "\n"
            data = (lines(*values) if form == "jsonl" else table).encode()
            Path(f"in.{form}").write_bytes(gzip.compress(data) if form == "csv.gz" else data)
        for layout in (task.layout, Layout(task.fields)):
            ((row,),) = Source([f"in.{form}"], "auto", layout, 4).rows()
            assert row.fields[own] == f" {expected}"
            assert (expected in row.fields) == (expected == own)


def test_words_come_before_a_prompt_which_is_then_the_context():
    layout = Scoring().layout
    row = {"prompt": "Once", "words": [" upon"]}
    assert layout.sources(row) == {"text": "text"}
    assert layout.sources({"prompt": "Once"}) == {"text": "prompt"}


MISSING = [
    ('{"id": "i", "n": 1, "title": "T", "body": "B"}', Scoring(),
     'a row needs a string "text" or "prompt"; its fields are n, title, body; to read title, '
     "set the template (--template '{title}')"),
    ('{"title": 5, "stop": "x"}', GENERATION,
     'a row needs a string "prompt" or "text"; its fields are title, stop'),
    ("{}", Ranking(), 'a row needs a string "prompt" or "text"'),
    ('{"text": null, "prompt": "x"}', Scoring(), 'a row needs a string "text", not null'),
    ('{"prompt": 5}', Scoring(), 'a row needs a string "prompt", not 5'),
    ('{"title": "T"}', Scoring(template=Template("{name}")),
     'a row needs a string or number "name"'),
    ("id,title\n1,T\n", Scoring(),
     "(file) in.csv has no column 'text' or 'prompt'; its columns are ['id', 'title']; to read "
     "title, set the template (--template '{title}')"),
    ("id;title\n1;T\n", Scoring(),
     "(file) in.csv has no column 'text' or 'prompt'; its columns are ['id;title']; is its "
     "delimiter ';'?"),
    ("id,title\n1,T\n", Scoring(template=Template("{name}")),
     "(file) in.csv has no column 'name'; its columns are ['id', 'title']"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "task", "says"), MISSING)
def test_without_a_text_the_error_lists_the_fields(data, task, says):
    name = "in.jsonl" if data.startswith("{") else "in.csv"
    assert error_of(data, task.layout, name) == says


# --- misspelled options --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "task", "option"),
    [
        ("temprature", GENERATION, "temperature"),
        ("temperatures", GENERATION, "temperature"),
        ("Temperature", GENERATION, "temperature"),
        ("max-tokens", GENERATION, "max_tokens"),
        ("sede", GENERATION, "seed"),
        ("topk", Generation(Options(), template=Template("{prompt}")), "top_k"),
        ("choice", Ranking(), "choices"),
        ("promt", Scoring(), "prompt"),
        ("edit", Classifying(), "edits"),
        *(
            (name, GENERATION, None)
            for name in ("top_p", "m", "nn", "sead_s", "esed_", "url", "text")
        ),
        ("promt", GENERATION, None),
        ("temprature", Scoring(), None),
        ("seeds", Generation(Options(), template=Template("{prompt} {seeds}")), None),
    ],
)
@pytest.mark.parametrize("keep", ["all", "none"])
def test_a_field_one_letter_away_from_an_option_is_an_error(name, task, option, keep):
    layout = replace(task, keep_fields=keep).layout
    row = {"prompt": "a", "text": "b", name: "0"}
    says = f'unknown field "{name}": did you mean "{option}"? If not, rename it'
    assert error_of(lines(row), layout) == (says if option else "None")
    table = "\n".join([",".join(row), ",".join(row.values())]) + "\n"
    in_table = error_of(table, layout, "in.csv")
    assert in_table == (f"(file) in.csv has an {says}" if option else "None")


# --- earlier outputs -----------------------------------------------------------------------------


def test_an_output_without_the_setting_has_ids():
    rows = [{"id": 1, "text": "It was", "title": "T"}, {"text": "Once upon"}]
    run(Scoring(keep_fields="id"), *rows)
    side = Path(".out.jsonl.job.json")
    job = json.loads(side.read_text())
    assert job.pop("keep_fields") == "id"
    side.write_text(json.dumps(job))
    run(Scoring(keep_fields="id"), *rows, resume=True)
    with pytest.raises(InputError, match=r'keep_fields of out.jsonl was "id", and is now "all"'):
        run(Scoring(), *rows, resume=True)


def test_a_field_named_sample_does_not_stop_a_resumed_run():
    rows = [{"text": "It was", "sample": 3, "samples": "x"}, {"text": "Once upon"}]
    run(Scoring(), *rows)
    whole = Path("out.jsonl").read_bytes()
    Path("out.jsonl").write_bytes(whole.splitlines(keepends=True)[0])
    run(Scoring(), *rows, resume=True)
    assert Path("out.jsonl").read_bytes() == whole
