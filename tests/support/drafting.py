"""Batches with drafts, planned in every possible way."""

import itertools
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from hypothesis import strategies as st

from gpt_cli.generation.drafts import Speculator
from gpt_cli.generation.generate import Completion, generate
from gpt_cli.generation.row import Request
from gpt_cli.generation.speculate import MOST, Drafting
from gpt_cli.options.request import Options
from support.checkpoints import VOCAB


class ARow(SimpleNamespace):
    """A fake row, with the attributes that drafts read; hashable, as a key of their records."""

    matcher = None
    __hash__ = object.__hash__


SMALL = {"n_head": 2, "n_layer": 2, "n_positions": 24}


@contextmanager
def planned(*plans):
    """Draft by plans, over and over: a number of drafts, and whether the twin makes them."""
    following = itertools.cycle(plans)

    def plan(self, rows, room):
        count, by_twin = next(following)
        count = min(count, room)
        return count, count > 0 and by_twin and self._speculator.may_have_twin

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Drafting, "_plan", plan)
        yield


def speculating(model, twin):
    """Return a speculator with a twin that is made already."""
    speculator = Speculator(model)
    speculator.twin, speculator.has_twin = twin, True
    return speculator


def completions_of(model, tokenizer, requests, speculator=None):
    done = [Completion(len(row.prompt), row.seed) for row in requests]
    for step in generate(model, tokenizer, requests, speculator):
        done[step.row].add(step)
    return done


def outcomes(completions):
    """Return everything but times and drafts."""
    return [
        (row.text, row.ids, row.logprobs, row.top_logprobs, row.finish_reason)
        for row in completions
    ]


OTHERS = {
    "max_tokens": [1, 2, 5, 12, 40],
    "seed": list(range(10)),
    "ignore_eos": [False, True, True],
    "include_stop": [False, True],
    "stop": [(), (), ("a", "he"), tuple(chr(33 + byte) for byte in range(20))],
    "overflow": ["error", "truncate", "shift"],
    "top_logprobs": [0, 0, 2],
}

options = st.fixed_dictionaries({name: st.sampled_from(some) for name, some in OTHERS.items()})

prompts = st.lists(st.integers(0, len(VOCAB) - 1), min_size=1, max_size=23)

plans = st.lists(st.tuples(st.integers(0, MOST), st.booleans()), min_size=1, max_size=8)


def requests_of(rows):
    return [
        Request(prompt, Options(**sampling, **others), index)
        for index, (prompt, sampling, others) in enumerate(rows)
    ]
