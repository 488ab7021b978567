"""Kernels with other arithmetic, each broken in one place: the comparisons of bits notice it."""

import re

import numpy as np
import pytest

from gpt_cli.ops import LayerNorm, Linear
from gpt_cli.ops.cuda import plans
from support.cuda_kernels import Matrix, launch, linear, result, struct_of
from support.emulated_kernels import Card, compile_kernels, fuses, read_source
from support.native_arrays import array

DEVICE = plans.Device(processors=2, shared=232_448)
FILES = (
    "arithmetic.cu",
    "structs.cu",
    "pack.cu",
    "products.cu",
    "rows.cu",
    "logits.cu",
    "sampling.cu",
)


def is_same(found, expected):
    return found.tobytes() == expected.tobytes()


def logarithms(native):
    """Return whether the normalizers of rows have the library's bits."""
    x, y = array("logits", 40, 300), result((40,), np.float64)[0]
    job = struct_of("log_sum_exp", x=x, y=y, rows=40, n=300)
    launch("float32", plans.of_rows("log_sum_exp", 40, 300), job)
    return is_same(y, native("float32").log_normalizer(x))


def layer_norms(native):
    """Return whether normalized rows have the library's bits."""
    x, weight, bias = array("x", 9, 131), array("weight", 131), array("bias", 131)
    y = result((9, 131))[0]
    ln = struct_of("norm", weight=weight, bias=bias, epsilon=1e-5)
    job = struct_of("layer_norm", ln=ln, x=x, y=y, rows=9, C=131)
    launch("float32", plans.layer_norm(9, 131), job)
    return is_same(y, native("float32").layer_norm(x, LayerNorm(weight, bias, 1e-5)))


def product(native, weight, x, bias):
    """Return whether x @ weight + bias, by the smallest tile, has the library's bits."""
    packed = Matrix(weight, None, "float32", transposed=False, device=DEVICE)
    y = linear(x, packed, "float32", tile=plans.LAYOUTS["float32"].tiles[-1], bias=bias)
    ops = native("float32")
    return is_same(y, ops.linear(x, Linear(ops.place_matrix(weight), bias)))


def products(native):
    return product(native, array("matrix", 70, 20), array("x", 3, 70), array("bias", 20))


def zeros(native):
    """Return whether sums of -0 keep their sign, as the library's do."""
    minus = np.full(9, -0.0, np.float32)
    return product(native, np.full((5, 9), -1, np.float32), np.zeros((3, 5), np.float32), minus)


def unchanged(source):
    return source


def of_neighbours(source):
    """Let `tree_sum` add neighbours first."""
    halves = "for (int half = PARTIAL_SUMS / 2; half; half /= 2)"
    assert halves in source
    return source.replace(halves, "for (int half = 1; half < PARTIAL_SUMS; half *= 2)")


def split(source):
    """Let a tile add every chain in two parts."""
    start = source.index("DEVICE void add_products(")
    end = source.index("\n}\n", start)
    function = source[start:end].replace("\n{\n", "\n{\n    float others[T::HIGH][T::WIDE] = {};\n")
    chain = r"(sums)(\[i\]\[j\] = multiply_add\(x\[k\], w\[j\]\[k\], )(sums)(\[i\]\[j\]\);)"
    function, count = re.subn(chain, r"(k < 2 ? \1 : others)\2(k < 2 ? \3 : others)\4", function)
    assert count
    function += "\n    for (int i = 0; i < T::HIGH; i++)\n        for (int j = 0; j < T::WIDE; j++)"
    return f"{source[:start]}{function}\n            sums[i][j] += others[i][j];{source[end:]}"


def padded_with_zeros(source):
    """Pad the rows of matrices with +0."""
    padding = "row_padding = -0.0f"
    assert padding in source
    return source.replace(padding, "row_padding = 0.0f")


FUSED = ("-O2", "-ffp-contract=fast")


@pytest.mark.parametrize(
    ("change", "flags", "compare"),
    [
        pytest.param(
            unchanged, FUSED, logarithms,
            marks=pytest.mark.skipif(not fuses(), reason="this processor cannot fuse"),
        ),
        (of_neighbours, (), layer_norms),
        (split, (), products),
        (padded_with_zeros, (), zeros),
    ],
    ids=["products fused with sums", "another tree", "a chain in two parts", "padding of +0"],
)  # fmt: skip
def test_a_change_of_the_arithmetic_is_noticed(native, monkeypatch, change, flags, compare):
    assert compare(native)
    source = change(read_source(FILES))
    module = compile_kernels(source, ("-DFORMAT=0",), Card(), flags)
    monkeypatch.setattr("support.cuda_kernels.kernels", lambda *_: module)
    assert not compare(native)
