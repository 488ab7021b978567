"""`--special` and `special` wherever a text becomes ids, and `--eos`."""

import json
import subprocess

import numpy as np
import pytest

import gpt_cli
from gpt_cli.errors import InputError
from support.checkpoints import CONFIG, write_checkpoint
from support.in_process import records_here, refusal, run_here
from support.processes import COMMAND

END = "<|endoftext|>"
TEXT = f"the fox{END} ran"
NOTE = (
    f"a text has the name of a special token, {END!r}, which is read as text: set special "
    "(--special) to read it as this token"
)
TINY = ["-m", "tiny"]


@pytest.fixture(scope="module")
def ids(tiny):
    (end,) = tiny.tokenizer.special.values()
    return [*tiny.encode("the fox"), end, *tiny.encode(" ran")]


def test_score_reads_special_tokens_in_all_forms(tiny, ids, tmp_path):
    expected = tiny.score(TEXT, special=True)
    assert expected.ids == ids
    whole, lines = (
        records_here("score", *TINY, "--special", *form, "--json", input=TEXT.encode())
        for form in ((), ("--lines",))
    )
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": TEXT}) + "\n")
    records = records_here("score", "-q", *TINY, "--special", "--format", "jsonl", rows)
    for (record,) in (whole, lines, records):
        assert record["total_logprob"] == expected.total_logprob


def test_a_row_wins_over_the_flag(tiny, tmp_path):
    rows = tmp_path / "rows.jsonl"
    fields = ({"special": False}, {"special": True}, {}, {"special": 1})
    rows.write_text("".join(json.dumps({"text": TEXT} | more) + "\n" for more in fields))
    command = ["score", "-q", *TINY, "--special", rows, "-o", tmp_path / "scores.jsonl"]
    run_here(*command, code=6)
    lines = (tmp_path / "scores.jsonl").read_text().splitlines()
    off, on, unset, bad = map(json.loads, lines)
    assert (off["tokens"], on["tokens"]) == (tiny.score(TEXT).tokens_scored + 1, unset["tokens"])
    assert on["tokens"] < off["tokens"]
    assert bad["error"]["message"] == "special must be true or false, not 1"


def test_rank_compare_and_activations_read_special_tokens(tiny, ids, tmp_path):
    (best, *_) = tiny.rank(f"the fox{END}", [" ran", f"{END}"], special=True)
    assert len(best.ids) == 1
    shown = records_here(
        "rank", *TINY, "--special", "--exact", "--choices", f" ran,{END}", f"the fox{END}"
    )
    assert {record["tokens"] for record in shown} == {1}
    out, _ = run_here("compare", "-q", "--special", "--json", "tiny", "tiny", input=TEXT.encode())
    assert json.loads(out)["tokens"] == len(ids) - 1
    output = tmp_path / "values.npz"
    hook = ["--hook", "hook_embed", "--pool", "mean", "-o", output]
    run_here("activations", "-q", *TINY, "--special", *hook, input=TEXT.encode())
    (expected,) = tiny.activations([TEXT], ["hook_embed"], pool="mean", special=True)
    assert np.array_equal(np.load(output)["hook_embed"], expected["hook_embed"][None])


def test_a_vector_reads_special_tokens(tiny):
    sets = [TEXT, "a"], ["b", "c"]
    read, plain = (tiny.vector(*sets, "hook_embed", special=special) for special in (True, False))
    assert not np.array_equal(read.vector, plain.vector)


def test_a_name_that_is_read_as_text_is_noted_once(caplog):
    engine = gpt_cli.load("tiny")
    engine.score_many([TEXT, "no name", TEXT])
    list(engine.stream(TEXT, max_tokens=1))
    assert caplog.messages == [NOTE]
    caplog.clear()
    engine = gpt_cli.load("tiny")
    engine.score(TEXT, special=True)
    assert caplog.messages == []


def test_the_note_is_on_standard_error_unless_quiet():
    for flags, notes in (([], f"gpt-cli: {NOTE}\n"), (["-q"], "")):
        command = [*COMMAND, "score", *TINY, *flags]
        process = subprocess.run(command, input=TEXT.encode(), capture_output=True, check=True)
        assert process.stderr.decode() == notes


def test_tokenize_notes_a_name_that_is_read_as_text(tiny, ids):
    out, notes = run_here("tokenize", *TINY, TEXT)
    assert out.decode().split() == list(map(str, tiny.encode(TEXT)))
    assert notes == f"gpt-cli: {NOTE}\n"
    assert run_here("tokenize", *TINY, "--special", TEXT) == (
        f"{' '.join(map(str, ids))}\n".encode(),
        "",
    )
    assert run_here("tokenize", "-q", *TINY, TEXT) == (out, "")


def test_the_end_token_is_scored_after_a_text(tiny, ids):
    end = ids[len(tiny.encode("the fox"))]
    scored = tiny.score("the fox", bos=True, eos=True)
    whole = tiny.score(f"the fox{END}", bos=True, special=True)
    assert scored.ids[-1] == end
    assert scored.token_logprobs == whole.token_logprobs
    assert scored.bytes_scored == len("the fox")  # the end token adds no byte to the text
    flags = ["--bos", "--eos", "--json"]
    (record,) = records_here("score", *TINY, *flags, input=b"the fox")
    assert record["total_logprob"] == scored.total_logprob


def test_a_model_without_an_end_token_has_none_to_score(tmp_path):
    folder = write_checkpoint(tmp_path, CONFIG | {"vocab_size": CONFIG["vocab_size"] - 1})
    with pytest.raises(InputError, match=r"eos \(--eos\) is set, and this model has no end token"):
        gpt_cli.load(folder).score("the fox", eos=True)
    assert "this model has no end token" in refusal("score", "--eos", "-m", folder, input=b"the")
