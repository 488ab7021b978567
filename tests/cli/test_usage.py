"""Errors of the command line name the flag, what is wrong, and what to do."""

import inspect
import re
from collections.abc import Iterator
from dataclasses import Field

import pytest

from gpt_cli.cli import usage
from gpt_cli.cli.commands import COMMANDS, import_command
from gpt_cli.cli.show.commands import show
from gpt_cli.options.declare import NUMBER, SWITCH, WHOLE, Declared, Option, declaration
from support.in_process import finished, refusal, run_here

GENERATE = ["generate", "-m", "tiny", "x"]
SEE = "; see `gpt-cli generate --help`"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*GENERATE, "--xyz"], f"there is no option --xyz{SEE}"),
        ([*GENERATE, "--max"], f"there is no option --max (did you mean --max-tokens?){SEE}"),
        ([*GENERATE, "--sed=3"], f"there is no option --sed (did you mean --seed?){SEE}"),
        (
            ["generate", "-m", "tiny", "-qhey"],
            f"there is no option -e in -qhey; put -- before a text that begins with -{SEE}",
        ),
        ([*GENERATE, "-n"], f"-n needs a value{SEE}"),
        ([*GENERATE, "--stats=3"], f"--stats takes no value{SEE}"),
        (["info", "tiny", "y"], "unexpected argument y; see `gpt-cli info --help`"),
        (["show", "tree", "-k"], "-k needs a value; see `gpt-cli show tree --help`"),
        (
            ["show", "tre"],
            "there is no command tre (did you mean tree?); see `gpt-cli show --help`",
        ),
        (
            ["it's"],
            "there is no command it's; to continue a text, use generate; see `gpt-cli --help`",
        ),
        (["show", "it"], "there is no command it; see `gpt-cli show --help`"),
        (["genrate", "x"], "genrate (did you mean generate?); see `gpt-cli --help`"),
        (
            ["-m", "tiny", "info"],
            "there is no option -m; options come after the command; see `gpt-cli --help`",
        ),
        (["batch", "--json"], "there is no option --json; see `gpt-cli batch --help`"),
        (["--"], "a command is missing; see `gpt-cli --help`"),
        (["--nope"], "there is no option --nope; see `gpt-cli --help`"),
        (["download"], "MODEL is missing; see `gpt-cli download --help`"),
        (["quantize", "tiny"], "--output is missing; see `gpt-cli quantize --help`"),
        (
            ["bench", "--batc"],
            "option --batc (did you mean --batch-size?); see `gpt-cli bench --help`",
        ),
        ([*GENERATE, "-n", "abc"], '--max-tokens must be a whole number, not "abc"'),
        ([*GENERATE, "-n", "1e3"], '--max-tokens must be a whole number, not "1e3"'),
        ([*GENERATE, "--temp", ""], '--temperature must be a number, not ""'),
        (
            [*GENERATE, "--overflow", "no"],
            '--overflow must be one of error, truncate, shift, not "no"',
        ),
        (["show", "lens", "x", "-k", "0"], "--top must be from 1 to 100"),
        (["show", "tree", "x", "-k", "201"], "--top must be from 1 to 200"),
        (
            [*GENERATE, "--logit-bias", "3=1", "--logit-bias", "abc"],
            "--logit-bias must be a number for each token, an id or a text (such as 452=-100), "
            'not "abc"',
        ),
        ([*GENERATE, "--logit-bias", "3=x"], 'not "3=x"'),
        (
            [*GENERATE, "--logit-bias", "3=1", "--logit-bias", "5=200"],
            '--logit-bias must be token ids or texts with numbers from -100 to 100, not "5=200"',
        ),
        ([*GENERATE, "--choices", "a,,b"], 'must be one or more texts that are not empty, not ""'),
        (
            [*GENERATE, "--device", "gpu"],
            '--device must be one of auto, cuda, cpu, not "gpu" (did you mean cuda?)',
        ),
        (["batch", "--batch-size", "x"], '--batch-size must be auto, or 1 or more, not "x"'),
        ([*GENERATE, "-f", "a", "-f", "b"], '--file must be a single file, not ["a", "b"]'),
        (["batch", "-o", ""], "--output is empty: name a file"),
        (["serve", "--max-batch", "0", "-q"], "--batch-size must be from 1 to 10000"),
    ],
)
def test_an_error_has_the_flag_what_is_wrong_and_what_to_do(arguments, message):
    assert refusal(*arguments).endswith(f"{message}\n")


# Flags of llama.cpp, llm, mlx_lm, vLLM and transformers.
@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ([*GENERATE, "--n-predict", "9"], "use --max-tokens"),
        ([*GENERATE, "--max-new-tokens=9"], "use --max-tokens"),
        ([*GENERATE, "-p", "x"], "the prompt, or the text, is an argument"),
        ([*GENERATE, "--prompt", "x"], "the prompt, or the text, is an argument"),
        ([*GENERATE, "--color"], "the text has no colors"),
        ([*GENERATE, "--keep", "4"], "use --overflow shift"),
        ([*GENERATE, "--mirostat", "2"], "there is no Mirostat; --typical-p keeps the surprise"),
        ([*GENERATE, "--system", "x"], "a base model has no chat: write instructions and turns"),
        ([*GENERATE, "--repeat-last-n", "64"], "a penalty applies to the whole text"),
        ([*GENERATE, "-c", "512"], "the context is that of the model"),
        ([*GENERATE, "--hf-repo", "gpt2"], "use --model"),
        ([*GENERATE, "-cnv"], "a base model has no chat"),
        ([*GENERATE, "-no-cnv"], "a base model has no chat"),
        ([*GENERATE, "-ngl", "99"], "use --device; see"),
        ([*GENERATE, "-sys", "x"], "a base model has no chat"),
        ([*GENERATE, "-hf", "ggml-org/x"], "use --model; see"),
        ([*GENERATE, "-fa", "on"], "there is one way to compute attention"),
        ([*GENERATE, "--flash-attn", "on"], "there is one way to compute attention"),
        ([*GENERATE, "-md", "x"], "use --speculate; see"),
        ([*GENERATE, "--cache-type-k", "f16"], "keys and values are cached in one type"),
        ([*GENERATE, "--no-warmup"], "it does not warm up"),
        ([*GENERATE, "--attachment", "x.png"], "the model reads only text"),
        (["batch", "--input-file", "x"], "the files of rows are arguments"),
        (["batch", "--output-file", "x"], "use --output"),
        (["serve", "-ngl", "99"], "use --device; see"),
        (["serve", "-np", "4"], "use --batch-size; see"),
        (["serve", "--ssl-keyfile", "x"], "TLS is the work of a proxy"),
        ([*GENERATE, "-r", "x"], "use --stop"),
        ([*GENERATE, "--schema", "{}"], "use --json-schema"),
        ([*GENERATE, "-o", "temperature"], "its options are flags of their own"),
        ([*GENERATE, "--max-kv-size", "64"], "use --overflow shift"),
        ([*GENERATE, "--num-beams", "4"], "use --beams"),
        (["batch", "--max-num-seqs", "8"], "use --batch-size"),
        (["serve", "--served-model-name", "x"], "use --name"),
        (["serve", "--gpu-memory-utilization", "0.9"], "it takes the memory that it needs"),
    ],
)
def test_a_flag_of_another_program_gets_the_one_of_this_or_the_reason(arguments, hint):
    flag = next(word for word in arguments if word.startswith("-") and word not in GENERATE)
    assert f"there is no option {flag.partition('=')[0]}: {hint}" in refusal(*arguments)


def test_a_hint_fits_the_command():
    for arguments in (["score", "--n-predict", "9"], ["compress", "-c", "x"], [*GENERATE, "-np"]):
        flag = arguments[-1] if arguments[-1] == "-np" else arguments[1]
        assert f"there is no option {flag}; see" in refusal(*arguments)


def test_a_flag_of_another_program_may_be_a_text():
    for text in (["--", "-sys"], ["--stop", "-ngl", "x"]):
        assert run_here("generate", "-m", "tiny", "-n", "1", *text)
    assert "there is no option -sys: " in refusal("generate", "-m", "tiny", "-q", "-sys", "x")


def test_the_flags_of_other_programs_are_none_of_ours():
    ours = {
        flag
        for function in FUNCTIONS.values()
        for option in declared(function)
        for flag in (*flag_of(option).split("/"), *option.aliases)
    }
    others = " ".join([*usage._OTHER_NAMES.values(), *usage._NO_COUNTERPARTS.values()]).split()
    assert len(others) == len({*others})
    assert not {flag for flag in others if flag.startswith("--")} & ours
    assert {flag.split()[0] for flag in usage._OTHER_NAMES} <= ours


@pytest.mark.parametrize("command", ["info", "verify", "quantize"])
def test_two_different_models_are_refused(command, tmp_path):
    output = ["-o", tmp_path / "new"] if command == "quantize" else []
    error = refusal(command, "tiny", "-m", "./big", *output)
    assert "--model ./big and the argument tiny differ: leave one of them out" in error
    assert not [*tmp_path.iterdir()]


def test_one_model_may_be_named_twice_or_differ_from_that_of_the_environment():
    once = run_here("info", "tiny")
    assert run_here("info", "tiny", "-m", "tiny") == once
    assert run_here("info", "tiny", GPT_CLI_MODEL="./big") == once


@pytest.mark.parametrize(
    ("arguments", "value", "message"),
    [
        ([], "many", 'GPT_CLI_THREADS must be a whole number, not "many"'),
        ([], "0", "GPT_CLI_THREADS must be from 1 to 256"),
        (["--threads", "0"], "2", "--threads must be from 1 to 256"),
        (["--threads", "x"], "0", '--threads must be a whole number, not "x"'),
    ],
)
def test_a_variable_is_blamed_only_for_its_own_value(arguments, value, message):
    assert refusal(*GENERATE, *arguments, GPT_CLI_THREADS=value).endswith(f"error: {message}\n")


FEW = ["bench", "-m", "tiny", "-p", "4", "-n", "3", "-r", "1", "--no-cache", "--json"]


def test_an_old_flag_works_with_a_note_and_is_not_in_the_help():
    for flags, note in (([], "gpt-cli: note: --batch is now --batch-size\n"), (["-q"], "")):
        measured = finished(*FEW, "--batch", 2, *flags)
        assert b'"batch":2' in measured.stdout.replace(b" ", b"")
        assert measured.stderr.decode() == note
    assert finished(*FEW, "--batch-size", 2).stderr == b""
    message = "error: --batch is now --batch-size: give only --batch-size\n"
    assert refusal(*FEW, "--batch", 2, "--batch-size", 2).endswith(message)
    for command, flag in (("bench", "--batch"), ("serve", "--max-batch")):
        assert f"{flag} " not in run_here(command, "--help")[0].decode()


# --- flags that exclude or need one another ------------------------------------------------------


def declared(function) -> Iterator[Option]:
    """Yield the options of a command."""
    for name, parameter in inspect.signature(function).parameters.items():
        if isinstance(parameter.default, Field):
            yield declaration(name, parameter.annotation, parameter.default)
        elif isinstance(parameter.annotation, type) and issubclass(parameter.annotation, Declared):
            yield from (option for option in parameter.annotation.declarations() if option.help)


def flag_of(option):
    return option.flag or f"--{option.name.replace('_', '-')}"


def words(option, flag):
    """Return a flag and a value, as words of a command line."""
    if option.kind is SWITCH or " " in flag:
        return flag.split()
    values = option.kind.values or ("660" if flag == "--unix-socket-mode" else "1",)
    return [flag, values[-1]]


FUNCTIONS = {(name,): import_command(name) for name in COMMANDS} | {
    ("show", command.callback.__name__): command.callback.__wrapped__
    for command in show.registered_commands
}
CONDITIONS = [
    (name, option, other)
    for name, function in FUNCTIONS.items()
    for option in declared(function)
    for other in (*option.excludes, option.needs)
    if other
]


@pytest.mark.parametrize(("name", "option", "other"), CONDITIONS)
def test_a_flag_is_refused_with_one_that_it_excludes_and_without_one_that_it_needs(
    name, option, other
):
    by_flag = {flag: o for o in declared(FUNCTIONS[name]) for flag in flag_of(o).split("/")}
    second = words(by_flag[other.split()[0]], other)  # the other flag is one of the same command
    flag = flag_of(option)
    text = re.sub(r"(?<=\w-)\n +", "", run_here(*name, "--help")[0].decode())  # as hyphens break
    text = " ".join(text.split())
    if other == option.needs:
        assert refusal(*name, *words(option, flag)) == f"gpt-cli: error: {flag} needs {other}\n"
        assert f"Needs {other}." in text
    else:
        complaint = f"gpt-cli: error: {flag} cannot be used with {other}: leave one of them out\n"
        assert refusal(*name, *words(option, flag), *second) == complaint
        assert re.search(rf"Not with [^.]*{other}", text)


def test_the_help_names_the_range_of_every_number():
    for name, function in FUNCTIONS.items():
        numbers = [option for option in declared(function) if option.kind in (NUMBER, WHOLE)]
        text = " ".join(run_here(*name, "--help")[0].decode().split())
        for option in numbers:
            assert option.range is None or f" Range: {option.range.name}. " in f"{text} "
