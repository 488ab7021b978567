"""`gpt-cli rank` as a user meets it, and what it stands on: `Engine.rank`."""

import json
import math

import pytest
from in_process import records_here, refusal
from processes import posix, run_on_terminal

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
    records = run("--choices-file", str(file), "--by", by, input=f"{prompt}\n".encode())
    assert_draw(records, [record["logprob"] / record[length] for record in records])


def test_no_space_is_put_where_there_is_one(tmp_path, tiny):
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"The sky was \n")
    after_space = run("--file", str(file), "--choices", "blue,red")
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
    code, shown = run_on_terminal(*RANK, "The sky was", "--choices", *arguments)
    assert code == 0
    return shown


@posix
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
        (["--choices", "a", "--file", "/no/such/file"], "/no/such/file"),
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
