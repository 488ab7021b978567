"""The types of weights in memory: one table of all that depends on the type."""

from dataclasses import dataclass

GROUP = 64  # weights of an output that share a scale, in a type with groups


@dataclass(frozen=True)
class WeightType:
    """A type of weights. Only matrices are held in it; all else is in float32.

    Attributes:
        name: what `--dtype` takes.
        code: as safetensors writes it.
        stored_bytes: bytes of a weight, without its scale.
        has_groups: whether a weight is an integer times the scale of its group, in bfloat16.
            Products then round activations to integers, too.
        exponent: the bits of the exponent in the upper half of a weight, or in its scale. All are
            set in an infinity and in a NaN.
        cache_itemsize: bytes of a number in the cache of keys and values.
        pass_cost: (a, b): a pass over n > 1 tokens takes max(1.1, (n + a) / b) times as long as a
            pass over one, on a CPU (measured).
        noise: the standard deviation of relative noise on weights that stands for rounding, where
            `verify` has limits for the type; otherwise None.
    """

    name: str
    code: str
    stored_bytes: int
    has_groups: bool
    exponent: int
    cache_itemsize: int
    pass_cost: tuple[float, float]
    noise: float | None

    @property
    def itemsize(self) -> float:
        """Return the bytes of a weight, with its share of a scale."""
        return self.stored_bytes + (2 / GROUP if self.has_groups else 0)

    @property
    def is_short(self) -> bool:
        """Return whether it is a 16-bit type: one that is widened to float32 exactly."""
        return self.stored_bytes == 2


# In the order of their numbers in compressed files, and of `enum format` in the kernels.
_TYPES = (
    WeightType("float32", "F32", 4, False, 0x7F80, 4, (4, 14.2), 1e-6),
    WeightType("bfloat16", "BF16", 2, False, 0x7F80, 4, (3, 7), None),
    WeightType("float16", "F16", 2, False, 0x7C00, 4, (3, 7), None),
    WeightType("int8", "I8", 1, True, 0x7F80, 2, (4.5, 5.8), 1e-2),
)
WEIGHT_TYPES = {kind.name: kind for kind in _TYPES}
NAMES = tuple(WEIGHT_TYPES)
NAMES_OF_CODES = {kind.code: kind.name for kind in _TYPES}
SHORT = tuple(kind.name for kind in _TYPES if kind.is_short)
