"""The inner loop of every compiled product: a tile of the result, held in registers.

LLVM vectorizes plain loops well, but it does not keep two dozen vectors of partial sums in
registers by itself. So this one loop is written in LLVM's own language; everything around it is
Python that numba compiles.

numba keeps what it has compiled as long as kernels.py stays as it is: after a change here, touch
that file.
"""

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_features = binding.get_host_cpu_features()
LANES = 16 if _features.get("avx512f") else 8 if _features.get("avx") else 4  # floats in a vector
COLUMNS = 2 * LANES  # of a tile: two vectors
# Rows of the highest tile: 2 partial sums a row, 2 vectors of the matrix and a number of x take
# 27 of the 32 registers of AVX-512 and ARM, or 15 of 16.
ROWS = 12 if _features.get("avx512f") or _features.get("neon") else 6

_INDEX = ir.IntType(64)
_VECTOR = ir.VectorType(ir.FloatType(), LANES)


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
