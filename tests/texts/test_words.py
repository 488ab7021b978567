import math
import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt_cli.ops import Ops
from gpt_cli.texts.loaded import LoadedModel
from gpt_cli.texts.text import Text, Word
from gpt_cli.texts.words import among, find_words, initial_tokens
from support.checkpoints import CONFIG, END_ID
from support.models import exact_logprobs
from support.scores import score_ids

texts = st.text("ab,'\u00e9\u4e2d\xa0\u3000\x1c\x85 \t\n\r\x0b\x0c", max_size=30)
BITS = 1 / math.log(2)  # of a nat


class Pieces:
    """A tokenizer with these tokens."""

    def __init__(self, *pieces):
        self.tokens = pieces

    def token_bytes(self, id):
        return self.tokens[id]

    def pieces(self, ids, prompt=()):
        return map(self.token_bytes, ids)

    def all_bytes(self, vocab_size):
        return [*self.tokens, *[b""] * (vocab_size - len(self.tokens))]


def words_of(model, tokenizer, rows, start=(END_ID,)):
    """The words of texts, from ids."""
    measures = {"initial_logprobs": among(initial_tokens(tokenizer, model.config))}
    return [
        find_words(tokenizer, Text(result.ids), result.token_logprobs, result.initial_logprobs)
        for result in score_ids(LoadedModel(model, tokenizer), rows, start=start, measures=measures)
    ]


def probabilities(model, ids):
    """The distributions (T, V) of the tokens after `ids`, in float64."""
    return np.exp(exact_logprobs(model, ids))


# --- what a word is ------------------------------------------------------------------------------


@given(text=texts)
def test_words_are_what_ascii_white_space_divides(engine, text):
    scored, data = engine.score_many([text], words=True, bos=True)[0], text.encode()
    assert [word.text.encode() for word in scored.words] == data.split()
    assert all(data[word.start : word.end] == word.text.encode() for word in scored.words)
    assert sum(word.tokens for word in scored.words) == len(scored.ids) * bool(data.split())


def test_tokens_of_white_space_belong_to_the_next_word_and_at_the_end_to_the_last(engine):
    text = "a\n\n\tre  the  "
    assert [engine.decode([id]) for id in engine.encode(text)] == [
        "a", "\n\n", "\t", "re", " ", " the", "  "
    ]  # fmt: skip
    words = engine.score(text, words=True).words
    assert [(word.text, word.tokens) for word in words] == [("a", 1), ("re", 3), ("the", 3)]


@pytest.mark.parametrize("text", ["", " ", " \n\t "])
def test_white_space_alone_has_no_words(engine, text):
    assert engine.score_many([text], words=True, bos=True)[0].words == []


def test_a_token_of_several_words_belongs_to_the_first(make_model):
    tokenizer = Pieces(b"a", b" \xc2\xa0 \xc2\xa0", b" b")
    actual = find_words(tokenizer, Text([0, 1, 2]), [-1.0, -2.0, -4.0], [math.nan, -1.5, -3.0])
    assert actual == [
        Word("a", 0, 1, 1, pytest.approx(1.5 * BITS)),  # 0.5: it ends
        Word("\xa0", 2, 4, 1, pytest.approx(1.5 * BITS)),
        Word("\xa0", 5, 7, 0, pytest.approx(1 * BITS)),  # that is all: it ends
        Word("b", 8, 9, 1, pytest.approx(3 * BITS)),
    ]
    ends_inside = find_words(tokenizer, Text([0, 1]), [-1.0, -2.0], [math.nan, -1.5])
    assert [(word.tokens, word.surprisal) for word in ends_inside[1:]] == [
        (1, pytest.approx(1.5 * BITS)), (0, 0)
    ]  # fmt: skip


def test_initial_tokens_begin_with_white_space_or_end_the_text(engine):
    config = replace(engine.model.config, vocab_size=CONFIG["vocab_size"] + 3)
    actual = initial_tokens(engine.tokenizer, replace(config, eos_token_id=(7, END_ID, 10**6)))
    assert len(actual) == config.vocab_size
    pieces = {engine.tokenizer.token_bytes(id) for id in np.flatnonzero(actual) if id != 7}
    assert actual[7]
    assert pieces == {
        b" ", b"\t", b"\n", b"\r", b"\x0b", b"\x0c", b"\n\n", b"  ", b"    ", b" t", b" a", b" s",
        b" the", b" and", b"<|endoftext|>",
    }  # fmt: skip


# --- the probability of a word -------------------------------------------------------------------


def by_the_formula(model, tokenizer, ids):
    """The surprisals of words, as arXiv 2406.14561 writes it, by sums over the vocabulary."""
    initial = [
        id for id in range(model.config.vocab_size)
        if id == END_ID or tokenizer.token_bytes(id)[0] in b" \t\n\r\x0b\x0c"
    ]  # fmt: skip
    p = probabilities(model, [END_ID, *ids])
    before = b""
    actual = []
    for position, id in enumerate(ids):
        piece = tokenizer.token_bytes(id)
        if before[-1:].strip() and not piece[:1].strip():  # a word has ended
            ends = p[position, initial].sum()
            actual[-1] *= ends
            actual.append(1 / ends)
        elif not actual:
            actual.append(1)
        actual[-1] *= p[position, id]
        before += piece
    return -np.log2(actual)


@pytest.mark.parametrize(
    "text",
    [
        "the sand and the hering",
        "it's  a re, on\n\nhe\tll \xe9\u4e2d \U0001f600 the\u3000end",
        " 'll in   the\r\n and",
    ],
)
def test_surprisal_is_that_of_the_formula(load_case, tokenizer, text):
    model, ids = load_case("untied"), tokenizer.encode(text)
    (words,) = words_of(model, tokenizer, [ids])
    assert [word.text.encode() for word in words] == text.encode().split()
    expected = by_the_formula(model, tokenizer, ids)
    assert [word.surprisal for word in words] == pytest.approx(expected, rel=1e-4)


def test_the_probabilities_of_all_words_sum_to_one(make_model):
    """Enumerate all that can follow a text, up to 4 tokens: words, its end, and longer words."""
    tokenizer, names = Pieces(b"a", b"\xc2", b" b", b" ", b"\n\n", b"<end>"), "acBsnE"
    end, longest = 5, 4
    model = make_model(vocab_size=6, bos_token_id=end, eos_token_id=end)
    assert initial_tokens(tokenizer, model.config).tolist() == [False, False, *[True] * 4]
    context = [2, 0]
    whole = probabilities(model, [end, *context])[-1, 2:].sum()  # the word before ends
    words, others = [], []
    for length in range(1, longest + 1):
        for ids in product(range(6), repeat=length):
            shown = "".join(names[id] for id in ids)
            is_word = re.fullmatch("[sn]*B[ac]*|[sn]+[ac]+", shown)
            if is_word:
                words.append([*context, *ids, 2])
            goes_on = length == longest and (is_word or re.fullmatch("[sn]+", shown))
            if goes_on or re.fullmatch("[sn]*E", shown):
                p = probabilities(model, [end, *context, *ids])
                p_ids = math.prod(p[len(context) + position, id] for position, id in enumerate(ids))
                others.append(p_ids / whole * (p[-1, :2].sum() if is_word else 1))
    actual = [2 ** -of_text[1].surprisal for of_text in words_of(model, tokenizer, words, [end])]
    assert min(math.fsum(actual), math.fsum(others)) > 0.1
    assert math.fsum(actual + others) == pytest.approx(1, rel=1e-5)


@given(text=texts)
@settings(max_examples=30)
def test_surprisals_sum_to_the_likelihood_of_the_text(engine, text):
    scored = engine.score_many(["a" + text * 9], words=True, bos=True)[0]  # with several windows
    sum_of_words = math.fsum(word.surprisal for word in scored.words)
    assert sum_of_words == pytest.approx(-scored.total_logprob * BITS)


def test_a_word_whose_first_token_is_not_scored_has_no_surprisal(engine):
    first, *others = engine.score("hering and the", words=True).words
    assert (first.text, first.tokens, first.surprisal) == ("hering", 3, None)
    assert all(word.surprisal > 0 for word in others)


def test_the_last_word_does_not_count_its_end(engine):
    *shared, alone = engine.score("the sand", words=True, bos=True).words
    *same, followed, _ = engine.score("the sand is", words=True, bos=True).words
    assert same == shared
    assert followed.surprisal > alone.surprisal
    assert (followed.text, followed.tokens) == (alone.text, alone.tokens)


@given(batch=st.lists(texts, max_size=5))
@settings(max_examples=20)
def test_words_do_not_depend_on_other_texts_or_on_how_the_work_is_cut(engine, batch):
    together = engine.score_many(batch, words=True)
    for scored, text in zip(together, batch, strict=True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Ops, "logits_rows", 3)
            patch.setattr("gpt_cli.texts.words._ROWS", 2)
            (alone,) = engine.score_many([text], words=True)
        for word, expected in zip(scored.words, alone.words, strict=True):
            if not engine.model.ops.batch_invariant and expected.surprisal:
                expected = replace(expected, surprisal=pytest.approx(expected.surprisal, rel=1e-4))
            assert word == expected
