"""Arguments for the tests of the compiled operations."""

import numpy as np
import pytest

from support.native_arrays import array


@pytest.fixture
def parts(native):
    """Return arguments of the operations with valid shapes."""
    ops = native("float32")
    heads = array("heads", 2, 3, 4, 8)
    cache = [layers[0] for layers in ops.new_cache(1, 2, 3, 40, 8)]
    ops.store(heads, heads, *cache, np.array([0, 0]), np.array([4, 4]))
    return {
        "ops": ops, "x": array("x", 2, 12), "w": ops.place_matrix(array("matrix", 12, 20)),
        "bias": array("bias", 20), "wpe": array("wpe", 6, 12), "heads": heads, "cache": cache,
    }  # fmt: skip
