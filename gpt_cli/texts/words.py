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
from dataclasses import replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from gpt_cli.folder.config import GPT2Config
from gpt_cli.folder.tokenizer import Tokenizer
from gpt_cli.ops import Array, Ops
from gpt_cli.texts.measures import Measure, log_probabilities
from gpt_cli.texts.text import Text, Word

_ROWS = 4  # of logits at a time, which stay in the processor's cache


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


def split_words(tokenizer: Tokenizer, text: Text) -> list[Word]:
    r"""Return the words of a text without surprisal; all its tokens are in words, if there is one.

    White space divides words, unless the text has words of its own. It belongs to the word after
    it, or to the last word if none follows. A token with bytes of several words, such as
    " \xa0 \xa0", belongs to the first of them.
    """
    if text.words is not None:
        return list(text.words)
    ids = text.text_ids
    pieces = list(tokenizer.pieces(ids, text.context_ids))
    starts = list(accumulate(map(len, pieces), initial=-text.skipped))  # of the tokens, in bytes
    data = b"".join(pieces)[text.skipped :]
    spans = [match.span() for match in re.finditer(rb"\S+", data)]
    words = []
    first = 0  # token of the word
    for number, (start, end) in enumerate(spans, 1):
        last = len(ids) if number == len(spans) else bisect_left(starts, end)
        word = data[start:end].decode(errors="replace")
        words.append(Word(word, start, end, last - first, None))
        first = last
    return words


def find_words(
    tokenizer: Tokenizer,
    text: Text,
    logprobs: Sequence[float | None],
    initial_logprobs: Sequence[float | None],
) -> list[Word]:
    """Return the words of a text, from log-likelihoods of its tokens among all and initial ones.

    The last word does not count its end, because what follows the text is not known; unless an end
    token does. So the surprisals sum to the negative log-likelihood of the text, if all tokens are
    scored and there is a word. The end of a word before one without white space does not count.
    """
    words = split_words(tokenizer, text)
    cuts = list(accumulate((word.tokens for word in words), initial=0))
    pieces = tokenizer.pieces(text.text_ids, text.context_ids)
    starts = list(accumulate(map(len, pieces), initial=-text.skipped))
    scored = _with_nan(logprobs)
    initial = _with_nan(initial_logprobs)
    # Log-probabilities that the text so far is at the end of a word. At both ends of the text it is
    # assumed to be certain; if a token goes on with white space, that is part of the token.
    ends = [0.0] * len(cuts)
    for number, (word, cut) in enumerate(zip(words, cuts[1:], strict=True), 1):
        if cut == len(scored):  # the end of the text
            continue
        is_last = number == len(words)  # an end token follows
        if text.words is None and not is_last and starts[cut] != word.end:
            continue
        if not math.isnan(initial[cut]):
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
