"""`gpt-cli compress` and `decompress` as a user meets them, in files, pipes and on a terminal."""

import random
import re
import shutil
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from zlib import crc32

import pytest
from safetensors.numpy import save_file

from gpt_cli.compression.archive import ArchiveReader, end
from gpt_cli.gpt2 import checkpoint
from gpt_cli.ops import bindings
from support.checkpoints import END
from support.in_process import refusal, run_here
from support.processes import COMMAND, path_with_command, posix, run_on_terminal

TINY = ("--model", "tiny")
NOISE = random.Random(0).randbytes(3000)
INPUTS = {
    "nothing": b"",
    "one byte": b"\xff",
    "a line end": b"\n",
    "every byte": bytes(range(256)),
    "CRLF": b"Once upon a time\r\n\r\nthere was\r\n",
    "no UTF-8": b"The fox\xff\xfe ran \xc3",
    "half of an emoji": b"Once \xf0\x9f\x98",
    "the end token in it": f"Once{END}{END}Once".encode(),
    "one letter": b"a" * 600,
    "noise": NOISE,
    "noise in a story": b"Once upon a time" + NOISE + b"there was a fox.",
}


@pytest.fixture(autouse=True)
def _library(library, monkeypatch):
    monkeypatch.delenv("GPT_CLI_OPS", raising=False)


@pytest.fixture(scope="module")
def story(tiny):
    (row,) = tiny.generate(["Once upon a time"], max_tokens=300, seed=1, ignore_eos=True)
    return ("Once upon a time" + row.text).encode()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """The variable PATH, with `gpt-cli`."""
    return path_with_command(tmp_path_factory.mktemp("path") / "bin")


def run(command, *arguments, model="tiny", **options):
    """Run a command that writes nothing to standard error; return its output."""
    out, errors = run_here(command, "--model", model, *arguments, **options)
    assert errors == ""
    return out


# --- what goes in comes out ----------------------------------------------------------------------


@pytest.mark.parametrize("name", INPUTS)
def test_any_bytes_come_back(name):
    file = run("compress", input=INPUTS[name])
    assert run("decompress", input=file) == INPUTS[name]
    assert len(file) < len(INPUTS[name]) + 80


def test_a_story_takes_little(tiny, story):
    file = run("compress", input=story)
    assert len(file) < len(story) / 10
    assert run("decompress", input=file) == story
    assert file == tiny.compress(story)


def test_files_and_pipes_have_the_same_bytes(story, tmp_path):
    source, packed, back = (tmp_path / name for name in ("source", "packed", "back"))
    source.write_bytes(story)
    assert run("compress", source, "-o", packed) == b""
    assert run("decompress", packed, "--output", back) == b""
    assert back.read_bytes() == story
    for arguments, data in ([source], b""), ([], story), (["-"], story):
        assert run("compress", *arguments, input=data) == packed.read_bytes()
    assert run("decompress", packed) == story
    assert {path.name for path in tmp_path.iterdir()} == {"source", "packed", "back"}


@posix
def test_one_command_feeds_the_other(path, story):
    line = "gpt-cli compress -m tiny | gpt-cli decompress -m tiny"
    data = story + NOISE + bytes(range(256))
    finished = subprocess.run(
        ["sh", "-c", line], input=data, capture_output=True, env={"PATH": path}, timeout=60
    )
    assert finished.stdout == data
    assert finished.stderr == b""


@pytest.mark.parametrize("block", [1, 50, 65_536])
def test_blocks_may_have_any_size(block, story):
    data = story[:200] if block == 1 else story
    file = run("compress", "--block", block, input=data)
    assert run("decompress", input=file) == data
    assert (len(file) > len(run("compress", input=data))) == (block < 65_536)


@pytest.mark.parametrize("block", [0, 65_537, "many"])
def test_other_sizes_are_refused(block):
    assert "--block" in refusal("compress", *TINY, "--block", block, input=b"Once")


def test_a_file_says_its_dtype(story):
    dtypes = ("auto", "float32", "int8")  # the weights are stored in float16
    files = [run("compress", "--dtype", dtype, input=story) for dtype in dtypes]
    assert files[0] == run("compress", input=story)
    assert len(set(files)) == 3
    assert [run("decompress", input=file) for file in files] == [story] * 3


def test_a_model_stored_in_int8_is_the_same_model(story, tmp_path):
    run_here("quantize", "tiny", "-o", tmp_path / "int8", "-q")
    file = run("compress", input=story, model=tmp_path / "int8")
    assert file == run("compress", "--dtype", "int8", input=story)
    assert run("decompress", input=file, model=tmp_path / "int8") == story


@posix
def test_threads_and_levels_change_nothing(path, story):
    ways = [("1", ""), ("2", ""), ("2", "avx2" if "avx2" in bindings.levels() else "")]

    def execute(command, way, data):
        threads, level = way
        env = {"PATH": path, "GPT_CLI_LEVEL": level}
        command = [*COMMAND, command, *TINY, "--threads", threads, "-q"]
        return subprocess.run(command, input=data, capture_output=True, env=env, check=True).stdout

    files = [execute("compress", way, story) for way in ways]
    assert len(set(files)) == 1
    assert [execute("decompress", way, files[0]) for way in ways] == [story] * 3


def test_a_file_of_an_earlier_version_is_read():
    text = b"Once upon a time, a brave mole"
    file = bytes.fromhex(
        "47 50 54 5a 01 02 ae a6 74 97 4e d7 f3 40 3d d9 bf e0 8b 62 a7 10 6e e5 82 9a b5 00 10 02"
        "33 2e a2 15 0b 4c 20 80 b5 01 00 05 00 00 36 6b 9d af 1e 33 2e a5 eb"
    )
    assert run("decompress", input=file) == text
    assert run("compress", input=text) == file


# --- refusals ------------------------------------------------------------------------------------


def test_another_model_is_refused(case_folder):
    file = run("compress", input=b"Once upon a time")
    error = refusal("decompress", "--model", case_folder("f16"), input=file)
    assert "another model" in error
    assert "use that model" in error


def test_another_seed_is_another_model(case_folder):
    """Two models of the same sizes and tokens differ in their weights alone."""
    file = run("compress", input=b"Once", model=case_folder("saved"))
    assert run("decompress", input=file, model=case_folder("hub")) == b"Once"
    assert "another model" in refusal(
        "decompress", "--model", case_folder("tied_but_stored"), input=file
    )


@pytest.mark.parametrize(
    ("one", "other", "says"),
    [
        ("bf16", "f16", "another model"),  # rounding makes other weights
        ("f16", "saved", "another model"),
        ("saved", "f16", "another model"),
    ],
)
def test_rounded_weights_are_another_model(one, other, says, case_folder):
    file = run("compress", input=b"Once", model=case_folder(one))
    assert says in refusal("decompress", "--model", case_folder(other), input=file)


def test_weights_in_int8_are_refused_by_those_in_float32(tmp_path, case_folder):
    folder = case_folder("f16")
    file = run("compress", input=b"Once", model=folder)
    run_here("quantize", folder, "-o", tmp_path / "int8", "-q")
    error = refusal("decompress", "--model", tmp_path / "int8", input=file)
    assert "in float16, and this one is in int8: use that model" in error


@pytest.mark.parametrize("case", ["f16", "bf16"])
def test_how_the_weights_are_stored_does_not_matter(case, case_folder, tmp_path):
    folder, copy = case_folder(case), tmp_path / "copy"
    shutil.copytree(folder, copy)
    for path in copy.glob("*.safetensors"):
        path.unlink()
    weights = {name: tensor[:] for name, tensor in checkpoint.read(folder)[1].items()}
    save_file(weights, copy / "model.safetensors")
    one, other = (run("compress", input=b"Once", model=model) for model in (folder, copy))
    assert one != other  # they name the dtype
    assert run("decompress", input=one, model=copy) == b"Once"
    assert run("decompress", input=other, model=folder) == b"Once"


def test_numpy_is_refused_at_both_ends(monkeypatch, story):
    file = run("compress", input=story)
    monkeypatch.setenv("GPT_CLI_OPS", "numpy")
    for command, data in (("compress", story), ("decompress", file)):
        error = refusal(command, *TINY, input=data, code=5)
        assert "numpy does not give them: use the compiled library" in error


@pytest.mark.parametrize("data", [b"", b"GPT", b"Once upon a time", NOISE])
def test_what_compress_has_not_written_is_refused(data):
    error = refusal("decompress", *TINY, input=data)
    assert "standard input" in error
    assert "has written" in error


def test_nothing_is_written_over(tmp_path, story):
    file = run("compress", input=story)
    out = tmp_path / "out"
    out.write_bytes(b"precious")
    for command, data in (("compress", story), ("decompress", file)):
        assert "exists: give a new name" in refusal(command, *TINY, "-o", out, input=data)
        assert "exists" in refusal(command, *TINY, "-o", tmp_path, input=data)
        missing = tmp_path / "no" / "out"
        assert "does not exist: create it" in refusal(command, *TINY, "-o", missing, input=data)
    assert "exists" in refusal("compress", *TINY, out, "-o", out)
    assert out.read_bytes() == b"precious"
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("command", ["compress", "decompress"])
def test_input_that_cannot_be_read_is_refused(command, tmp_path):
    for file in (tmp_path, tmp_path / "none"):
        assert f"cannot read {file}" in refusal(command, *TINY, file, "-o", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="the file that cannot be read is Linux's")
def test_an_error_of_reading_is_not_one_of_writing(tmp_path):
    memory = "/proc/self/mem"  # its first page cannot be read
    error = refusal("compress", *TINY, memory, "-o", tmp_path / "out")
    assert f"cannot read {memory}: " in error
    assert list(tmp_path.iterdir()) == []


# --- salvage -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def damaged(tiny, story):
    """A file whose second block is damaged, and the data of the blocks."""
    reader = ArchiveReader(BytesIO(tiny.compress(story, block=110)))
    blocks = list(reader.segments())
    parts, start = [], 0
    for block in blocks:
        ids = tiny.tokenizer.encode_bytes(story[start:])[: block.size]
        parts.append(b"".join(map(tiny.tokenizer.token_bytes, ids)))
        start += len(parts[-1])
    assert b"".join(parts) == story
    packed = [block.pack() for block in blocks]
    packed[1] = packed[1][:-1] + bytes([packed[1][-1] ^ 1])
    last = end(len(blocks), len(story), crc32(story)).pack()
    return reader.header.pack() + b"".join(packed) + last, parts


def test_a_damaged_block_costs_itself_alone(damaged, tmp_path):
    file, parts = damaged
    expected = b"".join([parts[0], *parts[2:]])
    error = refusal("decompress", *TINY, "-o", tmp_path / "out", input=file)
    assert "standard input: block 1 is damaged: get another copy, or" in error
    assert not (tmp_path / "out").exists()
    for output in ([], ["-o", tmp_path / "out"]):
        out, error = run_here("decompress", *TINY, "--salvage", *output, input=file, code=6)
        assert error.startswith("gpt-cli: error: standard input: block 1 is damaged; ")
        assert out == (b"" if output else expected)
    assert (tmp_path / "out").read_bytes() == expected


def test_salvage_of_an_undamaged_file_is_a_success(story):
    file = run("compress", "--block", 50, input=story)
    assert run("decompress", "--salvage", input=file) == story


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_salvage_needs_no_header(dtype, story):
    file = run("compress", "--dtype", dtype, input=story)
    for damaged in (b"!" + file[1:], file[:9] + b"!" + file[10:]):
        assert b"!" in damaged[:10]
        out, error = run_here("decompress", *TINY, "--salvage", input=damaged, code=6)
        assert "its header is damaged; all else is written" in error
        assert out == story


# --- a terminal ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "byte", [0, *(pytest.param(byte, marks=pytest.mark.slow) for byte in (1, 2, 3))]
)
def test_salvage_does_not_guess_the_dtype(byte, story):
    for dtype in ("auto", "float32", "int8"):
        file = run("compress", "--dtype", dtype, input=story)
        if file[5] != byte:
            damaged = file[:5] + bytes([byte]) + file[6:]
            out, _ = run_here("decompress", *TINY, "--salvage", input=damaged, code=6)
            assert out == story


@posix
def test_a_terminal_shows_progress_and_the_totals(tmp_path, story):
    source, packed, back = (str(tmp_path / name) for name in ("source", "packed", "back"))
    Path(source).write_bytes(story)
    code, shown = run_on_terminal("compress", *TINY, source, "-o", packed)
    assert code == 0
    totals = r"gpt-cli: [\d.]+ k?B read, [\d.]+ k?B written, [\d,]+ tokens, [\d,]+ a second\r\n"
    assert re.search(rf"\r{totals}$", shown)
    code, shown = run_on_terminal("decompress", *TINY, packed, "-o", back)
    assert code == 0
    assert Path(back).read_bytes() == story
    for number, command in enumerate((["compress", source], ["decompress", packed])):
        assert run_on_terminal(*command, *TINY, "-q", "-o", f"{back}{number}") == (0, "")


@posix
def test_data_on_a_terminal_has_no_progress_beside_it(tmp_path, story):
    (tmp_path / "packed").write_bytes(run("compress", input=story))
    code, shown = run_on_terminal("decompress", *TINY, str(tmp_path / "packed"))
    assert (code, shown) == (0, story.decode().replace("\n", "\r\n"))


@posix
def test_compressed_data_is_not_for_a_terminal(tmp_path):
    (tmp_path / "source").write_bytes(b"Once")
    code, shown = run_on_terminal("compress", *TINY, str(tmp_path / "source"))
    assert code == 2
    assert shown.startswith("gpt-cli: error: compressed data is not for a terminal: ")


@posix
@pytest.mark.parametrize("command", ["compress", "decompress"])
def test_a_terminal_is_no_input(command, tmp_path):
    code, shown = run_on_terminal(command, *TINY, "-o", str(tmp_path / "out"))
    assert code == 2
    assert shown.startswith("gpt-cli: error: no data: give a FILE")
    assert list(tmp_path.iterdir()) == []
