"""The options of sampling; `gpt_cli.generation.sampling` applies them.

Nothing here imports NumPy, because `--help` reads the declarations.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gpt_cli.options.declare import AT_LEAST_0, BIASES, Declared, Range, between, option

# The range of a divisor of logits; outside of it, float32 soon gives 0 or infinity.
_DIVISORS = Range(lambda divisor: 1e-6 <= divisor <= 1e6, "from 1e-06 to 1e+06")
_TEMPERATURES = Range(lambda t: t == 0 or _DIVISORS.contains(t), f"0, or {_DIVISORS.name}")
_TOP_P = Range(lambda p: 0 < p <= 1, "above 0 and at most 1")
_BIASES = Range(
    lambda biases: all(id >= 0 and -100 <= bias <= 100 for id, bias in biases),
    "token ids with numbers from -100 to 100",
)


@dataclass(frozen=True, kw_only=True)
class SamplingParams(Declared):
    """The options of sampling."""

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
    logit_bias: Sequence[tuple[int, float]] = option(
        (),
        "Add BIAS to the logit of a token, such as -100 to ban it; repeatable.",
        _BIASES,
        kind=BIASES,
        metavar="TOKEN_ID=BIAS",
    )

    @property
    def changes_logits(self) -> bool:
        """Return whether there is a bias or a penalty."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repeat_penalty != 1
        return bool(self.logit_bias or penalties)
