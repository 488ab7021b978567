"""Scores token by token, and questions with choices."""

import pytest
from hypothesis import strategies as st

from gpt_cli.scoring.rank import Question, continuation_logprobs
from gpt_cli.scoring.score import score
from gpt_cli.texts.text import Text
from support.checkpoints import CONFIG, VOCAB
from support.models import exact_logprobs

N_POSITIONS = CONFIG["n_positions"]

texts = st.lists(st.integers(0, len(VOCAB) - 1), max_size=30)


def one_by_one(model, ids, position, context):
    """The log-likelihood of a token by the plainest means: a pass for it alone."""
    return exact_logprobs(model, ids[max(0, position - context) : position])[-1, ids[position]]


def same(model, expected):
    """Return numbers, or a record of some, to compare with: exact with the library, else near."""
    if model.ops.batch_invariant:
        return expected
    if isinstance(expected, dict):
        return {name: same(model, value) for name, value in expected.items()}
    if isinstance(expected, list | tuple):
        return type(expected)(same(model, value) for value in expected)
    return pytest.approx(expected, rel=1e-4, abs=1e-5) if isinstance(expected, float) else expected


def question(prompt, choices, names=None):
    """Return a question about ids; its choices are named 0, 1, ... by default."""
    names = names or [str(index) for index in range(len(choices))]
    return Question(Text(prompt, continuations=choices), names)


def score_ids(loaded, rows, stride=None, start=(), **options):
    """Return the scores of rows of ids, with the ids `start` before each."""
    texts = [Text([*start, *ids], len(start)) for ids in rows]
    return score(loaded, texts, stride, **options)


def logprobs_of(loaded, questions):
    """Return the log-likelihoods of the choices of questions."""
    return continuation_logprobs(loaded, [question.prompt for question in questions])
