"""The table of the types of weights, beside what says the same in other places."""

import re
from pathlib import Path

import numpy as np
import pytest

import gpt_cli
from gpt_cli.folder.dtypes import GROUP, NAMES, NAMES_OF_CODES, SHORT, WEIGHT_TYPES
from gpt_cli.ops.short import round_to, widen
from support.cuda_kernels import FORMATS

PACKAGE = Path(gpt_cli.__file__).parent


def test_the_order_is_that_of_the_kernels():
    assert [*NAMES] == FORMATS
    source = (PACKAGE / "ops" / "native" / "kernels.h").read_text("utf-8")
    listed = re.search(r"enum format \{(.*?)\}", source, re.DOTALL)
    assert [name.lower() for name in re.findall(r"[A-Z]+\d+", listed[1])] == [*NAMES]


def test_sizes_are_those_of_the_types():
    sizes = {name: kind.itemsize for name, kind in WEIGHT_TYPES.items()}
    assert sizes == {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1 + 2 / GROUP}
    assert {name for name, size in sizes.items() if size == 2} == {*SHORT}


@pytest.mark.parametrize("name", NAMES)
def test_the_exponent_is_set_in_what_is_not_finite_and_nowhere_else(name):
    kind = WEIGHT_TYPES[name]
    for value in (np.inf, -np.inf, np.nan, 0.0, -1.0, 65504.0, 2.0**-14):
        number = np.float32(value)
        bits = number.view(np.uint32) >> 16  # also of bfloat16, in which scales are
        if kind.is_short:
            bits = round_to(number[None], name)[0]
        is_set = int(bits) & kind.exponent == kind.exponent
        assert is_set == (not np.isfinite(value))


@pytest.mark.parametrize("name", ["float32", "int8", "float64"])
def test_only_the_16_bit_types_are_rounded_to(name):
    with pytest.raises(KeyError):
        round_to(np.ones(2, np.float32), name)
    with pytest.raises(KeyError):
        widen(np.ones(2, np.uint16), name)


def test_codes_are_those_of_safetensors():
    codes = {code: int(re.search(r"\d+", code)[0]) // 8 for code in NAMES_OF_CODES}
    assert codes == {"F32": 4, "BF16": 2, "F16": 2, "I8": 1}
