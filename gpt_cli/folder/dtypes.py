"""The types in which weights are held: one table of all that depends on the type."""

from dataclasses import dataclass


@dataclass(frozen=True)
class WeightType:
    """A type of weights. Only matrices are held in it; all else is in float32.

    Attributes:
        name: what `--dtype` takes.
        code: as safetensors writes it.
        itemsize: bytes of a weight.
        cache_itemsize: bytes of a number in the cache of keys and values.
        pass_cost: (a, b): a pass over n > 1 tokens takes max(1.1, (n + a) / b) times as long as a
            pass over one, on a CPU (measured).
        noise: the standard deviation of relative noise on weights that stands for rounding, where
            `verify` has limits for the type; otherwise None.
    """

    name: str
    code: str
    itemsize: float
    cache_itemsize: int
    pass_cost: tuple[float, float]
    noise: float | None


# The order is that of their numbers in compressed files, and of `enum format` in the kernels.
_TYPES = (
    WeightType("float32", "F32", 4, 4, (4, 14.2), 1e-6),
    WeightType("bfloat16", "BF16", 2, 4, (3, 7), None),
    WeightType("float16", "F16", 2, 4, (3, 7), None),
    # A group of 64 weights shares a scale in bfloat16.
    WeightType("int8", "I8", 1 + 2 / 64, 2, (4.5, 5.8), 1e-2),
)
WEIGHT_TYPES = {kind.name: kind for kind in _TYPES}
NAMES = tuple(WEIGHT_TYPES)
NAMES_OF_CODES = {kind.code: kind.name for kind in _TYPES}
SHORT = tuple(kind.name for kind in _TYPES if kind.itemsize == 2)  # the 16-bit types
