"""Rank continuations of prompts by their likelihood."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Literal, TypeAlias, get_args

from gpt_cli.errors import ContextError, InputError, counted
from gpt_cli.folder.tokenizer import Tokenizer
from gpt_cli.generation.loaded import LoadedModel
from gpt_cli.generation.prefix_cache import Prefix, begun_rows, common_length, passes
from gpt_cli.generation.sampling import log_probabilities
from gpt_cli.gpt2.edits import Bound
from gpt_cli.gpt2.model import GPT2
from gpt_cli.gpt2.prefill import row_states
from gpt_cli.ops import Array
from gpt_cli.options.arguments import check_type
from gpt_cli.options.declare import OptionError
from gpt_cli.scoring.score import measure_passes, measure_states

RankBy: TypeAlias = Literal["total", "token", "byte"]
_Branch: TypeAlias = tuple[list[int], Sequence[list[int]]]  # ids after a prefix, then one choice


@dataclass(frozen=True)
class Choice:
    """A continuation of a prompt, and its likelihood."""

    text: str  # without the prompt
    ids: list[int]  # its tokens, with the end of the prompt if that forms one token with a choice
    bytes: int  # of all ids, in UTF-8
    logprob: float  # of all ids, in nats
    probability: float  # normalized over the choices


@dataclass(frozen=True)
class Question:
    """A prompt and its continuations, as texts and as ids."""

    prompt: list[int]
    texts: Sequence[str]
    choices: Sequence[list[int]]
    edits: Sequence[Bound] = ()

    @classmethod
    def of_texts(
        cls, loaded: LoadedModel, prompt: str, choices: Sequence[str], edits: Sequence[str] = ()
    ) -> "Question":
        """Return the question about a prompt and choices; raise InputError for unusable ones."""
        check_type("choices", choices, Sequence[str])
        if not isinstance(prompt, str):
            raise InputError('a row needs a string "prompt"')
        if not choices or "" in choices:
            raise InputError("give at least one choice, and none that is empty")
        if duplicates := [text for text, number in Counter(choices).items() if number > 1]:
            raise InputError(f"duplicate choice {duplicates[0]!r:.40}")
        ids = loaded.prompt_ids(prompt)
        wholes = [loaded.prompt_ids(prompt + choice) for choice in choices]
        first: dict[tuple[int, ...], str] = {}  # choice with these ids
        for choice, whole in zip(choices, wholes, strict=True):
            if (other := first.setdefault(tuple(whole), choice)) != choice:
                pair = f"{other!r:.40} and {choice!r:.40}"
                raise InputError(f"choices {pair} have the same tokens in this model: remove one")
        shared = ids[: min(common_length(ids, whole) for whole in wholes)]
        if not shared:  # the prompt is empty, or part of the first token of a choice
            shared = loaded.prompt_ids("")
            wholes = [shared + ids for ids in wholes]
        longest, n_positions = max(map(len, wholes)), loaded.config.n_positions
        if longest > n_positions + 1:  # the last token is predicted, and not read
            raise ContextError(
                f"prompt and choice have up to {counted(longest, 'token')}, more than the model's "
                f"context of {n_positions:,}; shorten them"
            )
        bounds = loaded.bound_edits(edits, len(shared), longest)
        return cls(shared, choices, [ids[len(shared) :] for ids in wholes], bounds)


def rank(loaded: LoadedModel, questions: Sequence[Question], by: RankBy) -> list[list[Choice]]:
    """Rank the choices of questions, the likeliest first."""
    if by not in get_args(RankBy):
        raise OptionError("by", f"must be one of {', '.join(get_args(RankBy))}")
    logprobs = continuations(loaded, questions)
    return [_ranked(loaded.tokenizer, *pair, by) for pair in zip(questions, logprobs, strict=True)]


def _ranked(
    tokenizer: Tokenizer, question: Question, logprobs: list[list[float]], by: RankBy
) -> list[Choice]:
    """Return the choices with their probabilities, from the log-likelihoods of their tokens."""
    ids = question.choices
    totals = [math.fsum(row) for row in logprobs]
    sizes = [sum(map(len, tokenizer.pieces(row, question.prompt))) for row in ids]
    lengths = {"total": [1 for _ in ids], "token": [len(row) for row in ids], "byte": sizes}[by]
    means = [total / length for total, length in zip(totals, lengths, strict=True)]
    best = max(means)
    weights = [math.exp(mean - best) for mean in means]
    whole = math.fsum(weights)
    probabilities = (weight / whole for weight in weights)
    choices = map(Choice, question.texts, ids, sizes, totals, probabilities)
    return sorted(choices, key=lambda choice: choice.probability, reverse=True)


def continuations(loaded: LoadedModel, questions: Sequence[Question]) -> list[list[list[float]]]:
    """Return the log-likelihood of every token of the choices of questions.

    The tokens that prompts share at their beginning are computed once, and so is a prompt for all
    its choices.
    """
    if any(question.edits for question in questions):
        return _edited(loaded.model, questions)
    model, prefixes = loaded.model, loaded.prefixes
    logprobs: dict[int, list[list[float]]] = {}
    for n, indices in prefixes.groups([question.prompt for question in questions]):
        group = [questions[index] for index in indices]
        longest = max(len(question.prompt) for question in group) - n
        side_by_side = min(len(group), model.ops.pass_tokens // max(1, longest))
        # Choices take turns in the row of their prompt; if they are many, every choice has a row.
        if side_by_side < max(len(question.choices) for question in group):
            for index, question in zip(indices, group, strict=True):
                branches: list[_Branch] = [([], [ids]) for ids in question.choices]
                computed = _logprobs(model, prefixes.prefix(question.prompt), branches)
                logprobs[index] = [row for (row,) in computed]
        else:
            prefix = prefixes.prefix(group[0].prompt[:n])
            branches = [(question.prompt[n:], question.choices) for question in group]
            logprobs |= zip(indices, _logprobs(model, prefix, branches), strict=True)
    return [logprobs[index] for index in range(len(questions))]


def _edited(model: GPT2, questions: Sequence[Question]) -> list[list[list[float]]]:
    """Return what `continuations` does for questions with edits; nothing is shared."""
    rows = [(question, ids) for question in questions for ids in question.choices]
    wholes = [question.prompt + ids for question, ids in rows]
    firsts = [len(question.prompt) for question, _ in rows]
    edits = [question.edits for question, _ in rows]
    columns = iter(measure_passes(model, wholes, firsts, [log_probabilities], edits))
    return [[column for (column,) in islice(columns, len(q.choices))] for q in questions]


def _logprobs(model: GPT2, prefix: Prefix, branches: Sequence[_Branch]) -> list[list[list[float]]]:
    """Return the log-likelihoods of all tokens of the choices of branches."""
    logprobs: list[list[list[float]]] = [[] for _ in branches]
    choices = _states(model, prefix, branches)
    # The logits of many states at a time take less time.
    while part := list(islice(choices, model.ops.logits_rows)):
        indices, states, targets = zip(*part, strict=True)
        computed = measure_states(model, states, targets, [log_probabilities])
        for index, (row,) in zip(indices, computed, strict=True):
            logprobs[index].append(row)
    return logprobs


def _states(
    model: GPT2, prefix: Prefix, branches: Sequence[_Branch]
) -> Iterator[tuple[int, Array, list[int]]]:
    """Yield for every choice the index of its branch, the states that predict it, its tokens."""
    xp = model.ops.xp
    rests = [max(map(len, choices)) - 1 for _, choices in branches]
    lengths = [len(ids) for ids, _ in branches]
    capacity = max(map(sum, zip(lengths, rests, strict=True)))
    rows = begun_rows(model, prefix, len(branches), capacity)
    longest = list(map(max, lengths, rests))
    for indices in passes(longest, len(rows.lengths), model.ops.pass_tokens):
        beginnings, choices = zip(*(branches[index] for index in indices), strict=True)
        cache = rows.view(len(indices))
        states = row_states(model, beginnings, cache)
        ends = [xp.concatenate([prefix.states[-1:], x])[-1:] for x in states]
        begun = cache.lengths
        # One choice of every branch after the other: a branch has one row of the cache.
        for turn in zip_longest(*choices, fillvalue=[]):
            cache.lengths = begun
            after = row_states(model, [ids[:-1] for ids in turn], cache)
            for index, ids, end, x in zip(indices, turn, ends, after, strict=True):
                if ids:
                    yield index, xp.concatenate([end, x]), ids
