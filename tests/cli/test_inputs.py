"""Texts, pipes and files as arguments: one rule for all commands."""

import json
import os
from pathlib import Path

import pytest

from support.in_process import finished, refusal, run_here

# Commands that read one text, with flags that make their output short and repeatable.
TEXTS = {
    "generate": ["-n", "3", "-s", "1", "--echo"],
    "next": ["-k", "2"],
    "rank": ["--choices", "red,blue"],
    "show surprise": [],
    "tokenize": [],
}
FILES = {
    "batch": ["-n", "2", "-s", "1"],
    "rank": ["--choices", "red,blue"],
    "score": [],
    "tokenize": ["--count"],
}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Be in a new folder with files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPT_CLI_MODEL", "tiny")
    (tmp_path / "a.txt").write_bytes(b"Once upon a time\nThe sky was\n")
    (tmp_path / "b c").write_bytes(b"The sun was\n")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "x").write_bytes(b"The moon was\n")
    return tmp_path


def output(command, *arguments, **options):
    return run_here(*command.split(), *arguments, **options)[0]


@pytest.mark.parametrize(("command", "flags"), TEXTS.items())
def test_words_are_one_text_and_continue_the_pipe_after_a_dash(command, flags):
    joined = output(command, *flags, "The sky - was")
    assert output(command, "The", *flags, "sky", "-", "was") == joined
    piped = output(command, *flags, "The sky\n so was it")
    assert output(command, *flags, "-", " so", "was", "it", input=b"The sky\n") == piped
    if command != "rank":  # which reads rows from a file or a pipe
        assert output(command, *flags, "-", input=b"The sky - was") == joined
        Path("sky").write_bytes(b"The sky\n")
        assert output(command, *flags, "-f", "sky", " so was it") == piped
        assert "--file and - are both given" in refusal(*command.split(), "-f", "sky", "-")


def test_ids_may_come_from_a_pipe_and_from_arguments():
    ids = output("tokenize", "Once upon a time").decode().split()
    for arguments, piped in (
        (["-"], ids),
        (["-", *ids[2:]], ids[:2]),
        (["-f", "-", ids[3]], ids[:3]),
    ):
        assert (
            output("detokenize", *arguments, input=" ".join(piped).encode()) == b"Once upon a time"
        )


class Unread:
    """A pipe that nobody writes to."""

    encoding = "utf-8"

    def __init__(self):
        self.ours, self.theirs = os.pipe()

    def fileno(self):
        return self.ours

    def isatty(self):
        return False

    @property
    def buffer(self):
        raise AssertionError("it is read")


@pytest.fixture
def pipe():
    pipe = Unread()
    yield pipe
    os.close(pipe.ours)
    os.close(pipe.theirs)


NOT_READ = b"gpt-cli: note: the pipe is not read: "
GIVEN = [
    *((command, [*flags, "Once", "upon"]) for command, flags in TEXTS.items()),
    *((command, [*flags, "a.txt", "b c"]) for command, flags in FILES.items()),
    ("detokenize", ["83"]),
    ("generate", ["-f", "a.txt", "-n", "1"]),
    ("score", ["-f", "a.txt"]),
    ("compress", ["a.txt"]),
]


@pytest.mark.parametrize(("command", "arguments"), GIVEN)
def test_a_pipe_that_is_not_needed_is_not_waited_for_and_noted_if_it_has_data(
    command, arguments, pipe, request
):
    if command == "compress":
        request.getfixturevalue("library")

    def errors_of(*more):
        done = finished(*command.split(), *arguments, *more, stdin=pipe)
        assert done.returncode == 0, done.stderr
        return done.stderr

    assert NOT_READ not in errors_of("-v")
    os.write(pipe.theirs, b"The sky was\n")
    cure = b"--file - reads it\n" if "-f" in arguments else b"the argument - reads it\n"
    assert errors_of("-v").count(NOT_READ + cure) == 1
    assert NOT_READ not in errors_of("-v", "-q")
    assert NOT_READ not in errors_of()  # standard error is no terminal


@pytest.mark.parametrize("command", ["generate", "tokenize"])
def test_a_text_that_is_the_name_of_a_file_is_noted(command):
    note = "gpt-cli: note: a.txt is read as a text; --file a.txt reads the file\n"
    for words, noted in (["a.txt"], True), (["a.txt", "-q"], False), (["m"], False):
        assert (note in run_here(command, *TEXTS[command], *words)[1]) is noted
    assert output(command, *TEXTS[command], "a.txt") != output(
        command, *TEXTS[command], "-f", "a.txt"
    )


@pytest.mark.parametrize(("file", "other"), [("a.txt", "sad"), ("b c", "m"), ("b c", "no")])
def test_choices_with_spaces_after_a_file_are_refused(file, other):
    said = refusal("rank", file, "--choices", "happy", other)
    says = f"gpt-cli: error: {file} is a file, and {other} is not: --choices takes commas, as in "
    assert said == f"{says}happy,sad; put quotes around a prompt\n"


@pytest.mark.parametrize("command", ["rank", "tokenize"])
def test_a_word_of_a_text_that_is_the_name_of_a_file_or_folder_is_noted(command):
    texts = [(["The", "m"], "m"), (["The", "-"], "")]
    texts += [(["a.txt", "was"], "a.txt")] if command == "tokenize" else []
    for words, noted in texts:
        cure = "m/ is the folder" if noted == "m" else f"--file {noted} reads the file"
        note = f"gpt-cli: note: {noted} is read as a text; {cure}\n"
        shown = run_here(command, *TEXTS[command], *words)[1]
        assert shown.count("is read as a text") == shown.count(note) == bool(noted)
        assert note not in run_here(command, *TEXTS[command], "-q", "-v", *words)[1]


def test_files_by_the_option_are_as_many_as_by_arguments():
    for command in ("batch", "rank", "score"):
        flags = [*FILES[command], *(["--template", "{line}"] if command == "score" else [])]
        by_option, by_argument = (
            finished(command, *flags, "-q", *files).stdout
            for files in (["-f", "a.txt", "-f", "b c"], ["a.txt", "b c"])
        )
        assert by_option.count(b"\n") == by_argument.count(b"\n") == 3
    for command in TEXTS:
        if command != "rank":
            assert "--file must be a single file" in refusal(*command.split(), *["-f", "a.txt"] * 2)


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [
        (["batch", "Once upon a time"], "to continue a text, use `gpt-cli generate`"),
        (["rank", "--choices", "a,b", "Once upon a time", "-o", "out"], "the arguments are files"),
        (["score", "Once upon a time"], "to score a text, pipe it: echo TEXT | gpt-cli score"),
    ],
)
def test_a_text_in_place_of_a_file_is_told_what_to_do(arguments, cure):
    said = refusal(*arguments)
    assert "cannot read Once upon a time: No such file or directory; " in said
    assert said.endswith(f"{cure}\n")


@pytest.mark.parametrize(
    ("words", "prompts"),
    [
        (["a.txt"], ["Once upon a time", "The sky was"]),
        (["a.txt", "b c"], ["Once upon a time", "The sky was", "The sun was"]),
        (["b c", "-"], ["The sun was", "piped"]),
        (["m/", "b c"], ["The moon was", "The sun was"]),
        (["-f", "m"], ["The moon was"]),
        (["*.txt", "b c"], ["Once upon a time", "The sky was", "The sun was"]),
        (["m"], None),
        (["b c"], None),
    ],
)
def test_arguments_of_rank_are_rows_if_all_name_files(words, prompts):
    out = output("rank", "--json", *FILES["rank"], *words, input=b"piped")
    records = [json.loads(line) for line in out.splitlines()]
    assert [record.get("prompt") for record in records] == (prompts or [None, None])


@pytest.mark.parametrize("command", ["rank", "tokenize"])
def test_a_misspelt_name_among_files_is_no_text(command):
    said = refusal(command, *FILES[command], "a.txt", "c.txt")
    none = "No such file or directory; name a file that can be read"
    assert said == f"gpt-cli: error: cannot read c.txt: {none}\n"


def test_a_prompt_that_is_missing_is_named(monkeypatch):
    done = finished("rank", "--choices", "red,blue", terminal=True)
    missing = b"no prompt: give a PROMPT, a FILE of rows, or a pipe on standard input\n"
    assert (done.returncode, done.stdout) == (2, b"gpt-cli: error: " + missing)


EMPTY = "the name of a file is empty: give a FILE, or - for standard input"


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        *((command, [*FILES[command], ""]) for command in ("batch", "score")),
        *((command, [*flags, "-f", ""]) for command, flags in (TEXTS | FILES).items()),
        ("rank", ["--choices", "red", "-f", "", "The", "sky"]),
        ("generate", ["--choices-file", "", "The"]),
        ("compress", ["-o", "new", "a.txt", ""]),
        ("decompress", ["-o", "new", ""]),
    ],
)
def test_an_empty_name_is_not_the_folder_or_the_pipe(command, arguments, here):
    said = refusal(*command.split(), *arguments, input=b"The sky was")
    assert said in (
        f"gpt-cli: error: {EMPTY}\n",
        "gpt-cli: error: --file and an argument are both given: leave one of them out\n",
    )
    assert not (here / "new").exists()


@pytest.mark.parametrize(("command", "flags"), TEXTS.items())
def test_a_text_may_be_at_an_address(command, flags, memory):
    memory.pipe_file("/text", b"The sky was\n")
    piped = output(command, *flags, "-f", "-", input=b"The sky was\n")
    assert output(command, *flags, "-f", "memory://text") == piped


def test_choices_and_the_prompt_are_not_both_read_from_the_pipe():
    flags, choices = ["--choices-file", "-"], b"red\nblue\n"
    for command, *arguments in (
        ["generate"],
        ["generate", "-"],
        ["generate", "-f", "-", "Once"],
        ["rank"],
        ["rank", "a.txt", "-"],
        ["batch", "a.txt", "-"],
    ):
        assert "cannot both be read" in refusal(command, *flags, *arguments, input=choices)
    pytest.importorskip("llguidance")
    for prompt in "Once", "":
        assert output("generate", *flags, prompt, input=choices).strip() in (b"red", b"blue")
    for command, argument in ("generate", "Once"), ("batch", "a.txt"), ("rank", "a.txt"):
        ours, theirs = os.pipe()
        os.write(theirs, choices)
        os.close(theirs)
        with os.fdopen(ours) as pipe:
            done = finished(command, *flags, argument, "-v", stdin=pipe)
        assert (done.returncode, NOT_READ in done.stderr) == (0, False)


@pytest.mark.parametrize("command", FILES)
def test_an_input_without_rows_is_noted(command, here):
    if command != "tokenize":
        (here / "none").write_bytes(b"" if command == "score" else b"\n")
        flags = [*FILES[command], *(["--lines"] if command == "score" else [])]
        for input in ["none"], ["-"]:
            note = "gpt-cli: note: the input has no rows\n"
            assert note in run_here(command, *flags, *input, "-v")[1]
            assert run_here(command, *flags, *input, "-q")[1] == ""
    assert "has no rows" not in run_here(command, *FILES[command], "a.txt", "-v")[1]


def test_an_empty_file_of_choices_needs_choices(here):
    (here / "none").touch()
    for command in ("generate", "batch", "rank"):
        said = refusal(command, "--choices-file", "none", "a.txt")
        assert said == "gpt-cli: error: none is empty: write a choice on each line\n"


@pytest.mark.parametrize("command", ["batch", "score"])
def test_words_that_name_no_file_are_refused_where_only_files_are_read(command):
    if command == "batch":
        assert "cannot read The: No such file" in refusal(command, "The", "sky")
    assert "cannot read The The" in refusal(command, "The " * 100)  # too long for a name


@pytest.mark.parametrize(
    ("command", "line"), [("batch", "line"), ("score", "line_number"), ("rank", "line_number")]
)
def test_records_of_several_files_have_their_files_and_lines(command, line):
    template = ["--template", "{line}"] if line == "line_number" else []
    flags = ["--json"] if command == "rank" else []
    out = output(command, *FILES[command], *template, *flags, "a.txt", "-", input=b"\nit is\n")
    records = [json.loads(record) for record in out.splitlines()]
    places = [(record["index"], record["file"], record[line]) for record in records]
    assert places == [(0, "a.txt", 1), (1, "a.txt", 2), (2, "-", 2)]
