"""Arrays for the tests of the compiled operations, and the order of the library's sums."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from gpt_cli.ops import Linear
from gpt_cli.ops.numpy_ops import ACTIVATIONS, NumPyOps
from support.checkpoints import filed, noise

COLUMNS, PARTIAL_SUMS = 32, 16
# Both infinities, and NaNs of several kinds.
NAN_AND_INF = np.uint32(
    [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF]
).view(np.float32)
FLOATS = ["float32", "bfloat16", "float16"]
NUMPY = NumPyOps()
# Around the sizes of vectors, tiles, panels and blocks.
sizes = st.sampled_from([1, 2, 3, 7, 13, 16, 17, 31, 32, 33, 47, 64, 65, 97, 128, 131])
rows_of_x = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 25, 31])
head_sizes = st.sampled_from([8, 16, 17, 31, 32, 33, 47, 64, 80, 97, 128])
seeds = st.integers(0, 10_000)
activations = st.sampled_from([None, *ACTIVATIONS])
at_each_level = settings(max_examples=25)


def array(name: str, *shape: int, seed: int = 0):
    return noise(name, *shape, seed=seed).astype(np.float32)


def matrix_of(dtype, *shape, seed=0):
    """Return a matrix as a checkpoint stores it, for operations with this type of weights."""
    matrix = array("matrix", *shape, seed=seed)
    return matrix if dtype in ("float32", "int8") else filed(matrix, dtype)


def assert_same_bits(found, expected):
    """Compare arrays by their bits; NaNs may differ."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    numbers = ~np.isnan(expected)
    assert np.array_equal(np.isnan(found), ~numbers)
    bits = f"u{found.itemsize}"
    assert np.array_equal(found[numbers].view(bits), expected[numbers].view(bits))


def cache_of(ops, keys, values, capacity):
    """Return one layer of a cache that holds keys and values (B, H, S, D)."""
    B, H, S, D = keys.shape
    layer = [layers[0] for layers in ops.new_cache(1, B, H, capacity, D)]
    for each in layer:
        each[...] = np.nan  # unwritten elements must not matter
    ops.store(keys, values, *layer, np.zeros(B, int), np.full(B, S))
    return layer


def multiply_add(x, y, z):
    """Return x * y + z in float32, rounded once.

    The product is exact in float64. If the sum is not, it is rounded to odd: then rounding it to
    float32 gives the result of a single rounding (S. Boldo and G. Melquiond, 2008).
    """
    product, z = np.multiply(x, y, dtype=np.float64), np.asarray(z, np.float64)
    total = product + z
    of_z = total - product
    error = (product - (total - of_z)) + (z - of_z)
    even = total.view(np.int64) & 1 == 0
    odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    return np.where((error != 0) & even, odd, total).astype(np.float32)


def chain(x, matrix, start):
    """Return start (rows, n) + x (rows, K) @ matrix (K, n), added in order along K."""
    for k in range(len(matrix)):
        start = multiply_add(x[:, k, None], matrix[k], start)
    return start


def activated(ops, x, activation):
    """Return the activation of each number, by a product with 1."""
    one = Linear(ops.place_matrix(np.eye(1, dtype=np.float32)))
    return ops.linear(x.reshape(-1, 1), one, activation).reshape(x.shape)


def sum_of(partial):
    """Return the sum of PARTIAL_SUMS numbers, added as a tree."""
    half = PARTIAL_SUMS // 2
    while half:
        partial = partial[:half] + partial[half : 2 * half]
        half //= 2
    return partial[0]


def filled_up(row):
    """Split a row into pieces of PARTIAL_SUMS numbers, padded with zeros."""
    return np.append(row, np.zeros(-len(row) % PARTIAL_SUMS, np.float32)).reshape(-1, PARTIAL_SUMS)


def added_up(row):
    """Return the sum of a row in the order of the library."""
    return sum_of(sum(filled_up(row), np.zeros(PARTIAL_SUMS, np.float32)))


def misaligned(x):
    """Return a copy of an array at an odd address."""
    room = np.empty(x.nbytes + 1, np.uint8)
    moved = room[1:].view(x.dtype).reshape(x.shape)
    moved[...] = x
    assert not moved.flags.aligned
    return moved
