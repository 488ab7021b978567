"""Two models are compared by the distributions that they give to the same tokens."""

import json
import math
import shutil

import numpy as np
import pytest

from gpt_cli.checks.compare import compare
from gpt_cli.engine import Engine
from gpt_cli.errors import InputError
from gpt_cli.ops import Ops
from gpt_cli.texts.loaded import LoadedModel
from support.in_process import refusal, run_here

TEXTS = ["The sand is hering. " * 9, "", "a", "The sand"]  # the first is longer than the context


@pytest.fixture
def engines(make_model, tokenizer):
    return [Engine(LoadedModel(make_model(seed), tokenizer), f"m{seed}", 0.0) for seed in (0, 1)]


def logprobs_of(engine, ids, position):
    """Return the log-probabilities (V,) at a token, in the first window of `score` that has it."""
    n_positions = engine.model.config.n_positions
    stride = n_positions // 2
    start = max(0, math.ceil((position + 1 - n_positions) / stride)) * stride
    logits = engine.logits([ids[start:position]])[0, -1].astype(np.float64)
    return logits - np.logaddexp.reduce(logits)


def test_figures_are_those_of_the_distributions(engines, monkeypatch):
    monkeypatch.setattr(Ops, "logits_rows", 3)
    a, b = engines
    kl, same, own, places = [], [], [], []
    for text, ids in ((0, a.encode(TEXTS[0])), (3, a.encode(TEXTS[3]))):
        for position in range(1, len(ids)):
            p, q = (logprobs_of(engine, ids, position) for engine in engines)
            kl.append((np.exp(p) * (p - q)).sum())
            same.append(p.argmax() == q.argmax())
            own.append([p[ids[position]], q[ids[position]]])
            places.append((text, position))
    seen = []
    result = compare(a, b, TEXTS, seen.append)
    assert seen == [*range(1, len(kl) + 1)]
    assert result.tokens == len(kl) == sum(max(0, len(a.encode(text)) - 1) for text in TEXTS)
    median, p99 = np.percentile(kl, [50, 99])
    figures = {"mean": np.mean(kl), "median": median, "p99": p99, "max": max(kl)}
    assert result.kl == pytest.approx(figures, rel=1e-4)
    assert result.same_likeliest == pytest.approx(np.mean(same))
    assert result.perplexities == pytest.approx(np.exp(-np.mean(own, axis=0)).tolist(), rel=1e-5)
    ratio = result.perplexities[1] / result.perplexities[0]
    assert result.perplexity_ratio == pytest.approx(ratio)
    assert len(result.worst) == 10
    assert [token.kl for token in result.worst] == pytest.approx(sorted(kl)[:-11:-1], rel=1e-4)
    for token in result.worst:
        index = places.index((token.text, token.position))
        assert token.kl == pytest.approx(kl[index], rel=1e-4)
        assert token.logprobs == pytest.approx(own[index], rel=1e-4)
        ids = a.encode(TEXTS[token.text])
        assert token.token == a.decode(ids[token.position :][:1])
        assert token.before == a.decode(ids[: token.position][-8:])


def test_the_perplexity_is_that_of_score(engines):
    result = compare(*engines, TEXTS[:1])
    scores = [engine.score(TEXTS[0]).perplexity for engine in engines]
    assert result.perplexities == pytest.approx(scores)


def test_a_model_does_not_differ_from_itself(engines):
    result = compare(engines[0], engines[0], ["The sand"])
    assert set(result.kl.values()) == {0}
    assert (result.same_likeliest, result.perplexity_ratio) == (1, 1)


def test_models_with_other_tokens_cannot_be_compared(engines, tiny):
    with pytest.raises(InputError, match="m0 and tiny have different tokens"):
        compare(engines[0], tiny, ["The sand"])
    with pytest.raises(InputError, match="at least 2 tokens"):
        compare(*engines, ["", "a"])


def test_edits_are_refused(tiny):
    with pytest.raises(InputError, match="edits cannot be used in a comparison"):
        compare(tiny, tiny.with_edits(["hook_embed=0"]), ["Once upon"])
    assert "--edit" in refusal("compare", "tiny", "tiny", "--edit", "hook_embed=0")


# --- the command ---------------------------------------------------------------------------------

TEXT = "Once upon a time, there was a fox.\n"


@pytest.mark.usefixtures("library")
def test_the_command_prints_figures_and_the_tokens_that_differ_most(tmp_path, tiny):
    file, other = tmp_path / "text.txt", tmp_path / "other.txt"
    file.write_text(TEXT)
    other.write_text("The fox ran.")
    out, _ = run_here("compare", "tiny", "tiny@int8", "--json", file, other)
    told = json.loads(out)
    assert (told["a"], told["b"]) == ("tiny", "tiny@int8")
    assert told["tokens"] == len(tiny.encode(TEXT[:-1])) + len(tiny.encode("The fox ran.")) - 2
    assert 0 < told["kl"]["median"] <= told["kl"]["mean"] < told["kl"]["max"] < 0.01
    assert {token["file"] for token in told["worst"]} == {str(file), str(other)}
    lines = run_here("compare", "tiny", "tiny@int8", file, other)[0].decode().splitlines()
    assert lines[0] == f"tokens            {told['tokens']}"
    assert lines[1] == f"KL(A || B), mean  {told['kl']['mean']:.3g} nats"
    assert lines[5] == f"same likeliest    {told['same_likeliest']:.2%}"
    assert f"ratio B / A {told['perplexity_ratio']:.6g}" in lines[6]
    assert {line.split()[-1] for line in lines[9:]} == {str(file), str(other)}
    piped, _ = run_here("compare", "tiny", "tiny@int8", input=TEXT.encode())
    assert str(file) not in piped.decode()


def test_equal_models_have_no_table_and_files_without_two_tokens_are_noted(tmp_path):
    file, short = tmp_path / "text.txt", tmp_path / "short.txt"
    file.write_text(TEXT)
    short.write_text("a")
    out, notes = run_here("compare", "tiny", "tiny", file, short)
    assert len(out.splitlines()) == 7
    assert notes == f"gpt-cli: {short} has fewer than 2 tokens: nothing to compare\n"
    assert run_here("compare", "tiny", "tiny", file, short, "-q")[1] == ""


@pytest.mark.parametrize(
    ("flags", "texts"),
    [
        (["--format", "csv", "--delimiter", ";"], ["The fox ran.", "One; two."]),
        (["--format", "lines"], ["id;text", "1;The fox ran.", '2;"One; two."']),
        (["--format", "text"], ['id;text\n1;The fox ran.\n2;"One; two."']),
    ],
)
def test_a_flag_says_the_format_of_the_texts(flags, texts, tiny):
    table = b'id;text\n1;The fox ran.\n2;"One; two."\n'
    out, _ = run_here("compare", "tiny", "tiny", "--json", *flags, input=table)
    assert json.loads(out)["tokens"] == sum(len(tiny.encode(text)) - 1 for text in texts)


def test_a_folder_may_have_an_at_sign_in_its_name(case_folder, tmp_path):
    folder = tmp_path / "a@b"
    shutil.copytree(case_folder("saved"), folder)
    out, _ = run_here("compare", folder, f"{folder}@float32", "--json", input=b"The sand")
    assert json.loads(out)["kl"]["max"] == 0


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["tiny", "tiny@int9"], 'dtype must be one of auto, float32, bfloat16, float16, int8, not'),
        (["tiny"], "B is missing"),
        (["tiny", "tiny", "missing.txt"], "cannot read missing.txt"),
    ],
)  # fmt: skip
def test_an_error_says_what_is_wrong(arguments, what):
    assert what in refusal("compare", *arguments, input=b"Once upon")
