"""`gpt-cli score` over JSON Lines and tables: each row by itself, and rows that a filter passes."""

import gzip
import json
from pathlib import Path

import pytest

from support.in_process import finished, refusal, run_here

SCORE = ["score", "--model", "tiny", "--threads", "1"]
TEXTS = ["Once upon a time", "moon the\nlittle who", "x", "Once upon a time, there"]
# The header, and the rows as they are in the file.
TABLES = {
    "rows.jsonl": (b"", [json.dumps({"text": text, "id": 1}).encode() + b"\n" for text in TEXTS]),
    "rows.csv": (
        b"\xef\xbb\xbf" + b'"id","text"\r\n',
        [b"1,Once upon a time\r\n", b'1,"moon the\nlittle who"\r\n', b"1,x\r\n",
         b'1,"Once upon a time, there"\r\n'],
    ),
    "rows.tsv": (
        b"id\ttext\n",
        [b"1\tOnce upon a time\n", b'1\t"moon the\nlittle who"\n', b"1\tx\n",
         b"1\tOnce upon a time, there"],
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Write each table, also compressed, in the current folder."""
    monkeypatch.chdir(tmp_path)
    for name, (header, rows) in TABLES.items():
        data = header + b"".join(rows)
        Path(name).write_bytes(data)
        Path(f"{name}.gz").write_bytes(gzip.compress(data))


def in_a_pipe(name):
    """Return the flags and the input for a table in a pipe."""
    form = name.rpartition(".")[2]
    return [] if form == "jsonl" else ["--format", form], Path(name).read_bytes()


@pytest.mark.parametrize("name", TABLES)
def test_each_row_is_scored_on_its_own(name, tiny):
    command = [*SCORE, "--lines"]
    out, errors = run_here(*command, name)
    assert errors == ""
    *lines, rest = out.decode().split("\n")
    cells = [line.split("\t") for line in lines]
    assert rest == ""
    assert [row[-1] for row in cells] == [text.replace("\n", "\\n") for text in TEXTS]
    assert [int(row[0]) for row in cells] == [len(score.ids) for score in tiny.score_many(TEXTS)]
    flags, data = in_a_pipe(name)
    for again in ([*command, f"{name}.gz"], [*command, *flags]):
        assert run_here(*again, input=data)[0] == out
    told = [json.loads(line) for line in run_here(*command, "--json", name)[0].splitlines()]
    assert [(row["index"], row["text"]) for row in told] == list(enumerate(TEXTS))
    assert not {"line", "data"} & set(told[0])
    words = run_here(*command, "--words", "--bos", name)[0].decode().splitlines()
    first = 1 if name.endswith("jsonl") else 2
    numbers = [first, first + 1, first + 2, first + 3]
    if first == 2:  # the second row has two lines
        numbers = [2, 3, 5, 6]
    assert list(dict.fromkeys(int(word.split("\t")[0]) for word in words)) == numbers
    total = run_here(*command, "--total", name)[0].decode().split()
    assert total[1] == name


@pytest.mark.parametrize("name", TABLES)
def test_a_filter_passes_rows_unchanged_below_their_header(name, tiny):
    scores = tiny.score_many(TEXTS)
    limit = scores[1].perplexity - 1
    passing = [score.perplexity is not None and score.perplexity < limit for score in scores]
    assert passing == [True, False, False, True]
    header, rows = TABLES[name]
    passed = [rows[0], rows[3]]
    expected = header + b"".join(passed)
    command = [*SCORE, "--max-perplexity", limit]
    flags, data = in_a_pipe(name)
    for arguments in ([name], [f"{name}.gz"], flags):
        assert run_here(*command, *arguments, input=data) == (expected, "")
    if not expected.endswith(b"\n"):
        expected += b"\n"
    assert run_here(*command, name, f"{name}.gz")[0] == expected + b"".join(passed)
    none = [*SCORE, "--max-perplexity", "1"]
    assert run_here(*none, name)[0] == header
    Path(name).write_bytes(header)
    assert run_here(*none, name)[0] == header


def test_a_filter_reports_damaged_rows_and_drops_them():
    Path("rows.csv").write_bytes(b'text,n\nOnce upon a time,1\nragged\nThe moon.,"2')
    done = finished(*SCORE, "--max-perplexity", "1e9", "rows.csv")
    assert (done.returncode, done.stdout) == (6, b"text,n\nOnce upon a time,1\n")
    first, second, last = done.stderr.decode().splitlines()
    assert first == "gpt-cli: line 3: the row has 1 cell, not 2"
    assert second.startswith("gpt-cli: line 4: a quote of the row never closes")
    assert last == "gpt-cli: error: 2 of 3 lines could not be scored"


def test_a_filter_needs_rows_of_one_format():
    assert "rows.jsonl has another format or other columns" in refusal(
        *SCORE, "--max-perplexity", "9", "rows.csv", "rows.jsonl"
    )


def test_lines_may_be_read_as_lines_whatever_their_name():
    out, _ = run_here(*SCORE, "--lines", "--format", "lines", "rows.jsonl")
    assert out.decode().splitlines()[0].endswith('\t{"text": "Once upon a time", "id": 1}')
    Path("braces.txt").write_text('{"a": 1}\n{"b": 2}\n')
    assert run_here(*SCORE, "--max-perplexity", "1e30", "braces.txt")[0] == (
        b'{"a": 1}\n{"b": 2}\n'
    )


def test_records_of_lines_are_those_of_rows():
    for name in TABLES:
        run_here(*SCORE, "-q", "--lines", name, "-o", "new.jsonl")
        run_here(*SCORE, "-q", name, "-o", "other.jsonl")
        assert Path("new.jsonl").read_bytes() == Path("other.jsonl").read_bytes()
        for file in Path().glob("*new*"), Path().glob("*other*"):
            for path in file:
                path.unlink()
