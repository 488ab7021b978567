"""`gpt-cli rank` as a user meets it, and what it stands on: `Engine.rank`."""

import json
import math

import numpy as np
import pytest

from gpt_cli.errors import ContextError
from gpt_cli.records import json_line
from support.in_process import records_here, refusal, run_here, terminal_here

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
    """Tell the log-likelihood that a choice has at the end of the whole text, token by token."""

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


def test_no_space_is_put_where_there_is_one():
    after_space = run("The sky was ", "--choices", "blue,red")
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


def test_an_empty_prompt_ranks_beginnings_of_a_text_and_no_space_is_put():
    records = run("", "--choices", "The,Once")
    assert [record["text"] for record in records] == ["Once", "The"]
    (first,) = run("", "--choices", "Once")
    assert first["logprob"] == pytest.approx(records[0]["logprob"], rel=1e-5)
    assert first["probability"] == 1


def test_a_choice_in_a_file_ends_only_with_its_line():
    records = run("x", "--choices-file", "-", input="a\x0cb\nc\u2028d\x85e\n".encode())
    assert {record["text"] for record in records} == {" a\x0cb", " c\u2028d\x85e"}


# --- on a terminal -------------------------------------------------------------------------------


def shown_on_terminal(*arguments):
    code, shown = terminal_here(*RANK, "The sky was", "--choices", *arguments)
    assert code == 0
    return shown


def test_a_terminal_gets_a_table_or_json_without_control_characters():
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


# --- what cannot be used -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([], "--choices"),
        (["--choices", "a", "--choices-file", "b"], "--choices"),
        (["--choices", ""], "a choice is empty"),
        (["--choices", "a,,b"], "a choice is empty"),
        (["--choices", "a,,b", "--exact"], "a choice is empty"),
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


def test_only_one_thing_comes_through_a_pipe():
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


def test_each_line_has_its_likeliest_choice(here, tiny):
    (here / "in.txt").write_text("\n".join(LINES) + "\n\n", encoding="utf-8")
    (here / "template.txt").write_text(TEMPLATE + "\n", encoding="utf-8")
    expected = []
    for line in LINES:
        best = tiny.rank(TEMPLATE.replace("{line}", line), [" big", " small", " old"])[0]
        expected.append([best.text.strip(), f"{best.probability:.4f}", line])
    for template in ("template.txt", TEMPLATE):
        flags = "--template", template, "--choices", SIZES
        assert lines_here("in.txt", *flags) == expected
        assert lines_here("--file", "in.txt", *flags) == expected
        assert lines_here(*flags, input="\n".join(LINES).encode()) == expected
        assert lines_here("-", *flags, input="\n".join(LINES).encode()) == expected
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


def test_records_of_rows_have_all_choices_as_those_of_one_prompt(here):
    rows = [
        {"id": "a", "prompt": "The sky was", "choices": ["blue", "red"]},
        {"prompt": "The sky was"},
        {"id": [1], "prompt": "The sun was ", "choices": None},
    ]
    (here / "in.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    records = rows_here(*RANK, "in.jsonl", "--choices", "up,down", "--json")
    alone = [
        run(row["prompt"], "--choices", ",".join(row.get("choices") or ["up", "down"]))
        for row in rows
    ]
    assert records == [
        {"index": 0, "id": "a", "prompt": "The sky was", "choices": alone[0]},
        {"index": 1, "prompt": "The sky was", "choices": alone[1]},
        {"index": 2, "id": [1], "prompt": "The sun was ", "choices": alone[2]},
    ]
    run_here(*RANK, "in.jsonl", "--choices", "up,down", "-o", "out.jsonl")
    assert (here / "out.jsonl").read_bytes() == b"".join(json_line(r).encode() for r in records)


def test_an_interrupted_job_is_resumed_and_only_for_the_same_question(here):
    rows = [{"a": f"fox {n}", "b": n + 0.5, "label": n} for n in range(7)]
    (here / "in.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
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
    (here / "in.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
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
    assert rows[1]["error"]["message"] == 'a row needs a string or number "name"'
    assert rows[0]["choices"] == run("The fox had 1", "--choices", SIZES)
    assert "no column 'x'" in refusal(*RANK, "in.parquet", "--template", "{x}", "--choices", "a")


def test_plain_lines_are_ranked_into_a_table(here):
    pq = pytest.importorskip("pyarrow.parquet")
    long = "far " * 1000
    (here / "in.txt").write_text(f"fox\n{long}\n", encoding="utf-8")
    command = [*RANK, "in.txt", "--template", "The {line} was", "--choices", SIZES]
    run_here(*command, "-o", "out.parquet", code=6)
    good, bad = pq.read_table("out.parquet").to_pylist()
    assert (good["line"], good["line_number"], good["choices"]) == (
        "fox", None, run("The fox was", "--choices", SIZES)
    )  # fmt: skip
    assert (bad["line"], bad["line_number"]) == (None, 2)
    assert bad["error"]["code"] == "context_overflow"


def test_a_row_that_fails_has_its_line_and_others_go_on(here):
    long = "fox " * 600
    rows = f"The fox\n{long}\n\nThe lamb\n".encode()
    out, notes = run_here(*RANK, "--choices", "ran,sat", input=rows, code=6)
    first, failed, last = out.decode().splitlines()
    assert (first.split("\t")[2], failed, last.split("\t")[2]) == ("The fox", "\tnan\t", "The lamb")
    assert "gpt-cli: line 2: prompt and choice have up to" in notes
    assert "1 of 3 rows failed: their records, with --json, say why" in notes
    _, notes = run_here(*RANK, "-q", "--choices", "a", input=rows, code=6)
    assert "line 2" not in notes
    _, notes = run_here(*RANK, "--json", "--choices", "a", input=rows, code=6)
    assert "1 of 3 rows failed: their records say why" in notes
    (here / "in").mkdir()
    for name in "ab":
        (here / "in" / name).write_bytes(rows)
    command = [*RANK, "in", "--choices", "a", "--template", "{line} {line}"]
    out, notes = run_here(*command, code=6)
    assert "gpt-cli: in/b, line 2: prompt and choice" in notes


NO_LIST = 'the "choices" of a row must be a list of one or more strings'


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x"}, 'a row needs a list of "choices": there are no default choices'),
        ({"prompt": "x", "choices": []}, NO_LIST),
        ({"prompt": "x", "choices": "a"}, NO_LIST),
        ({"prompt": "x", "choices": ["a", 1]}, NO_LIST),
        ({"prompt": "x", "choices": ["a", " a"]}, "duplicate choice 'a': remove it"),
        ({"prompt": "x", "choices": ["a", " "]}, "a choice is empty: remove it"),
        ({"prompt": 3, "choices": ["a"]}, 'a row needs a string "prompt"'),
        ({"choices": ["a"]}, 'a row needs a string "prompt"'),
    ],
)
def test_bad_choices_are_the_error_of_their_row(row, message):
    rows = f"{json.dumps(row)}\n" + json.dumps({"prompt": "x", "choices": ["a"]})
    bad, good = rows_here(*RANK, "--json", input=rows.encode(), code=6)
    assert (bad["line"], bad["error"]["message"]) == (1, message)
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
    rows = [{"a": "fox", "max_token": 3}, {"a": "lamb", "max_token": 3, "age": 9}]
    (here / "in.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    batch = ["batch", "-m", "tiny", "-n", "2", "in.jsonl", "--template", "The {a}"]
    _, notes = run_here(*batch, "-v")
    assert "gpt-cli: note: ignored columns: max_token, age\n" in notes
    assert run_here(*batch, "-q")[1] == ""


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("{line", "a lone { at character 1"),
        ("{line} }", "a lone } at character 8"),
        ("a {}{line}", "a lone { at character 3"),
        ("{{line}}", "the template has no field"),
        ("{line} {other}", "the template has {other}, and the input has plain lines"),
        ("{prompt}", "the template has {prompt}, and the input has plain lines"),
        ("{line}{choices}", "{choices} is the name of an option"),
        ("{id}", "{id} is a field of each record"),
        ("no such file.txt", "--template no such file.txt: there is no such file"),
        (".", "cannot read .: "),
    ],
)
def test_a_bad_template_is_refused(template, what):
    flags = "--template", template, "--choices", "a,b"
    assert what in refusal(*RANK, *flags, input=b"The fox\n")


@pytest.mark.parametrize("out", ["out.parquet", "out/*.parquet"])
def test_a_table_has_the_lines_of_a_template_and_the_numbers_of_lines_that_failed(here, out):
    pq = pytest.importorskip("pyarrow.parquet")
    (here / "in.txt").write_bytes(b"The fox\n\xff\n")
    flags = "--template", "{line} had", "--choices", "ran"
    run_here(*RANK, "in.txt", *flags, "-o", out, code=6)
    good, bad = pq.read_table(out.removesuffix("/*.parquet")).to_pylist()
    assert (good["line"], good["choices"][0]["choice"]) == ("The fox", "ran")
    assert (bad["line"], bad["line_number"]) == (None, 2)
    assert bad["error"]["message"] == "the row is not UTF-8 at byte 0"


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


def test_many_choices_and_ones_that_melt_into_the_prompt(tiny):
    choices = [f"w{n}" for n in range(2000)]
    rows = json.dumps({"prompt": "Once upon a ti", "choices": ["me", "xx"]}).encode()
    (record,) = rows_here(*RANK, "--exact", "--json", input=rows)
    ranked = tiny.rank("Once upon a ti", ["me", "xx"])
    assert [(c["text"], c["logprob"]) for c in record["choices"]] == [
        (choice.text, choice.logprob) for choice in ranked
    ]
    (record,) = rows_here(
        *RANK, "--json", input=json.dumps({"prompt": "The", "choices": choices}).encode()
    )
    assert len(record["choices"]) == 2000
    assert math.fsum(choice["probability"] for choice in record["choices"]) == pytest.approx(1)


@pytest.mark.parametrize("command", ["batch", "score"])
def test_batch_and_score_take_templates(here, command, tiny):
    (here / "in.jsonl").write_text(
        '{"a": "fox", "n": 3, "age": 9}\n{"a": "lamb"}\n', encoding="utf-8"
    )
    new = ["-n", "3", "--temperature", "0"] if command == "batch" else []
    good, bad = rows_here(
        command, "-m", "tiny", "in.jsonl", "--template", "The {a} had {n}", *new, code=6
    )
    assert (good["a"], good["n"]) == ("fox", "3")
    assert bad["error"]["message"] == 'a row needs a string or number "n"'
    if command == "batch":
        (expected,) = tiny.generate(["The fox had 3"], max_tokens=3, temperature=0)
        assert good["text"] == expected.text
    else:
        assert good["total_logprob"] == tiny.score("The fox had 3").total_logprob


# --- in Python -----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [511, 512])
def test_prompt_and_choice_may_have_one_token_more_than_the_context(tiny, length):
    prompt = " fox" * length
    assert len(tiny.encode(prompt)) == length
    choices = [" ran", " sat", " ran away"][: 2 + (length < 512)]
    ranked = tiny.rank(prompt, choices)
    for choice in ranked:
        ids = tiny.encode(prompt + choice.text)
        logits = tiny.logits([ids[:-1]])[0, length - 1 :].astype(float)
        logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        expected = sum(row[id] for row, id in zip(logprobs, ids[length:], strict=True))
        assert choice.logprob == pytest.approx(expected, rel=1e-4)
    with pytest.raises(ContextError, match="up to 514 tokens, more than the model's context"):
        tiny.rank(prompt, [" ran" * (514 - length)])


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


def test_a_choice_may_melt_into_the_last_token_of_the_prompt(tiny):
    by_text = {choice.text: choice for choice in tiny.rank("The sk", ["y was", "!"])}
    # What both begin with is "The"; " sky" is one token, and " sk" another.
    assert by_text["y was"].ids == tiny.encode("The sky was")[1:]
    assert by_text["!"].ids == tiny.encode("The sk!")[1:]
    for text, choice in by_text.items():
        whole = tiny.score("The sk" + text)
        assert choice.logprob == pytest.approx(whole.total_logprob, rel=1e-5)


def test_spaces_around_choices_do_not_count():
    spaced = run("The sky was ", "--choices", " blue , red")
    assert [record["text"] for record in spaced] == ["blue", "red"]
    assert spaced == run("The sky was ", "--choices", "blue,red")


def test_choices_that_melt_into_the_prompt_are_compared_from_one_place(tiny):
    ranked = {choice.text: choice for choice in tiny.rank("Once upon a ti", ["me", "xx"])}
    assert tiny.decode(ranked["me"].ids) == " time"
    assert tiny.decode(ranked["xx"].ids) == " tixx"
    assert ranked["xx"].bytes == 5
    assert tiny.decode(tiny.rank("Once upon a ti", ["xx"])[0].ids) == "xx"
