"""`gpt-cli generate`, `info` and what all commands share, in pipes and on terminals."""

import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import gpt_cli
from gpt_cli.cli import app
from gpt_cli.cli.commands import generate as commands
from gpt_cli.cli.parameters import command as with_flags
from gpt_cli.generation.sampling import sample
from gpt_cli.jobs import runner
from gpt_cli.ops import bindings
from gpt_cli.options.declare import OptionError, OptionResourceError, option
from gpt_cli.options.request import Options
from gpt_cli.records import COMPLETION
from gpt_cli.system import signals
from gpt_cli.system.startup import THREAD_VARIABLES
from support.commands import ENDLESS, GENERATE, LONG, PIPES, TINY, generate, generated, text_of
from support.in_process import finished, records_here, refusal, run_here, terminal_here
from support.processes import COMMAND, LimitedProcess, on_terminal, posix, run_on_terminal

TINY_FOLDER = Path(__file__).parents[2] / "weights" / "tiny"


def run(*arguments):
    """Run the command in a new process."""
    return subprocess.run([*TINY, *arguments], capture_output=True, timeout=60, input=b"")


def json_of(*arguments, **options):
    (record,) = records_here(*GENERATE, *arguments, "--json", **options)
    return record


def assert_one_line_error(finished, code):
    assert finished.returncode == code, finished.stderr
    lines = finished.stderr.decode().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("gpt-cli: error: ")


@pytest.fixture(scope="module")
def story():
    """The text after "Once upon a time" with seed 1, by the Python API."""
    engine = gpt_cli.load("tiny")
    return engine.generate(["Once upon a time"], max_tokens=60, seed=1)[0].text


STORY = ("Once upon a time", "-n", "60", "--seed", "1")


def test_a_pipe_gets_the_text_byte_for_byte_and_nothing_else(story):
    finished = run(*STORY)
    assert (finished.returncode, finished.stdout.decode(), finished.stderr) == (0, story, b"")
    for flags in ("--no-stream", "--no-cache", "--threads=1", "--device=cpu -q"):
        assert generated(*STORY, *flags.split()) == (story, "")


def test_json_has_the_same_text_with_its_model_seed_and_finish_reason(story):
    line = json_of(*STORY)
    assert set(line.pop("timing")) == set(COMPLETION["timing"])
    assert line.pop("usage")["completion_tokens"] == 60
    assert line == {
        "index": 0,
        "prompt": "Once upon a time",
        "text": story,
        "finish_reason": "length",
        "seed": 1,
        "model": "tiny",
        "adapter": None,
    }


def test_a_drawn_seed_is_reported_and_gives_the_text_again():
    first = json_of("Once", "-n", "20")
    assert json_of("Once", "-n", "20", "--seed", first["seed"])["text"] == first["text"]


def test_samples_come_one_after_the_other_and_the_first_is_that_of_a_single_run(story):
    samples = text_of(*STORY, "--samples", "3").split("\n---\n")
    assert len(samples) == 3
    assert samples[0] == story
    assert samples[1] != story


def test_the_best_texts_of_a_search_come_as_samples():
    engine = gpt_cli.load("tiny")
    best = engine.generate(["Once upon a time"], beams=4, max_tokens=12)[0]
    texts = [text.text for text in (best, *best.others)]
    search = "Once upon a time", "-n", "12", "--beams", "4"
    assert generated(*search, "--echo") == ("Once upon a time" + texts[0], "")
    assert text_of(*search, "--samples", "3").split("\n---\n") == texts[:3]
    assert text_of(*search, "--length-penalty", "0", "--early-stopping", "never") == texts[0]
    lines = records_here(*GENERATE, *search, "--samples", "4", "--json", "--logprobs", "1")
    scores = [best.score, *(text.score for text in best.others)]
    assert [(line["text"], line["score"]) for line in lines] == [*zip(texts, scores, strict=True)]
    assert [token["logprob"] for token in lines[3]["logprobs"]] == best.others[2].logprobs
    assert f"score {best.score:.4f}, seed " in run_here(*GENERATE, *search, "--stats")[1]
    few = "Is it?", "--choices", "yes", "--beams", "9", "--samples", "9"
    assert text_of(*few) == " yes"
    assert "only 1 text can be generated" in terminal_here(*GENERATE, *few)[1]


def test_a_terminal_shows_how_far_a_search_is(monkeypatch):
    monkeypatch.setattr(commands, "LONG", 0)
    output = terminal_here(*GENERATE, "Once", "-n", "3", "--beams", "2")[1]
    assert "1 token of 2 beams, shown at the end" in output
    assert "gives this text again" not in output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--beams 2 --samples 3", "--samples must be at most --beams, which is 2"),
        ("--beams 2 --temperature 0.5", "--temperature cannot be set in a beam search"),
        ("--beams 2 --typical-p 0.5", "--typical-p cannot be set in a beam search"),
        ("--beams 2 --overflow shift", "--overflow cannot be shift in a beam search"),
        ("--beams 0", "--beams must be from 1 to 128"),
        ("--length-penalty 2", "--length-penalty applies only to a beam search"),
        ("--early-stopping never", "--early-stopping applies only to a beam search"),
        ("--beams 2 --early-stopping no", "--early-stopping must be one of false, true, never"),
    ],
)
def test_flags_that_do_not_fit_a_search_are_refused(flags, message):
    assert message in refusal(*GENERATE, "Once", *flags.split())


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


CUT = "gpt-cli: note: the text was cut at --max-tokens 3"


@posix
def test_a_text_that_is_cut_in_a_file_is_noted_with_its_seed(tmp_path):
    command = f"{shlex.join([*TINY, 'Once', '-n', '3'])} > out"
    cut, seed = on_terminal(["sh", "-c", command], 300, {}, tmp_path)[1].splitlines()
    assert cut == CUT
    assert re.fullmatch(r"gpt-cli: note: --seed \d+ gives this text again", seed)


@pytest.mark.parametrize(("flags", "notes"), [("-s 1", [CUT]), ("-s 1 --json", []), ("-q", [])])
def test_what_is_known_or_not_wanted_is_not_noted(monkeypatch, flags, notes):
    regular = Path(__file__).stat()
    monkeypatch.setattr("gpt_cli.cli.commands.generate.os.fstat", lambda _: regular)
    errors = generated("Once", "-n", "3", "-v", *flags.split())[1]
    assert [line for line in errors.splitlines() if " note: " in line] == notes


def test_statistics_go_to_standard_error_although_notes_are_not_shown(story):
    text, told = generated(*STORY, "--stats")
    assert text == story
    assert re.match(r"tiny in (float16|float32): loaded in ", told)
    assert "60 tokens at" in told
    assert "seed 1" in told
    told = generated("a space at the end ", "-n", "3", "--stats", "--quiet")[1]
    assert told.count("\n") == 1
    assert "3 tokens at" in told
    assert "ends with a space" in generated("a space at the end ", "-n", "3", "-v")[1]


def test_statistics_of_several_texts_are_numbered():
    told = generated("Once", "-n", "3", "--samples", "3", "--stats", "-q")[1].splitlines()
    assert [line[:12] for line in told] == [f"text {number}: tiny" for number in (1, 2, 3)]


def test_the_prompt_may_come_from_a_pipe_a_file_or_both(story, tmp_path):
    whole, beginning = tmp_path / "whole.txt", tmp_path / "beginning.txt"
    whole.write_bytes(b"Once upon a time\r\n")
    beginning.write_bytes(b"Once upon")
    prompt, *flags = STORY
    for data in (b"", b"\n"):
        assert text_of(*flags, input=prompt.encode() + data) == story
    assert text_of(*flags, input=b"\xef\xbb\xbfOnce upon a time\r\n") == story
    assert text_of("--file", "-", *flags, input=b"Once upon a time\n") == story
    assert text_of("--file", whole, *flags) == story
    assert text_of("--file", beginning, " a time", *flags) == story
    assert text_of(*STORY, input=b"not read") == story


class Recorder:
    """Replace `load` and the engine; record their arguments."""

    name = "recorder"

    def load(self, name, **options):
        self.loaded = {"name": name} | options
        return self

    def run(self, prompts, options):
        self.prompts, self.options, self.batch_size = prompts, options, None
        raise KeyboardInterrupt

    def batch(self, rows, options, *, batch_size, indices):
        self.prompts, self.options, self.batch_size = rows, options, batch_size
        raise KeyboardInterrupt


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(gpt_cli, "load", recorder.load, raising=False)
    monkeypatch.setattr(runner, "load", recorder.load)
    return recorder


@pytest.mark.parametrize(
    ("command", "more", "prompts", "top", "batch_size"),
    [
        ("generate", "--samples 2 --", ["text", "text"], 0, None),
        ("batch", "--logprobs 4 --batch-size 9 --file", [{"prompt": "text"}], 4, 9),
    ],
)
def test_every_flag_arrives_where_it_has_its_effect(
    recorder, monkeypatch, tmp_path, command, more, prompts, top, batch_size
):
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("text\n")
    flags = (
        "-m some/model --max-tokens 5 --temp 0.5 --top-k 6 --top-p 0.7 --min-p 0.08 "
        "--repeat-penalty 1.9 --presence-penalty 0.1 --frequency-penalty 0.2 --logit-bias 7=-3 "
        "--logit-bias 9=1 --include-stop --stop a --stop b --seed 11 --no-cache "
        "--device cpu --dtype float16 --revision v1 --offline --overflow shift --ignore-eos "
        "--adapter some/adapter --bos-token [CLS] "
        f"--special -q --no-speculate {more} text"
    )
    assert app.run([command, *flags.split()]) == 130
    assert recorder.loaded == {
        "name": "some/model",
        "device": "cpu",
        "dtype": "float16",
        "revision": "v1",
        "adapter": "some/adapter",
        "offline": True,
        "quiet": True,
        "speculate": False,
        "bos_token": "[CLS]",
        "edits": (),
    }
    assert (recorder.prompts, recorder.batch_size) == (prompts, batch_size)
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
        top_logprobs=top,
    )


@pytest.mark.parametrize("command", ["generate", "batch"])
def test_the_defaults_of_flags_are_those_of_the_library(recorder, monkeypatch, command):
    monkeypatch.delenv("GPT_CLI_MODEL", raising=False)
    assert finished(command, "--seed", "1", input=b"text\n").returncode == 130
    assert (recorder.options, recorder.batch_size) == (Options(seed=1), None)
    assert recorder.loaded["name"] == "gpt2"
    finished(command, input=b"text\n", GPT_CLI_MODEL="distilgpt2")
    assert recorder.loaded["name"] == "distilgpt2"


def threads_of_the_library_and_numpy():
    ours, *others = (os.environ[name] for name in THREAD_VARIABLES)
    assert len({*others}) == 1
    return int(ours), int(others[0])


@pytest.mark.parametrize(
    ("flags", "env", "native", "threads"),
    [
        (["--threads", "3"], {}, True, (3, 1)),
        (["--threads", "3"], {"GPT_CLI_OPS": "numpy"}, True, (3, 3)),
        (["--threads", "2"], {}, False, (2, 2)),
        ([], {"GPT_CLI_THREADS": "3"}, True, (3, 1)),
        (["--threads", "2"], {"GPT_CLI_THREADS": "3"}, True, (2, 1)),
    ],
)
def test_the_library_and_numpy_have_the_number_of_threads(
    recorder, thread_variables, flags, env, native, threads
):
    thread_variables.delenv("GPT_CLI_OPS", raising=False)
    thread_variables.setattr("gpt_cli.system.startup.native_computes", lambda: native)
    for name, value in env.items():
        thread_variables.setenv(name, value)
    app.run(["generate", "text", *flags])
    assert threads_of_the_library_and_numpy() == threads


def test_threads_are_the_usable_cores_unless_a_variable_sets_them(recorder, thread_variables):
    thread_variables.setattr("gpt_cli.system.startup.native_computes", lambda: True)
    thread_variables.setattr("gpt_cli.system.startup.cores", lambda: 5)
    thread_variables.delenv("GPT_CLI_THREADS")
    app.run(["generate", "text"])
    assert "GPT_CLI_THREADS" not in os.environ
    assert os.environ["OMP_NUM_THREADS"] == "7"
    for name in THREAD_VARIABLES[1:]:
        thread_variables.delenv(name)
    app.run(["generate", "text"])
    assert threads_of_the_library_and_numpy() == (5, 1)


@pytest.mark.parametrize("value", ["0", "-1", "many", "257", "4294967296"])
def test_an_invalid_number_of_threads_in_the_environment_is_refused(value):
    assert "GPT_CLI_THREADS" in refusal(*GENERATE, "x", GPT_CLI_THREADS=value)


def test_the_library_and_numpy_give_the_same_text(library):
    arguments = ["-s", "5", "-n", "60", "--samples", "3", "Once upon"]
    by_numpy, by_library = (text_of(*arguments, GPT_CLI_OPS=name) for name in ("numpy", "native"))
    assert by_numpy == by_library


def records_of(*arguments, **env):
    """Return the records of `--json`, without their times."""
    records = records_here(*generate(*arguments), "--json", **env)
    return [record | {"timing": None} for record in records]


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_every_digit_is_the_same_on_any_number_of_threads_at_any_level(dtype):
    arguments = ["-s", "7", "-n", "40", "--logprobs", "3", "--dtype", dtype, "Once upon"]
    expected = records_of(*arguments, GPT_CLI_OPS="native", GPT_CLI_THREADS="1")
    try:
        for threads, level in (("3", bindings.levels()[0]), ("2", bindings.levels()[-1])):
            env = {"GPT_CLI_OPS": "native", "GPT_CLI_LEVEL": level}
            assert records_of(*arguments, "--threads", threads, **env) == expected
    finally:
        bindings.choose_level()
    (first, *_) = records_of(*arguments, "--samples", "3", "--no-cache", GPT_CLI_OPS="native")
    assert [first] == expected


# --- the dtype of weights ------------------------------------------------------------------------


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(("case", "dtype"), [("f16", "float16"), ("bf16", "bfloat16")])
def test_weights_in_16_bits_stay_so_and_give_what_float32_gives(case_folder, case, dtype):
    flags = ["-m", case_folder(case), "-s", "3", "-n", "40", "--device", "cpu", "and the"]
    expected = records_of(*flags, "--logprobs", "5", "--dtype", "float32")
    for chosen in ("auto", dtype):
        assert records_of(*flags, "--logprobs", "5", "--dtype", chosen) == expected
    assert f" in {dtype}: loaded in " in generated(*flags, "--stats")[1]


@pytest.mark.usefixtures("library")
def test_a_note_says_that_weights_are_rounded_unless_quiet():
    flags = [*STORY, "--device", "cpu", "--dtype", "bfloat16"]
    noted, quiet = run(*flags), run(*flags, "-q")
    assert noted.stderr == b"gpt-cli: the weights of tiny are rounded to bfloat16\n"
    assert quiet.stderr == b""
    assert noted.stdout == quiet.stdout
    assert " in bfloat16: loaded in " in generated(*flags, "--stats")[1]


@pytest.mark.usefixtures("library")
def test_int8_weights_are_not_rounded_again(case_folder, tmp_path):
    folder = tmp_path / "int8"
    run_here("quantize", case_folder("saved"), "-o", folder, "-q")
    told = refusal("generate", "-m", folder, "--dtype", "bfloat16", "--device", "cpu", "x")
    assert told == (
        f"gpt-cli: error: --dtype cannot be bfloat16: {folder} is stored in int8, and its weights "
        "would be rounded twice: choose auto or float32\n"
    )


@pytest.mark.parametrize("case", ["f16", "bf16"])
def test_without_the_library_weights_in_16_bits_are_widened(case_folder, monkeypatch, case):
    monkeypatch.delenv("GPT_CLI_OPS", raising=False)
    flags = ["-m", case_folder(case), "-s", "3", "-n", "40", "--device", "cpu", "and the"]
    expected = text_of(*flags, GPT_CLI_OPS="numpy")
    monkeypatch.setattr("gpt_cli.ops.select.native_library", lambda: None)
    text, told = generated(*flags, "--stats")
    assert text == expected
    assert " in float32: loaded in " in told
    assert records_here("info", flags[1], "--json")[0]["dtype"] == "float32"
    needed = "--dtype float16 needs the compiled library"
    assert needed in refusal("generate", *flags, "--dtype", "float16")


def test_memory_that_runs_out_is_exit_code_5(recorder, monkeypatch):
    def run(prompts, options):
        raise MemoryError("cannot have 9 GB")

    monkeypatch.setattr(recorder, "run", run)
    assert refusal("generate", "text", code=5) == (
        "gpt-cli: error: out of memory or threads (MemoryError('cannot have 9 GB')): "
        "use fewer or shorter texts at a time, or a smaller model\n"
    )


@pytest.mark.parametrize(
    ("option", "flag"),
    [
        ("max_tokens", "--max-tokens"),
        ("use_cache", "--cache"),
        ("threads", "--threads"),
        ("as_json", "--json"),
        ("json", "--json"),
        ("nothing", "nothing"),
    ],
)
@pytest.mark.parametrize(("kind", "code"), [(OptionError, 2), (OptionResourceError, 5)])
def test_an_error_about_an_option_is_shown_with_its_flag(
    recorder, monkeypatch, option, flag, kind, code
):
    def run(prompts, options):
        raise kind(option, "cannot be that")

    monkeypatch.delenv("GPT_CLI_THREADS", raising=False)
    monkeypatch.setattr(recorder, "run", run)
    with pytest.raises(kind, match=f"^{option} cannot be that$"):
        recorder.run([], Options())
    assert refusal("generate", "text", code=code) == f"gpt-cli: error: {flag} cannot be that\n"
    if option == "threads":
        message = refusal("generate", "text", code=code, GPT_CLI_THREADS="2")
        assert message == "gpt-cli: error: GPT_CLI_THREADS cannot be that\n"
        message = refusal("generate", "text", "--threads", 3, code=code, GPT_CLI_THREADS="2")
        assert message == "gpt-cli: error: --threads cannot be that\n"


def test_an_error_names_the_flag_of_a_single_command():
    @with_flags
    def command(*, sort_by: str = option("name", "An order.")):
        raise OptionError("sort_by", "must be name")

    with pytest.raises(OptionError, match=r"^--sort-by must be name$"):
        command(SimpleNamespace(get_parameter_source=lambda name: None), sort_by="size")


@pytest.mark.parametrize(
    ("word", "text"),
    [("-Once upon", True), ("-once", True), ("- x", True), ("--nope", False), ("-x", False)],
)
def test_a_text_that_begins_with_a_dash_gets_a_hint_and_a_flag_does_not(word, text):
    error = refusal(*GENERATE, word)
    assert ("put -- before" in error) == text


def test_an_empty_prompt_begins_a_text():
    assert text_of("", "-n", "5", "--seed", "1")[0].isupper()


def test_minus_1_is_no_limit_and_a_random_seed():
    long = "once " * 300
    full = json_of(long, "-n", "-1", "--ignore-eos")
    assert (full["finish_reason"], full["usage"]["completion_tokens"] > 128) == ("context", True)
    seeds = {json_of("Once", "-n", "1", "-s", "-1")["seed"] for _ in range(3)}
    assert len(seeds) == 3


def test_the_context_ends_the_text_unless_it_is_shifted():
    long = "once " * 300
    full, told = generated(long, "-n", "500", "--ignore-eos", "--json", "-v")
    assert json.loads(full)["finish_reason"] == "context"
    assert "--overflow shift" in told
    shifted = json_of(long, "-n", "500", "--ignore-eos", "--overflow", "shift")
    assert shifted["usage"]["completion_tokens"] == 500
    cut = json_of("once " * 900, "-n", "9", "--overflow", "truncate")
    assert cut["usage"]["prompt_tokens"] == 512 - 9


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["x", "--temperature", "nan"], "temperature"),
        (["x", "--top-p", "0"], "top-p"),
        (["x", "--top-k", "-1"], "top-k"),
        (["x", "--min-p", "2"], "min-p"),
        (["x", "--repeat-penalty", "0"], "repeat-penalty"),
        (["x", "--seed", "-2"], "seed"),
        (["x", "-n", "many"], "--max-tokens"),
        (["x", "--samples", "0"], "--samples"),
        (["x", "--samples", str(10**30)], "--samples"),
        (["x", "--threads", "0"], "--threads"),
        (["x", "--stop", ""], "--stop must be strings that are not empty"),
        (["x", "--overflow", "ignore"], "--overflow"),
        (["x", "--device", "abacus"], "abacus"),
        (["x", "--dtype", "float8"], "float8"),
        (["x", "--no-such-flag"], "--no-such-flag"),
        (["x", "--revision", "main"], "revision"),
        (["once " * 2000], "overflow"),
        (["--file", "/no/such/file"], "/no/such/file"),
        (["\udcff"], "Unicode"),
    ],
)
def test_bad_input_is_one_line_that_names_it_and_exit_code_2(arguments, what):
    assert what in refusal(*GENERATE, *arguments)


@pytest.mark.parametrize(
    "flag",
    ["--top-p=0", "--temperature=nan", "--stop=", "--device=abacus", "--dtype=float8", "--seed=-2"],
)
def test_bad_flags_are_known_before_a_model_is_looked_for(flag):
    assert app.run(["generate", "x", "--model", "no/model", "--offline", flag]) == 2


@pytest.mark.parametrize("data", [b"", b"abc\xff"])
def test_an_empty_pipe_and_one_that_is_not_utf8_are_refused(data):
    refusal(*GENERATE, input=data)


@posix
def test_a_closed_standard_input_is_not_waited_for():
    line = " ".join([*TINY, "<&-"])
    assert_one_line_error(subprocess.run(line, shell=True, capture_output=True, timeout=60), 2)


def test_a_damaged_model_is_exit_code_4_and_verbose_shows_where(tmp_path):
    shutil.copytree(TINY_FOLDER, tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    error = refusal("generate", "x", "--model", tmp_path, code=4)
    assert "model.safetensors" in error
    verbose = generated("x", "--model", tmp_path, "--verbose", code=4)[1]
    assert "Traceback" in verbose
    assert verbose.endswith(error)


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
def test_a_path_may_have_bytes_that_are_not_unicode(tmp_path):
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
    with LimitedProcess(ENDLESS[:-1], **PIPES) as process:
        assert len(process.stdout.read(10)) == 10
        process.stdout.close()
        assert process.wait(timeout=60) == 141
        assert process.stderr.read() == b""


@posix
def test_an_interrupt_keeps_the_text_so_far_and_is_exit_code_130():
    nohup = partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    # Without a buffer: `communicate` would lose what is in it.
    with LimitedProcess(ENDLESS, **PIPES, bufsize=0, preexec_fn=nohup) as process:
        beginning = process.stdout.read(10)
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGINT)
        rest, notes = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in notes
    assert b"finish reason interrupted" in notes
    text, whole = (beginning + rest).decode(), text_of(*LONG)
    assert whole.startswith(text[: len(whole)])


def test_an_interrupt_writes_the_record_of_the_text_so_far(monkeypatch):
    steps = itertools.count(1)

    def interrupted(*arguments):
        if next(steps) > 9:
            raise KeyboardInterrupt
        return sample(*arguments)

    whole = text_of(*LONG)
    monkeypatch.setattr("gpt_cli.generation.row.sample", interrupted)
    record = json_of(*LONG, code=130)
    assert (record["finish_reason"], record["usage"]["completion_tokens"]) == ("interrupted", 9)
    assert record["text"]
    assert whole.startswith(record["text"])


def test_an_interrupted_search_does_not_say_that_there_are_fewer_texts(monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("gpt_cli.generation.beams.adjust", interrupted)
    code, output = terminal_here(*GENERATE, "Once", "--beams", "3", "--samples", "3")
    assert (code, "can be generated" in output) == (130, False)


def test_an_interrupt_while_a_module_is_imported_is_quiet(monkeypatch):
    class Interrupted:
        def __set_name__(self, owner, name):
            signals.interrupt(signal.SIGINT, None)

    def load(*arguments, **options):
        type("Encoding", (), {"name": Interrupted()})  # Python 3.11 makes it a RuntimeError

    monkeypatch.setattr(gpt_cli, "load", load)
    monkeypatch.setattr(signals, "received", [])
    monkeypatch.setattr(app, "received", signals.received)
    assert run_here("generate", "-m", "tiny", "Once", code=130) == (b"", "")


def test_an_interrupt_while_the_commands_are_declared_is_quiet(monkeypatch):
    def add_command(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "add_command", add_command)
    assert run_here("generate", "-m", "tiny", "Once", code=130) == (b"", "")


@posix
def test_a_terminal_shows_a_line_end_after_the_text_and_a_drawn_seed(story):
    assert run_on_terminal(*GENERATE, *STORY) == (0, (story + "\n").replace("\n", "\r\n"))
    drawn = [*GENERATE, "Once", "-n", "3"]
    assert "gives this text again" in terminal_here(*drawn)[1]
    assert "gives this text again" not in terminal_here(*drawn, "-q")[1]


def test_a_terminal_is_no_prompt():
    code, output = terminal_here(*GENERATE)
    assert code == 2
    assert output.startswith("gpt-cli: error: no prompt")


@posix
def test_the_locale_does_not_change_the_bytes():
    text = "Zoë asked: “où?” 🦊"
    plain = {"PATH": os.environ["PATH"], "LC_ALL": "C", "PYTHONUTF8": "0"}
    flags = ["-n", "5", "--seed", "1", "--echo"]
    finished = subprocess.run([*TINY, *flags], input=text.encode(), capture_output=True, env=plain)
    assert finished.stdout.decode() == text_of(text, *flags)


def test_the_help_of_every_command_needs_no_numpy():
    code = (
        "import sys; from gpt_cli.cli import app;"
        "assert {app.run([*name, '--help']) for name in [(), *zip(app.COMMANDS)]} == {0};"
        "assert not {'numpy', 'tiktoken', 'rich'} & sys.modules.keys()"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert (finished.returncode, finished.stderr) == (0, b"")
    for name in app.COMMANDS:
        assert f"gpt-cli {name}".encode() in finished.stdout


def test_without_arguments_it_shows_the_commands_and_its_version_is_the_packages():
    assert b"generate" in subprocess.check_output(COMMAND)
    assert run_here("--version") == (f"gpt-cli {gpt_cli.__version__}\n".encode(), "")


def test_info_shows_the_sizes_of_a_model():
    (facts,) = records_here("info", "tiny", "--json")
    model = gpt_cli.load("tiny", device="cpu").model
    assert facts["n_layer"] == len(model.h)
    assert facts["dtype"] == model.ops.dtype
    assert facts["parameters"] > facts["vocab_size"] * facts["n_embd"]
    text = run_here("info", "tiny")[0].decode()
    assert f"dtype {model.ops.dtype}" in " ".join(text.split())
    assert ("5 MB" if model.ops.dtype == "float16" else "9 MB") in text


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("case", "dtype"), [("saved", "float32"), ("f16", "float16"), ("bf16", "bfloat16")]
)
def test_info_shows_the_dtype_of_weights_in_memory(case_folder, tmp_path, case, dtype):
    held, full = (
        records_here("info", case_folder(case), "--json", GPT_CLI_OPS=ops)[0]
        for ops in ("native", "numpy")
    )
    assert (held["dtype"], full["dtype"]) == (dtype, "float32")
    assert full["weights_bytes"] == 4 * full["parameters"]
    assert held["kv_cache_bytes"] == full["kv_cache_bytes"]
    if dtype != "float32":
        assert full["weights_bytes"] / 2 < held["weights_bytes"] < 0.6 * full["weights_bytes"]
    shutil.copy(case_folder(case) / "config.json", tmp_path)  # without weights
    assert records_here("info", tmp_path, "--json", code=4)[0]["dtype"] == "float32"


INTERRUPTED = """
import os, signal, sys, time, weakref
from gpt_cli import __main__
from gpt_cli.cli import app
from gpt_cli.system import signals

class Target:
    pass

number = signal.Signals[sys.argv[1]]
if number is not signal.SIGINT:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(number, signals.interrupt)

def run():
    target = Target()
    watching = weakref.ref(target, lambda _: os.kill(os.getpid(), number))
    del target
    time.sleep(30)

app.main = run
__main__.main()
"""


@pytest.mark.parametrize("command", ["next", "batch"])
def test_an_interrupt_that_an_import_swallowed_ends_the_command(command, monkeypatch):
    monkeypatch.setattr(signals, "received", [signal.SIGTERM])
    assert run_here(command, "-m", "tiny", input=b"Once", code=130) == (b"", "")


@posix
@pytest.mark.parametrize("number", ["SIGINT", "SIGHUP"])
def test_an_interrupt_in_a_callback_is_not_lost_and_quiet(number):
    command = [sys.executable, "-c", INTERRUPTED, number]
    finished = subprocess.run(command, capture_output=True, timeout=30)
    code = 128 + signal.Signals[number]
    assert (finished.returncode, finished.stderr) == (code, b"")


CLOSED = """
import os, signal, time
from gpt_cli.cli import app

def run(arguments):
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(30)
    except KeyboardInterrupt:
        return 5  # the result cannot be written

app.run = run
app.main()
"""


@posix
def test_a_closed_terminal_is_the_reason_why_output_fails():
    finished = subprocess.run([sys.executable, "-c", CLOSED], capture_output=True, timeout=30)
    assert (finished.returncode, finished.stderr) == (129, b"")
