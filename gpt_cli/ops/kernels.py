"""What numba compiles: the loops behind `numba_ops`.

All numbers are float32, and numbers of a row lie side by side; rows may lie apart. Shapes: T rows,
K = n_in, P panels of COLUMNS columns (see `pack_rows`); for attention B batch, H heads, T queries,
S keys, D head size.

LLVM vectorizes plain loops well, but it does not keep two dozen vectors of partial sums in
registers by itself. So the innermost loop of every product, the tile, is written in LLVM's own
language; everything else is Python. (All of it is in one file, as numba compiles anew only when
the file of a function has changed.)
"""

import numba
import numpy as np
from llvmlite import binding, ir
from numba import carray, njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.ufunc import omppool  # noqa: F401  # an ImportError where OpenMP is missing

# Its threads are at work in 2 us, numba's own in 75: longer than many of these operations take.
numba.config.THREADING_LAYER = "omp"

_features = binding.get_host_cpu_features()
LANES = 16 if _features.get("avx512f") else 8 if _features.get("avx") else 4  # floats in a vector
COLUMNS = 2 * LANES  # of a tile: two vectors
# Rows of the highest tile: 2 partial sums a row, 2 vectors of the matrix and a number of x take
# 27 of the 32 registers of AVX-512 and ARM, or 15 of 16.
ROWS = 12 if _features.get("avx512f") or _features.get("neon") else 6

_INDEX = ir.IntType(64)
_VECTOR = ir.VectorType(ir.FloatType(), LANES)
QUERIES = 2 * ROWS  # that attention takes at a time

# Sums may be added up in any order, but there may be infinities and NaNs: they tell of damaged
# weights.
_SUMS = {"reassoc", "contract", "arcp", "nsz"}
_MASKED = np.finfo(np.float32).min  # finite: a row of padding, which sees nothing, gives no NaN
# Divisions as NumPy has them: a check of each for zero would keep loops from being vectorized.
_SETTINGS = {"nogil": True, "cache": True, "error_model": "numpy"}


# --- the tile ------------------------------------------------------------------------------------


def make_tile(rows):
    """Make a function for numba's code: y (rows, COLUMNS) = x (rows, K) @ w (K, COLUMNS) + bias.

    tile(x, x_start, x_stride, w, w_start, K, bias, y, y_start, y_stride): contiguous float32 arrays
    of any shape, where in it the first element lies, and how far apart rows are, in elements. Those
    of w lie one behind the other. bias (COLUMNS,).
    """

    @intrinsic
    def tile(
        typingctx,
        x, x_start, x_stride,
        w, w_start, K,
        bias,
        y, y_start, y_stride,
    ):  # fmt: skip
        index = types.intp
        signature = types.void(x, index, index, w, index, index, bias, y, index, index)
        return signature, lambda *given: _generate(rows, *given)

    return tile


def _generate(rows, context, builder, signature, args):
    """Write the code of a tile of so many rows."""
    x_start, x_stride, w_start, K, y_start, y_stride = (args[i] for i in (1, 2, 4, 5, 8, 9))

    def place(argument, start):
        array = context.make_array(signature.args[argument])(context, builder, args[argument])
        return builder.gep(array.data, [start])

    def row(pointer, stride, number):
        return builder.gep(pointer, [builder.mul(stride, _INDEX(number))])

    def halves(pointer):
        places = (builder.gep(pointer, [_INDEX(start)]) for start in (0, LANES))
        return [builder.bitcast(place, _VECTOR.as_pointer()) for place in places]

    def load(pointer):
        return builder.load(pointer, align=4)

    def every_lane(number):
        undefined = ir.Constant(_VECTOR, ir.Undefined)
        first = builder.insert_element(undefined, number, ir.IntType(32)(0))
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        return builder.shuffle_vector(first, undefined, lanes)

    multiply_add = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fmuladd.v{LANES}f32"
    )
    x_rows = [row(place(0, x_start), x_stride, number) for number in range(rows)]
    w_first, y_first = place(3, w_start), place(7, y_start)
    bias = [load(half) for half in halves(place(6, _INDEX(0)))]
    # LLVM turns these places in memory into registers.
    sums = [[cgutils.alloca_once_value(builder, half) for half in bias] for _ in x_rows]
    for pair in sums:
        for total, half in zip(pair, bias, strict=True):
            builder.store(half, total)

    with cgutils.for_range(builder, K) as loop:
        # Nothing may be moved across this: unrolled, the loop would need more registers.
        builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)
        w_row = [load(half) for half in halves(row(w_first, loop.index, COLUMNS))]
        for x_row, pair in zip(x_rows, sums, strict=True):
            number = every_lane(builder.load(builder.gep(x_row, [loop.index])))
            for total, half in zip(pair, w_row, strict=True):
                added = builder.call(multiply_add, [half, number, builder.load(total)])
                builder.store(added, total)
    for number, pair in enumerate(sums):
        for total, half in zip(pair, halves(row(y_first, y_stride, number)), strict=True):
            builder.store(builder.load(total), half, align=4)
    return context.get_dummy_value()


_highest, _8_rows, _4_rows, _2_rows, _1_row = (make_tile(rows) for rows in (ROWS, 8, 4, 2, 1))


# --- the smallest parts, which are compiled into those that call them --------------------------


@intrinsic
def _pointer(typingctx, array, start):
    """The address of the element of an array that lies `start` elements after its first."""

    def generate(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.gep(data, [args[1]])

    return types.CPointer(array.dtype)(array, types.intp), generate


@njit
def _head(array, b, h):
    """The rows of one head: of (B, H, S, D), the view (S, D or more) of array[b, h].

    numba knows that its inner axis has no gaps, which it does not know of a slice; only such loops
    are vectorized.
    """
    start = (b * array.strides[0] + h * array.strides[1]) // 4
    return carray(_pointer(array, start), (array.shape[2], array.strides[2] // 4))


@intrinsic
def _power_of_two(typingctx, exponent):
    """2 to the power of an integer from -126 to 127, put together from the bits of a float32."""

    def generate(context, builder, signature, args):
        bits = builder.shl(builder.add(args[0], ir.IntType(32)(127)), ir.IntType(32)(23))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(types.int32), generate


@njit(fastmath={"contract"})  # in this order only, also in functions that add up in any
def exp(x):
    """e to the power of x, to within 2 units in the last place; 0 below -87, e^88 above 88.

    e^x = 2^n e^f with a whole n and |f| <= ln(2)/2, where a short Taylor series is exact enough.
    NumPy's would do as well, but numba calls it number by number; this is done for whole vectors.
    """
    too_small = x < np.float32(-87)
    x = np.float32(0) if too_small else x
    x = np.float32(88) if x > np.float32(88) else x
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    # ln(2) in two parts, of which the first has so few digits that its product with n is exact.
    f = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    series = np.float32(1 / 5040)
    for coefficient in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
        series = series * f + np.float32(coefficient)
    return np.float32(0) if too_small else series * _power_of_two(np.int32(n))


@njit(fastmath={"contract"}, error_model="numpy")
def gelu_new(x):
    """x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), by tanh(u) = 2/(1 + e^-2u) - 1."""
    u = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
    return x / (np.float32(1) + exp(np.float32(-2) * u))


@intrinsic
def _maximum(typingctx, one, other):
    """The larger of two numbers, or NaN if one is that. Loops of `max` stay unvectorized."""

    def generate(context, builder, signature, args):
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType()] * 2)
        return builder.call(
            cgutils.get_or_insert_function(builder.module, kind, "llvm.maximum.f32"), args
        )

    return types.float32(types.float32, types.float32), generate


@njit(fastmath=_SUMS, error_model="numpy")
def _softmax(row, n):
    """Replace the first n numbers of a row by their softmax."""
    largest = row[0]
    for place in range(1, n):
        largest = _maximum(largest, row[place])
    total = np.float32(0)
    for place in range(n):
        row[place] = exp(row[place] - largest)
        total += row[place]
    share = np.float32(1) / total
    for place in range(n):
        row[place] *= share


@njit
def _multiply(x, x_start, x_stride, T, w, w_start, K, bias, y, y_start, y_stride):
    """T rows of tiles, one below the other: y (T, COLUMNS) = x (T, K) @ panel w + bias."""
    r = 0
    while r < T:
        x_at, y_at = x_start + r * x_stride, y_start + r * y_stride
        if T - r >= ROWS:
            _highest(x, x_at, x_stride, w, w_start, K, bias, y, y_at, y_stride)
            r += ROWS
        elif T - r >= 8:
            _8_rows(x, x_at, x_stride, w, w_start, K, bias, y, y_at, y_stride)
            r += 8
        elif T - r >= 4:
            _4_rows(x, x_at, x_stride, w, w_start, K, bias, y, y_at, y_stride)
            r += 4
        elif T - r >= 2:
            _2_rows(x, x_at, x_stride, w, w_start, K, bias, y, y_at, y_stride)
            r += 2
        else:
            _1_row(x, x_at, x_stride, w, w_start, K, bias, y, y_at, y_stride)
            r += 1


# --- what `numba_ops` calls ---------------------------------------------------------------------


@njit("void(f4[:,::1], f4[:,:,::1], i8)", **_SETTINGS)
def pack_rows(part, panels, first):
    """Put rows of a matrix (K, n_out), from its row `first` on, into its panels (P, K, COLUMNS).

    The columns of a panel lie side by side, so that a product reads it from beginning to end.
    """
    rows, n_out = part.shape
    for p in range(len(panels)):
        start = p * COLUMNS
        for k in range(rows):
            for c in range(min(COLUMNS, n_out - start)):
                panels[p, first + k, c] = part[k, start + c]


@njit("void(f4[:,::1], f4[:,:,::1], i8)", **_SETTINGS)
def pack_columns(part, panels, first):
    """Put columns of a matrix, given as the rows of `part`, from column `first` on, into panels."""
    columns, K = part.shape
    for p in range(first // COLUMNS, -(-(first + columns) // COLUMNS)):
        start = p * COLUMNS - first  # where the panel begins in `part`
        for k in range(K):
            for c in range(max(0, -start), min(COLUMNS, columns - start)):
                panels[p, k, c] = part[start + c, k]


@njit("b1(f4[:,:,::1], f4[:,::1], i8[::1], i8[::1], i8, f4[:,::1])", parallel=True, **_SETTINGS)
def embed(wte, wpe, ids, positions, vocabulary, y):
    """Add columns of the packed wte (P, C, COLUMNS) to rows of wpe: y (T, C).

    Returns False, and does nothing, where an id or a position is out of range.
    """
    for t in range(len(ids)):
        if not (0 <= ids[t] < vocabulary and 0 <= positions[t] < len(wpe)):
            return False
    for t in prange(len(ids)):
        panel, column = divmod(ids[t], COLUMNS)
        for c in range(y.shape[1]):
            y[t, c] = wte[panel, c, column] + wpe[positions[t], c]
    return True


@njit(
    "void(f4[:,::1], f4[::1], f4[::1], f4, f4[:,::1])", parallel=True, fastmath=_SUMS, **_SETTINGS
)
def layer_norm(x, weight, bias, epsilon, y):
    """Normalize x (T, C) into the first C columns of y."""
    T, C = x.shape
    for t in prange(T):
        mean = np.float32(0)
        for c in range(C):
            mean += x[t, c]
        mean /= np.float32(C)
        variance = np.float32(0)
        for c in range(C):
            variance += (x[t, c] - mean) ** 2
        scale = np.float32(1) / np.sqrt(variance / np.float32(C) + epsilon)
        for c in range(C):
            y[t, c] = (x[t, c] - mean) * scale * weight[c] + bias[c]


@njit(
    "void(f4[:,:], f4[:,:,::1], f4[::1], b1, f4[:,::1])",
    parallel=True, fastmath=_SUMS, **_SETTINGS,
)  # fmt: skip
def linear(x, w, bias, gelu, y):
    """y (T, P * COLUMNS or more) = x (T, K) @ packed w (P, K, COLUMNS) + bias, maybe through GELU.

    A panel stays in the cache, that of its thread, while all rows of x pass by.
    """
    (T, K), x_stride = x.shape, x.strides[0] // 4
    for number in prange(len(w)):
        first = np.int64(number) * COLUMNS
        panel_bias = np.zeros(COLUMNS, np.float32)
        for c in range(min(COLUMNS, len(bias) - first)):  # it may be shorter, or empty
            panel_bias[c] = bias[first + c]
        if not gelu:
            _multiply(x, 0, x_stride, T, w, first * K, K, panel_bias, y, first, y.shape[1])
            continue
        # In a place of its own a tile is one run of numbers, long enough to be vectorized.
        tile = np.empty(ROWS * COLUMNS, np.float32)
        for start in range(0, T, ROWS):
            rows = min(ROWS, T - start)
            _multiply(
                x, start * x_stride, x_stride, rows, w, first * K, K, panel_bias, tile, 0, COLUMNS
            )
            for place in range(rows * COLUMNS):
                tile[place] = gelu_new(tile[place])
            for t in range(rows):
                for c in range(COLUMNS):
                    y[start + t, first + c] = tile[t * COLUMNS + c]


@njit(
    "void(f4[:,:,:,:], f4[:,:,:,:], f4[:,:,:,:], f4, b1[:,:,:,::1], f4[:,:,::1])",
    parallel=True, fastmath=_SUMS, **_SETTINGS,
)  # fmt: skip
def attend_one(q, keys, values, scale, visible, y):
    """Attention of one query a row: q (B, H, 1, D) -> y (B, 1, H * D or more)."""
    B, H, _, D = q.shape
    S = keys.shape[2]
    for task in prange(B * H):
        b, h = divmod(np.int64(task), H)
        query, k, v = _head(q, b, h)[0], _head(keys, b, h), _head(values, b, h)
        shares = np.empty(S, np.float32)
        for s in range(S):
            score = np.float32(0)
            for d in range(D):
                score += query[d] * k[s, d]
            shares[s] = score * scale
        for s in range(S):
            if not visible[b % len(visible), 0, 0, s]:
                shares[s] = _MASKED
        _softmax(shares, S)
        mixed = np.zeros(D, np.float32)
        for s in range(S):
            for d in range(D):
                mixed[d] += shares[s] * v[s, d]
        for d in range(D):
            y[b, 0, h * D + d] = mixed[d]


@njit(
    "void(f4[:,:,:,:], f4[:,:,:,:], f4[:,:,:,:], f4, b1[:,:,:,::1], f4[:,:,::1])",
    parallel=True, fastmath=_SUMS, **_SETTINGS,
)  # fmt: skip
def attend_many(q, keys, values, scale, visible, y):
    """Attention of many queries: q (B, H, T, D) -> y (B, T, H * D or more).

    Some queries at a time, so that their scores stay in the cache; they need no score of the keys
    that come after all of them.
    """
    B, H, T, D = q.shape
    S = keys.shape[2]
    key_panels, value_panels = -(-S // COLUMNS), -(-D // COLUMNS)
    for task in prange(B * H):
        b, h = divmod(np.int64(task), H)
        queries, k, v = _head(q, b, h), _head(keys, b, h), _head(values, b, h)
        packed_k = np.zeros((key_panels, D, COLUMNS), np.float32)  # keys transposed
        for s in range(S):
            for d in range(D):
                packed_k[s // COLUMNS, d, s % COLUMNS] = k[s, d] * scale
        packed_v = np.zeros((value_panels, S, COLUMNS), np.float32)
        for s in range(S):
            for d in range(D):
                packed_v[d // COLUMNS, s, d % COLUMNS] = v[s, d]
        width = key_panels * COLUMNS
        shares = np.empty((QUERIES, width), np.float32)
        mixed = np.empty((QUERIES, COLUMNS), np.float32)
        nothing = np.zeros(COLUMNS, np.float32)
        for start in range(0, T, QUERIES):
            rows = min(QUERIES, T - start)
            seen = S - T + start + rows
            for p in range(-(-seen // COLUMNS)):
                _multiply(
                    queries, start * queries.shape[1], queries.shape[1], rows,
                    packed_k, p * D * COLUMNS, D, nothing,
                    shares, p * COLUMNS, width,
                )  # fmt: skip
            for r in range(rows):
                for s in range(seen):
                    if not visible[b % len(visible), 0, start + r, s]:
                        shares[r, s] = _MASKED
                _softmax(shares[r], seen)
            for p in range(value_panels):
                _multiply(
                    shares, 0, width, rows,
                    packed_v, p * S * COLUMNS, seen, nothing,
                    mixed, 0, COLUMNS,
                )  # fmt: skip
                for r in range(rows):
                    for d in range(p * COLUMNS, min(D, (p + 1) * COLUMNS)):
                        y[b, start + r, h * D + d] = mixed[r, d - p * COLUMNS]


@njit("void(f4[:,:], f8[::1])", parallel=True, fastmath=_SUMS, **_SETTINGS)
def log_normalizer(logits, y):
    """Logarithm of the sum of exp(logits) in each row of (B, V) -> y (B,)."""
    B, V = logits.shape
    stride = logits.strides[0] // 4
    for b in prange(B):
        row = carray(_pointer(logits, np.int64(b) * stride), (V,))
        largest = row[0]
        for place in range(1, V):
            largest = _maximum(largest, row[place])
        total = 0.0
        for start in range(0, V, 256):  # short sums in float32, their sum in float64
            part = np.float32(0)
            for place in range(start, min(V, start + 256)):
                part += exp(row[place] - largest)
            total += part
        y[b] = largest + np.log(total)
