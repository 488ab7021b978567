"""Texts after a context, words by their own borders, and calibrated ranks."""

import json
import math

import pytest

import gpt_cli
from gpt_cli.errors import InputError
from support.families import write_family
from support.in_process import records_here, refusal, run_here

TINY = ["-m", "tiny"]
CONTEXT = "Once upon a time, there"


@pytest.fixture(scope="module")
def joined(tiny):
    """Return a function that scores the joined text as a whole."""

    def joined(context: str, text: str, **options):
        whole = tiny.score(context + text, **options)
        count = len(tiny.score(context + text).ids) - len(tiny.encode(context))
        return whole.token_logprobs[-count:]

    return joined


# --- context -------------------------------------------------------------------------------------


def test_a_text_after_a_context_has_the_numbers_that_it_has_in_the_whole(tiny, joined):
    scored = tiny.score(" was a fox.", context=CONTEXT, gaps=True)
    assert scored.token_logprobs == joined(CONTEXT, " was a fox.")
    assert scored.ids == tiny.encode(CONTEXT + " was a fox.")[-len(scored.ids) :]
    assert scored.tokens_scored == len(scored.ids)
    assert scored.bytes_scored == len(" was a fox.")
    whole = tiny.score(CONTEXT + " was a fox.", gaps=True)
    assert scored.gaps == whole.gaps[-len(scored.ids) :]


def test_a_token_across_the_border_belongs_to_the_text(tiny):
    scored = tiny.score("was a fox.", context=f"{CONTEXT} ", words=True)  # the token " was"
    assert scored.ids == tiny.encode(f"{CONTEXT} was a fox.")[-len(scored.ids) :]
    assert tiny.decode(scored.ids) == " was a fox."
    assert scored.bytes_scored == len("was a fox.")
    assert [(word.text, word.start) for word in scored.words] == [("was", 0), ("a", 4), ("fox.", 6)]
    inside = tiny.score("ce upon", context="On", words=True, bos=True)
    assert [(word.text, word.start, word.end) for word in inside.words] == [
        ("ce", 0, 2),
        ("upon", 3, 7),
    ]


def test_layers_and_words_of_a_text_after_a_context_are_those_of_the_whole(tiny):
    after = tiny.score(" was a fox", context=CONTEXT, layers=True, words=True)
    whole = tiny.score(CONTEXT + " was a fox", layers=True, words=True)
    count = len(after.ids)
    assert after.layers == whole.layers[-count:]
    assert [word.text for word in after.words] == ["was", "a", "fox"]
    for word, same in zip(after.words[1:], whole.words[-2:], strict=True):
        assert (word.surprisal, word.layers) == (same.surprisal, same.layers)


def test_every_form_of_score_takes_a_context(tiny, tmp_path):
    expected = tiny.score(" was a fox.", context=CONTEXT)
    flags = [*TINY, "--context", CONTEXT, "--json"]
    (whole,) = records_here("score", *flags, input=b" was a fox.")
    (line,) = records_here("score", *flags, "--lines", input=b" was a fox.\n")
    rows = tmp_path / "rows.jsonl"
    texts = (
        {"text": " was a fox."},
        {"text": " was a fox.", "context": "The"},
        {"text": " was a fox.", "prompt": "The"},
        {"text": " was a fox.", "context": 5},
    )
    rows.write_text("".join(json.dumps(row) + "\n" for row in texts))
    output = tmp_path / "scores.jsonl"
    run_here("score", "-q", *TINY, "--context", CONTEXT, rows, "-o", output, code=6)
    unset, context, prompt, bad = map(json.loads, output.read_text().splitlines())
    for record in (whole, line, unset):
        assert record["total_logprob"] == expected.total_logprob
        assert record["bits_per_byte"] == expected.bits_per_byte
    assert context["total_logprob"] == prompt["total_logprob"] != unset["total_logprob"]
    assert bad["error"]["message"] == "context must be a string, not 5"


def test_what_batch_writes_is_scored_after_its_prompts(tiny):
    out, _ = run_here("batch", "-q", *TINY, "-n", 5, "-s", 1, input=f"{CONTEXT}\n".encode())
    (record,) = records_here("score", "-q", *TINY, "--format", "jsonl", input=out)
    text = json.loads(out)["text"]
    assert record["total_logprob"] == tiny.score(text, context=CONTEXT).total_logprob


@pytest.mark.parametrize("family", ["fallback", "goldfish", "uer", "prefixed", "strips"])
def test_any_tokenizer_tells_the_context_from_the_text(family, tmp_path):
    pytest.importorskip("tokenizers")
    engine = gpt_cli.load(write_family(tmp_path, family))
    whole = engine.score("the fox was small")
    after = engine.score(" was small", context="the fox")
    count = len(after.ids)
    assert 0 < count < len(whole.ids)
    assert after.token_logprobs == whole.token_logprobs[-count:]
    assert after.bytes_scored == len(" was small")


def test_words_and_a_space_before_every_text_lose_no_token(tmp_path):
    pytest.importorskip("tokenizers")
    engine = gpt_cli.load(write_family(tmp_path, "prefixed"))
    plain, words = engine.score_many([{"text": "x"}, {"words": ["x"]}], bos=True)
    assert plain == words


def test_the_bytes_of_a_border_token_at_the_beginning_are_those_of_the_text(tiny):
    scored = tiny.score("e cat sat", context="Th")
    assert scored.bytes_scored == len(" cat sat")
    with pytest.raises(InputError, match="at least 2 tokens: the first has nothing before it"):
        tiny.score("e", context="Th")


def test_a_token_may_begin_within_the_last_character_of_the_context(tmp_path):
    pytest.importorskip("tokenizers")
    engine = gpt_cli.load(write_family(tmp_path, "german"))
    text = "\u9000 abc"
    for context in ("\u00da", "x\u4e2d", "\U0001f600"):
        (scored,) = engine.score_many([text], context=context, words=True, bos=True)
        assert scored.bytes_scored == len(text.encode())
        assert [word.end for word in scored.words] == [3, 7]


def test_only_score_reads_a_context(tiny):
    row = {"text": "a fox", "context": "There was ", "prompt": "x", "words": ["a"]}
    (plain,) = tiny.activations(["a fox"], ["hook_embed"])
    (same,) = tiny.activations([row], ["hook_embed"])
    assert (plain["hook_embed"] == same["hook_embed"]).all()


def test_words_of_a_table_need_no_text(tmp_path):
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"words": [["Once", " upon"], ["A", " fox"]]})
    pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "words.parquet")
    records = records_here(
        "score", "-q", *TINY, "--words", "-f", tmp_path / "words.parquet", "--format", "parquet"
    )
    assert [record["text"] for record in records] == ["Once upon", "A fox"]


def test_a_text_without_tokens_after_a_context_is_too_short():
    with pytest.raises(InputError, match="a text needs at least 1 token"):
        gpt_cli.load("tiny").score("", context="Once")


# --- words ---------------------------------------------------------------------------------------


def test_words_may_have_borders_of_their_own(tiny):
    text = "Once upon a time"
    (plain,) = tiny.score_many([text], words=True)
    spaces = {"words": ["Once", " upon", " a", " time"]}
    (same, joined) = tiny.score_many([spaces, {"words": ["Once upon", " a time"]}], words=True)
    assert same.words == plain.words
    assert [(word.text, word.start, word.end, word.tokens) for word in joined.words] == [
        ("Once upon", 0, 9, 2),
        ("a time", 10, 16, 2),
    ]
    (begun,) = tiny.score_many([{"words": ["Once upon", " a time"]}], words=True, bos=True)
    bits = -begun.total_logprob / math.log(2)
    assert sum(word.surprisal for word in begun.words) == pytest.approx(bits)


def test_words_without_spaces_between_them_have_no_correction(tmp_path):
    pytest.importorskip("tokenizers")
    engine = gpt_cli.load(write_family(tmp_path, "uer"))  # no token has bytes
    text = "从前有一只小狐狸住在河边。"
    words = ["从前", "有一只", "小狐狸", "住在", "河边。"]
    scored = engine.score_many([{"text": text, "words": words}], words=True)[0]
    assert [word.text for word in scored.words] == words
    assert [word.surprisal is None for word in scored.words] == [True, *[False] * 4]
    place = 0
    for word in scored.words:
        logprobs = scored.token_logprobs[place : place + word.tokens]
        if None not in logprobs:
            assert word.surprisal == pytest.approx(-math.fsum(logprobs) / math.log(2))
        place += word.tokens
    assert place == len(scored.ids)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"words": ["On", "ce"]}, "the words end within a token after 'On': divide them elsewhere"),
        ({"words": ["Once", " upon"], "text": "Once"}, 'the "words" of a row, joined, must be its'),
        ({"words": ["Once", ""]}, 'the "words" of a row must be a list of strings'),
        ({"words": "Once"}, 'the "words" of a row must be a list of strings'),
        ({"words": ["Once", 3]}, 'the "words" of a row must be a list of strings'),
    ],
)
def test_words_that_do_not_fit_are_an_error_of_the_row(tiny, row, says):
    (error,) = tiny.score_many([row], words=True)
    assert says in str(error)


def test_rows_of_words_need_no_text(tiny):
    row = json.dumps({"id": 1, "words": ["Once", " upon"]}).encode()
    (record,) = records_here("score", "-q", *TINY, "--format", "jsonl", "--words", input=row)
    assert record["text"] == "Once upon"
    assert [word["word"] for word in record["words"]] == ["Once", "upon"]


def test_the_last_word_counts_its_end_if_the_end_token_is_scored(tiny):
    ended = tiny.score("Once upon", bos=True, eos=True, words=True)
    plain = tiny.score("Once upon", bos=True, words=True)
    assert [word.text for word in ended.words] == ["Once", "upon"]
    end = (ended.initial_logprobs[-1] - ended.token_logprobs[-1]) / math.log(2)
    assert ended.words[-1].surprisal == pytest.approx(plain.words[-1].surprisal + end)


# --- calibrated ranks ----------------------------------------------------------------------------

PROMPT = "The moon was round and"
CHOICES = [" silver", " golden as ever", " hungry"]


@pytest.mark.parametrize("by", ["total", "token", "byte"])
@pytest.mark.parametrize("neutral", ["", "The"])
def test_a_calibrated_rank_compares_differences(tiny, by, neutral):
    plain = {choice.text: choice for choice in tiny.rank(PROMPT, CHOICES)}
    before = {choice.text: choice for choice in tiny.rank(neutral, CHOICES)}
    ranked = tiny.rank(PROMPT, CHOICES, by=by, calibrate=neutral)
    values = []
    for choice in ranked:
        assert choice.logprob == plain[choice.text].logprob
        assert choice.neutral_logprob == before[choice.text].logprob
        length = {"total": 1, "token": len(choice.ids), "byte": choice.bytes}[by]
        values.append((choice.logprob - choice.neutral_logprob) / length)
    weights = [math.exp(value - values[0]) for value in values]
    assert [choice.probability for choice in ranked] == pytest.approx(
        [weight / math.fsum(weights) for weight in weights]
    )
    assert values == sorted(values, reverse=True)


def test_the_edits_of_a_row_are_not_of_the_neutral_text(tiny):
    edits = ["blocks.0.hook_resid_pre@3=0"]
    row = {"prompt": PROMPT, "choices": CHOICES, "edits": edits}
    (ranked,) = tiny.rank_many([row], calibrate="")
    plain = {choice.text: choice for choice in tiny.rank(PROMPT, CHOICES, calibrate="")}
    for choice in ranked:
        assert choice.neutral_logprob == plain[choice.text].neutral_logprob
        assert choice.logprob != plain[choice.text].logprob


@pytest.mark.parametrize("flags", [["--context", "Once "], ["--eos"], ["--special"]])
def test_an_output_is_not_resumed_with_other_flags(flags, tmp_path):
    output = tmp_path / "scores.jsonl"
    command = ["score", "-q", *TINY, "-o", output]
    rows = tmp_path / "rows.txt"
    rows.write_text("the fox\nthe moon\n")
    run_here(*command, *flags, rows)
    assert f"{flags[0]} of {output} was" in refusal(*command, rows, "--resume")
    output.unlink()
    output.with_name(f".{output.name}.job.json").unlink()
    run_here(*command, rows)
    assert f"{flags[0]} of {output} was not set" in refusal(*command, *flags, rows, "--resume")


def test_rows_are_calibrated_as_single_prompts(tiny):
    rows = [(PROMPT, CHOICES), ("The fire was", CHOICES), ("A", CHOICES[:2])]
    together = tiny.rank_many(rows, calibrate="")
    assert together == [tiny.rank(*row, calibrate="") for row in rows]
    flags = ["--exact", "--choices", ",".join(CHOICES), "--calibrate", "", "--json", "--tokens"]
    lines = "".join(f"{prompt}\n" for prompt, _ in rows[:2]).encode()
    records = records_here("rank", "-q", *TINY, *flags, input=lines)
    for record, choices in zip(records, together[:2], strict=True):
        for shown, choice in zip(record["choices"], choices, strict=True):
            assert shown["neutral_logprob"] == choice.neutral_logprob
            assert [token["logprob"] for token in shown["logprobs"]] == choice.token_logprobs


def test_a_table_has_the_neutral_numbers(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    output = tmp_path / "ranks.parquet"
    flags = ["--choices", "a,b", "--calibrate", "x", "--tokens", "-o", output]
    run_here("rank", "-q", *TINY, *flags, input=b"Once\n")
    ((first, _),) = parquet.read_table(output)["choices"].to_pylist()
    assert first["neutral_logprob"] < 0
    assert first["logprobs"][0]["logprob"] < 0
    error = refusal("rank", "-q", *TINY, "--choices", "a,b", "--calibrate", "a " * 3000, "Once")
    assert "the text of calibrate (--calibrate) cannot be used: prompt and choice have up" in error
    error = refusal("rank", "-q", *TINY, "--choices", "a,b", "--tokens", input=b"Once\n")
    assert "--tokens of rows are in records: add --json, or --output OUT" in error
