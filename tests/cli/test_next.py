"""`gpt-cli next` as a user meets it: records in a pipe, bars on a terminal."""

import json
import math

import numpy as np
import pytest

from gpt_cli.ops.numpy_ops import softmax
from support.in_process import records_here, refusal, terminal_here

NEXT = ["next", "--model", "tiny"]
PROMPT = "Every day, the fox"


def run(*arguments, **options):
    """Return the records of a command, best first."""
    records = records_here(*NEXT, *arguments, **options)
    assert [record["rank"] for record in records] == list(range(1, len(records) + 1))
    return records


def probabilities(tiny, ids):
    return softmax(tiny.logits([ids])[0, -1])


# --- in a pipe -----------------------------------------------------------------------------------


def test_the_tokens_are_the_likeliest_with_their_probabilities(tiny):
    records = run(PROMPT)
    exact = probabilities(tiny, tiny.encode(PROMPT))
    assert [record["id"] for record in records] == np.argsort(-exact, kind="stable")[:10].tolist()
    for record in records:
        keys = ["rank", "id", "token", "bytes", "logprob", "probability"]
        assert list(record) == keys
        assert record["probability"] == pytest.approx(exact[record["id"]], rel=1e-4)
        assert record["probability"] == pytest.approx(math.exp(record["logprob"]))
        assert bytes(record["bytes"]) == tiny.tokenizer.token_bytes(record["id"])
        assert record["token"] == tiny.decode([record["id"]])


def test_top_limits_the_number_of_tokens_to_at_most_all(tiny):
    few = run("-k", "3", input=f"{PROMPT}\n".encode())
    every = run(PROMPT, "--top", "1000000")
    assert few == every[:3]
    assert sorted(record["id"] for record in every) == list(range(tiny.model.config.vocab_size))
    assert math.fsum(record["probability"] for record in every) == pytest.approx(1)
    logprobs = [record["logprob"] for record in every]
    assert logprobs == sorted(logprobs, reverse=True)


# --- on a terminal -------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [300, 40])
def test_a_terminal_gets_bars_that_fit_and_are_as_long_as_the_tokens_are_likely(tiny, columns):
    code, shown = terminal_here(*NEXT, PROMPT, "-k", "20", columns=columns)
    *lines, end = shown.split("\r\n")
    assert (code, end) == (0, "")
    assert len(lines) == 20
    assert max(map(len, lines)) < columns
    exact = tiny.next_tokens(PROMPT, 20)
    bars = []
    for line, (id, logprob) in zip(lines, exact, strict=True):
        probability, rest = line.split(None, 1)
        assert probability == f"{math.exp(logprob):.2%}"
        token, bar = rest.rsplit('"', 1)
        assert json.loads(f'{token}"') == tiny.decode([id])
        assert set(bar.lstrip()) <= set("█▉▊▋▌▍▎▏")
        bars.append(sum((" ▏▎▍▌▋▊▉█".index(piece)) / 8 for piece in bar))
    assert bars == sorted(bars, reverse=True)
    assert bars[0] > columns / 3
    for bar, (_, logprob) in zip(bars, exact, strict=True):
        assert bar / bars[0] == pytest.approx(math.exp(logprob - exact[0][1]), abs=1 / 8 / bars[0])


# --- what cannot be used -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["once" + " once" * 511], "513 tokens, and the model's context is 512"),
        (["x", "-k", "0"], "--top"),
        (["--file", "/no/such/file"], "/no/such/file"),
        (["\udcff"], "Unicode"),
        ([], "standard input is empty: a text is needed\n"),
    ],
)
def test_bad_input_is_one_line_that_names_it_and_exit_code_2(arguments, what):
    assert what in refusal(*NEXT, *arguments)
