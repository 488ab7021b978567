"""How likely a text is to the model."""

import math
from dataclasses import dataclass

import numpy as np

from gpt_cli.errors import InputError
from gpt_cli.model import GPT2, checked_forward
from gpt_cli.sampling import log_probabilities
from gpt_cli.tokenizer import Tokenizer

_LARGEST_EXPONENT = 709  # math.exp of more than this overflows


@dataclass(frozen=True)
class Score:
    """Log-likelihoods in nats; the first token has nothing before it, and is not scored."""

    ids: list[int]
    token_logprobs: list[float | None]  # one for each of ids; the first is None
    bytes_scored: int  # in UTF-8, of the tokens that are scored

    @property
    def total_logprob(self) -> float:
        """The sum over the scored tokens."""
        return math.fsum(logprob for logprob in self.token_logprobs if logprob is not None)

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood of a scored token."""
        mean = -self.total_logprob / (len(self.ids) - 1)
        return math.exp(mean) if mean < _LARGEST_EXPONENT else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Negative log-likelihood in bits, per byte of the scored tokens."""
        return -self.total_logprob / math.log(2) / self.bytes_scored


def score(model: GPT2, tokenizer: Tokenizer, ids: list[int]) -> Score:
    """Score a text of 2 to n_positions tokens.

    Raises:
        InputError: the text is shorter or longer than that.
        CheckpointError: the logits are not finite, so the weights are damaged.
    """
    if not 2 <= len(ids) <= model.config.n_positions:
        raise InputError(
            f"the text has {len(ids)} tokens; from 2 to {model.config.n_positions} can be scored"
        )
    xp = model.ops.xp
    array = xp.asarray(np.array(ids))
    logits = checked_forward(model, array[None, :-1])[
        0
    ]  # (T - 1, V): those of the second token onwards
    logprobs = model.ops.to_host(log_probabilities(xp, logits, array[1:])).tolist()
    size = sum(len(tokenizer.token_bytes(id)) for id in ids[1:])
    return Score(ids, [None, *logprobs], size)
