"""`gpt-cli rank` as a user meets it, and `Engine.rank`."""

import json
import math

import pytest

from gpt_cli.records import json_line
from support.in_process import records_here, refusal, run_here, terminal_here
from support.scores import same

RANK = ["rank", "--model", "tiny"]

CHOICES = ["boy named Noah", "fox", "girl", "1,000 €", "🦊", "y", "lamb who lived in a small town"]
LISTED = "\n".join(CHOICES).encode()


def run(*arguments, **options):
    """Return the records of a command, best first."""
    records = records_here(*RANK, *arguments, **options)
    assert [record["rank"] for record in records] == list(range(1, len(records) + 1))
    probabilities = [record["probability"] for record in records]
    assert probabilities == sorted(probabilities, reverse=True)
    assert math.fsum(probabilities) == pytest.approx(1)
    return records


def assert_draw(records, numbers):
    """Assert that the probabilities are the softmax of numbers."""
    weights = [math.exp(number - max(numbers)) for number in numbers]
    expected = [weight / math.fsum(weights) for weight in weights]
    assert [record["probability"] for record in records] == pytest.approx(expected)


@pytest.fixture(scope="module")
def likelihood(tiny):
    """The log-likelihood of each token of a choice at the end of the whole text."""

    def likelihood(prompt, choice):
        count = len(tiny.encode(choice))
        return tiny.score(prompt + choice).token_logprobs[-count:]

    return likelihood


# --- in a pipe -----------------------------------------------------------------------------------


def test_each_choice_has_the_likelihood_of_its_tokens_after_the_prompt(likelihood):
    prompt = "Once upon a time, there was a"
    records = run(prompt, "--choices-file", "-", input=LISTED + b"\r\n\r\n")
    assert {record["text"] for record in records} == {f" {choice}" for choice in CHOICES}
    for record in records:
        keys = ["rank", "choice", "text", "probability", "logprob", "tokens", "bytes", "model"]
        keys.append("adapter")
        assert list(record) == keys
        assert record["text"] == f" {record['choice']}"
        logprobs = likelihood(prompt, record["text"])
        assert record["tokens"] == len(logprobs)
        assert record["bytes"] == len(record["text"].encode())
        assert record["logprob"] == pytest.approx(math.fsum(logprobs), rel=1e-5)
        assert record["model"] == "tiny"
    assert len({record["tokens"] for record in records}) > 3
    assert_draw(records, [record["logprob"] for record in records])


@pytest.mark.parametrize(("by", "length"), [("token", "tokens"), ("byte", "bytes")])
def test_choices_may_be_compared_by_their_mean(by, length, tmp_path):
    file = tmp_path / "choices.txt"
    file.write_bytes(b"\xef\xbb\xbf" + LISTED)
    prompt = "Once upon a time, there was a"
    records = run(prompt, "--choices-file", str(file), "--by", by)
    assert_draw(records, [record["logprob"] / record[length] for record in records])


def test_spaces_around_choices_do_not_count_and_one_is_added_unless_the_prompt_ends_with_one():
    after_space = run("The sky was ", "--choices", "blue,red")
    assert after_space == run("The sky was ", "--choices", " blue , red")
    assert [record["text"] for record in after_space] == ["blue", "red"]
    before_space = run("The sky was", "--choices", " blue,red")
    assert [record["text"] for record in before_space] == [" blue", " red"]
    for one, other in zip(after_space, before_space, strict=True):
        # "blue" after a space is the one token " blue"
        assert one["tokens"] == other["tokens"] == 1
        assert one["logprob"] == pytest.approx(other["logprob"], rel=1e-5)
        assert one["probability"] == pytest.approx(other["probability"], rel=1e-5)
        assert one["bytes"] == other["bytes"] == len(" " + one["choice"])


def test_exact_choices_go_on_within_a_word():
    records = run("--exact", "Once up", "--choices", "on,side,hill")
    assert records[0]["text"] == "on"
    assert records[0]["probability"] > 0.99


def test_an_empty_prompt_ranks_beginnings_of_a_text_without_a_space():
    records = run("", "--choices", "The,Once")
    assert [record["text"] for record in records] == ["Once", "The"]
    (first,) = run("", "--choices", "Once")
    assert first["logprob"] == pytest.approx(records[0]["logprob"], rel=1e-5)
    assert first["probability"] == 1


def test_a_choice_in_a_file_ends_only_with_its_line():
    records = run("x", "--choices-file", "-", input="a\x0cb\nc\u2028d\x85e\n".encode())
    assert {record["text"] for record in records} == {" a\x0cb", " c\u2028d\x85e"}


# --- on a terminal -------------------------------------------------------------------------------


def test_a_terminal_gets_a_table_or_json_without_control_characters():
    def shown_on_terminal(*arguments):
        code, shown = terminal_here(*RANK, "The sky was", "--choices", *arguments)
        assert code == 0
        return shown

    header, *rows, end = shown_on_terminal("red,blue").split("\r\n")
    assert header.split() == ["probability", "log-lik.", "tokens", "choice"]
    assert [row.split() for row in rows] == [
        ["67.70%", "-14.384", "1", '"', 'blue"'],
        ["32.30%", "-15.124", "1", '"', 'red"'],
    ]
    assert end == ""
    lines = shown_on_terminal("red,blue", "--json").splitlines()
    assert [json.loads(line)["text"] for line in lines] == [" blue", " red"]
    shown = shown_on_terminal("\x1b[31mred,\x9b31mred\x7f")
    assert not {"\x1b", "\x9b", "\x7f"} & set(shown)


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([], "--choices"),
        (["--choices", "a", "--choices-file", "b"], "--choices"),
        (["--choices", ""], '--choices must be one or more texts that are not empty, not ""'),
        (["--choices", "a,,b"], '--choices must be one or more texts that are not empty, not ""'),
        (["--choices", "a, ,b"], "a choice is empty"),
        (["--choices", "a,b,a"], "duplicate choice 'a'"),
        (["--choices", "a, a"], "duplicate choice 'a'"),
        (["--choices", "a", "--by", "word"], "--by"),
        (["--choices-file", "/no/such/file"], "/no/such/file"),
        (["--choices", "once " * 600], "context of 512"),
        (["--choices", "a", "--file", "/no/such/file"], "--file and an argument"),
        (["--choices", "\udcff"], "Unicode"),
    ],
)
def test_bad_input_is_one_line_that_names_it_and_exit_code_2(arguments, what):
    assert what in refusal(*RANK, "The sky was", *arguments)


@pytest.mark.parametrize("data", [b"", b"\n\r\n", b"caf\xe9\n"])
def test_a_file_without_a_choice_and_one_that_is_not_utf8_are_refused(data):
    refusal(*RANK, "x", "--choices-file", "-", input=data)


def test_rows_and_choices_cannot_share_a_pipe():
    assert "cannot both be read from the pipe" in refusal(*RANK, "--choices-file", "-")


# --- rows ----------------------------------------------------------------------------------------

TEMPLATE = "Once upon a time, there was a {line}. It was very"
LINES = ["fox", "lamb", "Übel {line}", "fox"]
SIZES = "big,small,old"


def lines_here(*arguments, code=0, **options):
    """Return the lines that the command writes, as their cells."""
    out, _ = run_here(*RANK, *arguments, code=code, **options)
    return [line.split("\t") for line in out.decode().splitlines()]


def rows_here(*arguments, code=0, **options):
    """Return the records that a command writes for rows."""
    out, _ = run_here(*arguments, code=code, **options)
    return [json.loads(line) for line in out.decode().splitlines()]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_rows(here, rows):
    (here / "in.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


def test_each_line_has_its_likeliest_choice(here, tiny):
    (here / "in.txt").write_text("\n".join(LINES) + "\n\n", encoding="utf-8")
    (here / "template.txt").write_text(TEMPLATE + "\n", encoding="utf-8")
    expected = []
    for line in LINES:
        best = tiny.rank(TEMPLATE.replace("{line}", line), [" big", " small", " old"])[0]
        expected.append([best.text.strip(), f"{best.probability:.4f}", line])
    for template in ("template.txt", TEMPLATE):
        flags = "--template", template, "--choices", SIZES
        for source in (["in.txt"], ["--file", "in.txt"], [], ["-"]):
            assert lines_here(*source, *flags, input="\n".join(LINES).encode()) == expected
    filled = [TEMPLATE.replace("{line}", line) for line in LINES]
    shown = lines_here("--choices", SIZES, input="\n".join(filled).encode())
    assert shown == [[*cells[:2], text] for cells, text in zip(expected, filled, strict=True)]


def test_line_ends_of_a_template_are_those_of_unix(here):
    (here / "unix.txt").write_bytes(b"The fox.\nThe {line} was\n")
    (here / "dos.txt").write_bytes(b"\xef\xbb\xbfThe fox.\r\nThe {line} was\r\n")
    unix, dos = [
        rows_here(*RANK, "--template", name, "--choices", SIZES, "--json", input=b"lamb\r\n")
        for name in ("unix.txt", "dos.txt")
    ]
    assert unix == dos


def test_records_of_rows_have_all_choices_as_those_of_one_prompt(here, tiny):
    rows = [
        {"id": "a", "prompt": "The sky was", "choices": ["blue", "red"]},
        {"prompt": "The sky was"},
        {"id": [1], "prompt": "The sun was ", "choices": None},
    ]
    write_rows(here, rows)
    records = rows_here(*RANK, "in.jsonl", "--choices", "up,down", "--json")
    alone = [
        run(row["prompt"], "--choices", ",".join(row.get("choices") or ["up", "down"]))
        for row in rows
    ]
    expected = [
        {"index": 0, "id": "a", "prompt": "The sky was", "choices": alone[0]},
        {"index": 1, "prompt": "The sky was", "choices": alone[1]},
        {"index": 2, "id": [1], "prompt": "The sun was ", "choices": alone[2]},
    ]
    assert records == same(tiny.model, expected)
    run_here(*RANK, "in.jsonl", "--choices", "up,down", "-o", "out.jsonl")
    assert (here / "out.jsonl").read_bytes() == b"".join(json_line(r).encode() for r in records)


def test_an_interrupted_job_is_resumed_and_only_for_the_same_question(here):
    rows = [{"a": f"fox {n}", "b": n + 0.5, "label": n} for n in range(7)]
    write_rows(here, rows)
    job = [*RANK, "in.jsonl", "--template", "{{{a}}} and {b}{a} was", "--choices", SIZES]
    run_here(*job, "-o", "whole.jsonl")
    whole = (here / "whole.jsonl").read_bytes()
    assert json.loads(whole.splitlines()[1])["b"] == "1.5"
    run_here(*job, "-o", "out.jsonl")
    (here / "out.jsonl").write_bytes(b"".join(whole.splitlines(True)[:3]) + b'{"index": 3, "a"')
    run_here(*job, "-o", "out.jsonl", "--resume")
    assert (here / "out.jsonl").read_bytes() == whole
    for other in (["--by", "byte"], ["--choices", "x"], ["--exact"]):
        assert "out.jsonl" in refusal(*job, *other, "-o", "out.jsonl", "--resume")
    assert "out.jsonl" in refusal(*job[:-3], "{a}", *job[-2:], "-o", "out.jsonl", "--resume")
    rows[1]["a"] = "another fox"
    write_rows(here, rows)
    assert "row 1 differs" in refusal(*job, "-o", "out.jsonl", "--resume")


def test_tables_have_columns_for_a_template(here):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    table = pa.table({"name": ["fox", None, "lamb"], "n": [1, 2, 3], "id": [7, 8, 9]})
    pq.write_table(table, "in.parquet")
    command = [*RANK, "in.parquet", "--template", "The {name} had {n}", "--choices", SIZES]
    run_here(*command, "-o", "out.parquet", code=6)
    rows = pq.read_table("out.parquet").to_pylist()
    assert [(row["id"], row["name"], row["n"]) for row in rows] == [
        (7, "fox", "1"), (8, None, None), (9, "lamb", "3")
    ]  # fmt: skip
    assert rows[1]["error"]["message"] == 'a row needs a string or number "name", not null'
    assert rows[0]["choices"] == run("The fox had 1", "--choices", SIZES)
    assert "no column 'x'" in refusal(*RANK, "in.parquet", "--template", "{x}", "--choices", "a")


def test_a_row_that_fails_has_its_line_and_others_go_on(here):
    long = "fox " * 600
    rows = f"The fox\n{long}\n\nThe lamb\n".encode()
    out, notes = run_here(*RANK, "--choices", "ran,sat", input=rows, code=6)
    first, failed, last = out.decode().splitlines()
    assert (first.split("\t")[2], failed, last.split("\t")[2]) == ("The fox", "\tnan\t", "The lamb")
    assert "gpt-cli: line 2: prompt and choice have up to" in notes
    assert "1 of 3 rows failed: the records, with --json, say why" in notes
    _, notes = run_here(*RANK, "-q", "--choices", "a", input=rows, code=6)
    assert "line 2" not in notes
    _, notes = run_here(*RANK, "--json", "--choices", "a", input=rows, code=6)
    assert "1 of 3 rows failed: the records say why" in notes
    (here / "in").mkdir()
    for name in "ab":
        (here / "in" / name).write_bytes(rows)
    command = [*RANK, "in", "--choices", "a", "--template", "{line} {line}"]
    out, notes = run_here(*command, code=6)
    assert "gpt-cli: in/b, line 2: prompt and choice" in notes
    misspelt = ["--choices", "a", "--template", "{nme} had"]
    _, notes = run_here(*RANK, *misspelt, input=b'{"name": "Hugo"}\n' * 2, code=6)
    assert notes.endswith('error: 2 of 2 rows failed: a row needs a string or number "nme"\n')


NO_LIST = 'the "choices" of a row must be a list of one or more strings, such as ["yes", "no"]'


def test_invalid_choices_are_the_error_of_their_row():
    rows = [
        (
            {"prompt": "x"},
            'a row needs a list of "choices": there are no default choices (--choices)',
        ),
        ({"prompt": "x", "choices": []}, NO_LIST),
        ({"prompt": "x", "choices": "a"}, NO_LIST),
        ({"prompt": "x", "choices": ["a", 1]}, NO_LIST),
        ({"prompt": "x", "choices": ["a", " a"]}, "duplicate choice 'a': remove it"),
        ({"prompt": "x", "choices": ["a", " "]}, "a choice is empty: remove it"),
        ({"prompt": 3, "choices": ["a"]}, 'a row needs a string "prompt", not 3'),
        ({"choices": ["a"]}, 'a row needs a string "prompt" or "text"; its fields are choices'),
        ({"prompt": "x", "choices": ["a"]}, None),
    ]
    data = "".join(json.dumps(row) + "\n" for row, _ in rows).encode()
    *invalid, good = rows_here(*RANK, "--json", input=data, code=6)
    for line, (record, (_, message)) in enumerate(zip(invalid, rows[:-1], strict=True), 1):
        assert (record["line"], record["error"]["message"]) == (line, message)
    assert good["choices"][0]["probability"] == 1


@pytest.mark.parametrize("template", [[], ["--template", "The {line} was"]])
@pytest.mark.parametrize("pipe", [False, True])
def test_lines_without_choices_are_refused_before_any_work(here, pipe, template):
    (here / "in.txt").write_bytes(b"\nThe fox\nThe lamb\n")
    rank = ["rank", "-m", "no/model", "--offline", *template]  # exit code 3 if it is searched
    input = {"input": b"\nThe fox\n"} if pipe else {}
    for flags in ([], ["-o", "out.jsonl"], ["--json"]):
        said = refusal(*rank, "-" if pipe else "in.txt", *flags, **input)
        assert said == (
            "gpt-cli: error: --choices must be given for plain lines, which have none\n"
        )
    assert [file.name for file in here.iterdir()] == ["in.txt"]


def test_columns_that_a_template_does_not_read_are_noted(here):
    write_rows(here, [{"a": "fox", "max_token": 3}, {"a": "lamb", "max_token": 3, "age": 9}])
    rank = [*RANK, "in.jsonl", "--choices", "a,b", "--template", "The {a}"]
    _, notes = run_here(*rank)
    assert notes.startswith("gpt-cli: note: ignored columns: max_token, age\n")
    assert run_here(*rank, "-q")[1] == ""
    says = "--keep-fields needs a record for each row: add --output OUT"
    assert says in refusal(*rank, "--keep-fields", "id")


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("{line", "a lone { at character 1"),
        ("{line} {other}", "the template has {other}, and the input has plain lines"),
        ("{prompt}", "the template has {prompt}, and the input has plain lines"),
        ("{id}", "{id} is a field of each record"),
        (
            "no such file.txt",
            "--template no such file.txt: No such file or directory, and a text needs",
        ),
        (".", "cannot read .: "),
    ],
)
def test_a_bad_template_is_refused(template, what):
    flags = "--template", template, "--choices", "a,b"
    assert what in refusal(*RANK, *flags, input=b"The fox\n")


@pytest.mark.parametrize("out", ["out.parquet", "out/*.parquet"])
def test_a_table_has_the_lines_of_a_template_and_the_numbers_of_lines_that_failed(here, out):
    pq = pytest.importorskip("pyarrow.parquet")
    (here / "in.txt").write_bytes(b"fox\n\xff\n" + b"far " * 1000)
    run_here(*RANK, "in.txt", "--template", "The {line} was", "--choices", SIZES, "-o", out, code=6)
    good, invalid, long = pq.read_table(out.removesuffix("/*.parquet")).to_pylist()
    choices = run("The fox was", "--choices", SIZES)
    assert (good["line"], good["line_number"], good["choices"]) == ("fox", None, choices)
    assert (invalid["line"], invalid["line_number"]) == (None, 2)
    assert invalid["error"]["message"].startswith("the row is not UTF-8 at byte 0: ")
    assert (long["line_number"], long["error"]["code"]) == (3, "context_overflow")


def test_a_template_may_be_longer_than_the_name_of_a_file():
    long = "{line} saw https://fox.example " * 20
    ((choice, *_),) = lines_here("--template", long, "--choices", "ran", input=b"The fox\n")
    assert choice == "ran"


def test_braces_of_rows_and_doubled_ones_are_text(here):
    flags = "--template", '{{"text": "{line}"}} is', "--choices", "ran,sat", "--json"
    (record,) = rows_here(*RANK, *flags, input=b"a {line} {x} }{ b")
    assert record["line"] == "a {line} {x} }{ b"
    assert record["choices"] == run('{"text": "a {line} {x} }{ b"} is', "--choices", "ran,sat")


def test_a_name_of_an_input_is_no_prompt(here):
    for name in ("lines.txt", "rows.jsonl", "a/b.parquet"):
        assert f"cannot read {name}: No such file" in refusal(*RANK, name, "--choices", "a")
    (here / "sky").write_text("The sky was\n", encoding="utf-8")
    assert [cells[2] for cells in lines_here("sky", "--choices", "red,blue")] == ["The sky was"]
    assert [cells[2] for cells in lines_here("s*", "--choices", "red,blue")] == ["The sky was"]
    assert run("the sky", "--choices", "red,blue")  # a prompt


def test_line_ends_of_a_row_stay_within_its_line():
    rows = json.dumps({"prompt": "a\nb\rc\td", "choices": ["x\ny"]}).encode()
    ((choice, probability, *text),) = lines_here(input=rows)
    assert (choice, probability, text) == ("x\\ny", "1.0000", ["a\\nb\\rc", "d"])


def test_a_row_may_have_many_choices():
    row = json.dumps({"prompt": "The", "choices": [f"w{n}" for n in range(600)]}).encode()
    (record,) = rows_here(*RANK, "--json", input=row)
    assert len(record["choices"]) == 600
    assert math.fsum(choice["probability"] for choice in record["choices"]) == pytest.approx(1)


@pytest.mark.parametrize("command", ["batch", "score"])
def test_batch_and_score_take_templates(here, command, tiny):
    write_rows(here, [{"a": "fox", "size": 3, "age": 9}, {"a": "lamb"}])
    flags = ["-m", "tiny", "--template", "The {a} had {size}"]
    flags += ["-n", "3", "--temperature", "0"] if command == "batch" else []
    good, bad = rows_here(command, "in.jsonl", *flags, code=6)
    assert (good["a"], good["size"]) == ("fox", "3")
    assert bad["error"]["message"] == 'a row needs a string or number "size"'
    if command == "batch":
        (expected,) = tiny.generate(["The fox had 3"], max_tokens=3, temperature=0)
        assert good["text"] == expected.text
    else:
        assert good["total_logprob"] == tiny.score("The fox had 3").total_logprob


# --- in Python -----------------------------------------------------------------------------------


def test_python_takes_a_list_of_texts_exactly(tiny, likelihood):
    red, blue = tiny.rank("The sky was", ["blue", " red"])
    assert (red.text, blue.text) == (" red", "blue")
    assert red.probability + blue.probability == pytest.approx(1)
    assert (red.bytes, blue.bytes) == (4, 4)
    for choice in (red, blue):
        assert choice.ids == tiny.encode(choice.text)
        logprobs = likelihood("The sky was", choice.text)
        assert choice.logprob == pytest.approx(math.fsum(logprobs), rel=1e-5)
    with pytest.raises(TypeError, match="choices must be a list"):
        tiny.rank("The sky", "abc")


def test_a_choice_may_form_a_token_with_the_end_of_the_prompt(tiny):
    by_text = {choice.text: choice for choice in tiny.rank("The sk", ["y was", "!"])}
    # Both begin with "The"; " sky" is one token, and " sk" another.
    assert by_text["y was"].ids == tiny.encode("The sky was")[1:]
    assert by_text["!"].ids == tiny.encode("The sk!")[1:]
    for text, choice in by_text.items():
        whole = tiny.score("The sk" + text)
        assert choice.logprob == pytest.approx(whole.total_logprob, rel=1e-5)
    row = json.dumps({"prompt": "The sk", "choices": ["y was", "!"]}).encode()
    (record,) = rows_here(*RANK, "--exact", "--json", input=row)
    assert {c["text"]: c["logprob"] for c in record["choices"]} == {
        text: choice.logprob for text, choice in by_text.items()
    }
    assert by_text["!"].bytes == 4
    assert tiny.decode(tiny.rank("The sk", ["!"])[0].ids) == "!"
