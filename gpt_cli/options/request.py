"""The options of a request. Nothing here imports NumPy, because `--help` reads them."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import inf, log
from typing import Any, Literal, Self, TypeAlias, TypedDict, get_args

from gpt_cli.errors import brief
from gpt_cli.options.constraint import Constraint, ConstraintKind
from gpt_cli.options.declare import (
    AT_LEAST_0,
    BIASES,
    IDS,
    LIMIT,
    SCHEMA,
    SEED,
    Declared,
    OptionError,
    OptionTypeError,
    Range,
    Token,
    between,
    option,
    split_commas,
)
from gpt_cli.options.edit import EDITS, AnyEdit

Overflow: TypeAlias = Literal["error", "truncate", "shift"]

CONSTRAINTS = get_args(ConstraintKind)

# The range of a divisor of logits; outside of it, float32 soon gives 0 or infinity.
_DIVISORS = Range(lambda divisor: 1e-6 <= divisor <= 1e6, "from 1e-06 to 1e+06")
_TEMPERATURES = Range(lambda t: t == 0 or _DIVISORS.contains(t), f"0, or {_DIVISORS.name}")
_TOP_P = Range(lambda p: 0 < p <= 1, "above 0 and at most 1")
_BIASES = Range(
    lambda biases: all(
        (isinstance(token, str) or token >= 0) and -100 <= bias <= 100 for token, bias in biases
    ),
    "token ids or texts with numbers from -100 to 100",
)
# The filters of a draw, with the values at which they keep all tokens.
_FILTERS = {"top_k": 0, "top_p": 1, "min_p": 0, "typical_p": 1}
_KERNEL_FILTERS = {"top_k", "top_p", "min_p"}  # of the kernels in C and CUDA
# Options of a draw and of a beam search, with the values that the other may have.
_OF_DRAW = {"temperature": 0} | _FILTERS
OF_SEARCH = {"length_penalty": 1, "early_stopping": False}
SAMPLES = between(1, 10_000)  # of one prompt
CHOICES = Range(lambda texts: texts and "" not in texts, "one or more texts that are not empty")


def _is_word(text: str) -> bool:
    """Return whether a text can appear in UTF-8."""
    try:
        return bool(text.encode())
    except UnicodeEncodeError:
        return False


@dataclass(frozen=True, kw_only=True)
class SamplingParams(Declared):
    """The options of sampling; `gpt_cli.generation.sampling` applies them."""

    temperature: float = option(
        0.8,
        "Higher is more random; 0 always takes the likeliest token.",
        _TEMPERATURES,
        aliases=("--temp",),
    )
    top_k: int = option(40, "Keep the k likeliest tokens; 0 keeps all.", AT_LEAST_0)
    top_p: float = option(
        0.95, "Keep the fewest tokens whose probabilities sum to this; 1 keeps all.", _TOP_P
    )
    min_p: float = option(
        0.0,
        "Drop tokens less likely than this fraction of the likeliest; 0 drops none.",
        between(0, 1),
    )
    typical_p: float = option(
        1.0,
        "Keep the tokens whose surprise is nearest to the expected one, of this total probability; "
        "1 keeps all.",
        _TOP_P,
    )
    repeat_penalty: float = option(
        1.0, "Make tokens that are already in the text less likely; 1 is off.", _DIVISORS
    )
    presence_penalty: float = option(
        0.0,
        "Subtract this from the logit of every token that was already generated.",
        between(-2, 2),
    )
    frequency_penalty: float = option(
        0.0,
        "Subtract this from the logit of a token for each time it was generated.",
        between(-2, 2),
    )
    no_repeat_ngram: int = option(
        0, "Let no N tokens in a row occur twice in the text; 0 is off.", AT_LEAST_0, metavar="N"
    )
    logit_bias: Sequence[tuple[Token, float]] = option(
        (),
        "Add BIAS to the logit of a token, by its id or its text, such as -100 to ban it; "
        "repeatable.",
        _BIASES,
        kind=BIASES,
        metavar="TOKEN=BIAS",
    )

    @property
    def log_min_p(self) -> float:
        """Return the logarithm of `min_p`; -inf if that drops no token."""
        return log(self.min_p) if self.min_p > 0 else -inf

    @property
    def kernels_filter(self) -> bool:
        """Return whether the kernels have all filters that are set: see `Ops.choose`."""
        others = _FILTERS.keys() - _KERNEL_FILTERS
        return all(getattr(self, name) == _FILTERS[name] for name in others)

    @property
    def changes_logits(self) -> bool:
        """Return whether there is a bias, a penalty or a ban of n-grams."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repeat_penalty != 1
        return bool(self.logit_bias or penalties or self.no_repeat_ngram)


@dataclass(frozen=True, kw_only=True)
class Options(SamplingParams):
    """The options of a continuation."""

    max_tokens: int = option(
        128,
        "Generate at most this many tokens.",
        Range(lambda tokens: tokens >= 1, "1 or more, or -1 for no limit"),
        kind=LIMIT,
        aliases=("-n",),
    )
    min_tokens: int = option(
        0, "Let no end token and no stop string end the text before it has so many.", AT_LEAST_0
    )
    beams: int | None = option(
        None,
        "Search for the likeliest texts, with up to N side by side, in place of drawing one.",
        between(1, 128),
        metavar="N",
    )
    length_penalty: float = option(
        1.0,
        "Divide the log-probability of a text of --beams by its tokens ** X; a higher X favours "
        "longer texts.",
        between(-10, 10),
    )
    early_stopping: Literal[False, True, "never"] = option(
        False,
        "When N texts have ended, end --beams at once (true), when no better text is likely "
        "(false), or when none is possible (never); false if not set.",
        show_default=False,
    )
    seed: int | None = option(
        None,
        "Seed of the random choices: the same seed gives the same text; random if not set.",
        Range(lambda seed: 0 <= seed < 2**64, "from 0 to 2**64 - 1, or -1 for a random one"),
        kind=SEED,
        aliases=("-s",),
    )
    stop: Sequence[str] = option(
        (),
        "End the text before this string; repeatable.",
        Range(lambda stops: "" not in stops, "strings that are not empty"),
        metavar="TEXT",
    )
    include_stop: bool = option(False, "Keep the stop string in the text.")
    bad_words: Sequence[str] = option(
        (),
        "Never write this text, in whatever tokens; repeatable.",
        Range(lambda words: all(map(_is_word, words)), "strings that are not empty, in Unicode"),
        metavar="TEXT",
    )
    stop_token_ids: Sequence[int] = option((), kind=IDS, row=False)  # end the text like `stop`
    regex: str | None = option(
        None,
        "Make the whole text match this regular expression, such as ' [0-9]{4}'.",
        metavar="REGEX",
    )
    json_schema: str | None = option(
        None,
        "Make the text JSON, on one line, that is valid by this schema.",
        kind=SCHEMA,
        metavar="FILE|TEXT",
        text_form=Range(lambda text: text.lstrip().startswith("{"), "begin with {"),
    )
    grammar: str | None = option(
        None,
        "Make the text match this grammar, in the syntax of Lark or in llama.cpp's GBNF.",
        metavar="FILE|TEXT",
        text_form=Range(
            lambda text: re.search(r"\b(start|root)\s*:", text) is not None,
            "have a rule start: or root ::=",
        ),
    )
    choices: Sequence[str] | None = option(
        None,
        "Make the text one of these, after a space; repeatable.",
        CHOICES,
        metavar="A,B,C",
        callback=split_commas,
    )
    edits: Sequence[AnyEdit] = option((), kind=EDITS)  # a command applies --edit to all rows
    use_cache: bool = option(
        True,
        "Cache keys and values of earlier tokens, or compute the whole text for each token.",
        flag="--cache/--no-cache",
        row=False,
    )
    ignore_eos: bool = option(False, "Never choose the end token.", row=False)
    special: bool = option(
        False,
        "Read names of special tokens, such as <|endoftext|>, in the text as these tokens.",
        row=False,
    )
    overflow: Overflow = option(
        "error",
        "If the text exceeds the context: refuse it (error), drop the start of the prompt "
        "(truncate), or drop the oldest half whenever it is full (shift).",
        row=False,
    )
    top_logprobs: int = option(0, range=AT_LEAST_0, row=False)

    def __post_init__(self) -> None:
        if isinstance(self.choices, str):  # which is also a sequence of strings
            raise OptionTypeError("choices", f"must be a list or None, not {brief(self.choices)}")
        super().__post_init__()
        constraints = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(constraints) > 1:
            raise OptionError(constraints[1], "must be the only constraint of a text")
        changed = {name: v for name, v in vars(self).items() if v != getattr(Options, name)}
        check_search(changed, self.beams)
        if self.beams and self.overflow == "shift":
            raise OptionError("overflow", "cannot be shift in a beam search")
        if self.min_tokens > self.max_tokens:
            raise OptionError(
                "min_tokens", f"must be at most max_tokens, which is {self.max_tokens}"
            )

    @cached_property
    def constraint(self) -> Constraint | None:
        """Return the constraint of the text, or None; it may not be valid: see `validate`."""
        for name in CONSTRAINTS:
            value = getattr(self, name)
            if value is not None:
                text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                return Constraint(name, text)
        return None

    def validate(self) -> None:
        """Compile the constraint; raise OptionError, or ResourceError without llguidance."""
        if self.constraint:
            _ = self.constraint.grammar

    def with_row(self, row: Mapping[str, Any]) -> Self:
        """Return these options, replaced by those of a row.

        Its constraint replaces any other, and its edits come after the others.
        """
        options = self
        if any(row.get(name) is not None for name in CONSTRAINTS):
            options = replace(self, **dict.fromkeys(CONSTRAINTS))  # type: ignore[arg-type]
        changed = super(Options, options).with_row(row)
        if row.get("edits") is not None:
            changed = replace(changed, edits=[*self.edits, *changed.edits])
        return changed

    @cached_property  # rows may share their options
    def sampling(self) -> SamplingParams:
        """Return the part that says how to choose a token."""
        return SamplingParams(**{f.name: getattr(self, f.name) for f in fields(SamplingParams)})

    def with_seed(self, seed: int | None = None) -> Self:
        """Return these options with a seed: their seed, or else `seed`, or else a random one."""
        if self.seed is not None:
            return self
        return replace(self, seed=draw_seed() if seed is None else seed)


@dataclass(frozen=True, kw_only=True)
class Samples(Declared):
    """The number of texts that a row of a job gets."""

    n: int = option(1, range=SAMPLES)


def check_search(options: Mapping[str, Any], beams: int | None) -> None:
    """Raise OptionError if some options that were set do not fit a search, or need one."""
    complaint = "cannot be set in a beam search, which draws nothing"
    for name, value in (_OF_DRAW if beams else OF_SEARCH).items():
        if options.get(name, value) != value:
            raise OptionError(name, complaint if beams else "applies only to a beam search")


class OptionFields(TypedDict, total=False):
    """The fields of `Options`, as type checkers see the keywords of a function."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    no_repeat_ngram: int
    logit_bias: Mapping[int, float] | Mapping[str, float] | Sequence[tuple[Token, float] | str]
    max_tokens: int
    min_tokens: int
    beams: int | None
    length_penalty: float
    early_stopping: Literal[False, True, "never"]
    seed: int | None
    stop: str | Sequence[str]
    include_stop: bool
    bad_words: str | Sequence[str]
    stop_token_ids: Sequence[int]
    regex: str | None
    json_schema: str | Mapping[str, Any] | None
    grammar: str | None
    choices: Sequence[str] | None
    edits: AnyEdit | Sequence[AnyEdit]
    use_cache: bool
    ignore_eos: bool
    special: bool
    overflow: Overflow
    top_logprobs: int


def draw_seed() -> int:
    """Return a random seed."""
    return int.from_bytes(os.urandom(4), "little")
