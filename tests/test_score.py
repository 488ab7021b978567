import math

import numpy as np
import pytest

from gpt_cli.errors import InputError
from gpt_cli.model import forward
from gpt_cli.sampling import softmax
from gpt_cli.score import Score, score


def test_likelihoods_and_perplexity_are_those_of_transformers(engine, golden):
    reference = golden("score.json")
    result = engine.score(reference["text"])
    assert result.ids == reference["ids"]
    assert result.token_logprobs[0] is None
    assert result.token_logprobs[1:] == pytest.approx(reference["token_logprobs"], rel=1e-5)
    assert result.total_logprob == pytest.approx(sum(reference["token_logprobs"]), rel=1e-5)
    assert result.perplexity == pytest.approx(reference["perplexity"], rel=1e-5)


def test_each_token_is_scored_given_those_before_it(load_case, tokenizer):
    model, ids = load_case("untied"), [5, 200, 7, 7, 260]
    result = score(model, tokenizer, ids)
    for place in range(1, len(ids)):
        probabilities = softmax(np, forward(model, np.array([ids[:place]]))[:, -1])[0]
        exact = math.log(probabilities[ids[place]])
        assert result.token_logprobs[place] == pytest.approx(exact, rel=1e-4)


def test_the_sums_are_over_the_scored_tokens():
    result = Score([1, 2, 3], [None, -1.5, -0.5], bytes_scored=4)
    assert result.total_logprob == -2
    assert result.perplexity == pytest.approx(math.e)
    assert result.bits_per_byte == pytest.approx(2 / math.log(2) / 4)


def test_bits_per_byte_counts_the_bytes_after_the_first_token(engine):
    assert engine.score("aé😀").bytes_scored == 6


@pytest.mark.parametrize("count", [0, 1, 81])
def test_a_text_that_is_too_short_or_too_long_is_refused(load_case, tokenizer, count):
    with pytest.raises(InputError, match=f"the text has {count} tokens; from 2 to 80 can be"):
        score(load_case("hub"), tokenizer, [1] * count)


def test_the_longest_text_is_as_long_as_the_context(load_case, tokenizer):
    assert len(score(load_case("hub"), tokenizer, [1] * 80).token_logprobs) == 80
