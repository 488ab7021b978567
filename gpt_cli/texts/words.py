"""The surprisal of the words of a text, from the log-likelihoods of its tokens.

A token of GPT-2 begins with the space before its word, and nothing marks the end of a word. So the
product of the probabilities of a word's tokens is that of all words that begin like it, and the
token of the next word has the probability that this one ends here. With it moved to where it
belongs,

    p(word | context) = p(tokens of the word | context)
                        * p(the next token is initial | context, word)
                        / p(the next token is initial | context)

where initial tokens are those that can only follow the end of a word: those that begin with white
space, and the end of the text. Byung-Doh Oh and William Schuler, arXiv 2406.10851; Tiago Pimentel
and Clara Meister, arXiv 2406.14561.
"""

import math
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from gpt_cli.folder.config import GPT2Config
from gpt_cli.folder.tokenizer import Tokenizer
from gpt_cli.ops import Array, Ops
from gpt_cli.texts.measures import Measure, log_probabilities

_ROWS = 4  # of logits at a time, which stay in the processor's cache


@dataclass(frozen=True)
class Word:
    """A word of a text, which is split at white space."""

    text: str  # without white space
    start: int  # in bytes of the text in UTF-8
    end: int  # behind its last byte
    tokens: int  # those of its bytes and of the white space before it
    surprisal: float | None  # in bits; None if one of its tokens is not scored
    layers: list[float | None] | None = None  # surprisal after 0 to n_layer layers, if requested


def initial_tokens(tokenizer: Tokenizer, config: GPT2Config) -> NDArray[np.bool_]:
    """Return a mask of the ids (V,): tokens that begin with white space or end the text.

    White space is that of ASCII: its first byte shows it. The bytes of any other, such as a
    no-break space, may be divided among tokens; it counts as a character of a word.
    """
    size = config.vocab_size
    initial = np.array([token[:1].isspace() for token in tokenizer.all_bytes(size)])
    initial[[id for id in config.eos_token_id if id < size]] = True
    return initial


def among(allowed: NDArray[np.bool_]) -> Measure:
    """Return a measure: log-probabilities, normalized over the allowed ids; nan for other ids."""
    removing = np.where(allowed, 0, -np.inf).astype(np.float32)  # a bias

    def measure(ops: Ops, logits: Array, ids: Array) -> Array:
        xp = ops.xp
        logprobs = xp.full(len(ids), xp.nan)
        bias = xp.asarray(removing)
        indices = xp.flatnonzero(bias[ids] == 0)
        for begin in range(0, len(indices), _ROWS):
            rows = indices[begin : begin + _ROWS]
            logprobs[rows] = log_probabilities(ops, logits[rows] + bias, ids[rows])
        return logprobs

    return measure


def split_words(tokenizer: Tokenizer, ids: Sequence[int]) -> list[Word]:
    r"""Return the words of a text without surprisal; all its tokens are in words, if there is one.

    White space belongs to the word after it, or to the last word if none follows. A token with
    bytes of several words, such as " \xa0 \xa0", belongs to the first of them.
    """
    pieces = list(tokenizer.pieces(ids))
    starts = list(accumulate(map(len, pieces), initial=0))  # of the tokens, in bytes
    text = b"".join(pieces)
    spans = [match.span() for match in re.finditer(rb"\S+", text)]
    words = []
    first = 0  # token of the word
    for number, (start, end) in enumerate(spans, 1):
        last = len(ids) if number == len(spans) else bisect_left(starts, end)
        word = text[start:end].decode(errors="replace")
        words.append(Word(word, start, end, last - first, None))
        first = last
    return words


def find_words(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    logprobs: Sequence[float | None],
    initial_logprobs: Sequence[float | None],
) -> list[Word]:
    """Return the words of a text, from log-likelihoods of its tokens among all and initial ones.

    The last word does not count its end, because what follows the text is not known. So the
    surprisals sum to the negative log-likelihood of the text, if all tokens are scored and there is
    a word.
    """
    words = split_words(tokenizer, ids)
    cuts = list(accumulate((word.tokens for word in words), initial=0))
    starts = list(accumulate(map(len, tokenizer.pieces(ids)), initial=0))
    scored = _with_nan(logprobs)
    initial = _with_nan(initial_logprobs)
    # Log-probabilities that the text so far is at the end of a word. At both ends of the text it is
    # assumed to be certain; if a token goes on with white space, that is part of the token.
    ends = [0.0] * len(cuts)
    for number, (word, cut) in enumerate(zip(words[:-1], cuts[1:], strict=False), 1):
        if starts[cut] == word.end:
            ends[number] = scored[cut] - initial[cut]
    for number, word in enumerate(words):
        tokens = scored[cuts[number] : cuts[number + 1]]
        nats = ends[number] - math.fsum(tokens) - ends[number + 1]
        surprisal = None if math.isnan(nats) else nats / math.log(2)
        words[number] = replace(word, surprisal=surprisal)
    return words


def _with_nan(values: Sequence[float | None]) -> list[float]:
    """Return numbers, with nan in place of None."""
    return [math.nan if value is None else value for value in values]


def with_layers(words: Sequence[Word], layers: Sequence[Sequence[Word]]) -> list[Word]:
    """Return words with their surprisal after each layer, from the words of the layers."""
    results = []
    for number, word in enumerate(words):
        surprisal = [of_layer[number].surprisal for of_layer in layers]
        results.append(replace(word, layers=surprisal))
    return results
