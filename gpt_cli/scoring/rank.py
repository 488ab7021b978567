"""Rank continuations of prompts by their likelihood."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from operator import attrgetter
from typing import Any, Literal, TypeAlias, get_args

from gpt_cli.errors import ContextError, InputError, counted
from gpt_cli.folder.tokenizer import Tokenizer
from gpt_cli.options.arguments import check_type
from gpt_cli.options.declare import OptionError
from gpt_cli.texts.loaded import LoadedModel, special_of
from gpt_cli.texts.measures import log_probabilities, measure_states
from gpt_cli.texts.prefix_cache import common_length
from gpt_cli.texts.states import states
from gpt_cli.texts.text import Text

RankBy: TypeAlias = Literal["total", "token", "byte"]


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
    """A prompt, and choices that may follow it."""

    prompt: Text  # its continuations are the choices
    choices: Sequence[str]

    @classmethod
    def of_row(
        cls, loaded: LoadedModel, row: Mapping[str, Any], *, special: bool = False
    ) -> "Question":
        """Return the question of a row; raise InputError if it is not usable.

        The row has a "prompt" and "choices", and perhaps "edits" and "special", which replaces the
        argument.
        """
        prompt = row.get("prompt")
        choices = row.get("choices")
        special = special_of(row, default=special)
        check_type("choices", choices, Sequence[str])
        if not isinstance(prompt, str):
            raise InputError('a row needs a string "prompt"')
        if not choices or "" in choices:
            raise InputError("give at least one choice, and none that is empty")
        if duplicates := [text for text, number in Counter(choices).items() if number > 1]:
            raise InputError(f"duplicate choice {duplicates[0]!r:.40}")
        ids = loaded.prompt_ids(prompt, special=special)
        wholes = [loaded.prompt_ids(prompt + choice, special=special) for choice in choices]
        first: dict[tuple[int, ...], str] = {}  # choice with these ids
        for choice, whole in zip(choices, wholes, strict=True):
            other = first.setdefault(tuple(whole), choice)
            if other != choice:
                pair = f"{other!r:.40} and {choice!r:.40}"
                raise InputError(f"choices {pair} have the same tokens in this model: remove one")
        shared = ids[: min(common_length(ids, whole) for whole in wholes)]
        if not shared:  # the prompt is empty, or part of the first token of a choice
            shared = loaded.prompt_ids("")
            wholes = [shared + whole for whole in wholes]
        longest = max(map(len, wholes))
        n_positions = loaded.config.n_positions
        if longest > n_positions + 1:  # the last token is predicted, and not read
            raise ContextError(
                f"prompt and choice have up to {counted(longest, 'token')}, more than the model's "
                f"context of {n_positions:,}; shorten them"
            )
        continuations = [whole[len(shared) :] for whole in wholes]
        for choice, continuation in zip(choices, continuations, strict=True):
            if not continuation:
                raise InputError(f"choice {choice!r:.40} adds no token in this model: remove it")
        text = loaded.text_of_ids(shared, row.get("edits"), continuations=continuations)
        return cls(text, choices)


def rank(loaded: LoadedModel, questions: Sequence[Question], by: RankBy) -> list[list[Choice]]:
    """Rank the choices of questions, the likeliest first."""
    if by not in get_args(RankBy):
        raise OptionError("by", f"must be one of {', '.join(get_args(RankBy))}")
    logprobs = continuation_logprobs(loaded, [question.prompt for question in questions])
    return [
        _ranked(loaded.tokenizer, question, rows, by)
        for question, rows in zip(questions, logprobs, strict=True)
    ]


def _ranked(
    tokenizer: Tokenizer, question: Question, logprobs: list[list[float]], by: RankBy
) -> list[Choice]:
    """Return the choices with their probabilities, from the log-likelihoods of their tokens."""
    continuations = question.prompt.continuations
    totals = [math.fsum(row) for row in logprobs]
    sizes = [sum(map(len, tokenizer.pieces(ids, question.prompt.ids))) for ids in continuations]
    match by:
        case "total":
            lengths = [1] * len(totals)
        case "token":
            lengths = [len(ids) for ids in continuations]
        case "byte":
            lengths = sizes
    means = [total / length for total, length in zip(totals, lengths, strict=True)]
    best = max(means)
    weights = [math.exp(mean - best) for mean in means]
    whole = math.fsum(weights)
    choices = []
    columns = zip(question.choices, continuations, sizes, totals, weights, strict=True)
    for text, ids, size, total, weight in columns:
        choices.append(Choice(text, ids, size, total, weight / whole))
    return sorted(choices, key=lambda choice: choice.probability, reverse=True)


def continuation_logprobs(loaded: LoadedModel, prompts: Sequence[Text]) -> list[list[list[float]]]:
    """Return the log-likelihood of every token of the continuations of prompts.

    The tokens that prompts share at their beginning are computed once, and so is a prompt for all
    its continuations.
    """
    model = loaded.model
    measures = {"logprobs": log_probabilities}
    logprobs: dict[tuple[int, int], list[float]] = {}  # by prompt and continuation
    passes = states(model, prompts, prefixes=loaded.prefixes)
    for hook, group in groupby(passes, attrgetter("hook")):  # all plain prompts have one hook
        rows = (
            (row, row.continuation_index)
            for computed in group
            for row in computed.rows
            if row.continuation_index is not None
        )
        # The logits of many states at a time take less time.
        while part := list(islice(rows, model.ops.logits_rows)):
            x = model.ops.xp.concatenate([row.states for row, _ in part])
            targets = [prompts[row.text_index].continuations[number] for row, number in part]
            measured = measure_states(model, x, targets, measures, hook)
            for (row, number), columns in zip(part, measured, strict=True):
                logprobs[row.text_index, number] = columns["logprobs"]
    return [
        [logprobs[index, number] for number in range(len(prompt.continuations))]
        for index, prompt in enumerate(prompts)
    ]
