"""The arguments and constants of the kernels are those of Python: a kernel tells its own."""

import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import gpt_cli.ops
from gpt_cli.folder.dtypes import GROUP
from gpt_cli.ops import kernels
from gpt_cli.ops.cuda import compiler, decoding, plans, structs
from support.cuda_kernels import FORMATS
from support.emulated_kernels import Card, compile_kernels, read_source

FILES = ("arithmetic.cu", "structs.cu", "logits.cu", "sampling.cu", "pass_memory.cu")
OPS = Path(gpt_cli.ops.__file__).parent
EXPRESSIONS = (
    *("PANEL", "SLOTS", "WARP", "GROUP", "SPAN", "ROW_UNIT", "UNIT_BYTES", "ROW_THREADS"),
    *("CANDIDATES", "CHOICE_ARRAYS", "PASS_WARPS", "PADDING", "TILE_KEYS"),
    *("PARTIAL_SUMS", "LOG_SUM_STEP"),
    "sizeof(row_memory)",
)


def told(dtype, expressions):
    """Return the values of expressions in the kernels."""
    lines = "".join(f"values[{i}] = {text};\n" for i, text in enumerate(expressions))
    source = f"{read_source(FILES)}KERNEL tell(int64_t *values) {{\n{lines}}}\n"
    module = compile_kernels(source, (f"-DFORMAT={FORMATS.index(dtype)}",), Card())
    values = np.zeros(len(expressions), np.int64)
    module.get_function("tell")((1,), (1,), (np.uint64(values.ctypes.data),))
    return dict(zip(expressions, values.tolist(), strict=True))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_structs_and_constants_are_those_of_python(dtype):
    kinds = structs.types()
    sizes = {f"sizeof(struct {name})": kind.itemsize for name, kind in kinds.items()}
    values = told(dtype, [*EXPRESSIONS, *sizes])
    assert {name: values[name] for name in sizes} == sizes
    assert values["sizeof(row_memory)"] <= plans._ROW_MEMORY
    assert values["sizeof(struct layer)"] == plans._LAYER_BYTES
    expected = {
        "PANEL": plans.PANEL, "SLOTS": plans.SLOTS, "WARP": plans.WARP, "GROUP": GROUP,
        "SPAN": plans.SPAN, "ROW_UNIT": plans.LAYOUTS[dtype].unit_rows,
        "UNIT_BYTES": plans.LAYOUTS[dtype].unit_bytes, "ROW_THREADS": plans._ROW_THREADS,
        "PASS_WARPS": plans.PASS_WARPS, "PADDING": plans._PADDING,
        "TILE_KEYS": plans._TILE_KEYS, "PARTIAL_SUMS": plans.PARTIAL_SUMS,
        "LOG_SUM_STEP": plans.LOG_SUM_STEP,
    }  # fmt: skip
    assert {name: values[name] for name in expected} == expected


def test_constants_of_the_choice_are_those_of_the_kernels(native):
    values = told("float32", EXPRESSIONS)
    assert values["CHOICE_ARRAYS"] == decoding.CHOICE_ARRAYS
    assert values["CANDIDATES"] == kernels.LARGEST_TOP_K


@pytest.mark.parametrize(
    ("enum", "names"),
    [
        ("activation", [str(name or "none").upper() for name in kernels.ACTIVATIONS]),
        ("format", [name.upper() for name in FORMATS]),
    ],
)
def test_enums_have_the_order_of_python(enum, names):
    (body,) = re.findall(rf"^enum {enum} {{(.*?)}};", compiler.source(FILES), re.M | re.S)
    assert re.findall(r"\w+", body) == names


def test_fields_have_their_places():
    kind = structs.types()["linear"]
    assert kind.names[:2] == ("w", "bias")
    assert kind.fields["w"][0] == structs.types()["matrix"]
    offsets = [kind.fields[name][1] for name in kind.names]
    assert all(first < second for first, second in pairwise(offsets))
    assert structs.types()["choose"].fields["top_p"][0] == np.float64


# Numbers that are no constants of the arithmetic; powers of two are exact in every type.
PLAIN = {0.0, 0.5, 1.0, 2.0, 127.0}
NUMBER = re.compile(r"(?<![\w.])(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?[fF]?(?![\w.])")


def numbers_of(path):
    """Return the numbers with a point or an exponent in the code of a file."""
    text = re.sub(r'/\*.*?\*/|//[^\n]*|"[^"\n]*"', "", path.read_text("utf-8"), flags=re.S)
    return {abs(float(number.rstrip("fF"))) for number in NUMBER.findall(text)}


def test_the_constants_of_the_arithmetic_stand_in_one_place():
    constants = numbers_of(OPS / "constants.inc")
    assert {12582912.0, 1.44269504, 1e-30} < constants
    bounds = {3.40282347e38, 1.70141173e38}  # the largest float and its half, in comparisons
    sources = [*OPS.glob("cuda/*.cu"), *OPS.glob("native/*.[ch]")]
    assert len(sources) > 12
    for path in sources:
        assert numbers_of(path) <= PLAIN | bounds, path
