"""How likely texts are to the model: scores of texts, and which of several continuations."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, takewhile
from typing import Literal, TypeAlias, get_args

import numpy as np

from gpt_cli.errors import ContextError, InputError
from gpt_cli.generate import right_pad
from gpt_cli.kv_cache import KVCache
from gpt_cli.model import GPT2, PASS, hidden_states, unembed
from gpt_cli.ops import Array
from gpt_cli.sampling import log_probabilities
from gpt_cli.tokenizer import Tokenizer

SLICE = 512  # rows of logits that exist at a time: one of GPT-2's takes 200 kB

_LARGEST_EXPONENT = 709  # math.exp of more than this overflows


@dataclass(frozen=True)
class Score:
    """Log-likelihoods in nats; the first token has nothing before it, and is not scored."""

    ids: list[int]
    token_logprobs: list[float | None]  # one for each of ids; the first is None
    bytes_scored: int  # in UTF-8, of the tokens that are scored

    @property
    def tokens_scored(self) -> int:
        """All but the first."""
        return max(0, len(self.ids) - 1)

    @property
    def total_logprob(self) -> float:
        """The sum over the scored tokens."""
        return math.fsum(logprob for logprob in self.token_logprobs if logprob is not None)

    @property
    def perplexity(self) -> float | None:
        """exp of the mean negative log-likelihood of a scored token; None where there is none."""
        if not self.tokens_scored:
            return None
        mean = -self.total_logprob / self.tokens_scored
        return math.exp(mean) if mean < _LARGEST_EXPONENT else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Negative log-likelihood in bits, per byte of the scored tokens; None if there is none."""
        if not self.tokens_scored:
            return None
        return -self.total_logprob / math.log(2) / self.bytes_scored


RankBy: TypeAlias = Literal["total", "token", "byte"]


@dataclass(frozen=True)
class Choice:
    """One of several continuations of a prompt."""

    text: str
    ids: list[int]  # its tokens, and those of the prompt's end where any choice melts into that
    bytes: int  # of all ids, in UTF-8
    logprob: float  # of all ids, in nats
    probability: float  # among the choices, by what they were compared by


@dataclass(frozen=True)
class _Window:
    """A stretch of a text, scored from its token `first` on, given those before."""

    text: int
    whole: list[int]
    start: int
    end: int
    first: int  # from the start

    @property
    def ids(self) -> list[int]:
        """Those of the text from start to end, of which windows share most."""
        return self.whole[self.start : self.end]

    def __len__(self) -> int:
        return self.end - self.start


def score(
    model: GPT2, tokenizer: Tokenizer, texts: Sequence[list[int]], stride: int | None = None
) -> list[Score]:
    """Score texts, of any length, side by side.

    A text longer than the context is seen through windows as long as the context, each `stride`
    tokens after the one before. A token is scored once, in the first window that holds it; so all
    but the first n_positions tokens have n_positions - stride tokens or more before them.

    Args:
        model: the weights.
        tokenizer: tells the bytes of the tokens.
        texts: the ids of each. Texts of fewer than 2 have nothing to score.
        stride: from 1 to n_positions - 1; by default half of the context.

    Raises:
        InputError: the stride is out of range.
        CheckpointError: the weights are damaged.
    """
    n_positions = model.config.n_positions
    stride = max(1, n_positions // 2) if stride is None else stride
    if not 1 <= stride < n_positions:
        raise InputError(f"stride must be from 1 to {n_positions - 1}, the context less one token")
    windows = [
        window
        for text, ids in enumerate(texts)
        for window in _windows(text, ids, n_positions, stride)
    ]
    logprobs: list[list[float | None]] = [[None] * len(ids) for ids in texts]
    for group in _side_by_side(windows):
        for window, found in zip(group, _score_windows(model, group), strict=True):
            scored = window.start + window.first
            logprobs[window.text][scored : scored + len(found)] = found
    sizes = [sum(len(tokenizer.token_bytes(id)) for id in ids[1:]) for ids in texts]
    return [Score(*parts) for parts in zip(texts, logprobs, sizes, strict=True)]


def _windows(text: int, ids: list[int], n_positions: int, stride: int) -> Iterator[_Window]:
    """Cut a text so that each token but the first is scored in one window."""
    scored = 1
    for start in range(0, len(ids), stride):
        end = min(start + n_positions, len(ids))
        if scored < end:
            yield _Window(text, ids, start, end, scored - start)
            scored = end


def _side_by_side(windows: list[_Window]) -> Iterator[list[_Window]]:
    """Group windows of nearly equal length, as many as make one pass."""
    windows = sorted(windows, key=len, reverse=True)
    place = 0
    while place < len(windows):
        rows = max(1, PASS // len(windows[place]))
        yield windows[place : place + rows]
        place += rows


def _score_windows(model: GPT2, windows: list[_Window]) -> list[list[float]]:
    """Log-likelihoods of the tokens of each window from its `first` on."""
    xp = model.ops.xp
    # Padding on the right is seen by no token before it.
    inputs, _ = right_pad([window.ids[:-1] for window in windows])
    x = hidden_states(model, xp.asarray(inputs))  # (B, T, C)
    # The state at a token predicts the next one.
    states = [x[row, w.first - 1 : len(w) - 1] for row, w in enumerate(windows)]
    return _log_likelihoods(model, states, [window.ids[window.first :] for window in windows])


def common_beginning(rows: Sequence[Sequence[int]]) -> list[int]:
    """Return the ids that all rows begin with."""
    alike = takewhile(lambda ids: len(set(ids)) == 1, zip(*rows, strict=False))
    return [ids[0] for ids in alike]


def rank(
    model: GPT2,
    tokenizer: Tokenizer,
    prompt: list[int],
    texts: Sequence[str],
    ids: Sequence[list[int]],
    by: RankBy,
) -> list[Choice]:
    """Compare continuations of a prompt, given as texts and as ids; the likeliest comes first.

    Raises:
        InputError: there is no such way to compare, or a choice is empty or there twice, or does
            not fit the context.
        CheckpointError: the weights are damaged.
    """
    if not texts or "" in texts or len(set(texts)) < len(texts):
        raise InputError("give at least one choice: none may be empty, none may be there twice")
    longest, n_positions = len(prompt) + max(map(len, ids)), model.config.n_positions
    if longest > n_positions:
        raise ContextError(
            f"prompt and choice have up to {longest} tokens, more than the model's context of "
            f"{n_positions}; shorten them"
        )
    if by not in get_args(RankBy):
        raise InputError(f"by must be one of {', '.join(get_args(RankBy))}")
    totals = [math.fsum(row) for row in continuations(model, prompt, ids)]
    sizes = [sum(len(tokenizer.token_bytes(id)) for id in row) for row in ids]
    lengths = {"total": [1 for _ in ids], "token": [len(row) for row in ids], "byte": sizes}[by]
    means = [total / length for total, length in zip(totals, lengths, strict=True)]
    best = max(means)
    weights = [math.exp(mean - best) for mean in means]
    whole = math.fsum(weights)
    choices = [
        Choice(text, row, size, total, weight / whole)
        for text, row, size, total, weight in zip(texts, ids, sizes, totals, weights, strict=True)
    ]
    return sorted(choices, key=lambda choice: choice.probability, reverse=True)


def continuations(
    model: GPT2, prompt: list[int], choices: Sequence[list[int]]
) -> list[list[float]]:
    """Log-likelihoods of each token of several continuations of one prompt.

    The prompt is computed once; each continuation, on from a copy of its keys and values.

    Args:
        model: the weights.
        prompt: ids, at least one.
        choices: ids, at least one each; none with the prompt longer than the context.

    Raises:
        CheckpointError: the weights are damaged.
    """
    xp = model.ops.xp
    cache = KVCache(model.config, model.ops, 1, len(prompt))
    # (1, C): what predicts the first token of every choice
    start = hidden_states(model, xp.asarray([prompt]), cache)[0, -1:]
    found: list[list[float]] = [[] for _ in choices]
    order = sorted(range(len(choices)), key=lambda place: len(choices[place]))
    rows = max(1, PASS // (len(prompt) + len(choices[order[-1]])))
    for begin in range(0, len(order), rows):
        places = order[begin : begin + rows]
        inputs, lengths = right_pad([choices[place][:-1] for place in places])
        states = [start] * len(places)
        if inputs.size:
            copies = cache.copies(len(places), len(prompt) + inputs.shape[1])
            x = hidden_states(model, xp.asarray(inputs), copies, lengths)
            states = [
                xp.concatenate([start, x[row, : len(choices[place]) - 1]])
                for row, place in enumerate(places)
            ]
        logprobs = _log_likelihoods(model, states, [choices[place] for place in places])
        for place, row in zip(places, logprobs, strict=True):
            found[place] = row
    return found


def _log_likelihoods(
    model: GPT2, states: Sequence[Array], targets: Sequence[Sequence[int]]
) -> list[list[float]]:
    """For each row, log-likelihoods of its targets (n,), each predicted by one of states (n, C)."""
    xp = model.ops.xp
    x = xp.concatenate(states)  # (N, C), whatever the rows
    ids = xp.asarray(np.concatenate([np.array(row) for row in targets]))
    slices = [slice(begin, begin + SLICE) for begin in range(0, len(x), SLICE)]
    values = chain.from_iterable(_slice_likelihoods(model, x[s], ids[s]) for s in slices)
    return [list(islice(values, len(row))) for row in targets]


def _slice_likelihoods(model: GPT2, x: Array, ids: Array) -> list[float]:
    """Log-likelihoods of ids (n,) by states x (n, C); when this returns, their logits are gone."""
    logits = unembed(model, x)
    return model.ops.to_host(log_probabilities(model.ops, logits, ids)).tolist()
