"""Results as records: JSON and tables have the same fields, with the same values."""

import math
from dataclasses import replace
from io import BytesIO
from types import SimpleNamespace

import pytest

from gpt_cli import records
from gpt_cli.errors import ContextError, InputError, StuckError
from gpt_cli.generation.generate import Completion
from gpt_cli.jobs import Generation, Scoring, parquet
from gpt_cli.options.request import Options
from gpt_cli.records import ERROR, IDENTITY
from gpt_cli.scoring.score import Score
from gpt_cli.texts.text import Word


class Tokens:
    """Ids that are bytes."""

    def token_bytes(self, id):
        if id > 255:
            raise InputError("no such id")
        return bytes([id])

    def token_name(self, id):
        return self.token_bytes(id).decode(errors="replace")


ENGINE = SimpleNamespace(name="m", adapter="a", load_seconds=1.23456, tokenizer=Tokens())
COMPLETION = Completion(
    3, 7, "a\xe9", [97, 195, 300], [-0.5, -1.0, -2.0], [[(97, -0.5), (98, -1.5)], [], []],
    [0.12345, 0.2, 0.32345], "length", drafted=4, accepted=3,
)  # fmt: skip
DETAILED = Score(
    [97, 195], [None, -1.0], 2, [None, 3], [None, [-0.25, 0.75]], [None, 0.125],
    words=[Word("a", 1, 2, 3, None, [None, None]), Word("b", 4, 5, 1, 0.5, [2.0, 0.5])],
    layers=[[None, None], [-3.0, -1.0]],
)  # fmt: skip
A = {"id": 97, "token": "a", "bytes": [97], "logprob": -0.5}
FIRST = {"id": 195, "token": "\ufffd", "bytes": [195], "logprob": -1.0}
NONE = {"id": 300, "token": "<300>", "bytes": [], "logprob": -2.0}


def test_the_record_of_a_completion():
    record = {
        "text": "a\xe9",
        "finish_reason": "length",
        "seed": 7,
        "model": "m",
        "adapter": "a",
        "usage": {"prompt_tokens": 3, "completion_tokens": 3},
        "timing": {
            "load_s": 1.2346,
            "ttft_s": 0.1235,
            "decode_tok_s": 10.0,
            "drafted": 4,
            "accepted": 3,
        },
    }
    assert records.of_completion(ENGINE, COMPLETION) == record
    b = {"id": 98, "token": "b", "bytes": [98], "logprob": -1.5}
    told = [A | {"top": [A, b]}, FIRST | {"top": []}, NONE | {"top": []}]
    assert records.of_completion(ENGINE, COMPLETION, logprobs=True) == record | {"logprobs": told}


@pytest.mark.parametrize(
    ("seconds", "first", "rate"), [([], None, None), ([0.5], 0.5, None), ([0.5, 1.25], 0.5, 1.33)]
)
def test_a_rate_needs_two_tokens(seconds, first, rate):
    actual = records.timing(ENGINE, Completion(1, 1, seconds=seconds))
    assert actual | {"load_s": 1.2346, "ttft_s": first, "decode_tok_s": rate} == actual


def test_the_record_of_a_score():
    score = Score([97, 195], [None, -1.0], 2)
    record = {
        "model": "m",
        "adapter": "a",
        "tokens": 2,
        "tokens_scored": 1,
        "total_logprob": -1.0,
        "perplexity": math.e,
        "bits_per_byte": 0.5 / math.log(2),
    }
    assert records.of_score(ENGINE, score) == pytest.approx(record)
    told = records.of_score(ENGINE, score, logprobs=True)
    assert told.pop("logprobs") == [A | {"logprob": None}, FIRST]
    assert told == pytest.approx(record)
    assert records.of_score(ENGINE, Score([1, 2], [None, -1000.0], 1))["perplexity"] is None
    detailed = records.of_score(ENGINE, DETAILED, logprobs=True)
    figures = {"rank": 3, "entropy": 0.25, "mean": -0.25, "std": 0.75, "gap": 0.125}
    assert detailed["logprobs"] == [
        A | dict.fromkeys(["logprob", *figures]) | {"layers": [None, None]},
        FIRST | figures | {"layers": [-3.0, -1.0]},
    ]
    word = {"word": "b", "start": 4, "end": 5, "tokens": 1, "surprisal": 0.5}
    none = {"word": "a", "start": 1, "end": 2, "tokens": 3, "surprisal": None}
    assert detailed["words"] == [
        none | {"layers": [None, None]}, word | {"layers": [2.0, 0.5]}
    ]  # fmt: skip
    plain = records.of_score(ENGINE, replace(DETAILED, layers=None), min_k=100)
    assert plain["words"] == [none, word]
    assert (plain["min_k"], plain["min_k_plus_plus"]) == (-1.0, -1.0)
    certain = replace(DETAILED, moments=[None, [0.0, 0.0]])
    assert records.of_score(ENGINE, certain, min_k=100)["min_k_plus_plus"] is None


def test_the_record_of_an_error():
    for error, code in (
        (InputError("m"), "invalid_input"),
        (ContextError("m"), "context_overflow"),
        (StuckError("m"), "stuck"),
    ):
        assert records.of_error(error) == {"error": {"code": code, "message": "m"}}


def test_a_line_of_json_is_one_line():
    assert records.json_line({"a": "é\n"}) == '{"a": "é\\n"}\n'
    with pytest.raises(ValueError, match="JSON"):
        records.json_line(math.nan)


@pytest.mark.parametrize("logprobs", [False, True])
def test_a_table_has_all_fields_of_a_record(logprobs):
    table = pytest.importorskip("pyarrow.parquet")
    identity = {"index": 2**40, "id": "x"}
    score = records.of_score(ENGINE, DETAILED, logprobs=logprobs, min_k=20)
    searched = replace(COMPLETION, score=-0.25)
    completion = records.of_completion(ENGINE, searched, logprobs=logprobs)
    for task, record in (
        (
            Generation(Options(), logprobs=logprobs),
            identity | {"sample": 1, "samples": 2} | completion,
        ),
        (Scoring(logprobs=logprobs, words=True, layers=True, min_k=20), identity | score),
    ):
        schema = IDENTITY | task.schema | task.layout.origin | ERROR
        error = {"file": "f", "line": 2**40, "error": {"code": "c", "message": "m"}}
        stream = BytesIO()
        parquet.Parquet().write([record | error], schema, stream)
        assert table.read_table(stream).to_pylist() == [record | error]
