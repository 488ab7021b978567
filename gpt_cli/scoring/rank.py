"""Rank continuations of prompts by their likelihood."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile, zip_longest
from typing import Literal, TypeAlias, get_args

from gpt_cli.errors import ContextError, InputError
from gpt_cli.folder.tokenizer import Tokenizer
from gpt_cli.generation.prefix_cache import Prefix, PrefixCache, Slots, passes
from gpt_cli.generation.sampling import log_probabilities
from gpt_cli.gpt2.model import GPT2, PASS
from gpt_cli.ops import Array
from gpt_cli.scoring.score import SLICE, of_targets

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
class Question:
    """A prompt and its continuations, as texts and as ids. None is empty."""

    prompt: list[int]
    texts: Sequence[str]
    choices: Sequence[list[int]]

    def check(self, n_positions: int) -> None:
        """Raise InputError if a choice is empty, duplicate or does not fit the context."""
        if not self.texts or "" in self.texts:
            raise InputError("give at least one choice, and none that is empty")
        if duplicates := [text for text, number in Counter(self.texts).items() if number > 1]:
            raise InputError(f"duplicate choice {duplicates[0]!r:.40}")
        longest = len(self.prompt) + max(map(len, self.choices))
        if longest > n_positions + 1:  # the last token is predicted, and not read
            raise ContextError(
                f"prompt and choice have up to {longest} tokens, more than the model's context of "
                f"{n_positions}; shorten them"
            )


def rank(
    model: GPT2,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    by: RankBy,
    prefixes: PrefixCache | None = None,
) -> list[list[Choice]]:
    """Rank the choices of each question, the likeliest first.

    Raises:
        InputError: `by` is unknown.
        CheckpointError: the weights are damaged.
    """
    if by not in get_args(RankBy):
        raise InputError(f"by must be one of {', '.join(get_args(RankBy))}")
    found = continuations(model, questions, prefixes or PrefixCache(model))
    return [_ranked(tokenizer, *each, by) for each in zip(questions, found, strict=True)]


def _ranked(
    tokenizer: Tokenizer, question: Question, logprobs: list[list[float]], by: RankBy
) -> list[Choice]:
    """Return the choices with their probabilities, from the log-likelihoods of their tokens."""
    ids = question.choices
    totals = [math.fsum(row) for row in logprobs]
    sizes = [sum(len(tokenizer.token_bytes(id)) for id in row) for row in ids]
    lengths = {"total": [1 for _ in ids], "token": [len(row) for row in ids], "byte": sizes}[by]
    means = [total / length for total, length in zip(totals, lengths, strict=True)]
    best = max(means)
    weights = [math.exp(mean - best) for mean in means]
    whole = math.fsum(weights)
    probabilities = (weight / whole for weight in weights)
    choices = map(Choice, question.texts, ids, sizes, totals, probabilities)
    return sorted(choices, key=lambda choice: choice.probability, reverse=True)


def common_beginning(rows: Sequence[Sequence[int]]) -> list[int]:
    """Return the longest common prefix of rows of ids."""
    alike = takewhile(lambda ids: len(set(ids)) == 1, zip(*rows, strict=False))
    return [ids[0] for ids in alike]


def continuations(
    model: GPT2, questions: Sequence[Question], prefixes: PrefixCache
) -> list[list[list[float]]]:
    """Return the log-likelihood of each token of each choice of questions.

    What prompts have in common at their beginning is computed once, and so is each prompt, for all
    its choices.

    Raises:
        CheckpointError: the weights are damaged.
    """
    found: dict[int, list[list[float]]] = {}
    for n, places in prefixes.groups([question.prompt for question in questions]):
        group = [questions[place] for place in places]
        longest = max(len(question.prompt) for question in group) - n
        side_by_side = min(len(group), PASS // max(1, longest))
        # Choices take turns in the row of their prompt; if they are many, each has its own row.
        if side_by_side < max(len(question.choices) for question in group):
            for place, question in zip(places, group, strict=True):
                branches = [_Branch([], [ids]) for ids in question.choices]
                computed = _logprobs(model, prefixes.prefix(question.prompt), branches)
                found[place] = [logprobs for (logprobs,) in computed]
        else:
            prefix = prefixes.prefix(group[0].prompt[:n])
            branches = [_Branch(question.prompt[n:], question.choices) for question in group]
            found |= zip(places, _logprobs(model, prefix, branches), strict=True)
    return [found[place] for place in range(len(questions))]


@dataclass(frozen=True)
class _Branch:
    """Tokens after a prefix, and the choices that may follow them."""

    ids: list[int]
    choices: Sequence[list[int]]


def _logprobs(model: GPT2, prefix: Prefix, branches: Sequence[_Branch]) -> list[list[list[float]]]:
    """Return the log-likelihoods of all tokens of the choices of each branch."""
    found: list[list[list[float]]] = [[] for _ in branches]
    every = _states(model, prefix, branches)
    while some := list(islice(every, SLICE)):  # logits of many states at a time take less time
        places, states, targets = zip(*some, strict=True)
        computed = of_targets(model, states, targets, [log_probabilities])
        for place, (logprobs,) in zip(places, computed, strict=True):
            found[place].append(logprobs)
    return found


def _states(
    model: GPT2, prefix: Prefix, branches: Sequence[_Branch]
) -> Iterator[tuple[int, Array, list[int]]]:
    """Yield for each choice the place of its branch, the states that predict it, and its tokens."""
    xp = model.ops.xp
    rests = [max(map(len, each.choices)) - 1 for each in branches]
    lengths = [len(each.ids) for each in branches]
    longest = max(map(sum, zip(lengths, rests, strict=True)))
    slots = Slots(model, prefix, len(branches), longest)
    for places in passes(list(map(max, lengths, rests)), slots.rows):
        some = [branches[place] for place in places]
        slots.start(len(some))
        ends = [
            xp.concatenate([prefix.states[-1:], x])[-1:]
            for x in slots.append([each.ids for each in some])
        ]
        begun = slots.cache.lengths
        # One choice of each branch after the other: each branch has one row of the cache.
        for turn in zip_longest(*(each.choices for each in some), fillvalue=[]):
            slots.cache.lengths = begun
            after = slots.append([ids[:-1] for ids in turn])
            for place, ids, end, x in zip(places, turn, ends, after, strict=True):
                if ids:
                    yield place, xp.concatenate([end, x]), ids
