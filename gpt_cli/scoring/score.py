"""Log-likelihoods of texts."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from gpt_cli.errors import InputError
from gpt_cli.folder.tokenizer import Tokenizer
from gpt_cli.generation.prefix_cache import PrefixCache, states_after
from gpt_cli.generation.sampling import log_probabilities
from gpt_cli.gpt2.model import GPT2, unembed
from gpt_cli.ops import Array
from gpt_cli.scoring.words import Measure, Word

SLICE = 128  # rows of logits at a time; a row of GPT-2's takes 200 kB

_LARGEST_EXPONENT = 709  # math.exp of more than this overflows


@dataclass(frozen=True)
class Score:
    """Log-likelihoods in nats; the first token has nothing before it and is not scored.

    The start token can be put before it; then it is scored, too. The last four are None unless they
    were asked for.
    """

    ids: list[int]
    token_logprobs: list[float | None]  # of each id; None if it is not scored
    bytes_scored: int  # in UTF-8, of the tokens that are scored
    ranks: list[int | None] | None = None  # of each id by its probability; 1 is the likeliest
    entropies: list[float | None] | None = None  # of the distribution of each token, in nats
    initial_logprobs: list[float | None] | None = None  # see `words.among`
    words: list[Word] | None = None

    @property
    def tokens_scored(self) -> int:
        """Return the number of tokens that are scored: all, or all but the first."""
        return len(self.token_logprobs) - self.token_logprobs.count(None)

    @property
    def total_logprob(self) -> float:
        """Return the sum over the scored tokens."""
        return math.fsum(logprob for logprob in self.token_logprobs if logprob is not None)

    @property
    def perplexity(self) -> float | None:
        """Return exp of the mean negative log-likelihood of a token; None if none is scored."""
        if not self.tokens_scored:
            return None
        mean = -self.total_logprob / self.tokens_scored
        return math.exp(mean) if mean < _LARGEST_EXPONENT else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Return the negative log-likelihood in bits per scored byte; None if none is scored."""
        if not self.tokens_scored:
            return None
        return -self.total_logprob / math.log(2) / self.bytes_scored


def score(
    model: GPT2,
    tokenizer: Tokenizer,
    texts: Sequence[list[int]],
    stride: int | None = None,
    prefixes: PrefixCache | None = None,
    *,
    start: Sequence[int] = (),
    measures: Mapping[str, Measure] | None = None,
) -> list[Score]:
    """Score texts, given as ids, of any length side by side.

    A text longer than the context is scored in windows of the context's length, `stride` tokens
    apart (by default half of the context). A token is scored in the first window that has it, so
    all but the first n_positions tokens have at least n_positions - stride tokens before them.

    Args:
        model: the weights.
        tokenizer: of the texts.
        texts: their ids.
        stride: see above.
        prefixes: of texts that were computed before.
        start: ids before each text, which are not part of its score.
        measures: fields of the score that are also filled, with what computes them.

    Raises:
        InputError: the stride is out of range.
        CheckpointError: the weights are damaged.
    """
    texts = [[*start, *ids] for ids in texts]
    measures = {"token_logprobs": log_probabilities} | dict(measures or {})
    columns = of_tokens(model, texts, list(measures.values()), prefixes, stride)
    scores = []
    for ids, own in zip(texts, columns, strict=True):
        size = sum(len(tokenizer.token_bytes(id)) for id in ids[max(1, len(start)) :])
        fields = zip(measures, (column[len(start) :] for column in own), strict=True)
        scores.append(Score(ids[len(start) :], bytes_scored=size, **dict(fields)))
    return scores


def of_tokens(
    model: GPT2,
    texts: Sequence[list[int]],
    measures: Sequence[Measure],
    prefixes: PrefixCache | None = None,
    stride: int | None = None,
) -> list[list[list[Any]]]:
    """Return what each measure finds for each token of texts of any length, None for the first.

    Raises:
        InputError: the stride is out of range.
        CheckpointError: the weights are damaged.
    """
    n_positions = model.config.n_positions
    stride = max(1, n_positions // 2) if stride is None else stride
    if not 1 <= stride < n_positions:
        raise InputError(f"stride must be from 1 to {n_positions - 1}, less than the context")
    cut = [list(windows(len(ids), n_positions, stride)) for ids in texts]
    found = measured(
        model,
        [ids[w.start : w.end] for ids, each in zip(texts, cut, strict=True) for w in each],
        [w.first - w.start for each in cut for w in each],
        measures,
        prefixes or PrefixCache(model),
    )
    values_of = iter(found)
    columns: list[list[list[Any]]] = [[[None] * len(ids) for _ in measures] for ids in texts]
    for own, each in zip(columns, cut, strict=True):
        for w in each:
            for column, some in zip(own, next(values_of), strict=True):
                column[w.first : w.end] = some
    return columns


@dataclass(frozen=True)
class Window:
    """Tokens `start` to `end` of a text, scored from token `first` on."""

    start: int
    first: int
    end: int


def windows(length: int, n_positions: int, stride: int) -> Iterator[Window]:
    """Cut a text into windows; each token but the first is scored in one of them."""
    scored = 1
    for start in range(0, length, stride):
        end = min(start + n_positions, length)
        if scored < end:
            yield Window(start, scored, end)
            scored = end


def measured(
    model: GPT2,
    texts: Sequence[list[int]],
    firsts: Sequence[int],
    measures: Sequence[Measure],
    prefixes: PrefixCache,
) -> list[list[list[Any]]]:
    """Return what each measure finds for the tokens of texts, from their token `first` (>= 1) on.

    Each text has at least one such token, and fits the context. What texts have in common at their
    beginning is computed once.

    Raises:
        CheckpointError: the weights are damaged.
    """
    found: dict[int, list[list[Any]]] = {}
    inputs = [text[:-1] for text in texts]
    for n, places in prefixes.groups(inputs):
        prefix = prefixes.prefix(inputs[places[0]][:n])
        known: list[list[Any]] = [[] for _ in measures]  # of the tokens in the prefix
        if min(firsts[place] for place in places) < n:
            (known,) = of_targets(model, [prefix.states[:-1]], [prefix.ids[1:]], measures)
        rests = [inputs[place][n:] for place in places]
        for some, states in states_after(model, prefix, rests):
            group = [places[place] for place in some]
            begins = [max(n, firsts[place]) for place in group]
            # The state at a token predicts the next one.
            seen = [
                model.ops.xp.concatenate([prefix.states[-1:], x])[begin - max(n, 1) :]
                for x, begin in zip(states, begins, strict=True)
            ]
            targets = [texts[place][begin:] for place, begin in zip(group, begins, strict=True)]
            own = of_targets(model, seen, targets, measures)
            for place, values in zip(group, own, strict=True):
                before = [column[firsts[place] - 1 :] for column in known]
                found[place] = [a + b for a, b in zip(before, values, strict=True)]
    return [found[place] for place in range(len(texts))]


def of_targets(
    model: GPT2,
    states: Sequence[Array],
    targets: Sequence[Sequence[int]],
    measures: Sequence[Measure],
) -> list[list[list[Any]]]:
    """Return for each row what each measure finds: targets (n,), predicted by states (n, C)."""
    ops = model.ops
    x = ops.xp.concatenate(states)  # (N, C): all rows
    ids = ops.xp.asarray(np.concatenate(targets))
    found: list[list[Any]] = [[] for _ in measures]
    for begin in range(0, len(x), SLICE):
        some = slice(begin, begin + SLICE)
        logits = unembed(model, x[some])
        for values, measure in zip(found, measures, strict=True):
            values += ops.to_host(measure(ops, logits, ids[some])).tolist()
    columns = [iter(values) for values in found]
    return [[list(islice(column, len(row))) for column in columns] for row in targets]
