"""Unexpected input: the inputs that the fuzzer has collected, random flags and random logits."""

import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fuzz.targets import TARGETS
from gpt_cli.cli import app
from gpt_cli.generation.sampling import sample
from gpt_cli.options.request import SamplingParams

CORPUS = Path(__file__).parent / "fuzz" / "corpus"


@pytest.mark.parametrize("target", TARGETS)
def test_the_inputs_of_the_fuzzer_are_handled(target, request, monkeypatch):
    if target == "constraints":
        pytest.importorskip("llguidance")
    if target == "compressed":
        request.getfixturevalue("library")
        monkeypatch.delenv("GPT_CLI_OPS", raising=False)
    inputs = list((CORPUS / target).iterdir())
    assert inputs
    for path in inputs:
        TARGETS[target](path.read_bytes())


# --- flags ---------------------------------------------------------------------------------------

# No slash, because it would be a path to anywhere; "\udcff" is a byte that is not UTF-8.
short_text = st.text(st.sampled_from("ab1.,- \n\u00e9\U0001f600\udcff"), max_size=8)
numbers = st.one_of(
    st.integers(-2, 5),
    st.integers(),
    st.floats(),
    st.sampled_from(["1e400", "-0", "1e-400", "9" * 5000, "0x10", "1_0", "\u0663", ""]),
).map(str)
values = st.one_of(st.sampled_from(["0", "0.5", "1", "3"]), numbers, short_text)
few = st.sampled_from(["-1", "0", "1", "2", "3", "", "nan", "two", "1.5"])
files = st.sampled_from(["in.txt", "rows.jsonl", ".", "no/file", "", "x" * 300])


def one_of(*names: str):
    return st.sampled_from([*names, "", "other"])


MODEL = {
    "device": one_of("auto", "cpu", "cuda"),
    "dtype": one_of("auto", "float32", "float16", "int8"),
    "threads": values,
}
SAMPLING = {
    **dict.fromkeys(("temperature", "top-k", "top-p", "min-p", "repeat-penalty", "seed"), values),
    "max-tokens": few,
    "stop": short_text,
    "overflow": one_of("error", "truncate", "shift"),
}
SHOWN = {"file": files}
# Commands with their flags that have a value, their switches, and their argument.
COMMANDS = {
    "generate": (
        MODEL | SAMPLING | SHOWN | {"samples": few},
        "json echo stats no-stream no-cache special ignore-eos",
        short_text,
    ),
    "batch": (
        MODEL | SAMPLING | {"batch-size": values, "logprobs": values}
        | {"format": one_of("auto", "lines", "jsonl")},
        "resume no-cache special ignore-eos",
        files,
    ),
    "score": (
        MODEL | dict.fromkeys(("max-perplexity", "min-perplexity", "stride"), values),
        "json lines tokens",
        files,
    ),
    "next": (MODEL | SHOWN | {"top": values}, "json special", short_text),
    "rank": (
        MODEL | {"choices": short_text, "choices-file": files, "by": one_of("byte", "token")},
        "json exact",
        short_text,
    ),
    "show attention": (MODEL | SHOWN | {"layer": few, "head": few}, "json special", short_text),
    "show lens": (MODEL | SHOWN | {"top": few}, "json special", short_text),
    "show surprise": (MODEL | SHOWN, "json", short_text),
    "show tree": (MODEL | SHOWN | {"top": few}, "json special", short_text),
    "tokenize": (SHOWN, "json count special", short_text),
    "detokenize": (SHOWN, "offline", values),
}  # fmt: skip

# Flags that are always there, but may be repeated.
FIRST = {"generate": ["-n2"], "batch": ["-n2"], "rank": ["--choices=a,b"]}


@st.composite
def command_lines(draw) -> list[str]:
    """Return a command with a few flags and switches, and mostly one argument."""
    command = draw(st.sampled_from(sorted(COMMANDS)))
    flags, switches, argument = COMMANDS[command]
    chosen = draw(st.lists(st.sampled_from(sorted(flags)), max_size=2, unique=True))
    chosen = [f"--{flag}={draw(flags[flag])}" for flag in chosen]
    chosen += [
        f"--{name}" for name in draw(st.lists(st.sampled_from(switches.split()), max_size=2))
    ]
    count = draw(st.sampled_from([1, 1, 1, 1, 0, 2]))
    arguments = [draw(argument) for _ in range(count)]
    first = FIRST.get(command, [])
    return [*command.split(), "--model=tiny", "--quiet", *first, *chosen, "--", *arguments]


@pytest.fixture
def here(tmp_path, monkeypatch, thread_variables):
    """Run commands in a folder with two files; nothing comes through a pipe."""
    monkeypatch.chdir(tmp_path)
    Path("in.txt").write_text("Once upon a time\n\nthere was\n", encoding="utf-8")
    Path("rows.jsonl").write_text('{"prompt": "Once", "top_k": 1}\n[]\n', encoding="utf-8")
    with Path(os.devnull).open(encoding="utf-8") as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        yield


@given(arguments=command_lines())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_error_of_any_flags_is_one_line_with_a_known_exit_code(here, capfd, arguments):
    code = app.run(arguments)
    out, err = capfd.readouterr()
    assert code in (0, 2, 5, 6)
    if code == 2:
        assert out == ""
    if code in (2, 5):
        assert err.startswith("gpt-cli: error: ")
        assert err.count("\n") == 1
    if code == 6:
        assert err.splitlines()[-1].startswith("gpt-cli: error: ")


# --- sampling ------------------------------------------------------------------------------------

valid_params = st.builds(
    SamplingParams,
    temperature=st.one_of(st.just(0), st.floats(1e-6, 1e6)),
    top_k=st.one_of(st.integers(0, 70), st.just(10**30)),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    repeat_penalty=st.floats(1e-6, 1e6),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
)
# Far larger than those of models, but no penalty or temperature makes them infinite.
logit = st.one_of(
    st.floats(-(2.0**66), 2.0**66, width=32),
    st.sampled_from([-math.inf, 0.0, -0.0, 1.0, 1e-45, -1e-45]).map(np.float32),
)
rows_of_logits = arrays(np.float32, st.tuples(st.just(2), st.integers(1, 70)), elements=logit)


@given(
    logits=rows_of_logits,
    params=valid_params,
    uniforms=st.tuples(st.floats(0, 1, exclude_max=True), st.just(1 - 2**-53)),
    data=st.data(),
)
def test_a_possible_token_is_drawn_with_any_parameters(ops, logits, params, uniforms, data):
    V = logits.shape[1]
    logits[:, data.draw(st.integers(0, V - 1))] = 1.5  # something is possible
    seen = data.draw(st.tuples(*[st.lists(st.integers(0, V - 1), min_size=1, max_size=5)] * 2))
    before = logits.copy()
    ids = sample(ops, logits, np.array(uniforms), params, seen, seen)
    assert np.array_equal(logits, before)
    for row, id in zip(logits, ids.tolist(), strict=True):
        assert 0 <= id < V
        assert math.isfinite(row[id])
