"""Texts become ids and requests, or errors that say why not."""

from dataclasses import replace

import pytest

from gpt_cli.errors import ContextError, InputError
from gpt_cli.generation.row import Request
from gpt_cli.options.request import Options
from gpt_cli.texts.loaded import LoadedModel
from support.checkpoints import END, END_ID


@pytest.fixture
def loaded(make_model, tokenizer):
    return LoadedModel(make_model(n_positions=12), tokenizer)


def test_an_empty_prompt_is_the_start_token_and_an_empty_text_is_empty(loaded):
    assert loaded.text_ids("") == []
    assert loaded.prompt_ids("") == [END_ID] == loaded.text_ids(END, special=True)
    assert loaded.prompt_ids("the") == loaded.text_ids("the") == loaded.tokenizer.encode("the")


def test_ids_that_the_model_does_not_have_are_refused(loaded):
    model = replace(loaded.model, config=replace(loaded.config, vocab_size=5))
    with pytest.raises(InputError, match="the model has no token"):
        LoadedModel(model, loaded.tokenizer).text_ids("the")


def test_a_prompt_must_fit_the_context(loaded):
    assert len(loaded.prompt("a" * 12).ids) == 12
    with pytest.raises(ContextError, match="the prompt has 13 tokens"):
        loaded.prompt("a" * 13)


def test_the_draws_of_a_row_are_keyed_by_its_seed_or_its_index(loaded):
    defaults = Options(seed=3)
    assert Request.of_row(loaded, "a", defaults, 7).index == 7
    own = Request.of_row(loaded, {"prompt": "a", "seed": 5, "top_k": 2}, defaults, 7)
    assert (own.index, own.seed, own.options.top_k) == (0, 5, 2)


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"text": "a"}, "unknown field 'text'"),
        ({"seed": 1}, 'a row needs a string "prompt"'),
        ({"prompt": 3}, 'a row needs a string "prompt"'),
        ({"prompt": "a", "logit_bias": {"999": 1}}, "logit_bias has token 999, and"),
        ("a" * 12, "leaves no room"),
    ],
)
def test_a_row_that_cannot_be_continued_is_refused(loaded, row, error):
    with pytest.raises(InputError, match=error):
        Request.of_row(loaded, row, Options(), 0)
