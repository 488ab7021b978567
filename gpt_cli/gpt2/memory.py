"""Estimate the bytes of a model and of its results, for checks against the free memory."""

import math
from dataclasses import replace

from gpt_cli.folder.config import GPT2Config, expected_shapes, is_matrix
from gpt_cli.folder.dtypes import WEIGHT_TYPES
from gpt_cli.ops import Ops

FLOAT = 4  # bytes of a number in the results of operations


def count_parameters(config: GPT2Config) -> int:
    """Return a model's number of parameters."""
    return sum(_counts(config))


def weights_bytes(config: GPT2Config, dtype: str) -> int:
    """Return the bytes of a model's weights; only matrices are in another type than float32."""
    matrices, others = _counts(config)
    return FLOAT * others + int(WEIGHT_TYPES[dtype].itemsize * matrices)


def cache_bytes(config: GPT2Config, tokens: int, itemsize: int) -> int:
    """Return the bytes of the keys and values of tokens, of numbers of `itemsize` bytes."""
    return 2 * config.n_layer * config.n_embd * tokens * itemsize


def prefix_bytes(config: GPT2Config, ops: Ops, tokens: int) -> int:
    """Return the bytes of a prefix: the keys, values and states of its tokens."""
    states = FLOAT * config.n_embd * tokens
    return cache_bytes(config, tokens, ops.cache_type.itemsize) + states


def logits_bytes(config: GPT2Config, rows: int) -> int:
    """Return the bytes of rows of logits."""
    return FLOAT * rows * config.vocab_size


def _counts(config: GPT2Config) -> tuple[int, int]:
    """Return the numbers of parameters that are in matrices, and of all others."""
    in_matrices = 0
    others = 0
    # All layers have the same shapes, and a damaged file may claim a million layers.
    for name, shape in expected_shapes(replace(config, n_layer=1)):
        layers = config.n_layer if name.startswith("h.") else 1
        count = layers * math.prod(shape)
        if is_matrix(name, shape):
            in_matrices += count
        else:
            others += count
    return in_matrices, others
