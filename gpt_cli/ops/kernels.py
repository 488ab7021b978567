"""What numba compiles: the loops behind `numba_ops`.

Numbers are float32 where nothing else is said, and those of a row lie side by side; rows may lie
apart. Shapes: T rows, K = n_in, P panels of COLUMNS columns (see `pack_rows`); for attention B
batch, H heads, T queries, S keys, D head size.

LLVM vectorizes plain loops well, but it does not keep two dozen vectors of partial sums in
registers by itself. So the innermost loop of every product, the tile, is written in LLVM's own
language, and so are single instructions that numba has no name for; everything else is Python.
(All of it is in one file, as numba compiles anew only when the file of a function has changed.)
"""

import itertools

import numba
import numpy as np
from llvmlite import binding, ir
from numba import carray, njit, prange, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.ufunc import omppool  # noqa: F401  # an ImportError where OpenMP is missing

from gpt_cli.ops.int8 import BLOCK, LARGEST_ACTIVATION, SMALLEST

# Its threads are at work in 2 us, numba's own in 75: longer than many of these operations take.
numba.config.THREADING_LAYER = "omp"


def _features():
    """What the processor can do that numba compiles for: this one, unless its settings differ."""
    given = numba.config.CPU_FEATURES
    if given is None:
        return {name for name, there in binding.get_host_cpu_features().items() if there}
    return {name[1:] for name in given.split(",") if name.startswith("+")}


_there = _features()
_AVX512 = {"avx512f", "avx512bw"} <= _there
LANES = 16 if _AVX512 else 8 if "avx2" in _there else 4  # floats in a vector
COLUMNS = 2 * LANES  # of a tile: two vectors
# Rows of the highest tile: 2 partial sums a row, 2 vectors of the matrix and a number of x take
# 27 of the 32 registers of AVX-512 and ARM, or 15 of 16.
ROWS = 12 if _AVX512 or "neon" in _there else 6
_VNNI = "avx512vnni" in _there if _AVX512 else LANES == 8 and "avxvnni" in _there

# Of matrices of int8: see `pack_int8_rows`.
_INT8_ROWS = ROWS // 2  # of the highest tile: 4 partial sums a row
_SCALES = 2 * COLUMNS  # bytes before those of the weights
BLOCK_BYTES = _SCALES + BLOCK * COLUMNS

_INDEX = ir.IntType(64)
_BYTE, _SHORT, _INT, _FLOAT = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_INTS = ir.VectorType(_INT, LANES)
QUERIES = 2 * ROWS  # that attention takes at a time
FEW = 8  # rows are done by one thread before others have begun

# Sums may be added up in any order, but there may be infinities and NaNs: they tell of damaged
# weights.
_SUMS = {"reassoc", "contract", "arcp", "nsz"}
_MASKED = np.finfo(np.float32).min  # finite: a row of padding, which sees nothing, gives no NaN


def _kernel(signature, **settings):
    """Decorate what `numba_ops` calls: `prepare` compiles it, for arguments of these types."""
    # Divisions as NumPy has them: a check of each for zero would keep loops from being vectorized.
    compiler = njit(nogil=True, cache=True, error_model="numpy", **settings)

    def decorate(function):
        dispatcher = compiler(function)
        dispatcher.wanted = signature
        return dispatcher

    return decorate


def prepare(cache_dtype, *kernels) -> None:
    """Compile kernels, or load what an earlier process has compiled.

    Only when they are needed: it takes up to seconds for each, and 10 ms where it is loaded.
    """
    for kernel in kernels:
        kernel.disable_compile(False)
        kernel.compile(kernel.wanted.replace("cache", "f4" if cache_dtype == np.float32 else "u2"))
        kernel.disable_compile()


# --- the tiles -----------------------------------------------------------------------------------


def _at(builder, pointer, offset, kind=None):
    """Return the address `offset` elements further on, as one of `kind`."""
    place = builder.gep(pointer, [offset])
    return place if kind is None else builder.bitcast(place, kind.as_pointer())


def _halves(builder, pointer, element):
    """Load two vectors of LANES elements that lie side by side."""
    vector = ir.VectorType(element, LANES)
    return [
        builder.load(_at(builder, pointer, _INDEX(start), vector), align=1) for start in (0, LANES)
    ]


def _every_lane(builder, number):
    """Return a vector that has the number in every lane."""
    undefined = ir.Constant(ir.VectorType(number.type, LANES), ir.Undefined)
    first = builder.insert_element(undefined, number, _INT(0))
    lanes = ir.Constant(ir.VectorType(_INT, LANES), [0] * LANES)
    return builder.shuffle_vector(first, undefined, lanes)


def _call(builder, name, *args):
    """Call a function of LLVM whose result is of the type of its first argument."""
    kind = ir.FunctionType(args[0].type, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _multiply_add(builder, one, other, total):
    return _call(builder, f"llvm.fmuladd.v{LANES}f32", one, other, total)


def _store_row(builder, values, pointer):
    """Store two vectors of floats side by side."""
    for value, start in zip(values, (0, LANES), strict=True):
        builder.store(value, _at(builder, pointer, _INDEX(start), _VECTOR), align=4)


def _stay_in_place(builder):
    """Let nothing be moved across this: unrolled, a loop would need more registers."""
    builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)


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

    x_rows = [row(place(0, x_start), x_stride, number) for number in range(rows)]
    w_first, y_first = place(3, w_start), place(7, y_start)
    bias = _halves(builder, place(6, _INDEX(0)), _FLOAT)
    # LLVM turns these places in memory into registers.
    sums = [[cgutils.alloca_once_value(builder, half) for half in bias] for _ in x_rows]
    for pair in sums:
        for total, half in zip(pair, bias, strict=True):
            builder.store(half, total)

    with cgutils.for_range(builder, K) as loop:
        _stay_in_place(builder)
        w_row = _halves(builder, row(w_first, loop.index, COLUMNS), _FLOAT)
        for x_row, pair in zip(x_rows, sums, strict=True):
            number = _every_lane(builder, builder.load(builder.gep(x_row, [loop.index])))
            for total, half in zip(pair, w_row, strict=True):
                added = _multiply_add(builder, half, number, builder.load(total))
                builder.store(added, total)
    for number, pair in enumerate(sums):
        _store_row(builder, map(builder.load, pair), row(y_first, y_stride, number))
    return context.get_dummy_value()


_highest, _8_rows, _4_rows, _2_rows, _1_row = (make_tile(rows) for rows in (ROWS, 8, 4, 2, 1))


def make_int8_tile(rows):
    """Make the same for a matrix of int8: see `pack_int8_rows`, and for x `_round_row`.

    tile(digits, offsets, steps, row, blocks, w, w_start, bias, y, y_start, y_stride): rows of x
    from `row` on, of (T, blocks, 2, BLOCK), (T, blocks) and (T,); a panel of w from byte w_start.
    """

    @intrinsic
    def tile(
        typingctx,
        digits, offsets, steps, row, blocks,
        w, w_start,
        bias,
        y, y_start, y_stride,
    ):  # fmt: skip
        index = types.intp
        signature = types.void(
            digits, offsets, steps, index, index, w, index, bias, y, index, index
        )
        return signature, lambda *given: _generate_int8(rows, *given)

    return tile


def _generate_int8(rows, context, builder, signature, args):
    """Write the code of a tile of so many rows, over weights of int8."""
    first_row, blocks, w_start, y_start, y_stride = (args[i] for i in (3, 4, 6, 9, 10))

    def array(argument, kind=None):
        data = context.make_array(signature.args[argument])(context, builder, args[argument]).data
        return data if kind is None else builder.bitcast(data, kind.as_pointer())

    digits, offsets, steps = array(0, _BYTE), array(1), array(2)
    panel = _at(builder, array(5, _BYTE), w_start)
    halves, places = range(2), range(2)  # of the columns; of the digits: high, low
    zero = ir.Constant(_VECTOR, [0.0] * LANES)
    totals = [[cgutils.alloca_once_value(builder, zero) for _ in halves] for _ in range(rows)]
    sums = [[[cgutils.alloca_once(builder, _INTS) for _ in halves] for _ in places] for _ in totals]
    for pair in totals:
        for total in pair:
            builder.store(zero, total)

    with cgutils.for_range(builder, blocks) as block:
        for place in itertools.chain(*sums):
            for total in place:
                builder.store(ir.Constant(_INTS, [0] * LANES), total)
        numbers = [
            builder.add(builder.mul(builder.add(first_row, _INDEX(row)), blocks), block.index)
            for row in range(rows)
        ]
        x_rows = [
            _at(builder, digits, builder.mul(number, _INDEX(2 * BLOCK)), _INT) for number in numbers
        ]
        scales = _at(builder, panel, builder.mul(block.index, _INDEX(BLOCK_BYTES)))
        weights = _at(builder, scales, _INDEX(_SCALES), _INT)
        with cgutils.for_range(builder, _INDEX(BLOCK // 4)) as four:
            _stay_in_place(builder)
            start = builder.mul(four.index, _INDEX(COLUMNS))
            w_row = [
                _as_factor(builder, half)
                for half in _halves(builder, _at(builder, weights, start), _INT)
            ]
            for x_row, pairs in zip(x_rows, sums, strict=True):
                for place, pair in zip(places, pairs, strict=True):
                    at = builder.add(four.index, _INDEX(place * BLOCK // 4))
                    x_four = _every_lane(builder, builder.load(_at(builder, x_row, at)))
                    for total, half in zip(pair, w_row, strict=True):
                        builder.store(_add_fours(builder, builder.load(total), half, x_four), total)
        scale = [
            builder.bitcast(builder.shl(builder.zext(half, _INTS), _same(16)), _VECTOR)
            for half in _halves(builder, builder.bitcast(scales, _SHORT.as_pointer()), _SHORT)
        ]
        for number, pair, (high, low) in zip(numbers, totals, sums, strict=True):
            offset = _every_lane(builder, builder.load(_at(builder, offsets, number)))
            for half in halves:
                whole = builder.shl(builder.load(high[half]), _same(8))
                whole = builder.sub(builder.add(whole, builder.load(low[half])), offset)
                whole = builder.sitofp(whole, _VECTOR)
                added = _multiply_add(builder, whole, scale[half], builder.load(pair[half]))
                builder.store(added, pair[half])

    bias = _halves(builder, array(7), _FLOAT)
    for row, pair in enumerate(totals):
        at = builder.add(first_row, _INDEX(row))
        step = _every_lane(builder, builder.load(_at(builder, steps, at)))
        result = [
            _multiply_add(builder, builder.load(total), step, half)
            for total, half in zip(pair, bias, strict=True)
        ]
        start = builder.add(y_start, builder.mul(y_stride, _INDEX(row)))
        _store_row(builder, result, _at(builder, array(8), start))
    return context.get_dummy_value()


def _same(number):
    return ir.Constant(_INTS, [number] * LANES)


def _as_factor(builder, weights):
    """Prepare weights, 4 bytes for each lane, for `_add_fours`."""
    if _VNNI:
        return weights
    shorts = builder.bitcast(weights, ir.VectorType(_SHORT, 2 * LANES))
    eight = ir.Constant(shorts.type, [8] * 2 * LANES)
    # The even bytes and the odd ones, each as a number of 16 bits.
    return builder.lshr(builder.shl(shorts, eight), eight), builder.lshr(shorts, eight)


def _add_fours(builder, total, weights, x):
    """In each lane, add the products of 4 weights, which are unsigned, and 4 int8 of x."""
    if _VNNI:
        return _call(builder, f"llvm.x86.avx512.vpdpbusd.{32 * LANES}", total, weights, x)
    shorts = builder.bitcast(x, ir.VectorType(_SHORT, 2 * LANES))
    eight = ir.Constant(shorts.type, [8] * 2 * LANES)
    pairs = builder.ashr(builder.shl(shorts, eight), eight), builder.ashr(shorts, eight)
    for one, other in zip(weights, pairs, strict=True):
        # LLVM knows this pattern: it is a single instruction of most processors.
        wide = ir.VectorType(_INT, 2 * LANES)
        products = builder.mul(builder.sext(one, wide), builder.sext(other, wide))
        for start in (0, 1):
            lanes = ir.Constant(_INTS, list(range(start, 2 * LANES, 2)))
            half = builder.shuffle_vector(products, ir.Constant(wide, ir.Undefined), lanes)
            total = builder.add(total, half)
    return total


_int8_highest, _int8_4_rows, _int8_2_rows, _int8_1_row = (
    make_int8_tile(rows) for rows in (_INT8_ROWS, 4, 2, 1)
)


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
    size = array.itemsize
    start = (b * array.strides[0] + h * array.strides[1]) // size
    return carray(_pointer(array, start), (array.shape[2], array.strides[2] // size))


@njit
def _part(array, start, count):
    """So many elements of an array that lie side by side, from number `start` on.

    numba knows that they are counted from 0. Of an index that may be negative it does not, and then
    tests each, which keeps a loop from being vectorized.
    """
    return carray(_pointer(array, start), (count,))


@njit
def _row(array, t):
    """Row t of an array (T, n), whose rows may lie apart."""
    return _part(array, t * (array.strides[0] // array.itemsize), array.shape[1])


@intrinsic
def _power_of_two(typingctx, exponent):
    """2 to the power of an integer from -126 to 127, put together from the bits of a float32."""

    def generate(context, builder, signature, args):
        bits = builder.shl(builder.add(args[0], _INT(127)), _INT(23))
        return builder.bitcast(bits, _FLOAT)

    return types.float32(types.int32), generate


@intrinsic
def _float_of(typingctx, bits):
    """The float32 of these bits."""

    def generate(context, builder, signature, args):
        return builder.bitcast(args[0], _FLOAT)

    return types.float32(types.int32), generate


@intrinsic
def _bits_of(typingctx, number):
    """The bits of a float32."""

    def generate(context, builder, signature, args):
        return builder.bitcast(args[0], _INT)

    return types.int32(types.float32), generate


@njit
def _float_of_half(bits):
    """The float32 of the bits of a float16, where the processor does not know these."""
    upper = np.int32(bits & np.uint16(0x7FFF)) << np.int32(13)
    if upper >= np.int32(0x7C00 << 13):  # infinite, or no number
        number = _float_of(upper | np.int32(0x7F800000))
    else:
        number = _float_of(upper) * np.float32(2.0**112)  # the exponents count from elsewhere
    return -number if bits & np.uint16(0x8000) else number


@intrinsic
def _float(typingctx, number):
    """A number as float32, which may be the bits of a float16: numba has no such type."""

    def generate(context, builder, signature, args):
        if number == types.float32:
            return args[0]
        if {"f16c", "neon"} & _there:
            return builder.fpext(builder.bitcast(args[0], ir.HalfType()), _FLOAT)
        return context.compile_internal(builder, _float_of_half.py_func, signature, args)

    return types.float32(number), generate


@njit
def _half_of_float(number):
    """The bits of the float16 next to a float32, where the processor does not know these."""
    bits = _bits_of(number)
    sign, size = (bits >> np.int32(16)) & np.int32(0x8000), bits & np.int32(0x7FFFFFFF)
    if size > np.int32(0x7F800000):
        half = np.int32(0x7E00)  # no number
    elif size >= np.int32(0x47800000):  # 65536 or more
        half = np.int32(0x7C00)
    elif size < np.int32(0x38800000):  # below 2^-14 they have less digits the smaller they are
        half = np.int32(np.rint(_float_of(size) * np.float32(2.0**24)))
    else:
        even = np.int32(0xFFF) + ((size >> np.int32(13)) & np.int32(1))
        half = (size + even - np.int32(112 << 23)) >> np.int32(13)
    return np.uint16(sign | half)


@intrinsic
def _kept(typingctx, number, kind):
    """A float32 as what is of the type of `kind`: float32, or the bits of a float16."""

    def generate(context, builder, signature, args):
        if kind == types.float32:
            return args[0]
        if {"f16c", "neon"} & _there:
            return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), _SHORT)
        of_one = kind(types.float32)
        return context.compile_internal(builder, _half_of_float.py_func, of_one, args[:1])

    return kind(number, kind), generate


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
        return _call(builder, "llvm.maximum.f32", *args)

    return types.float32(types.float32, types.float32), generate


@njit(fastmath=_SUMS)
def _largest(row):
    largest = row[0]
    for place in range(1, len(row)):
        largest = _maximum(largest, row[place])
    return largest


@njit(fastmath=_SUMS, error_model="numpy")
def _softmax(row):
    """Replace numbers by their softmax."""
    largest = _largest(row)
    total = np.float32(0)
    for place in range(len(row)):
        row[place] = exp(row[place] - largest)
        total += row[place]
    share = np.float32(1) / total
    for place in range(len(row)):
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


@njit
def _multiply_int8(digits, offsets, steps, row, T, w, w_start, bias, y, y_start, y_stride):
    """The same as `_multiply` with int8 weights, for T rows of x from `row` on."""
    blocks = offsets.shape[1]
    r = 0
    while r < T:
        at, y_at = row + r, y_start + r * y_stride
        if T - r >= _INT8_ROWS:
            _int8_highest(digits, offsets, steps, at, blocks, w, w_start, bias, y, y_at, y_stride)
            r += _INT8_ROWS
        elif T - r >= 4:
            _int8_4_rows(digits, offsets, steps, at, blocks, w, w_start, bias, y, y_at, y_stride)
            r += 4
        elif T - r >= 2:
            _int8_2_rows(digits, offsets, steps, at, blocks, w, w_start, bias, y, y_at, y_stride)
            r += 2
        else:
            _int8_1_row(digits, offsets, steps, at, blocks, w, w_start, bias, y, y_at, y_stride)
            r += 1


@njit(error_model="numpy")
def _round_row(x, digits, offsets, steps, t):
    """Round a row x (n_in,) to whole steps, as row t of what is rounded: see `int8`.

    A number of steps is 256 * high + low, both int8: digits (T, blocks, 2, BLOCK), with zeros after
    the row's end. As weights are stored with 128 added, products of a block are too large by
    offsets (T, blocks): 128 times the sum of its numbers.
    """
    n_in, blocks = len(x), offsets.shape[1]
    largest = np.float32(0)
    for k in range(n_in):
        largest = _maximum(largest, abs(x[k]))
    steps[t] = largest / np.float32(LARGEST_ACTIVATION)
    per_step = np.float32(LARGEST_ACTIVATION) / max(largest, np.float32(SMALLEST))
    for block in range(blocks):
        start = block * BLOCK
        part = _part(x, start, min(BLOCK, n_in - start))
        high_digits = _part(digits, (t * blocks + block) * 2 * BLOCK, BLOCK)
        low_digits = _part(digits, ((t * blocks + block) * 2 + 1) * BLOCK, BLOCK)
        total = np.int32(0)
        for place in range(len(part)):
            number = np.int32(np.floor(part[place] * per_step + np.float32(0.5)))
            high = (number + np.int32(128)) >> np.int32(8)
            high_digits[place] = high
            low_digits[place] = number - (high << np.int32(8))
            total += number
        offsets[t, block] = np.int32(128) * total


@njit
def _put_scale(panels, panel, block, column, scale):
    """Store the upper half of a float32, rounded, the lower byte first."""
    bits = np.int32(0x7FC00000) if np.isnan(scale) else _bits_of(scale) + np.int32(0x8000)
    panels[panel, block, 2 * column] = bits >> np.int32(16)
    panels[panel, block, 2 * column + 1] = bits >> np.int32(24)


@njit
def _int8_weight(panels, panel, k, column):
    """One weight of a matrix that `pack_int8_rows` has packed."""
    block, place = divmod(k, BLOCK)
    low = np.int32(panels[panel, block, 2 * column])
    high = np.int32(panels[panel, block, 2 * column + 1])
    scale = _float_of((high << np.int32(24)) + (low << np.int32(16)))
    at = _SCALES + (place // 4 * COLUMNS + column) * 4 + place % 4
    return np.float32(np.int32(panels[panel, block, at]) - np.int32(128)) * scale


@njit
def _in_range(numbers, end):
    inside = True
    for number in numbers:
        inside = inside and 0 <= number < end
    return inside


@njit
def _take_bias(bias, first, panel_bias):
    """Copy the bias of the columns from `first` on; it may be shorter, or empty."""
    for c in range(COLUMNS):
        panel_bias[c] = bias[first + c] if first + c < len(bias) else np.float32(0)


@njit
def _put_gelu(tile, rows, y, row, column):
    """Put a tile, which is one run of numbers, through GELU, and its rows where they belong."""
    for place in range(rows * COLUMNS):
        tile[place] = gelu_new(tile[place])
    for t in range(rows):
        for c in range(COLUMNS):
            y[row + t, column + c] = tile[t * COLUMNS + c]


# --- what `numba_ops` calls ---------------------------------------------------------------------


@_kernel("void(f4[:,::1], f4[:,:,::1], i8)")
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


@_kernel("void(f4[:,::1], f4[:,:,::1], i8)")
def pack_columns(part, panels, first):
    """Put columns of a matrix, given as the rows of `part`, from column `first` on, into panels."""
    columns, K = part.shape
    for p in range(first // COLUMNS, -(-(first + columns) // COLUMNS)):
        start = p * COLUMNS - first  # where the panel begins in `part`
        for k in range(K):
            for c in range(max(0, -start), min(COLUMNS, columns - start)):
                panels[p, k, c] = part[start + c, k]


@_kernel("b1(f4[:,:,::1], f4[:,::1], i8[::1], i8[::1], i8, f4[:,::1])")
def embed(wte, wpe, ids, positions, vocabulary, y):
    """Add columns of the packed wte (P, C, COLUMNS) to rows of wpe: y (T, C).

    Returns False, and does nothing, where an id or a position is out of range.
    """
    if not _in_range(ids, vocabulary) or not _in_range(positions, len(wpe)):
        return False
    for t in range(len(ids)):
        panel, column = divmod(ids[t], COLUMNS)
        for c in range(y.shape[1]):
            y[t, c] = wte[panel, c, column] + wpe[positions[t], c]
    return True


@njit(fastmath=_SUMS, error_model="numpy")
def _normalize(x, weight, bias, epsilon, y):
    """Layer norm of one row, into the first numbers of y."""
    C = len(x)
    mean = np.float32(0)
    for c in range(C):
        mean += x[c]
    mean /= np.float32(C)
    variance = np.float32(0)
    for c in range(C):
        variance += (x[c] - mean) ** 2
    scale = np.float32(1) / np.sqrt(variance / np.float32(C) + epsilon)
    for c in range(C):
        y[c] = (x[c] - mean) * scale * weight[c] + bias[c]


@_kernel("void(f4[:,::1], f4[::1], f4[::1], f4, f4[:,::1])", parallel=True)
def layer_norm(x, weight, bias, epsilon, y):
    """Normalize x (T, C) into the first C columns of y."""
    T = len(x)
    if T < FEW:
        for t in range(T):
            _normalize(_row(x, t), weight, bias, epsilon, _row(y, t))
    else:
        for t in prange(T):
            _normalize(_row(x, np.int64(t)), weight, bias, epsilon, _row(y, np.int64(t)))


@njit
def _multiply_row(x, x_start, x_stride, T, w, w_start, K, bias, y, y_start, y_stride):
    """The same as `_multiply`, of a single row: what calls this is compiled in half of the time."""
    _1_row(x, x_start, x_stride, w, w_start, K, bias, y, y_start, y_stride)


def _over_panels(multiply):
    """Make a function for numba's code that does a product panel by panel, with `multiply`."""

    @njit
    def over_panels(x, w, bias, gelu, y, panels):
        """The columns of a product that some panels of w give, maybe through GELU.

        The arguments are those of `linear`, and a range. A panel stays in the cache, that of its
        thread, while all rows of x pass by.
        """
        (T, K), x_stride = x.shape, x.strides[0] // 4
        panel_bias = np.empty(COLUMNS, np.float32)
        tile = np.empty(ROWS * COLUMNS, np.float32)
        for number in panels:
            first, w_start = number * COLUMNS, number * COLUMNS * K
            _take_bias(bias, first, panel_bias)
            if not gelu:
                multiply(x, 0, x_stride, T, w, w_start, K, panel_bias, y, first, y.shape[1])
                continue
            # In a place of its own a tile is one run of numbers, long enough to be vectorized.
            for start in range(0, T, ROWS):
                rows = min(ROWS, T - start)
                multiply(
                    x, start * x_stride, x_stride, rows,
                    w, w_start, K, panel_bias, tile, 0, COLUMNS,
                )  # fmt: skip
                _put_gelu(tile, rows, y, start, first)

    return over_panels


_multiply_panels, _multiply_row_panels = map(_over_panels, (_multiply, _multiply_row))


@_kernel("void(f4[:,:], f4[:,:,::1], f4[::1], b1, f4[:,::1])", parallel=True)
def linear(x, w, bias, gelu, y):
    """y (T, P * COLUMNS or more) = x (T, K) @ packed w (P, K, COLUMNS) + bias, maybe through GELU.

    bias may be empty.
    """
    for panel in prange(len(w)):
        one = range(np.int64(panel), np.int64(panel) + 1)
        _multiply_panels(x, w, bias, gelu, y, one)


@njit(fastmath=_SUMS)
def _scores(query, keys, shares):
    """The products of a query (D,) and keys (S, D or more): shares (S,). Four at a time."""
    (S, stride), D = keys.shape, len(query)
    for four in range(S // 4):
        s = 4 * four
        one, two = _part(keys, s * stride, D), _part(keys, (s + 1) * stride, D)
        three, last = _part(keys, (s + 2) * stride, D), _part(keys, (s + 3) * stride, D)
        a = b = c = e = np.float32(0)
        for d in range(D):
            a += query[d] * _float(one[d])
            b += query[d] * _float(two[d])
            c += query[d] * _float(three[d])
            e += query[d] * _float(last[d])
        shares[s], shares[s + 1], shares[s + 2], shares[s + 3] = a, b, c, e
    for s in range(S // 4 * 4, S):
        key = _part(keys, s * stride, D)
        a = np.float32(0)
        for d in range(D):
            a += query[d] * _float(key[d])
        shares[s] = a


@njit(fastmath=_SUMS)
def _mix(shares, values, mixed):
    """Add up shares (S,) of values (S, D or more) in mixed (D,). Four at a time."""
    (S, stride), D = values.shape, len(mixed)
    for d in range(D):
        mixed[d] = np.float32(0)
    for four in range(S // 4):
        s = 4 * four
        one, two = _part(values, s * stride, D), _part(values, (s + 1) * stride, D)
        three, last = _part(values, (s + 2) * stride, D), _part(values, (s + 3) * stride, D)
        a, b, c, e = shares[s], shares[s + 1], shares[s + 2], shares[s + 3]
        for d in range(D):
            mixed[d] += (
                a * _float(one[d]) + b * _float(two[d]) + c * _float(three[d]) + e * _float(last[d])
            )
    for s in range(S // 4 * 4, S):
        value, a = _part(values, s * stride, D), shares[s]
        for d in range(D):
            mixed[d] += a * _float(value[d])


@njit
def _store_head(rows, places, D):
    """Copy the first D numbers of each row, rounded to what is kept."""
    for t in range(len(rows)):
        x, y = _row(rows, t), _row(places, t)
        for d in range(D):
            y[d] = _kept(x[d], y[d])


@njit
def _mask(shares, visible, start):
    """Let shares count for nothing where `visible`, from its number `start` on, says so."""
    part = _part(visible, start, len(shares))
    for s in range(len(shares)):
        shares[s] = shares[s] if part[s] else _MASKED


_ATTEND = "void(f4[:,:,:,:], cache[:,:,:,:], cache[:,:,:,:], f4, b1[:,:,:,::1], f4[:,:,::1])"


@_kernel("void(f4[:,:,:,:], cache[:,:,:,:])", parallel=True)
def store(x, y):
    """Copy keys or values (B, H, T, D) to another place, rounded to what is kept."""
    B, H, T, D = x.shape
    if B * T < FEW:
        for row in range(B * H):
            _store_head(_head(x, row // H, row % H), _head(y, row // H, row % H), D)
    else:
        for row in prange(B * H):
            b, h = divmod(np.int64(row), H)
            _store_head(_head(x, b, h), _head(y, b, h), D)


@njit
def _attend_head(query, keys, values, scale, visible, y):
    """Attention of one query of one head, (D,) -> y (D,); `visible` (S,), or empty: then all is."""
    shares = np.empty(len(keys), np.float32)
    _scores(query, keys, shares)
    for s in range(len(shares)):
        shares[s] *= scale
    if len(visible):
        _mask(shares, visible, 0)
    _softmax(shares)
    _mix(shares, values, y)


@_kernel(_ATTEND, parallel=True)
def attend_one(q, keys, values, scale, visible, y):
    """Attention of one query a row: q (B, H, 1, D) -> y (B, 1, H * D or more).

    `visible` may be empty: then all is.
    """
    B, H, _, D = q.shape
    seen = visible.shape[3]
    for task in prange(B * H):
        b, h = divmod(np.int64(task), H)
        query = _part(_row(_head(q, b, h), 0), 0, D)
        mask = _part(visible, b % max(1, len(visible)) * seen, seen)
        mixed = _part(y, b * y.shape[2] + h * D, D)
        _attend_head(query, _head(keys, b, h), _head(values, b, h), scale, mask, mixed)


@_kernel(_ATTEND, parallel=True, fastmath=_SUMS)
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
                packed_k[s // COLUMNS, d, s % COLUMNS] = _float(k[s, d]) * scale
        packed_v = np.zeros((value_panels, S, COLUMNS), np.float32)
        for s in range(S):
            for d in range(D):
                packed_v[d // COLUMNS, s, d % COLUMNS] = _float(v[s, d])
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
                row = _part(shares, r * width, seen)
                _mask(row, visible, (b % len(visible) * T + start + r) * S)
                _softmax(row)
            for p in range(value_panels):
                _multiply(
                    shares, 0, width, rows,
                    packed_v, p * S * COLUMNS, seen, nothing,
                    mixed, 0, COLUMNS,
                )  # fmt: skip
                for r in range(rows):
                    for d in range(p * COLUMNS, min(D, (p + 1) * COLUMNS)):
                        y[b, start + r, h * D + d] = mixed[r, d - p * COLUMNS]


@njit(fastmath=_SUMS)
def _sum_of_exp(row, largest):
    total = np.float32(0)
    for place in range(len(row)):
        total += exp(row[place] - largest)
    return total


@njit
def _log_sum_of_exp(row):
    largest = _largest(row)
    total = 0.0
    for start in range(0, len(row), 1024):  # short sums in float32, their sum in float64
        total += _sum_of_exp(_part(row, start, min(1024, len(row) - start)), largest)
    return largest + np.log(total)


@_kernel("void(f4[:,:], f8[::1])", parallel=True)
def log_normalizer(logits, y):
    """Logarithm of the sum of exp(logits) in each row of (B, V) -> y (B,)."""
    if len(logits) == 1:
        y[0] = _log_sum_of_exp(_row(logits, 0))
        return
    for b in prange(len(logits)):
        y[b] = _log_sum_of_exp(_row(logits, np.int64(b)))


# --- the same for int8 ----------------------------------------------------------------------------


@_kernel("void(i1[:,::1], f4[:,::1], u1[:,:,::1], i8)")
def pack_int8_rows(part, scales, panels, first):
    """Put rows of a matrix (n_in, n_out), from row `first` on, into panels of its columns.

    panels (P, blocks, BLOCK_BYTES): of each block COLUMNS scales as bfloat16; then 4 weights of
    each column that follow each other in it, then the next 4, up to BLOCK. Weights are bytes with
    128 added, as instructions multiply an unsigned byte with a signed one.
    """
    rows, n_out = part.shape
    for panel in range(len(panels)):
        columns = min(COLUMNS, n_out - panel * COLUMNS)
        for row in range(rows):
            block, place = divmod(first + row, BLOCK)
            at = _SCALES + place // 4 * COLUMNS * 4 + place % 4
            for c in range(columns):
                panels[panel, block, at + 4 * c] = part[row, panel * COLUMNS + c] + 128
        for row in range(len(scales)):
            for c in range(columns):
                _put_scale(panels, panel, first // BLOCK + row, c, scales[row, panel * COLUMNS + c])


@_kernel("void(i1[:,::1], f4[:,::1], u1[:,:,::1], i8)")
def pack_int8_columns(part, scales, panels, first):
    """Put columns of a matrix, given as the rows of `part`, from column `first` on, into panels."""
    columns, n_in = part.shape
    for column in range(columns):
        panel, c = divmod(first + column, COLUMNS)
        for k in range(n_in):
            block, place = divmod(k, BLOCK)
            at = _SCALES + (place // 4 * COLUMNS + c) * 4 + place % 4
            panels[panel, block, at] = part[column, k] + 128
        for block in range(scales.shape[1]):
            _put_scale(panels, panel, block, c, scales[column, block])


@_kernel("b1(u1[:,:,::1], f4[:,::1], i8[::1], i8[::1], i8, f4[:,::1])")
def embed_int8(wte, wpe, ids, positions, vocabulary, y):
    """The same as `embed`, of a wte in int8."""
    if not _in_range(ids, vocabulary) or not _in_range(positions, len(wpe)):
        return False
    for t in range(len(ids)):
        panel, column = divmod(ids[t], COLUMNS)
        for c in range(y.shape[1]):
            y[t, c] = _int8_weight(wte, panel, c, column) + wpe[positions[t], c]
    return True


@njit
def _multiply_int8_row(digits, offsets, steps, row, T, w, w_start, bias, y, y_start, y_stride):
    """The same as `_multiply_int8`, of a single row."""
    blocks = offsets.shape[1]
    _int8_1_row(digits, offsets, steps, row, blocks, w, w_start, bias, y, y_start, y_stride)


def _over_int8_panels(multiply):
    """The same as `_over_panels`, with w in int8 and x as `_round_row` leaves it."""

    @njit
    def over_panels(digits, offsets, steps, w, bias, gelu, y, panels):
        T, blocks = offsets.shape
        panel_bias = np.empty(COLUMNS, np.float32)
        tile = np.empty(ROWS * COLUMNS, np.float32)
        for number in panels:
            first, w_start = number * COLUMNS, number * blocks * BLOCK_BYTES
            _take_bias(bias, first, panel_bias)
            if not gelu:
                multiply(digits, offsets, steps, 0, T, w, w_start, panel_bias, y, first, y.shape[1])
                continue
            for start in range(0, T, ROWS):
                rows = min(ROWS, T - start)
                multiply(
                    digits, offsets, steps, start, rows, w, w_start, panel_bias, tile, 0, COLUMNS
                )
                _put_gelu(tile, rows, y, start, first)

    return over_panels


_multiply_int8_panels, _multiply_int8_row_panels = map(
    _over_int8_panels, (_multiply_int8, _multiply_int8_row)
)


@_kernel("void(f4[:,:], u1[:,:,::1], f4[::1], b1, f4[:,::1])", parallel=True)
def linear_int8(x, w, bias, gelu, y):
    """The same as `linear`, with w in int8 and x rounded to 16 bits."""
    T, blocks = len(x), w.shape[1]
    digits = np.zeros((T, blocks, 2, BLOCK), np.int8)
    offsets = np.empty((T, blocks), np.int32)
    steps = np.empty(T, np.float32)
    if T < FEW:
        for t in range(T):
            _round_row(_row(x, t), digits, offsets, steps, t)
    else:
        for t in prange(T):
            _round_row(_row(x, np.int64(t)), digits, offsets, steps, np.int64(t))
    for panel in prange(len(w)):
        one = range(np.int64(panel), np.int64(panel) + 1)
        _multiply_int8_panels(digits, offsets, steps, w, bias, gelu, y, one)


# --- a recorded pass -----------------------------------------------------------------------------
#
# Most of its operations are done in less time than it takes to wake threads for one. So the threads
# are woken once for all of them. The first one goes through the program; where an operation has
# parts, it puts them up, and each thread takes the next part that nobody has taken. Nobody waits
# for a thread that has taken nothing, and a thread that finds nothing to take for a while goes back
# to sleep: what else runs here may have its processor. It is woken again some rows later.
#
# A row of a program is an operation, in how many parts, where its input and output are, and more:
#   LAYER_NORM    x, y, n, weight, bias
#   LINEAR        x, y, n_in, w, bias, panels, length of the bias, whether GELU follows
#   LINEAR_INT8   the same, and where x is put as digits, offsets and steps: see `_round_row`
#   ADD           x, y, n, what is added
#   STORE         x, y, D, H, for how many tokens there is room
#   ATTEND        q, y, D, keys, values, H, for how many tokens there is room
LAYER_NORM, LINEAR, LINEAR_INT8, ADD, STORE, ATTEND = range(6)

# The places of a board that threads use, in different cache lines.
_PUT_UP, _DONE, BOARD = 0, 16, 32
_NOTHING = 0xFFFFFFFF  # no row has so many parts
_PATIENCE = 20_000  # looks at the board in vain: some 50 us
_TOGETHER = 48  # rows, some four layers, after which all threads are woken again


def _pointer_to(kind):
    """Make a function for numba's code: an address, which is an integer, as a pointer."""

    @intrinsic
    def pointer(typingctx, address):
        def generate(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(kind)(types.int64), generate

    return pointer


_bytes_at, _digits_at, _ints_at, _floats_at = map(
    _pointer_to, (types.uint8, types.int8, types.int32, types.float32)
)


@intrinsic
def _like(typingctx, array, address):
    """An address as a pointer to numbers of an array's type."""

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[1], context.get_value_type(signature.return_type))

    return types.CPointer(array.dtype)(array, types.int64), generate


def _place(context, builder, signature, args):
    """Return the address of an element: args are an array and an index."""
    data = context.make_array(signature.args[0])(context, builder, args[0]).data
    return builder.gep(data, [args[1]])


def _atomic(what):
    """Make a function for numba's code: change a place of a board; return what was there.

    What a thread has written before one such call, others see after theirs.
    """

    @intrinsic
    def change(typingctx, board, place, number):
        def generate(context, builder, signature, args):
            place = _place(context, builder, signature, args)
            return builder.atomic_rmw(what, place, args[2], "seq_cst")

        return types.int64(board, types.intp, types.int64), generate

    return change


_put, _add = _atomic("xchg"), _atomic("add")


@intrinsic
def _look(typingctx, board, place):
    """What is at a place of a board."""

    def generate(context, builder, signature, args):
        return builder.load_atomic(_place(context, builder, signature, args), "seq_cst", 8)

    return types.int64(board, types.intp), generate


@njit
def _rounded(row):
    """Where a row of the program that is a product has its x rounded: see `_round_row`."""
    blocks = -(-row[4] // BLOCK)
    digits = carray(_digits_at(row[10]), (1, blocks, 2, BLOCK))
    return digits, carray(_ints_at(row[11]), (1, blocks)), carray(_floats_at(row[12]), (1,))


@njit
def _begin(row, number, past, kept):
    """Do a row of the program, or what comes before its parts."""
    what, x, y, n = row[0], _floats_at(row[2]), row[3], row[4]
    if what == LAYER_NORM:
        weight, bias = carray(_floats_at(row[5]), (n,)), carray(_floats_at(row[6]), (n,))
        _normalize(carray(x, (n,)), weight, bias, number, carray(_floats_at(y), (n,)))
    elif what == LINEAR_INT8:
        digits, offsets, steps = _rounded(row)
        _round_row(carray(x, (n,)), digits, offsets, steps, 0)
    elif what == ADD:
        first, second = carray(x, (n,)), carray(_floats_at(row[5]), (n,))
        out = carray(_floats_at(y), (n,))
        for place in range(n):
            out[place] = first[place] + second[place]
    elif what == STORE:
        H, room = row[5], row[6]
        heads = carray(_like(kept, y + kept.itemsize * past * n), (H, room * n))
        _store_head(carray(x, (H, n)), heads, n)


@njit
def _do_part(row, number, past, kept, part):
    """Do one of the parts of a row of the program: some columns of a product, or some heads."""
    what, parts, x, y, n = row[0], row[1], row[2], row[3], row[4]
    if what == ATTEND:
        H, size, everything = row[7], row[8] * n * kept.itemsize, np.empty(0, np.bool_)
        for h in range(H * part // parts, H * (part + 1) // parts):
            keys = carray(_like(kept, row[5] + h * size), (past + 1, n))
            values = carray(_like(kept, row[6] + h * size), (past + 1, n))
            query = carray(_floats_at(x + 4 * h * n), (n,))
            mixed = carray(_floats_at(y + 4 * h * n), (n,))
            _attend_head(query, keys, values, number, everything, mixed)
        return
    panels, gelu = row[7], row[9] != 0
    some = range(panels * part // parts, panels * (part + 1) // parts)
    bias, out = carray(_floats_at(row[6]), (row[8],)), carray(_floats_at(y), (1, panels * COLUMNS))
    if what == LINEAR:
        w = carray(_floats_at(row[5]), (panels, n, COLUMNS))
        _multiply_row_panels(carray(_floats_at(x), (1, n)), w, bias, gelu, out, some)
    else:
        w = carray(_bytes_at(row[5]), (panels, -(-n // BLOCK), BLOCK_BYTES))
        digits, offsets, steps = _rounded(row)
        _multiply_int8_row_panels(digits, offsets, steps, w, bias, gelu, out, some)


@njit
def _part_of(program, seen):
    """Which row and which part of it the board says; a part of -1 where there is none to take."""
    row, part = seen >> 32, seen & _NOTHING
    return row, part if row < len(program) and part < program[row, 1] else -1


@njit
def _take_part(program, numbers, past, kept, board):
    """Do the next part that nobody has taken. Return if there was one."""
    _, part = _part_of(program, _look(board, _PUT_UP))
    if part < 0:
        return False
    # Others may have taken it by now, and the rest; then this is one of the next row, or none.
    row, part = _part_of(program, _add(board, _PUT_UP, 1))
    if part < 0:
        return False
    _do_part(program[row], numbers[row], past, kept, part)
    _add(board, _DONE, 1)
    return True


@njit
def _lead(program, numbers, past, kept, board):
    """Do rows of the program, with the others' help."""
    for row in range(len(program)):
        _begin(program[row], numbers[row], past, kept)
        if program[row, 1]:
            _put(board, _DONE, 0)
            _put(board, _PUT_UP, row << 32)
            while _take_part(program, numbers, past, kept, board):
                pass
            while _look(board, _DONE) < program[row, 1]:
                pass
    _put(board, _PUT_UP, len(program) << 32)


@njit
def _follow(program, numbers, past, kept, board):
    """Take parts until there are none for a while, or all rows are done."""
    patience = _PATIENCE
    while patience and _look(board, _PUT_UP) >> 32 < len(program):
        taken = _take_part(program, numbers, past, kept, board)
        patience = _PATIENCE if taken else patience - 1


@_kernel("void(i8[:,::1], f4[::1], i8, cache[::1], i8[::1], i8)", parallel=True)
def repeat(program, numbers, past, kept, board, threads):
    """Do what `numba_ops.StepRecorder` has recorded for one token of a text, after `past` others.

    numbers (len(program),): the epsilon or the scale that a row needs. kept: empty, of the type of
    keys and values.
    """
    for first in range(0, len(program), _TOGETHER):
        rows, theirs = program[first : first + _TOGETHER], numbers[first : first + _TOGETHER]
        _put(board, _PUT_UP, _NOTHING)
        for thread in prange(threads):
            if thread == 0:
                _lead(rows, theirs, past, kept, board)
            else:
                _follow(rows, theirs, past, kept, board)
