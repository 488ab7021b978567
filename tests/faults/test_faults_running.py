"""Faults of a running command: bad input, signals, missing resources, changing files."""

import json
import math
import random
import shutil
import signal
import struct
import threading
import time
from pathlib import Path

import pytest

import gpt_cli
from gpt_cli.folder.config import GPT2Config, expected_shapes
from gpt_cli.system import gpu
from gpt_cli.system.machine import native_library
from support.checkpoints import CONFIG, write_checkpoint
from support.processes import posix, run_on_terminal
from support.signals import (
    ENDS,
    LONG,
    SIGNALS,
    TINY,
    drip,
    each_signal,
    leave,
    limit_addresses,
    linux,
    resource,
    text_of,
)
from support.world import World, check_failure

pytestmark = posix

SLOW = pytest.mark.slow
STORY = ("generate", *TINY, "-s", 1, "-n", 60, "Once upon a time")


# --- input ---------------------------------------------------------------------------------------


def row(number, name, arguments, says, do, *, stdin=b"", code=2):
    marks = pytest.mark.fault(number, name, code, intact="standard output is empty")
    return pytest.param(arguments, stdin, code, says, do, id=name, marks=marks)


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
    row(45, "a seed below 0", generate("-s", -1, "x"), "seed", "from 0 to"),
    row(45, "a seed of 2**64", generate("-s", 2**64, "x"), "seed", "from 0 to"),
    row(45, "a seed that is text", generate("-s", "x", "x"), "seed", "--help"),
    row(62, "a file that is not there", generate("-f", "nowhere"), "No such file", "name a file"),
    row(62, "a folder for a file", ("score", *TINY, "/"), "cannot read /", "add --output"),
    row(62, "an unknown flag", generate("--nope", "x"), "--nope", "--help"),
    row(62, "an unknown command", ("nope",), "nope", "--help"),
    row(62, "a template with a lone brace", rank("--template", "{line"), "a lone { at character 1",
        "write {{ or }}", stdin=b"x"),
    row(62, "a template without a field", rank("--template", "{{x}}"), "has no field",
        "write {line}", stdin=b"x"),
    row(62, "a template that is nowhere", rank("--template", "nowhere"), "no such file",
        "needs {line}", stdin=b"x"),
    row(62, "a field that lines have not", rank("--template", "{x}"), "has {x}",
        "give JSON Lines or Parquet", stdin=b"x"),
    row(62, "rows that are not there", rank("nowhere.jsonl"), "No such file", "cannot read"),
    row(62, "ids that are none", ("detokenize", *TINY, "--", "-1"), "'-1'", "whole numbers"),
    row(62, "an id beyond the vocabulary", ("detokenize", *TINY, "999999"), "999999", "give ids"),
    row(62, "a model that is nowhere", ("generate", "-m", "./nowhere", "x"), "nowhere",
        "give a folder, OWNER/NAME", code=3),
    row(62, "a file for a model", ("generate", "-m", "/dev/null", "x"), "no model '/dev/null'",
        "give a folder, OWNER/NAME", code=3),
]
# fmt: on


@pytest.mark.parametrize(("arguments", "stdin", "code", "says", "do"), BAD_INPUT)
def test_bad_input_is_refused(arguments, stdin, code, says, do, suffer):
    suffer(*arguments, stdin=stdin, code=code, says=says, do=do)


@pytest.mark.fault(38, "an empty prompt as an argument", 0, intact="it begins a text")
def test_an_empty_prompt_begins_a_text(world):
    assert text_of(world.run(*generate("")))


@pytest.mark.fault(40, "a text that fills the context", 0, intact="the text so far, and its reason")
def test_a_full_context_is_told(world):
    finished = world.run("generate", *TINY, "-n", 2000, "--ignore-eos", "--json", "-v", "Once")
    assert json.loads(text_of(finished))["finish_reason"] == "context"
    assert b"--overflow shift" in finished.stderr


@pytest.mark.fault(41, "<|endoftext|> in a prompt", 0, intact="it is text")
def test_the_name_of_a_token_is_text(world):
    ids = text_of(world.run("tokenize", *TINY, "<|endoftext|>")).split()
    assert len(ids) > 1
    assert len(text_of(world.run("tokenize", *TINY, "--special", "<|endoftext|>")).split()) == 1


@pytest.mark.fault(42, "zero bytes in a prompt", 0, intact="every byte")
def test_zero_bytes_come_back(world):
    data = b"a\0b\0\0"
    found = world.run("generate", *TINY, "-n", 1, "--echo", "-f", "-", stdin=data)
    assert text_of(found).startswith(data)


@pytest.mark.fault(44, "top-k above the vocabulary", 0, intact="the text")
def test_more_tokens_than_there_are_may_be_chosen_among(world):
    assert text_of(world.run(*generate("--top-k", 10**9, "Once")))


@pytest.mark.fault(48, "a character in several tokens", 0, intact="no U+FFFD in the text")
def test_no_character_comes_in_pieces(world):
    model = write_checkpoint(world.root / "model", CONFIG)
    arguments = ("generate", "-m", model, "-n", 60, "--echo", "-f", "-")
    finished = world.run(*arguments, stdin="🦊".encode())
    assert text_of(finished).startswith("🦊".encode())
    text_of(finished).decode()


@pytest.mark.fault(49, "the end token comes first", 0, intact="an empty text")
def test_a_text_may_end_before_it_begins(world):
    model = write_checkpoint(world.root / "model", CONFIG | {"eos_token_id": list(range(290))})
    finished = world.run("generate", "-m", model, "--json", "Once")
    told = json.loads(text_of(finished))
    assert (told["text"], told["finish_reason"]) == ("", "eos")


@pytest.mark.fault(50, "rows that are malformed", 6, intact="all other rows")
def test_bad_rows_are_told_with_their_lines(world):
    lines = [b'{"prompt": "Once"}', b"{", b'{"prompt": 3}', b"\xff", b'{"prompt": "One"}']
    flags = (*TINY, "-q", "-n", 3, "--format", "jsonl")
    finished = world.run("batch", *flags, stdin=b"\n".join(lines))
    assert finished.returncode == 6
    assert finished.stderr.startswith(b"gpt-cli: error: 3 of 5 rows failed")
    records = [json.loads(line) for line in finished.stdout.splitlines()]
    assert ["error" in record for record in records] == [False, True, True, True, False]
    assert [record["line"] for record in records if "error" in record] == [2, 3, 4]


@pytest.mark.fault(52, "an output that is there already", 2, intact="the output")
def test_an_output_is_not_written_over(world, suffer):
    (world.place / "out").write_bytes(b"precious\n")
    for flags, says, do in ((), "exists", "resume it"), (("--resume",), "not a record", "another"):
        arguments = ("batch", *TINY, "-o", "out", *flags)
        suffer(*arguments, stdin=b"Once\n", code=2, says=says, do=do)


@pytest.mark.fault(52, "an output that is the input", 2, intact="the input")
@pytest.mark.parametrize("flags", [(), ("--resume",)], ids=["new", "resumed"])
def test_the_input_is_not_written_over(flags, world, suffer):
    (world.place / "in").write_bytes(b"Once\n")
    (world.place / "link").symlink_to("in")
    arguments = ("batch", *TINY, "in", "-o", "link", *flags)
    suffer(*arguments, code=2, says="is the input", do="name another output")


@pytest.mark.fault(53, "rows of all lengths", 0, intact="each row's own text")
def test_rows_do_not_change_one_another(world):
    prompts = ["Once " * length for length in (1, 40, 3, 90)]
    flags = (*TINY, "-n", 8, "--temperature", 0)
    data = "".join(prompt + "\n" for prompt in prompts).encode()
    records = text_of(world.run("batch", *flags, stdin=data)).splitlines()
    engine = gpt_cli.load("tiny")
    alone = [engine.generate([prompt], max_tokens=8, temperature=0)[0].text for prompt in prompts]
    assert [json.loads(record)["text"] for record in records] == alone


@pytest.mark.fault(63, "input a byte at a time", 0, intact="the same output")
@pytest.mark.parametrize("command", ["generate", "score", "tokenize"])
def test_input_may_come_a_byte_at_a_time(command, world):
    flags = {"generate": ("-n", 5, "-s", 1), "score": ("--lines",), "tokenize": ()}[command]
    data = "Once upon a time\nthere was a fox 🦊\n".encode() * 3
    expected = text_of(world.run(command, *TINY, *flags, stdin=data))
    assert drip(world.start(command, *TINY, *flags, bufsize=0), data) == expected


@SLOW
@pytest.mark.fault(64, "100 MB of input", 2, intact="memory, and the other commands' output")
def test_a_hundred_megabytes_are_input_like_any_other(world, suffer):
    data = b"Once upon a time there was a fox.\n" * 3_000_000
    options = {"stdin": data, "limit": 300}
    suffer(*generate(), code=2, says="leaves no room", do="shorten it", **options)
    counted = text_of(world.run("tokenize", *TINY, "--count", **options))
    assert int(counted) > 10_000_000
    (world.place / "in").write_bytes(b"Once\n" + b"\n" * 100_000_000 + b"One\n")
    finished = world.run("batch", *TINY, "-q", "-n", 2, "in", limit=300)
    assert len(text_of(finished).splitlines()) == 2
    (world.place / "long").write_bytes(b"Once\n" + b"a" * 100_000_000 + b"\nOne\n")
    finished = world.run("batch", *TINY, "-q", "-n", 2, "long", limit=300)
    assert finished.returncode == 6
    records = [json.loads(line) for line in finished.stdout.splitlines()]
    codes = [record.get("error", {}).get("code") for record in records]
    assert codes == [None, "context_overflow", None]


# --- missing resources ---------------------------------------------------------------------------


@pytest.mark.fault(33, "a full disk behind standard output", 5, intact="-")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("command", ["generate", "batch", "score", "tokenize", "next", "models"])
def test_a_full_disk_is_told(command, world):
    arguments = {"models": (), "generate": (*TINY, "-n3"), "batch": (*TINY, "-n3")}.get(
        command, TINY
    )
    with Path("/dev/full").open("wb") as full:
        process = world.start(command, *arguments, stdout=full)
        _, errors = process.communicate(b"Once upon a time", timeout=60)
    lines = [line for line in errors.splitlines() if b"error" in line]
    assert process.returncode == 5
    assert lines == [b"gpt-cli: error: cannot write to standard output: No space left on device"]


@pytest.mark.fault(33, "a disk that fills under an output", 5, intact="every row, with --resume")
def test_an_output_that_finds_no_room_can_be_resumed(world, suffer):
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))

    (world.place / "in").write_bytes(b"Once\n" * 12)
    job = ("batch", *TINY, "-s", 1, "-n", 5, "-q", "in", "-o", "out")
    options = {"changes": True, "preexec_fn": small_files}
    suffer(*job, code=5, says="File too large", do="resume the job", **options)
    assert 0 < (world.place / "out").stat().st_size <= 2000
    assert world.run(*job, "--resume").returncode == 0
    assert ids_of(world.place / "out") == list(range(12))


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
    codes = []
    for mebibytes in range(50, 1601, 50):
        arguments = ("generate", *TINY, *flags, "-n", 300, "--threads", 1, "Once")
        finished = world.run(*arguments, preexec_fn=limit_addresses(mebibytes))
        codes.append(finished.returncode)
        if finished.returncode:
            check_failure(finished, 5)
    assert codes == sorted(codes, reverse=True), "from one limit on it is always enough"
    assert codes[-1] == 0


@linux
@pytest.mark.fault(64, "input without end, in 1000 MiB", 5, intact="memory is bounded")
@pytest.mark.parametrize(
    "arguments",
    [
        generate("-f", "/dev/zero"),
        ("batch", *TINY, "/dev/zero"),
        ("score", *TINY, "--lines", "/dev/zero"),
        ("tokenize", *TINY, "-f", "/dev/zero"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_input_without_end_is_told(arguments, suffer):
    options = {"preexec_fn": limit_addresses(1000), "env": {"OPENBLAS_NUM_THREADS": "1"}}
    suffer(*arguments, code=5, says="does not fit the free memory", do="split it", **options)


@pytest.mark.fault(36, "--device cuda without a GPU", 5, intact="no CPU computes instead")
@pytest.mark.skipif(gpu.problem() is None, reason="there is a GPU")
def test_without_a_gpu_none_is_taken_instead(suffer):
    arguments = (*generate("Once"), "--device", "cuda")
    suffer(*arguments, code=5, says="--device cuda: ", do="is installed")


@pytest.mark.fault(65, "a HOME that is missing, read-only, or not set", 0, intact="the text")
@pytest.mark.parametrize("home", ["/nonexistent", "/proc", None])
def test_no_home_is_needed(home, world, story):
    del world.env["HF_HOME"]
    world.env |= {"HOME": home} if home else {}
    if home is None:
        del world.env["HOME"]
    assert text_of(world.run(*STORY)) == story
    assert text_of(world.run("models")).startswith(b"tiny\t")


@pytest.mark.usefixtures("library")
@pytest.mark.fault(65, "a compiled library that cannot be loaded", 0, intact="the text")
def test_without_a_library_that_works_numpy_computes(world, model):
    world.env.pop("GPT_CLI_OPS", None)
    command = ("generate", "-m", model, "-s", 1, "-n", 60, "Once")
    damaged = world.root / "libkernels"
    damaged.write_bytes(b"of another machine\n" * 100)
    script = f"mount --bind {damaged} {native_library()}"
    expected = text_of(world.run(*command))
    assert text_of(world.run_in_namespace(script, *command)) == expected
    finished = world.run_in_namespace(script, *command, "--dtype", "int8")
    assert "native does not work here" in check_failure(finished, 5)


@pytest.fixture(scope="module")
def story(tmp_path_factory) -> bytes:
    return text_of(World(tmp_path_factory.mktemp("story")).run(*STORY))


@pytest.mark.fault(71, "odd environment variables", 0, intact="the text")
@pytest.mark.parametrize(
    "variables",
    [
        "COLUMNS=wide OMP_NUM_THREADS=many TERM= TMPDIR=/nonexistent",
        "GPT_CLI_MODEL= GPT_CLI_LEVEL= GPT_CLI_OPS= GPT_CLI_THREADS=",
        "GPT_CLI_THREADS=99",
        "OMP_NUM_THREADS=0 PYTHONDEVMODE=1 PYTHONWARNINGS=error",
        "PYTHONOPTIMIZE=2",
    ],
)
def test_odd_variables_change_nothing(variables, world, story):
    finished = world.run(*STORY, env=dict(pair.split("=") for pair in variables.split()))
    assert text_of(finished) == story
    assert finished.stderr == b""


@pytest.mark.fault(71, "variables of gpt-cli that mean nothing", 2, intact="nothing is begun")
@pytest.mark.parametrize(
    ("variable", "do"),
    [
        ("GPT_CLI_THREADS=many", "--help"),
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
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (12, 12))
        resource.setrlimit(resource.RLIMIT_STACK, (256 << 10, 256 << 10))

    assert text_of(world.run(*STORY, preexec_fn=limit)) == story


@pytest.mark.fault(66, "no /proc", 0, intact="the text")
def test_no_proc_is_needed(world, story):
    assert text_of(world.run_in_namespace("umount -l /proc", *STORY)) == story
    command = ("bench", *TINY, "-n", 3, "--json")
    assert json.loads(text_of(world.run_in_namespace("umount -l /proc", *command)))


@pytest.mark.fault(67, "locale C, without UTF-8", 0, intact="every byte")
def test_the_locale_does_not_matter(world):
    world.env["LC_ALL"] = "C"
    text = "Zoë 🦊".encode()
    assert text_of(world.run(*generate("--echo", text))).startswith(text)
    world.env |= {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert text_of(world.run(*generate("--echo"), stdin=text)).startswith(text)
    finished = world.run("generate", "-m", "./Zoë", "x")
    assert check_failure(finished, 3)


@pytest.mark.fault(68, "a terminal of 10 columns", 0, intact="-")
@pytest.mark.parametrize(
    "arguments",
    [
        generate("Once", "--stats"),
        ("next", *TINY, "Once upon a"),
        ("rank", *TINY, "Once", "--choices", "upon,below"),
        ("tokenize", *TINY, "Once upon a time"),
        ("models",),
        ("info", "tiny"),
        ("bench", *TINY, "-n", 3),
        ("generate", "--help"),
        ("nope",),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_narrow_terminal_is_no_obstacle(arguments):
    code, shown = run_on_terminal(*map(str, arguments), columns=10)
    assert code == (2 if arguments[0] == "nope" else 0)
    assert "Traceback" not in shown


@pytest.mark.fault(56, "tokens that drive a terminal", 0, intact="the terminal")
def test_bytes_of_tokens_cannot_drive_a_terminal(world):
    ids = text_of(world.run("tokenize", *TINY, stdin=b"\x1b[2J\x9b")).decode()
    code, shown = run_on_terminal("detokenize", *TINY, ids)
    assert code == 0
    assert "␛[2J\ufffd" in shown
    assert text_of(world.run("detokenize", *TINY, ids)) == b"\x1b[2J\x9b"


@pytest.mark.fault(56, "a model that writes control characters", 0, intact="the terminal")
def test_a_model_cannot_drive_a_terminal(world):
    arguments = ("generate", *TINY, "-n", "1", "--echo", "-m", "tiny", "\x1b[2J\x9b\x07\x7f\r")
    code, shown = run_on_terminal(*arguments)
    assert code == 0
    assert "␛[2J\ufffd␇␡␍" in shown
    assert not {"\x1b", "\x9b", "\x07", "\x7f"} & set(shown)
    piped = text_of(world.run(*arguments))
    assert piped.startswith("\x1b[2J\x9b\x07\x7f\r".encode())


# --- signals -------------------------------------------------------------------------------------

SLOWLY = ("--no-cache", "--threads", 1)  # the same text, slowly on any machine


def moment(fault, name, number, *arguments, marks=()):
    """Return the arguments of a test that sends a signal."""
    intact = "standard output is a beginning of the whole"
    mark = pytest.mark.fault(fault, name, SIGNALS[number], intact=intact)
    return pytest.param(number, *arguments, id=name, marks=[mark, *marks])


@pytest.fixture(scope="module")
def long_text(tmp_path_factory) -> bytes:
    return text_of(World(tmp_path_factory.mktemp("whole")).run(*LONG))


@pytest.mark.parametrize(
    ("number", "flags"),
    [
        moment(46, f"{number.name} in the middle of generate {flags}", number, flags, marks=marks)
        for number in SIGNALS
        for flags, marks in (("", ()), ("--json", ()), ("--no-stream", [SLOW]))
    ],
)
def test_a_signal_leaves_the_text_so_far(number, flags, world, long_text, survive):
    with world.start(*LONG, *SLOWLY, "--stats", *flags.split()) as process:
        guard = threading.Timer(60, process.kill)
        guard.start()
        beginning = b"" if flags else process.stdout.read(10)
        time.sleep(2 if flags else 0)  # nothing shows that it has started
        process.send_signal(number)
        rest, errors = process.stdout.read(), process.stderr.read()
        guard.cancel()
    assert process.returncode == SIGNALS[number]
    assert b"finish reason interrupted" in errors
    assert b"Traceback" not in errors
    text = beginning + rest
    if flags == "--json":
        text = json.loads(text)["text"].encode()
    assert 0 < len(text) < len(long_text)
    assert long_text.startswith(text)
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
        moment(46, f"{number.name} at 25 moments of {command}", number, command)
        for command in MOMENTS
        for number in SIGNALS
    ],
)
def test_a_signal_at_any_moment_is_quiet(number, command, world, survive):
    (world.place / "in").write_bytes(b"Once upon a time there was a fox.\n" * 150)
    generates = command.startswith("generate")
    expected = text_of(world.run(*(LONG if generates else MOMENTS[command])))
    chance = random.Random(f"{command} {number}")
    killed = 0
    for _ in range(25):
        with world.start(*MOMENTS[command]) as process:
            # Before that, Python itself is starting, and handles signals in its own way.
            time.sleep(chance.uniform(0.15, 1.5))
            process.send_signal(number)
            out, errors = process.communicate(timeout=60)
        assert process.returncode in (0, SIGNALS[number], -signal.SIGTERM), errors
        assert b"Traceback" not in errors
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
@pytest.mark.parametrize("command", ["generate", "score --lines", "batch", "rank"])
def test_a_reader_that_leaves_ends_it_quietly(command, world):
    (world.place / "in").write_bytes(b"Once upon a time there was a fox.\n" * 300)
    with world.start(*MOMENTS[command], "-q") as process:
        guard = threading.Timer(60, process.kill)
        guard.start()
        assert process.stdout.read(10)
        process.stdout.close()
        errors = process.stderr.read()
        guard.cancel()
    assert process.returncode == 141
    assert errors == b""


@SLOW
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=pytest.mark.fault(
            47, f"a reader that leaves {command} at 25 moments", 141, intact="nothing is said"
        ))
        for command in ("generate", "score --lines", "batch")
    ],
)  # fmt: skip
def test_a_reader_may_leave_at_any_moment(command, world, survive):
    (world.place / "in").write_bytes(b"Once upon a time there was a fox.\n" * 150)
    chance = random.Random(command)
    left = 0
    for _ in range(25):
        size = 1 + chance.randrange(200)
        left += leave(world, (*MOMENTS[command], "-q"), size, chance)[1]
    survive(left)


ROWS = 80
JOB = ("batch", *TINY, "-s", 5, "-n", 40, "--ignore-eos", "--batch-size", 4, "in", "-o", "out")


def ids_of(file: Path) -> list[int]:
    return [json.loads(line)["index"] for line in file.read_bytes().splitlines()]


@SLOW
@each_signal(51, "at 25 moments of batch --resume", "every row, once", ENDS)
def test_no_row_is_lost_and_none_comes_twice(number, world, survive, record_property):
    (world.place / "in").write_bytes(b"".join(b"Once, %d\n" % row for row in range(ROWS)))
    whole = World(world.root / "whole")
    shutil.copy(world.place / "in", whole.place / "in")
    assert whole.run(*JOB).returncode == 0
    chance = random.Random(number)
    killed, output = 0, world.place / "out"
    for _ in range(25):
        with world.start(*JOB, "--resume") as process:
            time.sleep(chance.uniform(0.2, 1.6))
            process.send_signal(number)
            _, errors = process.communicate(timeout=60)
        assert b"Traceback" not in errors
        assert process.returncode in (0, -number, SIGNALS.get(number)), errors
        killed += process.returncode != 0
        if process.returncode == 0:  # it was finished: start again
            assert ids_of(output) == list(range(ROWS))
            output.unlink()
    survive(killed)
    assert world.run(*JOB, "--resume", limit=120).returncode == 0
    told = [json.loads(line) for line in output.read_bytes().splitlines()]
    expected = [json.loads(line) for line in (whole.place / "out").read_bytes().splitlines()]
    assert [record | {"timing": 0} for record in told] == [
        record | {"timing": 0} for record in expected
    ]
    record_property("rows", ROWS)


# --- files that change during the run ------------------------------------------------------------


@pytest.mark.fault(37, "the model's folder is replaced while it generates", 0, intact="the text")
def test_a_model_that_is_loaded_needs_its_folder_no_more(world):
    folder = world.root / "model"
    shutil.copytree(Path(__file__).parents[2] / "weights" / "tiny", folder)
    command = ("generate", *TINY, "-s", 1, "-n", 100, "--ignore-eos", "Once")
    expected = text_of(world.run(*command))
    with world.start(*command, *SLOWLY, "-m", folder) as process:
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
    possible = {text_of(world.run(*command, folder)) for folder in (one, other)}
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
