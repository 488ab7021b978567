"""`gpt-cli score` over JSON Lines and tables: each row by itself, and rows that a filter passes."""

import gzip
import json
import math
from pathlib import Path

import pytest

from gpt_cli.cli.progress import Progress
from support.in_process import finished, refusal, run_here, terminal_here

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
    kept = "gpt-cli: kept 2 of 4 rows\n"
    for arguments in ([name], [f"{name}.gz"], flags):
        assert run_here(*command, *arguments, input=data) == (expected, kept)
    if not expected.endswith(b"\n"):
        expected += b"\n"
    assert run_here(*command, name, f"{name}.gz")[0] == expected + b"".join(passed)
    none = [*SCORE, "--max-perplexity", "1"]
    assert run_here(*none, name)[0] == header
    Path(name).write_bytes(header)
    assert run_here(*none, name)[0] == header
    row = b'{"title": "No note names this field.", "text": "Once upon a time"}\n'
    assert run_here(*command, input=row) == (row, "gpt-cli: kept 1 of 1 row\n")


def test_a_filter_reports_damaged_rows_and_drops_them():
    Path("rows.csv").write_bytes(b'text,n\nOnce upon a time,1\nragged\nThe moon.,"2')
    done = finished(*SCORE, "--max-perplexity", "1e9", "rows.csv")
    assert (done.returncode, done.stdout) == (6, b"text,n\nOnce upon a time,1\n")
    first, second, kept, last = done.stderr.decode().splitlines()
    assert first == "gpt-cli: line 3: the row has 1 cell, not 2"
    assert second.startswith("gpt-cli: line 4: a quote of the row never closes")
    assert kept == "gpt-cli: kept 1 of 3 rows"
    assert last == "gpt-cli: error: 2 of 3 lines could not be scored"
    again = finished(*SCORE, "--max-perplexity", "1e9", "rows.csv", "-o", "kept.csv")
    assert (again.returncode, Path("kept.csv").read_bytes()) == (6, done.stdout)
    *notes, _, last = again.stderr.decode().splitlines()
    assert notes[:2] == [first, second]
    assert notes[2].startswith("gpt-cli: 3 of 3 rows (2 failed), 3 tokens")
    assert last == "gpt-cli: error: 2 of 3 rows failed"


def test_an_interrupted_filter_leaves_no_file_and_is_resumed(monkeypatch):
    """On standard output and with `-q`, too, the exit code and the rows are what they were."""
    command = [*SCORE, "--max-perplexity", "100", "rows.csv"]
    expected, _ = run_here(*command)
    advance = Progress.advance

    def interrupt(self, *arguments):
        advance(self, *arguments)
        if self._rows == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "advance", interrupt)
        out, shown = run_here(*command, code=130)
        assert expected.startswith(out)
        assert shown == "gpt-cli: interrupted after 3 rows\n"
        assert run_here(*command, "-q", code=130) == (out, "")
        _, shown = run_here(*command, "-o", "kept.csv", code=130)
    totals, last = shown.splitlines()
    assert totals.startswith("gpt-cli: 3 of 4 rows, ")
    hint = "gpt-cli: interrupted after 3 rows: the same command with --resume continues"
    assert (last, Path("kept.csv").exists()) == (hint, False)
    assert "--resume is not set, and kept.csv.parts exists" in refusal(*command, "-o", "kept.csv")
    for _ in range(2):  # and complete
        _, shown = run_here(*command, "-o", "kept.csv", "--resume")
        assert Path("kept.csv").read_bytes() == expected
        assert shown.splitlines()[-1] == "gpt-cli: kept 2 of 4 rows"
    assert "--max-perplexity of kept.csv was 100.0, and is now 9.0" in refusal(
        *command, "-o", "kept.csv", "--resume", "--max-perplexity", "9"
    )
    code, shown = terminal_here(*command)
    assert (code, shown.splitlines()[-1]) == (0, "gpt-cli: kept 2 of 4 rows")


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


# --- files of rows, without --lines --------------------------------------------------------------


def sums_of(scores):
    """Return what a file of rows with these scores shows."""
    total = sum(score.total_logprob for score in scores)
    tokens = sum(score.tokens_scored for score in scores)
    size = sum(score.bytes_scored for score in scores)
    return {
        "tokens": sum(len(score.ids) for score in scores),
        "tokens_scored": tokens,
        "total_logprob": pytest.approx(total),
        "perplexity": pytest.approx(math.exp(-total / tokens)),
        "bits_per_byte": pytest.approx(-total / math.log(2) / size),
    }


def write_table(file):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"text": TEXTS}), file)


@pytest.mark.parametrize("name", [*TABLES, "rows.parquet"])
def test_a_file_of_rows_has_the_sums_of_its_texts(name, tiny):
    write_table("rows.parquet")
    expected = sums_of(tiny.score_many(TEXTS))
    files = [name] if name.endswith("parquet") else [name, f"{name}.gz"]
    for file in files:
        out, errors = run_here(*SCORE, "--json", file)
        (told,) = map(json.loads, out.splitlines())
        assert (told.pop("index"), told.pop("rows"), errors) == (0, 4, "")
        assert told == expected | {"model": "tiny", "adapter": None}
    shown = run_here(*SCORE, name)[0].decode().splitlines()
    assert shown[:2] == [
        "rows            4",
        f"tokens          {expected['tokens']} ({expected['tokens_scored']} scored)",
    ]
    assert run_here(*SCORE, "--total", name)[0].split()[1] == name.encode()
    if name == "rows.jsonl":
        assert run_here(*SCORE, input=Path(name).read_bytes())[0].decode().splitlines() == shown
    assert f"{name} has rows: add --lines" in refusal(*SCORE, name, "--words")


def test_files_of_rows_and_texts_keep_their_order(tiny):
    Path("a.txt").write_bytes(b'{"text": "Once"}\n')
    Path("empty.csv").write_bytes(b"text\n")
    Path("lie.csv").write_bytes(gzip.compress(b"text\nOnce\n"))
    files = ["rows.csv", "missing", "a.txt", "empty.csv", "lie.csv", "rows.tsv"]
    done = finished(*SCORE, "--json", *files)
    told = list(map(json.loads, done.stdout.splitlines()))
    assert [(record["index"], record["file"]) for record in told] == list(enumerate(files))
    errors = [record["error"]["message"] for record in told if "error" in record]
    assert errors[0].startswith("cannot read missing")
    assert errors[1] == "empty.csv has no rows"
    assert errors[2] == "lie.csv is compressed by gzip: rename it to lie.csv.gz"
    assert told[2]["tokens"] == len(tiny.encode('{"text": "Once"}'))
    assert (told[0]["rows"], told[5]["rows"]) == (4, 4)
    assert done.returncode == 6


def test_a_damaged_row_is_left_out_and_reported():
    Path("rows.jsonl").write_bytes(b'{"text": "Once upon"}\nLoading...\n')
    done = finished(*SCORE, "rows.jsonl")
    assert done.returncode == 6
    assert done.stdout.startswith(b"rows            1\ntokens          2 (1 scored)\n")
    note, error = done.stderr.decode().splitlines()
    assert note.startswith("gpt-cli: rows.jsonl, line 2: the row is not valid JSON")
    assert error == "gpt-cli: error: 1 of 2 texts could not be scored"
    Path("rows.jsonl").write_bytes(b"Loading...\n")
    done = finished(*SCORE, "rows.jsonl", "--json")
    assert b"rows.jsonl: no row has a token that is scored" in done.stdout


def test_models_are_compared_over_the_texts_of_rows():
    def compared(*files, input=b""):
        out, _ = run_here("compare", "tiny", "tiny@int8", "--json", *files, input=input)
        return json.loads(out)

    for number, text in enumerate(TEXTS):
        Path(f"{number}.txt").write_text(text)
    expected = compared(*(f"{number}.txt" for number in range(4)))
    for name in TABLES:
        told = compared(name)
        assert told["kl"] == expected["kl"]
        assert {token["file"].partition(", line ")[0] for token in told["worst"]} == {name}
    assert compared(input=Path("rows.jsonl").read_bytes())["kl"] == expected["kl"]
    Path("rows.csv").write_bytes(b"text\nOnce upon\nragged,\n")
    assert "rows.csv, line 3: the row has 2 cells, not 1" in refusal(
        "compare", "tiny", "tiny", "rows.csv"
    )
    Path("rows.csv").write_bytes(b"text\n")
    assert "rows.csv has no rows" in refusal("compare", "tiny", "tiny", "rows.csv")
