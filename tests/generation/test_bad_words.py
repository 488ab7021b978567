"""Bad words do not appear, in whatever tokens they could be written, and nothing else changes."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gpt_cli.errors import InputError
from gpt_cli.folder.config import GPT2Config
from gpt_cli.generation.bad_words import bad_words
from gpt_cli.options.request import Options
from support.checkpoints import CONFIG, END, END_ID, VOCAB
from support.models import favouring, run

DRAWN = {"temperature": 1.5, "top_k": 0, "top_p": 1.0}
X = VOCAB["x"]

ids = st.lists(st.integers(0, len(VOCAB) - 1).filter(lambda id: id != END_ID), max_size=6)


@pytest.fixture(scope="session")
def config():
    return GPT2Config.from_dict(CONFIG)


@st.composite
def words_and_texts(draw):
    """Return ids of a text, and the places of words in the ids that follow."""
    text, after = draw(ids), draw(ids.filter(bool))
    return text, after, draw(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), min_size=1))


@given(case=words_and_texts())
def test_a_token_is_refused_if_it_completes_a_word(tokenizer, config, case):
    text, after, places = case
    size = config.vocab_size
    tokens = tokenizer.all_bytes(size)
    before = b"".join(tokens[id] for id in text)
    longer = before + b"".join(tokens[id] for id in after)
    parts = [longer[start : start + length] for start, length in places]
    words = [part.decode(errors="ignore") for part in parts]
    words = [word for word in words if word and word.encode() not in before]
    assume(words)
    rules = bad_words(tokenizer, config, words)
    allowed = rules.allowed(rules.end(b"", text))
    for id in range(size):
        whole = before + (b"" if id == END_ID else tokens[id])
        assert allowed[id] == (not any(word.encode() in whole for word in words))


def test_the_end_of_a_text_is_the_same_in_one_step_and_in_several(tokenizer, config):
    rules = bad_words(tokenizer, config, ["he said", "x"])
    ids = tokenizer.encode("and then he sai")
    end = b""
    for id in ids:
        end = rules.end(end, [id])
    assert end == rules.end(b"", ids) == b"he sai"
    assert bad_words(tokenizer, config, ["x"]).end(b"", ids) == b""


@pytest.mark.parametrize("params", [{"temperature": 0}, DRAWN, {"beams": 3, "temperature": 0}])
@pytest.mark.parametrize("words", [["x"], ["xx"], ["xxx", "x x"], [END, "x"]])
def test_a_word_that_the_model_favours_does_not_appear(make_model, tokenizer, params, words):
    model = favouring(make_model(), X)
    options = {"max_tokens": 20, "ignore_eos": True}
    (done,) = run(model, tokenizer, [[1]], params, bad_words=words, **options)
    assert (done.finish_reason, len(done.ids)) == ("length", 20)
    assert not any(word in done.text for word in words)
    (free,) = run(model, tokenizer, [[1]], params, **options)
    assert free.text == "x" * 20


def test_an_end_token_is_no_text(make_model, tokenizer):
    model = favouring(make_model(), END_ID)
    (done,) = run(model, tokenizer, [[1]], {"temperature": 0}, bad_words=[END, "end"])
    assert (done.finish_reason, done.ids) == ("eos", [END_ID])


def test_words_that_do_not_come_change_nothing(tiny):
    options = {"max_tokens": 60, "seed": 3}
    (free,) = tiny.generate(["Once upon a time"], **options)
    (done,) = tiny.generate(["Once upon a time"], bad_words=["Zebra", "quux"], **options)
    assert (done.text, done.logprobs) == (free.text, free.logprobs)


def test_the_prompt_may_have_a_word_and_its_beginning(make_model, tokenizer):
    model = favouring(make_model(), X)
    (done,) = run(model, tokenizer, [[X, X]], {"temperature": 0}, bad_words=["xx"], max_tokens=3)
    assert done.text[0] == "x"
    assert done.text[1] != "x"


def test_a_constraint_may_leave_only_what_is_banned(tiny):
    pytest.importorskip("llguidance")
    options = {"choices": [" yes", " no"], "bad_words": ["es"], "max_tokens": 9}
    likely = {"temperature": 3, "top_k": 0, "top_p": 1, "seed": 1}
    completions = tiny.generate(["A bear:"] * 20, **options, **likely)
    ends = {(done.text, done.finish_reason) for done in completions}
    assert ends == {(" y", "stuck"), (" no", "complete")}
    with pytest.raises(InputError, match="bad_words must leave a token to begin with"):
        tiny.generate(["A bear:"], choices=["no"], bad_words=["n"])
    with pytest.raises(InputError, match="bad_words must leave a token to begin with"):
        tiny.check_constraint(Options(choices=["no"], bad_words=["n"]))


def test_a_text_that_must_go_on_is_stuck_before_an_end_token(tiny):
    pytest.importorskip("llguidance")
    options = {"regex": "(ab)?", "bad_words": ["b"], "temperature": 0, "max_tokens": 5}
    (done,) = tiny.generate(["A bear:"], ignore_eos=True, **options)
    assert (done.text, done.finish_reason) == ("a", "stuck")


def test_tokens_without_bytes_cannot_be_compared(tiny, monkeypatch):
    monkeypatch.setattr("gpt_cli.generation.bad_words._vocabularies", {})
    monkeypatch.setattr(type(tiny.tokenizer), "has_bytes", False)
    with pytest.raises(InputError, match="bad_words needs the bytes of each token, which the"):
        tiny.generate(["a"], bad_words=["b"])
    (error,) = tiny.batch([{"prompt": "a", "bad_words": "b"}])
    assert isinstance(error, InputError)


def test_drafts_and_batches_change_nothing(tiny):
    words = {"bad_words": ["the", "lamb", "a "], "max_tokens": 80}
    prompts = [f"Once upon a time, {name}" for name in ("Emma", "Luna", "Tom")]
    together = tiny.generate(prompts, seed=2, **words)
    for index, done in enumerate(together):
        assert not any(word in done.text for word in words["bad_words"])
        row = {"prompt": prompts[index]} | words
        (alone,) = tiny.batch([row], Options(seed=2), indices=[index])
        assert (alone.text, alone.logprobs) == (done.text, done.logprobs)
    assert np.mean([len(done.ids) for done in together]) > 10
