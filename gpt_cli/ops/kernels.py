"""Constants and layouts that the kernels in C and in CUDA share."""

from gpt_cli.folder import config
from gpt_cli.ops.contract import Array

# In the order of the enums `activation` and `known_step`.
ACTIVATIONS = (None, *config.ACTIVATIONS)
KNOWN_STEPS = (None, "scores", "pattern")
LARGEST_TOP_K = 1024  # in `choose`: for more, NumPy's sort is faster


def strides(x: Array) -> dict[str, int]:
    """Return the strides of x (B, H, T, D) in floats, by their names in the structs."""
    b, h, t, _ = x.strides
    return {"b_stride": b // 4, "h_stride": h // 4, "t_stride": t // 4}
