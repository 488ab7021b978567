"""Log-likelihoods of texts, and ranks of continuations."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from gpt_cli.errors import ContextError, InputError
from gpt_cli.generate import right_pad
from gpt_cli.kv_cache import KVCache
from gpt_cli.model import GPT2, PASS, hidden_states, unembed
from gpt_cli.ops import Array
from gpt_cli.sampling import log_probabilities
from gpt_cli.tokenizer import Tokenizer
from gpt_cli.words import Measure, Word

SLICE = 512  # rows of logits at a time; a row of GPT-2's takes 200 kB

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


RankBy: TypeAlias = Literal["total", "token", "byte"]


@dataclass(frozen=True)
class Choice:
    """One of several continuations of a prompt."""

    text: str
    ids: list[int]  # its tokens, with the prompt's end if that forms one token with any choice
    bytes: int  # of all ids, in UTF-8
    logprob: float  # of all ids, in nats
    probability: float  # normalized over the choices


@dataclass(frozen=True)
class _Window:
    """Tokens `start` to `end` of a text, scored from token `first` on."""

    text: int
    start: int
    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


def score(
    model: GPT2,
    tokenizer: Tokenizer,
    texts: Sequence[list[int]],
    stride: int | None = None,
    *,
    prefix: Sequence[int] = (),
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
        prefix: ids before each text, which are not part of its score.
        measures: fields of the score that are also filled, with what computes them.

    Raises:
        InputError: the stride is out of range.
        CheckpointError: the weights are damaged.
    """
    n_positions = model.config.n_positions
    stride = max(1, n_positions // 2) if stride is None else stride
    if not 1 <= stride < n_positions:
        raise InputError(f"stride must be from 1 to {n_positions - 1}, less than the context")
    texts = [[*prefix, *ids] for ids in texts]
    measures = {"token_logprobs": log_probabilities} | dict(measures or {})
    windows: list[_Window] = []
    for text, ids in enumerate(texts):
        windows += _windows(text, len(ids), n_positions, stride)
    columns: list[list[list[Any]]] = [[[None] * len(ids) for _ in measures] for ids in texts]
    windows.sort(key=len, reverse=True)
    while windows:
        rows = max(1, PASS // len(windows[0]))  # of similar length, as many as make one pass
        group, windows = windows[:rows], windows[rows:]
        # No token attends to the padding, which is on the right.
        inputs, _ = right_pad([texts[w.text][w.start : w.end - 1] for w in group])
        x = hidden_states(model, model.ops.xp.asarray(inputs))  # (B, T, C)
        # The state at a token predicts the next one.
        states = [x[row, w.first - w.start - 1 : len(w) - 1] for row, w in enumerate(group)]
        targets = [texts[w.text][w.first : w.end] for w in group]
        found = _measured(model, states, targets, list(measures.values()))
        for w, values in zip(group, found, strict=True):
            for column, some in zip(columns[w.text], values, strict=True):
                column[w.first : w.end] = some
    scores = []
    for ids, own in zip(texts, columns, strict=True):
        size = sum(len(tokenizer.token_bytes(id)) for id in ids[max(1, len(prefix)) :])
        fields = zip(measures, (column[len(prefix) :] for column in own), strict=True)
        scores.append(Score(ids[len(prefix) :], bytes_scored=size, **dict(fields)))
    return scores


def _windows(text: int, length: int, n_positions: int, stride: int) -> Iterator[_Window]:
    """Cut a text into windows; each token but the first is scored in one of them."""
    scored = 1
    for start in range(0, length, stride):
        end = min(start + n_positions, length)
        if scored < end:
            yield _Window(text, start, scored, end)
            scored = end


def common_beginning(rows: Sequence[Sequence[int]]) -> list[int]:
    """Return the longest common prefix of rows of ids."""
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
    """Rank continuations of a prompt, given as texts and as ids, the likeliest first.

    Raises:
        InputError: `by` is unknown, or a choice is empty, duplicate or does not fit the context.
        CheckpointError: the weights are damaged.
    """
    if not texts or "" in texts:
        raise InputError("give at least one choice, and none that is empty")
    if duplicates := [text for text, number in Counter(texts).items() if number > 1]:
        raise InputError(f"duplicate choice {duplicates[0]!r:.40}")
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
    choices = map(Choice, texts, ids, sizes, totals, (weight / whole for weight in weights))
    return sorted(choices, key=lambda choice: choice.probability, reverse=True)


def continuations(
    model: GPT2, prompt: list[int], choices: Sequence[list[int]]
) -> list[list[float]]:
    """Return the log-likelihood of each token of several continuations of one prompt.

    The prompt is computed once; each continuation starts from a copy of its keys and values. All
    have at least one token, and fit the context together with the prompt.

    Raises:
        CheckpointError: the weights are damaged.
    """
    xp = model.ops.xp
    cache = KVCache(model.config, model.ops, 1, len(prompt))
    # (1, C): predicts the first token of every choice
    start = hidden_states(model, xp.asarray([prompt]), cache)[0, -1:]
    found: dict[int, list[float]] = {}
    order = sorted(range(len(choices)), key=lambda place: len(choices[place]))
    rows = max(1, PASS // (len(prompt) + len(choices[order[-1]])))
    for begin in range(0, len(order), rows):
        places = order[begin : begin + rows]
        inputs, lengths = right_pad([choices[place][:-1] for place in places])
        states = [start] * len(places)
        if inputs.size:
            copies = cache.select([0] * len(places), len(prompt) + inputs.shape[1])
            x = hidden_states(model, xp.asarray(inputs), copies, lengths)
            states = [
                xp.concatenate([start, x[row, : len(choices[place]) - 1]])
                for row, place in enumerate(places)
            ]
        logprobs = _log_likelihoods(model, states, [choices[place] for place in places])
        found |= zip(places, logprobs, strict=True)
    return [found[place] for place in range(len(choices))]


def _log_likelihoods(
    model: GPT2, states: Sequence[Array], targets: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Return for each row the log-likelihoods of its targets (n,), predicted by states (n, C)."""
    return [row for (row,) in _measured(model, states, targets, [log_probabilities])]


def _measured(
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
