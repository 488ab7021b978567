"""Rank continuations of prompts by their likelihood."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, islice
from operator import attrgetter
from typing import Any, Literal, TypeAlias, get_args

from gpt_cli.errors import ContextError, InputError, brief, counted
from gpt_cli.folder.tokenizer import Tokenizer
from gpt_cli.options.arguments import check_type
from gpt_cli.options.declare import OptionError
from gpt_cli.options.edit import AnyEdit
from gpt_cli.texts.loaded import LoadedModel, special_of
from gpt_cli.texts.measures import log_probabilities, measure_states
from gpt_cli.texts.prefix_cache import common_length
from gpt_cli.texts.result import Recorded, beginning
from gpt_cli.texts.states import states
from gpt_cli.texts.text import Text

RankBy: TypeAlias = Literal["total", "token", "byte"]


@dataclass(frozen=True, repr=False)
class Choice(Recorded):
    """A continuation of a prompt, and its likelihood."""

    text: str  # without the prompt
    ids: list[int]  # its tokens, with the end of the prompt if that forms one token with a choice
    bytes: int  # of all ids, in UTF-8
    logprob: float  # of all ids, in nats
    probability: float  # normalized over the choices
    token_logprobs: list[float]  # of the ids
    neutral_logprob: float | None = None  # of the choice after a neutral text, if it counts

    @property
    def tokens(self) -> list[dict[str, Any]]:
        """Return the tokens as `gpt-cli rank --tokens --json`."""
        return self._tokens()

    def _facts(self) -> str:
        text = beginning(self.text)
        return f"{text}, probability {self.probability:.4g}, log-likelihood {self.logprob:.2f}"


@dataclass(frozen=True)
class Question:
    """A prompt, and choices that may follow it."""

    prompt: Text  # its continuations are the choices
    choices: Sequence[str]
    neutral: Text | None = None  # another prompt with the same choices: see `rank`

    @classmethod
    def of_row(
        cls,
        loaded: LoadedModel,
        row: Mapping[str, Any],
        *,
        special: bool = False,
        neutral: str | None = None,
    ) -> "Question":
        """Return the question of a row; raise InputError if it is not usable.

        The row has a "prompt" and "choices", and perhaps "edits" and "special", which replaces the
        argument. `neutral` is the neutral prompt; the start token, if it is empty. The edits of a
        row are of its prompt, and not of the neutral one.
        """
        prompt = row.get("prompt")
        choices = row.get("choices")
        check_type("choices", choices, Sequence[str])
        if not isinstance(prompt, str):
            raise InputError('a row needs a string "prompt"')
        if not choices or "" in choices:
            raise InputError("give at least one choice, and none that is empty")
        if duplicates := [text for text, number in Counter(choices).items() if number > 1]:
            raise InputError(f"duplicate choice {brief(duplicates[0])}")
        special = special_of(row, default=special)
        text_of = partial(_with_choices, loaded, choices=choices, special=special)
        question = cls(text_of(prompt, edits=row.get("edits")), choices)
        if neutral is None:
            return question
        try:
            return replace(question, neutral=text_of(neutral))
        except InputError as error:
            problem = f"the text of calibrate (--calibrate) cannot be used: {error}"
            raise InputError(problem) from None


def _with_choices(
    loaded: LoadedModel,
    prompt: str,
    choices: Sequence[str],
    *,
    special: bool,
    edits: AnyEdit | Sequence[AnyEdit] | None = None,
) -> Text:
    """Return a prompt whose continuations are choices; raise InputError if one adds no token."""
    ids = loaded.prompt_ids(prompt, special=special)
    wholes = [loaded.prompt_ids(prompt + choice, special=special) for choice in choices]
    first: dict[tuple[int, ...], str] = {}  # choice with these ids
    for choice, whole in zip(choices, wholes, strict=True):
        other = first.setdefault(tuple(whole), choice)
        if other != choice:
            pair = f"{brief(other)} and {brief(choice)}"
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
            raise InputError(f"choice {brief(choice)} adds no token in this model: remove it")
    return loaded.text_of_ids(shared, edits, continuations=continuations)


def rank(loaded: LoadedModel, questions: Sequence[Question], by: RankBy) -> list[list[Choice]]:
    """Rank the choices of questions, the likeliest first.

    With a neutral prompt, what counts is how much likelier the prompt makes a choice: the
    difference of its log-likelihoods after both. This is the pointwise mutual information of
    prompt and choice (Holtzman et al., arXiv 2104.08315; Zhao et al., arXiv 2102.09690, calibrate
    with a neutral text).
    """
    if by not in get_args(RankBy):
        raise OptionError("by", f"must be one of {', '.join(get_args(RankBy))}")
    logprobs = continuation_logprobs(loaded, [question.prompt for question in questions])
    neutral_logprobs = _neutral_logprobs(loaded, questions)
    return [
        _ranked(loaded.tokenizer, question, rows, neutral, by)
        for question, rows, neutral in zip(questions, logprobs, neutral_logprobs, strict=True)
    ]


def _neutral_logprobs(
    loaded: LoadedModel, questions: Sequence[Question]
) -> list[list[float] | None]:
    """Return the log-likelihoods of the choices of questions after their neutral prompts.

    Questions with the same choices often have the same neutral prompt, which is computed once.
    """
    distinct: dict[Any, Text] = {}
    keys: list[Any] = []
    for index, question in enumerate(questions):
        text = question.neutral
        key: Any = index
        if text is not None and text.is_plain:
            key = tuple(text.ids), tuple(map(tuple, text.continuations))
        if text is not None:
            distinct.setdefault(key, text)
        keys.append(key)
    computed = continuation_logprobs(loaded, list(distinct.values()))
    totals = {
        key: [math.fsum(row) for row in rows] for key, rows in zip(distinct, computed, strict=True)
    }
    return [totals.get(key) for key in keys]


def _ranked(
    tokenizer: Tokenizer,
    question: Question,
    logprobs: list[list[float]],
    neutral_logprobs: list[float] | None,
    by: RankBy,
) -> list[Choice]:
    """Return the choices with their probabilities, from the log-likelihoods of their tokens."""
    continuations = question.prompt.continuations
    sizes = [sum(map(len, tokenizer.pieces(ids, question.prompt.ids))) for ids in continuations]
    totals = [math.fsum(row) for row in logprobs]
    means = []
    for number, total in enumerate(totals):
        length = {"total": 1, "token": len(continuations[number]), "byte": sizes[number]}[by]
        neutral = neutral_logprobs[number] if neutral_logprobs else 0.0
        means.append((total - neutral) / length)
    best = max(means)
    weights = [math.exp(mean - best) for mean in means]
    whole = math.fsum(weights)
    choices = [
        Choice(
            text=text,
            ids=continuations[number],
            bytes=sizes[number],
            logprob=totals[number],
            probability=weights[number] / whole,
            token_logprobs=logprobs[number],
            neutral_logprob=neutral_logprobs[number] if neutral_logprobs else None,
        )
        for number, text in enumerate(question.choices)
    ]
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
