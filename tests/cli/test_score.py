"""`gpt-cli score` as a user meets it: a measure of texts, and a filter of lines in a pipe."""

import json
import math
import random
import shlex
import subprocess
from dataclasses import replace

import numpy as np
import pytest

import gpt_cli
from gpt_cli.display.labels import quoted
from gpt_cli.errors import InputError
from gpt_cli.texts.loaded import LoadedModel
from support.in_process import refusal, run_here, terminal_here
from support.processes import COMMAND, LimitedProcess, posix

SCORE = ["score", "--model", "tiny", "--threads", "1"]  # several would wait on a busy machine
N_POSITIONS = 512
FEW = "--max-perplexity=1000"  # between the texts of tiny and their words, shuffled
MANY = "--min-perplexity=1000"


def run(*arguments, input=b""):
    """Run a command that writes nothing to standard error; return its output."""
    out, errors = run_here(*SCORE, *arguments, input=input)
    assert errors == ""
    return out


def records(output):
    return [json.loads(line) for line in output.decode().split("\n")[:-1]]


def rows_of(output):
    """Return the cells of lines."""
    *lines, rest = output.decode().split("\n")
    assert rest == ""
    return [line.split("\t") for line in lines]


def close(values, *, rel=1e-5):
    """Return numbers for a comparison within rounding: log-likelihoods may be near 0."""
    return pytest.approx(values, rel=rel, abs=1e-5)


@pytest.fixture(scope="module")
def stories(tiny):
    rows = tiny.generate(["Once upon a time"] * 4, max_tokens=400, seed=1)
    return ["Once upon a time" + row.text for row in rows]


@pytest.fixture(scope="module")
def paragraphs(stories):
    return [line for story in stories for line in story.split("\n") if line]


@pytest.fixture(scope="module")
def nonsense(paragraphs):
    """The words of the paragraphs, shuffled."""
    dice = random.Random(1)
    words = [line.split() for line in paragraphs]
    return [" ".join(dice.sample(line, len(line))) for line in words]


# --- a whole text --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(stories):
    """A text of several lines; the last has a character of several tokens."""
    return f"\n{stories[0]}\n\n\tThe end, {{Zoë}} 🦊"


@pytest.fixture(scope="module")
def facts(whole):
    """The output for a text without a line end."""
    return run(input=whole.encode()).decode()


def test_a_whole_text_has_four_facts(tiny, whole, facts):
    score = tiny.score(whole)
    assert facts == (
        f"tokens          {len(score.ids)} ({score.tokens_scored} scored)\n"
        f"log-likelihood  {score.total_logprob:.6g}\n"
        f"perplexity      {score.perplexity:.6g}\n"
        f"bits per byte   {score.bits_per_byte:.6g}\n"
    )


def test_a_file_and_a_pipe_have_the_same_score_with_or_without_a_line_end(whole, facts, tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes(whole.encode() + b"\n")
    assert run(str(file), input=b"not read").decode() == facts
    assert run("-", input=b"\xef\xbb\xbf" + whole.encode() + b"\r\n").decode() == facts


def test_json_has_the_numbers_of_python_and_all_tokens_of_the_text(tiny, whole):
    (told,) = records(run("--json", "--tokens", input=whole.encode() + b"\n"))
    score = tiny.score(whole, ranks=True, entropies=True, gaps=True)
    tokens = told.pop("logprobs")
    assert told == {
        "index": 0,
        "text": whole,
        "model": "tiny",
        "adapter": None,
        "tokens": len(score.ids),
        "tokens_scored": len(score.ids) - 1,
        "total_logprob": close(score.total_logprob),
        "perplexity": close(score.perplexity),
        "bits_per_byte": close(score.bits_per_byte),
    }
    names = {"id", "token", "bytes", "logprob", "rank", "entropy", "mean", "std", "gap"}
    assert all(set(token) == names for token in tokens)
    assert [token["rank"] for token in tokens] == score.ranks
    assert tokens[0]["entropy"] is None
    assert [token["entropy"] for token in tokens[1:]] == close(score.entropies[1:])
    moments = zip(*score.moments[1:], strict=True)
    for name, values in zip(("mean", "std", "gap"), (*moments, score.gaps[1:]), strict=True):
        assert [token[name] for token in tokens[1:]] == close([*values])
    assert [token["id"] for token in tokens] == tiny.encode(whole)
    assert b"".join(bytes(token["bytes"]) for token in tokens) == whole.encode()
    assert all(bytes(token["bytes"]).decode(errors="replace") == token["token"] for token in tokens)
    first, *rest = [token["logprob"] for token in tokens]
    assert first is None
    assert math.fsum(rest) == pytest.approx(told["total_logprob"])
    assert math.exp(-math.fsum(rest) / len(rest)) == pytest.approx(told["perplexity"])
    size = len(whole.encode()) - len(tokens[0]["bytes"])
    assert -math.fsum(rest) / math.log(2) / size == pytest.approx(told["bits_per_byte"])


def test_each_token_has_a_line(tiny, whole):
    rows = rows_of(run("--tokens", input=whole.encode()))
    score = tiny.score(whole)
    assert [row[0] for row in rows] == ["1"] * len(score.ids)
    assert [int(row[1]) for row in rows] == score.ids
    assert rows[0][2] == "nan"
    assert [float(row[2]) for row in rows[1:]] == close(score.token_logprobs[1:])
    assert [row[3] for row in rows] == [quoted(tiny.tokenizer.token_bytes(id)) for id in score.ids]


def test_figures_that_are_not_shown_are_not_computed(monkeypatch):
    for name in ("ranks", "moments", "gaps"):
        monkeypatch.setattr(f"gpt_cli.texts.measures.{name}", None)
    for flags in ([], ["--tokens"], ["--words"], ["--json"], ["--json", "--words"]):
        run(*flags, input=b"Once upon a time")


def test_each_token_and_word_has_a_column_per_layer(tiny, whole):
    score = tiny.score(whole, words=True, layers=True)
    words = [word.layers for word in score.words]
    for flags, layers, first in (
        (["--layers"], score.layers, 4),
        (["--tokens", "--layers", "--lines"], score.layers, 4),
        (["--words", "--layers"], words, 6),
    ):
        data = whole.replace("\n", " ") if "--lines" in flags else whole
        cells = rows_of(run(*flags, input=data.encode()))
        depth = tiny.model.config.n_layer + 1
        assert {len(row) for row in cells} == {first + depth}
        assert cells[0][first:] == ["nan"] * depth
        if "--lines" not in flags:
            shown = [[float(cell) for cell in row[first:]] for row in cells[1:]]
            np.testing.assert_allclose(shown, np.array(layers[1:]), rtol=1e-5, atol=1e-5)
    (told,) = records(run("--json", "--layers", "--words", input=whole.encode()))
    assert [word["layers"] for word in told["words"]] == words


@pytest.mark.parametrize("flags", [[], ["--lines"]])
def test_min_k_follows_the_other_figures(tiny, flags, tmp_path):
    text, file = "Once upon a time, there was a moon.", tmp_path / "text.txt"
    file.write_text(f"{text}\n")
    score = tiny.score(text, entropies=True)
    values = [f"{value:.6g}" for value in (score.min_k(30), score.min_k_plus_plus(30))]
    shown = run("--min-k=30", *flags, file).decode().splitlines()
    if flags:
        assert shown[0].split("\t")[-3:] == [*values, text]
        header = terminal_here(*SCORE, "--min-k=30", *flags, file)[1].split("\r\n")[0]
        assert header.split()[-3:] == ["min-k%", "min-k%++", "text"]
    else:
        assert shown[-2:] == [f"Min-30%         {values[0]}", f"Min-30%++       {values[1]}"]
    (told,) = records(run("--min-k=30", "--json", *flags, file))
    assert (told["min_k"], told["min_k_plus_plus"]) == close(
        (score.min_k(30), score.min_k_plus_plus(30))
    )


@pytest.mark.parametrize("flags", [[], ["--bos"]])
def test_each_word_has_a_line(tiny, whole, flags):
    rows = rows_of(run("--words", *flags, input=whole.encode()))
    words = tiny.score(whole, words=True, bos=bool(flags)).words
    assert [row[:5] for row in rows] == [
        ["1", word.text, str(word.start), str(word.end), str(word.tokens)] for word in words
    ]
    assert [row[1] for row in rows] == whole.split()
    assert (rows[0][5] == "nan") is (not flags)
    first = 0 if flags else 1
    shown = [float(row[5]) for row in rows[first:]]
    assert shown == close([word.surprisal for word in words[first:]])


def test_json_has_the_words_with_the_numbers_of_python(tiny, whole):
    (told,) = records(run("--json", "--words", "--bos", input=whole.encode()))
    (plain,) = records(run("--json", "--bos", input=whole.encode()))
    words = told.pop("words")
    assert told == plain
    assert told["tokens"] == told["tokens_scored"] == sum(word["tokens"] for word in words)
    assert [word["word"] for word in words] == whole.split()
    data = whole.encode()
    assert [data[word["start"] : word["end"]].decode() for word in words] == whole.split()
    assert math.fsum(word["surprisal"] for word in words) == pytest.approx(
        -told["total_logprob"] / math.log(2)
    )
    assert "logprobs" not in told


def test_with_the_start_token_all_tokens_count(tiny, whole):
    score = tiny.score(whole, bos=True)
    shown = run("--bos", input=whole.encode()).decode()
    assert shown.startswith(f"tokens          {len(score.ids)} ({len(score.ids)} scored)\n")
    assert f"perplexity      {score.perplexity:.6g}\n" in shown
    tokens = run("--bos", "--tokens", input=b"Once").decode()
    (logprob,) = tiny.score("Once", bos=True).token_logprobs
    assert tokens == f'1\t{tiny.encode("Once")[0]}\t{logprob:.6g}\t"Once"\n'


def test_any_stride_scores_each_token_once(tiny, stories):
    text = "\n\n".join(stories)
    assert len(tiny.encode(text)) > 2 * N_POSITIONS
    (told,) = records(run("--json", "--tokens", "--stride", "200", input=text.encode()))
    by_half = tiny.score(text)
    assert told["perplexity"] == close(tiny.score(text, stride=200).perplexity)
    assert told["perplexity"] != pytest.approx(by_half.perplexity, rel=1e-3)
    assert told["perplexity"] == pytest.approx(by_half.perplexity, rel=0.2)
    assert [token["id"] for token in told["logprobs"]] == by_half.ids
    assert [token["logprob"] for token in told["logprobs"]].count(None) == 1
    # The first window is the same, whatever the stride.
    first = [token["logprob"] for token in told["logprobs"][1:N_POSITIONS]]
    assert first == close(by_half.token_logprobs[1:N_POSITIONS], rel=1e-4)


# --- lines ---------------------------------------------------------------------------------------


INVALID = {5: b"caf\xe9\n", 9: b"\xff\xfe\r\n"}  # by their numbers


@pytest.fixture(scope="module")
def lines(paragraphs, nonsense):
    """Lines of all kinds, more than are computed together."""
    return [
        b"\xef\xbb\xbfOnce upon a time, there was a lamb.\r\n",
        b"\n",
        b"a\n",
        b"The sky was blue.\t  \n",
        INVALID[5],
        "Zoë 🦊\u2028 says\x0c: “où?”\r\n".encode(),
        b"\r\n",
        b"  \t \n",
        INVALID[9],
        b"once " * 600 + b"\n",
        *(f"{line}\n".encode() for pair in zip(paragraphs, nonsense, strict=True) for line in pair),
        *(b"There were %d foxes.\n" % count for count in range(250)),
        b"There was once a fox",
    ]


@pytest.fixture(scope="module")
def alone(tiny, lines):
    """The scores of the lines by themselves; None where it cannot be decoded."""

    def score(line):
        try:
            text = line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8-sig")
        except UnicodeDecodeError:
            return None
        return tiny.score_many([text])[0]

    return [score(line) for line in lines]


def run_lines(lines, *arguments, kept=None):
    """Run a command on these lines; the invalid ones are noted, and the exit code is 6.

    A filter keeps a number of them.
    """
    out, errors = run_here(*SCORE, *arguments, input=b"".join(lines), code=6)
    *notes, last = errors.splitlines()
    if kept is not None:
        assert notes.pop() == f"gpt-cli: kept {kept} of {len(lines)} rows"
    for number, line in zip(INVALID, notes, strict=True):
        assert line.startswith(f"gpt-cli: line {number}: the line is not UTF-8")
    assert last == f"gpt-cli: error: 2 of {len(lines)} lines could not be scored"
    return out


def test_each_line_has_the_numbers_that_it_has_alone(lines, alone):
    rows = run_lines(lines, "--lines").split(b"\n")
    assert rows.pop() == b""
    for row, line, score in zip(rows, lines, alone, strict=True):
        *numbers, text = row.split(b"\t", 4)
        assert text == line.removesuffix(b"\n")
        if score is None:
            assert numbers == [b"nan"] * 4
            continue
        assert int(numbers[0]) == len(score.ids)
        values = [score.total_logprob, score.perplexity, score.bits_per_byte]
        values = [math.nan if value is None else value for value in values]
        shown = pytest.approx(values, rel=2e-5, abs=1e-5, nan_ok=True)  # 6 digits
        assert [float(number) for number in numbers[1:]] == shown


@pytest.fixture(scope="module")
def told(lines):
    """The records of all lines."""
    return records(run_lines(lines, "--lines", "--json"))


def test_each_line_has_a_record_with_its_numbers_or_an_error(lines, alone, told):
    assert [line["index"] for line in told] == list(range(len(lines)))
    for record, line, score in zip(told, lines, alone, strict=True):
        if score is None:
            index, message = record["index"], record["error"]["message"]
            error = {"code": "invalid_input", "message": message}
            assert record == {"index": index, "line": index + 1, "error": error}
            assert "not UTF-8" in message
            continue
        assert record == {
            "index": record["index"],
            "text": line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8-sig"),
            "model": "tiny",
            "adapter": None,
            "tokens": len(score.ids),
            "tokens_scored": max(0, len(score.ids) - 1),
            "total_logprob": close(score.total_logprob),
            "perplexity": score.perplexity and close(score.perplexity),
            "bits_per_byte": score.bits_per_byte and close(score.bits_per_byte),
        }
    assert [record["line"] for record in told if "error" in record] == list(INVALID)
    assert [record["tokens"] for record in told[:3]] == [10, 0, 1]
    assert told[1]["perplexity"] is told[2]["perplexity"] is told[2]["bits_per_byte"] is None


def test_the_tokens_of_lines_have_the_numbers_of_their_lines(tiny):
    rows = rows_of(run("--lines", "--tokens", input="Long ago\n\n\tZoë\r\n".encode()))
    ids = {"1": tiny.encode("Long ago"), "3": tiny.encode("\tZoë")}
    assert [(row[0], int(row[1])) for row in rows] == [(n, id) for n in ids for id in ids[n]]
    for row in rows:
        assert row[3] == quoted(tiny.tokenizer.token_bytes(int(row[1])))


def test_the_words_of_lines_have_the_numbers_of_their_lines(tiny):
    data = "Long ago\n\n \n\tZoë\r\n".encode()
    assert [row[:5] for row in rows_of(run("--lines", "--words", input=data))] == [
        ["1", "Long", "0", "4", "1"],
        ["1", "ago", "5", "8", "1"],
        ["4", "Zoë", "1", "5", str(len(tiny.encode("\tZoë")))],
    ]
    first, *blank, last = records(run("--lines", "--words", "--json", "--bos", input=data))
    assert [record["words"] for record in blank] == [[], []]
    assert [word["word"] for word in first["words"] + last["words"]] == ["Long", "ago", "Zoë"]
    assert blank[0]["perplexity"] is None


def test_a_line_beyond_the_context_is_scored_in_windows(tiny):
    short, long = b"There was once a fox.\n", b"once " * 4000 + b"\n"
    data = short + long + short
    flags = ["--lines", "--json", "--tokens", "--stride=511"]
    assert run("--lines", "-q") == b""
    before, told, after = records(run(*flags, input=data))
    assert before == after | {"index": 0}
    assert before["perplexity"] == close(tiny.score("There was once a fox.").perplexity)
    assert told["tokens"] == len(told["logprobs"]) > 4000
    assert told["tokens_scored"] == told["tokens"] - 1
    logprobs = [token["logprob"] for token in told["logprobs"]]
    assert logprobs[0] is None
    assert all(logprob < 0 for logprob in logprobs[1:])
    # All windows but the first and the last hold the same, and score it at the same places.
    assert logprobs[512:1023] == close(logprobs[1023:1534], rel=1e-3)


# --- several files -------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Be in a new folder with files, of which two have nothing to score."""
    monkeypatch.chdir(tmp_path)
    for name, data in {
        "a": b"Once upon a time\nThe fox was happy.\n",
        "b": "Zoë had a lamb.\n\n".encode(),
        "empty": b"",
        "latin": b"caf\xe9 au lait\n",
    }.items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


EMPTY = "empty is empty: a text is needed"


def test_several_files_have_their_facts_one_after_the_other(here):
    facts = [run(name).decode() for name in "ab"]
    expected = f"file            a\n{facts[0]}\nfile            b\n{facts[1]}"
    assert run("a", "b").decode() == expected
    last = "gpt-cli: error: 1 of 3 files could not be scored\n"
    for files in (["a", "empty", "b"], ["empty", "a", "b"]):
        out, errors = run_here(*SCORE, *files, code=6)
        assert out.decode() == expected
        assert errors == f"gpt-cli: {EMPTY}\n{last}"
        assert run_here(*SCORE, "-q", *files, code=6) == (out, last)
    assert "--stride must be" in refusal(*SCORE, "a", "b", "--stride=0")


def test_several_files_have_records_with_their_names(here):
    out, errors = run_here(*SCORE, "a", "empty", "b", "--json", "--tokens", code=6)
    first, failed, last = records(out)
    for index, name, record in ((0, "a", first), (2, "b", last)):
        (alone,) = records(run(name, "--json", "--tokens"))
        assert record == alone | {"index": index, "file": name}
    error = {"code": "invalid_input", "message": EMPTY}
    assert failed == {"index": 1, "file": "empty", "error": error}
    assert errors == "gpt-cli: error: 1 of 3 files could not be scored\n"
    files = [row[:2] for row in rows_of(run("a", "b", "--words"))]
    assert files == [["a", "1"]] * 8 + [["b", "1"]] * 4
    lines = [row[:2] for row in rows_of(run("b", "a", "--words", "--lines"))]
    assert lines == [["b", "1"]] * 4 + [["a", "1"]] * 4 + [["a", "2"]] * 4
    assert {row[0] for row in rows_of(run("a", "b", "--lines"))} == {"a", "b"}


@pytest.mark.parametrize("flags", [(), ("--lines",)], ids=["texts", "lines"])
def test_several_files_are_scored_without_those_that_cannot_be_read(flags, here):
    (here / "folder").mkdir()
    (here / "link").symlink_to("nowhere")
    none = "No such file or directory; name a file that can be read"
    errors = {"link": f"cannot read link: {none}", "no": f"cannot read no: {none}"}
    errors["folder"] = "cannot read folder: for a folder or a pattern, add --output OUT"
    files = ["link", "a", "folder", "no"]
    notes = "".join(f"gpt-cli: {errors[name]}\n" for name in files if name in errors)
    failed = "gpt-cli: error: 3 of 4 files could not be scored\n"
    (total,) = rows_of(run("--total", *flags, "a"))
    out, shown = run_here(*SCORE, "--total", *flags, *files, code=6)
    assert rows_of(out) == [["nan", "link"], total, ["nan", "folder"], ["nan", "no"]]
    assert shown == notes + failed
    assert run_here(*SCORE, "--total", *flags, *files, "-q", code=6) == (out, failed)
    out, _ = run_here(*SCORE, "--total", "--json", *flags, *files, code=6)
    messages = [record.get("error", {}).get("message") for record in records(out)]
    assert messages == [errors.get(name) for name in files]
    out, shown = run_here(*SCORE, "--words", *flags, *files, code=6)
    assert (out, shown) == (run("--words", *flags, "a", "a")[: len(out)], notes + failed)
    assert [row[0] for row in rows_of(out)] == ["a"] * 8
    out, shown = run_here(*SCORE, "--total", *flags, "link", "link", code=6)
    assert (out, shown.count("\n")) == (b"nan\tlink\n" * (1 if flags else 2), 3)
    if not flags:  # files without a score and files that cannot be read count together
        _, shown = run_here(*SCORE, "no", "empty", "a", code=6)
        assert shown.endswith("gpt-cli: error: 2 of 3 files could not be scored\n")
    assert "cannot read folder: for" in refusal(*SCORE, *flags, "folder")
    assert "to score a text, pipe it" in refusal(*SCORE, *flags, "no")


def test_the_only_file_of_several_is_named_in_records_of_lines(here):
    out, _ = run_here(*SCORE, "--lines", "--json", "a", "no", code=6)
    several = records(run("--lines", "--json", "a", "b"))[:2]
    assert records(out) == several


def test_totals_are_the_perplexities_of_files(here, tiny):
    texts = {name: (here / name).read_text().removesuffix("\n") for name in "ab"}
    values = {name: tiny.score(text, bos=True).perplexity for name, text in texts.items()}
    shown = [[f"{value:.6g}", name] for name, value in values.items()]
    assert rows_of(run("--total", "--bos", "a", "b")) == shown
    assert rows_of(run("--total", "--bos", input=texts["a"].encode())) == [[shown[0][0], "-"]]
    out, errors = run_here(*SCORE, "--total", "--bos", "a", "latin", "b", code=6)
    assert rows_of(out) == [shown[0], ["nan", "latin"], shown[1]]
    assert "latin is not UTF-8" in errors
    lines = [f"{number:>12}  {name}\r\n" for number, name in shown]
    assert terminal_here(*SCORE, "--total", "--bos", "a", "b") == (0, "".join(lines))


def test_totals_of_lines_are_over_all_lines_of_a_file(here, tiny):
    lines = (here / "a").read_text().splitlines()
    scores = tiny.score_many(lines)
    total = math.fsum(score.total_logprob for score in scores)
    count = sum(score.tokens_scored for score in scores)
    out, errors = run_here(*SCORE, "--total", "--lines", "latin", "a", "empty", code=6)
    assert rows_of(out) == [
        ["nan", "latin"], [f"{math.exp(-total / count):.6g}", "a"], ["nan", "empty"]
    ]  # fmt: skip
    note, last = errors.splitlines()
    assert note.startswith("gpt-cli: latin, line 1: the line is not UTF-8 at byte 3: ")
    assert last == "gpt-cli: error: 1 of 3 lines could not be scored"
    _, errors = run_here(*SCORE, "--lines", "-", "a", input=b"caf\xe9", code=6)
    assert errors.startswith("gpt-cli: standard input, line 1: the line is not UTF-8")
    assert run("--total", "--lines", "a") == out.splitlines(keepends=True)[1]
    sums = {"tokens": 9, "tokens_scored": count, "total_logprob": close(total)}
    empty, record = records(run("--total", "--lines", "--json", "empty", "a"))
    assert record == {"index": 1, "file": "a"} | sums | {
        "perplexity": close(math.exp(-total / count))
    }
    assert empty["perplexity"] is None
    (whole,) = records(run("--total", "--json", "a"))
    assert list(whole) == list(record)


# --- filters -------------------------------------------------------------------------------------


def test_lines_that_pass_are_unchanged(lines, alone):
    lines, alone = ([*items[:40], items[-1]] for items in (lines, alone))
    scored = [(line, score and score.perplexity) for line, score in zip(lines, alone, strict=True)]
    probable = [line for line, value in scored if value and value <= 1000]
    improbable = [line for line, value in scored if value and value >= 1000]
    assert run_lines(lines, FEW, kept=len(probable)) == b"".join(probable)
    assert run_lines(lines, MANY, kept=len(improbable)) == b"".join(improbable)
    assert lines[0] in probable
    assert probable[-1] == b"There was once a fox"
    assert "Zoë 🦊\u2028 says\x0c: “où?”\r\n".encode() in improbable


def test_records_of_lines_that_pass_are_unchanged(lines, told):
    values = sorted(record["perplexity"] for record in told if record.get("perplexity"))
    least, most = values[10] * (1 - 1e-4), values[-10] * (1 + 1e-4)  # next to that of a line
    expected = [row for row in told if least <= (row.get("perplexity") or 0) <= most]
    bounds = ["--min-perplexity", str(least), "--max-perplexity", str(most)]
    shown = run_lines(lines, "--json", *bounds, kept=len(expected))
    assert 0 < len(expected) < len(values)
    assert records(shown) == expected


@posix
def test_a_pipeline_keeps_stories_and_drops_shuffled_words(paragraphs, nonsense, tmp_path):
    mixed = [line for pair in zip(nonsense, paragraphs, strict=True) for line in pair]
    file = tmp_path / "mixed.txt"
    file.write_text("\n".join(mixed) + "\n", encoding="utf-8", newline="\n")
    score = shlex.join([*COMMAND, *SCORE])
    pipeline = f"cat {shlex.quote(str(file))} | {score} {FEW} | {score} - {FEW} | sort"
    finished = subprocess.run(pipeline, shell=True, capture_output=True, timeout=60)
    count = len(paragraphs)
    notes = [f"gpt-cli: kept {count} of {rows} rows\n" for rows in (2 * count, count)]
    assert finished.stderr.decode() == "".join(notes)
    assert sorted(finished.stdout.decode().splitlines()) == sorted(paragraphs)


def test_tokens_of_lines_that_pass_are_in_their_records():
    data = b"Once upon a time\nblue upon sky\n"
    (told,) = records(run(FEW, "-q", "--json", "--tokens", input=data))
    assert told["text"] == "Once upon a time"
    assert [token["token"] for token in told["logprobs"]] == ["Once", " upon", " a", " time"]


# --- pipes and terminals -------------------------------------------------------------------------


@posix
@pytest.mark.parametrize("flag", ["--lines", "--min-perplexity=1"])
def test_lines_of_an_open_pipe_are_answered_until_the_reader_leaves(flag):
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with LimitedProcess([*COMMAND, *SCORE, flag], **pipes, bufsize=0) as process:
        for line in (b"Once upon a time\n", b"There was once a fox.\r\n"):
            process.stdin.write(line[:3])
            process.stdin.write(line[3:])
            assert process.stdout.readline().endswith(line)  # before the input has ended
        process.stdout.close()
        process.stdin.write(b"Once upon a time\n")
        assert process.wait(timeout=60) == 141
        assert process.stderr.read() == b""


def test_a_terminal_is_no_input():
    error = "gpt-cli: error: no text: give a FILE, or a pipe on standard input\r\n"
    assert terminal_here(*SCORE, "--lines") == (2, error)


def test_a_terminal_shows_a_header_and_no_escape_codes(whole, facts, tmp_path):
    file = tmp_path / "lines.txt"
    file.write_bytes(b"Once upon a time\nThere was once a fox.\n")
    code, shown = terminal_here(*SCORE, "--lines", file)
    assert code == 0
    assert "\x1b" not in shown
    rows = shown.split("\r\n")
    assert len(rows) == 4
    assert rows[0].split() == ["tokens", "log-lik.", "perplexity", "bits/byte", "text"]
    for row, text in zip(rows[1:3], ["Once upon a time", "There was once a fox."], strict=True):
        assert row.endswith(f"  {text}")
        assert row.index(text) == rows[0].index("text")
    file.write_bytes(whole.encode())
    assert terminal_here(*SCORE, file) == (0, facts.replace("\n", "\r\n"))


@pytest.mark.parametrize("lines", [[], ["--lines"]])
@pytest.mark.parametrize(
    ("flag", "header", "order"),
    [
        ("--words", ["line", "start", "end", "tokens", "bits", "word"], [0, 2, 3, 4, 5, 1]),
        ("--tokens", ["line", "id", "log-lik.", "token"], [0, 1, 2, 3]),
        (
            "--layers",
            ["line", "id", "log-lik.", *(f"layer{layer}" for layer in range(5)), "token"],
            [0, 1, 2, *range(4, 9), 3],
        ),
    ],
)
def test_a_terminal_aligns_what_a_pipe_separates_by_tabs(flag, header, order, lines, tmp_path):
    file = tmp_path / "lines.txt"
    file.write_bytes("Once upon\n\na time, 中文 Zoë\n".encode())
    first = 0 if lines else 1  # a whole text has no numbers of lines
    shown = terminal_here(*SCORE, flag, *lines, file)[1].split("\r\n")[:-1]
    piped = [[row[i] for i in order[first:]] for row in rows_of(run(flag, *lines, file))]
    assert [line.split(maxsplit=len(piped[0]) - 1) for line in shown] == [header[first:], *piped]
    column = shown[0].index(header[-1])
    assert {line[column - 2 : column] for line in shown} == {"  "}
    assert "  " not in {line[column : column + 2] for line in shown}
    numbers_end = [len(line[:column].rstrip()) for line in shown]
    assert set(numbers_end) == {column - 2}


def test_a_text_that_cannot_be_scored_does_not_stop_the_others(tiny):
    model = replace(tiny.model, config=replace(tiny.model.config, vocab_size=1000))
    small = gpt_cli.Engine(LoadedModel(model, tiny.tokenizer), "small", 0)
    texts = ["Once upon", "there was a fox", "\ud800", "a time"]
    first, unknown, surrogate, last = small.score_many(texts)
    assert (first.tokens_scored, last.tokens_scored) == (1, 1)
    assert "no token 1697" in str(unknown)
    assert "not valid Unicode" in str(surrogate)
    with pytest.raises(InputError, match="no token 1697"):
        small.score("there was a fox")
    with pytest.raises(TypeError, match="texts must be a list"):
        small.score_many("Once")


@pytest.mark.parametrize("text", ["Once upon\n\n", "Once upon\r\n\r\n", "\ufeff\ufeffOnce upon"])
def test_the_text_of_a_record_is_the_text_that_was_scored(text):
    told = json.loads(run("--json", "--tokens", input=text.encode()))
    scored = b"".join(bytes(token["bytes"]) for token in told["logprobs"])
    assert told["text"].encode() == scored


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "arguments", "what"),
    [
        (b"", [], "is empty"),
        (b"\xef\xbb\xbf", [], "is empty"),
        (b"\n", [], "a text needs at least 2 tokens"),
        (b"a\n", [], "a text needs at least 2 tokens"),
        (b"a\n", ["--json"], "a text needs at least 2 tokens"),
        (b"caf\xe9 au lait\n", [], "is not UTF-8: byte 3"),
        (b"once upon\n", ["--stride", "0"], "stride must be from 1 to 511"),
        (b"once upon\n", ["--stride", "512"], "stride must be from 1 to 511"),
        (b"once upon\n", ["--stride", "512", "--lines"], "stride must be from 1 to 511"),
        (b"once upon\n", ["--stride", "many"], "--stride"),
        (b"once upon\n", ["--max-perplexity", "few"], "--max-perplexity"),
        (b"once upon\n", ["--max-perplexity", "9", "--tokens"], "--json"),
        (b"once upon\n", ["--min-perplexity", "9", "--tokens", "--lines"], "--json"),
        (b"once upon\n", ["--words", "--max-perplexity", "9"], "--words with --max-perplexity"),
        (b"once upon\n", ["--layers", "--min-perplexity", "9"], "--layers with --max-perplexity"),
        (b"once upon\n", ["--layers", "--min-k", "9"], "--min-k with --layers needs --json"),
        (b"once upon\n", ["--max-perplexity=9", "--min-k=9"], "--min-k with --max-perplexity"),
        (b"once upon\n", ["--min-k", "0"], "--min-k must be above 0 and at most 100"),
        (b"a\n", ["--total"], "text.txt: a text needs at least 2 tokens"),
        (b"\n", ["--bos"], "a text needs at least 1 token"),
        (b"a\n", ["--words"], "a text needs at least 2 tokens"),
        (b"once upon\n", ["--max-perplexity", "nan"], "perplexity"),
        (b"once upon\n", ["--min-perplexity", "-5"], "perplexity"),
        (b"once upon\n", ["--min-perplexity", "9", "--max-perplexity", "8"], "perplexity"),
        (None, [], "No such file"),
        (None, ["--lines"], "No such file"),
    ],
)
def test_an_error_is_one_line_that_names_the_input(data, arguments, what, tmp_path):
    file = tmp_path / "text.txt"
    if data is not None:
        file.write_bytes(data)
    assert what in refusal(*SCORE, file, *arguments)
