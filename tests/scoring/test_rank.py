"""Ranks of continuations, and their likelihoods on a shared beginning."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt_cli.errors import InputError
from gpt_cli.ops import Ops
from gpt_cli.scoring.rank import Question, rank
from gpt_cli.texts.loaded import LoadedModel
from gpt_cli.texts.text import Text
from support.scores import N_POSITIONS, logprobs_of, one_by_one, question, same, score_ids, texts

# --- continuations -------------------------------------------------------------------------------


@given(
    prompt=texts.filter(bool), choices=st.lists(texts.filter(bool), min_size=1, max_size=6),
    a_pass=st.sampled_from([1, 100, 1024]),
)  # fmt: skip
@settings(max_examples=40)
def test_continuations_have_the_likelihoods_that_they_have_in_the_whole(
    load_case, tokenizer, prompt, choices, a_pass
):
    model = load_case("saved")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ops, "pass_tokens", a_pass)
        (actual,) = logprobs_of(LoadedModel(model, None), [question(prompt, choices)])
    for row, choice in zip(actual, choices, strict=True):
        (whole,) = score_ids(LoadedModel(model, tokenizer), [prompt + choice])
        assert row == same(model, whole.token_logprobs[len(prompt) :])


def test_the_prompt_is_computed_once(load_case, monkeypatch):
    model, passes = load_case("saved"), []
    computed = model.ops.embed

    def embed(wte, wpe, ids, positions):
        passes.append(ids.shape)
        return computed(wte, wpe, ids, positions)

    monkeypatch.setattr(type(model.ops), "embed", staticmethod(embed))
    query = question(list(range(50)), [[1], [2, 3], [4, 5, 6]])
    logprobs_of(LoadedModel(model, None), [query])
    assert passes == [(1, 50), (3, 2)]


# --- choices -------------------------------------------------------------------------------------

PROMPT = [5, 200, 7]
CHOICES = ["the end", "é😀", " and", "not"]


@pytest.mark.parametrize("by", ["total", "token", "byte"])
def test_choices_are_drawn_by_the_softmax_of_their_likelihoods(load_case, tokenizer, by):
    model, ids = load_case("untied"), [tokenizer.encode(text) for text in CHOICES]
    assert len({len(row) for row in ids}) > 2
    sizes = [len(text.encode()) for text in CHOICES]
    totals = []
    for row in ids:
        whole = PROMPT + row
        positions = range(len(PROMPT), len(whole))
        totals.append(
            sum(one_by_one(model, whole, position, N_POSITIONS) for position in positions)
        )
    lengths = {"total": np.ones(4), "token": [len(row) for row in ids], "byte": sizes}[by]
    odds = np.exp(np.divide(totals, lengths))
    order = np.argsort(-odds)
    (ranked,) = rank(LoadedModel(model, tokenizer), [question(PROMPT, ids, CHOICES)], by)
    for choice, position in zip(ranked, order.tolist(), strict=True):
        actual = choice.text, choice.ids, choice.bytes
        assert actual == (CHOICES[position], ids[position], sizes[position])
        assert choice.logprob == pytest.approx(totals[position], rel=1e-4)
        assert choice.probability == pytest.approx(odds[position] / odds.sum(), rel=1e-3)


@pytest.mark.parametrize(
    ("texts", "by", "complaint"),
    [
        ([], "total", "at least one choice"),
        (["a", ""], "total", "none that is empty"),
        (["a", "b", "a"], "total", "duplicate choice 'a'"),
        (["a"], "word", "by must be one of total, token, byte"),
    ],
)
def test_choices_that_cannot_be_ranked_are_refused(engine, texts, by, complaint):
    with pytest.raises(InputError, match=complaint):
        engine.rank("the", texts, by=by)


def test_prompt_and_choice_may_be_as_long_as_the_context(load_case, tokenizer):
    loaded = LoadedModel(load_case("untied"), tokenizer)
    ((only,),) = rank(loaded, [question([1], [[64] * 79], ["long"])], "total")
    assert only.logprob < -400  # the square of its probability is 0 in float64
    assert only.probability == 1
    longest = Question.of_row(
        loaded, {"prompt": "b", "choices": ["a", "a" * 80]}
    )  # the last token is not read
    assert [len(ids) for ids in longest.prompt.continuations] == [1, 80]
    with pytest.raises(InputError, match="82 tokens, more than the model's context of 80"):
        Question.of_row(loaded, {"prompt": "b", "choices": ["a", "a" * 81]})


@pytest.mark.parametrize(
    ("rows", "beginning"),
    [
        ([[1, 2, 3], [1, 2, 4]], [1, 2]),
        ([[1, 2], [1, 2, 4], [1, 2, 5]], [1, 2]),
        ([[1, 2, 3], [1, 2, 3, 4], [1, 5]], [1]),
        ([[1, 2, 3], [2, 2, 3]], []),
        ([[], [1, 2]], []),
    ],
)
def test_a_question_begins_with_the_ids_of_the_prompt_and_of_all_choices(rows, beginning):
    ids = {f"a{'b' * n}": row for n, row in enumerate(rows)} | {"": [9]}
    config = SimpleNamespace(n_positions=80)
    loaded = SimpleNamespace(
        config=config,
        prompt_ids=lambda prompt, special=False: ids[prompt],
        text_of_ids=lambda ids, _, continuations: Text(ids, continuations=continuations),
    )
    query = Question.of_row(
        loaded, {"prompt": "a", "choices": ["b" * n for n in range(1, len(rows))]}
    )
    start = [] if beginning else [9]
    prompt = query.prompt
    assert prompt.ids == start + beginning
    assert [prompt.ids + row for row in prompt.continuations] == [start + row for row in rows[1:]]


def test_a_choice_without_a_token_is_refused():
    ids = {"a": [1, 2], "ab": [1, 2, 3], "a ": [1, 2]}
    loaded = SimpleNamespace(
        config=SimpleNamespace(n_positions=80), prompt_ids=lambda prompt, special=False: ids[prompt]
    )
    with pytest.raises(InputError, match="choice ' ' adds no token in this model"):
        Question.of_row(loaded, {"prompt": "a", "choices": ["b", " "]})
