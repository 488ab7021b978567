"""Scores token by token, and questions with choices."""

import pytest
from hypothesis import strategies as st

from gpt_cli.scoring.rank import Question
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


def question(prompt, choices):
    return Question(prompt, [str(index) for index in range(len(choices))], choices)
