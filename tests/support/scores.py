"""Scores token by token, and questions with choices."""

import numpy as np
import pytest
from hypothesis import strategies as st

from gpt_cli.gpt2.model import forward
from gpt_cli.scoring.rank import Question
from support.checkpoints import CONFIG, VOCAB

N_POSITIONS = CONFIG["n_positions"]

texts = st.lists(st.integers(0, len(VOCAB) - 1), max_size=30)


def one_by_one(model, ids, place, context):
    """The log-likelihood of a token by the plainest means: a pass for it alone."""
    logits = forward(model, np.array([ids[max(0, place - context) : place]]))
    exact = logits[0, -1].astype(np.float64)
    return exact[ids[place]] - np.logaddexp.reduce(exact)


def same(model, logprobs):
    """Return log-probabilities to compare with: exact with the library, else approximate."""
    return logprobs if model.ops.name == "native" else pytest.approx(logprobs, rel=1e-4)


def question(prompt, choices):
    return Question(prompt, [str(index) for index in range(len(choices))], choices)
