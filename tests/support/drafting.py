"""Batches with drafts, planned in every possible way."""

import itertools
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from hypothesis import strategies as st

from gpt_cli.generation.row import Request
from gpt_cli.generation.speculate import MAX_ROW_DRAFTS, DraftPolicy
from gpt_cli.options.request import Options
from gpt_cli.texts.speculator import Speculator
from gpt_cli.texts.text import Text
from support.checkpoints import VOCAB


class FakeRow(SimpleNamespace):
    """The attributes of a row that drafts use."""

    matcher, indexed = None, 0

    def __init__(self, **attributes):
        super().__init__(ngrams={}, **attributes)


SMALL = {"n_head": 2, "n_layer": 2, "n_positions": 24}


@contextmanager
def planned(*plans):
    """Draft by plans, over and over: a number of drafts, and whether the draft model makes them."""
    following = itertools.cycle(plans)

    def plan(self, rows, sizes):
        count, by_model = next(following)
        count = min(count, max(sizes))
        return count, count > 0 and by_model and self._speculator.may_have_draft_model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftPolicy, "_plan", plan)
        yield


def speculating(model, draft_model):
    """Return a speculator that has its draft model already."""
    speculator = Speculator(model)
    speculator.draft_model = draft_model
    return speculator


OTHERS = {
    "max_tokens": [1, 2, 5, 12, 40],
    "min_tokens": [0, 0, 3, 20],
    "seed": list(range(10)),
    "ignore_eos": [False, True, True],
    "include_stop": [False, True],
    "stop": [(), (), ("a", "he"), tuple(chr(33 + byte) for byte in range(20))],
    "bad_words": [(), (), ("a", "he")],
    "overflow": ["error", "truncate", "shift"],
    "top_logprobs": [0, 0, 2],
}

options = st.fixed_dictionaries({name: st.sampled_from(some) for name, some in OTHERS.items()})

prompts = st.lists(st.integers(0, len(VOCAB) - 1), min_size=1, max_size=23)

plans = st.lists(st.tuples(st.integers(0, MAX_ROW_DRAFTS), st.booleans()), min_size=1, max_size=8)


def options_of(fields):
    """Return options whose `min_tokens` are at most their `max_tokens`."""
    return Options(**fields | {"min_tokens": min(fields["min_tokens"], fields["max_tokens"])})


def requests_of(rows):
    return [
        Request(Text(prompt), options_of(sampling | others), index)
        for index, (prompt, sampling, others) in enumerate(rows)
    ]
