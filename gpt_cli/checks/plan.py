"""The options of a benchmark. Nothing here imports NumPy, because `--help` reads them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gpt_cli.options.declare import Declared, between, option

ModeName: TypeAlias = Literal["cache on", "cache off", "speculation"]  # the last with the cache

_COUNTS = between(1, 1_000_000)


@dataclass(frozen=True)
class Plan(Declared):
    """The texts and the modes to measure."""

    prompt_tokens: int = option(32, "Prompt length in tokens.", _COUNTS, aliases=("-p",))
    max_tokens: int = option(128, "Generate at most this many tokens.", _COUNTS, aliases=("-n",))
    batch: int = option(
        1,
        "Number of texts per batch.",
        _COUNTS,
        flag="--batch-size",
        aliases=("-b",),
        old_flag="--batch",
    )
    repetitions: int = option(3, "Number of runs in each mode.", _COUNTS, aliases=("-r",))
    modes: Sequence[ModeName] = option(("cache on", "cache off"))  # `ratio`: first to second
