"""`gpt-cli compress` and `decompress` as a user meets them, in files, pipes and on a terminal."""

import os
import random
import re
import subprocess
import sys
from io import BytesIO
from zlib import crc32

import pytest

from gpt_cli.compression.archive import ArchiveReader, end
from gpt_cli.ops import bindings
from support.adapters import ADAPTERS
from support.checkpoints import END
from support.in_process import refusal, run_here, terminal_here
from support.processes import path_with_command, posix, run_on_terminal

TINY = ("--model", "tiny")
NOISE = random.Random(0).randbytes(3000)
ALL_KINDS = [
    b"\n" + bytes(range(256)),
    b"Once upon a time\r\n\r\nthere was\r\n",
    b"The fox\xff\xfe ran \xc3",
    f"Once{END}{END}Once".encode(),
    b"a" * 600,
    b"Once upon a time" + NOISE + b"there was a fox.",
    b"Once \xf0\x9f\x98",  # half of an emoji
]


@pytest.fixture(autouse=True)
def _library(library, monkeypatch):
    monkeypatch.delenv("GPT_CLI_OPS", raising=False)


@pytest.fixture(scope="module")
def story(tiny):
    (row,) = tiny.generate(["Once upon a time"], max_tokens=300, seed=1, ignore_eos=True)
    return ("Once upon a time" + row.text).encode()


@pytest.fixture(scope="module")
def packed(tiny, story):
    """The compressed story."""
    return tiny.compress(story)


def run(command, *arguments, model="tiny", **options):
    """Run a command that has only notes to tell; return its output."""
    out, errors = run_here(command, "--model", model, *arguments, **options)
    assert re.fullmatch(r"gpt-cli: .+ read, .+ written.*\n", errors)  # the totals, as of batch
    return out


# --- round trips ---------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"\xff", b"".join(ALL_KINDS)], ids=["empty", "byte", "all"])
def test_any_bytes_are_restored(data):
    file = run("compress", input=data)
    assert run("decompress", input=file) == data
    assert len(file) < len(data) + 80


def test_files_and_pipes_have_the_same_bytes(story, packed, tmp_path):
    source, new, back = (tmp_path / name for name in ("source", "packed", "back"))
    source.write_bytes(story)
    assert run("compress", source, "-o", new) == b""
    assert new.read_bytes() == packed
    assert len(packed) < len(story) / 10
    assert run("decompress", new, "--output", back) == b""
    assert back.read_bytes() == story
    for arguments, data in ([source], b""), ([], story), (["-"], story):
        assert run("compress", *arguments, input=data) == packed
    assert run("decompress", new) == story
    assert {path.name for path in tmp_path.iterdir()} == {"source", "packed", "back"}


def test_several_files_become_one(story, packed, tmp_path):
    half, rest = tmp_path / "half", tmp_path / "rest"
    half.write_bytes(story[:500])
    rest.write_bytes(story[500:])
    assert run("compress", half, rest) == packed
    assert run("compress", half, "-", "-", input=story[500:]) == packed


@pytest.fixture
def few_files():
    """Let this process open 50 more files."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    newest = os.open(os.devnull, os.O_RDONLY)
    os.close(newest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (newest + 50, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_files")
def test_files_are_open_one_at_a_time(tmp_path):
    word = tmp_path / "word"
    word.write_bytes(b"Once\n")
    assert run("decompress", input=run("compress", *[word] * 100)) == b"Once\n" * 100


def test_files_at_addresses_are_read_and_written(story, packed, memory, tmp_path):
    source, new, back = (f"memory://bucket/{name}" for name in ("source", "packed", "back"))
    memory.pipe_file("/bucket/source", story)
    run("compress", source, "-o", new)
    assert memory.cat_file("/bucket/packed") == packed
    assert run("decompress", new) == story
    assert "exists: name another output" in refusal("decompress", *TINY, new, "-o", source)
    memory.pipe_file("/bucket/packed", packed[:-1])  # all its data comes before the damage
    assert "its end is missing" in refusal("decompress", *TINY, new, "-o", back)
    assert memory.ls("/bucket", detail=False) == ["/bucket/packed", "/bucket/source"]
    (tmp_path / "packed").write_bytes(packed)
    run("decompress", tmp_path / "packed", "-o", back)
    assert memory.cat_file("/bucket/back") == story


@posix
def test_processes_compress_and_decompress_in_a_pipeline(story, tmp_path):
    line = "gpt-cli compress -m tiny | gpt-cli decompress -m tiny"
    env = {"PATH": path_with_command(tmp_path / "bin")}
    finished = subprocess.run(
        ["sh", "-c", line], input=story + NOISE, capture_output=True, env=env, timeout=60
    )
    assert finished.stdout == story + NOISE
    assert finished.stderr.count(b"written") == finished.stderr.count(b"\n") == 2


@pytest.mark.parametrize("block", [1, 50, 65_536])
def test_blocks_may_have_any_size(block, story):
    data = story[:200] if block == 1 else story
    file = run("compress", "--segment", block, input=data)
    assert run("decompress", input=file) == data
    assert (len(file) > len(run("compress", input=data))) == (block < 65_536)


@pytest.mark.parametrize("block", [0, 65_537, "many"])
def test_other_block_sizes_are_refused(block):
    assert "--segment" in refusal("compress", *TINY, "--segment", block, input=b"Once")


def test_a_file_stores_its_dtype_and_int8_is_that_of_a_quantized_model(story, packed, tmp_path):
    dtypes = ("auto", "float32", "int8")  # the weights are stored in float16
    files = [run("compress", "--dtype", dtype, input=story) for dtype in dtypes]
    assert files[0] == packed
    assert len(set(files)) == 3
    assert [run("decompress", input=file) for file in files] == [story] * 3
    run_here("quantize", "tiny", "-o", tmp_path / "int8", "-q")
    assert run("compress", input=story, model=tmp_path / "int8") == files[2]
    assert run("decompress", input=files[2], model=tmp_path / "int8") == story


def test_threads_and_levels_change_nothing(story, packed, thread_variables):
    try:
        for threads, level in (
            ("2", ""),
            ("1", bindings.levels()[0]),
            ("3", bindings.levels()[-1]),
        ):
            way = {"GPT_CLI_LEVEL": level}
            assert run("compress", "--threads", threads, input=story, **way) == packed
            assert run("decompress", "--threads", threads, input=packed, **way) == story
    finally:
        bindings.choose_level()


def test_a_file_of_an_earlier_version_is_read():
    text = b"Once upon a time, a brave mole"
    file = bytes.fromhex(
        "47 50 54 5a 01 02 ae a6 74 97 4e d7 f3 40 3d d9 bf e0 8b 62 a7 10 6e e5 82 9a b5 00 10 02"
        "33 2e a2 15 0b 4c 20 80 b5 01 00 05 00 00 36 6b 9d af 1e 33 2e a5 eb"
    )
    assert run("decompress", input=file) == text
    assert run("compress", input=text) == file


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("saved", "tied_but_stored"),  # of the same sizes and tokens; only the weights differ
        ("bf16", "f16"),  # rounded in different ways
        ("bf16", "saved"),  # its lower halves are cut off, not rounded
        ("f16", "tied_but_stored"),
        ("saved", "f16"),
    ],
)
def test_another_model_is_refused(one, other, case_folder):
    file = run("compress", input=b"Once", model=case_folder(one))
    error = refusal("decompress", "-q", "--model", case_folder(other), input=file)
    assert "another model" in error
    assert "use that model" in error


def test_a_model_is_known_by_its_weights_and_not_by_its_files(case_folder, tmp_path):
    file = run("compress", input=b"Once", model=case_folder("saved"))
    assert run("decompress", input=file, model=case_folder("hub")) == b"Once"
    file = run("compress", input=b"Once", model=case_folder("f16"))
    run_here("quantize", case_folder("f16"), "-o", tmp_path / "int8", "-q")
    error = refusal("decompress", "--model", tmp_path / "int8", input=file)
    assert "in float16, and this one is in int8: use that model" in error


def output(*arguments, **options):
    """Run a command that may round weights; return its output."""
    return run_here(*arguments, "-q", **options)[0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", ["saved", "f16", "bf16"])
def test_weights_are_rounded_at_both_ends(case_folder, story, case, dtype):
    model = ("-m", case_folder(case))
    file = output("compress", "--dtype", dtype, *model, input=story)
    assert output("decompress", *model, input=file) == story


def test_a_model_that_is_saved_in_16_bits_reads_the_file_of_one_that_is_rounded(
    case_folder, story, tmp_path
):
    rounded, stored = ("-m", case_folder("saved")), ("-m", case_folder("f16"))
    file = output("compress", "--dtype", "float16", *rounded, input=story)
    assert file == output("compress", *stored, input=story)
    damaged = file[:6] + b"????" + file[10:]  # the digest of the weights
    for model in (rounded, stored):
        assert output("decompress", *model, input=file) == story
        assert output("decompress", "--salvage", *model, input=damaged, code=6) == story


@pytest.mark.parametrize("dtype", ["auto", "float16"])
def test_an_adapter_is_merged_alike_at_both_ends(case_folder, story, tmp_path, dtype):
    model = "-m", case_folder("f16"), "--adapter", ADAPTERS["plain"].write(tmp_path / "adapter")
    file = output("compress", "--dtype", dtype, *model, input=story)
    assert output("decompress", *model, input=file) == story


@pytest.mark.parametrize("command", ["compress", "decompress"])
def test_numpy_is_refused_at_both_ends(command, packed):
    error = refusal(command, *TINY, input=packed, code=5, GPT_CLI_OPS="numpy")
    assert "numpy does not give them: use the compiled library" in error


@pytest.mark.parametrize("data", [b"", b"GPT", b"Once upon a time", NOISE])
def test_data_of_other_programs_is_refused(data):
    error = refusal("decompress", *TINY, input=data)
    assert "standard input" in error
    assert "has written" in error


@pytest.mark.parametrize("command", ["compress", "decompress"])
def test_no_file_is_overwritten_and_no_folder_created(command, tmp_path, packed):
    out, missing = tmp_path / "out", tmp_path / "no" / "out"
    out.write_bytes(packed)
    assert "exists: name another output" in refusal(command, *TINY, "-o", out, input=packed)
    assert "exists" in refusal(command, *TINY, "-o", tmp_path, input=packed)
    assert "does not exist: create it" in refusal(command, *TINY, "-o", missing, input=packed)
    assert "exists" in refusal(command, *TINY, out, "-o", out)
    assert out.read_bytes() == packed
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("command", ["compress", "decompress"])
def test_an_output_with_an_empty_name_is_refused(command, packed):
    """Such as that of a variable that is not set."""
    assert "--output is empty" in refusal(command, *TINY, "-o", "", input=packed)


@pytest.mark.parametrize("command", ["compress", "decompress"])
def test_input_that_cannot_be_read_is_refused(command, tmp_path):
    files = [tmp_path, tmp_path / "none", "x" * 300]
    if sys.platform == "linux":
        files.append("/proc/self/mem")  # can be opened, but its first page cannot be read
    for file in files:
        assert f"cannot read {file}: " in refusal(command, *TINY, file, "-o", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# --- salvage -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def damaged(tiny, story):
    """A file whose second block is damaged, and the data of the blocks."""
    reader = ArchiveReader(BytesIO(tiny.compress(story, segment=110)))
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
    assert "standard input: segment 1 is damaged: get another copy, or" in error
    assert not (tmp_path / "out").exists()
    for output in ([], ["-o", tmp_path / "out"]):
        out, error = run_here("decompress", *TINY, "--salvage", *output, input=file, code=6)
        assert error.splitlines()[-1].startswith(
            "gpt-cli: error: standard input: segment 1 is damaged; "
        )
        assert out == (b"" if output else expected)
    assert (tmp_path / "out").read_bytes() == expected


def test_salvage_of_an_undamaged_file_is_a_success(story, packed):
    assert run("decompress", "--salvage", input=packed) == story


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_salvage_needs_no_header(dtype, story):
    file = run("compress", "--dtype", dtype, input=story)
    for damaged in (b"!" + file[1:], file[:9] + b"!" + file[10:]):
        assert b"!" in damaged[:10]
        out, error = run_here("decompress", *TINY, "--salvage", input=damaged, code=6)
        assert "its header is damaged; all else is written" in error
        assert out == story


# --- a terminal ----------------------------------------------------------------------------------


def test_a_terminal_shows_progress_and_the_totals_unless_quiet(tmp_path, story, packed):
    names = [str(tmp_path / name) for name in ("source", "packed", "back")]
    (tmp_path / "source").write_bytes(story)
    size, tokens = r"[\d.]+ k?B", r"[\d,]+ tokens?, [\d,]+ a second"
    first = {"compress": "", "decompress": r"\d+% left, "}
    last = {"compress": rf" \({100 * len(packed) / len(story):.1f}%\)", "decompress": ""}
    for command, source, target in zip(first, names, names[1:], strict=False):
        code, shown = terminal_here(command, *TINY, source, "-o", target)
        assert code == 0
        counts = rf"{size} read, {size} written"
        assert re.match(rf"\rgpt-cli: {first[command]}{counts}, {tokens} +\r", shown)
        assert re.search(rf"\rgpt-cli: {counts}{last[command]}, {tokens}\r\n$", shown)
        assert terminal_here(command, *TINY, "-q", source, "-o", f"{target}2") == (0, "")
    assert [(tmp_path / name).read_bytes() for name in ("packed", "back")] == [packed, story]


@pytest.mark.parametrize(
    ("data", "totals"),
    [
        (NOISE, "3 kB read, 3 kB written (101.8%, 3 kB stored)"),
        (b"", "0 B read, 41 B written"),
    ],
    ids=["noise", "nothing"],
)
def test_the_totals_say_what_is_stored(data, totals, tmp_path):
    (tmp_path / "source").write_bytes(data)
    _, shown = terminal_here("compress", *TINY, tmp_path / "source", "-o", tmp_path / "new")
    assert shown.endswith(f"gpt-cli: {totals}\r\n")


@pytest.mark.parametrize("flags", [[], ["--salvage"]], ids=["strictly", "salvaged"])
def test_the_tokens_of_a_damaged_file_are_counted_if_they_are_decoded(damaged, flags, tmp_path):
    (tmp_path / "damaged").write_bytes(damaged[0])
    _, shown = terminal_here(
        "decompress", *TINY, *flags, tmp_path / "damaged", "-o", tmp_path / "o"
    )
    assert ("% left" in shown) == bool(flags)
    assert "segment 1 is damaged" in shown


@posix
def test_data_on_a_terminal_has_no_progress_beside_it(tmp_path, story, packed):
    (tmp_path / "packed").write_bytes(packed)
    code, shown = run_on_terminal("decompress", *TINY, str(tmp_path / "packed"))
    assert (code, shown) == (0, story.decode().replace("\n", "\r\n"))


def test_compressed_data_is_not_for_a_terminal(tmp_path):
    (tmp_path / "source").write_bytes(b"Once")
    code, shown = terminal_here("compress", *TINY, tmp_path / "source")
    assert code == 2
    assert shown.startswith("gpt-cli: error: compressed data is not for a terminal: ")


@pytest.mark.parametrize("command", ["compress", "decompress"])
def test_a_terminal_is_no_input(command, tmp_path):
    code, shown = terminal_here(command, *TINY, "-o", tmp_path / "out")
    assert code == 2
    assert shown.startswith("gpt-cli: error: no data: give a FILE")
    assert list(tmp_path.iterdir()) == []
