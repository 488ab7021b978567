"""The options of a request."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, Self, TypeAlias

from gpt_cli.declare import WHOLE, Range, choice, option
from gpt_cli.sampling import COUNTS, SamplingParams

Overflow: TypeAlias = Literal["error", "truncate", "shift"]


@dataclass(frozen=True, kw_only=True)
class Options(SamplingParams):
    """The options of a continuation."""

    max_tokens: int = option(
        128,
        "Generate at most this many tokens.",
        Range(lambda count: count >= 1, "1 or more"),
        aliases=("-n",),
    )
    seed: int | None = option(
        None,
        "Seed of the random choices: the same seed gives the same text; random if not set.",
        Range(lambda seed: 0 <= seed < 2**64, "from 0 to 2**64 - 1"),
        kind=WHOLE,
        aliases=("-s",),
    )
    stop: Sequence[str] = option(
        (),
        "End the text before this string; repeatable.",
        Range(lambda stops: "" not in stops, "strings that are not empty"),
    )
    include_stop: bool = option(False, "Keep the stop string in the text.")
    use_cache: bool = option(
        True,
        "Cache keys and values of earlier tokens, or compute the whole text for each token.",
        flag="--cache/--no-cache",
        row=False,
    )
    ignore_eos: bool = option(False, "Never choose the end token.", row=False)
    special: bool = option(False, "Read <|endoftext|> in the text as the special token.", row=False)
    overflow: Overflow = option(
        "error",
        "If the text exceeds the context: refuse it (error), drop the start of the prompt "
        "(truncate), or drop the oldest half whenever it is full (shift).",
        kind=choice(Overflow),
        row=False,
    )
    top_logprobs: int = option(0, range=COUNTS, row=False)

    @property
    def sampling(self) -> SamplingParams:
        """Return the part that says how to choose a token."""
        return SamplingParams(**{f.name: getattr(self, f.name) for f in fields(SamplingParams)})

    def with_seed(self, seed: int | None = None) -> Self:
        """Return these options with a seed: their own, else the one given, else a drawn one."""
        if self.seed is not None:
            return self
        return replace(self, seed=draw_seed() if seed is None else seed)


def draw_seed() -> int:
    """Return a random seed."""
    return int.from_bytes(os.urandom(4), "little")
