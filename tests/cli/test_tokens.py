"""`gpt-cli tokenize` and `detokenize` as a user meets them, in pipes and on a terminal."""

import json
import random
import subprocess
import sys

import pytest

from support.checkpoints import END, END_ID, VOCAB, write_tokenizer
from support.in_process import refusal, run_here, terminal_here
from support.processes import COMMAND, posix

# Of the tokenizer of `checkpoints`: its ids, and where each token's bytes are.
TEXT = 'He said:\n"é😀" \\'.encode() + b" \xff\xc2\x9b\xc2"
TABLE = r"""
   id  start    end  token
   39      0      1  "H"
   68      1      2  "e"
  264      2      4  " s"
   64      4      5  "a"
   72      5      6  "i"
   67      6      7  "d"
   25      7      8  ":"
  198      8      9  "\n"
    1      9     10  "\""
  274     10     12  "é"
  276     12     15  "\xf0\x9f\x98"
  222     15     16  "\x80"
    1     16     17  "\""
  220     17     18  " "
   59     18     19  "\\"
  220     19     20  " "
  187     20     21  "\xff"
  126     21     22  "\xc2"
  249     22     23  "\x9b"
  126     23     24  "\xc2"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that has a tokenizer and nothing else."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


@pytest.fixture
def run(folder, monkeypatch):
    """Run a command with that model, which writes nothing to standard error; return its output."""
    monkeypatch.setenv("GPT_CLI_MODEL", str(folder))

    def run(*arguments, **options):
        out, errors = run_here(*arguments, **options)
        assert errors == ""
        return out

    return run


INPUTS = {
    "empty": b"",
    "a line end": b"\n",
    "CRLF": b"one\r\ntwo\r\n\r\n",
    "spaces at both ends": b"  a b \t\n ",
    "a byte order mark": b"\xef\xbb\xbftext",
    "NULs": b"\0a\0\0b\0",
    "emoji": "👩‍🚀🦊 é".encode(),
    "no UTF-8": b"a\xff\xfe \xc3",
    "an emoji cut in two": b"\x9f\x98\x80 \xf0\x9f\x98",
    "a surrogate": b"\xed\xa0\x80",
    "every byte": bytes(range(256)),
    "the name of a special token": END.encode(),
    "a megabyte of text": "Once upon a time, “Zoë” saw 12 foxes.\n".encode() * 24_000,
    "100 kB of noise": random.Random(0).randbytes(100_000),
}


@pytest.mark.parametrize("flags", [[], pytest.param(["--special"], marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", INPUTS)
def test_every_input_comes_back_byte_for_byte(run, name, flags):
    ids = run("tokenize", "-q", *flags, input=INPUTS[name])
    assert run("detokenize", input=ids) == INPUTS[name]


def test_a_pipe_gets_the_ids_in_one_line(run):
    assert run("tokenize", input=b"the the\n") == b"83 257 262 198\n"
    assert run("tokenize", input=b"") == b"\n"


def test_the_text_is_an_argument_a_file_or_a_pipe(run, folder, tmp_path):
    data = " aé\r\n".encode()
    expected = run("tokenize", input=data)
    (tmp_path / "text").write_bytes(data)
    for arguments in ([data.decode()], ["-f", tmp_path / "text"], [data.decode(), "-m", folder]):
        assert run("tokenize", *arguments, input=b"not read") == expected
    assert run("tokenize", "-f", "-", input=data) == expected
    assert run("tokenize", "", input=b"not read") == b"\n"


def test_several_files_have_their_names(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, data in {"a": b"the the\n", "b c": b"", "d": b"\xff"}.items():
        (tmp_path / name).write_bytes(data)
    assert run("tokenize", "a", "b c", "d") == b"83 257 262 198\n\n187\n"
    assert run("tokenize", "--count", "a", "b c", "-", input=b"!") == b"4\ta\n0\tb c\n1\t-\n"
    (record,) = map(json.loads, run("tokenize", "--json", "d", "b c").splitlines())
    assert record == {
        "file": "d", "id": 187, "token": "\ufffd", "bytes": [255], "start": 0, "end": 1
    }  # fmt: skip
    counts = map(json.loads, run("tokenize", "--json", "--count", "a", "b c").splitlines())
    assert [*counts] == [{"file": "a", "tokens": 4}, {"file": "b c", "tokens": 0}]
    header = "   id  start    end  token\r\n"
    row = '  187      0      1  "\\xff"\r\n'
    assert terminal_here("tokenize", "d", "b c") == (0, f"d\r\n{header}{row}b c\r\n{header}")


@posix
def test_an_argument_may_hold_any_bytes_but_nul(run):
    data = bytes(range(1, 256))
    ids = subprocess.check_output([*COMMAND, "tokenize", data])
    assert subprocess.check_output([*COMMAND, "detokenize"], input=ids) == data


def test_the_ids_are_arguments_a_file_or_a_pipe(run, tmp_path):
    (tmp_path / "ids").write_text("\n83\t257\r\n 262  ")
    assert run("detokenize", "83", "257", "262") == b"the the"
    assert run("detokenize", "83 257 262", input=b"1") == b"the the"
    assert run("detokenize", "-f", str(tmp_path / "ids")) == b"the the"
    assert run("detokenize", "-f", "-", input=b"083 257 262") == b"the the"
    assert run("detokenize", input=b" \n") == b""


def test_count_is_a_number_and_no_more(run):
    assert run("tokenize", "--count", "the the") == b"3\n"
    assert run("tokenize", "--count", input=b"") == b"0\n"
    assert json.loads(run("tokenize", "--count", "--json", "the the")) == {"tokens": 3}


def test_special_lets_a_name_be_the_token(run):
    assert run("tokenize", "--special", f"a{END}") == f"64 {END_ID}\n".encode()
    assert str(END_ID).encode() not in run("tokenize", "-q", f"a{END}").split()
    assert run("detokenize", str(END_ID)) == END.encode()


def test_json_has_an_object_for_each_token_and_the_offsets_tile_the_input(run, tokenizer):
    lines = run("tokenize", "--json", input=TEXT).decode().split("\n")
    assert lines.pop() == ""
    records = [json.loads(line) for line in lines]
    assert [record["id"] for record in records] == tokenizer.encode_bytes(TEXT)
    end = 0
    for record in records:
        assert list(record) == ["id", "token", "bytes", "start", "end"]
        assert record["start"] == end
        end = record["end"]
        assert bytes(record["bytes"]) == TEXT[record["start"] : end]
        assert record["token"] == bytes(record["bytes"]).decode(errors="replace")
    assert end == len(TEXT)
    assert run("tokenize", "--json", input=b"") == b""


def test_a_terminal_gets_a_table_as_wide_as_its_offsets(folder, tmp_path):
    def shown(text):
        (tmp_path / "text").write_bytes(text)
        return terminal_here("tokenize", "-m", folder, "-f", tmp_path / "text")

    assert shown(TEXT) == (0, TABLE.removeprefix("\n").replace("\n", "\r\n"))
    lines = shown(b"a!" * 50_000)[1].splitlines()
    assert lines[0] == "    id   start     end  token"
    assert lines[-1] == '     0   99999  100000  "!"'


def test_a_terminal_gets_numbers_json_and_texts_with_a_line_end(folder):
    model = ("-m", folder)
    assert terminal_here("tokenize", *model, "--count", "the the") == (0, "3\r\n")
    assert terminal_here("tokenize", *model, "--json", "the")[1].startswith('{"id": 83,')
    assert terminal_here("detokenize", *model, "83", "257") == (0, "the\r\n")


@pytest.mark.parametrize("command", ["tokenize", "detokenize"])
def test_a_terminal_is_no_input(command, folder):
    code, shown = terminal_here(command, "-m", folder)
    assert code == 2
    assert shown.startswith("gpt-cli: error: no input: give an argument")


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (b"83 x", "'x' is not a token id: ids are whole numbers"),
        (b"83,257", "'83,257' is not"),
        (b"83 -1", "'-1' is not"),
        (b"83 +1", "'+1' is not"),
        (b"1_0", "'1_0' is not"),
        (b"9" * 5000, "is not a token id"),
        ("²".encode(), "'²' is not"),
        (b"\xff", "is not a token id"),
        (b"83 100000", "100000 is not a token id of this model"),
        (f"83 {len(VOCAB)}".encode(), f"{len(VOCAB)} is not a token id of this model"),
    ],
)
@pytest.mark.usefixtures("run")
def test_an_invalid_id_is_refused_before_anything_is_written(ids, says):
    error = refusal("detokenize", input=ids)
    assert says in error
    assert len(error) < 200


def test_input_that_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "a").touch()
    twice = ["tokenize", tmp_path / "a", tmp_path / "a"]
    assert "--file and an argument are both given" in refusal(*twice, "-f", "-")
    assert "cannot read" in refusal("tokenize", "-f", tmp_path / "none")
    assert "cannot read" in refusal("detokenize", "-f", tmp_path)


@posix
@pytest.mark.parametrize(
    ("arguments", "says"), [([], "no input"), (["-f", "-"], "standard input is closed")]
)
def test_closed_standard_input_is_refused(arguments, says):
    command = ["sh", "-c", 'exec "$@" <&-', "sh", *COMMAND, "tokenize", *arguments]
    finished = subprocess.run(command, capture_output=True, timeout=60)
    assert finished.returncode == 2
    assert says in finished.stderr.decode()


@pytest.mark.parametrize("command", ["tokenize", "detokenize"])
def test_the_model_must_be_local_when_offline(command, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for model in ("gpt2", "acme/none"):
        assert "cannot fetch" in refusal(command, "-m", model, "--offline", "1", code=3)
    assert "has no tokenizer" in refusal(command, "-m", tmp_path, "1", code=4)


@pytest.mark.parametrize("command", ["tokenize", "detokenize"])
def test_numpy_and_safetensors_are_not_imported(command):
    code = (
        "import sys; from gpt_cli.cli import app; code = app.run(sys.argv[1:]);"
        "assert not {'numpy', 'safetensors'} & sys.modules.keys(); sys.exit(code)"
    )
    assert subprocess.check_output([sys.executable, "-c", code, command, "1", "-m", "tiny"])
