"""The likeliest texts of a search, their scores, and what happens beside it."""

from dataclasses import replace

import numpy as np
import pytest

from gpt_cli.generation.row import Request
from gpt_cli.options.request import Options
from support.models import completions_of

CASES = 50  # in the golden file


def hypotheses(completion):
    """Return the texts of a search, the best first."""
    return [completion, *completion.others]


# --- against transformers ------------------------------------------------------------------------


@pytest.mark.parametrize("case", range(CASES))
def test_ids_and_scores_are_those_of_transformers(load_case, tokenizer, golden, case):
    cases = golden("beams.json")
    assert len(cases) == CASES
    options = dict(cases[case])
    model, ends, prompt, expected = map(options.pop, ("model", "ends", "prompt", "hypotheses"))
    model = load_case(model)
    model = replace(model, config=replace(model.config, eos_token_id=tuple(ends)))
    (best,) = completions_of(model, tokenizer, [Request(prompt, Options(**options))])
    assert [text.ids for text in hypotheses(best)] == [text["ids"] for text in expected]
    scores = [text["score"] for text in expected]
    np.testing.assert_allclose([text.score for text in hypotheses(best)], scores, rtol=2e-5)
