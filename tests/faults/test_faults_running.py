"""Faults of a running command: bad input, signals, missing resources, changing files."""

import json
import math
import random
import shutil
import signal
import struct
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from gpt_cli.folder.config import GPT2Config, expected_shapes
from gpt_cli.system import gpu
from gpt_cli.system.library import native_library
from support.checkpoints import CONFIG, write_checkpoint
from support.in_process import records_here, run_here
from support.processes import is_quiet, on_terminal, posix, run_on_terminal
from support.signals import (
    ENDS,
    LONG,
    SIGNALS,
    SLOWLY,
    TINY,
    at_each_limit,
    drip,
    each_signal,
    interrupt,
    leave,
    limit_addresses,
    limits,
    linux,
)
from support.world import check_failure, fault_row

pytestmark = posix

SLOW = pytest.mark.slow


def slow(*values):
    """Mark values whose fault `make test` tries with others."""
    return [pytest.param(value, marks=SLOW) for value in values]


STORY = ("generate", *TINY, "-s", 1, "-n", 60, "Once upon a time")
STORY_LINE = b"Once upon a time there was a fox.\n"


# --- input ---------------------------------------------------------------------------------------


def row(number, name, arguments, says, do, *, stdin=b"", code=2):
    intact = "standard output is empty"
    return fault_row(number, name, code, arguments, stdin, code, says, do, intact=intact)


def generate(*arguments: object) -> tuple[object, ...]:
    return ("generate", *TINY, "-n", 3, *arguments)


def rank(*arguments: object) -> tuple[object, ...]:
    return ("rank", *TINY, "--choices", "ran,sat", *arguments)


# fmt: off
BAD_INPUT = [
    row(38, "no prompt", generate("-f", "/dev/null"), "is empty", "a text is needed"),
    row(38, "an empty pipe", generate(), "standard input is empty", "a text"),
    row(39, "a prompt longer than the context", generate("Once " * 3000), "leaves no room",
        "overflow truncate or shift"),
    row(42, "a prompt that is no UTF-8", generate(), "is not UTF-8: byte 4", "convert it",
        stdin=b"Once\xff"),
    row(42, "half of a surrogate", generate(b"Once \xed\xa0\x80"), "not valid Unicode", "in UTF-8"),
    row(43, "a million spaces", generate(), "leaves no room", "shorten it", stdin=b" " * 10**6),
    row(43, "a million letters", generate(), "leaves no room", "shorten it", stdin=b"a" * 10**6),
    row(44, "a temperature below 0", generate("--temperature", -1, "x"), "temperature", "must be"),
    row(44, "a temperature of nan", generate("--temperature", "nan", "x"), "temperature",
        "must be"),
    row(44, "top-p of 0", generate("--top-p", 0, "x"), "top-p", "must be"),
    row(44, "top-p of 2", generate("--top-p", 2, "x"), "top-p", "must be"),
    row(44, "top-k below 0", generate("--top-k", -1, "x"), "top-k", "must be"),
    row(44, "no token at most", generate("-n", 0, "x"), "max-tokens", "1 or more"),
    row(45, "a seed below 0", generate("-s", -2, "x"), "seed", "from 0 to"),
    row(45, "a seed of 2**64", generate("-s", 2**64, "x"), "seed", "from 0 to"),
    row(45, "a seed that is text", generate("-s", "x", "x"), "seed", "a whole number"),
    row(131, "no beam", generate("--beams", 0, "x"), "--beams", "from 1 to 128"),
    row(131, "more samples than beams", generate("--beams", 2, "--samples", 3, "x"), "--samples",
        "at most --beams"),
    row(131, "a temperature beside beams", generate("--beams", 2, "--temperature", 0.5, "x"),
        "--temperature", "cannot be set in a beam search"),
    row(131, "a length penalty without beams", generate("--length-penalty", 2, "x"),
        "--length-penalty", "applies only to a beam search"),
    row(131, "a search that shifts", generate("--beams", 2, "--overflow", "shift", "x"),
        "--overflow", "cannot be shift"),
    row(131, "typical-p of 0", generate("--typical-p", 0, "x"), "typical-p", "must be"),
    row(131, "n-grams of -1", generate("--no-repeat-ngram", -1, "x"), "no-repeat-ngram", "0 or"),
    row(62, "a file that is not there", generate("-f", "nowhere"), "No such file", "name a file"),
    row(62, "a folder for a file", ("score", *TINY, "/"), "cannot read /", "add --output"),
    row(62, "an unknown flag", generate("--nope", "x"), "--nope", "--help"),
    row(62, "an unknown command", ("nope",), "nope", "--help"),
    row(62, "a template with a lone brace", rank("--template", "{line"), "a lone { at character 1",
        "write {{ or }}", stdin=b"x"),
    row(62, "a template without a field", rank("--template", "{{x}}"), "has no field",
        "write {line}", stdin=b"x"),
    row(62, "a template that is nowhere", rank("--template", "nowhere"), "No such file",
        "needs {line}", stdin=b"x"),
    row(62, "a field that lines have not", rank("--template", "{x}"), "has {x}",
        "give JSON Lines or a table", stdin=b"x"),
    row(62, "rows that are not there", rank("nowhere.jsonl"), "No such file", "cannot read"),
    row(62, "ids that are none", ("detokenize", *TINY, "--", "-1"), "'-1'", "whole numbers"),
    row(62, "an id beyond the vocabulary", ("detokenize", *TINY, "999999"), "999999", "give ids"),
    row(62, "a model that is nowhere", ("generate", "-m", "./nowhere", "x"), "nowhere",
        "give a folder, OWNER/NAME", code=3),
    row(62, "a file for a model", ("generate", "-m", "/dev/null", "x"), "no model '/dev/null'",
        "give a folder, OWNER/NAME", code=3),
]
# fmt: on


PROCESSES = {
    "an empty pipe",
    "half of a surrogate",
    "an unknown command",
    "a model that is nowhere",
}


@pytest.mark.parametrize(("arguments", "stdin", "code", "says", "do"), BAD_INPUT)
def test_bad_input_is_refused(arguments, stdin, code, says, do, world, suffer, request):
    run = world.run if request.node.callspec.id in PROCESSES else world.run_here
    suffer(*arguments, stdin=stdin, code=code, says=says, do=do, run=run)


@pytest.mark.fault(38, "an empty prompt as an argument", 0, intact="it begins a text")
def test_an_empty_prompt_begins_a_text():
    assert run_here(*generate(""))[0]


@pytest.mark.fault(40, "a text that fills the context", 0, intact="the text so far, and its reason")
def test_a_full_context_is_told():
    flags = ("-n", 2000, "--ignore-eos", "--json", "-v")
    out, errors = run_here("generate", *TINY, *flags, "Once")
    assert json.loads(out)["finish_reason"] == "context"
    assert "--overflow shift" in errors


@pytest.mark.fault(41, "<|endoftext|> in a prompt", 0, intact="it is text")
def test_the_name_of_a_token_is_text():
    ids, special = (
        run_here("tokenize", *TINY, *flags, "<|endoftext|>")[0].split()
        for flags in ((), ("--special",))
    )
    assert len(ids) > 1
    assert len(special) == 1


@pytest.mark.fault(42, "zero bytes in a prompt", 0, intact="every byte")
def test_zero_bytes_come_back(world):
    data = b"a\0b\0\0"
    assert world.output(*generate("--echo", "-f", "-"), stdin=data).startswith(data)


@pytest.mark.fault(44, "top-k above the vocabulary", 0, intact="the text")
def test_more_tokens_than_there_are_may_be_chosen_among():
    assert run_here(*generate("--top-k", 10**9, "Once"))[0]


@pytest.mark.fault(48, "a character in several tokens", 0, intact="no U+FFFD in the text")
def test_no_character_comes_in_pieces(case_folder):
    arguments = ("generate", "-m", case_folder("hub"), "-n", 60, "--echo", "-f", "-")
    out, _ = run_here(*arguments, input="🦊".encode())
    assert out.decode().startswith("🦊")


@pytest.mark.fault(49, "the end token comes first", 0, intact="an empty text")
def test_a_text_may_end_before_it_begins(tmp_path):
    model = write_checkpoint(tmp_path / "model", CONFIG | {"eos_token_id": list(range(290))})
    (record,) = records_here("generate", "-m", model, "--json", "Once")
    assert (record["text"], record["finish_reason"]) == ("", "eos")


@pytest.mark.fault(50, "rows that are malformed", 6, intact="all other rows")
def test_bad_rows_are_told_with_their_lines():
    lines = [b'{"prompt": "Once"}', b"{", b'{"prompt": 3}', b"\xff", b'{"prompt": "One"}']
    flags = (*TINY, "-q", "-n", 3, "--format", "jsonl")
    out, errors = run_here("batch", *flags, input=b"\n".join(lines), code=6)
    assert errors.startswith("gpt-cli: error: 3 of 5 rows failed")
    records = [json.loads(line) for line in out.splitlines()]
    assert ["error" in record for record in records] == [False, True, True, True, False]
    assert [record["line"] for record in records if "error" in record] == [2, 3, 4]


@pytest.mark.fault(52, "an output that is there already", 2, intact="the output")
def test_an_output_is_not_written_over(world, suffer_here):
    (world.place / "out").write_bytes(b"precious\n")
    for flags, says, do in ((), "exists", "set it"), (("--resume",), "not a record", "another"):
        arguments = ("batch", *TINY, "-o", "out", *flags)
        suffer_here(*arguments, stdin=b"Once\n", code=2, says=says, do=do)


@pytest.mark.fault(52, "an output that is the input", 2, intact="the input")
@pytest.mark.parametrize("flags", [(), ("--resume",)], ids=["new", "resumed"])
def test_the_input_is_not_written_over(flags, world, suffer):
    (world.place / "in").write_bytes(b"Once\n")
    (world.place / "link").symlink_to("in")
    arguments = ("batch", *TINY, "in", "-o", "link", *flags)
    suffer(*arguments, code=2, says="is the input", do="name another output")


@pytest.mark.fault(53, "rows of all lengths", 0, intact="each row's own text")
def test_rows_do_not_change_one_another(tiny):
    prompts = ["Once " * length for length in (1, 40, 3, 90)]
    data = "".join(prompt + "\n" for prompt in prompts).encode()
    records = records_here("batch", *TINY, "-q", "-n", 8, "--temperature", 0, input=data)
    alone = [tiny.generate([prompt], max_tokens=8, temperature=0)[0].text for prompt in prompts]
    assert [record["text"] for record in records] == alone


@pytest.mark.fault(63, "input a byte at a time", 0, intact="the same output")
@pytest.mark.parametrize(
    "arguments",
    [generate("-s", 1), ("score", *TINY, "--lines"), ("tokenize", *TINY)],
    ids=lambda arguments: arguments[0],
)
def test_input_may_come_a_byte_at_a_time(arguments, world):
    data = "Once upon a time\nthere was a fox 🦊\n".encode() * 3
    assert drip(world, *arguments, stdin=data) == run_here(*arguments, input=data)[0]


@SLOW
@pytest.mark.fault(64, "100 MB of input", 2, intact="memory, and the other commands' output")
def test_a_hundred_megabytes_are_input_like_any_other(world, suffer):
    options = {"stdin": STORY_LINE * 3_000_000, "limit": 300}
    suffer(*generate(), code=2, says="leaves no room", do="shorten it", **options)
    assert int(world.output("tokenize", *TINY, "--count", **options)) > 10_000_000
    batch = ("batch", *TINY, "-q", "-n", 2, "in")
    (world.place / "in").write_bytes(b"Once\n" + b"\n" * 100_000_000 + b"One\n")
    assert len(world.output(*batch, limit=300).splitlines()) == 2
    (world.place / "in").write_bytes(b"Once\n" + b"a" * 100_000_000 + b"\nOne\n")
    finished = world.run(*batch, limit=300)
    assert finished.returncode == 6
    records = [json.loads(line) for line in finished.stdout.splitlines()]
    codes = [record.get("error", {}).get("code") for record in records]
    assert codes == [None, "context_overflow", None]


# --- missing resources ---------------------------------------------------------------------------


@pytest.mark.fault(33, "a full disk behind standard output", 5, intact="-")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize(
    "command", ["generate", "batch", "models", *slow("score", "tokenize", "next")]
)
def test_a_full_disk_is_told(command, world):
    flags = {"models": (), "generate": (*TINY, "-n", 3), "batch": (*TINY, "-n", 3)}.get(
        command, TINY
    )
    with Path("/dev/full").open("wb") as full:
        finished = world.run(command, *flags, stdin=b"Once upon a time", stdout=full)
    lines = [line for line in finished.stderr.splitlines() if b"error" in line]
    assert finished.returncode == 5
    assert lines == [b"gpt-cli: error: cannot write to standard output: No space left on device"]


@pytest.mark.fault(33, "a disk that fills under an output", 5, intact="every row, with --resume")
def test_an_output_that_finds_no_room_can_be_resumed(world, suffer):
    (world.place / "in").write_bytes(b"Once\n" * 12)
    job = ("batch", *TINY, "-s", 1, "-n", 5, "-q", "in", "-o", "out")
    options = {"changes": True, "preexec_fn": limits(FSIZE=2000)}
    suffer(*job, code=5, says="File too large", do="resume the job", **options)
    assert 0 < (world.place / "out").stat().st_size <= 2000
    assert world.run_here(*job, "--resume").returncode == 0
    assert [record["index"] for record in records_in(world.place / "out")] == list(range(12))


@linux
@pytest.mark.fault(35, "a limit of 300 MiB of address space", 5, intact="nothing is begun")
def test_too_little_address_space_is_known_before(suffer):
    options = {"preexec_fn": limit_addresses(300)}
    suffer(*generate("Once"), code=5, says="MiB of address space", do="ulimit -v", **options)


@linux
@pytest.mark.fault(35, "weights beyond a limit of memory", 5, intact="nothing is begun")
def test_too_large_a_model_is_known_before_it_is_read(world, model, suffer):
    config = CONFIG | {"n_layer": 24, "n_embd": 1600, "n_head": 25}
    (model / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, shape in expected_shapes(GPT2Config.from_dict(config)):
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [start, end]}
    data = json.dumps(header).encode()
    with (model / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(data)) + data)
        file.truncate(8 + len(data) + end)  # no data, which would take 1.5 GB
    options = {"preexec_fn": limit_addresses(2500)}
    arguments = ("generate", "-m", model, "--dtype", "float32", "--threads", 1, "Once")
    suffer(*arguments, code=5, says="2,953 MB of memory", do="choose a smaller", **options)


@linux
@pytest.mark.fault(35, "texts beyond a limit of memory", 5, intact="nothing is begun")
def test_too_many_texts_are_known_before_they_are_computed(suffer):
    options = {"preexec_fn": limit_addresses(1000)}
    arguments = (*generate("-n", 200), "--samples", 2000, "--threads", 1, "Once")
    suffer(*arguments, code=5, says="needs about", do="generate fewer at a time", **options)


@linux
@SLOW
@pytest.mark.fault(35, "each limit of address space from 50 to 1600 MiB", 5, intact="-")
@pytest.mark.parametrize("flags", [(), ("--dtype", "int8")], ids=["float32", "int8"])
def test_any_limit_of_address_space_is_enough_or_told(flags, world):
    world.env.pop("GPT_CLI_OPS", None)
    command = ("generate", *TINY, *flags, "-n", 300, "--threads", 1, "Once")
    *_, last = at_each_limit(world, *command)
    assert last.stdout


@linux
@pytest.mark.fault(64, "input without end, in 1000 MiB", 5, intact="memory is bounded")
@pytest.mark.parametrize(
    "arguments",
    [
        generate("-f", "/dev/zero"),
        ("batch", *TINY, "/dev/zero"),
        *slow(("score", *TINY, "--lines", "/dev/zero"), ("tokenize", *TINY, "-f", "/dev/zero")),
    ],
    ids=lambda arguments: arguments[0],
)
def test_input_without_end_is_told(arguments, suffer):
    options = {"preexec_fn": limit_addresses(1000), "env": {"OPENBLAS_NUM_THREADS": "1"}}
    suffer(*arguments, code=5, says="does not fit the free memory", do="split it", **options)


@pytest.mark.fault(36, "--device cuda without a GPU", 5, intact="no CPU computes instead")
@pytest.mark.skipif(gpu.problem() is None, reason="there is a GPU")
def test_without_a_gpu_none_is_taken_instead(suffer_here):
    arguments = (*generate("Once"), "--device", "cuda")
    suffer_here(*arguments, code=5, says="--device cuda: ", do="is installed")


@pytest.mark.fault(65, "a HOME that is missing, read-only, or not set", 0, intact="the text")
@pytest.mark.parametrize("home", ["/nonexistent", None, *slow("/proc")])
def test_no_home_is_needed(home, world, story):
    del world.env["HF_HOME"], world.env["HOME"]
    world.env |= {"HOME": home} if home else {}
    assert world.output(*STORY) == story
    assert world.output("models").startswith(b"tiny\t")


@pytest.mark.usefixtures("library")
@pytest.mark.fault(65, "a compiled library that cannot be loaded", 0, intact="the text")
def test_without_a_library_that_works_numpy_computes(world, model):
    world.env.pop("GPT_CLI_OPS", None)
    command = ("generate", "-m", model, "-s", 1, "-n", 60, "Once")
    damaged = world.root / "libkernels"
    damaged.write_bytes(b"of another machine\n" * 100)
    script = f"mount --bind {damaged} {native_library()}"
    finished = world.run_in_namespace(script, *command)
    expected, _ = run_here(*command, GPT_CLI_OPS="native")
    assert (finished.returncode, finished.stdout) == (0, expected)
    finished = world.run_in_namespace(script, *command, "--dtype", "int8")
    assert "native does not work here" in check_failure(finished, 5)


@pytest.fixture(scope="module")
def story() -> bytes:
    return run_here(*STORY)[0]


@pytest.mark.fault(71, "odd environment variables", 0, intact="the text")
@pytest.mark.parametrize(
    "variables",
    [
        "COLUMNS=wide OMP_NUM_THREADS=many TERM= TMPDIR=/nonexistent",
        "GPT_CLI_MODEL= GPT_CLI_LEVEL= GPT_CLI_OPS= GPT_CLI_THREADS=",
        "OMP_NUM_THREADS=0 PYTHONDEVMODE=1 PYTHONWARNINGS=error",
        *slow("GPT_CLI_THREADS=99", "PYTHONOPTIMIZE=2"),
    ],
)
def test_odd_variables_change_nothing(variables, world, story):
    finished = world.run(*STORY, env=dict(pair.split("=") for pair in variables.split()))
    assert (finished.stdout, finished.stderr) == (story, b"")


@pytest.mark.fault(71, "variables of gpt-cli that mean nothing", 2, intact="nothing is begun")
@pytest.mark.parametrize(
    ("variable", "do"),
    [
        ("GPT_CLI_THREADS=many", "a whole number"),
        ("GPT_CLI_THREADS=0", "must be from 1 to 256"),
        ("GPT_CLI_OPS=abacus", "must be native or numpy"),
        ("GPT_CLI_LEVEL=abacus", "must be one of"),
    ],
)
def test_a_variable_that_means_nothing_is_told(variable, do, world, suffer, request):
    world.env.pop("GPT_CLI_OPS", None)
    name, value = variable.split("=")
    if name == "GPT_CLI_LEVEL":
        request.getfixturevalue("library")
    options = {"env": {name: value}, "says": name, "do": do}
    suffer("generate", *TINY, "--dtype", "float32", "Once", code=2, **options)


@pytest.mark.fault(72, "a limit of 12 open files and of 256 kB of stack", 0, intact="the text")
def test_few_files_and_little_stack_are_enough(world, story):
    assert world.output(*STORY, preexec_fn=limits(NOFILE=12, STACK=256 << 10)) == story


@pytest.mark.fault(66, "no /proc", 0, intact="the text")
def test_no_proc_is_needed(world, story):
    finished = world.run_in_namespace("umount -l /proc", *STORY)
    assert (finished.returncode, finished.stdout) == (0, story)
    finished = world.run_in_namespace("umount -l /proc", "bench", *TINY, "-n", 3, "--json")
    assert finished.returncode == 0
    assert json.loads(finished.stdout)


@pytest.mark.fault(67, "locale C, without UTF-8", 0, intact="every byte")
def test_the_locale_does_not_matter(world):
    world.env["LC_ALL"] = "C"
    text = "Zoë 🦊".encode()
    assert world.output(*generate("--echo", text)).startswith(text)
    world.env |= {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert world.output(*generate("--echo"), stdin=text).startswith(text)
    assert check_failure(world.run("generate", "-m", "./Zoë", "x"), 3)


@pytest.mark.fault(68, "a terminal of 10 columns", 0, intact="-")
def test_a_narrow_terminal_is_no_obstacle():
    commands = [
        generate("Once", "--stats"),
        ("next", *TINY, "Once upon a"),
        ("rank", *TINY, "Once", "--choices", "upon,below"),
        ("tokenize", *TINY, "Once upon a time"),
        ("models",),
        ("info", "tiny"),
        ("bench", *TINY, "-n", 3),
        ("generate", "--help"),
        ("nope",),
    ]
    lines = [[str(argument) for argument in command] for command in commands]
    code = f"from gpt_cli.cli import app; print([app.run(line) for line in {lines}])"
    code, shown = on_terminal([sys.executable, "-c", code], columns=10, env={})
    assert code == 0
    assert "Traceback" not in shown
    assert shown.endswith("[0, 0, 0, 0, 0, 0, 0, 0, 2]\r\n")


@pytest.mark.fault(56, "tokens that drive a terminal", 0, intact="the terminal")
def test_bytes_of_tokens_cannot_drive_a_terminal():
    ids = run_here("tokenize", *TINY, input=b"\x1b[2J\x9b")[0].decode()
    code, shown = run_on_terminal("detokenize", *TINY, ids)
    assert code == 0
    assert "␛[2J\ufffd" in shown
    assert run_here("detokenize", *TINY, ids)[0] == b"\x1b[2J\x9b"


@pytest.mark.fault(56, "a model that writes control characters", 0, intact="the terminal")
def test_a_model_cannot_drive_a_terminal():
    arguments = ("generate", *TINY, "-n", "1", "--echo", "\x1b[2J\x9b\x07\x7f\r")
    code, shown = run_on_terminal(*arguments)
    assert code == 0
    assert "␛[2J\ufffd␇␡␍" in shown
    assert not {"\x1b", "\x9b", "\x07", "\x7f"} & set(shown)
    assert run_here(*arguments)[0].startswith("\x1b[2J\x9b\x07\x7f\r".encode())


# --- signals -------------------------------------------------------------------------------------

BEGINNING = "standard output is a beginning of the whole"


@pytest.mark.parametrize(
    ("number", "flags"),
    [
        fault_row(46, f"{number.name} in the middle of generate {flags}", code, number, flags,
                  intact=BEGINNING, marks=marks)
        for number, code in SIGNALS.items()
        for flags, quick in (("", SIGNALS), ("--json", [signal.SIGINT]), ("--no-stream", ()))
        for marks in ([] if number in quick else [SLOW],)
    ],
)  # fmt: skip
def test_a_signal_leaves_the_text_so_far(number, flags, world, tiny, survive):
    command = (*LONG, *SLOWLY, "--stats", *flags.split())
    # Without a stream, nothing shows that the text has begun.
    for wait in (0.5, 2, 10) if flags else (0,):
        options = {"size": 0 if flags else 10, "until": partial(time.sleep, wait)}
        code, out, errors = interrupt(world, number, *command, **options)
        text = json.loads(out)["text"] if out and flags == "--json" else out.decode()
        if text:
            break
    assert code == SIGNALS[number]
    assert b"finish reason interrupted" in errors
    options = {"ignore_eos": True, "overflow": "shift", "seed": 1}
    # A token has about four characters.
    (whole,) = tiny.generate(["Once"], max_tokens=min(2000, 10 + len(text) // 2), **options)
    assert text
    assert whole.text.startswith(text)
    survive(1)


MOMENTS = {
    "generate": (*LONG, *SLOWLY),
    "generate --json": (*LONG, *SLOWLY, "--json"),
    "score --lines": ("score", *TINY, "--lines", "in"),
    "batch": ("batch", *TINY, "-s", 1, "-n", 30, "--batch-size", 2, "in"),
    "rank": ("rank", *TINY, "in", "--choices", "ran,sat"),
    "tokenize": ("tokenize", *TINY, "-f", "in"),
}


@SLOW
@pytest.mark.parametrize(
    ("number", "command"),
    [
        fault_row(46, f"{number.name} at 25 moments of {command}", code, number, command,
                  intact=BEGINNING)
        for command in MOMENTS
        for number, code in SIGNALS.items()
    ],
)  # fmt: skip
def test_a_signal_at_any_moment_is_quiet(number, command, world, survive):
    (world.place / "in").write_bytes(STORY_LINE * 150)
    generates = command.startswith("generate")
    expected = world.output(*(LONG if generates else MOMENTS[command]))
    chance = random.Random(f"{command} {number}")
    killed = 0
    for _ in range(25):
        with world.start(*MOMENTS[command]) as process:
            time.sleep(chance.uniform(0.15, 1.5))
            process.send_signal(number)
            out, errors = process.communicate(timeout=60)
        assert process.returncode in (0, SIGNALS[number], -signal.SIGTERM), errors
        assert is_quiet(errors)
        assert b"error" not in errors
        if command == "generate --json":
            assert not out or json.loads(out)
        elif command != "batch":
            assert expected.startswith(out)
        else:
            assert all(json.loads(line) for line in out.splitlines())
        killed += process.returncode != 0
    survive(killed)


@pytest.mark.fault(47, "a reader that leaves", 141, intact="nothing is said")
@pytest.mark.parametrize("command", ["generate", "batch", *slow("score --lines", "rank")])
def test_a_reader_that_leaves_ends_it_quietly(command, world):
    (world.place / "in").write_bytes(STORY_LINE * 3000)  # its results do not fit into a pipe
    out, code = leave(world, *MOMENTS[command], "-q", size=10)
    assert (len(out), code) == (10, 141)


@SLOW
@pytest.mark.parametrize(
    "command",
    [
        fault_row(47, f"a reader that leaves {command} at 25 moments", 141, command,
                  intact="nothing is said")
        for command in ("generate", "score --lines", "batch")
    ],
)  # fmt: skip
def test_a_reader_may_leave_at_any_moment(command, world, survive):
    (world.place / "in").write_bytes(STORY_LINE * 150)
    chance = random.Random(command)
    left = 0
    for _ in range(25):
        options = {"size": 1 + chance.randrange(200), "wait": chance.uniform(0, 0.5)}
        _, code = leave(world, *MOMENTS[command], "-q", **options)
        assert code in (0, 141)
        left += code != 0
    survive(left)


ROWS = 80
JOB = ("batch", *TINY, "-s", 5, "-n", 40, "--ignore-eos", "--batch-size", 4, "in", "-o")


def records_in(file: Path) -> list[dict[str, object]]:
    """Return the records, which are the same in every run, without their times."""
    return [json.loads(line) | {"timing": None} for line in file.read_bytes().splitlines()]


@SLOW
@each_signal(51, "at 25 moments of batch --resume", "every row, once", ENDS)
def test_no_row_is_lost_and_none_comes_twice(number, world, survive, record_property):
    (world.place / "in").write_bytes(b"".join(b"Once, %d\n" % row for row in range(ROWS)))
    world.output(*JOB, "whole")
    expected = records_in(world.place / "whole")
    assert len(expected) == ROWS
    chance = random.Random(number)
    killed, output = 0, world.place / "out"
    for _ in range(25):
        with world.start(*JOB, "out", "--resume") as process:
            time.sleep(chance.uniform(0.2, 1.6))
            process.send_signal(number)
            _, errors = process.communicate(timeout=60)
        assert is_quiet(errors)
        assert process.returncode in (0, -number, SIGNALS.get(number)), errors
        killed += process.returncode != 0
        if process.returncode == 0:  # the job is done: start again
            assert records_in(output) == expected
            output.unlink()
    survive(killed)
    world.output(*JOB, "out", "--resume", limit=120)
    assert records_in(output) == expected
    record_property("rows", ROWS)


# --- files that change during the run ------------------------------------------------------------


@pytest.mark.fault(37, "the model's folder is replaced while it generates", 0, intact="the text")
def test_a_model_that_is_loaded_needs_its_folder_no_more(world):
    folder = shutil.copytree(Path(__file__).parents[2] / "weights" / "tiny", world.root / "model")
    command = ("generate", "-m", folder, "-s", 1, "-n", 100, "--ignore-eos", "Once")
    expected, _ = run_here(*command)
    with world.start(*command, *SLOWLY) as process:
        beginning = process.stdout.read(10)
        for file in folder.iterdir():
            file.write_bytes(b"something else")
        shutil.rmtree(folder)
        rest = process.stdout.read()
    assert process.returncode == 0
    assert beginning + rest == expected


@SLOW
@pytest.mark.fault(
    37, "the folder is replaced at 40 moments of loading", 4, intact="never a mixture"
)
def test_a_model_is_never_a_mixture_of_two(world):
    config = CONFIG | {"n_embd": 512, "n_head": 8, "n_layer": 8}
    one, other = (
        write_checkpoint(world.root / f"model{seed}", config, seed=seed) for seed in (1, 2)
    )
    command = ("generate", "-n", 8, "-s", 1, "Once", "-m")
    possible = {world.output(*command, folder) for folder in (one, other)}
    assert len(possible) == 2
    shown, hidden = world.root / "shown", world.root / "hidden"
    one.rename(shown)
    other.rename(hidden)
    chance = random.Random(3)
    codes = []
    for _ in range(40):
        with world.start(*command, shown) as process:
            time.sleep(chance.uniform(0.2, 0.5))
            aside = world.root / "aside"
            shown.rename(aside)
            hidden.rename(shown)
            aside.rename(hidden)
            out, errors = process.communicate(timeout=60)
        codes.append(process.returncode)
        assert process.returncode in (0, 3, 4), errors
        assert out in (possible if process.returncode == 0 else {b""})
        assert b"Traceback" not in errors
    assert 0 in codes
