"""The command line as a user meets it: real processes, real pipes, a pseudo-terminal."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import COMMAND, WITHOUT_LIBRARY, on_terminal, posix, run_on_terminal

import gpt_cli
from gpt_cli.cli import app
from gpt_cli.generate import Options
from gpt_cli.ops import bindings
from gpt_cli.startup import THREAD_VARIABLES

GENERATE = ["generate", "--model", "tiny"]
TINY = [*COMMAND, *GENERATE]
TINY_FOLDER = Path(__file__).parent.parent / "weights" / "tiny"


def run(*arguments, **options):
    return subprocess.run(
        [*TINY, *arguments], capture_output=True, timeout=60, **{"input": b"", **options}
    )


def text_of(*arguments, **options):
    finished = run(*arguments, **options)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.decode()


def assert_one_line_error(finished, code):
    assert finished.returncode == code, finished.stderr
    lines = finished.stderr.decode().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("gpt-cli: error: ")


@pytest.fixture(scope="module")
def story():
    """What seed 1 continues "Once upon a time" with, by the Python API."""
    engine = gpt_cli.load("tiny")
    return engine.generate(["Once upon a time"], max_tokens=60, seed=1)[0].text


STORY = ("Once upon a time", "-n", "60", "--seed", "1")


@pytest.mark.parametrize(
    "flags",
    [[], ["--no-stream"], ["--no-cache"], ["--threads", "1"], ["--device", "cpu", "-q"]],
)
def test_a_pipe_gets_the_text_byte_for_byte_and_nothing_else(story, flags):
    finished = run(*STORY, *flags)
    assert finished.stdout.decode() == story
    assert finished.stderr == b""


def test_json_has_the_same_text_and_says_how_it_came_about(story):
    line = json.loads(text_of(*STORY, "--json"))
    assert line["text"] == story
    assert line["index"] == 0
    assert line["prompt"] == "Once upon a time"
    assert line["finish_reason"] == "length"
    assert line["seed"] == 1
    assert line["model"] == "tiny"
    assert line["usage"]["completion_tokens"] == 60
    assert set(line["timing"]) == {"load_s", "ttft_s", "decode_tok_s"}


def test_a_drawn_seed_is_reported_and_gives_the_text_again():
    first = json.loads(text_of("Once", "-n", "20", "--json"))
    again = json.loads(text_of("Once", "-n", "20", "--json", "--seed", str(first["seed"])))
    assert again["text"] == first["text"]


def test_samples_come_one_after_the_other_and_the_first_is_that_of_a_single_run(story):
    samples = text_of(*STORY, "--samples", "3").split("\n---\n")
    assert len(samples) == 3
    assert samples[0] == story
    assert samples[1] != story


def test_echo_puts_the_prompt_first(story):
    assert text_of(*STORY, "--echo") == "Once upon a time" + story
    assert text_of(*STORY, "--echo", "--no-stream") == "Once upon a time" + story


def test_escapes_are_read_in_the_prompt_and_in_stop_strings(story):
    letter = story[4]
    text = text_of(r"Once\tupon\n", "--escape", "--echo", "-n", "20", "--stop", r"\n")
    assert text.startswith("Once\tupon\n")
    assert text.count("\n") == 1
    assert text_of(r"Once\\n", "--escape", "--echo", "-n", "1").startswith(r"Once\n")
    kept = text_of(*STORY, "--stop", letter, "--include-stop")
    assert kept == story[: story.index(letter) + 1]


@posix
def test_a_text_that_is_cut_in_a_file_is_noted_with_its_seed(tmp_path):
    def noted(*flags):
        command = f"{shlex.join([*TINY, 'Once', '-n', '3', *flags])} > out"
        return on_terminal(["sh", "-c", command], 300, {}, tmp_path)[1]

    cut = "gpt-cli: note: the text was cut at --max-tokens 3"
    lines = noted().splitlines()
    assert lines[0] == cut
    assert re.fullmatch(r"gpt-cli: note: --seed \d+ gives this text again", lines[1])
    assert noted("-s", "1").splitlines() == [cut]
    assert noted("-s", "1", "--json") == noted("-q") == ""


def test_a_stop_string_ends_the_text_and_is_not_part_of_it(story):
    stop = story[20:30]
    assert text_of(*STORY, "--stop", "never written", "--stop", stop) == story[: story.find(stop)]


def test_statistics_go_to_standard_error(story):
    finished = run(*STORY, "--stats")
    assert finished.stdout.decode() == story
    assert "60 tokens at" in finished.stderr.decode()
    assert "seed 1" in finished.stderr.decode()
    assert re.match(r"tiny in (float16|float32): loaded in ", finished.stderr.decode())


def test_the_prompt_may_come_from_a_pipe_a_file_or_both(story, tmp_path):
    whole, beginning = tmp_path / "whole.txt", tmp_path / "beginning.txt"
    whole.write_bytes(b"Once upon a time\r\n")
    beginning.write_bytes(b"Once upon")
    flags = STORY[1:]
    assert text_of(*flags, input=b"Once upon a time\n") == story
    assert text_of(*flags, input=b"Once upon a time") == story
    assert text_of("--file", "-", *flags, input=b"Once upon a time\n") == story
    assert text_of("--file", str(whole), *flags) == story
    assert text_of("--file", str(beginning), " a time", *flags) == story
    assert text_of("Once upon a time", *flags, input=b"not read") == story


def test_statistics_are_shown_although_notes_are_not():
    finished = run("a space at the end ", "-n", "3", "--stats", "--quiet")
    assert len(finished.stderr.decode().splitlines()) == 1
    assert "3 tokens at" in finished.stderr.decode()


def test_a_space_at_the_end_of_the_prompt_is_remarked_on():
    assert "ends with a space" in run("a space at the end ", "-n", "3", "-v").stderr.decode()


def test_a_byte_order_mark_is_no_part_of_the_prompt(story):
    assert text_of(*STORY[1:], input=b"\xef\xbb\xbfOnce upon a time\r\n") == story


class Recorder:
    """Stands in for `gpt_cli.load` and for the engine; keeps what they are asked for."""

    def load(self, name, **options):
        self.loaded = {"name": name} | options
        return self

    def run(self, prompts, options):
        self.prompts, self.options = prompts, options
        raise KeyboardInterrupt


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(gpt_cli, "load", recorder.load, raising=False)
    return recorder


def test_every_flag_arrives_where_it_has_its_effect(recorder):
    flags = (
        "-m some/model --max-tokens 5 --temperature 0.5 --top-k 6 --top-p 0.7 --min-p 0.08 "
        "--repeat-penalty 1.9 --presence-penalty 0.1 --frequency-penalty 0.2 --logit-bias 7=-3 "
        "--logit-bias 9=1 --include-stop --stop a --stop b --seed 11 --samples 2 --no-cache "
        "--device cpu --dtype float16 --revision v1 --offline --overflow shift --ignore-eos "
        "--special -q"
    )
    assert app.run(["generate", "text", *flags.split()]) == 130
    assert recorder.loaded == {
        "name": "some/model",
        "device": "cpu",
        "dtype": "float16",
        "revision": "v1",
        "offline": True,
        "quiet": True,
    }
    assert recorder.prompts == ["text", "text"]
    assert recorder.options == Options(
        max_tokens=5,
        temperature=0.5,
        top_k=6,
        top_p=0.7,
        min_p=0.08,
        repeat_penalty=1.9,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias={7: -3, 9: 1},
        include_stop=True,
        stop=["a", "b"],
        seed=11,
        use_cache=False,
        overflow="shift",
        ignore_eos=True,
        special=True,
    )


def test_flags_that_are_not_given_have_the_defaults_of_the_library(recorder):
    assert app.run(["generate", "text", "--seed", "1"]) == 130
    assert recorder.options == Options(seed=1)
    assert recorder.loaded["name"] == "gpt2"


def test_the_model_may_come_from_the_environment(recorder, monkeypatch):
    monkeypatch.setenv("GPT_CLI_MODEL", "distilgpt2")
    app.run(["generate", "text"])
    assert recorder.loaded["name"] == "distilgpt2"


def threads_of_the_library_and_numpy():
    ours, *others = (os.environ[name] for name in THREAD_VARIABLES)
    assert len({*others}) == 1
    return int(ours), int(others[0])


@pytest.fixture
def compiled(thread_variables):
    thread_variables.setattr("gpt_cli.startup.native_computes", lambda: True)
    return thread_variables


@pytest.mark.usefixtures("compiled")
def test_threads_are_told_to_what_computes(recorder):
    app.run(["generate", "text", "--threads", "3"])
    assert threads_of_the_library_and_numpy() == (3, 1)


def test_numpy_has_all_threads_where_it_computes(recorder, compiled):
    compiled.setenv("GPT_CLI_OPS", "numpy")
    app.run(["generate", "text", "--threads", "3"])
    assert threads_of_the_library_and_numpy() == (3, 3)
    compiled.delenv("GPT_CLI_OPS")
    compiled.setattr("gpt_cli.startup.native_computes", lambda: False)
    app.run(["generate", "text", "--threads", "2"])
    assert threads_of_the_library_and_numpy() == (2, 2)


def test_threads_are_the_cores_that_may_be_used_unless_the_user_has_said_so(recorder, compiled):
    compiled.setattr("gpt_cli.startup.cores", lambda: 5)
    compiled.delenv("GPT_CLI_THREADS")
    app.run(["generate", "text"])
    assert "GPT_CLI_THREADS" not in os.environ
    assert os.environ["OMP_NUM_THREADS"] == "7"
    for name in THREAD_VARIABLES[1:]:
        compiled.delenv(name)
    app.run(["generate", "text"])
    assert threads_of_the_library_and_numpy() == (5, 1)


def test_the_number_of_threads_may_come_from_the_environment(recorder, compiled):
    compiled.setenv("GPT_CLI_THREADS", "3")
    app.run(["generate", "text"])
    assert threads_of_the_library_and_numpy() == (3, 1)
    app.run(["generate", "text", "--threads", "2"])
    assert threads_of_the_library_and_numpy() == (2, 1)


@pytest.mark.parametrize("value", ["0", "-1", "many", "257", "4294967296"])
def test_a_number_of_threads_in_the_environment_that_is_none_is_refused(
    value, thread_variables, capsys
):
    thread_variables.setenv("GPT_CLI_THREADS", value)
    assert app.run([*GENERATE, "x"]) == 2
    assert "GPT_CLI_THREADS" in capsys.readouterr().err


@pytest.mark.usefixtures("library")
def test_the_library_and_numpy_give_the_same_text():
    arguments = ["-s", "5", "-n", "60", "--samples", "3", "Once upon"]
    texts = [
        text_of(*arguments, env=os.environ | {"GPT_CLI_OPS": name}) for name in ("numpy", "native")
    ]
    assert texts[0] == texts[1]


def records_of(*arguments, **env):
    """The records of `--json`, without their times."""
    lines = text_of(*arguments, "--json", env=os.environ | env).splitlines()
    return [json.loads(line) | {"timing": None} for line in lines]


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_every_digit_is_the_same_on_any_number_of_threads_at_any_level(dtype):
    arguments = ["-s", "7", "-n", "40", "--logprobs", "3", "--dtype", dtype, "Once upon"]
    expected = records_of(*arguments, GPT_CLI_OPS="native", GPT_CLI_THREADS="1")
    for threads, level in (("3", bindings.levels()[0]), ("2", bindings.levels()[-1])):
        env = {"GPT_CLI_OPS": "native", "GPT_CLI_LEVEL": level}
        assert records_of(*arguments, "--threads", threads, **env) == expected
    (first, *_) = records_of(*arguments, "--samples", "3", "--no-cache", GPT_CLI_OPS="native")
    assert [first] == expected


# --- what the weights are held in ----------------------------------------------------------------


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(("case", "dtype"), [("f16", "float16"), ("bf16", "bfloat16")])
def test_weights_in_16_bits_stay_so_and_give_what_float32_gives(case_folder, case, dtype):
    arguments = ["-m", str(case_folder(case)), "-s", "3", "-n", "40", "--logprobs", "5", "and the"]
    expected = records_of(*arguments, "--device", "cpu", "--dtype", "float32")
    for chosen in ("auto", dtype):
        assert records_of(*arguments, "--device", "cpu", "--dtype", chosen) == expected
    told = run(*arguments[:-3], "x", "--device", "cpu", "--stats").stderr.decode()
    assert f" in {dtype}: loaded in " in told


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("case", "dtype", "stored"),
    [
        ("saved", "float16", "float32"),
        ("saved", "bfloat16", "float32"),
        ("f16", "bfloat16", "float16"),
        ("bf16", "float16", "bfloat16"),
    ],
)
def test_no_cpu_rounds_weights_to_16_bits(case_folder, capsys, case, dtype, stored):
    folder = str(case_folder(case))
    assert app.run(["generate", "-m", folder, "--device", "cpu", "--dtype", dtype, "x"]) == 2
    assert capsys.readouterr() == (
        "",
        f"gpt-cli: error: --dtype {dtype}: {folder} is stored in {stored}; on a CPU, choose auto, "
        "float32 or int8\n",
    )


@pytest.mark.parametrize("case", ["f16", "bf16"])
def test_without_the_library_weights_in_16_bits_are_widened(case_folder, case):
    env = {name: value for name, value in os.environ.items() if name != "GPT_CLI_OPS"}
    flags = ["-m", str(case_folder(case)), "-s", "3", "-n", "40", "--device", "cpu", "and the"]

    def run_without(*arguments):
        command = [*WITHOUT_LIBRARY, *arguments]
        return subprocess.run(command, capture_output=True, timeout=60, env=env)

    finished = run_without("generate", *flags, "--stats")
    assert finished.returncode == 0, finished.stderr
    assert b" in float32: loaded in " in finished.stderr
    assert finished.stdout.decode() == text_of(*flags, env=env | {"GPT_CLI_OPS": "numpy"})
    facts = run_without("info", flags[1], "--json").stdout
    assert json.loads(facts)["dtype"] == "float32"
    refused = run_without("generate", *flags, "--dtype", "float16")
    assert_one_line_error(refused, 2)
    assert b"--dtype float16 needs the compiled library" in refused.stderr


def test_an_unknown_way_to_compute_is_exit_code_2(monkeypatch, capsys):
    monkeypatch.setenv("GPT_CLI_OPS", "abacus")
    assert app.run(["generate", "-m", "tiny", "--dtype", "auto", "text"]) == 2
    assert capsys.readouterr().err == (
        "gpt-cli: error: GPT_CLI_OPS must be native or numpy for float32, not 'abacus'\n"
    )


def test_memory_that_runs_out_is_exit_code_5(recorder, monkeypatch, capsys):
    def run(prompts, options):
        raise MemoryError("cannot have 9 GB")

    monkeypatch.setattr(recorder, "run", run)
    assert app.run(["generate", "text"]) == 5
    assert capsys.readouterr().err == (
        "gpt-cli: error: out of memory or threads (MemoryError('cannot have 9 GB')): "
        "use fewer or shorter texts at a time, or a smaller model\n"
    )


@pytest.mark.parametrize(
    ("word", "text"),
    [("-Once upon", True), ("-once upon", True), ("- x", True), ("--nope", False), ("-x", False)],
)
def test_a_text_that_begins_with_a_dash_gets_a_hint_and_a_flag_does_not(word, text, capsys):
    assert app.run([*GENERATE, word]) == 2
    error = capsys.readouterr().err
    assert ("Put -- before" in error) == text
    assert word != "--nope" or "Possible options: --no-cache, --stop" in error


def test_an_empty_prompt_begins_a_text():
    assert text_of("", "-n", "5", "--seed", "1")[0].isupper()


def test_the_context_ends_the_text_unless_it_is_shifted():
    long = "once " * 300
    full = run(long, "-n", "500", "--ignore-eos", "--json", "-v")
    assert json.loads(full.stdout)["finish_reason"] == "context"
    assert "--overflow shift" in full.stderr.decode()
    shifted = text_of(long, "-n", "500", "--ignore-eos", "--json", "--overflow", "shift")
    assert json.loads(shifted)["usage"]["completion_tokens"] == 500
    cut = json.loads(text_of("once " * 900, "-n", "9", "--json", "--overflow", "truncate"))
    assert cut["usage"]["prompt_tokens"] == 512 - 9


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["x", "--temperature", "-1"], "temperature"),
        (["x", "--temperature", "nan"], "temperature"),
        (["x", "--temperature", "inf"], "temperature"),
        (["x", "--top-p", "0"], "top-p"),
        (["x", "--top-p", "1.5"], "top-p"),
        (["x", "--top-k", "-1"], "top-k"),
        (["x", "--min-p", "2"], "min-p"),
        (["x", "--repeat-penalty", "0"], "repeat-penalty"),
        (["x", "--seed", "-1"], "seed"),
        (["x", "--seed", str(2**64)], "seed"),
        (["x", "-n", "0"], "max-tokens"),
        (["x", "-n", "many"], "--max-tokens"),
        (["x", "--samples", "0"], "--samples"),
        (["x", "--samples", str(10**30)], "--samples"),
        (["x", "--threads", "0"], "--threads"),
        (["x", "--stop", ""], "--stop must be strings that are not empty"),
        (["x", "--overflow", "ignore"], "--overflow"),
        (["x", "--device", "abacus"], "abacus"),
        (["x", "--dtype", "float8"], "float8"),
        (["x", "--no-such-flag"], "--no-such-flag"),
        (["x", "y"], "y"),
        (["x", "--revision", "main"], "revision"),
        (["once " * 2000], "--overflow"),
        (["--file", "/no/such/file"], "/no/such/file"),
        (["\udcff"], "Unicode"),
    ],
)
def test_bad_input_is_one_line_that_names_it_and_exit_code_2(arguments, what, capsys):
    assert app.run([*GENERATE, *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert printed.err.startswith("gpt-cli: error: ")
    assert what in printed.err


@pytest.mark.parametrize(
    "flag",
    ["--top-p=0", "--temperature=nan", "--stop=", "--device=abacus", "--dtype=float8", "--seed=-1"],
)
def test_bad_flags_are_known_before_a_model_is_looked_for(flag):
    assert app.run(["generate", "x", "--model", "no/model", "--offline", flag]) == 2


@pytest.mark.parametrize("data", [b"", b"abc\xff"])
def test_an_empty_pipe_and_one_that_is_not_utf8_are_refused(data):
    finished = run(input=data)
    assert_one_line_error(finished, 2)
    assert finished.stdout == b""


@posix
def test_a_closed_standard_input_is_not_waited_for():
    line = " ".join([*TINY, "<&-"])
    assert_one_line_error(subprocess.run(line, shell=True, capture_output=True, timeout=60), 2)


def test_a_name_that_is_no_model_is_exit_code_3(tmp_path):
    assert_one_line_error(run("x", "--model", str(tmp_path / "nothing")), 3)


def test_a_damaged_model_is_exit_code_4_and_verbose_shows_where(tmp_path):
    for file in TINY_FOLDER.iterdir():
        data = file.read_bytes()
        (tmp_path / file.name).write_bytes(data[:-1] if file.suffix == ".safetensors" else data)
    finished = run("x", "--model", str(tmp_path))
    assert_one_line_error(finished, 4)
    assert "model.safetensors" in finished.stderr.decode()
    verbose = run("x", "--model", str(tmp_path), "--verbose").stderr.decode()
    assert "Traceback" in verbose
    assert verbose.endswith(finished.stderr.decode())


@posix
@pytest.mark.parametrize("redirection", [">/dev/full", ">&-"])
def test_an_output_that_cannot_be_written_is_exit_code_5(redirection):
    if redirection == ">/dev/full" and not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    line = " ".join([*TINY, "Once", "-n", "3", redirection])
    assert_one_line_error(subprocess.run(line, shell=True, capture_output=True, timeout=60), 5)


@posix
@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_without_a_standard_error_the_text_is_the_same(story, redirection):
    if "full" in redirection and not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    line = f"{shlex.join([*TINY, *STORY, '--stats'])} {redirection}"
    finished = subprocess.run(line, shell=True, stdout=subprocess.PIPE, timeout=60)
    assert (finished.returncode, finished.stdout.decode()) == (0, story)
    line = f"{shlex.join([*TINY, '--nope'])} {redirection}"
    assert subprocess.run(line, shell=True, timeout=60).returncode == 2


@posix
def test_a_path_that_is_no_unicode_is_no_obstacle(tmp_path):
    folder = os.fsencode(tmp_path) + b"/m\xff"
    try:
        shutil.copytree(os.fsencode(TINY_FOLDER), folder)
    except OSError:
        pytest.skip("the file system takes only Unicode")
    command = [*map(os.fsencode, [*COMMAND, "generate", "x", "-n", "3", "--json", "-m"]), folder]
    finished = subprocess.run(command, capture_output=True, timeout=60)
    assert finished.returncode == 0, finished.stderr
    assert folder in finished.stdout


@posix
def test_text_streams_and_a_reader_that_leaves_ends_it_quietly():
    process = subprocess.Popen(
        [*TINY, "Once upon a time", "-n", "400", "--ignore-eos", "--no-cache"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        assert len(process.stdout.read(10)) == 10
        assert process.poll() is None  # long before the end
        process.stdout.close()
        assert process.wait(timeout=60) == 141
        assert process.stderr.read() == b""


@posix
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_an_interrupt_keeps_what_there_is_and_is_exit_code_130(flags):
    arguments = ["Once upon a time", "-n", "400", "--ignore-eos", "--seed", "1"]
    process = subprocess.Popen(
        [*TINY, *arguments, "--no-cache", "--stats", *flags],  # slow enough to be interrupted
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        if flags:
            time.sleep(1.5)  # nothing shows that generation has begun
            beginning = b""
        else:
            beginning = process.stdout.read(10)
        process.send_signal(signal.SIGINT)
        rest, notes = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in notes
    assert b"finish reason interrupted" in notes
    text = (beginning + rest).decode()
    if flags:
        line = json.loads(text)
        assert line["finish_reason"] == "interrupted"
        text = line["text"]
    assert len(text) > 0
    assert text_of(*arguments).startswith(text)


@posix
def test_a_terminal_gets_a_line_end_after_the_text_and_no_escape_codes(story):
    code, output = run_on_terminal(*GENERATE, *STORY)
    assert code == 0
    assert output == (story + "\n").replace("\n", "\r\n")


@posix
def test_a_terminal_is_told_the_seed_that_was_drawn():
    _, output = run_on_terminal(*GENERATE, "Once", "-n", "3")
    assert "gives this text again" in output
    assert "gives this text again" not in run_on_terminal(*GENERATE, "Once", "-n", "3", "-q")[1]


@posix
def test_a_terminal_without_a_prompt_is_told_to_give_one():
    code, output = run_on_terminal(*GENERATE)
    assert code == 2
    assert output.startswith("gpt-cli: error: no prompt")


@posix
def test_the_locale_does_not_change_the_bytes():
    text = "Zoë asked: “où?” 🦊"
    plain = {"PATH": os.environ["PATH"], "LC_ALL": "C", "PYTHONUTF8": "0"}
    expected = text_of(text, "-n", "5", "--seed", "1", "--echo")
    assert text_of("-n", "5", "--seed", "1", "--echo", input=text.encode(), env=plain) == expected


@pytest.mark.parametrize("command", ["generate", "bench", "download", "models", "info"])
def test_every_command_has_help_that_needs_no_numpy(command):
    code = (
        "import sys; from gpt_cli.cli import app; code = app.run(sys.argv[1:]);"
        "assert 'numpy' not in sys.modules and 'rich' not in sys.modules; sys.exit(code)"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code, command, "--help"], capture_output=True, timeout=60
    )
    assert finished.returncode == 0, finished.stderr
    assert f"gpt-cli {command}".encode() in finished.stdout
    assert finished.stderr == b""


def test_without_arguments_it_shows_the_commands():
    finished = subprocess.run(COMMAND, capture_output=True, timeout=60)
    assert finished.returncode == 0
    assert b"generate" in finished.stdout


def test_the_version_is_the_packages():
    finished = subprocess.run([*COMMAND, "--version"], capture_output=True, timeout=60)
    assert finished.stdout.decode().split() == ["gpt-cli", gpt_cli.__version__]


def test_info_counts_what_is_in_the_file(capfd):
    assert app.run(["info", "tiny", "--json"]) == 0
    facts = json.loads(capfd.readouterr().out)
    model = gpt_cli.load("tiny", device="cpu").model
    assert facts["n_layer"] == len(model.h)
    assert facts["dtype"] == model.ops.dtype
    assert facts["parameters"] > facts["vocab_size"] * facts["n_embd"]
    assert app.run(["info", "tiny"]) == 0
    text = capfd.readouterr().out
    assert f"dtype {model.ops.dtype}" in " ".join(text.split())
    assert ("5 MB" if model.ops.dtype == "float16" else "9 MB") in text


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("case", "dtype"), [("saved", "float32"), ("f16", "float16"), ("bf16", "bfloat16")]
)
def test_info_tells_what_the_weights_are_held_in(case_folder, capfd, monkeypatch, case, dtype):
    monkeypatch.delenv("GPT_CLI_OPS", raising=False)
    facts = []
    for ops in ("native", "numpy"):
        monkeypatch.setenv("GPT_CLI_OPS", ops)
        assert app.run(["info", str(case_folder(case)), "--json"]) == 0
        facts.append(json.loads(capfd.readouterr().out))
    held, full = facts
    assert (held["dtype"], full["dtype"]) == (dtype, "float32")
    assert full["weights_bytes"] == 4 * full["parameters"]
    assert held["kv_cache_bytes"] == full["kv_cache_bytes"]
    if dtype != "float32":
        assert full["weights_bytes"] / 2 < held["weights_bytes"] < 0.6 * full["weights_bytes"]


def test_info_needs_no_weights(case_folder, capfd, tmp_path):
    shutil.copy(case_folder("f16") / "config.json", tmp_path)
    assert app.run(["info", str(tmp_path), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["dtype"] == "float32"
